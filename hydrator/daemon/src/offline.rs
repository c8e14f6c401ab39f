// SPDX-License-Identifier: Apache-2.0
//! Reads the metadata of a move that nobody serves.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use localstor_hydrator_core::superblock::{JOURNAL_FIRST, Superblock};
use localstor_hydrator_core::{BLOCK_SIZE, bitmap, journal};
use localstor_hydrator_disks::{Access, Disk, Memory, Owner, Ring, Span, Token};
use serde_json::{Value, json};

use crate::arguments::MoveId;

/// How much is read at once, in bytes.
const PIECE: u64 = 1 << 20;

/// What is found on a metadata device.
struct Found {
    // None: never written, as the second copy of a new move.
    superblocks: [Option<Result<Superblock, String>>; 2],
    current: Option<Superblock>,
    // Settled blocks of the volume, as the bitmap has them.
    settled: u64,
    // Sectors of the bitmap that are damaged.
    damaged: Vec<u64>,
    // Journal blocks of the current epoch, in their order.
    journal: Vec<(journal::Header, Vec<journal::Entry>)>,
}

struct Reader {
    ring: Ring,
    disk: Disk,
    span: Span,
}

impl Reader {
    fn open(path: &Path) -> anyhow::Result<Reader> {
        let mut ring = Ring::new(8, false).context("cannot make a ring (io_uring)")?;
        let disk = Disk::open(path, Access::Offline, &mut ring)?;
        let mut memory = Memory::new(PIECE as usize)?;
        let span = memory.take(PIECE as usize).context("no memory")?;
        Ok(Reader { ring, disk, span })
    }

    /// `count` blocks of 4 KiB from block `first` on, at most [`PIECE`] bytes.
    fn blocks(&mut self, first: u64, count: u64) -> anyhow::Result<&[u8]> {
        let length = (count * BLOCK_SIZE) as usize;
        let span = self.span.part(0, length).context("too much at once")?;
        // SAFETY: looked at only after the completion; `self` is borrowed as
        // long as the result is.
        unsafe {
            let token = Token::new(Owner::Nobody, 0);
            self.disk
                .read(&mut self.ring, span, first * BLOCK_SIZE, token);
        }
        let event = loop {
            if let Some(event) = self.ring.next_event() {
                break event;
            }
            self.ring.wait(None).context("the ring has failed")?;
        };
        if event.result != length as i32 {
            bail!(
                "cannot read {length} bytes at {} of {}",
                first * BLOCK_SIZE,
                self.disk.path().display()
            );
        }
        // SAFETY: the read has completed, and the next one needs `self`.
        Ok(unsafe { span.bytes() })
    }

    /// Calls `look` with each block of a range, and its number in the range.
    fn each(
        &mut self,
        first: u64,
        count: u64,
        mut look: impl FnMut(u64, &[u8]),
    ) -> anyhow::Result<()> {
        let step = PIECE / BLOCK_SIZE;
        for start in (0..count).step_by(step as usize) {
            let blocks = self.blocks(first + start, step.min(count - start))?;
            for (index, block) in blocks.chunks_exact(BLOCK_SIZE as usize).enumerate() {
                look(start + index as u64, block);
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> anyhow::Result<Found> {
    let mut reader = Reader::open(path)?;
    if reader.disk.size() < JOURNAL_FIRST * BLOCK_SIZE {
        bail!("{} is too small for any metadata", path.display());
    }
    let head = reader.blocks(0, JOURNAL_FIRST)?;
    let decode = |index: usize| {
        let block = head.get(index * BLOCK_SIZE as usize..).unwrap_or_default();
        let block = &block[..block.len().min(BLOCK_SIZE as usize)];
        let written = block.iter().any(|byte| *byte != 0);
        written.then(|| Superblock::decode(block).map_err(|damage| damage.to_string()))
    };
    let superblocks = [decode(0), decode(1)];
    let current = superblocks
        .iter()
        .flatten()
        .filter_map(|found| found.as_ref().ok())
        .max_by_key(|found| found.generation)
        .copied();
    let mut found = Found {
        superblocks,
        current,
        settled: 0,
        damaged: Vec::new(),
        journal: Vec::new(),
    };
    let Some(current) = current else {
        return Ok(found);
    };
    if reader.disk.size() < current.metadata_size() {
        bail!(
            "{} has {} bytes, its superblock says {}",
            path.display(),
            reader.disk.size(),
            current.metadata_size()
        );
    }
    let id = current.move_id;
    reader.each(JOURNAL_FIRST, current.journal_blocks, |_, block| {
        if let Ok(header) = journal::decode_header(&id, block) {
            if header.epoch == current.epoch {
                let entries = journal::entries(&header, block).collect();
                found.journal.push((header, entries));
            }
        }
    })?;
    found.journal.sort_by_key(|(header, _)| header.sequence);
    let last = current.blocks();
    reader.each(
        current.bitmap_first(),
        current.bitmap_blocks,
        |index, block| {
            for (part, sector) in block.chunks_exact(512).enumerate() {
                let sector_index = index * 8 + part as u64;
                match bitmap::decode_sector(&id, sector_index, sector) {
                    Ok(words) => {
                        let first = sector_index * bitmap::BLOCKS_PER_SECTOR;
                        found.settled += count(&words, last.saturating_sub(first));
                    }
                    Err(bitmap::Damaged) => found.damaged.push(sector_index),
                }
            }
        },
    )?;
    Ok(found)
}

/// Bits set among the first `limit`.
fn count(words: &[u64], limit: u64) -> u64 {
    let mut sum = 0;
    for (index, word) in words.iter().enumerate() {
        let left = limit.saturating_sub(index as u64 * 64);
        let mask = if left >= 64 {
            u64::MAX
        } else {
            (1 << left) - 1
        };
        sum += u64::from((word & mask).count_ones());
    }
    sum
}

fn superblock_json(found: &Option<Result<Superblock, String>>) -> Value {
    match found {
        None => Value::Null,
        Some(Err(damage)) => json!({ "error": damage }),
        Some(Ok(found)) => json!({
            "move": MoveId(found.move_id).to_string(),
            "generation": found.generation,
            "epoch": found.epoch,
            "size": found.size,
            "source_size": found.source_size,
            "logical_block_size": found.logical_block_size,
            "journal_blocks": found.journal_blocks,
            "bitmap_blocks": found.bitmap_blocks,
            "started": found.started,
            "complete": found.complete,
        }),
    }
}

fn entry_json(entry: &journal::Entry) -> Value {
    match entry {
        journal::Entry::Intent { block, checksum } => {
            json!({ "intent": block, "checksum": format!("{checksum:08x}") })
        }
        journal::Entry::Local { block, count } => json!({ "local": block, "count": count }),
        journal::Entry::Void { block } => json!({ "void": block }),
    }
}

/// Prints what is on a metadata device, as JSON.
///
/// # Errors
/// That it can't be read, or is in use.
pub fn dump(path: &Path, output: &mut impl Write) -> anyhow::Result<()> {
    let found = read(path)?;
    let journal: Vec<Value> = found
        .journal
        .iter()
        .map(|(header, entries)| {
            json!({
                "sequence": header.sequence,
                "settled": header.settled,
                "tail": header.tail,
                "entries": entries.iter().map(entry_json).collect::<Vec<_>>(),
            })
        })
        .collect();
    let value = json!({
        "superblocks": found.superblocks.iter().map(superblock_json).collect::<Vec<_>>(),
        "settled_bytes": found.settled * BLOCK_SIZE,
        "damaged_bitmap_sectors": found.damaged,
        "journal": journal,
    });
    serde_json::to_writer_pretty(&mut *output, &value)?;
    writeln!(output)?;
    Ok(())
}

/// Says in sentences what is on a metadata device, and what is wrong with it;
/// whether nothing is.
///
/// # Errors
/// That it can't be read, or is in use.
pub fn check(path: &Path, output: &mut impl Write) -> anyhow::Result<bool> {
    let found = read(path)?;
    let Some(current) = found.current else {
        for (index, damage) in found.superblocks.iter().enumerate() {
            if let Some(Err(damage)) = damage {
                writeln!(output, "wrong: superblock {index}: {damage}")?;
            }
        }
        writeln!(output, "There are no metadata that can be used.")?;
        return Ok(false);
    };
    let local = found.settled * BLOCK_SIZE;
    writeln!(
        output,
        "Move {}, {} bytes, epoch {}: {}.",
        MoveId(current.move_id),
        current.size,
        current.epoch,
        match (current.complete, current.started) {
            (true, _) => "complete",
            (false, true) => "copying",
            (false, false) => "not begun to copy",
        }
    )?;
    let owed: usize = found.journal.iter().map(|(_, entries)| entries.len()).sum();
    writeln!(
        output,
        "{local} bytes are local for good; {} are on the source unless the journal \
         says otherwise ({} of its blocks count, with {owed} entries).",
        current.size.saturating_sub(local),
        found.journal.len(),
    )?;
    let mut sound = true;
    for (index, damage) in found.superblocks.iter().enumerate() {
        if let Some(Err(damage)) = damage {
            sound = false;
            writeln!(
                output,
                "wrong: superblock {index}: {damage}; the other one is used"
            )?;
        }
    }
    for sector in &found.damaged {
        sound = false;
        writeln!(output, "wrong: sector {sector} of the bitmap is damaged")?;
    }
    if current.complete && found.settled < current.blocks() {
        sound = false;
        writeln!(
            output,
            "wrong: marked complete, but {local} bytes are local"
        )?;
    }
    Ok(sound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bits_of_the_volume_count() {
        assert_eq!(count(&[u64::MAX, u64::MAX], 200), 128);
        assert_eq!(count(&[u64::MAX, u64::MAX], 70), 70);
        assert_eq!(count(&[u64::MAX, 1], 64), 64);
        assert_eq!(count(&[0b1010], 0), 0);
    }
}
