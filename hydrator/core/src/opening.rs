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

use crate::context::{Context, Job};
use crate::format::bitmap::{
    SECTORS_PER_BITMAP_BLOCK, WORDS_PER_BITMAP_BLOCK, WORDS_PER_SECTOR, decode_sector,
    decode_sector_v1,
};
use crate::format::journal::{self, Entry, Header, Window, checksum, encode_header};
use crate::format::superblock::{
    Damage, Intent, JOURNAL_FIRST, Superblock, Unreadable, Unusable, VERSION, VERSION_1, choose,
};
use crate::io::{Buffer, Device, Failure, Memory, Notice, OpenError};
use crate::part::Part;
use crate::regions::Regions;
use crate::rules::Rule;
use crate::units::{BLOCK_SIZE, Block, Blocks, Bytes, Sequence};

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

impl Step {
    /// It is begun again until there is nothing left to be handed out.
    const fn is_long(self) -> bool {
        matches!(
            self,
            Self::Bitmap | Self::Headers | Self::Entries | Self::Compare | Self::Bits | Self::Blank
        )
    }
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
    /// The superblock that it comes to.
    wanted: Superblock,
    regions: Regions,
    /// Remote blocks of the destination read as zeros.
    holes: bool,
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

/// What the opening of a volume has come to.
#[derive(Debug)]
pub(crate) struct Opened {
    /// As they are on the metadata device now.
    pub(crate) superblock: Superblock,
    pub(crate) regions: Regions,
    /// Remote blocks of the destination read as zeros.
    pub(crate) holes: bool,
}

impl Opening {
    fn new(step: Step, wanted: Superblock) -> Self {
        Self {
            step,
            begun: false,
            pending: 0,
            cursor: 0,
            chunks: Vec::new(),
            superblocks: [Err(Damage::Short); 2],
            wanted,
            regions: Regions::default(),
            holes: false,
            window: Window::default(),
            lost: Vec::new(),
            failure: None,
            voids: HashMap::new(),
            intents: Vec::new(),
            comparing: Vec::new(),
            unreadable: Vec::new(),
        }
    }

    /// New metadata.
    pub(crate) fn format(wanted: Superblock) -> Self {
        Self::new(Step::Zero, wanted)
    }

    /// Recovery; what is asked for is as in this superblock.
    pub(crate) fn recover(wanted: Superblock) -> Self {
        Self::new(Step::Flush, wanted)
    }

    /// Hand out what the present step needs, or go to the next one; what it has
    /// come to when that was the last.
    ///
    /// # Errors
    /// Why the volume cannot be opened.
    pub(crate) fn advance<M: Memory>(
        &mut self,
        cx: &mut Context,
        memory: &mut M,
    ) -> Result<Option<Opened>, OpenError> {
        loop {
            let begun = core::mem::replace(&mut self.begun, true);
            if begun && self.pending > 0 {
                return Ok(None);
            }
            if !begun || self.step.is_long() {
                self.begin(cx, memory);
                if self.pending > 0 {
                    return Ok(None);
                }
            }
            let Some(next) = self.next(cx)? else {
                return Ok(Some(self.opened(cx)));
            };
            self.step = next;
            self.begun = false;
            self.cursor = 0;
        }
    }

    fn opened(&mut self, cx: &mut Context) -> Opened {
        let mut regions = core::mem::take(&mut self.regions);
        regions.reserve(cx.config.unsettled);
        for intent in self.wanted.unreadable.intents() {
            let block = Block(intent.block);
            if regions.is_not_readable(block) {
                cx.notify(Notice::UnreadableData {
                    offset: block.start().0,
                    length: BLOCK_SIZE as u32,
                });
            }
        }
        Opened {
            superblock: self.wanted,
            regions,
            holes: if cx.rules.keep(Rule::HolesOnlyWhenNew) {
                self.holes
            } else {
                cx.config.destination_zeroed
            },
        }
    }

    /// An operation is in flight.
    fn job(&mut self, detail: u32) -> Job {
        self.pending += 1;
        Job::Opening(detail)
    }

    fn flush(&mut self, device: Device, cx: &mut Context) {
        let job = self.job(0);
        cx.flush(job, device);
    }

    fn begin<M: Memory>(&mut self, cx: &mut Context, memory: &mut M) {
        match self.step {
            Step::Zero => {
                let job = self.job(0);
                cx.zero_metadata(job, JOURNAL_FIRST);
            }
            Step::Blank => {
                for slot in 0..cx.config.copies {
                    self.write_blank(slot, cx, memory);
                }
            }
            Step::FlushZeros | Step::FlushBlank => self.flush(Device::Metadata, cx),
            Step::Sync => {
                if cx.rules.keep(Rule::FlushBeforeNewEpoch) {
                    self.flush(Device::Metadata, cx);
                }
            }
            Step::Flush => {
                if cx.rules.keep(Rule::FlushBeforeRecovery) {
                    self.flush(Device::Data, cx);
                    self.flush(Device::Metadata, cx);
                }
            }
            Step::Superblocks => {
                for block in 0..2 {
                    let Some(slot) = cx.free_blocks.pop() else {
                        return;
                    };
                    let job = self.job(u32::from(slot) << 8 | block);
                    let bytes = Bytes::run(u64::from(block) * BLOCK_SIZE, BLOCK_SIZE);
                    cx.read_metadata(job, bytes, Buffer::Block(slot));
                }
            }
            Step::Bitmap | Step::Headers | Step::Entries => {
                for slot in 0..cx.config.copies {
                    self.read_chunk(slot, cx);
                }
            }
            Step::Compare => self.begin_comparing(cx),
            Step::Bits => {
                while cx.free_blocks.len() > 8 {
                    let Some(dirty) = self.regions.take_dirty(0) else {
                        return;
                    };
                    let Some(slot) = cx.free_blocks.pop() else {
                        return;
                    };
                    let block = memory.block_mut(slot);
                    let move_id = &cx.config.move_id;
                    self.regions.compose(move_id, dirty, Sequence(0), block);
                    let job = self.job(u32::from(slot));
                    let at = Block(cx.superblock.bitmap_first() + dirty.0);
                    cx.write_metadata(job, at.alone(), Buffer::Block(slot), false);
                }
            }
            Step::SuperblockV1 => self.write_opened(self.wanted.location_v1(), cx, memory),
            Step::First => self.write_opened(0, cx, memory),
            Step::Second => self.write_opened(1, cx, memory),
        }
    }

    /// Write the superblock that was come to.
    fn write_opened<M: Memory>(&mut self, location: u64, cx: &mut Context, memory: &mut M) {
        let Some(slot) = cx.free_blocks.pop() else {
            return;
        };
        self.wanted.encode(memory.block_mut(slot));
        let job = self.job(u32::from(slot));
        cx.write_metadata(job, Block(location).alone(), Buffer::Block(slot), true);
    }

    /// Write the next blocks of a journal that says nothing, and of a bitmap
    /// that says what is local.
    fn write_blank<M: Memory>(&mut self, slot: u16, cx: &mut Context, memory: &mut M) {
        let journal = cx.superblock.journal_blocks;
        let blocks = journal + cx.superblock.bitmap_blocks;
        let first = self.cursor;
        let count = u64::from(cx.config.region_blocks).min(blocks - first);
        if count == 0 {
            return;
        }
        self.cursor += count;
        let content = memory.extent_mut(slot);
        for (at, block) in (first..first + count).zip(content.chunks_exact_mut(BLOCK_SIZE as usize))
        {
            if at < journal {
                encode_header(&cx.config.move_id, &Header::new(at, journal), block);
                continue;
            }
            for (index, bytes) in (0..SECTORS_PER_BITMAP_BLOCK).zip(block.chunks_exact_mut(512)) {
                let sector = (at - journal) * SECTORS_PER_BITMAP_BLOCK + index;
                let map = self.regions.map_mut();
                map.compose_all(&cx.config.move_id, sector, bytes);
            }
        }
        let job = self.job(u32::from(slot));
        let blocks = Blocks::run(Block(JOURNAL_FIRST + first), count);
        cx.write_metadata(job, blocks, Buffer::Extent { slot, offset: 0 }, false);
    }

    /// Where the present step reads in the metadata: from, and how many blocks.
    fn chunk_area(&self, cx: &Context) -> (u64, u64) {
        if self.step == Step::Bitmap {
            (cx.superblock.bitmap_first(), cx.superblock.bitmap_blocks)
        } else {
            (JOURNAL_FIRST, cx.superblock.journal_blocks)
        }
    }

    fn read_chunk(&mut self, slot: u16, cx: &mut Context) {
        let (first, blocks) = self.chunk_area(cx);
        let at = self.cursor;
        let count = u64::from(cx.config.region_blocks).min(blocks - at);
        if count == 0 {
            return;
        }
        self.cursor += count;
        let copies = usize::from(cx.config.copies);
        self.chunks.resize(copies, Chunk::default());
        self.chunks[usize::from(slot)] = Chunk {
            first: at,
            count,
            ..Chunk::default()
        };
        let job = self.job(u32::from(slot));
        let bytes = Bytes::run((first + at) * BLOCK_SIZE, count * BLOCK_SIZE);
        cx.read_metadata(job, bytes, Buffer::Extent { slot, offset: 0 });
    }

    /// Read the next piece of a chunk that cannot be read at once; false if
    /// there is none.
    fn read_piece(&mut self, slot: u16, cx: &mut Context) -> bool {
        let (area, _) = self.chunk_area(cx);
        let unit = u64::from(cx.config.logical_block_size);
        let chunk = self.chunks[usize::from(slot)];
        let Some(at) = chunk.pieces.filter(|at| *at < chunk.count * BLOCK_SIZE) else {
            return false;
        };
        let job = self.job(u32::from(slot));
        let bytes = Bytes::run((area + chunk.first) * BLOCK_SIZE + at, unit);
        let offset = at as u32;
        cx.read_metadata(job, bytes, Buffer::Extent { slot, offset });
        true
    }

    /// A chunk of the metadata was read, or a piece of it, or not: what cannot
    /// be read is as good as damaged.
    fn chunk_ended<M: Memory>(
        &mut self,
        slot: u16,
        result: Result<(), Failure>,
        cx: &mut Context,
        memory: &mut M,
    ) -> Result<(), OpenError> {
        let unit = u64::from(cx.config.logical_block_size);
        let chunk = &mut self.chunks[usize::from(slot)];
        match (&mut chunk.pieces, result) {
            (None, Ok(())) => {}
            (None, Err(_)) => {
                chunk.pieces = Some(0);
                chunk.dead = true;
            }
            (Some(at), result) => {
                if let Err(failure) = result {
                    if cx.superblock.version == VERSION_1 {
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
        if self.read_piece(slot, cx) {
            return Ok(());
        }
        if let (true, Err(failure)) = (chunk.dead && chunk.count > 1, result) {
            return Err(OpenError::Device(Device::Metadata, failure));
        }
        let content = &memory.extent(slot)[..(chunk.count * BLOCK_SIZE) as usize];
        self.read_metadata(chunk.first, content, cx);
        Ok(())
    }

    /// All of the present step has ended: the next one.
    fn next(&mut self, cx: &mut Context) -> Result<Option<Step>, OpenError> {
        let next = match self.step {
            Step::Zero => Step::FlushZeros,
            Step::FlushZeros => {
                cx.superblock = self.wanted;
                self.wanted.generation = 1;
                self.begin_map(cx);
                self.holes = cx.config.destination_zeroed;
                Step::Blank
            }
            Step::Blank => Step::FlushBlank,
            Step::FlushBlank => {
                self.wanted.version = VERSION;
                self.wanted.generation += u64::from(cx.superblock.version == VERSION_1);
                Step::First
            }
            Step::Flush => Step::Superblocks,
            Step::Superblocks => {
                self.choose_superblock(cx)?;
                self.begin_map(cx);
                Step::Bitmap
            }
            Step::Bitmap => Step::Headers,
            Step::Headers => {
                let epoch = cx.superblock.epoch;
                if self.window.epoch > epoch {
                    self.lost.push(Part::Superblock);
                    self.refuse_lost()?;
                }
                // There may be no block of this epoch yet.
                if self.window.see(&Header::of_epoch(epoch)) {
                    self.voids.clear();
                }
                Step::Entries
            }
            Step::Entries => {
                self.refuse_lost()?;
                self.intents
                    .extend_from_slice(cx.superblock.unreadable.intents());
                self.intents.sort_unstable();
                self.intents.dedup();
                if cx.rules.keep(Rule::Compare) {
                    Step::Compare
                } else {
                    for intent in core::mem::take(&mut self.intents) {
                        self.regions.map_mut().set_local(Block(intent.block));
                    }
                    Step::Bits
                }
            }
            Step::Compare if cx.rules.keep(Rule::RecordBeforeNewEpoch) => Step::Bits,
            Step::Compare | Step::Bits => Step::Sync,
            Step::Sync => {
                self.wanted = Superblock {
                    unreadable: self.keep_unreadable()?,
                    generation: cx.superblock.generation + 1,
                    epoch: cx.superblock.epoch + u64::from(cx.rules.keep(Rule::NewEpoch)),
                    complete: cx.superblock.complete && self.regions.map().remote() == 0,
                    ..cx.superblock
                };
                if cx.superblock.version == VERSION_1 {
                    Step::SuperblockV1
                } else {
                    Step::First
                }
            }
            Step::SuperblockV1 => {
                cx.superblock = self.wanted;
                Step::Blank
            }
            Step::First => Step::Second,
            Step::Second => return Ok(None),
        };
        Ok(Some(next))
    }

    fn begin_map(&mut self, cx: &Context) {
        self.regions = Regions::new(cx.superblock.blocks(), cx.config.region_blocks);
    }

    fn choose_superblock(&mut self, cx: &mut Context) -> Result<(), OpenError> {
        let move_id = cx.config.move_id;
        let mine = self.superblocks.map(|copy| {
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
                return Err(match self.superblocks {
                    [Ok(foreign), _] | [_, Ok(foreign)] => OpenError::ForeignMove {
                        found: foreign.move_id,
                    },
                    _ => OpenError::Superblock(damage),
                });
            }
        };
        let config = &cx.config;
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
        cx.superblock = found;
        self.wanted = found;
        Ok(())
    }

    /// An operation has ended.
    ///
    /// # Errors
    /// Why the volume cannot be opened.
    pub(crate) fn ended<M: Memory>(
        &mut self,
        detail: u32,
        result: Result<(), Failure>,
        cx: &mut Context,
        memory: &mut M,
    ) -> Result<(), OpenError> {
        self.pending -= 1;
        match (self.step, result) {
            (Step::Superblocks, result) => {
                let slot = (detail >> 8) as u16;
                let copy = match result {
                    Ok(()) => Superblock::decode(memory.block(slot)),
                    Err(_) => Err(Damage::Unreadable),
                };
                self.superblocks[(detail & 1) as usize] = copy;
                cx.give_block(slot);
            }
            (Step::Bitmap | Step::Headers | Step::Entries, result) => {
                self.chunk_ended(detail as u16, result, cx, memory)?;
            }
            (Step::Compare, Err(failure)) => self.cannot_compare(detail as u16, failure, cx)?,
            (_, Err(failure)) => return Err(OpenError::Device(Device::Metadata, failure)),
            (Step::Compare, _) => self.compare(detail as u16, cx, memory),
            (Step::Bits | Step::SuperblockV1 | Step::First | Step::Second, _) => {
                cx.give_block(detail as u16);
            }
            _ => {}
        }
        Ok(())
    }

    /// Go no further if a damaged part of the metadata may have said something:
    /// nothing has been written.
    fn refuse_lost(&mut self) -> Result<(), OpenError> {
        self.lost.sort_unstable();
        let count = self.lost.len() as u64;
        match self.lost.first().copied() {
            Some(first) => Err(OpenError::Lost { first, count }),
            None => Ok(()),
        }
    }

    fn read_metadata(&mut self, first: u64, content: &[u8], cx: &Context) {
        let blocks = (first..).zip(content.chunks_exact(BLOCK_SIZE as usize));
        for (number, block) in blocks {
            match self.step {
                Step::Bitmap => self.read_bitmap_block(number, block, cx),
                _ if cx.superblock.version == VERSION_1 => {
                    self.read_journal_v1(number, block, cx);
                }
                _ => self.read_journal(number, block, cx),
            }
        }
    }

    fn read_bitmap_block(&mut self, number: u64, block: &[u8], cx: &Context) {
        let decode = match cx.superblock.version {
            VERSION_1 => decode_sector_v1,
            _ => decode_sector,
        };
        for (index, sector) in block.chunks_exact(512).enumerate() {
            let sector_number = number * SECTORS_PER_BITMAP_BLOCK + index as u64;
            let Ok(words) = decode(&cx.config.move_id, sector_number, sector) else {
                self.lost.push(Part::Bitmap(sector_number));
                continue;
            };
            let at = number as usize * WORDS_PER_BITMAP_BLOCK + index * WORDS_PER_SECTOR;
            self.regions.map_mut().load(at, &words);
        }
    }

    fn read_journal(&mut self, place: u64, block: &[u8], cx: &Context) {
        let blocks = cx.superblock.journal_blocks;
        let headers = journal::headers(&cx.config.move_id, place, blocks, block);
        if self.step == Step::Entries && journal::is_lost(&headers, &self.window, place, blocks) {
            return self.lost.push(Part::Journal(place));
        }
        for (index, sector) in block.chunks_exact(journal::SECTOR).enumerate() {
            if let Some(header) = headers[index] {
                let entries = journal::entries(&header, index, sector);
                self.read_record(&header, entries, cx);
            }
        }
    }

    fn read_journal_v1(&mut self, place: u64, block: &[u8], cx: &Context) {
        let blocks = cx.superblock.journal_blocks;
        let header = journal::v1::decode_header(&cx.config.move_id, block);
        if let Some(header) = header.filter(|header| header.sequence % blocks == place) {
            let entries = journal::v1::entries(&header, block);
            self.read_record(&header, entries, cx);
        }
    }

    fn read_record(&mut self, header: &Header, entries: impl Iterator<Item = Entry>, cx: &Context) {
        if self.step == Step::Headers {
            self.see_header(header, entries);
        } else if header.epoch == cx.superblock.epoch {
            self.read_entries(header, entries, cx);
        }
    }

    fn see_header(&mut self, header: &Header, entries: impl Iterator<Item = Entry>) {
        if self.window.see(header) {
            self.voids.clear();
        }
        if header.epoch < self.window.epoch {
            return;
        }
        for entry in entries {
            if let Entry::Void { block } = entry {
                let void = self.voids.entry(block).or_default();
                *void = header.sequence.max(*void);
            }
        }
    }

    fn read_entries(
        &mut self,
        header: &Header,
        entries: impl Iterator<Item = Entry>,
        cx: &Context,
    ) {
        if cx.rules.keep(Rule::Tail) && header.sequence < self.window.tail {
            return;
        }
        let settled = header.sequence <= self.window.settled;
        let map = self.regions.map_mut();
        let blocks = map.blocks();
        for entry in entries {
            match entry {
                Entry::Local { block, count } => {
                    let end = block.saturating_add(u64::from(count));
                    let local = Blocks::new(Block(block), Block(end)).within(blocks);
                    local.iter().for_each(|block| map.set_local(block));
                }
                Entry::Intent { block, checksum } if blocks.contains(Block(block)) => {
                    let void = self.voids.get(&block);
                    let voided = void.is_some_and(|void| *void > header.sequence);
                    if voided || map.is_local(Block(block)) {
                        continue;
                    }
                    if cx.rules.keep(Rule::SettledIsLocal) && settled {
                        map.set_local(Block(block));
                    } else {
                        self.intents.push(Intent {
                            block,
                            epoch: cx.superblock.epoch,
                            checksum,
                        });
                    }
                }
                _ => {}
            }
        }
    }

    /// Read blocks of the destination that have intents.
    fn begin_comparing(&mut self, cx: &mut Context) {
        while cx.free_blocks.len() > 8 {
            let next = self.intents.get(self.cursor as usize);
            let Some(Intent { block, .. }) = next.copied() else {
                return;
            };
            let after = self.intents.partition_point(|intent| intent.block <= block);
            self.cursor = after as u64;
            if self.regions.map().is_local(Block(block)) {
                continue;
            }
            let Some(slot) = cx.free_blocks.pop() else {
                return;
            };
            self.comparing.push((slot, block, 1));
            self.read_compared(slot, block, cx);
        }
    }

    fn read_compared(&mut self, slot: u16, block: u64, cx: &mut Context) {
        let job = self.job(u32::from(slot));
        let bytes = Bytes::run(block * BLOCK_SIZE, BLOCK_SIZE);
        cx.read(job, Device::Data, bytes, Buffer::Block(slot));
    }

    /// A block of the destination cannot be read: it stays unknown whether it is
    /// local. A destination that fails as a whole is another matter.
    fn cannot_compare(
        &mut self,
        slot: u16,
        failure: Failure,
        cx: &mut Context,
    ) -> Result<(), OpenError> {
        let found = self.comparing.iter().position(|entry| entry.0 == slot);
        let Some(at) = found else {
            return Ok(());
        };
        if !matches!(failure, Failure::Io | Failure::BadSector) {
            return Err(OpenError::Device(Device::Data, failure));
        }
        let (_, block, tries) = &mut self.comparing[at];
        let block = *block;
        if *tries < COMPARE_TRIES {
            *tries += 1;
            self.read_compared(slot, block, cx);
            return Ok(());
        }
        self.comparing.swap_remove(at);
        self.failure = Some(failure);
        self.stays_unreadable(block);
        cx.give_block(slot);
        Ok(())
    }

    /// Nothing is known of what a block holds but what it may be.
    fn stays_unreadable(&mut self, block: u64) {
        let from = self.intents.partition_point(|intent| intent.block < block);
        let to = self.intents.partition_point(|intent| intent.block <= block);
        self.unreadable.extend_from_slice(&self.intents[from..to]);
    }

    /// What is remembered of blocks that cannot be read: the newest intent of
    /// each, and as many of the others as there is room for.
    fn keep_unreadable(&mut self) -> Result<Unreadable, OpenError> {
        let mut kept = Unreadable::default();
        let failure = self.failure.unwrap_or(Failure::Io);
        self.unreadable.sort_unstable();
        self.unreadable.reverse();
        for intent in &self.unreadable {
            if !kept.has(intent.block) && !kept.push(*intent) {
                return Err(OpenError::Device(Device::Data, failure));
            }
        }
        for intent in &self.unreadable {
            if !kept.intents().contains(intent) && !kept.push(*intent) {
                break;
            }
        }
        Ok(kept)
    }

    fn compare<M: Memory>(&mut self, slot: u16, cx: &mut Context, memory: &M) {
        let found = self.comparing.iter().position(|entry| entry.0 == slot);
        let Some(at) = found else {
            return;
        };
        let (_, block, _) = self.comparing.swap_remove(at);
        let from = self.intents.partition_point(|intent| intent.block < block);
        let mut intents = self.intents[from..]
            .iter()
            .take_while(|intent| intent.block == block);
        let content = memory.block(slot);
        if intents.any(|intent| checksum(intent.epoch, block, content) == intent.checksum) {
            self.regions.map_mut().set_local(Block(block));
        } else if cx.superblock.unreadable.has(block) {
            // It may be what the guest wrote later, in part.
            self.stays_unreadable(block);
        }
        cx.give_block(slot);
    }
}
