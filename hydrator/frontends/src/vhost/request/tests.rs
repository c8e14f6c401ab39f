// SPDX-License-Identifier: Apache-2.0

use super::*;

const GEOMETRY: Geometry = Geometry {
    size: 1 << 30,
    logical_block: 4096,
};

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap()
}

/// A request whose header and data are read from `at` on, in pieces of these
/// lengths, and which has room for a status.
fn chain(at: u64, lengths: &[u32]) -> Chain {
    let mut chain = Chain::default();
    let mut address = at;
    let mut descriptors = Vec::new();
    for length in lengths {
        descriptors.push(Descriptor::new(address, *length, 0, 0));
        address += u64::from(*length);
    }
    descriptors.push(Descriptor::new(0x8000, 1, 2, 0));
    chain.walk(descriptors.into_iter()).unwrap();
    chain
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

#[test]
fn how_a_request_is_cut_has_no_meaning() {
    let memory = memory();
    let mut bytes = header(VIRTIO_BLK_T_OUT, 8);
    bytes.extend((0..4096u32).map(|byte| byte as u8));
    memory.write_slice(&bytes, GuestAddress(0x1000)).unwrap();
    for lengths in [&[16, 4096][..], &[4112], &[1, 15, 4000, 96], &[7, 0, 4105]] {
        let chain = chain(0x1000, lengths);
        let asked = chain.ask(&memory, &GEOMETRY, false).unwrap();
        let expected = Ask::Io {
            operation: Operation::Write { fua: false },
            offset: 4096,
            length: 4096,
        };
        assert_eq!(asked, expected, "{lengths:?}");
        let mut data = vec![0; 4096];
        chain.take_data(&memory, &mut data).unwrap();
        assert_eq!(data, bytes[16..], "{lengths:?}");
    }
}

#[test]
fn who_does_not_flush_gets_durable_writes() {
    let memory = memory();
    memory
        .write_slice(&header(VIRTIO_BLK_T_OUT, 0), GuestAddress(0))
        .unwrap();
    let asked = chain(0, &[16, 4096]).ask(&memory, &GEOMETRY, true).unwrap();
    assert!(matches!(
        asked,
        Ask::Io {
            operation: Operation::Write { fua: true },
            ..
        }
    ));
}

#[test]
fn blocks_of_4_kib_are_told_and_kept() {
    let space = configuration(&GEOMETRY);
    assert_eq!(word(&space, offset_of!(virtio_blk_config, blk_size)), 4096);
    assert_eq!(space[offset_of!(virtio_blk_config, physical_block_exp)], 0);
    let memory = memory();
    memory
        .write_slice(&header(VIRTIO_BLK_T_OUT, 1), GuestAddress(0))
        .unwrap();
    let asked = chain(0, &[16, 4096]).ask(&memory, &GEOMETRY, false);
    assert_eq!(asked.unwrap(), Ask::Nothing(Status::Failed));
}

#[test]
fn the_status_is_the_last_byte() {
    let memory = memory();
    let mut chain = Chain::default();
    let pieces = [(0x1000, 3), (0x2000, 3)].map(|(at, length)| Descriptor::new(at, length, 2, 0));
    chain.walk(pieces.into_iter()).unwrap();
    let written = chain.answer(&memory, b"abcdefgh", Status::Unsupported);
    assert_eq!(written.unwrap(), 6);
    let mut seen = [0; 3];
    memory.read_slice(&mut seen, GuestAddress(0x2000)).unwrap();
    assert_eq!(seen, *b"de\x02");
}
