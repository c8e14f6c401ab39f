// SPDX-License-Identifier: Apache-2.0
//! How fast the copy has been of late.

use std::collections::VecDeque;

use localstor_hydrator_core::Time;

/// Over how long, in seconds.
const WINDOW: usize = 10;
const SECOND: u64 = 1_000_000_000;

/// The amount copied, second by second.
#[derive(Debug, Default)]
pub(crate) struct Speed {
    samples: VecDeque<(Time, u64)>,
}

impl Speed {
    /// So many bytes have been copied by now.
    pub(crate) fn sample(&mut self, now: Time, copied: u64) {
        let due = self
            .samples
            .back()
            .is_none_or(|(last, _)| now.since(*last) >= SECOND);
        if due {
            if self.samples.len() > WINDOW {
                self.samples.pop_front();
            }
            self.samples.push_back((now, copied));
        }
    }

    /// Bytes per second.
    pub(crate) fn rate(&self, now: Time, copied: u64) -> u64 {
        let Some((first, before)) = self.samples.front() else {
            return 0;
        };
        let nanoseconds = u128::from(now.since(*first).max(1));
        let bytes = u128::from(copied.saturating_sub(*before));
        u64::try_from(bytes * u128::from(SECOND) / nanoseconds).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_seconds_count() {
        let mut speed = Speed::default();
        assert_eq!(speed.rate(Time(5), 100), 0);
        let mut copied = 0;
        for second in 0..100 {
            copied += if second < 50 { 1000 } else { 10 };
            speed.sample(Time(second * SECOND), copied);
        }
        assert_eq!(speed.rate(Time(99 * SECOND), copied), 10);
    }
}
