// SPDX-License-Identifier: Apache-2.0
//! One connection of a node's kernel: a vhost-user-blk device.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{io, process};

use thiserror::Error;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Backend, Listener};
use vhost_user_backend::{VhostUserBackend, VhostUserDaemon, VringRwLock, VringT};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use virtio_queue::{DescriptorChain, QueueOwnedT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryLoadGuard, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

use crate::cache::Moment;
use crate::dialect;
use crate::disk::{Disk, Plug};
use crate::request::{self, QUEUE_SIZE, Unanswered};

// VHOST_USER_F_PROTOCOL_FEATURES (QEMU, docs/interop/vhost-user.rst)
const PROTOCOL_FEATURES_BIT: u32 = 30;

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;
type Chain = DescriptorChain<GuestMemoryLoadGuard<GuestMemoryMmap>>;

/// Why no session can be held.
#[derive(Debug, Error)]
pub enum Error {
    /// A socket fails.
    #[error("no node can connect: {0}")]
    Socket(#[from] io::Error),
    /// The device can't be made.
    #[error("no node can connect: {0}")]
    Device(vhost_user_backend::Error),
}

/// Wait for a node to connect, and serve it until it is gone.
pub fn serve(disk: &Arc<Disk>, id: &str, nodes: &UnixListener) -> Result<(), Error> {
    let (kernel, _address) = nodes.accept()?;
    tracing::info!("a node is connected");
    let device = Arc::new(Device {
        id: id.to_owned(),
        plug: disk.plug_in(),
        memory: Mutex::new(None),
        channel: Mutex::new(None),
    });
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
    let mut daemon =
        VhostUserDaemon::new("vhost-user".to_owned(), device, memory).map_err(Error::Device)?;
    // The daemon takes its connection from a listener and from nowhere else.
    let name = format!("localstor-lab-disk-{}", process::id());
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&address)?;
    dialect::translate(kernel, UnixStream::connect_addr(&address)?)?;
    daemon
        .start(&mut Listener::from(listener))
        .map_err(Error::Device)?;
    if let Err(error) = daemon.wait() {
        tracing::debug!("the connection ended: {error}");
    }
    tracing::info!("the node is gone");
    Ok(())
}

struct Device {
    id: String,
    plug: Plug,
    memory: Mutex<Option<Memory>>,
    // Nothing is said on it, but the kernel wants it open.
    channel: Mutex<Option<Backend>>,
}

impl Device {
    /// Carry out what is in the queue, until it is empty or the power fails.
    fn serve_queue(&self, vring: &VringRwLock) -> Result<(), Unanswered> {
        loop {
            let submitted = self.plug.now().map_err(|_| Unanswered::NoPower)?;
            let chains = self.waiting(vring);
            if chains.is_empty() {
                return Ok(());
            }
            for chain in chains {
                let head = chain.head_index();
                let written = self.answer(submitted, chain)?;
                if let Err(error) = vring.add_used(head, written) {
                    tracing::warn!("a completion is lost: {error}");
                }
                if let Err(error) = vring.signal_used_queue() {
                    tracing::warn!("the node can't be told of a completion: {error}");
                }
            }
        }
    }

    fn waiting(&self, vring: &VringRwLock) -> Vec<Chain> {
        let memory = lock(&self.memory);
        let Some(memory) = memory.as_ref().map(GuestAddressSpace::memory) else {
            return Vec::new();
        };
        match vring.get_mut().get_queue_mut().iter(memory) {
            Ok(chains) => chains.collect(),
            Err(error) => {
                tracing::warn!("the queue can't be read: {error}");
                Vec::new()
            }
        }
    }

    fn answer(&self, submitted: Moment, chain: Chain) -> Result<u32, Unanswered> {
        let memory = chain.memory().clone();
        let ends = chain
            .clone()
            .reader(&memory)
            .and_then(|reader| Ok((reader, chain.writer(&memory)?)));
        let answered = match ends {
            Ok((reader, writer)) => {
                request::carry_out(&self.plug, &self.id, submitted, reader, writer)
            }
            Err(error) => Err(Unanswered::NoRoom(error.to_string())),
        };
        match answered {
            Err(Unanswered::NoRoom(reason)) => {
                tracing::warn!("a request is passed over: {reason}");
                Ok(0)
            }
            other => other,
        }
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        1
    }

    fn max_queue_size(&self) -> usize {
        usize::from(QUEUE_SIZE)
    }

    fn features(&self) -> u64 {
        request::FEATURES
            | 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << PROTOCOL_FEATURES_BIT
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        // Without a channel for a device's own requests User Mode Linux has
        // no interrupt for the queue either (`vu_setup_vq_call_fd` in
        // `virtio_uml.c`, Linux 6.1).
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        // What lies behind the configuration reads as zeros: kernels ask for
        // fields that came with later versions.
        let mut space = request::configuration(self.plug.capacity(), self.plug.block()).into_iter();
        let wanted = space
            .by_ref()
            .skip(offset as usize)
            .chain(std::iter::repeat(0));
        wanted.take(size as usize).collect()
    }

    fn set_backend_req_fd(&self, channel: Backend) {
        *lock(&self.channel) = Some(channel);
    }

    fn update_memory(&self, memory: Memory) -> io::Result<()> {
        *lock(&self.memory) = Some(memory);
        Ok(())
    }

    fn exit_event(&self, _thread_index: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::CLOEXEC | EventFlag::NONBLOCK).ok()
    }

    fn handle_event(
        &self,
        _device_event: u16,
        _events: EventSet,
        vrings: &[VringRwLock],
        _thread_id: usize,
    ) -> io::Result<()> {
        for vring in vrings {
            if let Err(reason) = self.serve_queue(vring) {
                tracing::debug!("requests are not answered: {reason}");
            }
        }
        Ok(())
    }
}

/// What is locked is replaced as a whole, so a panic can't leave half of it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
