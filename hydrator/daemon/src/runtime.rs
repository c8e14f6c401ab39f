// SPDX-License-Identifier: Apache-2.0
//! The runtime directory: how others find a hydrator, and whose devices are to
//! be removed when there is none.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use rustix::process::umask;
use tracing::warn;

use crate::ERROR_PREFIX;
use crate::arguments::{MoveId, move_id};

/// The control socket's name.
pub(crate) const CONTROL: &str = "control";
/// The name of the link to the device.
const DEVICE: &str = "device";
/// The name of the NBD socket.
const SOCKET: &str = "nbd";
/// The name of the vhost-user-blk socket.
const VHOST: &str = "vhost";
/// The names of what a supervisor has there: its lock, the log, and the log
/// before that one.
const LOCK: &str = "lock";
const LOG: &str = "log";
const OLD_LOG: &str = "log.old";
/// The name of the file with the id of the move.
const MOVE: &str = "move";

/// The name of the file with blocks of the journal that are being written.
const SPOOL: &str = "spool";

/// How long the log may become, in bytes.
const LONGEST_LOG: u64 = 1 << 20;

/// A runtime directory.
pub(crate) struct Runtime {
    directory: PathBuf,
}

impl Runtime {
    /// Makes it, unless it is there. What this process makes from now on is for
    /// its own user alone: who reaches the sockets has the guest's content.
    pub(crate) fn open(directory: &Path) -> anyhow::Result<Runtime> {
        if let Some(parent) = directory.parent() {
            // Whatever the umask: others could put their own things there.
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(parent)
                .with_context(|| format!("cannot make {}", parent.display()))?;
        }
        umask(Mode::RWXG | Mode::RWXO);
        let runtime = Runtime {
            directory: directory.to_owned(),
        };
        runtime.make()?;
        Ok(runtime)
    }

    fn make(&self) -> anyhow::Result<()> {
        std::fs::create_dir_all(&self.directory)
            .with_context(|| format!("cannot make {}", self.directory.display()))
    }

    /// Where it is.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Takes the supervisor's lock, and leaves its process id there; None if
    /// another process has it.
    pub(crate) fn lock(&self) -> anyhow::Result<Option<File>> {
        let path = self.directory.join(LOCK);
        loop {
            // A move that ends takes the directory away.
            self.make()?;
            let mut file = match File::options().create(true).append(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.with_context(|| format!("cannot open {}", path.display()))?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => return Ok(None),
                other => other.with_context(|| format!("cannot lock {}", path.display()))?,
            }
            let inode = |found: std::fs::Metadata| (found.dev(), found.ino());
            if std::fs::metadata(&path).ok().map(inode) == file.metadata().ok().map(inode) {
                file.set_len(0)
                    .and_then(|()| writeln!(file, "{}", std::process::id()))
                    .with_context(|| format!("cannot write {}", path.display()))?;
                return Ok(Some(file));
            }
        }
    }

    /// Whether a supervisor has its lock on this directory.
    pub(crate) fn is_supervised(directory: &Path) -> bool {
        File::open(directory.join(LOCK)).is_ok_and(|file| {
            flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
        })
    }

    /// Makes the log what this process, and its children, print to.
    pub(crate) fn take_log(&self) -> anyhow::Result<()> {
        let path = self.directory.join(LOG);
        let file = File::options().create(true).append(true).open(&path);
        file.and_then(|file| {
            rustix::stdio::dup2_stdout(&file)?;
            rustix::stdio::dup2_stderr(&file)?;
            Ok(())
        })
        .with_context(|| format!("cannot log to {}", path.display()))
    }

    /// The length of the log, in bytes.
    pub(crate) fn log_size(directory: &Path) -> u64 {
        std::fs::metadata(directory.join(LOG)).map_or(0, |found| found.len())
    }

    /// Begins the log anew when it is long. Its file stays the same, because
    /// processes have it open; what they print meanwhile may be lost.
    pub(crate) fn limit_log(&self) {
        if Runtime::log_size(&self.directory) <= LONGEST_LOG {
            return;
        }
        let (log, old) = (self.directory.join(LOG), self.directory.join(OLD_LOG));
        let renewed = std::fs::copy(&log, &old)
            .and_then(|_| File::options().write(true).open(&log)?.set_len(0));
        if let Err(error) = renewed {
            warn!("cannot begin {} anew: {error}", log.display());
        }
    }

    /// The last error in a log, behind its first `begin` bytes.
    pub(crate) fn last_error(directory: &Path, begin: u64) -> Option<String> {
        let mut file = File::open(directory.join(LOG)).ok()?;
        // It may have begun anew.
        let begin = if file.metadata().ok()?.len() < begin {
            0
        } else {
            begin
        };
        file.seek(SeekFrom::Start(begin)).ok()?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let mut errors = text
            .lines()
            .filter_map(|line| line.strip_prefix(ERROR_PREFIX));
        errors.next_back().map(str::to_owned)
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.directory.join(CONTROL)
    }

    pub(crate) fn spool(&self) -> PathBuf {
        self.directory.join(SPOOL)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join(SOCKET)
    }

    pub(crate) fn vhost(&self) -> PathBuf {
        self.directory.join(VHOST)
    }

    /// The directory of a hydrator that was there, None if it is gone.
    pub(crate) fn find(directory: &Path) -> Option<Runtime> {
        directory.is_dir().then(|| Runtime {
            directory: directory.to_owned(),
        })
    }

    /// The move that is served here, or was.
    pub(crate) fn move_id(&self) -> Option<MoveId> {
        let text = std::fs::read_to_string(self.directory.join(MOVE)).ok()?;
        move_id(text.trim()).ok()
    }

    /// Records the move, before it has a device: by this an abort finds what
    /// is left in the kernel.
    pub(crate) fn record(&self, move_id: MoveId) -> anyhow::Result<()> {
        self.replace(MOVE, |draft| std::fs::write(draft, format!("{move_id}\n")))
    }

    /// Shows the device to others.
    pub(crate) fn show(&self, device: &Path) -> anyhow::Result<()> {
        self.replace(DEVICE, |draft| std::os::unix::fs::symlink(device, draft))
    }

    /// The device that is shown, if one is.
    pub(crate) fn shown(&self) -> Option<PathBuf> {
        std::fs::read_link(self.directory.join(DEVICE)).ok()
    }

    /// Makes a file that is there as a whole, or not at all.
    fn replace(
        &self,
        name: &str,
        make: impl FnOnce(&Path) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        let draft = self.draft(name);
        let path = self.directory.join(name);
        remove(&draft)?;
        make(&draft)
            .and_then(|()| std::fs::rename(&draft, &path))
            .with_context(|| format!("cannot make {}", path.display()))
    }

    fn draft(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.new"))
    }

    /// Removes what is in it, and the directory if nothing else is. The control
    /// socket goes last: nobody begins anew here before the rest is gone.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        for name in [DEVICE, MOVE] {
            remove(&self.draft(name))?;
        }
        for name in [
            DEVICE, MOVE, SPOOL, SOCKET, VHOST, LOG, OLD_LOG, LOCK, CONTROL,
        ] {
            remove(&self.directory.join(name))?;
        }
        let _ = std::fs::remove_dir(&self.directory);
        Ok(())
    }
}

/// Removes a file that may not be there.
pub(crate) fn remove(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_else_may_write_where_the_directory_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let parent = folder.path().join("localstor");
        umask(Mode::empty());
        Runtime::open(&parent.join("volume")).unwrap();
        assert_eq!(std::fs::metadata(parent).unwrap().mode() & 0o022, 0);
    }

    #[test]
    fn an_abort_knows_the_move_whether_there_is_a_device_or_not() {
        const ID: MoveId = MoveId([7; 16]);
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("volume");
        let runtime = Runtime::open(&directory).unwrap();
        assert_eq!(runtime.move_id(), None);
        runtime.record(ID).unwrap();
        assert_eq!(Runtime::find(&directory).unwrap().move_id(), Some(ID));
        for device in ["/dev/ublkb7", "/dev/nbd12"] {
            runtime.show(Path::new(device)).unwrap();
            assert_eq!(runtime.shown().as_deref(), Some(Path::new(device)));
        }
        runtime.remove().unwrap();
        assert!(!directory.exists());
    }
}
