// SPDX-License-Identifier: Apache-2.0
//! Whether to look for completions for a while before sleeping.

use std::time::Duration;

/// Who sleeps is woken some microseconds late, which is long where a disk takes
/// hardly more. Who looks again and again in place of that has a processor for
/// himself meanwhile. So it is done for `limit` at most, and only while waits
/// are that short: at least half of the last eight.
#[derive(Debug)]
pub(crate) struct Polling {
    limit: Duration,
    // One bit for each of the last eight waits: whether it was short.
    short: u8,
}

impl Polling {
    /// Waits that begin by looking for `limit`.
    pub(crate) fn new(limit: Duration) -> Polling {
        Polling { limit, short: 0 }
    }

    /// How long to look.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Whether to look before sleeping.
    pub(crate) fn pays(&self) -> bool {
        self.short.count_ones() >= u8::BITS / 2
    }

    /// Remembers a wait, by how long it was and whether it began by looking.
    pub(crate) fn note(&mut self, taken: Duration, looked: bool) {
        // One that slept was woken late.
        let long = if looked { self.limit } else { self.limit * 2 };
        self.short = self.short << 1 | u8::from(taken <= long);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(20);
    const SHORT: Duration = Duration::from_micros(12);
    const LONG: Duration = Duration::from_micros(80);

    fn after(waits: &[Duration]) -> bool {
        let mut polling = Polling::new(LIMIT);
        for taken in waits {
            let looked = polling.pays();
            polling.note(*taken, looked);
        }
        polling.pays()
    }

    #[test]
    fn short_waits_pay() {
        assert!(!after(&[]));
        assert!(!after(&[SHORT; 3]));
        assert!(after(&[SHORT; 4]));
    }

    #[test]
    fn every_other_one_is_enough() {
        assert!(after(&[SHORT, LONG].repeat(8)));
        assert!(!after(&[SHORT, LONG, LONG].repeat(8)));
    }

    #[test]
    fn it_ends_with_the_requests() {
        assert!(!after(&[[SHORT; 8].as_slice(), &[LONG; 5]].concat()));
    }

    #[test]
    fn who_has_slept_may_have_been_woken_late() {
        let woken = LIMIT + SHORT;
        let mut polling = Polling::new(LIMIT);
        for _ in 0..4 {
            polling.note(woken, false);
        }
        assert!(polling.pays());
        for _ in 0..5 {
            polling.note(woken, true);
        }
        assert!(!polling.pays());
    }
}
