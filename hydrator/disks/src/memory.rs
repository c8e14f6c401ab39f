// SPDX-License-Identifier: Apache-2.0
//! Memory for I/O: mapped once, page-aligned, never given back.
//!
//! The kernel reads and writes this memory while requests are in flight, so it
//! lives as long as the process: a completion that comes late never meets
//! memory that has become something else.

use std::fs::File;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

/// What goes wrong with memory for I/O.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The kernel gave none.
    #[error("cannot map {bytes} bytes of memory for I/O: {cause}")]
    Map {
        /// What was asked for, in bytes.
        bytes: usize,
        /// What the kernel said.
        cause: std::io::Error,
    },
}

/// A piece of I/O memory: where it is and its length in bytes.
///
/// It is plain data, like an address in a request: whoever holds it knows from
/// the request it belongs to when its content may be touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    address: NonNull<u8>,
    length: usize,
}

impl Span {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Where it begins.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// The `length` bytes at `offset` in it; None if it is shorter.
    pub fn part(&self, offset: usize, length: usize) -> Option<Span> {
        if offset.checked_add(length)? > self.length {
            return None;
        }
        // SAFETY: offset is within the same mapping, as just checked.
        let address = unsafe { self.address.add(offset) };
        Some(Span { address, length })
    }

    /// Its content, to read.
    ///
    /// # Safety
    /// Nothing may write to it while the slice lives: no I/O that fills it is
    /// in flight, and no other slice of it, by a copy of the span, is written
    /// to.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is never removed; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }

    /// The content of the `length` bytes at `offset` in it, to read; nothing if
    /// it is shorter.
    ///
    /// # Safety
    /// As of [`Span::bytes`], for this part.
    pub unsafe fn bytes_of_part(&self, offset: usize, length: usize) -> &[u8] {
        match self.part(offset, length) {
            // SAFETY: the mapping is never removed; the rest is the caller's.
            Some(part) => unsafe { std::slice::from_raw_parts(part.as_ptr(), length) },
            None => &[],
        }
    }

    /// Its content, to change.
    ///
    /// # Safety
    /// Nothing else may touch it while the slice lives: no I/O with it is in
    /// flight, and there is no other slice of it by a copy of the span.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is never removed; the rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.length) }
    }
}

/// A mapping from which spans are taken, front to back, and never returned.
#[derive(Debug)]
pub struct Memory {
    whole: Span,
    taken: usize,
}

impl Memory {
    /// Maps at least `bytes` bytes, rounded up to whole pages of 4 KiB.
    pub fn new(bytes: usize) -> Result<Memory, MemoryError> {
        let length = bytes.max(1).next_multiple_of(4096);
        // SAFETY: a new private anonymous mapping at an address of the
        // kernel's choice aliases nothing.
        let address = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::POPULATE,
            )
        };
        Memory::mapped(address, length)
    }

    /// Maps the first `bytes` bytes of a file, whole pages of 4 KiB, which must
    /// stay there. What is written to them is in the file, and outlives the
    /// process.
    pub fn of_file(file: &File, bytes: usize) -> Result<Memory, MemoryError> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases
        // nothing of this process.
        let address = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                0,
            )
        };
        Memory::mapped(address, bytes)
    }

    fn mapped(
        address: rustix::io::Result<*mut std::ffi::c_void>,
        length: usize,
    ) -> Result<Memory, MemoryError> {
        let failed = |cause: std::io::Error| MemoryError::Map {
            bytes: length,
            cause,
        };
        let address = address.map_err(|error| failed(error.into()))?;
        let Some(address) = NonNull::new(address.cast()) else {
            return Err(failed(std::io::ErrorKind::OutOfMemory.into()));
        };
        Ok(Memory {
            whole: Span { address, length },
            taken: 0,
        })
    }

    /// All of it, for registering it.
    pub fn whole(&self) -> Span {
        self.whole
    }

    /// The next `length` bytes, beginning on a page; None when it is used up.
    pub fn take(&mut self, length: usize) -> Option<Span> {
        let span = self.whole.part(self.taken, length)?;
        self.taken = (self.taken + length).next_multiple_of(4096);
        Some(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_begin_on_pages_and_do_not_overlap() {
        let mut memory = Memory::new(3 * 4096).unwrap();
        let first = memory.take(100).unwrap();
        let second = memory.take(8192).unwrap();
        assert_eq!(first.as_ptr() as usize % 4096, 0);
        assert_eq!(second.as_ptr() as usize, first.as_ptr() as usize + 4096);
        assert_eq!(memory.take(1), None);
    }

    #[test]
    fn what_is_written_to_the_memory_of_a_file_is_in_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let memory = Memory::of_file(&file, 8192).unwrap();
        let mut second = memory.whole().part(4096, 4096).unwrap();
        // SAFETY: nobody else has it.
        unsafe { second.bytes_mut() }.fill(0x5c);
        let mut content = Vec::new();
        std::io::Read::read_to_end(&mut file, &mut content).unwrap();
        assert!(content[..4096].iter().all(|byte| *byte == 0));
        assert!(content[4096..].iter().all(|byte| *byte == 0x5c));
    }

    #[test]
    fn a_part_stays_inside() {
        let mut memory = Memory::new(4096).unwrap();
        let span = memory.take(4096).unwrap();
        assert_eq!(span.part(512, 1024).unwrap().len(), 1024);
        assert_eq!(span.part(4096, 1), None);
        assert_eq!(span.part(usize::MAX, 2), None);
    }
}
