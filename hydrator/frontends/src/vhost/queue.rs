// SPDX-License-Identifier: Apache-2.0
//! One queue of a device: where a guest's driver puts requests and finds their
//! answers.

use std::fs::File;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

use super::Broken;
use super::inflight::Inflight;
use super::request::Chain;

/// Descriptors of a queue, at most.
pub(super) const MOST_DESCRIPTORS: u16 = 256;

/// A queue that was given and is not yet, or no more, looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Stopped,
    Kicked,
    Running,
}

/// A queue, as one client has set it up.
pub(super) struct RequestQueue {
    pub(super) ring: Queue,
    life: Life,
    pub(super) enabled: bool,
    pub(super) inflight: Option<Inflight>,
    // What a predecessor has left unanswered, the last one first.
    again: Vec<u16>,
    call: Option<File>,
    // A new descriptor for kicks, or that there is none any more.
    kick: Option<Option<File>>,
}

impl RequestQueue {
    pub(super) fn new() -> Result<RequestQueue, virtio_queue::Error> {
        Ok(RequestQueue {
            ring: Queue::new(MOST_DESCRIPTORS)?,
            life: Life::Stopped,
            enabled: false,
            inflight: None,
            again: Vec::new(),
            call: None,
            kick: None,
        })
    }

    // What the client says.

    /// The client has taken it back.
    pub(super) fn reset(&mut self) {
        self.enabled = false;
        self.ring.reset();
        self.quiet();
        self.again.clear();
    }

    /// Looks at it no more; the index of the request that would be next.
    pub(super) fn stop(&mut self) -> u16 {
        self.ring.set_ready(false);
        self.quiet();
        let taken = std::mem::take(&mut self.again).len() as u16;
        self.ring.next_avail().wrapping_sub(taken)
    }

    fn quiet(&mut self) {
        self.life = Life::Stopped;
        self.kick = Some(None);
        self.call = None;
    }

    /// The client tells of requests by this descriptor, and of the queue's
    /// begin by giving it.
    pub(super) fn set_kick(&mut self, kick: Option<File>) {
        self.kick = Some(kick);
        if self.life == Life::Stopped {
            self.ring.set_ready(true);
            self.life = Life::Kicked;
        }
    }

    /// The new descriptor for kicks, if there was one.
    pub(super) fn take_kick(&mut self) -> Option<Option<File>> {
        self.kick.take()
    }

    /// The client is told of answers by this descriptor.
    pub(super) fn set_call(&mut self, call: Option<File>) -> Result<(), Broken> {
        self.call = call;
        // What was answered before it came must not be missed.
        if self.is_looked_at() {
            self.notify()?;
        }
        Ok(())
    }

    pub(super) fn is_looked_at(&self) -> bool {
        self.life == Life::Running
    }

    // What the guest's driver says.

    /// Whether requests are to be taken; starts the queue if that is due.
    pub(super) fn is_running(&mut self, memory: &GuestMemoryMmap) -> Result<bool, Broken> {
        if !self.enabled {
            return Ok(false);
        }
        if self.life == Life::Kicked {
            self.start(memory)?;
        }
        Ok(self.is_looked_at())
    }

    fn start(&mut self, memory: &GuestMemoryMmap) -> Result<(), Broken> {
        if !self.ring.is_valid(memory) {
            return Err(Broken::Queue);
        }
        let used = self.ring.used_idx(memory, Ordering::Acquire)?.0;
        self.ring.set_next_used(used);
        if let Some(inflight) = &mut self.inflight {
            self.again = inflight.take_over(used)?;
            let taken = used.wrapping_add(self.again.len() as u16);
            self.ring.set_next_avail(taken);
            self.again.reverse();
            if !self.again.is_empty() {
                let count = self.again.len();
                tracing::info!("vhost-user: carried out again, as not answered before: {count}");
            }
        }
        self.life = Life::Running;
        Ok(())
    }

    /// Walks the next request that waits; the descriptor at its head.
    pub(super) fn next(
        &mut self,
        memory: &GuestMemoryMmap,
        chain: &mut Chain,
    ) -> Result<Option<u16>, Broken> {
        if let Some(head) = self.again.last().copied() {
            chain.walk(self.chain_of(memory, head)?.into_iter())?;
            self.again.pop();
            return Ok(Some(head));
        }
        let Some(found) = self.ring.iter(memory)?.next() else {
            return Ok(None);
        };
        let head = found.head_index();
        chain.walk(found)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.begin(head)?;
        }
        Ok(Some(head))
    }

    /// Whether one waits.
    pub(super) fn has_next(&self, memory: &GuestMemoryMmap) -> Result<bool, Broken> {
        let available = self.ring.avail_idx(memory, Ordering::Acquire)?.0;
        Ok(!self.again.is_empty() || available != self.ring.next_avail())
    }

    /// The descriptors from `head` on, though the guest's ring says no more
    /// that it is available: a ring of our own does.
    fn chain_of(
        &self,
        memory: &GuestMemoryMmap,
        head: u16,
    ) -> Result<Vec<virtio_queue::desc::split::Descriptor>, Broken> {
        let ends = memory.iter().map(|region| region.last_addr()).max();
        let free = ends
            .and_then(|end| end.checked_add(1)?.checked_align_up(4096))
            .ok_or(Broken::Queue)?;
        let own = GuestRegionMmap::from_range(free, 4096, None)
            .map_err(|error| Broken::Inflight(error.to_string()))?;
        let memory = memory
            .insert_region(own.into())
            .map_err(|error| Broken::Inflight(error.to_string()))?;
        // No flags, the index behind the one entry, and the entry.
        memory
            .write_slice(&[0u16, 1, head].map(u16::to_le_bytes).concat(), free)
            .map_err(|error| Broken::Inflight(error.to_string()))?;
        let mut ring = Queue::new(MOST_DESCRIPTORS)?;
        ring.try_set_size(self.ring.size())?;
        ring.try_set_desc_table_address(GuestAddress(self.ring.desc_table()))?;
        ring.try_set_avail_ring_address(free)?;
        ring.set_ready(true);
        let chain = ring.iter(&memory)?.next().ok_or(Broken::Queue)?;
        Ok(chain.collect())
    }

    /// Asks the guest not to tell of more requests.
    pub(super) fn silence(&mut self, memory: &GuestMemoryMmap) -> Result<(), Broken> {
        Ok(self.ring.disable_notification(memory)?)
    }

    /// Asks the guest to tell of more requests; whether there are some already.
    pub(super) fn listen(&mut self, memory: &GuestMemoryMmap) -> Result<bool, Broken> {
        Ok(self.ring.enable_notification(memory)?)
    }

    /// Tells the guest that a request is answered.
    pub(super) fn answered(
        &mut self,
        memory: &GuestMemoryMmap,
        head: u16,
        written: u32,
    ) -> Result<(), Broken> {
        if let Some(inflight) = &mut self.inflight {
            inflight.answering(head)?;
        }
        self.ring.add_used(memory, head, written)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.answered(head, self.ring.next_used())?;
        }
        if self.ring.needs_notification(memory)? {
            self.notify()?;
        }
        Ok(())
    }

    fn notify(&self) -> Result<(), Broken> {
        let Some(call) = &self.call else {
            return Ok(());
        };
        match rustix::io::write(call, &1u64.to_ne_bytes()) {
            // Nobody has looked for a long time; who does will see it.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(Broken::Call(error.into())),
        }
    }
}
