// SPDX-License-Identifier: Apache-2.0

//! Random walks: a guest that reads, writes, flushes and discards while the
//! volume moves, disks that complete in any order, and crashes.

use fastrand::Rng;
use localstor_hydrator_core::{
    Config, Failure, Notice, Operation, Rate, Request, Rule, Tag, Verify, metadata_size,
};

use crate::copy::copied;
use crate::disk::{Disk, Rot, SECTOR};
use crate::machine::{Faults, Machine, Shared};
use crate::model::{Model, PER_BLOCK, Reading, Value, Writing, bytes_of, value_of, values_of};

const BLOCK: usize = 4096;
const STEPS: usize = 250;
/// Of so many crashes one is looked at also in a copy of the metadata.
const COPY_EVERY: u64 = 4;

/// What the guest waits for.
#[derive(Debug)]
enum Guest {
    Read(Reading),
    Write { writing: Writing, fua: bool },
    Flush(u64),
}

/// A request of the guest that was not answered. It is sent again to who takes
/// over from a helper that has died.
#[derive(Debug)]
struct Waiting {
    request: Request,
    buffer: Vec<u8>,
    guest: Guest,
}

/// What walks have gone through.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// What power cuts left, recovered and checked.
    pub crashes: u64,
    /// What the deaths of a helper left, taken over and checked.
    pub kills: u64,
    /// Those of them after a write to the journal had failed.
    pub kills_after_failure: u64,
    /// Requests of the guest that were answered.
    pub requests: u64,
    /// Walks whose move came to its end.
    pub done: u64,
    /// Walks with failing devices.
    pub faults: u64,
    /// Walks that end with blocks that the source cannot read.
    pub bad: u64,
    /// Blocks that were copied and differed from the source.
    pub differences: u64,
    /// Walks that end with blocks that differ whenever they are copied.
    pub differing: u64,
    /// Walks that end with a disk that has failed.
    pub broken: u64,
    /// Volumes that were opened though a sector of their metadata was rotten.
    pub rotten: u64,
    /// Volumes that were refused for it.
    pub refused: u64,
    /// Blocks that failed because the destination could not read them.
    pub unreadable: u64,
    /// Volumes that were opened over copied metadata and compared.
    pub copies: u64,
}

impl Tally {
    /// Add another one.
    pub fn add(&mut self, other: Self) {
        self.crashes += other.crashes;
        self.kills += other.kills;
        self.kills_after_failure += other.kills_after_failure;
        self.requests += other.requests;
        self.done += other.done;
        self.faults += other.faults;
        self.bad += other.bad;
        self.differences += other.differences;
        self.differing += other.differing;
        self.broken += other.broken;
        self.rotten += other.rotten;
        self.refused += other.refused;
        self.unreadable += other.unreadable;
        self.copies += other.copies;
    }
}

/// Walk over a volume by this seed, perhaps without a rule: many steps, with
/// crashes, and to the end of the move.
///
/// # Errors
/// What the guest must not have found.
pub fn walk(seed: u64, rule: Option<Rule>) -> Result<Tally, String> {
    let shared = if seed / 2 % 2 == 0 {
        Shared::Nothing
    } else {
        Shared::SameBatch
    };
    walk_sharing(seed, rule, shared)
}

/// The same, with these flushes of M left to those of D.
///
/// # Errors
/// What the guest must not have found.
pub fn walk_sharing(seed: u64, rule: Option<Rule>, shared: Shared) -> Result<Tally, String> {
    let mut walk = Walk::new(seed, rule, shared)?;
    walk.run(STEPS)?;
    Ok(walk.tally)
}

/// Walk with a caller that keeps what it is to keep no longer than until a write
/// of it has failed. That is wrong.
///
/// # Errors
/// What the guest must not have found.
pub fn walk_forgetting(seed: u64) -> Result<Tally, String> {
    let mut walk = Walk::new(seed, None, Shared::Nothing)?;
    walk.machine.keeps_failed = false;
    walk.run(STEPS)?;
    Ok(walk.tally)
}

/// A walk over one volume.
#[derive(Debug)]
struct Walk {
    random: Rng,
    rule: Option<Rule>,
    shared: Shared,
    config: Config,
    machine: Machine,
    model: Model,
    guests: Vec<Waiting>,
    /// Which of these the present helper was not told of yet.
    unsent: Vec<Tag>,
    next_tag: u32,
    /// For each block: what was sent for the guest as a whole, and what it held
    /// before.
    versions: Vec<Vec<Vec<Value>>>,
    depth: usize,
    /// The guest may write: it has been switched over.
    switched: bool,
    /// What the guest does, by weight: read, write, flush, zeroes.
    habits: [u32; 4],
    fua: u8,
    faults: bool,
    tally: Tally,
}

fn source_value(sector: usize, generation: u64) -> Value {
    5 << 60 | generation << 32 | sector as u64
}

impl Walk {
    /// A new volume, by the walk's seed.
    ///
    /// # Errors
    /// If it does not open.
    fn new(seed: u64, rule: Option<Rule>, shared: Shared) -> Result<Self, String> {
        let mut random = Rng::with_seed(Rng::with_seed(seed).u64(..));
        let blocks = if random.u8(0..4) == 0 {
            random.usize(28..64)
        } else {
            random.usize(4..28)
        };
        let source_blocks = if random.u8(0..4) == 0 {
            random.usize(0..=blocks)
        } else {
            blocks
        };
        let size = (blocks * BLOCK) as u64;
        let journal = random.u64(8..20);
        let mut config = Config::new([7; 16], size, metadata_size(size) + (64 << 10));
        config.source_size = (source_blocks * BLOCK) as u64;
        config.logical_block_size = if random.u8(0..3) == 0 { 4096 } else { 512 };
        config.destination_zeroed = random.bool();
        config.requests = 32;
        config.block_slots = 16;
        config.copies = random.u16(1..4);
        config.region_blocks = 1 << random.u32(0..4);
        config.piece_blocks = 1 << random.u32(0..3);
        config.journal_depth = random.usize(1..5);
        config.condense_above = [0, 32][random.usize(0..2)];
        config.unsettled = 512;
        config.range_from = random.u32(1..6);
        config.verify = [Verify::Off, Verify::Full, Verify::Sample][(seed % 3) as usize];
        config.metadata_size = (2 + journal + 1) * BLOCK as u64;
        config.rate = Rate {
            limit: None,
            minimum: 1 << 30,
        };
        let stale: Vec<Value> = (0..blocks * PER_BLOCK)
            .map(|sector| {
                if config.destination_zeroed {
                    0
                } else {
                    0xde << 56 | sector as u64
                }
            })
            .collect();
        let mut source = Vec::new();
        for block in 0..source_blocks {
            let zero = random.u8(0..3) == 0;
            for sector in block * PER_BLOCK..(block + 1) * PER_BLOCK {
                source.push(if zero { 0 } else { source_value(sector, 0) });
            }
        }
        let base = (0..blocks * PER_BLOCK).map(|sector| source.get(sector).copied().unwrap_or(0));
        let model = Model::new(base.clone());
        let base: Vec<Value> = base.collect();
        let versions = base.chunks(PER_BLOCK).map(|block| vec![block.to_vec()]);
        let versions = versions.collect();
        let metadata = vec![0x55; config.metadata_size as usize];
        let mut machine = Machine::new(
            &config,
            rule,
            Some(journal),
            Disk::new(bytes_of(&stale)),
            Disk::new(metadata),
            bytes_of(&source),
        );
        machine.shared = shared;
        machine.open(&mut random)?;
        machine.notices.clear();
        let faults = random.u8(0..4) == 0;
        let habits = [
            random.u32(1..4),
            random.u32(1..12),
            random.u32(1..5),
            random.u32(0..3),
        ];
        Ok(Self {
            rule,
            shared,
            machine,
            model,
            guests: Vec::new(),
            unsent: Vec::new(),
            next_tag: 0,
            versions,
            depth: random.usize(1..9),
            switched: false,
            habits,
            fua: [0, 10, 60][random.usize(0..3)],
            faults,
            config,
            random,
            tally: Tally::default(),
        })
    }

    /// Walk so many steps, with crashes, and to the end of the move.
    ///
    /// # Errors
    /// What the guest must not have found.
    fn run(&mut self, steps: usize) -> Result<(), String> {
        let start_at = self.random.usize(0..steps / 3);
        let switch_at = self.random.usize(0..=start_at);
        for step in 0..steps {
            if step == switch_at {
                self.switch()?;
            }
            if step == start_at {
                self.machine.volume.start();
            }
            if !self.switched && self.random.u8(0..4) == 0 {
                self.change_source();
            }
            self.step()?;
            if self.random.u8(0..100) < 25 {
                if self.random.bool() {
                    self.check_power_cut(false)?;
                } else {
                    self.check_kill(false)?;
                }
            }
            match self.random.u16(0..1000) {
                0..6 => self.check_power_cut(true)?,
                6..20 => self.check_kill(true)?,
                _ => {}
            }
        }
        self.finish()
    }

    fn size(&self) -> usize {
        self.model.len() * SECTOR
    }

    /// The guest begins to write here; nothing else writes the source.
    fn switch(&mut self) -> Result<(), String> {
        self.send_all_again();
        loop {
            self.machine.pump(&mut self.random);
            self.look()?;
            if self.guests.is_empty() {
                break;
            }
            if !self.machine.step(&mut self.random) {
                return Err("reads stand still".into());
            }
        }
        self.switched = true;
        if self.faults {
            self.tally.faults += 1;
            let blocks = self.machine.source.len() / BLOCK;
            // What is not compared must not be wrong.
            let lies = self.config.verify == Verify::Full;
            self.machine.faults = Faults {
                lies: if lies { self.random.u8(0..60) } else { 0 },
                liars: if lies && self.random.bool() {
                    vec![self.random.usize(0..self.size() / BLOCK)]
                } else {
                    Vec::new()
                },
                data: self.random.u8(0..4),
                durable: self.random.u8(0..12).saturating_sub(9),
                metadata: self.random.u8(0..12).saturating_sub(9),
                flushes: self.random.u8(0..12).saturating_sub(9),
                away: self.random.u8(0..20),
                bad: if blocks > 0 && self.random.bool() {
                    vec![self.random.usize(0..blocks)]
                } else {
                    Vec::new()
                },
                silent: if blocks > 0 && self.random.bool() {
                    vec![self.random.usize(0..blocks)]
                } else {
                    Vec::new()
                },
            };
        }
        Ok(())
    }

    /// The guest still writes to the source.
    fn change_source(&mut self) {
        if !self.guests.is_empty() || self.machine.source.is_empty() {
            return;
        }
        let block = self.random.usize(0..self.machine.source.len() / BLOCK);
        let generation = self.random.u64(1..1 << 20);
        let values: Vec<_> = (block * PER_BLOCK..(block + 1) * PER_BLOCK)
            .map(|sector| source_value(sector, generation))
            .collect();
        self.machine.source[block * BLOCK..(block + 1) * BLOCK].copy_from_slice(&bytes_of(&values));
        for (sector, value) in (block * PER_BLOCK..).zip(&values) {
            self.model.rebase(sector, *value);
        }
        self.versions[block] = vec![values];
    }

    fn step(&mut self) -> Result<(), String> {
        let busy = self.machine.ops.len();
        if !self.unsent.is_empty() && self.random.u8(0..3) == 0 {
            let index = self.random.usize(0..self.unsent.len());
            self.send_again(index);
        } else if self.guests.len() < self.depth && (busy == 0 || self.random.u8(0..100) < 40) {
            self.submit();
            if self.random.u8(0..4) == 0 {
                return Ok(());
            }
        } else if busy > 0 {
            let index = self.random.usize(0..busy);
            self.machine.complete(index, &mut self.random);
        } else {
            self.machine.step(&mut self.random);
        }
        if self.random.u8(0..5) > 0 {
            self.machine.pump(&mut self.random);
        }
        self.look()
    }

    /// Send number `index` of what the present helper was not told of.
    fn send_again(&mut self, index: usize) {
        let tag = self.unsent.swap_remove(index);
        let waiting = self.guests.iter().find(|guest| guest.request.tag == tag);
        let waiting = waiting.expect("a request that waits");
        self.machine
            .request(waiting.request, waiting.buffer.clone());
    }

    fn send_all_again(&mut self) {
        while !self.unsent.is_empty() {
            let index = self.random.usize(0..self.unsent.len());
            self.send_again(index);
        }
    }

    fn submit(&mut self) {
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        let unit = (self.config.logical_block_size as usize).max(SECTOR);
        let align = if self.random.u8(0..3) > 0 {
            BLOCK
        } else {
            unit
        };
        let units = self.size() / align;
        let most = if align == BLOCK { 6 } else { 20 };
        // Half of what the guest does is in the first blocks.
        let offset = if self.random.bool() {
            self.random.usize(0..units.min(4))
        } else {
            self.random.usize(0..units)
        };
        let length =
            (1 + self.random.usize(0..most).min(self.random.usize(0..most))).min(units - offset);
        let (offset, length) = (offset * align, length * align);
        let (from, to) = (offset / SECTOR, (offset + length) / SECTOR);
        let habits: u32 = self.habits.iter().sum();
        let mut choice = self.random.u32(0..habits);
        let mut habit = 0;
        while choice >= self.habits[habit] {
            choice -= self.habits[habit];
            habit += 1;
        }
        if !self.switched {
            habit = 0;
        }
        let fua = self.random.u8(0..100) < self.fua;
        let (operation, guest, buffer) = match habit {
            0 => (
                Operation::Read,
                Guest::Read(self.model.begin_read(from, to)),
                vec![0xcc; length],
            ),
            1 => {
                let (writing, values) = self.model.begin_write(from, to, false);
                (
                    Operation::Write { fua },
                    Guest::Write { writing, fua },
                    bytes_of(&values),
                )
            }
            2 => (
                Operation::Flush,
                Guest::Flush(self.model.begin_flush()),
                Vec::new(),
            ),
            _ if self.random.bool() => {
                let from = from.next_multiple_of(PER_BLOCK);
                let to = (to / PER_BLOCK * PER_BLOCK).max(from);
                let (writing, _) = self.model.begin_write(from, to, true);
                let guest = Guest::Write {
                    writing,
                    fua: false,
                };
                (Operation::Discard, guest, Vec::new())
            }
            _ => {
                let (writing, _) = self.model.begin_write(from, to, true);
                let operation = Operation::WriteZeroes { fua };
                (operation, Guest::Write { writing, fua }, Vec::new())
            }
        };
        let (offset, length) = if operation == Operation::Flush {
            (0, 0)
        } else {
            (offset as u64, length as u64)
        };
        let request = Request {
            tag,
            operation,
            offset,
            length,
        };
        if matches!(guest, Guest::Write { .. }) && buffer.is_empty() {
            self.zeros_are_asked_for(from..to);
        }
        self.machine.request(request, buffer.clone());
        self.guests.push(Waiting {
            request,
            buffer,
            guest,
        });
    }

    /// The guest wants zeros in these sectors. Where the destination has had zeros
    /// all the time, their intent alone makes a block local.
    fn zeros_are_asked_for(&mut self, sectors: std::ops::Range<usize>) {
        let zeros = vec![0; PER_BLOCK];
        let blocks = sectors.start.div_ceil(PER_BLOCK)..sectors.end / PER_BLOCK;
        for block in blocks {
            if !self.versions[block].contains(&zeros) {
                self.versions[block].push(zeros.clone());
            }
        }
    }

    /// Look at what the volume has answered and done.
    fn look(&mut self) -> Result<(), String> {
        for sent in core::mem::take(&mut self.machine.sent) {
            let end = sent.offset + sent.content.len();
            let first = sent.offset.div_ceil(BLOCK);
            for block in first..end / BLOCK {
                let at = block * BLOCK - sent.offset;
                let values = values_of(&sent.content[at..at + BLOCK]);
                if let Some(versions) = self.versions.get_mut(block) {
                    if !versions.contains(&values) {
                        versions.push(values);
                    }
                }
            }
        }
        for (tag, result) in core::mem::take(&mut self.machine.answers) {
            let mut waiting = self.guests.iter();
            let at = waiting.position(|waiting| waiting.request.tag == tag);
            let Waiting { guest, .. } = self.guests.swap_remove(at.expect("an answer"));
            let buffer = self.machine.take_buffer(tag);
            self.tally.requests += 1;
            if let (Err(failure), false) = (result, self.faults) {
                return Err(format!("{guest:?} fails: {failure}"));
            }
            match guest {
                Guest::Read(reading) => {
                    // What a disk has dropped may be lost as in a power cut.
                    let judged = result.is_ok() && !self.machine.data.has_dropped();
                    let found = judged.then(|| values_of(&buffer));
                    self.model.end_read(&reading, found.as_deref())?;
                }
                Guest::Write { writing, fua } => {
                    self.model.end_write(&writing, result.is_ok(), fua);
                }
                Guest::Flush(begin) if result.is_ok() => self.model.end_flush(begin),
                Guest::Flush(_) => {}
            }
        }
        Ok(())
    }

    /// A helper that takes over what is on these disks.
    fn successor(&self, (data, metadata): (Disk, Disk)) -> Machine {
        let source = self.machine.source.clone();
        let mut machine = Machine::new(&self.config, self.rule, None, data, metadata, source);
        machine.shared = self.shared;
        machine.keeps_failed = self.machine.keeps_failed;
        machine
    }

    /// Open a volume on these disks; perhaps the opening is interrupted, and
    /// begun again, by the helper's death or, if that may be, by a power cut.
    fn recover(&mut self, mut left: (Disk, Disk), cuts: bool) -> Result<Machine, String> {
        while self.random.u8(0..4) == 0 {
            let mut machine = self.successor(left);
            for _ in 0..self.random.usize(0..12) {
                machine.step(&mut self.random);
            }
            left = if cuts && self.random.bool() {
                machine.cut_power(&mut self.random)
            } else {
                machine.kill(&mut self.random)
            };
            self.count(cuts);
        }
        if (self.tally.crashes + self.tally.kills) % COPY_EVERY == 0 && self.rule.is_none() {
            self.check_copy(&left.0, &left.1)?;
        }
        let mut machine = self.successor(left);
        machine.open(&mut self.random)?;
        self.count(cuts);
        Ok(machine)
    }

    /// Who opens a copy of the metadata, over the same data, finds what who opens
    /// the metadata does, or nobody opens anything.
    fn check_copy(&mut self, data: &Disk, metadata: &Disk) -> Result<(), String> {
        // Not what the walk takes its steps by.
        let mut random = Rng::with_seed(self.tally.crashes << 32 | self.tally.kills);
        let mut config = self.config.clone();
        let mut left = self.successor((data.clone(), metadata.clone()));
        let opened = left.open(&mut random);
        config.move_id = [8; 16];
        let unit = config.logical_block_size as usize;
        let Some(metadata) = copied(metadata, unit, config.move_id) else {
            return match opened {
                Ok(()) => Err("metadata that open are not copied".into()),
                Err(_) => Ok(()),
            };
        };
        let source = self.machine.source.clone();
        let mut copy = Machine::new(&config, self.rule, None, data.clone(), metadata, source);
        match (opened, copy.open(&mut random)) {
            (Ok(()), Ok(())) => {}
            (Err(_), Err(_)) => return Ok(()),
            both => return Err(format!("original and copy: {both:?}")),
        }
        let known = |machine: &Machine| {
            let offsets = (0..config.size).step_by(BLOCK);
            let local = offsets.map(|at| machine.volume.passes_through(at, BLOCK as u64));
            let progress = machine.volume.progress();
            let unreadable = (progress.unreadable, progress.first_unreadable);
            (local.collect::<Vec<_>>(), progress.remote, unreadable)
        };
        if known(&left) != known(&copy) {
            return Err("the copy's map is another one".into());
        }
        if left.read_all(&mut random)? != copy.read_all(&mut random)? {
            return Err("the copy has another content".into());
        }
        self.tally.copies += 1;
        Ok(())
    }

    fn count(&mut self, cuts: bool) {
        if cuts {
            self.tally.crashes += 1;
        } else {
            self.tally.kills += 1;
        }
    }

    /// Cut the power now, recover, and check what is there; go on from there or
    /// from before.
    fn check_power_cut(&mut self, go_on: bool) -> Result<(), String> {
        let left = self.machine.cut_power(&mut self.random);
        let rotten = (self.random.u8(0..4) == 0).then(|| left.clone());
        let mut machine = self.recover(left, true)?;
        let found = values_of(&machine.read_all(&mut self.random)?);
        if found.len() < self.model.len() {
            return Err("the volume has shrunk in a crash".into());
        }
        self.model.check_crash(&found)?;
        self.check_whole_blocks(&found)?;
        self.check_recovered(&machine, &found)?;
        if let Some((data, metadata)) = rotten {
            self.check_rot(data.clone(), metadata.clone())?;
            self.check_unreadable(data, metadata, &found)?;
        }
        if go_on {
            self.model.settle(&found);
            self.guests.clear();
            self.unsent.clear();
            self.versions = found
                .chunks(PER_BLOCK)
                .map(|block| vec![block.to_vec()])
                .collect();
            self.go_on_with(machine);
        }
        Ok(())
    }

    /// Kill the helper now, and check what a successor finds: the guest lives
    /// on. What was not answered is sent to the successor, or all goes on from
    /// before.
    fn check_kill(&mut self, go_on: bool) -> Result<(), String> {
        if self.random.bool() {
            self.machine.pump(&mut self.random);
            // Some of the answers still reach the guest.
            let random = &mut self.random;
            if go_on {
                self.machine.answers.retain(|_| random.bool());
            }
            self.look()?;
        }
        if go_on && self.random.bool() {
            self.leave()?;
        }
        if self.machine.may_have_dropped() {
            // What a disk has dropped may be lost as in a power cut.
            return self.check_power_cut(go_on);
        }
        self.tally.kills_after_failure += u64::from(self.machine.keeps_what_failed());
        let left = self.machine.kill(&mut self.random);
        let mut machine = self.recover(left, false)?;
        if !go_on || self.random.bool() {
            let found = values_of(&machine.read_all(&mut self.random)?);
            let judged = if go_on {
                self.model.read_all(&found)
            } else {
                self.model.check_now(&found)
            };
            judged.map_err(|violation| format!("after a kill {violation}"))?;
            self.check_recovered(&machine, &found)?;
        }
        if go_on {
            let tags = self.guests.iter().map(|waiting| waiting.request.tag);
            self.unsent = tags.collect();
            self.go_on_with(machine);
        }
        Ok(())
    }

    /// The helper is told to leave, and leaves when it is ready, unless a disk
    /// fails. What it has not answered it has left to its successor.
    fn leave(&mut self) -> Result<(), String> {
        self.machine.pump(&mut self.random);
        self.look()?;
        self.machine.volume.close();
        for _ in 0..20_000 {
            self.machine.pump(&mut self.random);
            let unreachable = Err(Failure::Unreachable);
            if self
                .machine
                .answers
                .iter()
                .any(|answer| answer.1 == unreachable)
            {
                return Err("who leaves fails what its successor could answer".into());
            }
            self.look()?;
            if self.machine.notices.contains(&Notice::Closed) || self.machine.has_failed() {
                return Ok(());
            }
            if !self.machine.step(&mut self.random) {
                return Err("leaving stands still".into());
            }
        }
        Err("it never leaves".into())
    }

    /// What was recovered is there to stay.
    fn check_recovered(&mut self, machine: &Machine, found: &[Value]) -> Result<(), String> {
        if self.random.u8(0..4) > 0 {
            return Ok(());
        }
        let left = machine.cut_power_hard(&mut self.random);
        let mut again = self.successor(left);
        again.open(&mut self.random)?;
        let found_again = values_of(&again.read_all(&mut self.random)?);
        self.tally.crashes += 1;
        if found_again != found {
            return Err("a second crash finds other contents than the first".into());
        }
        Ok(())
    }

    fn go_on_with(&mut self, mut machine: Machine) {
        machine.faults = self.machine.faults.clone();
        machine.notices.clear();
        machine.sent.clear();
        self.machine = machine;
        if self.machine.volume.progress().started {
            self.machine.pump(&mut self.random);
        } else if self.switched {
            self.machine.volume.start();
        }
    }

    /// A sector of the metadata rots: the volume is refused, or it is right.
    fn check_rot(&mut self, data: Disk, mut metadata: Disk) -> Result<(), String> {
        let random = &mut self.random;
        let sector = random.usize(0..metadata.len() / SECTOR);
        let rot = Rot::any(random);
        metadata.rot(sector, rot, random);
        if self.tally.crashes % COPY_EVERY == 0 && self.rule.is_none() {
            self.check_copy(&data, &metadata)?;
        }
        let random = &mut self.random;
        let source = self.machine.source.clone();
        let mut machine = Machine::new(&self.config, self.rule, None, data, metadata, source);
        if machine.open(random).is_err() {
            self.tally.refused += 1;
            return Ok(());
        }
        self.tally.rotten += 1;
        let found = values_of(&machine.read_all(random)?);
        let context = |violation| format!("{rot:?} in sector {sector} of M: {violation}");
        self.model.check_crash(&found).map_err(context)?;
        self.check_whole_blocks(&found).map_err(context)
    }

    /// A block of the destination cannot be read: it alone fails, or is as it
    /// was found without that, until it is written. Then it is what was written.
    fn check_unreadable(
        &mut self,
        mut data: Disk,
        metadata: Disk,
        found: &[Value],
    ) -> Result<(), String> {
        let blocks = self.size() / BLOCK;
        let random = &mut self.random;
        let (config, rule) = (self.config.clone(), self.rule);
        let source = self.machine.source.clone();
        let bad = random.usize(0..blocks);
        data.rot(
            bad * PER_BLOCK + random.usize(0..PER_BLOCK),
            Rot::Unreadable,
            random,
        );
        let open = |data, metadata, random: &mut Rng| {
            let mut machine = Machine::new(&config, rule, None, data, metadata, source.clone());
            machine.open(random)?;
            Ok::<_, String>(machine)
        };
        let look = |machine: &mut Machine, random: &mut Rng, bad, expected: &[Value]| {
            let mut failed = false;
            for block in 0..blocks {
                let (offset, buffer) = ((block * BLOCK) as u64, vec![0xcc; BLOCK]);
                let read = machine.carry_through(Operation::Read, offset, buffer, random)?;
                let expected = &expected[block * PER_BLOCK..][..PER_BLOCK];
                match read {
                    Ok(content) if values_of(&content) == expected => {}
                    Err(_) if bad == Some(block) => failed = true,
                    other => {
                        let other = other.map(|content| values_of(&content));
                        return Err(format!("block {block}, {bad:?} is bad: {other:x?}"));
                    }
                }
            }
            Ok(failed)
        };
        let mut machine = open(data, metadata, random)?;
        let failed = look(&mut machine, random, Some(bad), found)?;
        self.tally.unreadable += u64::from(failed);
        let known = machine.volume.progress().unreadable == 0;
        let (mut data, metadata) = machine.cut_power_hard(random);
        if random.bool() {
            // It was the cable.
            let sectors = data.read(bad * BLOCK, BLOCK).to_vec();
            data.set(bad * BLOCK, &sectors);
            let mut machine = open(data, metadata, random)?;
            let failing = Some(bad).filter(|_| !known);
            look(&mut machine, random, failing, found)?;
            return Ok(());
        }
        let mut machine = open(data, metadata, random)?;
        let again = look(&mut machine, random, Some(bad), found)?;
        if failed != again {
            return Err(format!("block {bad} fails or not: {failed}, {again}"));
        }
        let mut expected = found.to_vec();
        expected[bad * PER_BLOCK..][..PER_BLOCK].fill(0x77);
        let content = bytes_of(&[0x77; PER_BLOCK]);
        let fua = Operation::Write { fua: true };
        machine
            .carry_through(fua, (bad * BLOCK) as u64, content, random)?
            .map_err(|failure| format!("writing block {bad}: {failure}"))?;
        look(&mut machine, random, None, &expected)?;
        let (data, metadata) = machine.cut_power_hard(random);
        let mut machine = open(data, metadata, random)?;
        look(&mut machine, random, None, &expected)?;
        Ok(())
    }

    /// A block that was not settled is never a mix.
    fn check_whole_blocks(&self, found: &[Value]) -> Result<(), String> {
        for (block, values) in found.chunks(PER_BLOCK).enumerate() {
            let Some(versions) = self.versions.get(block) else {
                continue;
            };
            let settled = self
                .machine
                .volume
                .passes_through((block * BLOCK) as u64, BLOCK as u64);
            if !settled && !versions.iter().any(|version| version == values) {
                return Err(format!(
                    "after a crash block {block} is a mix: {values:x?} of {versions:x?}"
                ));
            }
        }
        Ok(())
    }

    /// Let all requests end and the move come to its end.
    fn finish(&mut self) -> Result<(), String> {
        self.machine.faults.away = 0;
        self.machine.faults.silent.clear();
        self.machine.faults.lies = 0;
        self.machine.volume.start();
        self.send_all_again();
        for _ in 0..20_000 {
            self.machine.pump(&mut self.random);
            self.look()?;
            let progress = self.machine.volume.progress();
            let stays = progress.bad + progress.differing > 0;
            let ended = progress.done || progress.broken || stays;
            if ended && self.guests.is_empty() && self.machine.ops.is_empty() {
                break;
            }
            if !self.machine.step(&mut self.random) {
                return Err(format!(
                    "{} requests stand still, {progress:?}",
                    self.guests.len()
                ));
            }
        }
        if !self.guests.is_empty() {
            return Err(format!("{:?} do not end", self.guests));
        }
        let progress = self.machine.volume.progress();
        self.tally.bad += u64::from(progress.bad > 0);
        self.tally.differences += progress.differences;
        self.tally.differing += u64::from(progress.differing > 0);
        self.tally.broken += u64::from(progress.broken);
        if !progress.done {
            return if self.faults {
                Ok(())
            } else {
                Err(format!("the move does not end: {progress:?}"))
            };
        }
        self.tally.done += 1;
        // What is on the disk is the volume, and what was flushed stays.
        let size = self.size();
        let values = |disk: &Disk| -> Vec<Value> {
            let content = disk.read(0, size);
            content.chunks_exact(SECTOR).map(value_of).collect()
        };
        if !self.machine.data.has_dropped() {
            self.model.check_now(&values(&self.machine.data))?;
        }
        let (data, _) = self.machine.cut_power_hard(&mut self.random);
        self.model.check_crash(&values(&data))
    }
}
