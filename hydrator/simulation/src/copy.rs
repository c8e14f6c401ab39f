// SPDX-License-Identifier: Apache-2.0

//! Metadata that are copied for another move, as the program does it.

use localstor_hydrator_core::format::copy::MetadataCopy;
use localstor_hydrator_core::format::journal::{self, Window};
use localstor_hydrator_core::format::superblock::{Damage, JOURNAL_FIRST, Superblock, choose};

use crate::disk::Disk;

const BLOCK: usize = 4096;

/// A copy for the move `new` of metadata with logical blocks of so many bytes;
/// `None` if they are lost.
pub fn copied(metadata: &Disk, logical_block: usize, new: [u8; 16]) -> Option<Disk> {
    let mut content = metadata.read(0, metadata.len()).to_vec();
    let bad = |at: &usize| metadata.is_unreadable(*at, logical_block);
    for at in (0..content.len()).step_by(logical_block).filter(bad) {
        content[at..at + logical_block].fill(0);
    }
    let superblocks = [0, BLOCK].map(|at| {
        if metadata.is_unreadable(at, BLOCK) {
            Err(Damage::Unreadable)
        } else {
            Superblock::decode(&content[at..at + BLOCK])
        }
    });
    let current = choose(&superblocks).ok()?;
    let (first, journal) = (JOURNAL_FIRST, current.journal_blocks);
    let mut window = Window {
        epoch: current.epoch,
        ..Window::default()
    };
    let blocks = content.chunks_exact(BLOCK).skip(first as usize);
    for (place, block) in (0..journal).zip(blocks) {
        for header in journal::headers(&current.move_id, place, journal, block)
            .iter()
            .flatten()
        {
            window.see(header);
        }
    }
    if window.epoch > current.epoch {
        return None;
    }
    let copy = MetadataCopy::new(&current, window, new);
    let blocks = content.chunks_exact_mut(BLOCK);
    for (number, block) in (0..current.metadata_size() / BLOCK as u64).zip(blocks) {
        if number < first {
            copy.superblock().encode(block);
        } else {
            copy.turn(number, block).ok()?;
        }
    }
    Some(Disk::new(content))
}
