// SPDX-License-Identifier: Apache-2.0
//! Blocks of the journal while they are being written, where the end of the
//! process does not reach them.
//!
//! A write is answered before its intent is on the metadata's disk. That it was
//! submitted would not do: what io_uring has left to a thread is dropped when the
//! process ends, and what a disk is writing then may fail, of which nobody learns.
//! So the block is in a file first, which is mapped and lies in memory: its pages
//! are the kernel's, not the process's. A successor writes what it finds there
//! before it opens the volume. A power cut takes the file, and with it what a
//! disk's own cache may lose, too.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, bail};
use localstor_hydrator_core::BLOCK_SIZE;
use localstor_hydrator_core::format::journal;
use localstor_hydrator_core::format::superblock::{
    self, Damage, JOURNAL_FIRST, Superblock, VERSION,
};
use localstor_hydrator_disks::{Disk, Memory, Owner, Ring, Span, Token};
use tracing::info;

/// A block's size, in bytes.
const BLOCK: usize = BLOCK_SIZE as usize;

/// A place for each block that may be in flight.
pub(crate) struct Spool {
    file: File,
    memory: Memory,
}

impl Spool {
    /// The one in this file, or a new one, with so many places at least.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(crate) fn open(path: &Path, places: u16) -> anyhow::Result<Spool> {
        let open = || {
            let mut file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)?;
            let there = file.metadata()?.len() / BLOCK_SIZE;
            let places = there.max(places.into());
            // Written, because who touches a mapped page for which there is no
            // room is killed.
            file.seek(SeekFrom::Start(there * BLOCK_SIZE))?;
            for _ in there..places {
                file.write_all(&[0; BLOCK])?;
            }
            let memory = Memory::of_file(&file, places as usize * BLOCK);
            let memory = memory.map_err(std::io::Error::other)?;
            Ok::<_, std::io::Error>(Spool { file, memory })
        };
        open().with_context(|| format!("cannot keep blocks of the journal in {}", path.display()))
    }

    fn place(&self, index: usize) -> Option<Span> {
        self.memory.whole().part(index.checked_mul(BLOCK)?, BLOCK)
    }

    fn places(&self) -> usize {
        self.memory.whole().len() / BLOCK
    }

    /// Keeps a block from now on; whether there is such a place.
    pub(crate) fn keep(&mut self, place: u16, block: &[u8]) -> bool {
        let place = self.place(place.into()).filter(|_| block.len() == BLOCK);
        if let Some(mut place) = place {
            // SAFETY: nobody else has a span of this mapping.
            unsafe { place.bytes_mut() }.copy_from_slice(block);
        }
        place.is_some()
    }

    /// Keeps it no longer: it is written.
    pub(crate) fn release(&mut self, place: u16) {
        if let Some(mut place) = self.place(place.into()) {
            // SAFETY: as above.
            let block = unsafe { place.bytes_mut() };
            // Without one of its sectors it is not whole.
            block[..journal::SECTOR].fill(0);
        }
    }

    /// Forgets what was kept, of a move that was there before.
    ///
    /// # Errors
    /// If that is not durable.
    pub(crate) fn clear(&mut self) -> anyhow::Result<()> {
        let mut whole = self.memory.whole();
        // SAFETY: as above.
        unsafe { whole.bytes_mut() }.fill(0);
        self.file.sync_all().context("cannot forget what was kept")
    }

    /// Writes to the metadata what a predecessor has kept, which must have ended:
    /// the disk's lock tells. Done once more, it changes nothing.
    ///
    /// # Errors
    /// If it can't be written.
    pub(crate) fn restore(
        &self,
        metadata: &Disk,
        ring: &mut Ring,
        span: Span,
    ) -> anyhow::Result<()> {
        let Some(current) = read_superblock(metadata, ring, span)? else {
            // The opening says what is wrong, or finds a journal of another format.
            return Ok(());
        };
        let (id, blocks, epoch) = (&current.move_id, current.journal_blocks, current.epoch);
        let mut span = span.part(0, BLOCK).context("no memory")?;
        let mut restored = 0;
        for index in 0..self.places() {
            let place = self.place(index).context("no such place")?;
            // SAFETY: nobody keeps anything meanwhile.
            let kept = unsafe { place.bytes() };
            let Some(sequence) = journal::whole(id, blocks, epoch, kept) else {
                continue;
            };
            let offset = (JOURNAL_FIRST + sequence % blocks) * BLOCK_SIZE;
            let there = read(metadata, ring, span, offset)?;
            // SAFETY: the read has ended.
            let found = unsafe { span.bytes_mut() };
            if there && (found == kept || journal::is_later(id, blocks, (epoch, sequence), found)) {
                continue;
            }
            found.copy_from_slice(kept);
            // SAFETY: nobody touches the span before the write has ended.
            unsafe { metadata.write(ring, span, offset, false, nobodys()) };
            let result = ended(ring)?;
            if result != BLOCK as i32 {
                bail!(
                    "{}: cannot write {BLOCK} bytes at {offset}, by which the guest has been \
                     answered: {}",
                    metadata.path().display(),
                    std::io::Error::from_raw_os_error(-result.min(-libc::EIO)),
                );
            }
            restored += 1;
        }
        if restored > 0 {
            info!("{restored} blocks of the journal were kept and not written; they are now");
        }
        Ok(())
    }
}

/// The superblock that counts, if its journal is of this format.
fn read_superblock(
    metadata: &Disk,
    ring: &mut Ring,
    span: Span,
) -> anyhow::Result<Option<Superblock>> {
    let span = span.part(0, BLOCK).context("no memory")?;
    let mut copies = [Err(Damage::Unreadable); 2];
    for (copy, number) in copies.iter_mut().zip(0..) {
        if read(metadata, ring, span, number * BLOCK_SIZE)? {
            // SAFETY: the read has ended.
            *copy = Superblock::decode(unsafe { span.bytes() });
        }
    }
    let current = superblock::choose(&copies).ok();
    Ok(current.filter(|current| current.version == VERSION))
}

/// Fills the span; whether that is possible.
fn read(disk: &Disk, ring: &mut Ring, span: Span, offset: u64) -> anyhow::Result<bool> {
    // SAFETY: the span is looked at only when the read has ended.
    unsafe { disk.read(ring, span, offset, nobodys()) };
    Ok(ended(ring)? == span.len() as i32)
}

fn nobodys() -> Token {
    Token::new(Owner::Nobody, 0)
}

/// Waits for the one operation in flight: what came of it.
fn ended(ring: &mut Ring) -> anyhow::Result<i32> {
    loop {
        if let Some(event) = ring.next_event() {
            return Ok(event.result);
        }
        ring.wait(None).context("the ring has failed")?;
    }
}

#[cfg(test)]
mod tests {
    use localstor_hydrator_core::format::journal::{Entry, Header, encode_entry, encode_header};
    use localstor_hydrator_core::format::superblock::Unreadable;
    use localstor_hydrator_disks::Access;

    use super::*;

    const ID: [u8; 16] = [7; 16];
    const EPOCH: u64 = 5;
    const JOURNAL: u64 = 8;
    const PLACES: u16 = 4;

    /// A block of a journal with one intent.
    fn block(id: [u8; 16], epoch: u64, sequence: u64) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        let intent = Entry::Intent {
            block: sequence,
            checksum: 1,
        };
        encode_entry(intent, 0, &mut block);
        let header = Header {
            epoch,
            sequence,
            settled: 0,
            tail: 1,
            entries: 1,
        };
        encode_header(&id, &header, &mut block);
        block
    }

    /// A metadata device, and a spool.
    struct Bench {
        folder: tempfile::TempDir,
        ring: Ring,
        metadata: Disk,
        span: Span,
    }

    impl Bench {
        fn new() -> Bench {
            let folder = tempfile::tempdir().unwrap();
            let superblock = Superblock {
                version: VERSION,
                move_id: ID,
                generation: 9,
                epoch: EPOCH,
                size: 1 << 20,
                source_size: 1 << 20,
                logical_block_size: 512,
                journal_blocks: JOURNAL,
                bitmap_blocks: 1,
                started: false,
                complete: false,
                zeroed: false,
                unreadable: Unreadable::default(),
            };
            let mut content = vec![0; superblock.metadata_size() as usize];
            superblock.encode(&mut content[..BLOCK]);
            let path = folder.path().join("metadata");
            std::fs::write(&path, content).unwrap();
            let mut ring = Ring::new(8, false).unwrap();
            let exclusive = Access::Exclusive(std::time::Duration::ZERO);
            let metadata = Disk::open(&path, exclusive, &mut ring).unwrap();
            let mut memory = Memory::new(BLOCK).unwrap();
            let span = memory.take(BLOCK).unwrap();
            Bench {
                folder,
                ring,
                metadata,
                span,
            }
        }

        /// As a process that begins.
        fn spool(&self) -> Spool {
            Spool::open(&self.folder.path().join("spool"), PLACES).unwrap()
        }

        fn restore(&mut self) -> anyhow::Result<()> {
            let spool = self.spool();
            spool.restore(&self.metadata, &mut self.ring, self.span)
        }

        /// What lies where a block with this number does.
        fn journal(&self, sequence: u64) -> Vec<u8> {
            let content = std::fs::read(self.metadata.path()).unwrap();
            let at = (JOURNAL_FIRST + sequence % JOURNAL) as usize * BLOCK;
            content[at..at + BLOCK].to_vec()
        }

        fn write(&self, offset: u64, content: &[u8]) {
            let file = File::options().write(true).open(self.metadata.path());
            std::os::unix::fs::FileExt::write_all_at(&file.unwrap(), content, offset).unwrap();
        }
    }

    #[test]
    fn what_was_kept_and_not_written_is_written_by_the_next_process() {
        let mut bench = Bench::new();
        let mut spool = bench.spool();
        assert!(spool.keep(0, &block(ID, EPOCH, 10)));
        assert!(spool.keep(3, &block(ID, EPOCH, 11)));
        drop(spool);
        for _ in 0..2 {
            bench.restore().unwrap();
            assert!(bench.journal(10) == block(ID, EPOCH, 10));
            assert!(bench.journal(11) == block(ID, EPOCH, 11));
        }
    }

    #[test]
    fn what_was_written_is_not_written_again() {
        let mut bench = Bench::new();
        let mut spool = bench.spool();
        assert!(spool.keep(1, &block(ID, EPOCH, 10)));
        spool.release(1);
        bench.restore().unwrap();
        assert!(bench.journal(10).iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_block_that_is_not_whole_or_of_another_journal_is_left_where_it_is() {
        let mut torn = block(ID, EPOCH, 10);
        torn[7 * 512..].copy_from_slice(&block(ID, EPOCH, 9)[7 * 512..]);
        for kept in [
            torn,
            block(ID, EPOCH - 1, 10),
            block(ID, EPOCH + 1, 10),
            block([8; 16], EPOCH, 10),
        ] {
            let mut bench = Bench::new();
            assert!(bench.spool().keep(1, &kept));
            bench.restore().unwrap();
            assert!(bench.journal(10).iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_later_block_is_not_overwritten() {
        let mut bench = Bench::new();
        let later = block(ID, EPOCH, 10 + JOURNAL);
        bench.write((JOURNAL_FIRST + 10 % JOURNAL) * BLOCK_SIZE, &later);
        assert!(bench.spool().keep(1, &block(ID, EPOCH, 10)));
        bench.restore().unwrap();
        assert!(bench.journal(10) == later);
    }

    #[test]
    fn a_new_move_finds_nothing_of_the_one_before() {
        let mut bench = Bench::new();
        assert!(bench.spool().keep(1, &block(ID, EPOCH, 10)));
        bench.spool().clear().unwrap();
        bench.restore().unwrap();
        assert!(bench.journal(10).iter().all(|byte| *byte == 0));
    }

    #[test]
    fn whichever_superblock_can_be_read_tells_the_epoch() {
        let mut bench = Bench::new();
        let content = std::fs::read(bench.metadata.path()).unwrap();
        bench.write(BLOCK_SIZE, &content[..BLOCK]);
        bench.write(0, &[0x5c; BLOCK]);
        assert!(bench.spool().keep(1, &block(ID, EPOCH, 10)));
        bench.restore().unwrap();
        assert!(bench.journal(10) == block(ID, EPOCH, 10));
    }

    #[test]
    fn what_can_not_be_written_is_told_and_nothing_is_opened() {
        let mut bench = Bench::new();
        assert!(bench.spool().keep(1, &block(ID, EPOCH, 10)));
        let path = bench.metadata.path().to_owned();
        bench.metadata = Disk::open(&path, Access::ReadOnly, &mut bench.ring).unwrap();
        let error = bench.restore().unwrap_err().to_string();
        assert!(
            error.contains("by which the guest has been answered"),
            "{error}"
        );
    }

    #[test]
    fn there_is_a_place_for_each_block_and_none_beside() {
        let bench = Bench::new();
        let mut spool = bench.spool();
        assert!(spool.keep(PLACES - 1, &[1; BLOCK]));
        assert!(!spool.keep(PLACES, &[1; BLOCK]) && !spool.keep(0, &[1; 512]));
        let path = bench.folder.path().join("spool");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 * BLOCK_SIZE);
        assert_eq!(Spool::open(&path, PLACES + 2).unwrap().places(), 6);
        assert_eq!(bench.spool().places(), 6);
    }
}
