// SPDX-License-Identifier: Apache-2.0

use super::*;

const STAMP: Content = Content {
    kind: Kind::Stamp,
    identity: 0xabcd,
    offset: 4096,
    number: 7,
};

#[test]
fn what_a_block_says_can_be_read() {
    assert_eq!(Some(STAMP), Content::of(&STAMP.block()));
}

#[test]
fn a_torn_block_says_nothing() {
    let mut block = STAMP.block();
    let later = Content { number: 8, ..STAMP }.block();
    block.0[512..].copy_from_slice(&later.0[512..]);
    assert_eq!(None, Content::of(&block));
    assert!(describe(&block).starts_with("nothing of ours"));
}

#[test]
fn what_is_there_instead_is_told() {
    assert_eq!("zeros", describe(&Block::default()));
    assert_eq!(
        "stamp 7 of offset 4096 of 000000000000abcd",
        describe(&STAMP.block())
    );
}
