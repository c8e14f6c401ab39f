// SPDX-License-Identifier: Apache-2.0
//! What a successor must know of requests that were not answered.
//!
//! The client keeps this memory while servers come and go
//! (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`; "Inflight I/O tracking" in QEMU's
//! `docs/interop/vhost-user.rst`, the regions of split virtqueues, one behind the
//! other). It says which descriptors are with us, and in what order they came. A batch of
//! answers has one here, always.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use super::Broken;

/// Bytes in front of the descriptors' states, and of each of these.
const HEADER: usize = 16;
const STATE: usize = 16;

/// Where the fields are, in bytes.
const VERSION: usize = 8;
const COUNT: usize = 10;
const LAST: usize = 12;
const USED: usize = 14;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// The one version that there is.
const LAYOUT: u16 = 1;

/// The memory of one queue's requests.
pub(super) struct Inflight {
    // That of all queues, and where in it this one's is.
    region: Arc<MmapRegion>,
    begin: usize,
    size: u16,
    counter: u64,
}

/// Bytes for so many queues, each of `size` descriptors.
pub(super) fn length(queues: u16, size: u16) -> usize {
    usize::from(queues) * (HEADER + STATE * usize::from(size)).next_multiple_of(64)
}

/// Memory in which nothing is in flight, for the client to keep.
pub(super) fn create(queues: u16, size: u16) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("localstor-inflight", flags)?;
    ftruncate(&file, length(queues, size) as u64)?;
    let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

fn offset(head: u16) -> usize {
    HEADER + STATE * usize::from(head)
}

impl Inflight {
    /// The memory that a client has kept of so many queues, in their order.
    pub(super) fn open(
        file: File,
        offset: u64,
        bytes: u64,
        queues: u16,
        size: u16,
    ) -> io::Result<Vec<Inflight>> {
        let needed = length(queues, size);
        if bytes < needed as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{bytes} bytes have no room for {queues} x {size} descriptors in flight"),
            ));
        }
        super::has_bytes(&file, offset, needed as u64)?;
        let region = MmapRegion::from_file(FileOffset::new(file, offset), needed)
            .map_err(io::Error::other)?;
        Ok(Inflight::all(region, queues, size))
    }

    fn all(region: MmapRegion, queues: u16, size: u16) -> Vec<Inflight> {
        let region = Arc::new(region);
        let queues = (0..queues).map(|queue| Inflight {
            region: Arc::clone(&region),
            begin: length(queue, size),
            size,
            counter: 0,
        });
        queues.collect()
    }

    /// One queue's memory with this content.
    #[cfg(fuzzing)]
    pub(super) fn over(bytes: &[u8], size: u16) -> Inflight {
        let region = MmapRegion::new(length(1, size)).expect("memory");
        let count = bytes.len().min(length(1, size));
        region.as_volatile_slice().copy_from(&bytes[..count]);
        Inflight::all(region, 1, size).remove(0)
    }

    fn load<T: vm_memory::AtomicAccess>(&self, at: usize) -> Result<T, Broken> {
        self.region
            .as_volatile_slice()
            .load(self.begin + at, Ordering::SeqCst)
            .map_err(|error| Broken::Inflight(error.to_string()))
    }

    fn store<T: vm_memory::AtomicAccess>(&self, at: usize, value: T) -> Result<(), Broken> {
        self.region
            .as_volatile_slice()
            .store(value, self.begin + at, Ordering::SeqCst)
            .map_err(|error| Broken::Inflight(error.to_string()))
    }

    /// Takes over from a predecessor when the queue starts: the descriptors
    /// that it has not answered, in the order in which it got them.
    ///
    /// `used` is the index that the used ring has now.
    pub(super) fn take_over(&mut self, used: u16) -> Result<Vec<u16>, Broken> {
        if self.load::<u16>(VERSION)? == 0 {
            self.store(COUNT, self.size)?;
            self.store(USED, used)?;
            self.store(VERSION, LAYOUT)?;
            return Ok(Vec::new());
        }
        let (version, count) = (self.load::<u16>(VERSION)?, self.load::<u16>(COUNT)?);
        if version != LAYOUT || count != self.size {
            return Err(Broken::Inflight(format!(
                "it has version {version} and {count} descriptors, not {LAYOUT} and {}",
                self.size
            )));
        }
        // The predecessor died between its last answer and the note of it.
        if self.load::<u16>(USED)? != used {
            let last: u16 = self.load(LAST)?;
            if last < self.size {
                self.store(offset(last), 0u8)?;
            }
            self.store(USED, used)?;
        }
        let mut heads = Vec::new();
        for head in 0..self.size {
            if self.load::<u8>(offset(head))? == 1 {
                heads.push((self.load::<u64>(offset(head) + COUNTER)?, head));
            }
        }
        heads.sort_unstable();
        self.counter = heads
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(heads.into_iter().map(|(_, head)| head).collect())
    }

    /// A descriptor is with us from now on.
    pub(super) fn begin(&mut self, head: u16) -> Result<(), Broken> {
        if head >= self.size {
            return Err(Broken::Head(head));
        }
        self.store(offset(head) + COUNTER, self.counter)?;
        self.counter = self.counter.wrapping_add(1);
        self.store(offset(head), 1u8)
    }

    /// The answer of a descriptor is about to be put into the used ring.
    pub(super) fn answering(&mut self, head: u16) -> Result<(), Broken> {
        let last: u16 = self.load(LAST)?;
        self.store(offset(head) + NEXT, last)?;
        self.store(LAST, head)
    }

    /// It is there; the ring's index is `used` now.
    pub(super) fn answered(&mut self, head: u16, used: u16) -> Result<(), Broken> {
        self.store(offset(head), 0u8)?;
        self.store(USED, used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_all(file: &File, queues: u16) -> Vec<Inflight> {
        let bytes = length(queues, 8) as u64;
        Inflight::open(file.try_clone().unwrap(), 0, bytes, queues, 8).unwrap()
    }

    fn open(file: &File) -> Inflight {
        open_all(file, 1).remove(0)
    }

    #[test]
    fn a_successor_gets_what_was_not_answered_in_its_order() {
        let file = create(1, 8).unwrap();
        let mut first = open(&file);
        assert!(first.take_over(65535).unwrap().is_empty());
        for head in [5, 1, 3, 0] {
            first.begin(head).unwrap();
        }
        first.answering(1).unwrap();
        first.answered(1, 0).unwrap();
        let mut second = open(&file);
        assert_eq!(second.take_over(0).unwrap(), [5, 3, 0]);
        second.begin(1).unwrap();
        assert_eq!(open(&file).take_over(0).unwrap(), [5, 3, 0, 1]);
    }

    #[test]
    fn an_answer_that_was_given_but_not_noted_is_not_given_again() {
        let file = create(1, 8).unwrap();
        let mut first = open(&file);
        first.take_over(0).unwrap();
        first.begin(2).unwrap();
        first.begin(7).unwrap();
        first.answering(2).unwrap();
        assert_eq!(open(&file).take_over(1).unwrap(), [7]);
        assert_eq!(open(&file).take_over(1).unwrap(), [7]);
    }

    #[test]
    fn an_answer_that_was_not_given_is_given() {
        let file = create(1, 8).unwrap();
        let mut first = open(&file);
        first.take_over(0).unwrap();
        first.begin(2).unwrap();
        first.answering(2).unwrap();
        assert_eq!(open(&file).take_over(0).unwrap(), [2]);
    }

    #[test]
    fn each_queue_has_its_own() {
        let file = create(3, 8).unwrap();
        let mut first = open_all(&file, 3);
        for (queue, head) in [(0, 7), (2, 0), (1, 3)] {
            assert!(first[queue].take_over(0).unwrap().is_empty());
            first[queue].begin(head).unwrap();
        }
        first[1].answering(3).unwrap();
        first[1].answered(3, 1).unwrap();
        let mut second = open_all(&file, 3);
        let used = [0, 1, 0];
        let left = second.iter_mut().zip(used);
        let left: Vec<_> = left
            .map(|(queue, used)| queue.take_over(used).unwrap())
            .collect();
        assert_eq!(left, [vec![7], vec![], vec![0]]);
    }

    #[test]
    fn memory_of_another_layout_is_refused() {
        let file = create(1, 8).unwrap();
        let first = open(&file);
        first.store(VERSION, 2u16).unwrap();
        assert!(open(&file).take_over(0).is_err());
        assert!(Inflight::open(file.try_clone().unwrap(), 0, 64, 1, 8).is_err());
        let bytes = length(1, 8) as u64;
        assert!(Inflight::open(file.try_clone().unwrap(), 64, bytes, 1, 8).is_err());
        // It has no room for a second queue.
        assert!(Inflight::open(file, 0, 2 * bytes, 2, 8).is_err());
    }
}
