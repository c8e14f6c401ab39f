// SPDX-License-Identifier: Apache-2.0
//! What a client says about its guest: memory, queue, descriptors of events.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error as ProtocolError, GpuBackend, Result as ProtocolResult, VhostUserBackendReqHandlerMut,
};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
};

use super::Broken;
use super::inflight::{self, Inflight};
use super::request::{self, Chain};
use crate::block::Geometry;

/// Descriptors of a queue, at most.
pub(super) const MOST_DESCRIPTORS: u16 = 256;

/// Pieces of memory, at most: as many as QEMU has use for.
const MOST_REGIONS: u64 = 509;

fn features() -> u64 {
    request::FEATURES
        | 1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_RING_F_INDIRECT_DESC
        | 1 << VIRTIO_RING_F_EVENT_IDX
        | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
}

fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
}

/// Where a piece of the guest's memory is, as the client names it in messages
/// and as the guest does in its rings.
struct Mapping {
    client: u64,
    guest: u64,
    bytes: u64,
}

/// A queue that was given and is not yet, or no more, looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Stopped,
    Kicked,
    Running,
}

/// The device, as one client has set it up.
pub(super) struct Device {
    geometry: Geometry,
    acked: u64,
    mappings: Vec<Mapping>,
    memory: GuestMemoryMmap,
    queue: Queue,
    life: Life,
    enabled: bool,
    inflight: Option<Inflight>,
    // What a predecessor has left unanswered, the last one first.
    again: Vec<u16>,
    call: Option<File>,
    // A new descriptor for kicks, or that there is none any more.
    kick: Option<Option<File>>,
}

impl Device {
    pub(super) fn new(geometry: Geometry) -> Result<Device, virtio_queue::Error> {
        Ok(Device {
            geometry,
            acked: 0,
            mappings: Vec::new(),
            memory: GuestMemoryMmap::new(),
            queue: Queue::new(MOST_DESCRIPTORS)?,
            life: Life::Stopped,
            enabled: false,
            inflight: None,
            again: Vec::new(),
            call: None,
            kick: None,
        })
    }

    /// With a queue of `size` that waits to be started: its table, available
    /// ring and used ring are at these addresses.
    #[cfg(fuzzing)]
    pub(super) fn over(
        memory: GuestMemoryMmap,
        geometry: Geometry,
        size: u16,
        addresses: [GuestAddress; 3],
        inflight: Option<&[u8]>,
    ) -> Device {
        let mut device = Device::new(geometry).expect("a queue");
        device.memory = memory;
        let queue = &mut device.queue;
        queue.try_set_size(size).expect("a size");
        let [table, available, used] = addresses;
        queue.try_set_desc_table_address(table).expect("a table");
        queue.try_set_avail_ring_address(available).expect("a ring");
        queue.try_set_used_ring_address(used).expect("a ring");
        queue.set_ready(true);
        device.life = Life::Kicked;
        device.enabled = true;
        device.inflight = inflight.map(|bytes| Inflight::over(bytes, size));
        device
    }

    pub(super) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Whether a write must be durable because the guest never flushes.
    pub(super) fn writes_through(&self) -> bool {
        self.acked & 1 << VIRTIO_BLK_F_FLUSH == 0
    }

    /// The new descriptor for kicks, if there was one.
    pub(super) fn take_kick(&mut self) -> Option<Option<File>> {
        self.kick.take()
    }

    /// Whether requests are to be taken; starts the queue if that is due.
    pub(super) fn is_running(&mut self) -> Result<bool, Broken> {
        if !self.enabled {
            return Ok(false);
        }
        if self.life == Life::Kicked {
            self.start()?;
        }
        Ok(self.life == Life::Running)
    }

    fn start(&mut self) -> Result<(), Broken> {
        if !self.queue.is_valid(&self.memory) {
            return Err(Broken::Queue);
        }
        let used = self.queue.used_idx(&self.memory, Ordering::Acquire)?.0;
        self.queue.set_next_used(used);
        if let Some(inflight) = &mut self.inflight {
            self.again = inflight.take_over(used)?;
            let taken = used.wrapping_add(self.again.len() as u16);
            self.queue.set_next_avail(taken);
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
    pub(super) fn next(&mut self, chain: &mut Chain) -> Result<Option<u16>, Broken> {
        if let Some(head) = self.again.last().copied() {
            chain.walk(self.chain_of(head)?.into_iter())?;
            self.again.pop();
            return Ok(Some(head));
        }
        let Some(found) = self.queue.iter(&self.memory)?.next() else {
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
    pub(super) fn has_next(&self) -> Result<bool, Broken> {
        let available = self.queue.avail_idx(&self.memory, Ordering::Acquire)?.0;
        Ok(!self.again.is_empty() || available != self.queue.next_avail())
    }

    /// The descriptors from `head` on, though the guest's ring says no more
    /// that it is available: a ring of our own does.
    fn chain_of(&self, head: u16) -> Result<Vec<virtio_queue::desc::split::Descriptor>, Broken> {
        let ends = self.memory.iter().map(|region| region.last_addr()).max();
        let free = ends
            .and_then(|end| end.checked_add(1)?.checked_align_up(4096))
            .ok_or(Broken::Queue)?;
        let own = GuestRegionMmap::from_range(free, 4096, None)
            .map_err(|error| Broken::Inflight(error.to_string()))?;
        let memory = self
            .memory
            .insert_region(own.into())
            .map_err(|error| Broken::Inflight(error.to_string()))?;
        // No flags, the index behind the one entry, and the entry.
        memory
            .write_slice(&[0u16, 1, head].map(u16::to_le_bytes).concat(), free)
            .map_err(|error| Broken::Inflight(error.to_string()))?;
        let mut queue = Queue::new(MOST_DESCRIPTORS)?;
        queue.try_set_size(self.queue.size())?;
        queue.try_set_desc_table_address(GuestAddress(self.queue.desc_table()))?;
        queue.try_set_avail_ring_address(free)?;
        queue.set_ready(true);
        let chain = queue.iter(&memory)?.next().ok_or(Broken::Queue)?;
        Ok(chain.collect())
    }

    /// Asks the guest not to tell of more requests.
    pub(super) fn silence(&mut self) -> Result<(), Broken> {
        Ok(self.queue.disable_notification(&self.memory)?)
    }

    /// Asks the guest to tell of more requests; whether there are some already.
    pub(super) fn listen(&mut self) -> Result<bool, Broken> {
        Ok(self.queue.enable_notification(&self.memory)?)
    }

    /// Tells the guest that a request is answered.
    pub(super) fn answered(&mut self, head: u16, written: u32) -> Result<(), Broken> {
        if let Some(inflight) = &mut self.inflight {
            inflight.answering(head)?;
        }
        self.queue.add_used(&self.memory, head, written)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.answered(head, self.queue.next_used())?;
        }
        if self.queue.needs_notification(&self.memory)? {
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

    /// The guest's address of what is at `address` in the client.
    fn guest_address(&self, address: u64) -> ProtocolResult<GuestAddress> {
        self.mappings
            .iter()
            .find_map(|mapping| {
                let offset = address.checked_sub(mapping.client)?;
                (offset < mapping.bytes).then(|| GuestAddress(mapping.guest + offset))
            })
            .ok_or(ProtocolError::InvalidParam)
    }

    fn only_queue(index: u32) -> ProtocolResult<()> {
        if index == 0 {
            Ok(())
        } else {
            Err(ProtocolError::InvalidParam)
        }
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ProtocolError {
    ProtocolError::ReqHandlerError(io::Error::other(error))
}

fn wrong<T>(reason: &'static str) -> ProtocolResult<T> {
    Err(ProtocolError::InvalidOperation(reason))
}

/// Maps a piece of the guest's memory.
fn map(region: &VhostUserMemoryRegion, file: File) -> ProtocolResult<GuestRegionMmap> {
    super::has_bytes(&file, region.mmap_offset, region.memory_size)
        .map_err(ProtocolError::ReqHandlerError)?;
    let mapped: MmapRegion = region.mmap_region(file)?;
    // The guest's memory is the client's to keep; where all of ours is locked
    // it need not be.
    // SAFETY: the range is that of the mapping just made, and unlocking memory
    // changes nothing that anybody relies on.
    let unlocked = unsafe { rustix::mm::munlock(mapped.as_ptr().cast(), mapped.size()) };
    if let Err(error) = unlocked {
        tracing::debug!("vhost-user: the guest's memory stays locked: {error}");
    }
    GuestRegionMmap::new(mapped, GuestAddress(region.guest_phys_addr))
        .ok_or(ProtocolError::InvalidParam)
}

/// Whether it is an eventfd: it takes a word at any time, and the client may
/// want to wait for one.
fn is_eventfd(file: &File) -> bool {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::read_link(link).is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]")
}

/// Has nobody wait who reads or writes it.
fn never_wait(file: &File) -> ProtocolResult<()> {
    rustix::fs::fcntl_getfl(file)
        .and_then(|flags| rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::NONBLOCK))
        .map_err(|error| ProtocolError::ReqHandlerError(error.into()))
}

impl VhostUserBackendReqHandlerMut for Device {
    fn set_owner(&mut self) -> ProtocolResult<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> ProtocolResult<()> {
        self.life = Life::Stopped;
        self.enabled = false;
        self.queue.reset();
        self.again.clear();
        self.kick = Some(None);
        self.call = None;
        Ok(())
    }

    fn reset_device(&mut self) -> ProtocolResult<()> {
        self.reset_owner()
    }

    fn get_features(&mut self) -> ProtocolResult<u64> {
        Ok(features())
    }

    fn set_features(&mut self, acked: u64) -> ProtocolResult<()> {
        if acked & !features() != 0 {
            return wrong("features that were not offered");
        }
        self.acked = acked;
        self.queue
            .set_event_idx(acked & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        // Who does not negotiate can't enable.
        if acked & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            self.enabled = true;
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> ProtocolResult<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mut mapped = Vec::new();
        for (region, file) in regions.iter().zip(files) {
            mapped.push(map(region, file)?);
        }
        self.memory = GuestMemoryMmap::from_regions(mapped).map_err(failed)?;
        self.mappings = regions.iter().map(mapping).collect();
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> ProtocolResult<()> {
        Device::only_queue(index)?;
        let size = u16::try_from(num).map_err(|_| ProtocolError::InvalidParam)?;
        self.queue.try_set_size(size).map_err(failed)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> ProtocolResult<()> {
        Device::only_queue(index)?;
        let descriptor = self.guest_address(descriptor)?;
        let (used, available) = (self.guest_address(used)?, self.guest_address(available)?);
        self.queue
            .try_set_desc_table_address(descriptor)
            .and_then(|()| self.queue.try_set_used_ring_address(used))
            .and_then(|()| self.queue.try_set_avail_ring_address(available))
            .map_err(failed)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> ProtocolResult<()> {
        Device::only_queue(index)?;
        let base = u16::try_from(base).map_err(|_| ProtocolError::InvalidParam)?;
        self.queue.set_next_avail(base);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> ProtocolResult<VhostUserVringState> {
        Device::only_queue(index)?;
        self.life = Life::Stopped;
        self.queue.set_ready(false);
        self.kick = Some(None);
        self.call = None;
        let base = self
            .queue
            .next_avail()
            .wrapping_sub(self.again.len() as u16);
        self.again.clear();
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> ProtocolResult<()> {
        Device::only_queue(index.into())?;
        let Some(fd) = fd else {
            return wrong("a queue without a descriptor for kicks; this device does not poll");
        };
        never_wait(&fd)?;
        self.kick = Some(Some(fd));
        if self.life == Life::Stopped {
            self.queue.set_ready(true);
            self.life = Life::Kicked;
        }
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> ProtocolResult<()> {
        Device::only_queue(index.into())?;
        if let Some(fd) = fd.as_ref().filter(|fd| !is_eventfd(fd)) {
            never_wait(fd)?;
        }
        self.call = fd;
        // What was answered before it came must not be missed.
        if self.life == Life::Running {
            self.notify().map_err(failed)?;
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, _fd: Option<File>) -> ProtocolResult<()> {
        Device::only_queue(index.into())
    }

    fn get_protocol_features(&mut self) -> ProtocolResult<VhostUserProtocolFeatures> {
        Ok(protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> ProtocolResult<()> {
        if features & !protocol_features().bits() != 0 {
            return wrong("protocol features that were not offered");
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> ProtocolResult<u64> {
        Ok(1)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> ProtocolResult<()> {
        Device::only_queue(index)?;
        self.enabled = enable;
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> ProtocolResult<Vec<u8>> {
        // Fields of later versions read as zeros. The crate has seen to it
        // that a message has room for as many.
        let space = request::configuration(&self.geometry).into_iter();
        let wanted = space.chain(std::iter::repeat(0)).skip(offset as usize);
        Ok(wanted.take(size as usize).collect())
    }

    fn set_config(
        &mut self,
        _offset: u32,
        _bytes: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> ProtocolResult<()> {
        wrong("nothing of the configuration can be changed")
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> ProtocolResult<()> {
        wrong("this is a disk")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> ProtocolResult<File> {
        wrong("this is a disk")
    }

    fn get_inflight_fd(
        &mut self,
        wanted: &VhostUserInflight,
    ) -> ProtocolResult<(VhostUserInflight, File)> {
        let size = wanted.queue_size;
        if wanted.num_queues != 1 || size == 0 || size > MOST_DESCRIPTORS {
            return Err(ProtocolError::InvalidParam);
        }
        let file = inflight::create(size).map_err(ProtocolError::ReqHandlerError)?;
        let bytes = inflight::length(size) as u64;
        // It comes back with SET_INFLIGHT_FD.
        Ok((VhostUserInflight::new(bytes, 0, 1, size), file))
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> ProtocolResult<()> {
        let size = kept.queue_size;
        if kept.num_queues != 1 || size == 0 || size > MOST_DESCRIPTORS {
            return Err(ProtocolError::InvalidParam);
        }
        if self.life == Life::Running {
            return wrong("the queue is running");
        }
        let inflight = Inflight::open(file, kept.mmap_offset, kept.mmap_size, size)
            .map_err(ProtocolError::ReqHandlerError)?;
        self.inflight = Some(inflight);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> ProtocolResult<u64> {
        Ok(MOST_REGIONS)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> ProtocolResult<Option<VhostUserMemoryRegionBase>> {
        if self.mappings.len() as u64 >= MOST_REGIONS {
            return wrong("more regions of memory than were offered");
        }
        let mapped = map(region, file)?;
        self.memory = self.memory.insert_region(mapped.into()).map_err(failed)?;
        self.mappings.push(mapping(region));
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> ProtocolResult<()> {
        let base = GuestAddress(region.guest_phys_addr);
        let (left, _) = self
            .memory
            .remove_region(base, region.memory_size)
            .map_err(failed)?;
        self.memory = left;
        self.mappings
            .retain(|mapping| mapping.guest != region.guest_phys_addr);
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> ProtocolResult<Option<File>> {
        wrong("the device has no state to transfer")
    }

    fn check_device_state(&mut self) -> ProtocolResult<()> {
        wrong("the device has no state to transfer")
    }

    fn get_shmem_config(&mut self) -> ProtocolResult<VhostUserShMemConfig> {
        wrong("the device has no shared memory")
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> ProtocolResult<()> {
        wrong("what is written is not logged")
    }
}

fn mapping(region: &VhostUserMemoryRegion) -> Mapping {
    Mapping {
        client: region.user_addr,
        guest: region.guest_phys_addr,
        bytes: region.memory_size,
    }
}
