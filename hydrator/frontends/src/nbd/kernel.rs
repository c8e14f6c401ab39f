// SPDX-License-Identifier: Apache-2.0
//! The kernel's NBD client, set up through generic netlink
//! (linux/nbd-netlink.h) and sysfs.
//!
//! A request that was in flight when its connection broke is sent again when
//! its timer runs out and there is a new connection. With `NBD_ATTR_TIMEOUT` 0
//! the timer does nothing else: a request that is merely slow, because it waits
//! for the source, breaks no connection. How often the timer runs is the
//! queue's `io_timeout` and about a second more (`blk_round_jiffies`), so that
//! decides how long a guest waits after a restart of ours.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use neli::consts::nl::NlmF;
use neli::consts::socket::NlFamily;
use neli::genl::{AttrTypeBuilder, Genlmsghdr, GenlmsghdrBuilder, Nlattr, NlattrBuilder};
use neli::neli_enum;
use neli::nl::NlPayload;
use neli::router::synchronous::NlRouter;
use neli::types::{Buffer, GenlBuffer};
use neli::utils::Groups;
use tracing::{debug, error, warn};

use super::protocol::EXPORT_FLAGS;
use crate::block::{FrontendError, Geometry, numbers};

/// How long requests wait for a successor after our death, in seconds: longer
/// than anybody can want to wait.
const PATIENCE: u64 = 7 * 24 * 3600;

/// When the timer of a request runs, in milliseconds; the kernel adds about a
/// second. The less, the sooner requests go on after a restart of ours, but the
/// kernel logs each request that has taken longer when the timer runs.
const TIMER: u32 = 100;

/// The stack of a thread that writes two files, in bytes: it is locked memory.
const STACK: usize = 128 << 10;

/// Where the kernel shows block devices.
pub(super) const BLOCK: &str = "/sys/block";

/// Commands of linux/nbd-netlink.h.
#[neli_enum(serialized_type = "u8")]
enum NbdCommand {
    Unspec = 0,
    Connect = 1,
    Disconnect = 2,
    Reconfigure = 3,
}
impl neli::consts::genl::Cmd for NbdCommand {}

/// Attributes of linux/nbd-netlink.h.
#[neli_enum(serialized_type = "u16")]
enum NbdAttribute {
    Unspec = 0,
    Index = 1,
    SizeBytes = 2,
    BlockSizeBytes = 3,
    Timeout = 4,
    ServerFlags = 5,
    ClientFlags = 6,
    Sockets = 7,
    DeadConnTimeout = 8,
    DeviceList = 9,
    BackendIdentifier = 10,
}
impl neli::consts::genl::NlAttrType for NbdAttribute {}

type Attribute = Nlattr<NbdAttribute, Buffer>;

/// Both `NBD_SOCK_ITEM` and `NBD_SOCK_FD`.
const SOCKET_ITEM: u16 = 1;

fn attribute(kind: NbdAttribute, value: impl neli::Size + neli::ToBytes) -> io::Result<Attribute> {
    let kind = AttrTypeBuilder::default()
        .nla_type(kind)
        .build()
        .map_err(io::Error::other)?;
    NlattrBuilder::default()
        .nla_type(kind)
        .nla_payload(value)
        .build()
        .map_err(io::Error::other)
}

/// A list of one socket.
fn socket_attribute(socket: &OwnedFd) -> io::Result<Attribute> {
    let nested = |payload: Buffer| {
        let kind = AttrTypeBuilder::default()
            .nla_type(SOCKET_ITEM)
            .build()
            .map_err(io::Error::other)?;
        NlattrBuilder::default()
            .nla_type(kind)
            .nla_payload(payload)
            .build()
            .map_err(io::Error::other)
    };
    let bytes = |attribute: &Nlattr<u16, Buffer>| {
        let mut bytes = io::Cursor::new(Vec::new());
        neli::ToBytes::to_bytes(attribute, &mut bytes).map_err(io::Error::other)?;
        io::Result::Ok(Buffer::from(bytes.into_inner()))
    };
    let descriptor = (socket.as_raw_fd() as u32).to_ne_bytes();
    let item = nested(bytes(&nested(Buffer::from(descriptor.to_vec()))?)?)?;
    attribute(NbdAttribute::Sockets, bytes(&item)?)
}

fn identity_attribute(identity: &str) -> io::Result<Attribute> {
    attribute(NbdAttribute::BackendIdentifier, identity)
}

/// Sends a command.
fn send(command: NbdCommand, attributes: Vec<Attribute>) -> io::Result<()> {
    let (router, _) =
        NlRouter::connect(NlFamily::Generic, None, Groups::empty()).map_err(io::Error::other)?;
    let family = router
        .resolve_genl_family("nbd")
        .map_err(|_| io::Error::from(io::ErrorKind::NotFound))?;
    let message = GenlmsghdrBuilder::default()
        .cmd(command)
        .version(1)
        .attrs(attributes.into_iter().collect::<GenlBuffer<_, _>>())
        .build()
        .map_err(io::Error::other)?;
    let answers = router
        .send::<_, _, u16, Genlmsghdr<NbdCommand, NbdAttribute>>(
            family,
            NlmF::ACK,
            NlPayload::Payload(message),
        )
        .map_err(io::Error::other)?;
    for answer in answers {
        answer.map_err(|error| match error {
            neli::err::RouterError::Nlmsgerr(refusal) => {
                io::Error::from_raw_os_error(-refusal.error())
            }
            other => io::Error::other(other),
        })?;
    }
    Ok(())
}

fn failed(what: impl Into<String>, error: io::Error) -> FrontendError {
    if error.kind() == io::ErrorKind::NotFound {
        return FrontendError::Missing(
            "the kernel has no NBD client: load the module nbd".to_owned(),
        );
    }
    FrontendError::kernel(what, error)
}

/// How many devices more than there are may be made, if others are faster.
const MORE: u32 = 64;

/// The numbers of devices that nobody uses: those that are there, and then
/// some that the kernel makes when they are asked for.
pub(super) fn free() -> Vec<u32> {
    let mut there = numbers(Path::new(BLOCK), "nbd");
    let next = there.last().map_or(0, |last| last + 1);
    there.retain(|number| backend(Path::new(BLOCK), *number).is_none());
    there.extend(next..next + MORE);
    there
}

/// The devices of the volume of this identity. The call that connects a device
/// sets it, so that a process that is killed in that call has set it, too.
pub(super) fn of(block: &Path, identity: &str) -> Vec<u32> {
    let mut numbers = numbers(block, "nbd");
    numbers.retain(|number| backend(block, *number).is_some_and(|found| found == identity));
    numbers
}

/// The identity of a device that is in use, below a directory like [`BLOCK`];
/// None if it is not in use.
fn backend(block: &Path, number: u32) -> Option<String> {
    let device = block.join(format!("nbd{number}"));
    // There is this file as long as the device is in use.
    device.join("pid").exists().then(|| {
        let identity = std::fs::read_to_string(device.join("backend")).unwrap_or_default();
        identity.trim_end().to_owned()
    })
}

/// Makes a device: /dev/nbd`number`.
///
/// # Errors
/// That it is in use for something else; what else the kernel says; that it has
/// no NBD.
pub(super) fn connect(
    number: u32,
    identity: &str,
    geometry: &Geometry,
    socket: &OwnedFd,
) -> Result<(), FrontendError> {
    let attempt = || -> io::Result<()> {
        let attributes = vec![
            attribute(NbdAttribute::Index, number)?,
            attribute(NbdAttribute::SizeBytes, geometry.size)?,
            attribute(
                NbdAttribute::BlockSizeBytes,
                u64::from(geometry.logical_block),
            )?,
            attribute(NbdAttribute::Timeout, 0u64)?,
            attribute(NbdAttribute::ServerFlags, u64::from(EXPORT_FLAGS))?,
            attribute(NbdAttribute::DeadConnTimeout, PATIENCE)?,
            identity_attribute(identity)?,
            socket_attribute(socket)?,
        ];
        send(NbdCommand::Connect, attributes)
    };
    attempt().map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST) => taken(number),
        _ => failed(format!("cannot make /dev/nbd{number}"), error),
    })
}

/// Sets up the queue of a device that is being served, in a thread of its own:
/// it may wait for requests in flight (`blk_mq_freeze_queue` in Linux since
/// 6.11), and those wait for the server. udev's first reads are such requests.
/// After a predecessor there is nothing to do: new requests would have to wait
/// until the timers of those that were in flight have run out.
///
/// The device must not be used for long requests before what is returned is
/// true. It never is if the kernel refuses.
///
/// # Errors
/// That there can be no thread.
pub(super) fn set_up(number: u32, longest: u32) -> Result<Arc<AtomicBool>, FrontendError> {
    let settings = [("max_sectors_kb", longest >> 10), ("io_timeout", TIMER)];
    let queue = PathBuf::from(format!("{BLOCK}/nbd{number}/queue"));
    let is_set = |&(name, value): &(&str, u32)| has(&queue.join(name), value);
    let done = Arc::new(AtomicBool::new(settings.iter().all(is_set)));
    if done.load(Ordering::Relaxed) {
        return Ok(done);
    }
    let told = Arc::clone(&done);
    thread::Builder::new()
        .stack_size(STACK)
        .spawn(move || {
            let set = |(name, value)| set_queue(&queue.join(name), value);
            match settings.into_iter().try_for_each(set) {
                Ok(()) => told.store(true, Ordering::Release),
                Err(reason) => error!("/dev/nbd{number} can't be used: {reason}"),
            }
        })
        .map_err(|error| FrontendError::kernel("cannot start a thread", error))?;
    Ok(done)
}

/// Gives a device that has lost its connection another one.
///
/// # Errors
/// What the kernel says.
pub(super) fn reconnect(
    number: u32,
    identity: &str,
    socket: &OwnedFd,
) -> Result<(), FrontendError> {
    let attempt = || -> io::Result<()> {
        send(
            NbdCommand::Reconfigure,
            vec![
                attribute(NbdAttribute::Index, number)?,
                identity_attribute(identity)?,
                socket_attribute(socket)?,
            ],
        )?;
        Ok(())
    };
    attempt().map_err(|error| failed(format!("cannot reconnect /dev/nbd{number}"), error))?;
    debug!("/dev/nbd{number} has a new connection");
    Ok(())
}

/// Ends a device.
///
/// # Errors
/// What the kernel says.
pub(super) fn disconnect(number: u32) -> Result<(), FrontendError> {
    let attempt = || -> io::Result<()> {
        let index = attribute(NbdAttribute::Index, number)?;
        send(NbdCommand::Disconnect, vec![index])?;
        Ok(())
    };
    attempt().map_err(|error| failed(format!("cannot disconnect /dev/nbd{number}"), error))
}

/// Whether the device is in use for the volume of this identity.
///
/// # Errors
/// That it is in use for something else.
pub(super) fn belongs_to(number: u32, identity: &str) -> Result<bool, FrontendError> {
    match backend(Path::new(BLOCK), number) {
        None => Ok(false),
        Some(found) if found == identity => Ok(true),
        Some(_) => Err(taken(number)),
    }
}

/// That a device is in use for something else.
pub(super) fn taken(number: u32) -> FrontendError {
    FrontendError::Foreign(format!(
        "/dev/nbd{number} belongs to something else; choose another number, or none"
    ))
}

/// Whether a file of sysfs has this value.
fn has(path: &Path, value: u32) -> bool {
    std::fs::read_to_string(path).is_ok_and(|text| text.trim_end().parse() == Ok(value))
}

fn set_queue(path: &Path, value: u32) -> Result<(), FrontendError> {
    if has(path, value) {
        return Ok(());
    }
    let shown = path.display();
    match std::fs::write(path, value.to_string()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            warn!("{shown} is missing: the device works, but waits longer after a restart");
            Ok(())
        }
        Err(error) => Err(FrontendError::kernel(format!("cannot set {shown}"), error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory of block devices, with the files of each.
    fn sysfs(devices: &[(&str, &[(&str, &str)])]) -> tempfile::TempDir {
        let block = tempfile::tempdir().unwrap();
        for (device, files) in devices {
            let directory = block.path().join(device);
            std::fs::create_dir(&directory).unwrap();
            for (name, content) in *files {
                std::fs::write(directory.join(name), content).unwrap();
            }
        }
        block
    }

    #[test]
    fn what_is_set_is_left_alone() {
        let block = sysfs(&[(
            "queue",
            &[("io_timeout", "100\n"), ("max_sectors_kb", "1280\n")],
        )]);
        let file = |name| block.path().join("queue").join(name);
        let read = |name| std::fs::read_to_string(file(name)).unwrap();
        assert!(has(&file("io_timeout"), 100));
        assert!(!has(&file("max_sectors_kb"), 1024));
        for (name, value) in [("io_timeout", 100), ("max_sectors_kb", 1024)] {
            set_queue(&file(name), value).unwrap();
        }
        // A write would have replaced the line.
        assert_eq!(read("io_timeout"), "100\n");
        assert_eq!(read("max_sectors_kb"), "1024");
        set_queue(&file("no_such_setting"), 1).unwrap();
    }

    #[test]
    fn a_device_is_found_by_the_identity_that_the_kernel_keeps() {
        let block = sysfs(&[
            ("sda", &[]),
            ("nbd0", &[]),
            ("nbd1", &[("pid", "7\n"), ("backend", "localstor-b\n")]),
            ("nbd10", &[("pid", "7\n"), ("backend", "localstor-a\n")]),
            ("nbd2", &[("pid", "7\n"), ("backend", "localstor-a\n")]),
            // By another program, and by one that has let go of it.
            ("nbd3", &[("pid", "7\n")]),
            ("nbd4", &[("backend", "localstor-a\n")]),
        ]);
        assert_eq!(of(block.path(), "localstor-a"), [2, 10]);
        assert_eq!(of(block.path(), "localstor-b"), [1]);
        assert!(of(block.path(), "localstor-c").is_empty());
        assert!(of(Path::new("/nowhere"), "localstor-a").is_empty());
    }
}
