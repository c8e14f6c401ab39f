// SPDX-License-Identifier: Apache-2.0

//! A copy is written at once, and beside a guest by pieces, one after the other.

use localstor_hydrator_core::{
    Action, Config, Device, Failure, Io, Memory, Operation, Time, Volume, metadata_size,
};
use null::Zeros;

#[allow(dead_code)]
mod null;

const REGION: u32 = 1 << 20;
const PIECE: u32 = 64 << 10;

/// A write to the destination.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Written {
    io: Io,
    offset: u64,
    length: u32,
}

/// A volume of one region that is read from the source, and nothing is answered
/// that a test does not answer.
struct OneCopy {
    volume: Volume,
    memory: Zeros,
    written: Vec<Written>,
    read: Option<Io>,
}

impl OneCopy {
    fn new() -> Self {
        let size = u64::from(REGION);
        let config = Config::new([1; 16], size, metadata_size(size));
        let mut this = Self {
            memory: Zeros::new(&config),
            volume: Volume::format(config).expect("a configuration that works"),
            written: Vec::new(),
            read: None,
        };
        loop {
            let others = this.act();
            if others.is_empty() {
                break;
            }
            for io in others {
                this.end(io, Ok(()));
            }
        }
        this.memory.extent_mut(0).fill(0x5a);
        this.volume.start();
        // The beginning is recorded before anything is copied.
        while this.read.is_none() {
            for io in this.act() {
                this.end(io, Ok(()));
            }
        }
        this
    }

    /// What else is begun than reads of the source and writes of a copy.
    fn act(&mut self) -> Vec<Io> {
        let mut others = Vec::new();
        let (written, read) = (&mut self.written, &mut self.read);
        self.volume
            .actions(Time(1), &mut self.memory, |action| match action {
                Action::Read {
                    io,
                    device: Device::Source,
                    ..
                } => *read = Some(io),
                Action::Write {
                    io,
                    device: Device::Data,
                    offset,
                    length,
                    ..
                } => {
                    written.push(Written { io, offset, length });
                }
                Action::Read { io, .. }
                | Action::Write { io, .. }
                | Action::Zero { io, .. }
                | Action::Flush { io, .. } => others.push(io),
                Action::Complete { .. } | Action::Notice(_) => {}
            });
        others
    }

    fn end(&mut self, io: Io, result: Result<(), Failure>) {
        self.volume.completed(Time(1), io, result, &mut self.memory);
    }

    fn source_answers(&mut self) {
        let io = self.read.take().expect("the source is read");
        self.end(io, Ok(()));
        self.act();
    }

    /// The guest asks for something that nobody answers.
    fn guest_flushes(&mut self) {
        let request = null::request(0, Operation::Flush, 0, 0);
        self.volume.request(Time(1), request, &mut self.memory);
        self.act();
    }

    fn lengths(&self) -> Vec<u32> {
        self.written.iter().map(|written| written.length).collect()
    }
}

#[test]
fn without_a_guest_it_is_one_write() {
    let mut copy = OneCopy::new();
    copy.source_answers();
    assert_eq!([REGION][..], copy.lengths());
}

#[test]
fn beside_a_guest_a_piece_waits_for_the_one_before_it() {
    let mut copy = OneCopy::new();
    copy.guest_flushes();
    copy.source_answers();
    for number in 0..REGION / PIECE {
        let Written { io, offset, length } = copy.written.pop().expect("a piece");
        assert_eq!((number * PIECE, PIECE), (offset as u32, length));
        assert_eq!([0; 0][..], copy.lengths());
        assert_eq!(0, copy.volume.progress().copied);
        copy.end(io, Ok(()));
        copy.act();
    }
    assert_eq!([0; 0][..], copy.lengths());
    assert_eq!(u64::from(REGION), copy.volume.progress().copied);
}

#[test]
fn after_a_piece_that_failed_no_other_is_written() {
    let mut copy = OneCopy::new();
    copy.guest_flushes();
    copy.source_answers();
    let Written { io, .. } = copy.written.pop().expect("a piece");
    copy.end(io, Err(Failure::Io));
    copy.act();
    assert_eq!([0; 0][..], copy.lengths());
    assert_eq!(0, copy.volume.progress().copied);
}
