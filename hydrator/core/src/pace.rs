// SPDX-License-Identifier: Apache-2.0

//! How fast to copy: a budget that shrinks when the guest's latency rises.
//!
//! A tenth of a second at a time: if the guest's requests take more than twice
//! as long as they do at best, the rate is cut by three tenths, else it grows by
//! a tenth; without requests of the guest there is no limit but the configured
//! one. It never falls below the configured minimum, so every move ends.

use crate::{Rate, Tag, Time};

const SECOND: u64 = 1_000_000_000;
const INTERVAL: u64 = SECOND / 10;
/// Latency above twice the best by less than this is noise, in nanoseconds.
const NOISE: u64 = 200_000;

#[derive(Debug)]
pub(crate) struct Pace {
    configured: Rate,
    /// Bytes per second; `None` while the guest is not disturbed.
    allowed: Option<u64>,
    budget: i64,
    refilled: Time,
    interval: Time,
    copied: u64,
    sample: Option<(Tag, Time)>,
    samples: u32,
    latency: u64,
    best: u64,
}

impl Pace {
    pub(crate) const fn new(configured: Rate) -> Self {
        Self {
            configured,
            allowed: None,
            budget: 0,
            refilled: Time(0),
            interval: Time(0),
            copied: 0,
            sample: None,
            samples: 0,
            latency: 0,
            best: u64::MAX,
        }
    }

    pub(crate) const fn configure(&mut self, rate: Rate) {
        self.configured = rate;
    }

    /// Bytes per second at present.
    pub(crate) fn rate(&self) -> Option<u64> {
        let allowed = self.allowed.map(|rate| rate.max(self.configured.minimum));
        match (allowed, self.configured.limit) {
            (Some(allowed), Some(limit)) => Some(allowed.min(limit)),
            (allowed, limit) => allowed.or(limit),
        }
    }

    /// A request of the guest that needs the destination only has come.
    #[inline]
    pub(crate) fn begun(&mut self, now: Time, tag: Tag) {
        if self.sample.is_none() {
            self.sample = Some((tag, now));
        }
    }

    /// A request has ended.
    #[inline]
    pub(crate) fn ended(&mut self, now: Time, tag: Tag) {
        if let Some((sampled, begun)) = self.sample {
            if sampled == tag {
                self.sample = None;
                self.samples += 1;
                let latency = now.since(begun);
                self.best = self.best.min(latency);
                self.latency = if self.latency == 0 {
                    latency
                } else {
                    (self.latency * 7 + latency) / 8
                };
            }
        }
    }

    /// Whether something may be copied now.
    pub(crate) fn may_copy(&mut self, now: Time) -> bool {
        self.adapt(now);
        let Some(rate) = self.rate() else {
            self.refilled = now;
            return true;
        };
        let earned = u128::from(rate) * u128::from(now.since(self.refilled)) / u128::from(SECOND);
        if earned > 0 {
            self.refilled = now;
            // Saved up for at most a tenth of a second.
            let most = i64::try_from(rate / 10).unwrap_or(i64::MAX);
            self.budget = i64::try_from(earned)
                .unwrap_or(i64::MAX)
                .saturating_add(self.budget)
                .min(most);
        }
        self.budget >= 0
    }

    /// When something may be copied, if not now.
    pub(crate) fn may_copy_at(&self) -> Time {
        let (Some(rate), true) = (self.rate(), self.budget < 0) else {
            return self.refilled;
        };
        let wait =
            u128::from(self.budget.unsigned_abs()) * u128::from(SECOND) / u128::from(rate.max(1));
        self.refilled
            .after(u64::try_from(wait).unwrap_or(u64::MAX).saturating_add(1))
    }

    /// So many bytes are being copied.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.copied += bytes;
        if self.rate().is_some() {
            self.budget -= bytes as i64;
        } else {
            self.budget = 0;
        }
    }

    fn adapt(&mut self, now: Time) {
        let elapsed = now.since(self.interval);
        if elapsed < INTERVAL {
            return;
        }
        let measured =
            u64::try_from(u128::from(self.copied) * u128::from(SECOND) / u128::from(elapsed))
                .unwrap_or(u64::MAX);
        let disturbed =
            self.samples > 0 && self.latency > self.best.saturating_mul(2).saturating_add(NOISE);
        if self.samples == 0 {
            self.allowed = None;
            self.latency = 0;
        } else if disturbed {
            let rate = self.allowed.unwrap_or(measured).min(measured.max(1 << 20));
            self.allowed = Some((rate / 10 * 7).max(self.configured.minimum));
        } else if let Some(rate) = self.allowed {
            self.allowed = Some(rate + rate / 10 + (1 << 20));
        }
        // What was best once may never come again: forget it slowly.
        if self.best != u64::MAX {
            self.best += self.best / 64 + 1;
        }
        self.interval = now;
        self.copied = 0;
        self.samples = 0;
    }
}
