// SPDX-License-Identifier: Apache-2.0
//! The program `localstor-lab-disk`.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::{fs, io, thread};

use clap::Parser;
use localstor_lab_disk::cache::{self, Cache};
use localstor_lab_disk::disk::Disk;
use localstor_lab_disk::{control, session};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;

/// A virtual disk with a volatile write cache.
///
/// A User Mode Linux kernel uses it with "virtio_uml.device=SOCKET:2" on its
/// command line and the module virtio_blk; after it has ended it may connect
/// again. SIGTERM makes everything durable and ends the disk.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// What is durable; its size is the disk's.
    #[arg(long)]
    file: PathBuf,
    /// Where a node connects by vhost-user.
    #[arg(long)]
    socket: PathBuf,
    /// Where the power is cut: one JSON object a line.
    #[arg(long)]
    control: PathBuf,
    /// How the node's kernel knows the disk, up to 20 characters.
    #[arg(long, default_value = "")]
    id: String,
    /// MiB that are held before the oldest are made durable.
    #[arg(long, default_value_t = 64)]
    cache: u32,
    /// Bytes of a logical block: 512 to 4096.
    #[arg(long, default_value_t = 512)]
    block_size: u32,
}

#[derive(Debug, Error)]
enum Error {
    #[error(transparent)]
    Disk(#[from] cache::Error),
    #[error("the socket {path} can't be made: {source}")]
    Socket { path: PathBuf, source: io::Error },
    #[error("signals can't be handled: {0}")]
    Signals(io::Error),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("localstor-lab-disk: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(Error::Signals)?;
    let cache = Cache::open(
        &arguments.file,
        u64::from(arguments.cache) << 20,
        arguments.block_size.into(),
    )?;
    let disk = Arc::new(Disk::new(cache));
    let controls = bind(&arguments.control)?;
    let nodes = bind(&arguments.socket)?;
    let controlled = disk.clone();
    thread::spawn(move || fatal(control::serve(&controlled, &controls)));
    let (served, id) = (disk.clone(), arguments.id.clone());
    thread::spawn(move || {
        loop {
            fatal(session::serve(&served, &id, &nodes));
        }
    });
    tracing::info!(
        "{} is ready, {} bytes",
        arguments.file.display(),
        disk.status().capacity
    );
    signals.forever().next();
    disk.shut_down()?;
    tracing::info!("everything is durable");
    for path in [&arguments.socket, &arguments.control] {
        // Somebody may have tidied up already.
        let _ = fs::remove_file(path);
    }
    Ok(())
}

/// End with an error: a disk that can't be reached is of no use.
fn fatal<T: std::fmt::Display>(result: Result<(), T>) {
    if let Err(error) = result {
        tracing::error!("{error}");
        std::process::exit(1);
    }
}

fn bind(path: &Path) -> Result<UnixListener, Error> {
    // A disk that was killed has left its socket behind.
    let _ = fs::remove_file(path);
    UnixListener::bind(path).map_err(|source| Error::Socket {
        path: path.into(),
        source,
    })
}
