// SPDX-License-Identifier: Apache-2.0
//! What a client says about its guest: memory, queues, descriptors of events.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

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
use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::inflight::{self, Inflight};
use super::queue::{MOST_DESCRIPTORS, RequestQueue};
use super::request::{self, MOST_QUEUES};
use crate::block::Geometry;

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

/// The device, as one client has set it up.
pub(super) struct Device {
    geometry: Geometry,
    acked: u64,
    mappings: Vec<Mapping>,
    memory: GuestMemoryMmap,
    queues: Vec<RequestQueue>,
    // The client has set up none of the queues from here on.
    given: usize,
}

impl Device {
    pub(super) fn new(geometry: Geometry) -> Result<Device, virtio_queue::Error> {
        Ok(Device {
            geometry,
            acked: 0,
            mappings: Vec::new(),
            memory: GuestMemoryMmap::new(),
            queues: (0..MOST_QUEUES)
                .map(|_| RequestQueue::new())
                .collect::<Result<_, _>>()?,
            given: 0,
        })
    }

    /// With one queue of `size` that waits to be started: its table, available
    /// ring and used ring are at these addresses.
    #[cfg(fuzzing)]
    pub(super) fn over(
        memory: GuestMemoryMmap,
        geometry: Geometry,
        size: u16,
        addresses: [GuestAddress; 3],
        inflight: Option<&[u8]>,
    ) -> Device {
        let mut device = Device::new(geometry).expect("queues");
        device.memory = memory;
        let queue = &mut device.queues[0];
        queue.ring.try_set_size(size).expect("a size");
        let [table, available, used] = addresses;
        queue
            .ring
            .try_set_desc_table_address(table)
            .expect("a table");
        queue
            .ring
            .try_set_avail_ring_address(available)
            .expect("a ring");
        queue.ring.try_set_used_ring_address(used).expect("a ring");
        queue.set_kick(None);
        queue.enabled = true;
        queue.inflight = inflight.map(|bytes| Inflight::over(bytes, size));
        device.given = 1;
        device
    }

    pub(super) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// How many queues there may be requests in.
    pub(super) fn given(&self) -> usize {
        self.given
    }

    /// A queue, with the memory that its guest has.
    pub(super) fn queue(&mut self, index: usize) -> (&mut RequestQueue, &GuestMemoryMmap) {
        (&mut self.queues[index], &self.memory)
    }

    /// Whether a write must be durable because the guest never flushes.
    pub(super) fn writes_through(&self) -> bool {
        self.acked & 1 << VIRTIO_BLK_F_FLUSH == 0
    }

    /// A new descriptor for a queue's kicks, or that it has none any more.
    pub(super) fn take_kick(&mut self) -> Option<(usize, Option<File>)> {
        let mut queues = self.queues.iter_mut().enumerate();
        queues.find_map(|(index, queue)| Some((index, queue.take_kick()?)))
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

    /// The queue that a client names.
    fn named(&mut self, index: u32) -> ProtocolResult<&mut RequestQueue> {
        let queue = self.queues.get_mut(index as usize);
        queue.ok_or(ProtocolError::InvalidParam)
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
        self.queues.iter_mut().for_each(RequestQueue::reset);
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
        for queue in &mut self.queues {
            queue
                .ring
                .set_event_idx(acked & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
            // Who does not negotiate can't enable.
            queue.enabled |= acked & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0;
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
        let size = u16::try_from(num).map_err(|_| ProtocolError::InvalidParam)?;
        self.named(index)?.ring.try_set_size(size).map_err(failed)
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
        let descriptor = self.guest_address(descriptor)?;
        let (used, available) = (self.guest_address(used)?, self.guest_address(available)?);
        let ring = &mut self.named(index)?.ring;
        ring.try_set_desc_table_address(descriptor)
            .and_then(|()| ring.try_set_used_ring_address(used))
            .and_then(|()| ring.try_set_avail_ring_address(available))
            .map_err(failed)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> ProtocolResult<()> {
        let base = u16::try_from(base).map_err(|_| ProtocolError::InvalidParam)?;
        self.named(index)?.ring.set_next_avail(base);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> ProtocolResult<VhostUserVringState> {
        let base = self.named(index)?.stop();
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> ProtocolResult<()> {
        let queue = self.named(index.into())?;
        let Some(fd) = fd else {
            return wrong("a queue without a descriptor for kicks; this device does not poll");
        };
        never_wait(&fd)?;
        queue.set_kick(Some(fd));
        self.given = self.given.max(usize::from(index) + 1);
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> ProtocolResult<()> {
        let queue = self.named(index.into())?;
        if let Some(fd) = fd.as_ref().filter(|fd| !is_eventfd(fd)) {
            never_wait(fd)?;
        }
        queue.set_call(fd).map_err(failed)
    }

    fn set_vring_err(&mut self, index: u8, _fd: Option<File>) -> ProtocolResult<()> {
        self.named(index.into()).map(drop)
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
        Ok(MOST_QUEUES.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> ProtocolResult<()> {
        self.named(index)?.enabled = enable;
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
        let (count, size) = kept_for(wanted)?;
        let file = inflight::create(count, size).map_err(ProtocolError::ReqHandlerError)?;
        let bytes = inflight::length(count, size) as u64;
        // It comes back with SET_INFLIGHT_FD.
        Ok((VhostUserInflight::new(bytes, 0, count, size), file))
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> ProtocolResult<()> {
        let (count, size) = kept_for(kept)?;
        if self.queues.iter().any(RequestQueue::is_looked_at) {
            return wrong("a queue is running");
        }
        let all = Inflight::open(file, kept.mmap_offset, kept.mmap_size, count, size)
            .map_err(ProtocolError::ReqHandlerError)?;
        let mut all = all.into_iter();
        for queue in &mut self.queues {
            queue.inflight = all.next();
        }
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

/// Of how many queues a client keeps what is in flight, and of how many
/// descriptors each.
fn kept_for(inflight: &VhostUserInflight) -> ProtocolResult<(u16, u16)> {
    let (count, size) = (inflight.num_queues, inflight.queue_size);
    let makes_sense = (1..=MOST_QUEUES).contains(&count) && (1..=MOST_DESCRIPTORS).contains(&size);
    makes_sense
        .then_some((count, size))
        .ok_or(ProtocolError::InvalidParam)
}

fn mapping(region: &VhostUserMemoryRegion) -> Mapping {
    Mapping {
        client: region.user_addr,
        guest: region.guest_phys_addr,
        bytes: region.memory_size,
    }
}
