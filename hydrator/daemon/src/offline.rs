// SPDX-License-Identifier: Apache-2.0
//! Reads the metadata of a move that nobody serves, mends them where an operator
//! accepts what is lost, and copies them for another move.

use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use localstor_hydrator_core::format::copy::MetadataCopy;
use localstor_hydrator_core::format::superblock::{
    self, Damage, JOURNAL_FIRST, Superblock, Unusable, VERSION_1,
};
use localstor_hydrator_core::format::{bitmap, journal};
use localstor_hydrator_core::{BLOCK_SIZE, Part};
use localstor_hydrator_disks::{Access, Disk, Memory, Owner, Ring, Span, Token};
use serde_json::{Value, json};

use crate::arguments::MoveId;

/// How much is read at once, in bytes.
const PIECE: u64 = 1 << 20;

/// How long to wait for the lock of a process that has just ended.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a copy has in place of its superblocks until all the rest is there. It
/// is no superblock, so it does not open; and it is not blank, or else it would
/// be formatted as a new move where that is asked for.
const UNFINISHED: &[u8] = b"An unfinished copy of metadata by localstor-hydrator\n";

/// What is found on a metadata device.
struct Found {
    superblocks: [Result<Superblock, Damage>; 2],
    // The one that counts, or would.
    current: Option<Superblock>,
    window: journal::Window,
    // Settled blocks of the volume, as the bitmap has them.
    settled: u64,
    // What is damaged and may have said something.
    lost: Vec<Part>,
    // Records of the journal of the current epoch, in their order.
    journal: Vec<(journal::Header, Vec<journal::Entry>)>,
}

struct Reader {
    ring: Ring,
    disk: Disk,
    span: Span,
    // What of the span is being written, in bytes, and where to.
    writing: Option<(usize, u64)>,
}

impl Reader {
    fn open(path: &Path, access: Access) -> anyhow::Result<Reader> {
        let mut ring = Ring::new(8, false).context("cannot make a ring (io_uring)")?;
        let disk = Disk::open(path, access, &mut ring)?;
        let mut memory = Memory::new(PIECE as usize)?;
        let span = memory.take(PIECE as usize).context("no memory")?;
        Ok(Reader {
            ring,
            disk,
            span,
            writing: None,
        })
    }

    /// Waits for the one operation in flight; whether all of it was done.
    fn ended(&mut self, length: usize) -> anyhow::Result<bool> {
        loop {
            if let Some(event) = self.ring.next_event() {
                return Ok(event.result == length as i32);
            }
            self.ring.wait(None).context("the ring has failed")?;
        }
    }

    /// Reads into the span, from its beginning on; whether that is possible.
    fn fill(&mut self, offset: u64, from: usize, length: usize) -> anyhow::Result<bool> {
        // Out of the same memory.
        self.end_write()?;
        let span = self.span.part(from, length).context("too much at once")?;
        // SAFETY: looked at only after the completion, which is waited for.
        unsafe {
            let token = Token::new(Owner::Nobody, 0);
            self.disk.read(&mut self.ring, span, offset, token);
        }
        self.ended(length)
    }

    /// `count` blocks of 4 KiB from block `first` on, at most [`PIECE`] bytes.
    /// What cannot be read becomes zeros, which are damaged wherever something
    /// was written; whether there is any of it.
    fn blocks(&mut self, first: u64, count: u64) -> anyhow::Result<(&mut [u8], bool)> {
        let length = (count * BLOCK_SIZE) as usize;
        let offset = first * BLOCK_SIZE;
        let whole = self.fill(offset, 0, length)?;
        if !whole {
            let unit = self.disk.logical_block() as usize;
            for at in (0..length).step_by(unit) {
                if !self.fill(offset + at as u64, at, unit)? {
                    let mut piece = self.span.part(at, unit).context("too much at once")?;
                    // SAFETY: the read has ended.
                    unsafe { piece.bytes_mut() }.fill(0);
                }
            }
        }
        // SAFETY: nothing is in flight.
        let bytes = unsafe { self.span.bytes_mut() }.get_mut(..length);
        Ok((bytes.context("too much at once")?, whole))
    }

    /// Writes the first 4 KiB of the span, durably.
    fn write(&mut self, block: u64) -> anyhow::Result<()> {
        self.begin_write(block, 1, true)?;
        self.end_write()
    }

    /// Begins to write the first `count` blocks of the span. It must be left
    /// alone until [`Reader::end_write`].
    fn begin_write(&mut self, block: u64, count: u64, fua: bool) -> anyhow::Result<()> {
        let length = (count * BLOCK_SIZE) as usize;
        let offset = block * BLOCK_SIZE;
        let span = self.span.part(0, length).context("too much at once")?;
        let token = Token::new(Owner::Nobody, 0);
        // SAFETY: nobody touches it before the completion, which is waited for.
        unsafe {
            self.disk.write(&mut self.ring, span, offset, fua, token);
        }
        self.writing = Some((length, offset));
        let at_once = Some(Duration::ZERO);
        self.ring.wait(at_once).context("the ring has failed")
    }

    /// Waits for the write that was begun, if there is one.
    fn end_write(&mut self) -> anyhow::Result<()> {
        let Some((length, offset)) = self.writing.take() else {
            return Ok(());
        };
        if !self.ended(length)? {
            bail!(
                "cannot write {length} bytes at {offset} of {}",
                self.disk.path().display()
            );
        }
        Ok(())
    }

    /// Makes durable what was written.
    fn flush(&mut self) -> anyhow::Result<()> {
        let token = Token::new(Owner::Nobody, 0);
        self.disk.flush(&mut self.ring, token);
        if !self.ended(0)? {
            bail!("cannot flush {}", self.disk.path().display());
        }
        Ok(())
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
            let (blocks, _) = self.blocks(first + start, step.min(count - start))?;
            for (index, block) in blocks.chunks_exact(BLOCK_SIZE as usize).enumerate() {
                look(start + index as u64, block);
            }
        }
        Ok(())
    }

    /// All that is on the device.
    fn read(&mut self) -> anyhow::Result<Found> {
        let mut found = self.read_superblocks()?;
        if let Some(current) = found.current {
            self.read_window(&current, &mut found)?;
            self.read_journal(&current, &mut found)?;
            self.read_bitmap(&current, &mut found)?;
        }
        Ok(found)
    }

    fn read_superblocks(&mut self) -> anyhow::Result<Found> {
        let path = self.disk.path().to_owned();
        if self.disk.size() < JOURNAL_FIRST * BLOCK_SIZE {
            bail!("{} is too small for any metadata", path.display());
        }
        let mut superblocks = [Err(Damage::Short); 2];
        for (copy, number) in superblocks.iter_mut().zip(0..) {
            *copy = match self.blocks(number, 1)? {
                (block, true) => Superblock::decode(block),
                (_, false) => Err(Damage::Unreadable),
            };
        }
        let mut lost = Vec::new();
        let current = match superblock::choose(&superblocks) {
            Ok(current) => Some(current),
            Err(Unusable::NewerLost(older)) => {
                lost.push(Part::Superblock);
                Some(*older)
            }
            Err(Unusable::Neither(_)) => None,
        };
        let found = Found {
            superblocks,
            current,
            window: journal::Window::default(),
            settled: 0,
            lost,
            journal: Vec::new(),
        };
        if let Some(needed) = current.map(|current| current.metadata_size()) {
            if self.disk.size() < needed {
                bail!(
                    "{} has {} bytes, its superblock says {needed}",
                    path.display(),
                    self.disk.size(),
                );
            }
        }
        Ok(found)
    }

    /// What the journal says of itself, and whether the superblock is lost.
    fn read_window(&mut self, current: &Superblock, found: &mut Found) -> anyhow::Result<()> {
        let blocks = current.journal_blocks;
        let window = &mut found.window;
        window.epoch = current.epoch;
        self.each(JOURNAL_FIRST, blocks, |place, block| {
            for (header, _) in records(current, place, block) {
                window.see(&header);
            }
        })?;
        if window.epoch > current.epoch && !found.lost.contains(&Part::Superblock) {
            found.lost.push(Part::Superblock);
        }
        Ok(())
    }

    fn read_journal(&mut self, current: &Superblock, found: &mut Found) -> anyhow::Result<()> {
        let (id, blocks) = (current.move_id, current.journal_blocks);
        self.each(JOURNAL_FIRST, blocks, |place, block| {
            let lost = || {
                let headers = journal::headers(&id, place, blocks, block);
                journal::is_lost(&headers, &found.window, place, blocks)
            };
            if current.version != VERSION_1 && lost() {
                found.lost.push(Part::Journal(place));
            }
            let records = records(current, place, block).into_iter();
            let counts = records.filter(|(header, entries)| {
                header.epoch == found.window.epoch && !entries.is_empty()
            });
            found.journal.extend(counts);
        })?;
        found.journal.sort_by_key(|(header, _)| header.sequence);
        Ok(())
    }

    fn read_bitmap(&mut self, current: &Superblock, found: &mut Found) -> anyhow::Result<()> {
        let id = current.move_id;
        let (first, count_of) = (current.bitmap_first(), current.bitmap_blocks);
        let decode = match current.version {
            VERSION_1 => bitmap::decode_sector_v1,
            _ => bitmap::decode_sector,
        };
        let last = current.blocks();
        self.each(first, count_of, |index, block| {
            for (part, sector) in block.chunks_exact(512).enumerate() {
                let sector_index = index * 8 + part as u64;
                match decode(&id, sector_index, sector) {
                    Ok(words) => {
                        let first = sector_index * bitmap::BLOCKS_PER_SECTOR;
                        found.settled += count(&words, last.saturating_sub(first));
                    }
                    Err(bitmap::Damaged) => found.lost.push(Part::Bitmap(sector_index)),
                }
            }
        })
    }
}

/// What the sectors of a block of the journal say, with their entries.
fn records(
    current: &Superblock,
    place: u64,
    block: &[u8],
) -> Vec<(journal::Header, Vec<journal::Entry>)> {
    let (id, blocks) = (&current.move_id, current.journal_blocks);
    if current.version == VERSION_1 {
        let header = journal::v1::decode_header(id, block);
        let header = header.filter(|header| header.sequence % blocks == place);
        return header
            .map(|header| (header, journal::v1::entries(&header, block).collect()))
            .into_iter()
            .collect();
    }
    let headers = journal::headers(id, place, blocks, block);
    let sectors = block.chunks_exact(journal::SECTOR).enumerate();
    headers
        .into_iter()
        .zip(sectors)
        .filter_map(|(header, (index, sector))| {
            let header = header?;
            Some((header, journal::entries(&header, index, sector).collect()))
        })
        .collect()
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

fn superblock_json(found: &Result<Superblock, Damage>) -> Value {
    match found {
        Err(Damage::Empty) => Value::Null,
        Err(damage) => json!({ "error": damage.to_string() }),
        Ok(found) => json!({
            "version": found.version,
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
            "zeroed": found.zeroed,
            "unreadable": found
                .unreadable
                .intents()
                .iter()
                .map(|intent| json!({
                    "block": intent.block,
                    "epoch": intent.epoch,
                    "checksum": format!("{:08x}", intent.checksum),
                }))
                .collect::<Vec<_>>(),
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
    let found = Reader::open(path, Access::Offline)?.read()?;
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
        "lost": found.lost.iter().map(Part::to_string).collect::<Vec<_>>(),
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
    let found = Reader::open(path, Access::Offline)?.read()?;
    let Some(current) = found.current else {
        for (index, copy) in found.superblocks.iter().enumerate() {
            if let Err(damage) = copy {
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
    if current.zeroed {
        writeln!(
            output,
            "The destination reads zeros where it was never written, or was discarded."
        )?;
    }
    let owed: usize = found.journal.iter().map(|(_, entries)| entries.len()).sum();
    writeln!(
        output,
        "{local} bytes are local for good; {} are on the source unless the journal \
         says otherwise ({owed} entries).",
        current.size.saturating_sub(local),
    )?;
    let mut sound = found.lost.is_empty();
    for (index, copy) in found.superblocks.iter().enumerate() {
        let new = current.generation == 1 && *copy == Err(Damage::Empty);
        if let (Err(damage), false) = (copy, new) {
            sound = false;
            writeln!(output, "wrong: superblock {index}: {damage}")?;
        }
    }
    for part in &found.lost {
        writeln!(output, "lost: {}", stake(*part, &current))?;
    }
    if !found.lost.is_empty() {
        writeln!(output, "{}", way_on(path, &found.lost))?;
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

/// What it means that a part is lost.
fn stake(part: Part, current: &Superblock) -> String {
    match part {
        Part::Superblock => format!(
            "{part}: the newest superblock. What it said can be made from the older one and \
             the journal; what was written since the volume was opened last may read as it \
             was before, or as on the source"
        ),
        Part::Journal(_) => format!(
            "{part}: up to {} blocks of {BLOCK_SIZE} bytes, anywhere on the volume, that the \
             guest has written since the last checkpoint, and has perhaps flushed, will read \
             as on the source",
            journal::MAX_ENTRIES
        ),
        Part::Bitmap(sector) => {
            let from = sector * bitmap::BLOCKS_PER_SECTOR * BLOCK_SIZE;
            let to = from + bitmap::BLOCKS_PER_SECTOR * BLOCK_SIZE;
            format!(
                "{part}: whatever the guest has written from byte {from} to {} will read as on \
                 the source",
                to.min(current.size)
            )
        }
    }
}

/// How an operator can go on without what is lost.
fn way_on(path: &Path, lost: &[Part]) -> String {
    let accepted: String = lost
        .iter()
        .map(|part| format!(" --accept-loss {part}"))
        .collect();
    format!(
        "The volume does not open like that. If the disk can be mended (a cable, another \
         leg of a mirror), mend it. To go on without what is lost:\n  \
         localstor-hydrator repair{accepted} {}",
        path.display()
    )
}

/// Mends what is damaged, if all of it, and nothing else, is accepted as lost;
/// whether it is.
///
/// # Errors
/// That it can't be read or written, or is in use.
pub fn repair(path: &Path, accepted: &[Part], output: &mut impl Write) -> anyhow::Result<bool> {
    let mut reader = Reader::open(path, Access::Exclusive(PATIENCE))?;
    let mut found = reader.read()?;
    let Some(current) = found.current else {
        bail!("{} has no metadata that can be used", path.display());
    };
    let mut accepted = accepted.to_vec();
    accepted.sort_unstable();
    accepted.dedup();
    found.lost.sort_unstable();
    if accepted != found.lost {
        for part in &found.lost {
            writeln!(output, "lost: {}", stake(*part, &current))?;
        }
        writeln!(
            output,
            "Nothing was changed: what is accepted is not what is lost."
        )?;
        if !found.lost.is_empty() {
            writeln!(output, "{}", way_on(path, &found.lost))?;
        }
        return Ok(false);
    }
    // The superblock is the last: until then nothing else is made of the rest.
    for part in found.lost.iter().rev() {
        mend(&mut reader, &found, &current, *part)?;
        writeln!(output, "mended: {part}")?;
    }
    Ok(true)
}

fn mend(
    reader: &mut Reader,
    found: &Found,
    current: &Superblock,
    part: Part,
) -> anyhow::Result<()> {
    let id = current.move_id;
    match part {
        Part::Superblock => {
            let mended = Superblock {
                generation: current.generation + 1,
                epoch: found.window.epoch,
                ..*current
            };
            let copies = match current.version {
                VERSION_1 => mended.location_v1()..mended.location_v1() + 1,
                _ => 0..2,
            };
            for copy in copies {
                mended.encode(reader.blocks(copy, 1)?.0);
                reader.write(copy)?;
            }
        }
        Part::Journal(place) => {
            let header = journal::Header {
                epoch: found.window.epoch,
                sequence: found.window.sequence_at(place, current.journal_blocks),
                settled: 0,
                tail: 0,
                entries: 0,
            };
            let block = JOURNAL_FIRST + place;
            journal::encode_header(&id, &header, reader.blocks(block, 1)?.0);
            reader.write(block)?;
        }
        Part::Bitmap(sector) => {
            let block = current.bitmap_first() + sector / 8;
            let (bytes, _) = reader.blocks(block, 1)?;
            let words = [0; bitmap::WORDS_PER_SECTOR];
            let at = (sector % 8) as usize * 512;
            bitmap::encode_sector(&id, sector, &words, &mut bytes[at..at + 512]);
            reader.write(block)?;
        }
    }
    Ok(())
}

/// Copies metadata that don't change meanwhile for another move: who opens the
/// copy, over a copy of the destination of the same moment, recovers what who
/// opens the original would.
///
/// The original is not locked: a helper may have it open, as long as it is
/// paused. An interruption leaves a copy that does not open, and that can be
/// copied over.
///
/// # Errors
/// That the original can't be read, is of another move or of version 1, or has
/// lost something; that the copy is too small, in use, or can't be written.
pub fn copy(from: &Path, old: MoveId, to: &Path, new: MoveId) -> anyhow::Result<()> {
    if old == new {
        bail!("a copy is for another move: the ids must differ");
    }
    if is_same(from, to)? {
        bail!("{} is {} itself", to.display(), from.display());
    }
    let mut original = Reader::open(from, Access::ReadOnly)?;
    let mut found = original.read_superblocks()?;
    let Some(current) = found.current else {
        bail!("{} has no metadata that can be used", from.display());
    };
    if current.move_id != old.0 {
        let found = MoveId(current.move_id);
        bail!("{} is of the move {found}, not of {old}", from.display());
    }
    if current.version == VERSION_1 {
        bail!(
            "{} has metadata of version 1, which are not copied: an opening makes version 2 of \
             them",
            from.display()
        );
    }
    original.read_window(&current, &mut found)?;
    if let Some(part) = found.lost.first() {
        return Err(is_lost(from, *part));
    }
    let mut made = Reader::open(to, Access::Exclusive(PATIENCE))?;
    let (size, needed) = (made.disk.size(), current.metadata_size());
    if size < needed {
        bail!("{} has {size} bytes, the copy needs {needed}", to.display());
    }
    let copy = MetadataCopy::new(&current, found.window, new.0);
    for number in 0..JOURNAL_FIRST {
        let (block, _) = made.blocks(number, 1)?;
        block.fill(0);
        block[..UNFINISHED.len()].copy_from_slice(UNFINISHED);
        made.write(number)?;
    }
    let (step, end) = (PIECE / BLOCK_SIZE, needed / BLOCK_SIZE);
    for first in (JOURNAL_FIRST..end).step_by(step as usize) {
        let count = step.min(end - first);
        let (blocks, _) = original.blocks(first, count)?;
        for (number, block) in (first..).zip(blocks.chunks_exact_mut(BLOCK_SIZE as usize)) {
            copy.turn(number, block)
                .map_err(|part| is_lost(from, part))?;
        }
        // The next piece is read while this one is written.
        made.end_write()?;
        std::mem::swap(&mut original.span, &mut made.span);
        made.begin_write(first, count, false)?;
    }
    made.end_write()?;
    made.flush()?;
    for number in 0..JOURNAL_FIRST {
        copy.superblock().encode(made.blocks(number, 1)?.0);
        made.write(number)?;
    }
    Ok(())
}

fn is_lost(path: &Path, part: Part) -> anyhow::Error {
    anyhow::anyhow!(
        "{part} of {} is lost, and perhaps more: a volume like that does not open, nor would \
         one with a copy",
        path.display()
    )
}

/// Whether two paths lead to one disk.
fn is_same(one: &Path, other: &Path) -> anyhow::Result<bool> {
    let identity = |path: &Path| -> anyhow::Result<_> {
        let found = std::fs::metadata(path).with_context(|| path.display().to_string())?;
        // A device may have several nodes.
        let is_device = found.file_type().is_block_device();
        let number = is_device.then(|| found.rdev());
        Ok((number, number.is_none().then(|| (found.dev(), found.ino()))))
    };
    Ok(identity(one)? == identity(other)?)
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
