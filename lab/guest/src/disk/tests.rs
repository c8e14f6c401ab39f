// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::block::Block;
use crate::zone::tests::Memory;

const IDENTITY: fn() -> u64 = || 1;

fn used(size: u64) -> Disk<Memory> {
    let mut disk = Disk::new(Memory::default());
    disk.use_all(size, IDENTITY).expect("a disk");
    disk
}

#[test]
fn a_disk_that_grows_has_more_zones_and_keeps_those_it_had() {
    let mut disk = used(zone::SIZE);
    disk.step().expect("a stamp");
    let new = disk.use_all(2 * zone::SIZE + 5, IDENTITY).expect("larger");
    assert_eq!(vec![None], new);
    disk.step().expect("a stamp");
    disk.step().expect("a stamp");
    assert_eq!(3, disk.stamps());
}

#[test]
fn what_was_there_before_is_told() {
    let mut disk = used(2 * zone::SIZE);
    for _ in 0..7 {
        disk.step().expect("a stamp");
    }
    let mut again = Disk::new(disk.device);
    let before = again.use_all(2 * zone::SIZE, IDENTITY).expect("right");
    assert_eq!(vec![Some(4), Some(3)], before);
    assert_eq!(7, again.stamps());
}

#[test]
fn a_disk_that_is_too_small_is_left_alone() {
    let mut disk = used(zone::SIZE - 1);
    disk.step().expect("nothing");
    assert_eq!(0, disk.stamps());
}

#[test]
fn every_stamp_is_read_again_before_long() {
    let mut disk = used(zone::SIZE);
    for _ in 0..zone::SLOTS {
        disk.step().expect("a stamp");
    }
    disk.device.overwrite((200 << 22) + 4096, Block::default());
    let seen = (0..zone::SLOTS).any(|_| matches!(disk.step(), Err(Trouble::Wrong(_))));
    assert!(seen);
}

#[test]
fn a_disk_that_is_gone_is_no_wrong_disk() {
    let mut disk = used(zone::SIZE);
    *disk.device.gone.borrow_mut() = true;
    assert!(matches!(disk.step(), Err(Trouble::Disk(_))));
}

#[test]
fn a_disk_that_is_trimmed_has_its_stamps_and_nothing_else() {
    let mut disk = used(2 * zone::SIZE);
    for _ in 0..2 * zone::SLOTS {
        disk.step().expect("a stamp");
    }
    // Before the last slot ends, and behind the first stamp
    let others = [zone::SIZE - 4096, zone::SIZE + 2 * 4096];
    for offset in others {
        disk.device.overwrite(offset, Block([0xaa; 4096]));
    }
    disk.trim().expect("trimmed");
    for offset in others {
        assert_eq!(
            Block::default().0,
            disk.device.read(offset).expect("read").0
        );
    }
    let before = Disk::new(disk.device)
        .use_all(2 * zone::SIZE, IDENTITY)
        .expect("right");
    assert_eq!(vec![Some(zone::SLOTS); 2], before);
}
