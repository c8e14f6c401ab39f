// SPDX-License-Identifier: Apache-2.0

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::*;

/// A disk in memory, of zeros where nothing was written.
#[derive(Default)]
pub(crate) struct Memory {
    blocks: RefCell<BTreeMap<u64, Block>>,
    flushes: RefCell<u64>,
    pub(crate) gone: RefCell<bool>,
}

impl Device for Memory {
    fn read(&self, offset: u64) -> io::Result<Block> {
        if *self.gone.borrow() {
            return Err(io::Error::other("gone"));
        }
        Ok(self
            .blocks
            .borrow()
            .get(&offset)
            .cloned()
            .unwrap_or_default())
    }

    fn write(&self, offset: u64, block: &Block) -> io::Result<()> {
        if *self.gone.borrow() {
            return Err(io::Error::other("gone"));
        }
        self.blocks.borrow_mut().insert(offset, block.clone());
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        *self.flushes.borrow_mut() += 1;
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.blocks
            .borrow_mut()
            .retain(|block, _| !(offset..offset + length).contains(block));
        Ok(())
    }
}

impl Memory {
    /// Write behind the user's back.
    pub(crate) fn overwrite(&self, offset: u64, block: Block) {
        self.blocks.borrow_mut().insert(offset, block);
    }

    fn offsets(&self) -> Vec<u64> {
        self.blocks.borrow().keys().copied().collect()
    }
}

fn written(device: &Memory, stamps: u64) -> Zone {
    let mut zone = Zone::begun(device, 0, 1).expect("a zone");
    for _ in 0..stamps {
        zone.write_next(device).expect("a stamp");
    }
    zone
}

fn found(device: &Memory) -> Result<Option<Zone>, Trouble> {
    Zone::found(device, 0)
}

fn wrong(result: Result<Option<Zone>, Trouble>) -> String {
    match result {
        Err(Trouble::Wrong(text)) => text,
        other => panic!("not wrong: {other:?}"),
    }
}

#[test]
fn a_disk_of_somebody_else_has_no_zone() {
    let device = Memory::default();
    assert!(found(&device).expect("readable").is_none());
    device.overwrite(0, Block([0xaa; block::SIZE]));
    assert!(found(&device).expect("readable").is_none());
}

#[test]
fn what_was_written_is_found() {
    for stamps in [0, 1, 100, SLOTS, 3 * SLOTS + 5] {
        let device = Memory::default();
        written(&device, stamps);
        let zone = found(&device).expect("right").expect("a zone");
        assert_eq!(stamps, zone.count());
    }
}

#[test]
fn stamps_are_all_over_the_zone() {
    let device = Memory::default();
    written(&device, SLOTS);
    let offsets = device.offsets();
    assert_eq!(SLOTS as usize + 1, offsets.len());
    assert!(*offsets.last().expect("one") > SIZE - STRIDE);
    assert!(*offsets.last().expect("one") < SIZE);
}

#[test]
fn each_stamp_is_flushed() {
    let device = Memory::default();
    let mut zone = written(&device, 0);
    let before = *device.flushes.borrow();
    zone.write_next(&device).expect("a stamp");
    assert_eq!(before + 1, *device.flushes.borrow());
}

#[test]
fn the_stamp_that_the_header_does_not_know_yet_counts() {
    let device = Memory::default();
    let zone = written(&device, 5);
    let next = zone.stamp(6);
    device.overwrite(next.offset, next.block());
    assert_eq!(6, found(&device).expect("right").expect("a zone").count());
}

#[test]
fn a_stamp_that_is_lost_is_seen() {
    let device = Memory::default();
    let zone = written(&device, SLOTS + 9);
    let lost = zone.stamp(20);
    device.overwrite(lost.offset, Block::default());
    let text = wrong(found(&device));
    assert!(text.contains("stamp 20 of offset"), "{text}");
    assert!(text.ends_with("was flushed, zeros was read"), "{text}");
}

#[test]
fn an_older_stamp_is_seen() {
    let device = Memory::default();
    let zone = written(&device, SLOTS + 9);
    let old = zone.stamp(4);
    device.overwrite(old.offset, old.block());
    let text = wrong(found(&device));
    assert!(text.contains("stamp 4 of offset"), "{text}");
}

#[test]
fn a_stamp_of_another_disk_is_seen() {
    let device = Memory::default();
    let zone = written(&device, 9);
    let stamp = Content {
        identity: 2,
        ..zone.stamp(9)
    };
    device.overwrite(stamp.offset, stamp.block());
    wrong(found(&device));
}

#[test]
fn a_header_of_another_place_is_seen() {
    let device = Memory::default();
    written(&device, 1);
    let moved = device.read(0).expect("readable");
    device.overwrite(SIZE, moved);
    assert!(matches!(Zone::found(&device, SIZE), Err(Trouble::Wrong(_))));
}

#[test]
fn a_running_guest_sees_it_too() {
    let device = Memory::default();
    let mut zone = written(&device, 3);
    device.overwrite(zone.stamp(3).offset, Block::default());
    let steps = (0..SLOTS)
        .map(|_| zone.write_next(&device))
        .take_while(Result::is_ok);
    assert_eq!(SLOTS - 1, steps.count() as u64);
}
