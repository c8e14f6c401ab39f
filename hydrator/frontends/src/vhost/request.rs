// SPDX-License-Identifier: Apache-2.0
//! The requests of virtio-blk (Virtual I/O Device 1.2, section 5.2.6).
//!
//! A request is a chain of descriptors: a header that the device reads, data
//! that it reads or writes, and one byte of status that it writes. How the
//! chain is cut into descriptors has no meaning. The guest can change all of it
//! at any time: the chain is walked once, and the header is read once.

use std::mem::{offset_of, size_of};

use localstor_hydrator_core::{Failure, Operation};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, virtio_blk_config,
};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

use super::Broken;
use crate::block::{Geometry, Outcome};

/// The protocol counts in sectors of so many bytes, whatever a block is.
const SECTOR: u64 = 512;

/// The longest read or write, in bytes.
pub(super) const LONGEST: usize = 1 << 20;

/// Queues of a device, at most: one for each processor of most guests.
pub(super) const MOST_QUEUES: u16 = 64;

/// A request's data may have so many pieces, each of so many bytes: together
/// they are not longer than the longest. More pieces than QEMU's queues have
/// descriptors, but for header and status, are of no use.
const MOST_SEGMENTS: u32 = 126;
const LONGEST_SEGMENT: u32 = 8192;

/// A discard or a write of zeros may be this long, in sectors.
const LONGEST_ZEROES: u32 = (1 << 30) >> 9;

/// The guest is told that the device is made of blocks of so many bytes.
const PHYSICAL_BLOCK: u32 = 4096;

const HEADER: usize = 16;
const RANGE: usize = 16;

/// Bytes of a device's name.
pub(super) const NAME: usize = 20;

/// What the device can do, apart from the transport's features.
pub(super) const FEATURES: u64 = 1 << VIRTIO_BLK_F_FLUSH
    | 1 << VIRTIO_BLK_F_SIZE_MAX
    | 1 << VIRTIO_BLK_F_SEG_MAX
    | 1 << VIRTIO_BLK_F_BLK_SIZE
    | 1 << VIRTIO_BLK_F_TOPOLOGY
    | 1 << VIRTIO_BLK_F_MQ
    | 1 << VIRTIO_BLK_F_DISCARD
    | 1 << VIRTIO_BLK_F_WRITE_ZEROES;

/// The configuration space (section 5.2.4).
pub(super) fn configuration(geometry: &Geometry) -> Vec<u8> {
    let mut space = vec![0; size_of::<virtio_blk_config>()];
    let mut put = |offset: usize, bytes: &[u8]| {
        space[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    put(
        offset_of!(virtio_blk_config, capacity),
        &(geometry.size / SECTOR).to_le_bytes(),
    );
    let alignment = PHYSICAL_BLOCK / SECTOR as u32;
    for (offset, value) in [
        (offset_of!(virtio_blk_config, size_max), LONGEST_SEGMENT),
        (offset_of!(virtio_blk_config, seg_max), MOST_SEGMENTS),
        (
            offset_of!(virtio_blk_config, blk_size),
            geometry.logical_block,
        ),
        (
            offset_of!(virtio_blk_config, max_discard_sectors),
            LONGEST_ZEROES,
        ),
        (offset_of!(virtio_blk_config, max_discard_seg), 1),
        (
            offset_of!(virtio_blk_config, discard_sector_alignment),
            alignment,
        ),
        (
            offset_of!(virtio_blk_config, max_write_zeroes_sectors),
            LONGEST_ZEROES,
        ),
        (offset_of!(virtio_blk_config, max_write_zeroes_seg), 1),
    ] {
        put(offset, &value.to_le_bytes());
    }
    let blocks = (PHYSICAL_BLOCK / geometry.logical_block).max(1);
    put(
        offset_of!(virtio_blk_config, physical_block_exp),
        &[blocks.trailing_zeros() as u8],
    );
    put(
        offset_of!(virtio_blk_config, min_io_size),
        &(blocks as u16).to_le_bytes(),
    );
    put(
        offset_of!(virtio_blk_config, opt_io_size),
        &blocks.to_le_bytes(),
    );
    put(offset_of!(virtio_blk_config, write_zeroes_may_unmap), &[1]);
    put(
        offset_of!(virtio_blk_config, num_queues),
        &MOST_QUEUES.to_le_bytes(),
    );
    space
}

/// What a guest is told of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    Failed,
    Unsupported,
}

impl Status {
    fn byte(self) -> u8 {
        let code = match self {
            Status::Ok => VIRTIO_BLK_S_OK,
            Status::Failed => VIRTIO_BLK_S_IOERR,
            Status::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        code as u8
    }
}

impl From<Outcome> for Status {
    fn from(outcome: Outcome) -> Status {
        match outcome {
            Ok(()) => Status::Ok,
            Err(
                Failure::Io
                | Failure::Unreachable
                | Failure::BadSector
                | Failure::NoSpace
                | Failure::Invalid
                | Failure::NotOpen,
            ) => Status::Failed,
        }
    }
}

/// What a guest asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// The engine's business, with this range of bytes.
    Io {
        operation: Operation,
        offset: u64,
        length: u64,
    },
    /// The device's name.
    Name,
    /// Nothing that can be done; it is told why by this status.
    Nothing(Status),
}

/// The guest's memory for one direction of a request, in pieces.
#[derive(Debug, Default)]
struct Pieces {
    pieces: Vec<(GuestAddress, u32)>,
    bytes: u64,
}

impl Pieces {
    fn clear(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
    }

    fn push(&mut self, address: GuestAddress, length: u32) {
        self.pieces.push((address, length));
        self.bytes += u64::from(length);
    }

    /// Calls `carry` for what is behind the first `skip` bytes: with a place
    /// in the guest's memory and where in `length` bytes of ours it belongs.
    fn carry(
        &self,
        mut skip: u64,
        length: usize,
        mut carry: impl FnMut(GuestAddress, usize, usize) -> Result<(), vm_memory::GuestMemoryError>,
    ) -> Result<(), Broken> {
        let mut done = 0;
        for (address, size) in &self.pieces {
            let size = u64::from(*size);
            if skip >= size {
                skip -= size;
                continue;
            }
            let count = (size - skip).min((length - done) as u64) as usize;
            let outside = |cause: String| Broken::Memory {
                address: address.raw_value(),
                cause,
            };
            let place = address.checked_add(skip);
            let place = place.ok_or_else(|| outside("it ends there".to_owned()))?;
            skip = 0;
            if count > 0 {
                carry(place, done, count).map_err(|error| outside(error.to_string()))?;
                done += count;
            }
        }
        if done < length {
            return Err(Broken::Short);
        }
        Ok(())
    }
}

/// A chain of descriptors, walked once.
#[derive(Debug, Default)]
pub(super) struct Chain {
    readable: Pieces,
    writable: Pieces,
}

impl Chain {
    /// Walks another chain.
    pub(super) fn walk(
        &mut self,
        descriptors: impl Iterator<Item = Descriptor>,
    ) -> Result<(), Broken> {
        self.readable.clear();
        self.writable.clear();
        for descriptor in descriptors {
            let pieces = if descriptor.is_write_only() {
                &mut self.writable
            } else if self.writable.bytes > 0 {
                return Err(Broken::Order);
            } else {
                &mut self.readable
            };
            pieces.push(descriptor.addr(), descriptor.len());
        }
        if self.writable.bytes == 0 {
            return Err(Broken::NoStatus);
        }
        Ok(())
    }

    fn read(&self, memory: &GuestMemoryMmap, skip: u64, target: &mut [u8]) -> Result<(), Broken> {
        self.readable
            .carry(skip, target.len(), |address, at, count| {
                memory.read_slice(&mut target[at..at + count], address)
            })
    }

    fn write(&self, memory: &GuestMemoryMmap, skip: u64, source: &[u8]) -> Result<(), Broken> {
        self.writable
            .carry(skip, source.len(), |address, at, count| {
                memory.write_slice(&source[at..at + count], address)
            })
    }

    /// What the guest asks for. `fua`: it can't flush, so what it writes must
    /// be durable when it completes.
    ///
    /// # Errors
    /// That it is no request.
    pub(super) fn ask(
        &self,
        memory: &GuestMemoryMmap,
        geometry: &Geometry,
        fua: bool,
    ) -> Result<Ask, Broken> {
        let mut header = [0; HEADER];
        self.read(memory, 0, &mut header)?;
        let kind = word(&header, 0);
        let sector = long(&header, 8);
        let data = self.readable.bytes - HEADER as u64;
        let room = self.writable.bytes - 1;
        let refused = Ok(Ask::Nothing(Status::Failed));
        let (operation, sector, bytes) = match kind {
            VIRTIO_BLK_T_IN => (Operation::Read, sector, room),
            VIRTIO_BLK_T_OUT => (Operation::Write { fua }, sector, data),
            VIRTIO_BLK_T_FLUSH => {
                return Ok(Ask::Io {
                    operation: Operation::Flush,
                    offset: 0,
                    length: 0,
                });
            }
            VIRTIO_BLK_T_GET_ID => return Ok(Ask::Name),
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                if data != RANGE as u64 {
                    return refused;
                }
                let mut range = [0; RANGE];
                self.read(memory, HEADER as u64, &mut range)?;
                let (count, flags) = (word(&range, 8), word(&range, 12));
                let (operation, known) = match kind {
                    VIRTIO_BLK_T_DISCARD => (Operation::Discard, 0),
                    // Zeros may take no space; they don't have to.
                    _ => (Operation::WriteZeroes { fua }, 1),
                };
                if flags & !known != 0 {
                    return Ok(Ask::Nothing(Status::Unsupported));
                }
                if count > LONGEST_ZEROES {
                    return refused;
                }
                (operation, long(&range, 0), u64::from(count) * SECTOR)
            }
            _ => return Ok(Ask::Nothing(Status::Unsupported)),
        };
        let Some(offset) = sector.checked_mul(SECTOR) else {
            return refused;
        };
        let too_long = matches!(operation, Operation::Read | Operation::Write { .. })
            && bytes > LONGEST as u64;
        if too_long || !geometry.holds(offset, bytes) {
            return refused;
        }
        Ok(Ask::Io {
            operation,
            offset,
            length: bytes,
        })
    }

    /// Copies the data of a write: from here on the guest can't change them.
    pub(super) fn take_data(
        &self,
        memory: &GuestMemoryMmap,
        target: &mut [u8],
    ) -> Result<(), Broken> {
        self.read(memory, HEADER as u64, target)
    }

    /// Answers with as much of `data` as there is room for; how many bytes
    /// were written.
    pub(super) fn answer(
        &self,
        memory: &GuestMemoryMmap,
        data: &[u8],
        status: Status,
    ) -> Result<u32, Broken> {
        let room = self.writable.bytes - 1;
        let count = (data.len() as u64).min(room) as usize;
        self.write(memory, 0, &data[..count])?;
        self.write(memory, room, &[status.byte()])?;
        Ok(count as u32 + 1)
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests;
