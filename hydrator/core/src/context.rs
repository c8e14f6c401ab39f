// SPDX-License-Identifier: Apache-2.0

//! What all parts of a volume share: what they are told, and the way out.

use std::collections::VecDeque;

use crate::config::Config;
use crate::format::superblock::Superblock;
use crate::io::{Action, Buffer, Device, Failure, Io, Notice, Tag, Time};
use crate::pace::Pace;
use crate::rules::{Rule, Rules};
use crate::units::{BLOCK_SIZE, Blocks, Bytes};

/// What an operation is for: whose it is when it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    /// Nothing waits for it.
    Nobodys,
    /// A guest's, passed through.
    Passed(Tag),
    /// The same, and durable when it ends.
    PassedFua(Tag),
    /// A request's that could not be passed through.
    Request(u32),
    /// A read from the source for such a request.
    Source(u32),
    /// A group of the journal.
    Group(u32),
    /// A flush of this device.
    Flush(Device),
    /// A block of the bitmap, in this buffer.
    Bitmap(u16),
    /// The flush of the bitmap.
    BitmapFlush,
    /// A copy of the superblock.
    Superblock,
    /// A copy is read from the source, into this buffer.
    CopyRead(u16),
    /// It is written, or a piece of it.
    CopyWrite(u16),
    /// Zeros that the destination has already are looked for.
    CopyLook(u16),
    /// It is read again, from either side.
    Verify(u16),
    /// For an opening.
    Opening(u32),
}

impl Job {
    /// As a name for the caller: what it is in the upper half, whose in the
    /// lower one.
    const fn io(self) -> Io {
        let (kind, detail) = match self {
            Self::Nobodys => (0, 0),
            Self::Passed(tag) => (1, tag.0),
            Self::PassedFua(tag) => (2, tag.0),
            Self::Request(key) => (3, key),
            Self::Source(piece) => (4, piece),
            Self::Group(index) => (5, index),
            Self::Flush(Device::Data) => (6, 0),
            Self::Flush(_) => (6, 1),
            Self::Bitmap(slot) => (7, slot as u32),
            Self::BitmapFlush => (8, 0),
            Self::Superblock => (9, 0),
            Self::CopyRead(slot) => (10, slot as u32),
            Self::CopyWrite(slot) => (11, slot as u32),
            Self::Verify(slot) => (12, slot as u32),
            Self::Opening(detail) => (13, detail),
            Self::CopyLook(slot) => (14, slot as u32),
        };
        Io(kind << 32 | detail as u64)
    }

    /// Back from its name.
    pub(crate) const fn of(io: Io) -> Self {
        let detail = io.0 as u32;
        match io.0 >> 32 {
            1 => Self::Passed(Tag(detail)),
            2 => Self::PassedFua(Tag(detail)),
            3 => Self::Request(detail),
            4 => Self::Source(detail),
            5 => Self::Group(detail),
            6 if detail == 0 => Self::Flush(Device::Data),
            6 => Self::Flush(Device::Metadata),
            7 => Self::Bitmap(detail as u16),
            8 => Self::BitmapFlush,
            9 => Self::Superblock,
            10 => Self::CopyRead(detail as u16),
            11 => Self::CopyWrite(detail as u16),
            12 => Self::Verify(detail as u16),
            13 => Self::Opening(detail),
            14 => Self::CopyLook(detail as u16),
            _ => Self::Nobodys,
        }
    }
}

/// What all parts of a volume share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) config: Config,
    pub(crate) rules: Rules,
    /// When the volume was called.
    pub(crate) now: Time,
    /// As it is on the metadata device.
    pub(crate) superblock: Superblock,
    /// How fast to copy beside the guest's requests.
    pub(crate) pace: Pace,
    /// Buffers of 4 KiB that are free.
    pub(crate) free_blocks: Vec<u16>,
    /// A disk has failed what it must not: nothing is recorded any more.
    pub(crate) broken: bool,
    /// The destination has failed to make something durable, and may have
    /// dropped what it had in its cache: no flush of it says anything any more.
    pub(crate) dropped: bool,
    /// No more requests are taken.
    pub(crate) closing: bool,
    /// Something has changed that a request may wait for.
    pub(crate) changed: bool,
    /// Bytes written to the metadata device.
    pub(crate) metadata_written: u64,
    actions: VecDeque<Action>,
}

impl Context {
    pub(crate) fn new(config: Config, superblock: Superblock) -> Self {
        Self {
            rules: Rules::default(),
            now: Time(0),
            superblock,
            pace: Pace::new(&config),
            free_blocks: (0..config.block_slots).rev().collect(),
            broken: false,
            dropped: false,
            closing: false,
            changed: false,
            metadata_written: 0,
            actions: VecDeque::with_capacity(1024),
            config,
        }
    }

    /// Hand out what is to be done.
    pub(crate) fn hand_out(&mut self, sink: impl FnMut(Action)) {
        self.actions.drain(..).for_each(sink);
    }

    #[inline]
    pub(crate) fn read(&mut self, job: Job, device: Device, bytes: Bytes, buffer: Buffer) {
        self.actions.push_back(Action::Read {
            io: job.io(),
            device,
            offset: bytes.from.0,
            length: bytes.length() as u32,
            buffer,
        });
    }

    /// Write to the destination.
    #[inline]
    pub(crate) fn write(&mut self, job: Job, bytes: Bytes, buffer: Buffer, fua: bool) {
        self.actions.push_back(Action::Write {
            io: job.io(),
            device: Device::Data,
            offset: bytes.from.0,
            length: bytes.length() as u32,
            buffer,
            fua,
            kept: false,
        });
    }

    /// Have bytes of the destination read as zeros.
    #[inline]
    pub(crate) fn zero(&mut self, job: Job, bytes: Bytes, fua: bool) {
        self.actions.push_back(Action::Zero {
            io: job.io(),
            device: Device::Data,
            offset: bytes.from.0,
            length: bytes.length(),
            fua,
        });
    }

    pub(crate) fn flush(&mut self, job: Job, device: Device) {
        self.actions.push_back(Action::Flush {
            io: job.io(),
            device,
        });
    }

    /// Read blocks of the metadata.
    pub(crate) fn read_metadata(&mut self, job: Job, bytes: Bytes, buffer: Buffer) {
        self.read(job, Device::Metadata, bytes, buffer);
    }

    /// Write blocks of the metadata.
    pub(crate) fn write_metadata(&mut self, job: Job, blocks: Blocks, buffer: Buffer, fua: bool) {
        self.write_and_keep(job, blocks, buffer, fua, false);
    }

    /// The same, of what the end of the process must not take.
    pub(crate) fn write_kept(&mut self, job: Job, blocks: Blocks, buffer: Buffer, fua: bool) {
        let kept = self.rules.keep(Rule::KeepIntents);
        self.write_and_keep(job, blocks, buffer, fua, kept);
    }

    fn write_and_keep(&mut self, job: Job, blocks: Blocks, buffer: Buffer, fua: bool, kept: bool) {
        self.metadata_written += blocks.bytes();
        self.actions.push_back(Action::Write {
            io: job.io(),
            device: Device::Metadata,
            offset: blocks.first.start().0,
            length: blocks.bytes() as u32,
            buffer,
            fua,
            kept,
        });
    }

    /// Have the first so many blocks of the metadata read as zeros.
    pub(crate) fn zero_metadata(&mut self, job: Job, blocks: u64) {
        self.actions.push_back(Action::Zero {
            io: job.io(),
            device: Device::Metadata,
            offset: 0,
            length: blocks * BLOCK_SIZE,
            fua: false,
        });
    }

    pub(crate) fn notify(&mut self, notice: Notice) {
        self.actions.push_back(Action::Notice(notice));
    }

    /// Answer the guest; a successor answers what waits for the source.
    #[inline]
    pub(crate) fn answer(&mut self, tag: Tag, result: Result<(), Failure>) {
        self.pace.ended(self.now, tag);
        if self.closing && result == Err(Failure::Unreachable) {
            return;
        }
        self.actions.push_back(Action::Complete { tag, result });
    }

    /// Answer the guest what was not looked at.
    pub(crate) fn refuse(&mut self, tag: Tag, failure: Failure) {
        self.actions.push_back(Action::Complete {
            tag,
            result: Err(failure),
        });
    }

    /// Nothing is recorded any more: a disk has failed what it must not.
    pub(crate) fn fail(&mut self, device: Device) {
        self.dropped |= device == Device::Data;
        if !self.broken {
            self.broken = true;
            self.notify(Notice::Broken(device));
        }
        self.changed = true;
    }

    /// What was to be durable on the destination has ended. If it failed, the
    /// disk may have dropped what it had in its cache, as when a flush fails;
    /// without space there was nothing to flush.
    pub(crate) fn durable_ended(&mut self, result: Result<(), Failure>) {
        if result.is_err_and(|failure| failure != Failure::NoSpace) {
            self.fail(Device::Data);
        }
    }

    pub(crate) fn give_block(&mut self, slot: u16) {
        self.free_blocks.push(slot);
        self.changed = true;
    }
}
