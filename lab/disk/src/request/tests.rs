// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use proptest::prelude::*;
use tempfile::NamedTempFile;
use virtio_bindings::virtio_ring::VRING_DESC_F_WRITE;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::cache::Cache;
use crate::disk::Disk;

const MEMORY: usize = 4 << 20;
const DATA: u64 = 1 << 20;
const OK: u8 = VIRTIO_BLK_S_OK as u8;
const FAILED: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNKNOWN: u8 = VIRTIO_BLK_S_UNSUPP as u8;

struct Rig {
    _file: NamedTempFile,
    disk: Arc<Disk>,
    plug: Plug,
    memory: GuestMemoryMmap,
}

impl Rig {
    fn new() -> Self {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let disk = Arc::new(Disk::new(
            Cache::open(file.path(), 1 << 20, SECTOR).unwrap(),
        ));
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        Rig {
            _file: file,
            plug: disk.plug_in(),
            disk,
            memory,
        }
    }

    /// Send a request whose parts lie one behind the other; what came back.
    fn raw(&self, sent: &[&[u8]], room: &[u32]) -> Result<Vec<u8>, Unanswered> {
        let mut address = DATA;
        let mut descriptors = Vec::new();
        let mut add = |length: u32, flags: u32| {
            descriptors.push(RawDescriptor::from(Descriptor::new(
                address,
                length,
                flags as u16,
                0,
            )));
            address += u64::from(length);
        };
        for part in sent {
            add(part.len() as u32, 0);
        }
        for length in room {
            add(*length, VRING_DESC_F_WRITE);
        }
        let sent = sent.concat();
        self.memory.write_slice(&sent, GuestAddress(DATA)).unwrap();
        let answer = GuestAddress(DATA + sent.len() as u64);
        let unwritten = vec![0xee; room.iter().sum::<u32>() as usize];
        self.memory.write_slice(&unwritten, answer).unwrap();
        let queue = MockSplitQueue::new(&self.memory, 16);
        let chain = queue.build_desc_chain(&descriptors).unwrap();
        let reader = chain.clone().reader(&self.memory).unwrap();
        let writer = chain.writer(&self.memory).unwrap();
        let submitted = self.plug.now().unwrap();
        let written = carry_out(&self.plug, "the-disk", submitted, reader, writer)?;
        let mut back = unwritten;
        self.memory.read_slice(&mut back, answer).unwrap();
        assert!(written as usize <= back.len());
        Ok(back)
    }

    fn send(&self, kind: u32, sector: u64, data: &[u8], room: u32) -> (u8, Vec<u8>) {
        let mut back = self
            .raw(&[&header(kind, sector), data], &[room, 1])
            .unwrap();
        (back.pop().unwrap(), back)
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn range(sector: u64, count: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &count.to_le_bytes(), &[0; 4]].concat()
}

#[test]
fn what_was_written_is_read() {
    let rig = Rig::new();
    assert_eq!(OK, rig.send(VIRTIO_BLK_T_OUT, 3, &[7; 1024], 0).0);
    assert_eq!((OK, vec![7; 1024]), rig.send(VIRTIO_BLK_T_IN, 3, &[], 1024));
    assert_eq!((OK, vec![0; 512]), rig.send(VIRTIO_BLK_T_IN, 5, &[], 512));
}

#[test]
fn how_a_chain_is_cut_has_no_meaning() {
    let rig = Rig::new();
    let head = header(VIRTIO_BLK_T_OUT, 1);
    let back = rig
        .raw(&[&head[..9], &head[9..], &[1; 100], &[2; 412]], &[1])
        .unwrap();
    assert_eq!([OK], back[..]);
    let back = rig.raw(&[&header(VIRTIO_BLK_T_IN, 1)], &[50, 463]).unwrap();
    assert_eq!([&[1; 100][..], &[2; 412], &[OK]].concat(), back);
}

#[test]
fn a_flush_makes_durable() {
    let rig = Rig::new();
    rig.send(VIRTIO_BLK_T_OUT, 0, &[7; 512], 0);
    assert_eq!(1, rig.disk.status().unflushed);
    assert_eq!(OK, rig.send(VIRTIO_BLK_T_FLUSH, 0, &[], 0).0);
    assert_eq!(0, rig.disk.status().unflushed);
}

#[test]
fn discarded_and_zeroed_sectors_read_zeros() {
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        let rig = Rig::new();
        rig.send(VIRTIO_BLK_T_OUT, 0, &[7; 1536], 0);
        assert_eq!(OK, rig.send(kind, 0, &range(1, 1), 0).0);
        let expected = [[7; 512], [0; 512], [7; 512]].concat();
        assert_eq!((OK, expected), rig.send(VIRTIO_BLK_T_IN, 0, &[], 1536));
    }
}

#[test]
fn the_disk_tells_its_name() {
    let rig = Rig::new();
    let (status, name) = rig.send(VIRTIO_BLK_T_GET_ID, 0, &[], 20);
    assert_eq!(
        (OK, &b"the-disk\0\0\0\0\0\0\0\0\0\0\0\0"[..]),
        (status, &name[..])
    );
}

#[test]
fn what_is_beyond_the_disk_fails() {
    let rig = Rig::new();
    for sector in [2048, u64::MAX] {
        assert_eq!(FAILED, rig.send(VIRTIO_BLK_T_IN, sector, &[], 512).0);
        assert_eq!(FAILED, rig.send(VIRTIO_BLK_T_OUT, sector, &[0; 512], 0).0);
        assert_eq!(
            FAILED,
            rig.send(VIRTIO_BLK_T_DISCARD, 0, &range(sector, 1), 0).0
        );
    }
    assert_eq!(
        FAILED,
        rig.send(VIRTIO_BLK_T_DISCARD, 0, &range(0, u32::MAX), 0).0
    );
    assert_eq!(FAILED, rig.send(VIRTIO_BLK_T_OUT, 0, &[0; 100], 0).0);
    assert_eq!(0, rig.disk.status().unflushed);
}

#[test]
fn an_unknown_request_is_not_supported() {
    assert_eq!(UNKNOWN, Rig::new().send(99, 0, &[], 0).0);
}

#[test]
fn a_request_without_room_for_a_status_is_not_answered() {
    let rig = Rig::new();
    let answer = rig.raw(&[&header(VIRTIO_BLK_T_OUT, 0), &[0; 512]], &[]);
    assert!(matches!(answer, Err(Unanswered::NoRoom(_))));
    assert_eq!(0, rig.disk.status().unflushed);
}

#[test]
fn the_configuration_tells_the_size_in_sectors_and_that_of_a_block() {
    let space = configuration(8 << 30, 4096);
    assert_eq!(
        (8u64 << 30) / 512,
        u64::from_le_bytes(space[..8].try_into().unwrap())
    );
    let at = offset_of!(virtio_blk_config, blk_size);
    assert_eq!(4096u32.to_le_bytes(), space[at..at + 4]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn garbage_gets_some_answer(kind in 0u32..20, sector: u64, data: Vec<u8>, room in 0u32..3000) {
        let known = [OK, FAILED, UNKNOWN];
        prop_assert!(known.contains(&Rig::new().send(kind, sector, &data, room).0));
    }

    #[test]
    fn a_header_that_is_cut_short_fails(length in 0usize..16) {
        let head = header(VIRTIO_BLK_T_FLUSH, 0);
        prop_assert_eq!(vec![FAILED], Rig::new().raw(&[&head[..length]], &[1]).unwrap());
    }
}
