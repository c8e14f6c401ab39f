// SPDX-License-Identifier: Apache-2.0
//! What the command line understands.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use localstor_hydrator_core as core;
use serde::{Deserialize, Serialize};

/// The longest pause, in seconds: a guest waits for its end.
pub const LONGEST_PAUSE: u64 = 60;

/// The longest that a processor is kept busy for nothing, in microseconds.
pub const LONGEST_POLL: u64 = 1000;

/// Serves a volume while its data moves to this node.
///
/// One process serves one moving volume. It shows a block device whose writes
/// go to the destination and whose reads come from there, or from the source
/// as long as it is not there yet, and copies the rest in the background. After
/// a kill or a power cut, start it again as it was: it takes over the device
/// and loses nothing that was acknowledged as durable.
///
/// The environment variable LOCALSTOR_LOG sets what is logged: error, warn,
/// info (the default), debug or trace.
#[derive(Debug, Parser)]
#[command(name = "localstor-hydrator", version)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a volume; print the device's path when it is usable
    Run(Box<Launch>),
    /// Serve a volume, and again whenever that ends before the move does
    #[command(hide = true)]
    Supervise(Box<Launch>),
    /// Show how far the move is, as JSON
    Status(Place),
    /// Begin to copy: from now on the source does not change
    Start(Place),
    /// Change how fast to copy
    Throttle(Throttle),
    /// Ask the source again at once, also for sectors that it could not read
    Retry(Place),
    /// Begin nothing on destination and metadata, and answer the guest nothing,
    /// until "resume" or the end of some seconds; return when nothing is in
    /// flight on them, so that both can be copied as they are at one moment
    Pause(Pause),
    /// Go on after "pause"; exit status 1 if that has ended by itself: what was
    /// copied meanwhile counts for nothing
    Resume(Place),
    /// End a move that is complete: remove the device, end the process
    Finish(Place),
    /// End a move as it is: remove the device, end the process. Removes what a
    /// process has left that died for good, too
    Abort(Place),
    /// Print the metadata of a move that nobody serves, as JSON
    Dump(Metadata),
    /// Say what is wrong with such metadata; exit status 2 if anything is
    Check(Metadata),
    /// Mend such metadata where they are damaged, without what is lost by that;
    /// exit status 2, and nothing is changed, unless exactly that is accepted
    Repair(Repair),
    /// Copy the metadata of a move that is paused, or that nobody serves, for
    /// another move, which then finds on a copy of the destination what this one
    /// would find. Who copies sees to it that they don't change meanwhile
    Copy(Copying),
    /// Print the manual page
    #[command(hide = true)]
    Man(Page),
}

/// Where a running hydrator is found.
#[derive(Args, Debug)]
pub struct Place {
    /// The directory that was given to "run"
    #[arg(value_name = "DIRECTORY")]
    pub runtime: PathBuf,
}

/// How fast to copy.
#[derive(Args, Debug)]
pub struct Throttle {
    /// Where it is found.
    #[command(flatten)]
    pub place: Place,
    /// At most so many bytes per second (K, M, G: binary units); as fast as the
    /// guest's latency allows if not given
    #[arg(long, value_parser = bytes)]
    pub limit: Option<u64>,
    /// So many bytes per second whatever the guest does
    #[arg(long, value_parser = bytes)]
    pub minimum: Option<u64>,
}

/// For how long to pause.
#[derive(Args, Debug)]
pub struct Pause {
    /// Where it is found.
    #[command(flatten)]
    pub place: Place,
    /// Go on by itself after so many, counted from the request on: 1 to 60
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=LONGEST_PAUSE))]
    pub seconds: u64,
}

/// Metadata on a disk.
#[derive(Args, Debug)]
pub struct Metadata {
    /// The metadata device
    pub metadata: PathBuf,
}

/// Metadata that are damaged.
#[derive(Args, Debug)]
pub struct Repair {
    /// Where they are.
    #[command(flatten)]
    pub disk: Metadata,
    /// What is lost for good, as "check" names it; once for each
    #[arg(long, value_name = "PART", required = true)]
    pub accept_loss: Vec<core::Part>,
}

/// Metadata that are copied.
#[derive(Args, Debug)]
pub struct Copying {
    /// Where they are.
    #[command(flatten)]
    pub disk: Metadata,
    /// Id of their move, a UUID; metadata of another move are refused
    #[arg(long = "move", value_name = "UUID", value_parser = move_id)]
    pub move_id: MoveId,
    /// The metadata device to copy them to, whatever is there
    #[arg(long, value_name = "DEVICE")]
    pub to: PathBuf,
    /// Id of the move that they are copied for, a UUID
    #[arg(long, value_name = "UUID", value_parser = move_id)]
    pub new_move: MoveId,
}

/// A manual page.
#[derive(Args, Debug)]
pub struct Page {
    /// That of a command; that of the program if not given
    pub command: Option<String>,
}

/// How the device is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FrontendKind {
    /// ublk where the kernel has it, else nbd
    Auto,
    /// A device of the kernel's ublk driver
    Ublk,
    /// A device of the kernel's NBD client
    Nbd,
    /// An NBD server on the socket "nbd" in the runtime directory
    Socket,
    /// A vhost-user-blk server on the socket "vhost" in the runtime directory,
    /// for a virtual machine
    VhostUserBlk,
}

/// How much of what is copied is read again and compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// Nothing
    #[default]
    Off,
    /// 1 MiB of each 64 MiB of the volume, in another place for each move
    Sample,
    /// All of it
    Full,
}

impl From<Verify> for core::Verify {
    fn from(wanted: Verify) -> core::Verify {
        match wanted {
            Verify::Off => core::Verify::Off,
            Verify::Sample => core::Verify::Sample,
            Verify::Full => core::Verify::Full,
        }
    }
}

/// Where to serve a volume: in the foreground, or behind a supervisor.
///
/// Exit status: 0 when the move is ended (with --detach: when the device is
/// usable), 1 after a failure, 2 for wrong arguments, 3 when the device was
/// left to a successor after SIGTERM, 4 when the patience of --detach has ended.
#[derive(Args, Clone, Debug)]
pub struct Launch {
    /// How to serve it.
    #[command(flatten)]
    pub settings: Settings,
    /// Serve in the background and start again whatever dies, until the move is
    /// ended; return when the device is usable, and print its path. If that is
    /// so already, do nothing else. Logs to the file "log" in the runtime
    /// directory
    #[arg(long)]
    pub detach: bool,
    /// How long --detach waits for the device
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    pub patience: Duration,
}

/// How to serve a volume.
#[derive(Args, Clone, Debug)]
pub struct Settings {
    /// Directory for the control socket and the link "device" to the device;
    /// made if it is missing. It must not outlive a reboot: /run is right
    #[arg(long, value_name = "DIRECTORY")]
    pub runtime: PathBuf,
    /// Id of the move, a UUID; metadata of another move are refused
    #[arg(long = "move", value_name = "UUID", value_parser = move_id)]
    pub move_id: MoveId,
    /// The destination's logical volume
    #[arg(long, value_name = "DEVICE")]
    pub data: PathBuf,
    /// The device for map and journal
    #[arg(long, value_name = "DEVICE")]
    pub metadata: PathBuf,
    /// The volume as the source node exports it
    #[arg(long, value_name = "DEVICE")]
    pub source: PathBuf,
    /// Size of the volume; that of the source if not given
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub size: Option<u64>,
    /// The move may be new: if the metadata device begins with zeros, format it
    #[arg(long)]
    pub new: bool,
    /// The destination is a thin volume of a pool that zeroes: it reads zeros
    /// where it was never written, or was discarded. Heeded when formatting
    /// only: the metadata remember it
    #[arg(long)]
    pub zeroed: bool,
    /// How to show the device
    #[arg(long, value_enum, default_value_t = FrontendKind::Auto)]
    pub frontend: FrontendKind,
    /// Directory in which the kernel's device is marked before it has content
    /// and until it is removed, by a link with its name ("ublkb0", "nbd3") to
    /// the runtime directory, for a rule of udev that keeps others away from
    /// it; no mark if not given
    #[arg(long, value_name = "DIRECTORY")]
    pub marks: Option<PathBuf>,
    /// Copy at most so many bytes per second
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub limit: Option<u64>,
    /// Copy so many bytes per second whatever the guest does
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "10M")]
    pub minimum: u64,
    /// Read what was copied again, from the destination and from the source,
    /// and compare it before it counts as local. What differs is copied again;
    /// if it differs again it stays on the source, where it is read from, and
    /// the move does not end: the state is "differing". What was recorded as
    /// local before, with less verification, is not compared
    #[arg(long, value_enum, value_name = "HOW MUCH", default_value_t = Verify::Off)]
    pub verify: Verify,
    /// Fail reads that have waited so long for the source; never if not given
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub source_timeout: Option<Duration>,
    /// Look for so long whether something has happened before going to sleep, 0
    /// to 1000, while requests come that fast. A processor is busy meanwhile;
    /// whether answers are sooner depends on disks and processors. Nothing with
    /// a single processor
    #[arg(long, value_name = "MICROSECONDS", value_parser = microseconds, default_value = "0")]
    pub poll: Duration,
}

/// A move's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveId(pub [u8; 16]);

impl std::fmt::Display for MoveId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                formatter.write_str("-")?;
            }
            write!(formatter, "{byte:02x}")?;
        }
        Ok(())
    }
}

pub(crate) fn move_id(text: &str) -> Result<MoveId, String> {
    let wrong = || format!("\"{text}\" is no UUID");
    let digits: Vec<u32> = text
        .chars()
        .filter(|character| *character != '-')
        .map(|character| character.to_digit(16).ok_or_else(wrong))
        .collect::<Result<_, _>>()?;
    if digits.len() != 32 {
        return Err(wrong());
    }
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = (pair[0] << 4 | pair[1]) as u8;
    }
    Ok(MoveId(id))
}

fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("\"{text}\" is no number of bytes: use digits, and K, M, G or T");
    let shift = match text.chars().last() {
        Some('K' | 'k') => 10,
        Some('M' | 'm') => 20,
        Some('G' | 'g') => 30,
        Some('T' | 't') => 40,
        _ => 0,
    };
    let digits = if shift == 0 {
        text
    } else {
        &text[..text.len() - 1]
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .map(Duration::from_secs)
        .map_err(|_| format!("\"{text}\" is no number of seconds"))
}

fn microseconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(number @ 0..=LONGEST_POLL) => Ok(Duration::from_micros(number)),
        _ => Err(format!(
            "\"{text}\" is no number of microseconds from 0 to {LONGEST_POLL}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_move_id_is_read_and_written_as_a_uuid() {
        let text = "a6f07385-e34d-48a1-930e-7179e7b63cdb";
        assert_eq!(move_id(text).unwrap().to_string(), text);
        assert_eq!(move_id(&text.replace('-', "")).unwrap().to_string(), text);
        for wrong in ["", "a6f07385", &text.replace('a', "x"), &format!("{text}0")] {
            assert!(move_id(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_processor_is_busy_for_long() {
        assert_eq!(microseconds("20"), Ok(Duration::from_micros(20)));
        for wrong in ["", "1001", "-1", "20us"] {
            assert!(microseconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(bytes("512"), Ok(512));
        assert_eq!(bytes("10M"), Ok(10 << 20));
        assert_eq!(bytes("2t"), Ok(2 << 40));
        for wrong in ["", "M", "1.5G", "-1", "99999999999T", "1Ä"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
