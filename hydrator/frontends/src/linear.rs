// SPDX-License-Identifier: Apache-2.0
//! A volume that is one disk: what a frontend costs, and whether it is right,
//! without the core.

use localstor_hydrator_core::{Failure, Operation, Tag};
use localstor_hydrator_disks::{Disk, Event, Owner, Ring, Token};

use crate::block::{Arrival, Outcome};

/// Passes every request on to one disk.
pub struct Linear {
    disk: Disk,
    requests: Vec<Option<Pending>>,
}

#[derive(Clone, Copy)]
struct Pending {
    arrival: Arrival,
    step: Step,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Only,
    // Giving the space back; if the disk can't, zeros are written.
    Unmap,
    // Zeros that must be durable are followed by a flush.
    Flush,
}

impl Linear {
    /// Over this disk.
    pub fn new(disk: Disk) -> Linear {
        Linear {
            disk,
            requests: Vec::new(),
        }
    }

    /// The disk.
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Takes a request of the guest's.
    pub fn submit(&mut self, ring: &mut Ring, arrival: Arrival) {
        let step = match arrival.request.operation {
            Operation::Discard => Step::Unmap,
            _ => Step::Only,
        };
        self.put(Pending { arrival, step });
        self.carry_out(ring, Pending { arrival, step });
    }

    fn put(&mut self, pending: Pending) {
        let index = pending.arrival.request.tag.0 as usize;
        if index >= self.requests.len() {
            self.requests.resize(index + 1, None);
        }
        self.requests[index] = Some(pending);
    }

    fn carry_out(&mut self, ring: &mut Ring, pending: Pending) {
        let request = pending.arrival.request;
        let token = Token::new(Owner::Engine, request.tag.0.into());
        let (offset, length) = (request.offset, request.length);
        match (pending.step, request.operation, pending.arrival.span) {
            (Step::Unmap, ..) => self.disk.unmap(ring, offset, length, token),
            (_, Operation::Read, Some(span)) => {
                // SAFETY: the span is ours until the request is answered.
                unsafe { self.disk.read(ring, span, offset, token) };
            }
            (_, Operation::Write { fua }, Some(span)) => {
                // SAFETY: the span is ours until the request is answered.
                unsafe { self.disk.write(ring, span, offset, fua, token) };
            }
            (Step::Only, Operation::WriteZeroes { .. } | Operation::Discard, _) => {
                self.disk.zero(ring, offset, length, token);
            }
            _ => self.disk.flush(ring, token),
        }
    }

    /// Takes a completion of the disk's; the request's result when it has one.
    pub fn on_event(&mut self, ring: &mut Ring, event: Event) -> Option<(Tag, Outcome)> {
        let index = event.token.detail() as usize;
        let pending = self.requests.get_mut(index)?.take()?;
        let request = pending.arrival.request;
        let expected = pending.arrival.span.map_or(0, |span| span.len() as i32);
        let next = match (pending.step, request.operation, event.result) {
            (Step::Unmap, _, result) if result == -libc::EOPNOTSUPP => Some(Step::Only),
            (Step::Only, Operation::WriteZeroes { fua: true }, 0) => Some(Step::Flush),
            _ => None,
        };
        if let Some(step) = next {
            let pending = Pending { step, ..pending };
            self.put(pending);
            self.carry_out(ring, pending);
            return None;
        }
        let outcome = if event.result == expected {
            Ok(())
        } else if event.result == -libc::ENOSPC {
            Err(Failure::NoSpace)
        } else {
            Err(Failure::Io)
        };
        Some((request.tag, outcome))
    }
}
