// SPDX-License-Identifier: Apache-2.0

//! How fast to copy: as fast as the guest hardly notices, but never slower than
//! the configured minimum, so every move ends.
//!
//! While the guest asks for nothing, there is no limit but the configured one.
//! Its first request brings the rate down to the minimum at once. From there the
//! rate grows, a tenth of a second at a time, as long as requests take hardly
//! longer than they do alone; else it is cut. How long they take alone depends
//! on what they are, and is known from those that met no copy. There are many of
//! them at the minimum; at a higher rate copying pauses now and then to see some.

#[cfg(test)]
mod tests;

use crate::config::{Config, Rate};
use crate::io::{Tag, Time};

const SECOND: u64 = 1_000_000_000;
const INTERVAL: u64 = SECOND / 10;
/// How often to pause to see what requests take alone, for how long, and how
/// long at most if there was none.
const LOOK_EVERY: u64 = SECOND;
const LOOK_FOR: u64 = SECOND / 20;
const LOOK_MOST: u64 = SECOND / 4;
/// A request's time is compared in this unit with its time alone.
const ALONE: u64 = 1024;
/// So much longer, on average, may requests take beside copies.
const TOLERATED: u64 = ALONE * 9 / 8;
/// Longer ones count as this: a single one does not say everything.
const OUTLIER: u64 = ALONE * 100;
/// Nobody notices differences below this, in nanoseconds; of what is quick, below
/// a sixteenth of its time.
const NOISE: u64 = 25_000;

/// What may be noticed from, where a request takes so long alone.
const fn noticed(alone: u64) -> u64 {
    let sixteenth = alone / 16;
    alone + if sixteenth < NOISE { sixteenth } else { NOISE }
}

/// A disk that takes so long for a small request takes hardly longer for a large
/// one (it has to turn, say), so that pieces are the worse for everybody.
const SLOW: u64 = SECOND / 1000;
/// How many sorts of requests there are: four kinds of three sizes.
const SORTS: usize = 12;

/// What a request is, as far as its time depends on that.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A read that needs the destination only.
    Read,
    /// A read that needs the source, too.
    RemoteRead,
    /// A write.
    Write,
    /// A flush.
    Flush,
}

/// A request that is timed.
#[derive(Clone, Copy, Debug)]
struct Sample {
    tag: Tag,
    begun: Time,
    sort: usize,
    alone: bool,
}

#[derive(Debug)]
pub(crate) struct Pace {
    configured: Rate,
    /// See [`Config::piece_blocks`], and what there are of a region.
    piece_least: u64,
    piece_most: u64,
    /// Bytes per second; `None` while the guest asks for nothing.
    allowed: Option<u64>,
    piece: u64,
    /// Mean bytes per second that were copied.
    mean: u64,
    budget: i64,
    refilled: Time,
    // The pause to look at requests alone: when it began, whether it goes on,
    // until when, and whether there was one since its beginning.
    looked: Time,
    looking: bool,
    look_until: Time,
    seen: bool,
    interval: Time,
    // In this interval: bytes, whether the budget had to be waited for, whether
    // the guest asked for anything, and how much longer its requests took.
    copied: u64,
    held: bool,
    asked: bool,
    slowdown: u64,
    samples: u64,
    sample: Option<Sample>,
    /// Mean time of a request of each sort without copies; 0 if unknown.
    alone: [u64; SORTS],
}

impl Pace {
    pub(crate) fn new(config: &Config) -> Self {
        let piece = u64::from(config.piece_blocks);
        Self {
            configured: config.rate,
            piece_least: piece,
            piece_most: piece.max(config.region_blocks.into()),
            allowed: None,
            piece,
            mean: 0,
            budget: 0,
            refilled: Time(0),
            looked: Time(0),
            looking: false,
            look_until: Time(0),
            seen: false,
            interval: Time(0),
            copied: 0,
            held: false,
            asked: false,
            slowdown: 0,
            samples: 0,
            sample: None,
            alone: [0; SORTS],
        }
    }

    pub(crate) const fn configure(&mut self, rate: Rate) {
        self.configured = rate;
    }

    /// How many blocks of a copy to write at once; `None` for all of them.
    pub(crate) fn piece(&self) -> Option<u64> {
        let small = [Kind::Read, Kind::Write].map(|kind| self.alone[kind as usize * 3]);
        let is_slow = small.into_iter().any(|alone| alone > SLOW);
        self.allowed.filter(|_| !is_slow).map(|_| self.piece)
    }

    /// Bytes per second at present.
    pub(crate) fn rate(&self) -> Option<u64> {
        let allowed = self.allowed.map(|rate| rate.max(self.configured.minimum));
        match (allowed, self.configured.limit) {
            (Some(allowed), Some(limit)) => Some(allowed.min(limit)),
            (allowed, limit) => allowed.or(limit),
        }
    }

    /// A request of the guest has come, of so many bytes; alone, if nothing is
    /// being copied.
    #[inline]
    pub(crate) fn begun(&mut self, now: Time, tag: Tag, kind: Kind, length: u64, alone: bool) {
        self.asked = true;
        if self.allowed.is_none() {
            self.allowed = Some(self.configured.minimum);
        }
        if self.sample.is_none() {
            let size = usize::from(length > 16 << 10) + usize::from(length > 128 << 10);
            self.sample = Some(Sample {
                tag,
                begun: now,
                sort: kind as usize * 3 + size,
                alone,
            });
        }
    }

    /// A request has ended.
    #[inline]
    pub(crate) fn ended(&mut self, now: Time, tag: Tag) {
        if let Some(sample) = self.sample.filter(|sample| sample.tag == tag) {
            self.sample = None;
            let time = now.since(sample.begun);
            if sample.alone {
                let alone = &mut self.alone[sample.sort];
                *alone = if *alone == 0 {
                    time.max(1)
                } else {
                    (*alone * 7 + time) / 8
                };
                self.seen = true;
                // What a pause shows says nothing of the time between pauses.
                if self.looking {
                    return;
                }
            }
            self.compare(sample.sort, time);
        }
    }

    fn compare(&mut self, sort: usize, time: u64) {
        let alone = self.alone[sort];
        if alone > 0 {
            let slowdown = u128::from(time) * u128::from(ALONE) / u128::from(noticed(alone));
            self.slowdown += u64::try_from(slowdown).unwrap_or(OUTLIER).min(OUTLIER);
            self.samples += 1;
        }
    }

    /// Whether something may be copied now.
    pub(crate) fn may_copy(&mut self, now: Time) -> bool {
        self.adapt(now);
        if self.looks(now) {
            return false;
        }
        let Some(rate) = self.rate() else {
            self.refilled = now;
            return true;
        };
        let earned = u128::from(rate) * u128::from(now.since(self.refilled)) / u128::from(SECOND);
        if earned > 0 {
            self.refilled = now;
            // Little is saved up: what is copied at once disturbs most. But who
            // is late does not lose any of the minimum.
            let most = (rate / 50).max(self.configured.minimum.min(rate) / 3);
            let most = i64::try_from(most).unwrap_or(i64::MAX);
            self.budget = i64::try_from(earned)
                .unwrap_or(i64::MAX)
                .saturating_add(self.budget)
                .min(most);
        }
        self.held |= self.budget < 0;
        self.budget >= 0
    }

    /// When something may be copied, if not now.
    pub(crate) fn may_copy_at(&self) -> Time {
        let looked = if self.looking {
            self.look_until
        } else {
            self.refilled
        };
        let (Some(rate), true) = (self.rate(), self.budget < 0) else {
            return looked;
        };
        let wait =
            u128::from(self.budget.unsigned_abs()) * u128::from(SECOND) / u128::from(rate.max(1));
        let wait = u64::try_from(wait).unwrap_or(u64::MAX).saturating_add(1);
        looked.max(self.refilled.after(wait))
    }

    /// So many bytes are being copied.
    pub(crate) fn spend(&mut self, bytes: u64) {
        if let Some(sample) = &mut self.sample {
            sample.alone = false;
        }
        self.copied += bytes;
        if self.rate().is_some() {
            self.budget = self.budget.saturating_sub_unsigned(bytes);
        } else {
            self.budget = 0;
        }
    }

    /// Whether this is a pause to look at requests alone.
    fn looks(&mut self, now: Time) -> bool {
        let least = self.looked.after(LOOK_FOR);
        self.look_until = if now < least || self.seen {
            least
        } else {
            self.looked.after(LOOK_MOST)
        };
        self.looking &= self.allowed.is_some() && now < self.look_until;
        self.looking
    }

    fn adapt(&mut self, now: Time) {
        let elapsed = now.since(self.interval);
        if elapsed < INTERVAL {
            return;
        }
        if let Some(sample) = self.sample {
            // One that has taken too long already counts before it ends.
            let time = now.since(sample.begun);
            if time > noticed(self.alone[sample.sort]) * TOLERATED / ALONE {
                self.compare(sample.sort, time);
            }
        }
        let measured =
            u64::try_from(u128::from(self.copied) * u128::from(SECOND) / u128::from(elapsed))
                .unwrap_or(u64::MAX);
        let too_slow = self.slowdown > self.samples * TOLERATED;
        // Copies begin one by one, and an interval may have seen none.
        self.mean = (self.mean * 7 + measured) / 8;
        if !self.held && self.mean < self.configured.minimum {
            self.piece = (self.piece * 2).min(self.piece_most);
        } else if too_slow {
            self.piece = (self.piece / 2).max(self.piece_least);
        }
        self.allowed = self.allowed.and_then(|rate| {
            if !self.asked && self.sample.is_none() {
                None
            } else if too_slow {
                let rate = rate.min(measured.max(1 << 20));
                Some((rate / 10 * 7).max(self.configured.minimum))
            } else if self.samples > 0 && self.held {
                Some(rate.saturating_add(rate / 10 + (1 << 20)))
            } else {
                Some(rate)
            }
        });
        if now.since(self.looked) >= LOOK_EVERY {
            // Near the minimum requests are mostly alone anyway.
            let rate = self.allowed.unwrap_or(0);
            self.looking = rate / 2 > self.configured.minimum || !self.seen;
            self.looked = now;
            self.seen = false;
        }
        self.interval = now;
        self.copied = 0;
        self.held = false;
        self.asked = false;
        self.slowdown = 0;
        self.samples = 0;
    }
}
