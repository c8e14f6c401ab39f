// SPDX-License-Identifier: Apache-2.0
//! What a power cut makes of writes that were not flushed.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// How a power cut treats writes that were not flushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lose {
    /// All of them reach the disk.
    Keep,
    /// None of them does.
    Drop,
    /// Some sectors of each do.
    Tear,
    /// Any of the three, each write for itself.
    #[default]
    Random,
}

/// What becomes of one write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is on the disk.
    Kept,
    /// It is gone.
    Dropped,
    /// Only the sectors marked `true` are on the disk, and not all are.
    Torn(Vec<bool>),
}

/// Decides the fates of the writes of one power cut.
///
/// The same seed and way, asked for the same writes in the same order, give
/// the same fates: on every machine, in every version.
pub struct Fates {
    lose: Lose,
    random: ChaCha8Rng,
    kept: f64,
    torn: f64,
}

impl Fates {
    /// Begin a power cut.
    pub fn new(seed: u64, lose: Lose) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        // If every write had the same odds in every cut, hardly any cut
        // would lose just one write of many, or spare just one.
        let (kept, torn) = (random.random(), random.random());
        Fates {
            lose,
            random,
            kept,
            torn,
        }
    }

    /// The fate of the next write, of so many sectors.
    pub fn next(&mut self, sectors: usize) -> Fate {
        match self.lose {
            Lose::Keep => Fate::Kept,
            Lose::Drop => Fate::Dropped,
            Lose::Tear => self.tear(sectors),
            Lose::Random if self.random.random_bool(self.kept) => Fate::Kept,
            Lose::Random if self.random.random_bool(self.torn) => self.tear(sectors),
            Lose::Random => Fate::Dropped,
        }
    }

    fn tear(&mut self, sectors: usize) -> Fate {
        let survivors: Vec<bool> = (0..sectors).map(|_| self.random.random()).collect();
        match survivors.iter().filter(|survives| **survives).count() {
            0 => Fate::Dropped,
            count if count == sectors => Fate::Kept,
            _ => Fate::Torn(survivors),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fates(seed: u64, lose: Lose) -> Vec<Fate> {
        let mut fates = Fates::new(seed, lose);
        (1..100).map(|sectors| fates.next(sectors)).collect()
    }

    #[test]
    fn a_seed_decides_the_same_each_time() {
        assert_eq!(fates(7, Lose::Random), fates(7, Lose::Random));
        assert_ne!(fates(7, Lose::Random), fates(8, Lose::Random));
    }

    /// A seed from an old log must mean the same with a new version.
    #[test]
    fn a_seed_decides_the_same_in_every_version() {
        let mut fates = Fates::new(1, Lose::Tear);
        let torn = vec![false, true, false, false, true, false, true, true];
        assert_eq!(Fate::Torn(torn), fates.next(8));
    }

    #[test]
    fn keep_keeps_and_drop_drops() {
        assert!(fates(1, Lose::Keep).iter().all(|fate| *fate == Fate::Kept));
        assert!(
            fates(1, Lose::Drop)
                .iter()
                .all(|fate| *fate == Fate::Dropped)
        );
    }

    #[test]
    fn a_single_sector_is_never_torn() {
        for seed in 0..100 {
            assert!(!matches!(
                Fates::new(seed, Lose::Tear).next(1),
                Fate::Torn(_)
            ));
        }
    }

    #[test]
    fn seeds_differ_in_how_much_they_lose() {
        let kept = |seed| {
            fates(seed, Lose::Random)
                .iter()
                .filter(|fate| **fate == Fate::Kept)
                .count()
        };
        let counts: Vec<usize> = (0..200).map(kept).collect();
        assert!(counts.iter().any(|count| *count < 5));
        assert!(counts.iter().any(|count| *count > 90));
    }
}
