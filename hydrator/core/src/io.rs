// SPDX-License-Identifier: Apache-2.0

//! What the state machine is fed with, and what it asks for.

use crate::format::superblock::Damage;
use crate::part::Part;

/// Nanoseconds on a monotonic clock of the caller's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

impl Time {
    /// This moment, `nanoseconds` later.
    #[must_use]
    pub const fn after(self, nanoseconds: u64) -> Self {
        Self(self.0.saturating_add(nanoseconds))
    }

    /// Nanoseconds since `earlier`, 0 if that is not earlier.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The caller's name for a guest request in flight.
///
/// It must be unique among the requests in flight; the core hands it back and
/// reads nothing into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u32);

/// What a guest wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill the request's buffer.
    Read,
    /// Write the request's buffer.
    Write {
        /// Durable when it completes.
        fua: bool,
    },
    /// Make every write that has completed durable. Offset and length are 0.
    Flush,
    /// The content is no longer wanted; it reads as zeros afterwards.
    ///
    /// Blocks of which only a part is discarded keep their content.
    Discard,
    /// The content is to read as zeros.
    WriteZeroes {
        /// Durable when it completes.
        fua: bool,
    },
}

/// A guest request. Offset and length are multiples of the logical block size.
///
/// **The content of a write must not change until it has completed**: what
/// lands on the disk must have the checksum that was taken. A frontend whose
/// buffers the guest can still write to (vhost-user, ublk with zero copy)
/// copies the content first, unless [`Volume::passes_through`] says that no
/// checksum will be taken.
///
/// [`Volume::passes_through`]: crate::Volume::passes_through
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The caller's name for it.
    pub tag: Tag,
    /// What is wanted.
    pub operation: Operation,
    /// Where it begins on the volume, in bytes.
    pub offset: u64,
    /// How far it goes, in bytes.
    pub length: u64,
}

/// What an operation is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// The destination's logical volume. It has a volatile cache.
    Data,
    /// The logical volume with the map and the journal. So has it.
    Metadata,
    /// The volume as the source node exports it; only ever read.
    Source,
}

/// The core's name for an operation in flight; handed back on its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Io(pub(crate) u64);

impl Io {
    /// As a number to carry through a ring's user data.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Back from [`Io::to_bits`].
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// Where an operation's data are. The caller owns all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// In the buffer of a guest request, from `offset` bytes on.
    Guest {
        /// The request.
        tag: Tag,
        /// Bytes from the beginning of the request's buffer.
        offset: u32,
    },
    /// In one of [`Config::block_slots`](crate::Config) buffers of 4 KiB,
    /// from its beginning.
    Block(u16),
    /// In one of [`Config::copies`](crate::Config) buffers of
    /// [`Config::extent_size`](crate::Config::extent_size) bytes.
    Extent {
        /// Which of them.
        slot: u16,
        /// Bytes from its beginning.
        offset: u32,
    },
}

/// What the core wants done. Operations may be carried out in any order and
/// all at once: what must wait is not handed out yet, but for what a write that
/// is to be kept comes before.
///
/// Every operation with an [`Io`] is answered by one call of
/// [`Volume::completed`](crate::Volume::completed). A short read or write is
/// the caller's to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read `length` bytes at `offset`.
    Read {
        /// Its name.
        io: Io,
        /// From where.
        device: Device,
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
        /// To where.
        buffer: Buffer,
    },
    /// Write `length` bytes at `offset`.
    Write {
        /// Its name.
        io: Io,
        /// To where; never [`Device::Source`].
        device: Device,
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
        /// From where.
        buffer: Buffer,
        /// Durable when it completes.
        fua: bool,
        /// The end of the process must not take it: the caller keeps its
        /// content where it outlives the process, from before it turns to the
        /// next action until the write has ended well. Who opens the volume
        /// anew carries out what was kept before it does so.
        kept: bool,
    },
    /// Make `length` bytes at `offset` read as zeros, by whatever the device
    /// does best: discard where that gives zeros, write zeroes, or zeros
    /// written. A disk may keep or lose it like a write until it is flushed.
    Zero {
        /// Its name.
        io: Io,
        /// To where; never [`Device::Source`].
        device: Device,
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u64,
        /// Durable when it completes; flush afterwards if need be.
        fua: bool,
    },
    /// Make every write durable that has completed.
    Flush {
        /// Its name.
        io: Io,
        /// Never [`Device::Source`].
        device: Device,
    },
    /// Answer the guest; the tag is free again.
    Complete {
        /// The request.
        tag: Tag,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Something the caller wants to know.
    Notice(Notice),
}

/// Why an operation or a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The device said so.
    #[error("input/output error")]
    Io,
    /// The destination has no space left.
    #[error("no space left on the destination")]
    NoSpace,
    /// The source cannot be asked: it may come back.
    #[error("the source does not answer")]
    Unreachable,
    /// The source answers that these sectors cannot be read.
    #[error("the source cannot read these sectors")]
    BadSector,
    /// Outside of the volume, not aligned, or too many requests.
    #[error("the request is outside of the volume or not aligned")]
    Invalid,
    /// The volume is not open, or being closed.
    #[error("the volume is not open")]
    NotOpen,
}

/// Something the caller wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The volume is open: requests are served from now on.
    Open,
    /// The volume could not be opened; nothing will come of it.
    OpenFailed(OpenError),
    /// The source does not answer; what needs it waits.
    Stalled,
    /// It answers again.
    Resumed,
    /// A block of the source cannot be read. Reported once for each.
    BadSource {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
    },
    /// The destination cannot read a block, and it is not known whether the
    /// guest's content or that of the source counts there. Reads of it fail until
    /// all of it is written or discarded.
    UnreadableData {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
    },
    /// What was copied there reads differently on the destination and on the
    /// source. The first time it is copied again; if that does not help, it
    /// stays remote and the move does not end.
    Differs {
        /// The first block that differs, in bytes.
        offset: u64,
        /// How much of the extent differs, in bytes; perhaps not in one piece.
        length: u32,
        /// It had been copied again.
        again: bool,
    },
    /// [`Volume::start`](crate::Volume::start) is durable.
    Started,
    /// Everything is local, on the destination and in its bitmap for good:
    /// the table can be swapped.
    Done,
    /// Everything in flight has ended and all is recorded: the process can go.
    Closed,
    /// The destination or the metadata failed a write of the core's own or a
    /// flush: nothing is settled any more, writes to what is not settled fail.
    /// What is on the disks is recovered by opening the volume anew.
    Broken(Device),
}

/// Why a volume could not be opened. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// A device failed.
    #[error("{0:?} failed while the volume was opened: {1}")]
    Device(Device, Failure),
    /// Neither superblock can be understood.
    #[error("no superblock on the metadata device: {0}")]
    Superblock(Damage),
    /// The metadata are damaged where they say what is local. To go on would
    /// turn what the guest has flushed into what the source holds.
    #[error(
        "{count} parts of the metadata are damaged, the first is {first}, and with them is lost \
         which blocks the guest has written: \"localstor-hydrator check\" tells what is at \
         stake, and how to go on without it"
    )]
    Lost {
        /// The first of them.
        first: Part,
        /// How many there are.
        count: u64,
    },
    /// The metadata belong to another move.
    #[error("the metadata belong to another move")]
    ForeignMove {
        /// The move they belong to.
        found: [u8; 16],
    },
    /// What was asked for is not what is on the disk.
    #[error("{what} is {found} on the metadata device, {wanted} was asked for")]
    Mismatch {
        /// The name of the figure.
        what: &'static str,
        /// As on disk.
        found: u64,
        /// As asked for.
        wanted: u64,
    },
    /// The metadata device is too small.
    #[error("the metadata need {needed} bytes, the device has {found}")]
    TooSmall {
        /// In bytes.
        needed: u64,
        /// In bytes.
        found: u64,
    },
    /// A size or a number of buffers that cannot work.
    #[error("{0}")]
    Config(&'static str),
}

/// The caller's memory, as far as the core looks into it.
///
/// Slots are the core's from the [`Action`] that names them to its completion;
/// a slot that no action names is the core's too.
pub trait Memory {
    /// A buffer of 4 KiB.
    fn block(&self, slot: u16) -> &[u8];

    /// The same, to compose metadata in.
    fn block_mut(&mut self, slot: u16) -> &mut [u8];

    /// A buffer of [`Config::extent_size`](crate::Config::extent_size) bytes.
    fn extent(&self, slot: u16) -> &[u8];

    /// The same, to compose metadata in.
    fn extent_mut(&mut self, slot: u16) -> &mut [u8];

    /// CRC-32C of a piece of a write's content, continued from `crc` as
    /// [`crc32c::crc32c_append`] does it.
    fn guest_crc32c(&self, tag: Tag, offset: u32, length: u32, crc: u32) -> u32;

    /// Copy a piece of a write's content into a block slot, from byte `at` on.
    fn guest_to_block(&mut self, tag: Tag, offset: u32, length: u32, slot: u16, at: usize);

    /// Fill a piece of a read's buffer with zeros.
    fn zero_guest(&mut self, tag: Tag, offset: u32, length: u32);
}
