// SPDX-License-Identifier: Apache-2.0

//! Opening a volume: new metadata, or recovery.
//!
//! Recovery flushes both disks, reads superblocks, bitmap and journal, compares
//! the blocks whose intents are not settled with what the destination holds,
//! records in the bitmap what is local, and raises the epoch, which empties the
//! journal. Until the new superblock is written nothing has changed but bits of
//! what is local, so recovery can be interrupted and begun again at any point.
//!
//! What is damaged and may have said that something is local stops it before
//! anything is written.

use std::collections::HashMap;

use crate::bitmap::{
    SECTORS_PER_BITMAP_BLOCK, WORDS_PER_BITMAP_BLOCK, WORDS_PER_SECTOR, decode_sector,
    decode_sector_v1,
};
use crate::journal::{self, Entry, Header, Window, checksum, encode_header};
use crate::log::Log;
use crate::map::Map;
use crate::rules::Rule;
use crate::superblock::{
    Damage, Intent, JOURNAL_FIRST, Superblock, Unreadable, Unusable, VERSION, VERSION_1, choose,
};
use crate::volume::{State, io, kind};
use crate::{Action, BLOCK_SIZE, Buffer, Device, Failure, Memory, Notice, OpenError, Part, Volume};

/// How often a block of the destination is read before it counts as unreadable.
const COMPARE_TRIES: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The superblocks are zeroed.
    Zero,
    /// The zeros are flushed.
    FlushZeros,
    /// A journal that says nothing is written, and all of the bitmap.
    Blank,
    /// They are flushed.
    FlushBlank,
    /// Both disks are flushed.
    Flush,
    /// Both superblocks are read.
    Superblocks,
    /// The bitmap is read.
    Bitmap,
    /// The journal's headers are read.
    Headers,
    /// The journal's entries are read.
    Entries,
    /// The destination's blocks are compared with their intents.
    Compare,
    /// The bitmap is written.
    Bits,
    /// The metadata are flushed.
    Sync,
    /// A superblock of version 1 is written, to empty the journal that is
    /// about to be replaced.
    SuperblockV1,
    /// The first copy of the new superblock is written.
    First,
    /// The second copy is written.
    Second,
}

/// What a buffer for an extent is being filled with, in blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    first: u64,
    count: u64,
    /// It cannot be read at once: bytes that were read piece by piece, or could
    /// not be.
    pieces: Option<u64>,
    /// All of them could not be.
    dead: bool,
}

/// How far the opening of a volume is.
#[derive(Debug)]
pub(crate) struct Opening {
    step: Step,
    begun: bool,
    pending: u32,
    /// The next block of what is being read, or intent that is compared.
    cursor: u64,
    /// What each buffer for an extent is being filled with.
    chunks: Vec<Chunk>,
    superblocks: [Result<Superblock, Damage>; 2],
    window: Window,
    /// Damaged parts of the metadata that may have said something.
    lost: Vec<Part>,
    /// What the destination said when it could not read.
    failure: Option<Failure>,
    voids: HashMap<u64, u64>,
    /// Intents that are not settled.
    intents: Vec<Intent>,
    /// Blocks that are read to be compared, and how often that was tried.
    comparing: Vec<(u16, u64, u8)>,
    /// Intents for what cannot be compared.
    unreadable: Vec<Intent>,
}

impl Opening {
    fn new(step: Step) -> Self {
        Self {
            step,
            begun: false,
            pending: 0,
            cursor: 0,
            chunks: Vec::new(),
            superblocks: [Err(Damage::Short); 2],
            window: Window::default(),
            lost: Vec::new(),
            failure: None,
            voids: HashMap::new(),
            intents: Vec::new(),
            comparing: Vec::new(),
            unreadable: Vec::new(),
        }
    }

    pub(crate) fn format() -> Self {
        Self::new(Step::Zero)
    }

    pub(crate) fn recover() -> Self {
        Self::new(Step::Flush)
    }
}

impl Volume {
    fn opening(&mut self) -> Option<&mut Opening> {
        match &mut self.state {
            State::Opening(opening) => Some(opening),
            _ => None,
        }
    }

    fn open_failed(&mut self, error: OpenError) {
        self.state = State::Closed;
        self.actions
            .push_back(Action::Notice(Notice::OpenFailed(error)));
    }

    /// Hand out what the present step of opening needs, or go to the next one.
    pub(crate) fn opening_advance<M: Memory>(&mut self, memory: &mut M) {
        while let Some(opening) = self.opening() {
            let begun = core::mem::replace(&mut opening.begun, true);
            if begun && opening.pending == 0 {
                match opening.step {
                    Step::Bitmap
                    | Step::Headers
                    | Step::Entries
                    | Step::Compare
                    | Step::Bits
                    | Step::Blank => {}
                    _ => {
                        self.opening_next();
                        continue;
                    }
                }
            } else if begun {
                return;
            }
            self.opening_begin(memory);
            let Some(opening) = self.opening() else {
                return;
            };
            if opening.pending > 0 {
                return;
            }
            self.opening_next();
        }
    }

    fn opening_io(&mut self, detail: u64) -> crate::Io {
        if let Some(opening) = self.opening() {
            opening.pending += 1;
        }
        io(kind::OPENING, detail)
    }

    fn opening_flush(&mut self, device: Device) {
        let io = self.opening_io(0);
        self.actions.push_back(Action::Flush { io, device });
    }

    fn opening_begin<M: Memory>(&mut self, memory: &mut M) {
        let Some(step) = self.opening().map(|opening| opening.step) else {
            return;
        };
        match step {
            Step::Zero => {
                let io = self.opening_io(0);
                self.actions.push_back(Action::Zero {
                    io,
                    device: Device::Metadata,
                    offset: 0,
                    length: JOURNAL_FIRST * BLOCK_SIZE,
                    fua: false,
                });
            }
            Step::Blank => {
                for slot in 0..self.config.copies {
                    self.write_blank(slot, memory);
                }
            }
            Step::FlushZeros | Step::FlushBlank => self.opening_flush(Device::Metadata),
            Step::Sync => {
                if self.rules.keep(Rule::FlushBeforeNewEpoch) {
                    self.opening_flush(Device::Metadata);
                }
            }
            Step::Flush => {
                if self.rules.keep(Rule::FlushBeforeRecovery) {
                    self.opening_flush(Device::Data);
                    self.opening_flush(Device::Metadata);
                }
            }
            Step::Superblocks => {
                for block in 0..2 {
                    let Some(slot) = self.take_block(0) else {
                        return;
                    };
                    let io = self.opening_io(u64::from(slot) << 8 | block);
                    self.actions.push_back(Action::Read {
                        io,
                        device: Device::Metadata,
                        offset: block * BLOCK_SIZE,
                        length: BLOCK_SIZE as u32,
                        buffer: Buffer::Block(slot),
                    });
                }
            }
            Step::Bitmap | Step::Headers | Step::Entries => {
                for slot in 0..self.config.copies {
                    self.read_chunk(slot);
                }
            }
            Step::Compare => self.begin_comparing(),
            Step::Bits => {
                while self.free_blocks.len() > 8 {
                    let Some((bitmap_block, changed)) = self.map.take_dirty(0) else {
                        return;
                    };
                    let Some(slot) = self.take_block(0) else {
                        return;
                    };
                    self.compose_bitmap(bitmap_block, changed, slot, memory);
                    let io = self.opening_io(u64::from(slot));
                    let at = self.superblock.bitmap_first() + bitmap_block;
                    self.write_metadata(io, at, slot, false);
                }
            }
            Step::SuperblockV1 => self.write_opened(self.wanted.location_v1(), memory),
            Step::First => self.write_opened(0, memory),
            Step::Second => self.write_opened(1, memory),
        }
    }

    /// Write the superblock that was come to.
    fn write_opened<M: Memory>(&mut self, location: u64, memory: &mut M) {
        let Some(slot) = self.take_block(0) else {
            return;
        };
        self.wanted.encode(memory.block_mut(slot));
        let io = self.opening_io(u64::from(slot));
        self.write_metadata(io, location, slot, true);
    }

    /// Write the next blocks of a journal that says nothing, and of a bitmap
    /// that says what is local.
    fn write_blank<M: Memory>(&mut self, slot: u16, memory: &mut M) {
        let journal = self.superblock.journal_blocks;
        let blocks = journal + self.superblock.bitmap_blocks;
        let most = u64::from(self.config.region_blocks);
        let Some(opening) = self.opening() else {
            return;
        };
        let first = opening.cursor;
        let count = most.min(blocks - first);
        if count == 0 {
            return;
        }
        opening.cursor += count;
        let content = memory.extent_mut(slot);
        for (at, block) in (first..first + count).zip(content.chunks_exact_mut(BLOCK_SIZE as usize))
        {
            if at < journal {
                encode_header(&self.config.move_id, &Header::new(at, journal), block);
                continue;
            }
            for (index, bytes) in (0..SECTORS_PER_BITMAP_BLOCK).zip(block.chunks_exact_mut(512)) {
                let sector = (at - journal) * SECTORS_PER_BITMAP_BLOCK + index;
                self.map.compose_all(&self.config.move_id, sector, bytes);
            }
        }
        let io = self.opening_io(u64::from(slot));
        self.metadata_written += count * BLOCK_SIZE;
        self.actions.push_back(Action::Write {
            io,
            device: Device::Metadata,
            offset: (JOURNAL_FIRST + first) * BLOCK_SIZE,
            length: (count * BLOCK_SIZE) as u32,
            buffer: Buffer::Extent { slot, offset: 0 },
            fua: false,
        });
    }

    /// Where the present step reads in the metadata: from, and how many blocks.
    fn chunk_area(&self, step: Step) -> (u64, u64) {
        if step == Step::Bitmap {
            (
                self.superblock.bitmap_first(),
                self.superblock.bitmap_blocks,
            )
        } else {
            (JOURNAL_FIRST, self.superblock.journal_blocks)
        }
    }

    fn read_chunk(&mut self, slot: u16) {
        let Some(step) = self.opening().map(|opening| opening.step) else {
            return;
        };
        let (first, blocks) = self.chunk_area(step);
        let most = u64::from(self.config.region_blocks);
        let copies = usize::from(self.config.copies);
        let Some(opening) = self.opening() else {
            return;
        };
        let at = opening.cursor;
        let count = most.min(blocks - at);
        if count == 0 {
            return;
        }
        opening.cursor += count;
        opening.chunks.resize(copies, Chunk::default());
        opening.chunks[usize::from(slot)] = Chunk {
            first: at,
            count,
            ..Chunk::default()
        };
        let io = self.opening_io(u64::from(slot));
        self.actions.push_back(Action::Read {
            io,
            device: Device::Metadata,
            offset: (first + at) * BLOCK_SIZE,
            length: (count * BLOCK_SIZE) as u32,
            buffer: Buffer::Extent { slot, offset: 0 },
        });
    }

    /// Read the next piece of a chunk that cannot be read at once; false if
    /// there is none.
    fn read_piece(&mut self, slot: u16) -> bool {
        let Some(step) = self.opening().map(|opening| opening.step) else {
            return false;
        };
        let (area, _) = self.chunk_area(step);
        let unit = self.config.logical_block_size;
        let Some(opening) = self.opening() else {
            return false;
        };
        let chunk = opening.chunks[usize::from(slot)];
        let Some(at) = chunk.pieces.filter(|at| *at < chunk.count * BLOCK_SIZE) else {
            return false;
        };
        let io = self.opening_io(u64::from(slot));
        self.actions.push_back(Action::Read {
            io,
            device: Device::Metadata,
            offset: (area + chunk.first) * BLOCK_SIZE + at,
            length: unit,
            buffer: Buffer::Extent {
                slot,
                offset: at as u32,
            },
        });
        true
    }

    /// A chunk of the metadata was read, or a piece of it, or not: what cannot
    /// be read is as good as damaged.
    fn chunk_ended<M: Memory>(
        &mut self,
        slot: u16,
        result: Result<(), Failure>,
        memory: &mut M,
    ) -> Result<(), OpenError> {
        let unit = u64::from(self.config.logical_block_size);
        let version = self.superblock.version;
        let Some(opening) = self.opening() else {
            return Ok(());
        };
        let step = opening.step;
        let chunk = &mut opening.chunks[usize::from(slot)];
        match (&mut chunk.pieces, result) {
            (None, Ok(())) => {}
            (None, Err(_)) => {
                chunk.pieces = Some(0);
                chunk.dead = true;
            }
            (Some(at), result) => {
                if let Err(failure) = result {
                    if version == VERSION_1 {
                        // Nothing would tell it from what was never written.
                        return Err(OpenError::Device(Device::Metadata, failure));
                    }
                    let at = *at as usize;
                    memory.extent_mut(slot)[at..at + unit as usize].fill(0);
                } else {
                    chunk.dead = false;
                }
                *at += unit;
            }
        }
        let chunk = *chunk;
        if self.read_piece(slot) {
            return Ok(());
        }
        if let (true, Err(failure)) = (chunk.dead && chunk.count > 1, result) {
            return Err(OpenError::Device(Device::Metadata, failure));
        }
        let content = &memory.extent(slot)[..(chunk.count * BLOCK_SIZE) as usize];
        self.read_metadata(step, chunk.first, content);
        Ok(())
    }

    /// Go to the next step; all of the present one has ended.
    fn opening_next(&mut self) {
        let rules = self.rules;
        let unreadable = self.superblock.unreadable;
        let Some(opening) = self.opening() else {
            return;
        };
        opening.begun = false;
        opening.cursor = 0;
        let next = match opening.step {
            Step::Zero => Step::FlushZeros,
            Step::FlushZeros => {
                self.superblock = self.wanted;
                self.wanted.generation = 1;
                self.begin_map();
                self.hydration.holes = self.config.destination_zeroed;
                Step::Blank
            }
            Step::Blank => Step::FlushBlank,
            Step::FlushBlank => {
                self.wanted.version = VERSION;
                self.wanted.generation += u64::from(self.superblock.version == VERSION_1);
                Step::First
            }
            Step::Flush => Step::Superblocks,
            Step::Superblocks => {
                if let Err(error) = self.choose_superblock() {
                    return self.open_failed(error);
                }
                self.begin_map();
                Step::Bitmap
            }
            Step::Bitmap => Step::Headers,
            Step::Headers => {
                let newest = opening.window.epoch;
                if newest > self.superblock.epoch {
                    self.lose(Part::Superblock);
                    return self.refuse_lost();
                }
                let epoch = self.superblock.epoch;
                if let Some(opening) = self.opening() {
                    // There may be no block of this epoch yet.
                    if opening.window.see(&Header::of_epoch(epoch)) {
                        opening.voids.clear();
                    }
                }
                Step::Entries
            }
            Step::Entries => {
                if !opening.lost.is_empty() {
                    return self.refuse_lost();
                }
                opening.intents.extend_from_slice(unreadable.intents());
                opening.intents.sort_unstable();
                opening.intents.dedup();
                if rules.keep(Rule::Compare) {
                    Step::Compare
                } else {
                    let intents = core::mem::take(&mut opening.intents);
                    for intent in intents {
                        self.map.set_local(intent.block);
                    }
                    Step::Bits
                }
            }
            Step::Compare => {
                if self.rules.keep(Rule::RecordBeforeNewEpoch) {
                    Step::Bits
                } else {
                    Step::Sync
                }
            }
            Step::Bits => Step::Sync,
            Step::Sync => {
                let unreadable = match self.keep_unreadable() {
                    Ok(unreadable) => unreadable,
                    Err(error) => return self.open_failed(error),
                };
                self.wanted = Superblock {
                    unreadable,
                    generation: self.superblock.generation + 1,
                    epoch: self.superblock.epoch + u64::from(self.rules.keep(Rule::NewEpoch)),
                    complete: self.superblock.complete && self.map.remote() == 0,
                    ..self.superblock
                };
                if self.superblock.version == VERSION_1 {
                    Step::SuperblockV1
                } else {
                    Step::First
                }
            }
            Step::SuperblockV1 => {
                self.superblock = self.wanted;
                Step::Blank
            }
            Step::First => Step::Second,
            Step::Second => {
                self.superblock = self.wanted;
                self.log = Log::new(self.superblock.journal_blocks, self.config.unsettled);
                // Twice, so that it need not grow for what was removed.
                self.unsettled.reserve(self.config.unsettled * 2);
                for intent in self.superblock.unreadable.intents() {
                    if self.unreadable.insert(intent.block) {
                        self.actions
                            .push_back(Action::Notice(Notice::UnreadableData {
                                offset: intent.block * BLOCK_SIZE,
                                length: BLOCK_SIZE as u32,
                            }));
                    }
                }
                if !self.rules.keep(Rule::HolesOnlyWhenNew) {
                    self.hydration.holes = self.config.destination_zeroed;
                }
                self.state = State::Open;
                self.actions.push_back(Action::Notice(Notice::Open));
                self.retry = true;
                return;
            }
        };
        if let Some(opening) = self.opening() {
            opening.step = next;
        }
    }

    fn begin_map(&mut self) {
        self.map = Map::new(self.superblock.blocks(), self.config.region_blocks);
    }

    fn choose_superblock(&mut self) -> Result<(), OpenError> {
        let move_id = self.config.move_id;
        let Some(opening) = self.opening() else {
            return Ok(());
        };
        let mine = opening.superblocks.map(|copy| {
            copy.and_then(|found| {
                if found.move_id == move_id {
                    Ok(found)
                } else {
                    Err(Damage::Magic)
                }
            })
        });
        let found = match choose(&mine) {
            Ok(found) => found,
            Err(Unusable::NewerLost(_)) => {
                return Err(OpenError::Lost {
                    first: Part::Superblock,
                    count: 1,
                });
            }
            Err(Unusable::Neither(damage)) => {
                return Err(match opening.superblocks {
                    [Ok(foreign), _] | [_, Ok(foreign)] => OpenError::ForeignMove {
                        found: foreign.move_id,
                    },
                    _ => OpenError::Superblock(damage),
                });
            }
        };
        let config = &self.config;
        let figures = [
            (
                "the source's size",
                found.source_size,
                config.source_size,
                found.source_size == config.source_size,
            ),
            (
                "the logical block size",
                u64::from(found.logical_block_size),
                u64::from(config.logical_block_size),
                found.logical_block_size == config.logical_block_size,
            ),
            (
                "the size",
                found.size,
                config.size,
                found.size == config.size,
            ),
        ];
        if let Some((what, found, wanted, _)) = figures.into_iter().find(|figure| !figure.3) {
            return Err(OpenError::Mismatch {
                what,
                found,
                wanted,
            });
        }
        if config.metadata_size < found.metadata_size() {
            return Err(OpenError::TooSmall {
                needed: found.metadata_size(),
                found: config.metadata_size,
            });
        }
        self.superblock = found;
        self.wanted = found;
        Ok(())
    }

    /// An operation of opening has ended.
    pub(crate) fn opening_ended<M: Memory>(
        &mut self,
        detail: u64,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        let Some(opening) = self.opening() else {
            return;
        };
        opening.pending -= 1;
        let step = opening.step;
        match (step, result) {
            (Step::Superblocks, result) => {
                let slot = (detail >> 8) as u16;
                let copy = match result {
                    Ok(()) => Superblock::decode(memory.block(slot)),
                    Err(_) => Err(Damage::Unreadable),
                };
                opening.superblocks[(detail & 1) as usize] = copy;
                self.give_block(slot);
            }
            (Step::Bitmap | Step::Headers | Step::Entries, result) => {
                if let Err(error) = self.chunk_ended(detail as u16, result, memory) {
                    self.open_failed(error);
                }
            }
            (Step::Compare, Err(failure)) => self.cannot_compare(detail as u16, failure),
            (_, Err(failure)) => {
                self.open_failed(OpenError::Device(Device::Metadata, failure));
            }
            (Step::Compare, _) => self.compare(detail as u16, memory),
            (Step::Bits | Step::SuperblockV1 | Step::First | Step::Second, _) => {
                self.give_block(detail as u16);
            }
            _ => {}
        }
    }

    /// A damaged part of the metadata may have said something.
    fn lose(&mut self, part: Part) {
        if let Some(opening) = self.opening() {
            opening.lost.push(part);
        }
    }

    /// Nothing has been written.
    fn refuse_lost(&mut self) {
        let Some(opening) = self.opening() else {
            return;
        };
        opening.lost.sort_unstable();
        let count = opening.lost.len() as u64;
        if let Some(first) = opening.lost.first().copied() {
            self.open_failed(OpenError::Lost { first, count });
        }
    }

    fn read_metadata(&mut self, step: Step, first: u64, content: &[u8]) {
        let blocks = (first..).zip(content.chunks_exact(BLOCK_SIZE as usize));
        for (number, block) in blocks {
            match step {
                Step::Bitmap => self.read_bitmap_block(number, block),
                _ if self.superblock.version == VERSION_1 => {
                    self.read_journal_v1(step, number, block);
                }
                _ => self.read_journal(step, number, block),
            }
        }
    }

    fn read_bitmap_block(&mut self, number: u64, block: &[u8]) {
        let decode = match self.superblock.version {
            VERSION_1 => decode_sector_v1,
            _ => decode_sector,
        };
        for (index, sector) in block.chunks_exact(512).enumerate() {
            let sector_number = number * SECTORS_PER_BITMAP_BLOCK + index as u64;
            let Ok(words) = decode(&self.config.move_id, sector_number, sector) else {
                self.lose(Part::Bitmap(sector_number));
                continue;
            };
            let at = number as usize * WORDS_PER_BITMAP_BLOCK + index * WORDS_PER_SECTOR;
            self.map.load(at, &words);
        }
    }

    fn read_journal(&mut self, step: Step, place: u64, block: &[u8]) {
        let blocks = self.superblock.journal_blocks;
        let headers = journal::headers(&self.config.move_id, place, blocks, block);
        if step == Step::Entries {
            let Some(opening) = self.opening() else {
                return;
            };
            if journal::is_lost(&headers, &opening.window, place, blocks) {
                return self.lose(Part::Journal(place));
            }
        }
        for (index, sector) in block.chunks_exact(journal::SECTOR).enumerate() {
            if let Some(header) = headers[index] {
                let entries = journal::entries(&header, index, sector);
                self.read_record(step, &header, entries);
            }
        }
    }

    fn read_journal_v1(&mut self, step: Step, place: u64, block: &[u8]) {
        let blocks = self.superblock.journal_blocks;
        let header = journal::v1::decode_header(&self.config.move_id, block);
        if let Some(header) = header.filter(|header| header.sequence % blocks == place) {
            let entries = journal::v1::entries(&header, block);
            self.read_record(step, &header, entries);
        }
    }

    fn read_record(&mut self, step: Step, header: &Header, entries: impl Iterator<Item = Entry>) {
        if step == Step::Headers {
            self.see_header(header, entries);
        } else if header.epoch == self.superblock.epoch {
            self.read_entries(header, entries);
        }
    }

    fn see_header(&mut self, header: &Header, entries: impl Iterator<Item = Entry>) {
        let Some(opening) = self.opening() else {
            return;
        };
        if opening.window.see(header) {
            opening.voids.clear();
        }
        if header.epoch < opening.window.epoch {
            return;
        }
        for entry in entries {
            if let Entry::Void { block } = entry {
                let void = opening.voids.entry(block).or_default();
                *void = header.sequence.max(*void);
            }
        }
    }

    fn read_entries(&mut self, header: &Header, entries: impl Iterator<Item = Entry>) {
        let blocks = self.map.blocks();
        let keeps_tail = self.rules.keep(Rule::Tail);
        let keeps_settled = self.rules.keep(Rule::SettledIsLocal);
        let epoch = self.superblock.epoch;
        let State::Opening(opening) = &mut self.state else {
            return;
        };
        if keeps_tail && header.sequence < opening.window.tail {
            return;
        }
        for entry in entries {
            match entry {
                Entry::Local { block, count } => {
                    let end = block.saturating_add(u64::from(count)).min(blocks);
                    (block..end).for_each(|block| self.map.set_local(block));
                }
                Entry::Intent { block, checksum } if block < blocks => {
                    let voided = opening
                        .voids
                        .get(&block)
                        .is_some_and(|void| *void > header.sequence);
                    if voided || self.map.is_local(block) {
                        continue;
                    }
                    if keeps_settled && header.sequence <= opening.window.settled {
                        self.map.set_local(block);
                    } else {
                        opening.intents.push(Intent {
                            block,
                            epoch,
                            checksum,
                        });
                    }
                }
                _ => {}
            }
        }
    }

    /// Read blocks of the destination that have intents.
    fn begin_comparing(&mut self) {
        while self.free_blocks.len() > 8 {
            let State::Opening(opening) = &mut self.state else {
                return;
            };
            let Some(Intent { block, .. }) = opening.intents.get(opening.cursor as usize).copied()
            else {
                return;
            };
            while opening
                .intents
                .get(opening.cursor as usize)
                .is_some_and(|next| next.block == block)
            {
                opening.cursor += 1;
            }
            if self.map.is_local(block) {
                continue;
            }
            let Some(slot) = self.free_blocks.pop() else {
                return;
            };
            opening.comparing.push((slot, block, 1));
            self.read_compared(slot, block);
        }
    }

    fn read_compared(&mut self, slot: u16, block: u64) {
        let io = self.opening_io(u64::from(slot));
        self.actions.push_back(Action::Read {
            io,
            device: Device::Data,
            offset: block * BLOCK_SIZE,
            length: BLOCK_SIZE as u32,
            buffer: Buffer::Block(slot),
        });
    }

    /// A block of the destination cannot be read: it stays unknown whether it is
    /// local. A destination that fails as a whole is another matter.
    fn cannot_compare(&mut self, slot: u16, failure: Failure) {
        let State::Opening(opening) = &mut self.state else {
            return;
        };
        let found = opening.comparing.iter().position(|entry| entry.0 == slot);
        let Some(at) = found else {
            return;
        };
        if !matches!(failure, Failure::Io | Failure::BadSector) {
            return self.open_failed(OpenError::Device(Device::Data, failure));
        }
        let (_, block, tries) = &mut opening.comparing[at];
        let block = *block;
        if *tries < COMPARE_TRIES {
            *tries += 1;
            return self.read_compared(slot, block);
        }
        opening.comparing.swap_remove(at);
        opening.failure = Some(failure);
        self.stays_unreadable(block);
        self.give_block(slot);
    }

    /// Nothing is known of what a block holds but what it may be.
    fn stays_unreadable(&mut self, block: u64) {
        if let Some(opening) = self.opening() {
            let from = opening
                .intents
                .partition_point(|intent| intent.block < block);
            let to = opening
                .intents
                .partition_point(|intent| intent.block <= block);
            let Opening {
                intents,
                unreadable,
                ..
            } = opening;
            unreadable.extend_from_slice(&intents[from..to]);
        }
    }

    /// What is remembered of blocks that cannot be read: the newest intent of
    /// each, and as many of the others as there is room for.
    fn keep_unreadable(&mut self) -> Result<Unreadable, OpenError> {
        let mut kept = Unreadable::default();
        let Some(opening) = self.opening() else {
            return Ok(kept);
        };
        let failure = opening.failure.unwrap_or(Failure::Io);
        opening.unreadable.sort_unstable();
        opening.unreadable.reverse();
        for intent in &opening.unreadable {
            if !kept.has(intent.block) && !kept.push(*intent) {
                return Err(OpenError::Device(Device::Data, failure));
            }
        }
        for intent in &opening.unreadable {
            if !kept.intents().contains(intent) && !kept.push(*intent) {
                break;
            }
        }
        Ok(kept)
    }

    fn compare<M: Memory>(&mut self, slot: u16, memory: &M) {
        let State::Opening(opening) = &mut self.state else {
            return;
        };
        let found = opening.comparing.iter().position(|entry| entry.0 == slot);
        let Some(at) = found else {
            return;
        };
        let (_, block, _) = opening.comparing.swap_remove(at);
        let from = opening
            .intents
            .partition_point(|intent| intent.block < block);
        let mut intents = opening.intents[from..]
            .iter()
            .take_while(|intent| intent.block == block);
        let content = memory.block(slot);
        if intents.any(|intent| checksum(intent.epoch, block, content) == intent.checksum) {
            self.map.set_local(block);
        } else if self.superblock.unreadable.has(block) {
            // It may be what the guest wrote later, in part.
            self.stays_unreadable(block);
        }
        self.give_block(slot);
    }
}
