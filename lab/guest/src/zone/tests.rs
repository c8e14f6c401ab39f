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

/// Some sectors of one block, and all others of another.
fn torn(new: &Block, before: &Block) -> Block {
    let mut block = before.clone();
    for at in [1, 2, 5] {
        block.0[at * 512..(at + 1) * 512].copy_from_slice(&new.0[at * 512..(at + 1) * 512]);
    }
    block
}

fn header(zone: &Zone, number: u64) -> Block {
    super::header(zone.start, zone.identity, number)
}

#[test]
fn a_count_that_memory_has_forgotten_is_no_fault_of_the_disk() {
    for forgotten in ["count", "header"] {
        let device = Memory::default();
        let mut zone = written(&device, SLOTS + 9);
        match forgotten {
            "count" => zone.count -= 1,
            _ => {
                *zone.header = header(&zone, SLOTS + 8);
                let next = zone.stamp(SLOTS + 10);
                device.overwrite(next.offset, Block::default());
            }
        }
        let trouble = zone.write_next(&device).expect_err("it is noticed");
        assert!(matches!(trouble, Trouble::Memory(_)), "{trouble:?}");
    }
}

#[test]
fn a_stamp_that_a_power_cut_has_torn_is_written_again() {
    for stamps in [5, SLOTS + 9] {
        let device = Memory::default();
        let zone = written(&device, stamps);
        let next = zone.stamp(stamps + 1);
        let before = match stamps.checked_sub(SLOTS) {
            Some(lap) => zone.stamp(lap + 1).block(),
            None => Block([0xaa; block::SIZE]),
        };
        device.overwrite(next.offset, torn(&next.block(), &before));
        let mut zone = found(&device).expect("right").expect("a zone");
        assert_eq!(stamps + 1, zone.count());
        assert!(device.read(next.offset).expect("readable") == next.block());
        for _ in 0..SLOTS {
            zone.write_next(&device).expect("a stamp");
        }
    }
}

#[test]
fn a_header_that_a_power_cut_has_torn_says_the_newer_number() {
    let device = Memory::default();
    let zone = written(&device, SLOTS + 9);
    let before = header(&zone, SLOTS + 8);
    device.overwrite(0, torn(&header(&zone, SLOTS + 9), &before));
    let count = found(&device).expect("right").expect("a zone").count();
    assert_eq!(SLOTS + 9, count);
}

#[test]
fn a_header_may_be_lost_while_the_stamp_after_it_is_not() {
    for on_its_way in [false, true] {
        let device = Memory::default();
        let zone = written(&device, SLOTS + 9);
        // Both were flushed by nobody.
        device.overwrite(0, header(&zone, SLOTS + 8));
        let next = zone.stamp(SLOTS + 10);
        let before = zone.stamp(10).block();
        device.overwrite(
            next.offset,
            match on_its_way {
                true => torn(&next.block(), &before),
                false => next.block(),
            },
        );
        let count = found(&device).expect("right").expect("a zone").count();
        assert_eq!(SLOTS + 10, count);
    }
}

#[test]
fn a_header_that_is_torn_after_a_power_cut_is_known_too() {
    let device = Memory::default();
    let zone = written(&device, 5);
    let next = zone.stamp(6);
    device.overwrite(next.offset, next.block());
    let mut zone = found(&device).expect("right").expect("a zone");
    let before = device.read(0).expect("readable");
    zone.write_next(&device).expect("a stamp");
    device.overwrite(0, torn(&header(&zone, 7), &before));
    assert_eq!(7, found(&device).expect("right").expect("a zone").count());
}

#[test]
fn a_stamp_is_not_there_before_the_one_before_it_is() {
    let device = Memory::default();
    let zone = written(&device, SLOTS + 9);
    let next = zone.stamp(SLOTS + 11);
    device.overwrite(next.offset, next.block());
    let text = wrong(found(&device));
    assert!(text.contains("stamp 11 of offset"), "{text}");
}

#[test]
fn a_header_that_two_stamps_ago_was_flushed_is_missed() {
    let device = Memory::default();
    let zone = written(&device, SLOTS + 9);
    for number in SLOTS + 10..=SLOTS + 12 {
        let stamp = zone.stamp(number);
        device.overwrite(stamp.offset, stamp.block());
    }
    let text = wrong(found(&device));
    assert!(text.contains("stamp 12 of offset"), "{text}");
}

#[test]
fn a_torn_stamp_that_was_flushed_is_seen() {
    let device = Memory::default();
    let zone = written(&device, SLOTS + 9);
    let lost = zone.stamp(SLOTS + 9);
    device.overwrite(lost.offset, torn(&lost.block(), &zone.stamp(9).block()));
    wrong(found(&device));
    // Nor may a torn one have anything in it that was never there.
    let device = Memory::default();
    let zone = written(&device, SLOTS + 9);
    let next = zone.stamp(SLOTS + 10);
    device.overwrite(next.offset, torn(&next.block(), &Block::default()));
    wrong(found(&device));
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
