// SPDX-License-Identifier: Apache-2.0
//! What frontends and the engine say to each other.

use std::io;
use std::path::Path;

use localstor_hydrator_core::{Failure, Request, Tag};
use localstor_hydrator_disks::{Event, Memory, MemoryError, Ring, Span};

/// A request that has come from the guest.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Inside the device and aligned to its logical blocks.
    pub request: Request,
    /// The data of a read or a write: as long as the request, and the engine's
    /// alone until it answers. The guest can't change it in flight, so a
    /// checksum of it stays true.
    pub span: Option<Span>,
}

/// The result of a request.
pub type Outcome = Result<(), Failure>;

/// The device as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes, a multiple of the logical block.
    pub size: u64,
    /// The smallest unit the guest may read or write, in bytes: 512 or 4096.
    pub logical_block: u32,
}

impl Geometry {
    /// Whether `length` bytes at `offset` are inside and aligned, and some.
    pub(crate) fn holds(&self, offset: u64, length: u64) -> bool {
        let block = u64::from(self.logical_block);
        length > 0
            && offset % block == 0
            && length % block == 0
            && offset
                .checked_add(length)
                .is_some_and(|end| end <= self.size)
    }
}

/// Where a frontend is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Being made, or taken over from a predecessor.
    Starting,
    /// The guest can use it.
    Ready,
    /// Being removed.
    Stopping,
    /// No more; nothing of it is left in the kernel.
    Gone,
}

/// What a frontend can't go on after.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// A call to the kernel failed.
    #[error("{what}: {cause}")]
    Kernel {
        /// What was tried, and on which object.
        what: String,
        /// What the kernel said.
        cause: io::Error,
    },
    /// The kernel has no such frontend.
    #[error("{0}")]
    Missing(String),
    /// The device belongs to something else.
    #[error("{0}")]
    Foreign(String),
    /// No memory for I/O.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl FrontendError {
    pub(crate) fn kernel(what: impl Into<String>, cause: impl Into<io::Error>) -> Self {
        FrontendError::Kernel {
            what: what.into(),
            cause: cause.into(),
        }
    }
}

/// The numbers N of the devices `prefix`N that a directory of sysfs shows, in
/// ascending order.
pub(crate) fn numbers(directory: &Path, prefix: &str) -> Vec<u32> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix(prefix)?.parse().ok()
        })
        .collect();
    numbers.sort_unstable();
    numbers
}

/// Takes memory for buffers of several classes: how many, and of what size, in
/// bytes. None if there is too little.
pub(crate) fn buffers<const CLASSES: usize>(
    classes: [(usize, usize); CLASSES],
    memory: &mut Memory,
) -> Option<[Vec<Span>; CLASSES]> {
    let mut buffers = classes.map(|(count, _)| Vec::with_capacity(count));
    for (class, (count, size)) in classes.into_iter().enumerate() {
        for _ in 0..count {
            buffers[class].push(memory.take(size)?);
        }
    }
    Some(buffers)
}

/// A way to show a block device to the guest.
pub trait Frontend {
    /// Takes one completion of the ring that belongs to the frontend, and
    /// appends the requests that came with it to `arrivals`.
    ///
    /// # Errors
    /// What the device can't go on after.
    fn on_event(
        &mut self,
        ring: &mut Ring,
        event: Event,
        arrivals: &mut Vec<Arrival>,
    ) -> Result<(), FrontendError>;

    /// Answers a request, and appends to `arrivals` what waited for that.
    fn complete(
        &mut self,
        ring: &mut Ring,
        tag: Tag,
        outcome: Outcome,
        arrivals: &mut Vec<Arrival>,
    );

    /// Begins to remove the device; the guest must have let go of it.
    ///
    /// # Errors
    /// Why it can't be removed.
    fn stop(&mut self, ring: &mut Ring) -> Result<(), FrontendError>;

    /// Where it is in its life.
    fn stage(&self) -> Stage;

    /// The device node or socket at which the guest finds it.
    fn device(&self) -> &Path;
}
