// SPDX-License-Identifier: Apache-2.0
//! Translates the dialect of vhost-user that User Mode Linux speaks.
//!
//! Its SET_MEM_TABLE always has room for two memory regions, be it that it
//! tells of one only (`vhost_user_set_mem_table` in `virtio_uml.c`, Linux
//! 6.1). The crate `vhost` refuses a message that is longer than what it
//! tells of, so what is too much is cut off on the way. Messages are those of
//! QEMU's `docs/interop/vhost-user.rst`.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

const SET_MEM_TABLE: u32 = 5;
// Bytes: request, flags and size, 32 bits each.
const HEADER: usize = 12;
// Bytes: the number of regions and padding, 32 bits each.
const TABLE_HEADER: usize = 8;
const REGION: usize = 32;
// Bytes. The largest message of the protocol has a page of configuration.
const MAX_PAYLOAD: usize = 8192;
// A message carries one descriptor for each of up to eight memory regions.
const MAX_DESCRIPTORS: usize = 8;

/// Carry messages both ways between a node's kernel and a device, until one
/// of them is gone.
pub fn translate(kernel: UnixStream, device: UnixStream) -> io::Result<()> {
    let (answers, to_kernel) = (device.try_clone()?, kernel.try_clone()?);
    thread::spawn(move || {
        // Answers need no translation and carry no descriptors.
        let _ = io::copy(&mut &answers, &mut &to_kernel);
        let _ = to_kernel.shutdown(Shutdown::Both);
    });
    thread::spawn(move || {
        if let Err(error) = carry_requests(&kernel, &device) {
            tracing::debug!("the kernel's messages end: {error}");
        }
        for end in [&kernel, &device] {
            let _ = end.shutdown(Shutdown::Both);
        }
    });
    Ok(())
}

fn carry_requests(kernel: &UnixStream, device: &UnixStream) -> io::Result<()> {
    loop {
        let mut header = [0; HEADER];
        let descriptors = receive(kernel, &mut header)?;
        let size = word(&header, 8) as usize;
        if size > MAX_PAYLOAD {
            let reason = format!("a message of {size} bytes is none of vhost-user");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        let mut payload = vec![0; size];
        (&mut &*kernel).read_exact(&mut payload)?;
        if word(&header, 0) == SET_MEM_TABLE {
            cut_table(&mut payload);
            header[8..].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        }
        send(device, &[&header[..], &payload].concat(), &descriptors)?;
    }
}

/// Leave in a table of memory regions what it says it has.
fn cut_table(payload: &mut Vec<u8>) {
    if payload.len() >= TABLE_HEADER {
        let regions = word(payload, 0) as usize;
        payload.truncate(TABLE_HEADER.saturating_add(regions.saturating_mul(REGION)));
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Fill a buffer; the descriptors that came with it.
fn receive(from: &UnixStream, buffer: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(
        from,
        &mut [IoSliceMut::new(buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(carried) = message {
            descriptors.extend(carried);
        }
    }
    if got.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    (&mut &*from).read_exact(&mut buffer[got.bytes..])?;
    Ok(descriptors)
}

fn send(to: &UnixStream, message: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let carried: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !carried.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&carried));
    }
    let sent = sendmsg(
        to,
        &[IoSlice::new(message)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    (&mut &*to).write_all(&message[sent..])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    struct Rig {
        kernel: UnixStream,
        device: UnixStream,
    }

    impl Rig {
        fn new() -> Self {
            let (kernel, outer) = UnixStream::pair().unwrap();
            let (inner, device) = UnixStream::pair().unwrap();
            translate(outer, inner).unwrap();
            Rig { kernel, device }
        }

        fn arrives(&self, length: usize) -> (Vec<u8>, Vec<OwnedFd>) {
            let mut buffer = vec![0; length];
            let descriptors = receive(&self.device, &mut buffer).unwrap();
            (buffer, descriptors)
        }
    }

    fn message(request: u32, payload: &[u8]) -> Vec<u8> {
        let size = payload.len() as u32;
        let words = [request, 9, size].map(u32::to_le_bytes);
        [words.as_flattened(), payload].concat()
    }

    fn table(regions: u32, room: usize) -> Vec<u8> {
        let mut table = vec![7; TABLE_HEADER + room * REGION];
        table[..4].copy_from_slice(&regions.to_le_bytes());
        table
    }

    #[test]
    fn a_table_is_cut_to_the_regions_it_has() {
        let rig = Rig::new();
        let memory = tempfile::tempfile().unwrap();
        let sent = message(SET_MEM_TABLE, &table(1, 2));
        send(&rig.kernel, &sent, &[memory.try_clone().unwrap().into()]).unwrap();
        let expected = message(SET_MEM_TABLE, &table(1, 1));
        let (arrived, descriptors) = rig.arrives(expected.len());
        assert_eq!(expected, arrived);
        let [descriptor] = &descriptors[..] else {
            panic!("{descriptors:?}")
        };
        assert_ne!(memory.as_raw_fd(), descriptor.as_raw_fd());
    }

    #[test]
    fn everything_else_passes_as_it_is() {
        let rig = Rig::new();
        for sent in [
            message(SET_MEM_TABLE, &table(2, 2)),
            message(SET_MEM_TABLE, &table(u32::MAX, 2)),
            message(SET_MEM_TABLE, &[1, 2]),
            message(1, &[]),
            message(24, &[5; 4096]),
        ] {
            send(&rig.kernel, &sent, &[]).unwrap();
            assert_eq!(sent, rig.arrives(sent.len()).0);
        }
        (&rig.device).write_all(b"answer").unwrap();
        let mut answer = [0; 6];
        (&rig.kernel).read_exact(&mut answer).unwrap();
        assert_eq!(b"answer", &answer);
    }

    #[test]
    fn the_end_of_one_is_the_end_of_the_other() {
        let Rig { kernel, device } = Rig::new();
        drop(kernel);
        assert_eq!(0, (&device).read(&mut [0]).unwrap());
        let Rig { kernel, device } = Rig::new();
        drop(device);
        assert_eq!(0, (&kernel).read(&mut [0]).unwrap());
    }

    #[test]
    fn garbage_ends_the_connection() {
        let rig = Rig::new();
        (&rig.kernel).write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(0, (&rig.device).read(&mut [0]).unwrap());
    }
}
