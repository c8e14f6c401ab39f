// SPDX-License-Identifier: Apache-2.0

//! The superblocks of an open volume: what they are to say, and the writing of
//! it.

use crate::context::{Context, Job};
use crate::format::superblock::Superblock;
use crate::io::{Buffer, Device, Failure, Memory, Notice};
use crate::units::Block;

/// What the superblocks are to say, and the writing of it.
#[derive(Debug, Default)]
pub(crate) struct Superblocks {
    /// Hydration may run.
    pub(crate) started: bool,
    /// Everything is local and in the bitmap.
    pub(crate) complete: bool,
    /// What is being written, in which buffer, and to which copy.
    writing: Option<(Superblock, u16, Block)>,
}

impl Superblocks {
    /// None is being written.
    pub(crate) const fn is_idle(&self) -> bool {
        self.writing.is_none()
    }

    /// Write them if they do not say what they are to.
    pub(crate) fn advance<M: Memory>(&mut self, cx: &mut Context, memory: &mut M) {
        let told = (cx.superblock.started, cx.superblock.complete);
        if (self.started, self.complete) == told || self.writing.is_some() || cx.broken {
            return;
        }
        let Some(slot) = cx.free_blocks.pop() else {
            return;
        };
        let next = Superblock {
            started: self.started,
            complete: self.complete,
            generation: cx.superblock.generation + 1,
            ..cx.superblock
        };
        next.encode(memory.block_mut(slot));
        self.write(next, slot, Block(0), cx);
    }

    fn write(&mut self, next: Superblock, slot: u16, copy: Block, cx: &mut Context) {
        self.writing = Some((next, slot, copy));
        cx.write_metadata(Job::Superblock, copy.alone(), Buffer::Block(slot), true);
    }

    /// A copy is written, or not.
    pub(crate) fn ended(&mut self, result: Result<(), Failure>, cx: &mut Context) {
        let Some((written, slot, copy)) = self.writing.take() else {
            return;
        };
        if result.is_ok() && copy == Block(0) {
            // Nothing counts before both say it: either may be damaged.
            return self.write(written, slot, Block(1), cx);
        }
        cx.give_block(slot);
        if result.is_err() {
            return cx.fail(Device::Metadata);
        }
        let before = core::mem::replace(&mut cx.superblock, written);
        if written.started && !before.started {
            cx.notify(Notice::Started);
        }
    }
}
