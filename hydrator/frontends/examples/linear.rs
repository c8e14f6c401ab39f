// SPDX-License-Identifier: Apache-2.0
//! Shows one disk through a frontend: `linear DISK ublk [N]`,
//! `linear DISK nbd [N]`, `linear DISK socket PATH` or `linear DISK vhost PATH`.
//! Killed and started anew with the device's number, it takes the device over.
//! SIGTERM removes it.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use localstor_hydrator_disks::{Access, Disk, Memory, Owner, Ring};
use localstor_hydrator_frontends::linear::Linear;
use localstor_hydrator_frontends::nbd::Nbd;
use localstor_hydrator_frontends::ublk::{Settings, Ublk};
use localstor_hydrator_frontends::vhost::VhostUserBlk;
use localstor_hydrator_frontends::{Frontend, Geometry, Stage};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [disk, kind, ref rest @ ..] => match serve(Path::new(disk), kind, rest) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("linear: {error}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: linear DISK ublk|nbd [N] | linear DISK socket|vhost PATH");
            ExitCode::FAILURE
        }
    }
}

fn serve(path: &Path, kind: &str, rest: &[&str]) -> Result<(), Box<dyn std::error::Error>> {
    let ended = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&ended))?;
    let mut ring = Ring::new(256, false)?;
    let disk = Disk::open(path, Access::Exclusive(Duration::from_secs(10)), &mut ring)?;
    let geometry = Geometry {
        size: disk.size(),
        logical_block: disk.logical_block(),
    };
    let number = || rest.first().map(|number| number.parse()).transpose();
    let settings = Settings {
        number: if kind == "ublk" { number()? } else { None },
        identity: 1,
        geometry,
        depth: 64,
        longest: 256 << 10,
    };
    let needed = [
        Ublk::memory(&settings),
        Nbd::memory(),
        VhostUserBlk::memory(),
    ];
    let mut memory = Memory::new(needed.into_iter().max().unwrap_or(0))?;
    ring.register_memory(memory.whole());
    let mut frontend: Box<dyn Frontend> = match (kind, rest.first()) {
        ("ublk", _) => Box::new(Ublk::start(&settings, &mut ring, &mut memory, |_| Ok(()))?),
        ("nbd", _) => Box::new(Nbd::kernel(
            number()?,
            "linear",
            geometry,
            &mut ring,
            &mut memory,
            |_| Ok(true),
        )?),
        ("socket", Some(path)) => Box::new(Nbd::listen(
            Path::new(path),
            geometry,
            &mut ring,
            &mut memory,
        )?),
        ("vhost", Some(path)) => Box::new(VhostUserBlk::listen(
            Path::new(path),
            "linear",
            geometry,
            &mut ring,
            &mut memory,
        )?),
        _ => return Err(format!("{kind} is no frontend, or lacks its path").into()),
    };
    let mut engine = Linear::new(disk);
    let mut arrivals = Vec::new();
    let mut shown = false;
    while frontend.stage() != Stage::Gone {
        if frontend.stage() == Stage::Ready && !shown {
            println!("{}", frontend.device().display());
            shown = true;
        }
        if ended.swap(false, Ordering::Relaxed) {
            frontend.stop(&mut ring)?;
        }
        ring.wait(Some(Duration::from_millis(100)))?;
        while let Some(event) = ring.next_event() {
            match event.token.owner() {
                Owner::Engine => {
                    if let Some((tag, outcome)) = engine.on_event(&mut ring, event) {
                        frontend.complete(&mut ring, tag, outcome, &mut arrivals);
                    }
                }
                Owner::Frontend => frontend.on_event(&mut ring, event, &mut arrivals)?,
                _ => {}
            }
            for arrival in arrivals.drain(..) {
                engine.submit(&mut ring, arrival);
            }
        }
    }
    Ok(())
}
