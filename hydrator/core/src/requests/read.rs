// SPDX-License-Identifier: Apache-2.0

//! Reads of what is not all local.

use crate::copier::Copier;
use crate::io::{Device, Failure, Memory};
use crate::parts::Parts;
use crate::requests::part::{Next, Part};
use crate::units::{Blocks, Bytes, Offset};

/// How far a read is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Read {
    /// It is to be begun.
    Begin,
    /// Its pieces are being read.
    Reading,
}

impl Read {
    /// Take the next step; nothing of it is in flight.
    pub(super) fn advance<M: Memory>(
        self,
        part: &mut Part,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) -> Next<Self> {
        if matches!(self, Self::Reading) {
            return Next::Ended;
        }
        let mut rest = part.blocks();
        if parts.regions.is_overwritten(rest) {
            return Next::Wait(Self::Begin);
        }
        if parts.regions.is_any_unreadable(rest) {
            part.failure = Some(Failure::BadSector);
            return Next::Ended;
        }
        while !rest.is_empty() {
            let local = parts.regions.map().is_local(rest.first);
            let end = parts.regions.map().run_end(rest, local);
            let run = Blocks::new(rest.first, end);
            let bytes = part.bytes.within(run);
            if local {
                part.pending += 1;
                let buffer = part.buffer_of(bytes.from);
                parts.cx.read(part.job(), Device::Data, bytes, buffer);
            } else {
                read_remote(part, bytes, copier, parts, memory);
            }
            rest = rest.from(end);
        }
        if part.pending == 0 {
            return Next::Ended;
        }
        Next::Flight(Self::Reading)
    }
}

/// Read bytes of remote blocks; what is beyond the source's end is zeros.
fn read_remote<M: Memory>(
    part: &mut Part,
    bytes: Bytes,
    copier: &mut Copier,
    parts: &mut Parts,
    memory: &mut M,
) {
    let source_end = Offset(parts.cx.superblock.source_size).clamp(bytes.from, bytes.to);
    if source_end < bytes.to {
        let length = (bytes.to - source_end) as u32;
        memory.zero_guest(part.tag, part.offset_of(source_end), length);
    }
    let on_source = Bytes::new(bytes.from, source_end);
    if on_source.length() > 0 {
        copier.warm(on_source.blocks(), &mut parts.regions);
        part.pending += 1;
        let buffer = part.buffer_of(bytes.from);
        parts
            .source
            .read(part.key, on_source, buffer, &mut parts.cx);
    }
}
