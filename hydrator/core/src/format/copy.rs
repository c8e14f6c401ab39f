// SPDX-License-Identifier: Apache-2.0

//! A copy of all metadata that belongs to another move.
//!
//! What counts for recovery in the original counts in the copy, and nothing
//! else does: a sector has the checksum of the other move if it had that of its
//! own. `FORMAT.md` argues why that is all there is to it.

use crate::format::bitmap::{self, SECTORS_PER_BITMAP_BLOCK};
use crate::format::journal::{self, SECTOR, Window};
use crate::format::superblock::{JOURNAL_FIRST, Superblock};
use crate::part::Part;

/// How metadata of version 2 become those of another move.
#[derive(Clone, Debug)]
pub struct MetadataCopy {
    superblock: Superblock,
    original: [u8; 16],
    window: Window,
}

impl MetadataCopy {
    /// Of metadata with this superblock, the one that counts, and what their
    /// journal says of itself, for the move `move_id`.
    #[must_use]
    pub const fn new(original: &Superblock, window: Window, move_id: [u8; 16]) -> Self {
        Self {
            superblock: Superblock {
                move_id,
                // Who opens the copy says when the source may be copied.
                started: original.complete,
                ..*original
            },
            original: original.move_id,
            window,
        }
    }

    /// Both superblocks of the copy.
    #[must_use]
    pub const fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Turn a block of the original's journal or bitmap into that of the copy;
    /// `number` counts blocks of 4 KiB from the beginning of the device.
    ///
    /// # Errors
    /// What is lost in it, so that there must be no copy.
    pub fn turn(&self, number: u64, block: &mut [u8]) -> Result<(), Part> {
        let bitmap_first = self.superblock.bitmap_first();
        let (old, new) = (&self.original, &self.superblock.move_id);
        if number >= bitmap_first {
            let first = (number - bitmap_first) * SECTORS_PER_BITMAP_BLOCK;
            for (index, sector) in (first..).zip(block.chunks_exact_mut(SECTOR)) {
                bitmap::rename_sector(old, new, index, sector)
                    .map_err(|bitmap::Damaged| Part::Bitmap(index))?;
            }
            return Ok(());
        }
        let (place, blocks) = (
            number.saturating_sub(JOURNAL_FIRST),
            self.superblock.journal_blocks,
        );
        let headers = journal::headers(old, place, blocks, block);
        if journal::is_lost(&headers, &self.window, place, blocks) {
            return Err(Part::Journal(place));
        }
        for (index, sector) in block.chunks_exact_mut(SECTOR).enumerate() {
            journal::rename_sector(old, new, index, sector);
        }
        Ok(())
    }
}
