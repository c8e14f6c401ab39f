// SPDX-License-Identifier: Apache-2.0

//! A disk with a volatile cache.

use std::collections::BTreeSet;

use fastrand::Rng;

/// Smallest piece that is written or not, in bytes.
pub const SECTOR: usize = 512;
/// Bytes in a record of the cache.
const BLOCK: usize = 4096;
const SECTORS: usize = BLOCK / SECTOR;

/// A write of up to a block that has completed and was not flushed.
#[derive(Clone, Debug)]
struct Record {
    /// When it completed.
    at: u64,
    block: usize,
    /// The sectors of it that are written.
    sectors: u8,
    content: Box<[u8; BLOCK]>,
}

/// An operation in flight on a disk.
#[derive(Clone, Debug)]
pub enum Pending {
    /// Bytes and where they go.
    Write {
        /// In bytes.
        offset: usize,
        /// What.
        content: Vec<u8>,
        /// Durable when it completes.
        fua: bool,
    },
    /// What had completed when it was submitted.
    Flush {
        /// The disk's clock then.
        covers: u64,
    },
}

impl Pending {
    /// Whether something is durable when it completes.
    pub const fn is_durable(&self) -> bool {
        matches!(self, Self::Flush { .. } | Self::Write { fua: true, .. })
    }
}

/// How much of what was not flushed survives a power cut, or a flush that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// All of it.
    All,
    /// Nothing.
    Nothing,
    /// Each write or not.
    Writes,
    /// Each sector of each write or not.
    Sectors,
}

impl Survival {
    /// Any of them.
    pub fn any(random: &mut Rng) -> Self {
        match random.u8(0..4) {
            0 => Self::All,
            1 => Self::Nothing,
            2 => Self::Writes,
            _ => Self::Sectors,
        }
    }

    /// Which of a write's sectors do.
    fn of_write(self, random: &mut Rng) -> u8 {
        match self {
            Self::All => u8::MAX,
            Self::Nothing => 0,
            Self::Writes if random.bool() => u8::MAX,
            Self::Writes => 0,
            Self::Sectors => random.u8(..),
        }
    }
}

/// What has become of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rot {
    /// It reads as zeros.
    Zeros,
    /// It reads as anything.
    Garbage,
    /// One bit of it has changed.
    Bit,
    /// It cannot be read until it is written again.
    Unreadable,
}

impl Rot {
    /// Any of them.
    pub fn any(random: &mut Rng) -> Self {
        [Self::Zeros, Self::Garbage, Self::Bit, Self::Unreadable][random.usize(0..4)]
    }
}

/// A disk with a volatile cache.
///
/// A write that has completed is seen by reads, and survives a power cut for
/// sure once a flush has completed that was submitted after its completion.
#[derive(Clone, Debug)]
pub struct Disk {
    durable: Vec<u8>,
    visible: Vec<u8>,
    cache: Vec<Record>,
    clock: u64,
    /// Sectors that cannot be read.
    unreadable: BTreeSet<usize>,
    dropped: bool,
}

impl Disk {
    /// A disk with this content.
    pub fn new(content: Vec<u8>) -> Self {
        assert_eq!(content.len() % BLOCK, 0);
        Self {
            visible: content.clone(),
            durable: content,
            cache: Vec::new(),
            clock: 0,
            unreadable: BTreeSet::new(),
            dropped: false,
        }
    }

    /// Whether it has failed to make something durable, and then dropped what
    /// was not.
    pub fn has_dropped(&self) -> bool {
        self.dropped
    }

    /// Its length, in bytes.
    pub fn len(&self) -> usize {
        self.durable.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.durable.is_empty()
    }

    /// Bytes as a read sees them.
    pub fn read(&self, offset: usize, length: usize) -> &[u8] {
        &self.visible[offset..offset + length]
    }

    /// Whether any of these bytes cannot be read.
    pub fn is_unreadable(&self, offset: usize, length: usize) -> bool {
        let sectors = offset / SECTOR..(offset + length).div_ceil(SECTOR);
        self.unreadable.range(sectors).next().is_some()
    }

    /// Spoil a sector.
    pub fn rot(&mut self, sector: usize, rot: Rot, random: &mut Rng) {
        let mut content = self.read(sector * SECTOR, SECTOR).to_vec();
        match rot {
            Rot::Zeros => content.fill(0),
            Rot::Garbage => random.fill(&mut content),
            Rot::Bit => content[random.usize(0..SECTOR)] ^= 1 << random.u8(0..8),
            Rot::Unreadable => {}
        }
        self.set(sector * SECTOR, &content);
        if rot == Rot::Unreadable {
            self.unreadable.insert(sector);
        }
    }

    /// Change bytes at once, for good.
    pub fn set(&mut self, offset: usize, content: &[u8]) {
        self.heal(offset, content.len());
        self.durable[offset..offset + content.len()].copy_from_slice(content);
        self.visible[offset..offset + content.len()].copy_from_slice(content);
    }

    /// What is written can be read again.
    fn heal(&mut self, offset: usize, length: usize) {
        let sectors = offset / SECTOR..(offset + length) / SECTOR;
        while let Some(sector) = self.unreadable.range(sectors.clone()).next().copied() {
            self.unreadable.remove(&sector);
        }
    }

    /// Submit a flush.
    pub fn flush(&self) -> Pending {
        Pending::Flush { covers: self.clock }
    }

    /// An operation completes.
    pub fn complete(&mut self, pending: &Pending) {
        match pending {
            Pending::Write {
                offset,
                content,
                fua,
            } => {
                self.land(*offset, content, |_| true);
                if *fua {
                    self.make_durable(*offset, content);
                }
            }
            Pending::Flush { covers } => self.flushed(*covers),
        }
    }

    /// An operation was carried out from its beginning to somewhere, in pieces of
    /// whole blocks of the disk.
    pub fn complete_beginning(&mut self, pending: &Pending, random: &mut Rng) {
        if let Pending::Write {
            offset, content, ..
        } = pending
        {
            let end = offset + content.len();
            let end = random.usize(*offset..=end) / BLOCK * BLOCK;
            self.land(*offset, &content[..end.saturating_sub(*offset)], |_| true);
        }
    }

    /// An operation fails: of a write, any part has been carried out. If it was
    /// to make something durable, any part of what was not flushed is lost, as
    /// with Linux's disks, and the next flush succeeds.
    pub fn fail(&mut self, pending: &Pending, random: &mut Rng) {
        if let Pending::Write {
            offset, content, ..
        } = pending
        {
            self.land(*offset, content, |_| random.bool());
        }
        if pending.is_durable() {
            self.drop_cache(random);
        }
    }

    fn drop_cache(&mut self, random: &mut Rng) {
        self.dropped = true;
        let survival = Survival::any(random);
        self.cache.retain_mut(|record| {
            record.sectors &= survival.of_write(random);
            record.sectors != 0
        });
        self.visible.copy_from_slice(&self.durable);
        for record in &self.cache {
            apply(&mut self.visible, record, record.sectors);
        }
    }

    fn land(&mut self, offset: usize, content: &[u8], mut lands: impl FnMut(usize) -> bool) {
        self.clock += 1;
        let mut at = 0;
        while at < content.len() {
            let begin = (offset + at) % BLOCK;
            let length = (BLOCK - begin).min(content.len() - at);
            let mut record = Record {
                at: self.clock,
                block: (offset + at) / BLOCK,
                sectors: 0,
                content: Box::new([0; BLOCK]),
            };
            let piece = &content[at..at + length];
            record.content[begin..begin + length].copy_from_slice(piece);
            for sector in begin / SECTOR..(begin + length) / SECTOR {
                if lands(sector) {
                    record.sectors |= 1 << sector;
                }
            }
            for sector in 0..SECTORS {
                if record.sectors >> sector & 1 == 1 {
                    self.unreadable.remove(&(record.block * SECTORS + sector));
                }
            }
            apply(&mut self.visible, &record, record.sectors);
            self.cache.push(record);
            at += length;
        }
    }

    fn make_durable(&mut self, offset: usize, content: &[u8]) {
        self.durable[offset..offset + content.len()].copy_from_slice(content);
        for record in &mut self.cache {
            for sector in 0..SECTORS {
                let at = record.block * BLOCK + sector * SECTOR;
                if at >= offset && at < offset + content.len() {
                    record.sectors &= !(1 << sector);
                }
            }
        }
        self.cache.retain(|record| record.sectors != 0);
    }

    fn flushed(&mut self, covers: u64) {
        let durable = &mut self.durable;
        self.cache.retain(|record| {
            let covered = record.at <= covers;
            if covered {
                apply(durable, record, record.sectors);
            }
            !covered
        });
    }

    /// What a power cut leaves, with these operations in flight.
    pub fn cut_power<'a>(
        &self,
        in_flight: impl Iterator<Item = &'a Pending>,
        survival: Survival,
        random: &mut Rng,
    ) -> Self {
        let mut after = self.clone();
        after.break_off(in_flight, random);
        let mut left = core::mem::take(&mut after.durable);
        for record in &after.cache {
            let kept = survival.of_write(random);
            apply(&mut left, record, record.sectors & kept);
        }
        Self {
            // What was never written back cannot have healed a sector, but
            // whether it was is not known: it has healed.
            unreadable: after.unreadable,
            ..Self::new(left)
        }
    }

    /// Each of these operations in flight has been carried out, or in part, or
    /// not.
    fn break_off<'a>(&mut self, in_flight: impl Iterator<Item = &'a Pending>, random: &mut Rng) {
        let mut in_flight: Vec<_> = in_flight.collect();
        random.shuffle(&mut in_flight);
        for pending in in_flight {
            if let Pending::Write {
                offset, content, ..
            } = pending
            {
                match random.u8(0..3) {
                    0 => {}
                    1 => self.land(*offset, content, |_| true),
                    _ => self.land(*offset, content, |_| random.bool()),
                }
            }
        }
    }
}

fn apply(content: &mut [u8], record: &Record, sectors: u8) {
    if sectors == u8::MAX {
        let at = record.block * BLOCK;
        content[at..at + BLOCK].copy_from_slice(&record.content[..]);
        return;
    }
    for sector in 0..SECTORS {
        if sectors >> sector & 1 == 1 {
            let at = record.block * BLOCK + sector * SECTOR;
            content[at..at + SECTOR]
                .copy_from_slice(&record.content[sector * SECTOR..(sector + 1) * SECTOR]);
        }
    }
}
