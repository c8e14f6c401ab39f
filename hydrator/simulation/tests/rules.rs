// SPDX-License-Identifier: Apache-2.0

//! All states of one block: what the guest, the disks, the helper, its death
//! and a power cut can do to it, in any order, by the rules in the core's
//! `FORMAT.md`. The rules are written down here a second time, and nothing of
//! the core is used: what is wrong with a rule itself shows here, what is wrong
//! with the code that follows it shows in the walks.
//!
//! Each write is one of a part of the block: the rest comes from where the block
//! is at that time. So a content says which writes are in it, and what the guest
//! must find is a set of writes.

use std::collections::HashMap;

/// What a block holds, as a set: the source's content, and the writes over it.
type Content = u8;
/// What the destination held before the move.
const STALE: Content = 0;
const BASE: Content = 1;
const TORN: Content = 1 << 7;

const WRITES: u8 = 3;
const FLUSHES: u8 = 2;

const fn write(number: u8) -> Content {
    BASE << number
}

/// A set of contents that have an intent.
type Intents = u16;

/// What a rule says, and what breaks without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Intent,
    IntentBeforeCompletion,
    Keep,
    KeepFailed,
    FailureIsFinal,
    OverwriteBehindIntent,
    SecondWriteWaits,
    FlushAfterIntents,
    Drain,
    DrainIntents,
    FlushData,
    FlushMetadata,
    SettleAfterFlush,
    FlushBeforeHydratedBit,
    HydratedIsNotSettled,
    BitmapBeforeTail,
    FlushBeforeRecovery,
    SettledIsLocal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Op {
    Data(Content),
    Intent(Content),
    Copy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Local {
    Remote,
    /// Copied, without its bit.
    Copied,
    Unsettled,
    Settled,
}

/// A write that the helper carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Writing {
    number: u8,
    content: Content,
    /// It overwrites content that is not settled.
    second: bool,
    /// It overwrites such content, or a copy without its bit.
    over_local: bool,
    /// Its intent waits in the open group.
    queued: bool,
    /// Its data wait until that is handed out.
    held: bool,
}

/// A flush in flight, and what it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flush {
    landed: usize,
    intents: Intents,
    /// Writes that were not settled.
    unsettled: Content,
    copied: bool,
    for_guest: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    // The disks: what is durable, and what is in their caches.
    data: Content,
    cache: Vec<Content>,
    intents: Intents,
    cached: Intents,
    settled: bool,
    bit: bool,
    /// What was handed out and has not ended.
    given: Vec<Op>,
    // The helper.
    local: Local,
    writing: Option<Writing>,
    flush: Option<Flush>,
    /// A flush was submitted since the last write ended.
    flush_since: bool,
    /// Unsettled writes that a flush has covered.
    flushed: Content,
    copy_flushed: bool,
    /// A read of the destination is in flight.
    reading: bool,
    /// Intents whose write has failed. They are kept; nothing is recorded any
    /// more.
    failed: Intents,
    kills: u8,
    // The guest.
    issued: u8,
    flushes: u8,
    answered: Content,
    seen: Content,
    owed: Content,
    /// A flush that was not answered: the writes that it is for, and those of
    /// their intents that were in flight when it came.
    asked: Option<(Content, Intents)>,
    /// The intents of second writes.
    second: Intents,
}

const BEGIN: State = State {
    data: STALE,
    cache: Vec::new(),
    intents: 0,
    cached: 0,
    settled: false,
    bit: false,
    given: Vec::new(),
    local: Local::Remote,
    writing: None,
    flush: None,
    flush_since: false,
    flushed: 0,
    copy_flushed: false,
    reading: false,
    failed: 0,
    kills: 0,
    issued: 0,
    flushes: 0,
    answered: 0,
    seen: 0,
    owed: 0,
    asked: None,
    second: 0,
};

impl State {
    /// What the destination reads as.
    fn visible(&self) -> Content {
        self.cache.last().copied().unwrap_or(self.data)
    }

    /// What the volume reads as.
    fn read(&self) -> Content {
        match self.local {
            Local::Remote => BASE,
            _ => self.visible(),
        }
    }

    /// The guest's next write, or the one that was not answered.
    fn next_write(&self) -> Option<u8> {
        if self.writing.is_some() {
            None
        } else if self.issued > 0 && self.answered & write(self.issued) == 0 {
            Some(self.issued)
        } else {
            (self.issued < WRITES).then_some(self.issued + 1)
        }
    }

    fn land(&mut self, op: Op) {
        match op {
            Op::Data(content) => self.cache.push(content),
            Op::Copy => self.cache.push(BASE),
            Op::Intent(content) => self.cached |= 1 << content,
        }
    }

    /// Intents that are in flight.
    fn flying(&self) -> Intents {
        let intents = self.given.iter().map(|op| match op {
            Op::Intent(content) => 1 << content,
            _ => 0,
        });
        intents.sum()
    }

    /// The writes that these are of.
    fn flying_writes(&self) -> Content {
        let writes = self.given.iter().map(|op| match op {
            Op::Intent(content) => 1 << content.ilog2(),
            _ => 0,
        });
        writes.sum()
    }
}

/// Whether recovery finds a block local.
fn is_local(content: Content, intents: Intents, settled: bool, bit: bool, rules: Rules) -> bool {
    let settled = settled && intents != 0 && rules.keep(Rule::SettledIsLocal);
    bit || settled || content < 16 && intents >> content & 1 == 1
}

#[derive(Clone, Copy, Debug)]
struct Rules {
    dropped: Option<Rule>,
    kills: u8,
    /// The metadata's disk may fail a write.
    fails: bool,
}

impl Rules {
    fn keep(self, rule: Rule) -> bool {
        self.dropped != Some(rule)
    }

    /// What can happen next.
    fn next(self, state: &State, mut reach: impl FnMut(&'static str, State)) {
        let mut step = |name, change: &dyn Fn(&mut State)| {
            let mut next = state.clone();
            change(&mut next);
            reach(name, next);
        };
        let broken = state.failed != 0 && self.keep(Rule::FailureIsFinal);
        let copying = state.given.contains(&Op::Copy);
        let second = state.writing.is_some_and(|writing| writing.second);

        // The guest.
        let waits = state.local == Local::Unsettled && state.flush_since;
        if let Some(number) = state.next_write() {
            let refused = broken && state.local != Local::Settled;
            if !refused && !copying && (!waits || !self.keep(Rule::SecondWriteWaits)) {
                step("a write begins", &|next| self.begin_write(next, number));
            }
        }
        if state.asked.is_none() && state.flushes < FLUSHES {
            step("the guest flushes", &|next| {
                next.asked = Some((next.answered, next.flying()));
                next.flushes += 1;
            });
        }
        let overwritten = state.writing.is_some_and(|writing| writing.over_local);
        if !overwritten {
            step("a read", &|next| next.seen |= next.read());
            if state.local != Local::Remote && !state.reading {
                step("a read of the destination begins", &|next| {
                    next.reading = true;
                });
            }
        }
        if state.reading {
            step("it ends", &|next| {
                next.reading = false;
                next.seen |= next.visible();
            });
        }

        // The disks.
        for at in 0..state.given.len() {
            step("an operation ends", &|next| {
                let op = next.given.remove(at);
                next.land(op);
                if op == Op::Copy {
                    next.local = Local::Copied;
                    next.copy_flushed = false;
                }
            });
        }
        if let Some(flush) = state.flush {
            step("the flush ends", &|next| self.end_flush(next, flush));
        }
        for at in 0..state.given.len() {
            if let (Op::Intent(content), true, 0) = (state.given[at], self.fails, state.failed) {
                step("the write of an intent fails", &|next| {
                    next.given.remove(at);
                    next.failed |= 1 << content;
                });
            }
        }

        // The helper.
        if let Some(writing) = state.writing {
            if broken {
                if !state.given.iter().any(|op| matches!(op, Op::Data(_))) {
                    step("the write fails", &|next| next.writing = None);
                }
            } else if writing.queued {
                step("the group is handed out", &|next| {
                    next.given.push(Op::Intent(writing.content));
                    if writing.held {
                        next.given.push(Op::Data(writing.content));
                    }
                    next.writing = Some(Writing {
                        queued: false,
                        held: false,
                        ..writing
                    });
                });
            }
            if !broken && self.is_written(state, writing) {
                step("the write is answered", &|next| {
                    next.writing = None;
                    next.answered |= write(writing.number);
                    if next.local != Local::Settled {
                        next.local = Local::Unsettled;
                    }
                    next.flush_since = false;
                });
            }
        }
        let flying = state.flying();
        let drained = (!second || !self.keep(Rule::Drain))
            && (flying & state.second == 0 || !self.keep(Rule::DrainIntents));
        let mut asked = state.asked.map(|(_, intents)| intents & flying != 0);
        if !self.keep(Rule::FlushAfterIntents) {
            asked = asked.map(|_| false);
        }
        if broken && state.flush.is_none() && state.asked.is_some() {
            step("the guest's flush fails", &|next| next.asked = None);
        }
        if !broken && state.flush.is_none() && drained {
            step("a flush is submitted", &|next| {
                let unsettled = next.local == Local::Unsettled;
                next.flush = Some(Flush {
                    landed: next.cache.len(),
                    intents: next.cached,
                    unsettled: if unsettled {
                        next.answered & !next.flying_writes()
                    } else {
                        0
                    },
                    copied: next.local == Local::Copied,
                    for_guest: asked == Some(false),
                });
                next.flush_since |= unsettled;
            });
        }
        let covered = if self.keep(Rule::SettleAfterFlush) {
            state.flushed
        } else {
            state.answered
        };
        if !broken && state.local == Local::Unsettled && covered != 0 && !state.settled {
            step("it is settled", &|next| {
                next.settled = true;
                if covered == next.answered && next.writing.is_none() {
                    next.local = Local::Settled;
                }
            });
        }
        if !broken && state.local == Local::Settled && state.settled {
            step("its bit is written", &|next| next.bit = true);
            if state.bit || !self.keep(Rule::BitmapBeforeTail) {
                step("the tail moves", &|next| {
                    (next.intents, next.cached, next.settled) = (0, 0, false);
                });
            }
        }
        if !broken && state.local == Local::Remote && state.writing.is_none() && !copying {
            step("it is copied", &|next| next.given.push(Op::Copy));
        }
        let recorded = state.copy_flushed || !self.keep(Rule::FlushBeforeHydratedBit);
        if !broken && state.local == Local::Copied && recorded && state.writing.is_none() {
            step("the copy's bit is written", &|next| {
                next.bit = true;
                next.local = Local::Settled;
            });
        }
        if state.kills < self.kills {
            // All subsets of what the kernel may have dropped.
            for kept in 0..1u32 << state.given.len() {
                let dropped = |at: usize| kept >> at & 1 == 0;
                let mut ops = state.given.iter().enumerate();
                let is_kept = |op: &Op| matches!(op, Op::Intent(_)) && self.keep(Rule::Keep);
                if !ops.any(|(at, op)| dropped(at) && is_kept(op)) {
                    step("the helper is killed", &|next| self.kill(next, kept));
                }
            }
        }
    }

    fn begin_write(self, state: &mut State, number: u8) {
        let content = state.read() & !TORN | write(number);
        let before = state.local;
        let settled = before == Local::Settled
            || before == Local::Copied && !self.keep(Rule::HydratedIsNotSettled);
        let second = before == Local::Unsettled;
        let over_local = second || before == Local::Copied && !settled;
        if before == Local::Copied && settled {
            state.local = Local::Settled;
        }
        let intent = !settled && self.keep(Rule::Intent);
        let held = intent && over_local && self.keep(Rule::OverwriteBehindIntent);
        if !held {
            state.given.push(Op::Data(content));
        }
        if second {
            state.second |= 1 << content;
        }
        state.issued = number;
        state.writing = Some(Writing {
            number,
            content,
            second,
            over_local,
            queued: intent,
            held,
        });
    }

    /// Whether the write's data are there, and its intent is kept.
    fn is_written(self, state: &State, writing: Writing) -> bool {
        let intended = !writing.queued || !self.keep(Rule::IntentBeforeCompletion);
        let mut given = state.given.iter();
        intended && !writing.held && given.all(|op| matches!(op, Op::Intent(_)))
    }

    fn end_flush(self, state: &mut State, flush: Flush) {
        state.flush = None;
        if flush.landed > 0 && self.keep(Rule::FlushData) {
            state.data = state.cache[flush.landed - 1];
            state.cache.drain(..flush.landed);
        }
        if self.keep(Rule::FlushMetadata) {
            state.intents |= flush.intents;
            state.cached &= !flush.intents;
        }
        if state.failed != 0 && self.keep(Rule::FailureIsFinal) {
            return;
        }
        if state.local == Local::Unsettled {
            state.flushed |= flush.unsettled;
        }
        state.copy_flushed |= flush.copied && state.local == Local::Copied;
        if let Some((asked, _)) = state.asked.filter(|_| flush.for_guest) {
            state.owed |= asked;
            state.asked = None;
        }
    }

    /// The kernel completes what it has begun with, and what is kept is carried
    /// out; a successor recovers. The guest lives on.
    fn kill(self, state: &mut State, kept: u32) {
        state.kills += 1;
        for (at, op) in core::mem::take(&mut state.given).into_iter().enumerate() {
            if kept >> at & 1 == 1 {
                state.land(op);
            }
        }
        let failed = core::mem::take(&mut state.failed);
        if self.keep(Rule::KeepFailed) {
            state.cached |= failed;
        }
        if self.keep(Rule::FlushBeforeRecovery) {
            state.data = state.visible();
            state.cache.clear();
        }
        let intents = state.intents | state.cached;
        let local = is_local(state.visible(), intents, state.settled, state.bit, self);
        state.local = if local { Local::Settled } else { Local::Remote };
        state.bit = local;
        (state.intents, state.cached, state.settled) = (0, 0, false);
        state.second = 0;
        state.asked = state.asked.map(|(asked, _)| (asked, 0));
        state.writing = None;
        state.flush = None;
        state.flush_since = false;
        state.flushed = 0;
        state.copy_flushed = false;
        state.reading = false;
    }

    /// What a power cut would leave that it must not.
    fn power_cut(self, state: &State) -> Option<String> {
        let in_flight = state.given.iter().filter_map(|op| match op {
            Op::Data(content) => Some(*content),
            Op::Copy => Some(BASE),
            Op::Intent(_) => None,
        });
        let pending: Vec<_> = state.cache.iter().copied().chain(in_flight).collect();
        let torn = (!pending.is_empty()).then_some(TORN);
        let unsure = state.cached | state.flying() | state.failed;
        for content in [state.data].into_iter().chain(pending).chain(torn) {
            // All subsets of what is not durable for sure.
            let mut kept = unsure;
            loop {
                let intents = state.intents | kept;
                let local = is_local(content, intents, state.settled, state.bit, self);
                let found = if local { content } else { BASE };
                // Sectors of a settled block may be torn apart, as on any disk.
                let mixed = found == TORN && state.local == Local::Settled;
                if !mixed && (found & BASE == 0 || state.owed & !found != 0) {
                    return Some(format!(
                        "a power cut leaves {content:#x} with intents {intents:#x}: it reads \
                         as {found:#x}, owed is {:#x}",
                        state.owed
                    ));
                }
                if kept == 0 {
                    break;
                }
                kept = (kept - 1) & unsure;
            }
        }
        None
    }

    /// What the guest would read now that it must not.
    fn too_old(self, state: &State) -> Option<String> {
        let waits = state.writing.is_some_and(|writing| writing.over_local);
        let (found, known) = (state.read(), state.answered | state.seen);
        (!waits && known & !found != 0)
            .then(|| format!("it reads as {found:#x}, the guest knows {known:#x}"))
    }

    /// Go through all states; how many there are, or how one is reached that
    /// must not be.
    fn explore(self, judge: impl Fn(Self, &State) -> Option<String>) -> Result<usize, Vec<String>> {
        let mut states = vec![(BEGIN, 0, "")];
        let mut known = HashMap::from([(BEGIN, ())]);
        let mut at = 0;
        while at < states.len() {
            let state = states[at].0.clone();
            if let Some(violation) = judge(self, &state) {
                let mut path = vec![violation];
                while at > 0 {
                    path.push(states[at].2.to_owned());
                    at = states[at].1;
                }
                path.reverse();
                return Err(path);
            }
            self.next(&state, |name, next| {
                if known.insert(next.clone(), ()).is_none() {
                    states.push((next, at, name));
                }
            });
            at += 1;
        }
        Ok(states.len())
    }

    /// Judged: by a power cut alone; by a power cut, perhaps after kills; by
    /// what the guest reads, perhaps after kills.
    fn judge(dropped: Option<Rule>, kills: u8, fails: bool) -> [Result<usize, Vec<String>>; 3] {
        let rules = |kills| Self {
            dropped,
            kills,
            fails,
        };
        [
            rules(0).explore(Self::power_cut),
            rules(kills).explore(Self::power_cut),
            rules(kills).explore(Self::too_old),
        ]
    }
}

#[test]
fn with_all_rules_nothing_is_lost() {
    for judged in Rules::judge(None, 2, true) {
        println!("{} states", judged.expect("no state is wrong"));
    }
}

#[test]
fn without_any_rule_something_is_lost() {
    // What shows it: a power cut alone, a power cut after kills, kills.
    for (rule, shown) in [
        (Rule::Intent, [true, true, true]),
        (Rule::IntentBeforeCompletion, [true, true, true]),
        (Rule::Keep, [false, true, true]),
        (Rule::KeepFailed, [false, true, true]),
        (Rule::FailureIsFinal, [true, true, false]),
        (Rule::OverwriteBehindIntent, [false, true, true]),
        (Rule::SecondWriteWaits, [true, true, false]),
        (Rule::FlushAfterIntents, [true, true, false]),
        (Rule::Drain, [true, true, false]),
        (Rule::DrainIntents, [true, true, false]),
        (Rule::FlushData, [true, true, false]),
        (Rule::FlushMetadata, [true, true, false]),
        (Rule::SettleAfterFlush, [true, true, false]),
        (Rule::FlushBeforeHydratedBit, [true, true, false]),
        (Rule::HydratedIsNotSettled, [true, true, true]),
        (Rule::BitmapBeforeTail, [true, true, true]),
        (Rule::FlushBeforeRecovery, [false, true, false]),
        (Rule::SettledIsLocal, [true, true, true]),
    ] {
        // Most are missed though no disk fails, in states that are fewer by far.
        let fails = matches!(rule, Rule::KeepFailed | Rule::FailureIsFinal);
        let judged = Rules::judge(Some(rule), 1, fails);
        for path in judged.iter().flat_map(|judged| judged.as_ref().err()) {
            println!("{rule:?}: {}", path.join("; "));
        }
        assert_eq!(judged.map(|judged| judged.is_err()), shown, "{rule:?}");
    }
}
