// SPDX-License-Identifier: Apache-2.0

//! What a guest may find on its volume, sector by sector.
//!
//! Each write has a value of its own for each of its sectors, so that what is
//! read says which write it is. A sector that was never written has its *base*:
//! what the source holds, or what was found after the last crash.

use crate::disk::SECTOR;

/// What a sector holds: the number that all of it is filled with.
pub type Value = u64;

/// Sectors in a block.
pub const PER_BLOCK: usize = 8;

/// A write to a sector that may still be found there.
#[derive(Clone, Copy, Debug)]
struct Write {
    value: Value,
    begin: u64,
    /// When the guest was told of its end.
    end: Option<u64>,
    failed: bool,
    /// The guest must find it or a later one.
    owed: bool,
    /// A read has found it: nothing older may be found again.
    seen: bool,
}

#[derive(Clone, Debug, Default)]
struct Sector {
    base: Option<Value>,
    writes: Vec<Write>,
}

/// What a guest may find on its volume.
#[derive(Clone, Debug)]
pub struct Model {
    sectors: Vec<Sector>,
    clock: u64,
    writes: u64,
    reading: usize,
}

/// A guest's write in flight.
#[derive(Clone, Debug)]
pub struct Writing {
    from: usize,
    to: usize,
    begin: u64,
}

/// A guest's read in flight.
#[derive(Clone, Debug)]
pub struct Reading {
    from: usize,
    begin: u64,
    allowed: Vec<Vec<Value>>,
}

impl Model {
    /// A volume with these contents.
    pub fn new(base: impl Iterator<Item = Value>) -> Self {
        let sectors = base.map(|value| Sector {
            base: Some(value),
            writes: Vec::new(),
        });
        Self {
            sectors: sectors.collect(),
            clock: 1,
            writes: 0,
            reading: 0,
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The guest writes sectors `from` to `to`: zeros, or new values.
    pub fn begin_write(&mut self, from: usize, to: usize, zeros: bool) -> (Writing, Vec<Value>) {
        let begin = self.tick();
        self.writes += 1;
        let values: Vec<_> = (from..to)
            .map(|sector| {
                if zeros {
                    0
                } else {
                    self.writes << 16 | sector as u64
                }
            })
            .collect();
        for (sector, value) in (from..to).zip(&values) {
            self.sectors[sector].writes.push(Write {
                value: *value,
                begin,
                end: None,
                failed: false,
                owed: false,
                seen: false,
            });
        }
        (Writing { from, to, begin }, values)
    }

    /// The guest is told that a write has ended.
    pub fn end_write(&mut self, writing: &Writing, ok: bool, fua: bool) {
        let end = self.tick();
        for sector in &mut self.sectors[writing.from..writing.to] {
            for write in &mut sector.writes {
                if write.begin == writing.begin {
                    write.end = Some(end);
                    write.failed = !ok;
                    write.owed |= ok && fua;
                }
            }
            if ok && fua && self.reading == 0 {
                sector.forget();
            }
        }
    }

    /// The guest flushes; what has ended by now is owed once that has ended.
    pub fn begin_flush(&mut self) -> u64 {
        self.tick()
    }

    /// The guest is told that a flush has ended well.
    pub fn end_flush(&mut self, begin: u64) {
        for sector in &mut self.sectors {
            let mut owes = false;
            for write in &mut sector.writes {
                if !write.failed && write.end.is_some_and(|end| end < begin) {
                    write.owed = true;
                    owes = true;
                }
            }
            if owes && self.reading == 0 {
                sector.forget();
            }
        }
    }

    /// The guest reads sectors `from` to `to`.
    pub fn begin_read(&mut self, from: usize, to: usize) -> Reading {
        let begin = self.tick();
        self.reading += 1;
        let allowed = self.sectors[from..to].iter().map(Sector::current).collect();
        Reading {
            from,
            begin,
            allowed,
        }
    }

    /// The guest's read has ended with these values.
    ///
    /// # Errors
    /// What it must not have found.
    pub fn end_read(&mut self, reading: &Reading, found: Option<&[Value]>) -> Result<(), String> {
        self.reading -= 1;
        for (index, value) in found.unwrap_or_default().iter().enumerate() {
            let sector = &self.sectors[reading.from + index];
            let meanwhile = sector
                .writes
                .iter()
                .filter(|write| write.begin > reading.begin)
                .any(|write| write.value == *value);
            if !meanwhile && !reading.allowed[index].contains(value) {
                return Err(format!(
                    "a read of sector {} finds {value:#x}, allowed were {:x?}",
                    reading.from + index,
                    reading.allowed[index]
                ));
            }
        }
        if let Some(found) = found {
            self.seen(reading.from, found);
        }
        Ok(())
    }

    /// A read has found these values. Zeros say nothing: who reads what is
    /// being discarded may find either, each time.
    fn seen(&mut self, from: usize, found: &[Value]) {
        for (sector, value) in self.sectors[from..].iter_mut().zip(found) {
            let mut writes = sector.writes.iter_mut().filter(|write| write.value != 0);
            if let Some(write) = writes.find(|write| write.value == *value) {
                write.seen = true;
            }
        }
    }

    /// All that the sectors hold is read, at once.
    ///
    /// # Errors
    /// What they must not hold.
    pub fn read_all(&mut self, found: &[Value]) -> Result<(), String> {
        self.check_now(found)?;
        self.seen(0, found);
        Ok(())
    }

    /// Whether the sectors may hold these values after a crash.
    ///
    /// # Errors
    /// What they must not hold.
    pub fn check_crash(&self, found: &[Value]) -> Result<(), String> {
        for (index, (sector, value)) in self.sectors.iter().zip(found).enumerate() {
            if !sector.allows(*value) {
                return Err(format!(
                    "after a crash sector {index} holds {value:#x}, of {sector:x?}"
                ));
            }
        }
        Ok(())
    }

    /// Whether the sectors may hold these values now.
    ///
    /// # Errors
    /// What they must not hold.
    pub fn check_now(&self, found: &[Value]) -> Result<(), String> {
        for (index, (sector, value)) in self.sectors.iter().zip(found).enumerate() {
            if !sector.current().contains(value) {
                return Err(format!(
                    "sector {index} holds {value:#x}, allowed are {:x?}",
                    sector.current()
                ));
            }
        }
        Ok(())
    }

    /// These values were found after a crash: they are there to stay.
    pub fn settle(&mut self, found: &[Value]) {
        self.reading = 0;
        for (sector, value) in self.sectors.iter_mut().zip(found) {
            sector.base = Some(*value);
            sector.writes.clear();
        }
    }

    /// The source has changed: what was never written is what it holds now.
    pub fn rebase(&mut self, sector: usize, value: Value) {
        self.sectors[sector].base = Some(value);
    }

    /// Number of sectors.
    pub fn len(&self) -> usize {
        self.sectors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.sectors.is_empty()
    }
}

impl Sector {
    /// What a read that begins now may find.
    fn current(&self) -> Vec<Value> {
        let mut values = Vec::with_capacity(self.writes.len() + 1);
        let known = self.writes.iter().filter(|write| !write.failed);
        let newest = known
            .filter(|write| write.end.is_some() || write.seen)
            .map(|write| write.begin)
            .max();
        values.extend(
            self.writes
                .iter()
                .filter(|write| {
                    newest.is_none_or(|newest| write.end.is_none_or(|end| end >= newest))
                })
                .map(|write| write.value),
        );
        values.extend(self.base.filter(|_| newest.is_none()));
        values
    }

    fn newest_owed(&self) -> Option<u64> {
        let owed = self.writes.iter().filter(|write| write.owed);
        owed.map(|write| write.begin).max()
    }

    fn allows(&self, value: Value) -> bool {
        match self.newest_owed() {
            None => {
                self.base == Some(value) || self.writes.iter().any(|write| write.value == value)
            }
            Some(owed) => self
                .writes
                .iter()
                .any(|write| write.value == value && write.end.is_none_or(|end| end >= owed)),
        }
    }

    /// Forget what can no longer be found.
    fn forget(&mut self) {
        if let Some(owed) = self.newest_owed() {
            self.base = None;
            self.writes
                .retain(|write| write.end.is_none_or(|end| end >= owed));
        }
    }
}

/// What a sector of bytes holds.
///
/// # Errors
/// If it is not filled with one value.
pub fn value_of(sector: &[u8]) -> Value {
    let mut first = [0; 8];
    first.copy_from_slice(&sector[..8]);
    let mut last = [0; 8];
    last.copy_from_slice(&sector[SECTOR - 8..]);
    assert_eq!(first, last, "disks do not tear sectors");
    u64::from_le_bytes(first)
}

/// The values of bytes.
pub fn values_of(content: &[u8]) -> Vec<Value> {
    content.chunks_exact(SECTOR).map(value_of).collect()
}

/// Bytes with these values.
pub fn bytes_of(values: &[Value]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * SECTOR);
    for value in values {
        for _ in 0..SECTOR / 8 {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}
