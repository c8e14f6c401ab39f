// SPDX-License-Identifier: Apache-2.0
//! The requests of virtio-blk (Virtual I/O Device 1.2, section 5.2.6).
//!
//! A request is a chain of descriptors: a header that the device reads, data
//! that it reads or writes, and one byte of status that it writes. How the
//! chain is cut into descriptors has no meaning.

use std::io::{self, Read, Write};
use std::mem::{offset_of, size_of};

use thiserror::Error;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, virtio_blk_config,
};
use virtio_queue::{Reader, Writer};

use crate::cache::{Content, Moment, SECTOR};
use crate::disk::{Plug, Refusal};

/// Descriptors of a queue. User Mode Linux asks for so many and no other
/// number (`MAX_SUPPORTED_QUEUE_SIZE` in its `virtio_uml.c`).
pub const QUEUE_SIZE: u16 = 256;

// A header and a status stand beside the data.
const MAX_SEGMENTS: u32 = QUEUE_SIZE as u32 - 2;
// Sectors. They are torn one by one, so they are counted one by one.
const MAX_ZEROED: u32 = 1 << 17;
// Bytes of data. A kernel asks for less; who asks for more is none.
const MAX_DATA: usize = 64 << 20;
const ID_LENGTH: usize = 20;
const RANGE_LENGTH: usize = 16;

/// What the device can do, apart from the transport's features.
pub const FEATURES: u64 = 1 << VIRTIO_BLK_F_FLUSH
    | 1 << VIRTIO_BLK_F_SEG_MAX
    | 1 << VIRTIO_BLK_F_BLK_SIZE
    | 1 << VIRTIO_BLK_F_DISCARD
    | 1 << VIRTIO_BLK_F_WRITE_ZEROES;

/// The configuration space of a disk of so many bytes, in blocks of so many
/// (section 5.2.4).
pub fn configuration(capacity: u64, block: u64) -> Vec<u8> {
    let mut space = vec![0; size_of::<virtio_blk_config>()];
    let mut put = |offset: usize, bytes: &[u8]| {
        space[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    put(
        offset_of!(virtio_blk_config, capacity),
        &(capacity / SECTOR).to_le_bytes(),
    );
    for (offset, value) in [
        (offset_of!(virtio_blk_config, seg_max), MAX_SEGMENTS),
        (offset_of!(virtio_blk_config, blk_size), block as u32),
        (
            offset_of!(virtio_blk_config, max_discard_sectors),
            MAX_ZEROED,
        ),
        (offset_of!(virtio_blk_config, max_discard_seg), 1),
        (
            offset_of!(virtio_blk_config, discard_sector_alignment),
            (block / SECTOR) as u32,
        ),
        (
            offset_of!(virtio_blk_config, max_write_zeroes_sectors),
            MAX_ZEROED,
        ),
        (offset_of!(virtio_blk_config, max_write_zeroes_seg), 1),
    ] {
        put(offset, &value.to_le_bytes());
    }
    put(offset_of!(virtio_blk_config, write_zeroes_may_unmap), &[1]);
    space
}

/// What is wrong with a request.
#[derive(Debug, Error)]
enum Wrong {
    #[error("the device does not know requests of type {0}")]
    Type(u32),
    #[error("it is malformed: {0}")]
    Form(#[from] io::Error),
    #[error("it carries {0} bytes of data, more than {MAX_DATA}")]
    Length(usize),
    #[error("it zeroes {0} sectors, more than {MAX_ZEROED}")]
    Zeroed(u32),
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// A request without room for a status can't be answered.
#[derive(Debug, Error)]
pub enum Unanswered {
    /// The power was cut before it was carried out.
    #[error("the disk has no power")]
    NoPower,
    /// There is no room for a status, or guest memory can't be written.
    #[error("a request has no room for its answer: {0}")]
    NoRoom(String),
}

/// Carry out one request; the number of bytes written to guest memory.
///
/// A flush covers what completed before `submitted`, when the request was
/// found in the queue.
pub fn carry_out(
    plug: &Plug,
    id: &str,
    submitted: Moment,
    mut reader: Reader<'_>,
    mut writer: Writer<'_>,
) -> Result<u32, Unanswered> {
    let no_room = |error: &dyn std::fmt::Display| Unanswered::NoRoom(error.to_string());
    let room = writer.available_bytes();
    let data = room
        .checked_sub(1)
        .ok_or_else(|| no_room(&"nothing can be written"))?;
    let mut status = writer.split_at(data).map_err(|error| no_room(&error))?;
    let code = match perform(plug, id, submitted, &mut reader, &mut writer) {
        Ok(()) => VIRTIO_BLK_S_OK,
        Err(Wrong::Refused(Refusal::NoPower)) => return Err(Unanswered::NoPower),
        Err(wrong) => {
            tracing::warn!("a request fails: {wrong}");
            match wrong {
                Wrong::Type(_) => VIRTIO_BLK_S_UNSUPP,
                _ => VIRTIO_BLK_S_IOERR,
            }
        }
    };
    status
        .write_all(&[code as u8])
        .map_err(|error| no_room(&error))?;
    Ok((writer.bytes_written() + 1) as u32)
}

fn perform(
    plug: &Plug,
    id: &str,
    submitted: Moment,
    reader: &mut Reader<'_>,
    writer: &mut Writer<'_>,
) -> Result<(), Wrong> {
    let kind = u32::from_le_bytes(take(reader)?);
    let _reserved: [u8; 4] = take(reader)?;
    let sector = u64::from_le_bytes(take(reader)?);
    match kind {
        VIRTIO_BLK_T_IN => {
            let mut data = buffer(writer.available_bytes())?;
            plug.read(bytes(sector), &mut data)?;
            writer.write_all(&data)?;
        }
        VIRTIO_BLK_T_OUT => {
            let mut data = buffer(reader.available_bytes())?;
            reader.read_exact(&mut data)?;
            plug.write(bytes(sector), Content::Data(data))?;
        }
        VIRTIO_BLK_T_FLUSH => plug.flush(submitted)?,
        VIRTIO_BLK_T_GET_ID => {
            let mut answer = [0; ID_LENGTH];
            let length = id.len().min(ID_LENGTH);
            answer[..length].copy_from_slice(&id.as_bytes()[..length]);
            let room = writer.available_bytes().min(ID_LENGTH);
            writer.write_all(&answer[..room])?;
        }
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
            while reader.available_bytes() >= RANGE_LENGTH {
                let sector = u64::from_le_bytes(take(reader)?);
                let count = u32::from_le_bytes(take(reader)?);
                let _flags: [u8; 4] = take(reader)?;
                if count > MAX_ZEROED {
                    return Err(Wrong::Zeroed(count));
                }
                plug.write(bytes(sector), Content::Zeros(u64::from(count) * SECTOR))?;
            }
        }
        unknown => return Err(Wrong::Type(unknown)),
    }
    Ok(())
}

fn take<const N: usize>(reader: &mut Reader<'_>) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn buffer(length: usize) -> Result<Vec<u8>, Wrong> {
    if length > MAX_DATA {
        Err(Wrong::Length(length))
    } else {
        Ok(vec![0; length])
    }
}

/// The byte offset of a sector; one that no disk has stays out of range.
fn bytes(sector: u64) -> u64 {
    sector.saturating_mul(SECTOR)
}

#[cfg(test)]
mod tests;
