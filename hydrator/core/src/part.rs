// SPDX-License-Identifier: Apache-2.0

//! What of the metadata can be lost.

use core::fmt;
use core::str::FromStr;

/// A part of the metadata that is lost or kept for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The newest superblock.
    Superblock,
    /// A block of the journal, by its place in the ring.
    Journal(u64),
    /// A sector of the bitmap, counted from the bitmap's beginning.
    Bitmap(u64),
}

impl fmt::Display for Part {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superblock => formatter.write_str("superblock"),
            Self::Journal(place) => write!(formatter, "journal:{place}"),
            Self::Bitmap(sector) => write!(formatter, "bitmap:{sector}"),
        }
    }
}

/// The text names no part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a part is \"superblock\", \"journal:NUMBER\" or \"bitmap:NUMBER\"")]
pub struct NoPart;

impl FromStr for Part {
    type Err = NoPart;

    fn from_str(text: &str) -> Result<Self, NoPart> {
        if text == "superblock" {
            return Ok(Self::Superblock);
        }
        let (area, number) = text.split_once(':').ok_or(NoPart)?;
        let number = number.parse().map_err(|_| NoPart)?;
        match area {
            "journal" => Ok(Self::Journal(number)),
            "bitmap" => Ok(Self::Bitmap(number)),
            _ => Err(NoPart),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_read_as_it_is_written() {
        for part in [Part::Superblock, Part::Journal(17), Part::Bitmap(0)] {
            assert_eq!(part.to_string().parse(), Ok(part));
        }
        for wrong in ["", "journal", "journal:x", "bitmap:-1", "sector:3"] {
            assert_eq!(wrong.parse::<Part>(), Err(NoPart), "{wrong}");
        }
    }
}
