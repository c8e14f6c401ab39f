// SPDX-License-Identifier: Apache-2.0
//! The loop: one thread, one ring, and everything that happens to a volume.
//!
//! The life of a process: lock the disks, open the volume (the core recovers),
//! make the device or take it over, serve, and then one of three ends. A
//! *finish* or an *abort* removes the device. A SIGTERM or SIGINT leaves it to
//! a successor: requests wait until then, as they do after a crash.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use localstor_hydrator_core::{
    Config, Device, Notice, Progress, Rate, Tag, Time, Volume, metadata_size,
};
use localstor_hydrator_disks::{Access, Disk, Memory, Owner, Ring};
use localstor_hydrator_frontends::nbd::Nbd;
use localstor_hydrator_frontends::ublk::{self, Ublk};
use localstor_hydrator_frontends::vhost::VhostUserBlk;
use localstor_hydrator_frontends::{Arrival, Frontend, Geometry, Outcome, Stage};
use tracing::{error, info, warn};

use crate::arguments::{FrontendKind, MoveId, Settings};
use crate::control::{Client, Control};
use crate::engine::{self, Disks, Engine};
use crate::marks::Marks;
use crate::protocol::{Answer, Request, State, Status};
use crate::rate::Speed;
use crate::runtime::Runtime;

/// How long to wait for a predecessor's last write.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests of a ublk device in flight, and the longest, in bytes.
const UBLK_DEPTH: u16 = 64;
const UBLK_LONGEST: u32 = 256 << 10;

/// What is read to see whether there are metadata, in bytes.
const SUPERBLOCKS: usize = 8192;

/// How long to sleep at most, so that signals and time are noticed.
const TICK: Duration = Duration::from_millis(500);

/// linux/prctl.h: others wait for this process when memory is short.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// What ends the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The device goes, too.
    Removal,
    /// The device stays for a successor.
    Departure,
}

struct Server {
    settings: Settings,
    geometry: Geometry,
    ring: Ring,
    memory: Memory,
    runtime: Runtime,
    marks: Marks,
    control: Control,
    engine: Engine,
    frontend: Option<Box<dyn Frontend>>,
    shown: bool,
    started: Instant,
    speed: Speed,
    rate: Rate,
    arrivals: Vec<Arrival>,
    answers: Vec<(Tag, Outcome)>,
    notices: Vec<Notice>,
    // Clients that wait for the start, or for the end, to be recorded.
    starting: Vec<Client>,
    ending: Vec<Client>,
    open: bool,
    begun: bool,
    end: Option<End>,
    closing: bool,
    closed: bool,
}

/// Serves a volume until its end.
///
/// # Errors
/// What can't work, naming the disk or the device; what has failed.
pub fn run(settings: &Settings) -> anyhow::Result<End> {
    let leaving = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&leaving))
            .context("cannot await signals")?;
    }
    let mut server = Server::prepare(settings)?;
    stay_in_memory();
    loop {
        if leaving.swap(false, Ordering::Relaxed) && server.end.is_none() {
            info!("leaving; the device waits for a successor");
            server.end = Some(End::Departure);
        }
        if let Some(end) = server.reached() {
            server.conclude(end)?;
            return Ok(end);
        }
        server.turn()?;
    }
}

impl Server {
    fn prepare(settings: &Settings) -> anyhow::Result<Server> {
        let runtime = Runtime::open(&settings.runtime)?;
        let marks = Marks::open(settings.marks.as_deref(), &settings.runtime)?;
        let mut ring = Ring::new(1024, false).context("cannot make a ring (io_uring)")?;
        let disks = open_disks(settings, &mut ring)?;
        let config = configure(settings, &disks)?;
        let geometry = Geometry {
            size: config.size,
            logical_block: config.logical_block_size,
        };
        let ublk = ublk_settings(settings, None, geometry);
        let frontend = [Nbd::memory(), Ublk::memory(&ublk), VhostUserBlk::memory()];
        let frontend = frontend.into_iter().max().unwrap_or(0);
        let mut memory = Memory::new(SUPERBLOCKS + engine::memory_needed(&config) + frontend)?;
        ring.register_memory(memory.whole());
        let volume = open_volume(settings, &config, &disks, &mut ring, &mut memory)?;
        let engine = Engine::new(volume, &config, disks, &mut memory)?;
        let control = Control::listen(&runtime.control(), &mut ring)?;
        Ok(Server {
            settings: settings.clone(),
            geometry,
            ring,
            memory,
            runtime,
            marks,
            control,
            engine,
            frontend: None,
            shown: false,
            started: Instant::now(),
            speed: Speed::default(),
            rate: config.rate,
            arrivals: Vec::with_capacity(config.requests),
            answers: Vec::with_capacity(config.requests),
            notices: Vec::new(),
            starting: Vec::new(),
            ending: Vec::new(),
            open: false,
            begun: false,
            end: None,
            closing: false,
            closed: false,
        })
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Its end, when nothing is left to be done for it.
    fn reached(&self) -> Option<End> {
        let removed = self
            .frontend
            .as_ref()
            .is_none_or(|frontend| frontend.stage() == Stage::Gone);
        self.end.filter(|end| {
            let closed = self.closed || !self.open;
            closed && (*end == End::Departure || removed)
        })
    }

    /// Waits for something to happen, and deals with all that has.
    fn turn(&mut self) -> anyhow::Result<()> {
        // The core has something to do before anything has happened.
        let patience = if self.begun {
            self.patience()
        } else {
            Duration::ZERO
        };
        self.begun = true;
        self.ring
            .wait(Some(patience))
            .context("the ring has failed")?;
        let now = self.now();
        while let Some(event) = self.ring.next_event() {
            match event.token.owner() {
                Owner::Engine => self.engine.on_event(&mut self.ring, now, event),
                Owner::Frontend => {
                    if let Some(frontend) = &mut self.frontend {
                        frontend.on_event(&mut self.ring, event, &mut self.arrivals)?;
                    }
                }
                Owner::Control => {
                    let mut asked = self.control.on_event(&mut self.ring, event);
                    while let Some((client, request)) = asked {
                        asked = match self.obey(client, &request)? {
                            Some(answer) => self.control.answer(&mut self.ring, client, &answer),
                            None => None,
                        };
                    }
                }
                Owner::Nobody => {}
            }
        }
        // What is answered may make room for what has waited for it.
        loop {
            self.take_arrivals(now);
            let answers = &mut self.answers;
            self.engine.turn(
                &mut self.ring,
                now,
                |_, tag, outcome| answers.push((tag, outcome)),
                &mut self.notices,
            );
            if self.answers.is_empty() {
                break;
            }
            if let Some(frontend) = &mut self.frontend {
                for (tag, outcome) in self.answers.drain(..) {
                    frontend.complete(&mut self.ring, tag, outcome, &mut self.arrivals);
                }
            }
            self.answers.clear();
        }
        self.take_notices()?;
        self.proceed()
    }

    fn patience(&self) -> Duration {
        let now = self.now();
        match self.engine.wake_at() {
            Some(at) => Duration::from_nanos(at.since(now)).min(TICK),
            None => TICK,
        }
    }

    /// Hands requests to the core. Once it is closing they are kept from it:
    /// they wait, unanswered, for a successor.
    fn take_arrivals(&mut self, now: Time) {
        for arrival in self.arrivals.drain(..) {
            if !self.closing {
                self.engine.submit(now, arrival);
            }
        }
    }

    fn take_notices(&mut self) -> anyhow::Result<()> {
        let notices = std::mem::take(&mut self.notices);
        for notice in notices {
            match notice {
                Notice::Open => {
                    info!("the volume is open after {:?}", self.started.elapsed());
                    self.open = true;
                    self.make_device()?;
                }
                Notice::OpenFailed(reason) => {
                    bail!("{}: {reason}", self.settings.metadata.display());
                }
                Notice::Started => {
                    info!("the source does not change any more: copying");
                    for client in std::mem::take(&mut self.starting) {
                        self.answer(client, &Answer::ok())?;
                    }
                }
                Notice::Stalled => warn!(
                    "{} does not answer; what needs it waits",
                    self.settings.source.display()
                ),
                Notice::Resumed => info!("{} answers again", self.settings.source.display()),
                Notice::BadSource { offset, length } => error!(
                    "{}: {length} bytes at {offset} can't be read; reads of them fail",
                    self.settings.source.display()
                ),
                Notice::Extended { size } => info!("the volume has {size} bytes now"),
                Notice::Done => info!("everything is local"),
                Notice::Closed => self.closed = true,
                Notice::Broken(device) => {
                    let path = match device {
                        Device::Data => &self.settings.data,
                        Device::Metadata => &self.settings.metadata,
                        Device::Source => &self.settings.source,
                    };
                    error!("{} has failed; restart when it is mended", path.display());
                }
            }
        }
        Ok(())
    }

    /// Makes the device, or takes over a predecessor's.
    fn make_device(&mut self) -> anyhow::Result<()> {
        let predecessor = self.runtime.predecessor();
        let made = self.make_frontend(predecessor);
        if made.is_err() && predecessor.is_none() {
            self.marks.keep_only(None).context("cannot remove marks")?;
        }
        let frontend = made?;
        self.marks
            .keep_only(Some(frontend.device()))
            .context("cannot remove marks")?;
        // A successor must find it, whatever happens from here on.
        self.runtime
            .show(frontend.device(), self.settings.move_id)?;
        self.frontend = Some(frontend);
        Ok(())
    }

    fn make_frontend(
        &mut self,
        predecessor: Option<(FrontendKind, u32)>,
    ) -> anyhow::Result<Box<dyn Frontend>> {
        let (kind, number) = choose(self.settings.frontend, predecessor);
        let frontend: Box<dyn Frontend> = match kind {
            FrontendKind::Ublk => Box::new(Ublk::start(
                &ublk_settings(&self.settings, number, self.geometry),
                &mut self.ring,
                &mut self.memory,
                |device| self.marks.take(device),
            )?),
            FrontendKind::Nbd => Box::new(Nbd::kernel(
                number,
                &nbd_identity(self.settings.move_id),
                self.geometry,
                &mut self.ring,
                &mut self.memory,
                |device| self.marks.claim(device),
            )?),
            FrontendKind::Socket | FrontendKind::Auto => {
                let path = self.runtime.socket();
                crate::runtime::remove(&path)?;
                Box::new(Nbd::listen(
                    &path,
                    self.geometry,
                    &mut self.ring,
                    &mut self.memory,
                )?)
            }
            FrontendKind::VhostUserBlk => {
                let path = self.runtime.vhost();
                crate::runtime::remove(&path)?;
                lock_on_touch();
                Box::new(VhostUserBlk::listen(
                    &path,
                    &self.settings.move_id.to_string().replace('-', ""),
                    self.geometry,
                    &mut self.ring,
                    &mut self.memory,
                )?)
            }
        };
        Ok(frontend)
    }

    /// Goes on with what takes several turns.
    fn proceed(&mut self) -> anyhow::Result<()> {
        let (now, progress) = (self.now(), self.engine.volume().progress());
        if progress.started && !progress.done {
            self.speed.sample(now, progress.copied);
        }
        if let Some(frontend) = &self.frontend {
            if !self.shown && frontend.stage() == Stage::Ready {
                self.shown = true;
                // A supervisor wants to know; it may be gone.
                let _ = writeln!(std::io::stdout(), "{}", frontend.device().display());
                info!(
                    "{} is usable after {:?}",
                    frontend.device().display(),
                    self.started.elapsed()
                );
            }
        }
        let gone = self
            .frontend
            .as_ref()
            .is_some_and(|frontend| frontend.stage() == Stage::Gone);
        if gone && self.end.is_none() {
            bail!("the device was removed by somebody else");
        }
        let may_close = match self.end {
            None => false,
            Some(End::Departure) => true,
            // The device's last requests want an answer.
            Some(End::Removal) => gone || self.frontend.is_none(),
        };
        if may_close && self.open && !self.closing {
            self.closing = true;
            self.engine.volume().close();
        }
        Ok(())
    }

    /// Does what is asked; the answer, unless it comes later.
    fn obey(&mut self, client: Client, request: &Request) -> anyhow::Result<Option<Answer>> {
        if self.end.is_some() && *request != Request::Status {
            return Ok(Some(Answer::error("the hydrator is ending")));
        }
        match request {
            Request::Status => Ok(Some(Answer::Status(Box::new(self.status())))),
            Request::Throttle { limit, minimum } => {
                self.rate = Rate {
                    limit: *limit,
                    minimum: minimum.unwrap_or(self.settings.minimum),
                };
                self.engine.volume().set_rate(self.rate);
                Ok(Some(Answer::ok()))
            }
            _ if !self.open => Ok(Some(Answer::error(
                "the volume is not open yet; ask for the status until it is",
            ))),
            Request::Start => {
                if self.engine.volume().progress().started {
                    return Ok(Some(Answer::ok()));
                }
                if self.starting.is_empty() {
                    self.engine.volume().start();
                }
                self.starting.push(client);
                Ok(None)
            }
            Request::Finish if !self.engine.volume().progress().done => {
                let left = self.engine.volume().progress().remote;
                Ok(Some(Answer::error(format!(
                    "the move is not complete: {left} bytes are on the source only; \
                     wait until the state is \"done\", or abort it"
                ))))
            }
            Request::Finish | Request::Abort => self.begin_removal(client),
        }
    }

    fn begin_removal(&mut self, client: Client) -> anyhow::Result<Option<Answer>> {
        if let Some(frontend) = &mut self.frontend {
            if let Some(holder) = holder(frontend.device()) {
                return Ok(Some(Answer::error(format!(
                    "{} is in use by {holder}",
                    frontend.device().display()
                ))));
            }
            if let Err(reason) = frontend.stop(&mut self.ring) {
                return Ok(Some(Answer::error(reason)));
            }
        }
        self.end = Some(End::Removal);
        self.ending.push(client);
        Ok(None)
    }

    fn answer(&mut self, client: Client, answer: &Answer) -> anyhow::Result<()> {
        let mut asked = self.control.answer(&mut self.ring, client, answer);
        while let Some((client, request)) = asked {
            asked = match self.obey(client, &request)? {
                Some(answer) => self.control.answer(&mut self.ring, client, &answer),
                None => None,
            };
        }
        Ok(())
    }

    fn status(&mut self) -> Status {
        let now = self.now();
        let progress = self.engine.volume().progress();
        let rate = self.speed.rate(now, progress.copied);
        Status {
            state: self.state(&progress),
            move_id: self.settings.move_id.to_string(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: self
                .frontend
                .as_ref()
                .filter(|frontend| self.shown && frontend.stage() == Stage::Ready)
                .map(|frontend| frontend.device().display().to_string()),
            size: self.geometry.size,
            local: self.geometry.size.saturating_sub(progress.remote),
            copied: progress.copied,
            zeros: progress.zeros,
            rate,
            limit: self.rate.limit,
            minimum: self.rate.minimum,
            remaining_seconds: progress.remote.checked_div(rate),
            waiting: progress.waiting,
            written: progress.written,
            metadata_written: progress.metadata_written,
            bad_blocks: progress.bad,
        }
    }

    fn state(&self, progress: &Progress) -> State {
        if self.end.is_some() {
            State::Closing
        } else if !self.open {
            State::Opening
        } else if progress.broken {
            State::Broken
        } else if progress.done {
            State::Done
        } else if progress.stalled {
            State::Stalled
        } else if progress.started {
            State::Migrating
        } else {
            State::Starting
        }
    }

    fn conclude(mut self, end: End) -> anyhow::Result<()> {
        if end == End::Removal {
            self.marks.keep_only(None).context("cannot remove marks")?;
            self.runtime.remove()?;
            for client in std::mem::take(&mut self.ending) {
                self.control.answer(&mut self.ring, client, &Answer::ok());
            }
        }
        Ok(())
    }
}

fn open_disks(settings: &Settings, ring: &mut Ring) -> anyhow::Result<Disks> {
    Ok(Disks::new(
        Disk::open(&settings.data, Access::Exclusive(PATIENCE), ring)?,
        Disk::open(&settings.metadata, Access::Exclusive(PATIENCE), ring)?,
        Disk::open(&settings.source, Access::ReadOnly, ring)?,
    ))
}

/// The core's configuration; what does not fit is named.
fn configure(settings: &Settings, disks: &Disks) -> anyhow::Result<Config> {
    let size = settings.size.unwrap_or(disks.source.size());
    let data = &disks.data;
    if data.size() < size {
        bail!(
            "{} has {} bytes, the volume has {size}: too small",
            data.path().display(),
            data.size()
        );
    }
    for disk in [&disks.metadata, &disks.source] {
        if disk.logical_block() != data.logical_block() {
            bail!(
                "{} has logical blocks of {} bytes, {} of {}: they must be the same",
                disk.path().display(),
                disk.logical_block(),
                data.path().display(),
                data.logical_block()
            );
        }
    }
    let needed = metadata_size(size);
    if disks.metadata.size() < needed {
        bail!(
            "{} has {} bytes, the metadata of a volume of {size} bytes need {needed}",
            disks.metadata.path().display(),
            disks.metadata.size()
        );
    }
    let mut config = Config::new(settings.move_id.0, size, disks.metadata.size());
    config.source_size = disks.source.size().min(size);
    config.logical_block_size = data.logical_block();
    config.destination_zeroed = settings.zeroed;
    config.source_timeout = settings.source_timeout;
    config.rate = Rate {
        limit: settings.limit,
        minimum: settings.minimum,
    };
    Ok(config)
}

/// Opens the volume, or formats it if that is asked for and nothing is there.
fn open_volume(
    settings: &Settings,
    config: &Config,
    disks: &Disks,
    ring: &mut Ring,
    memory: &mut Memory,
) -> anyhow::Result<Volume> {
    let span = memory.take(SUPERBLOCKS).context("no memory")?;
    let token = localstor_hydrator_disks::Token::new(Owner::Nobody, 0);
    // SAFETY: the span is looked at only after the completion.
    unsafe { disks.metadata.read(ring, span, 0, token) };
    let event = loop {
        if let Some(event) = ring.next_event() {
            break event;
        }
        ring.wait(None).context("the ring has failed")?;
    };
    if event.result != SUPERBLOCKS as i32 {
        bail!("cannot read {}", settings.metadata.display());
    }
    // SAFETY: the read has completed.
    let blank = unsafe { span.bytes() }.iter().all(|byte| *byte == 0);
    let volume = match (blank, settings.new) {
        (true, true) => {
            info!("formatting {}", settings.metadata.display());
            Volume::format(config.clone())
        }
        (true, false) => bail!(
            "{} begins with zeros: no move was begun there (--new begins one)",
            settings.metadata.display()
        ),
        (false, _) => Volume::open(config.clone()),
    };
    volume.with_context(|| format!("cannot open the volume on {}", settings.data.display()))
}

fn ublk_settings(settings: &Settings, number: Option<u32>, geometry: Geometry) -> ublk::Settings {
    ublk::Settings {
        number,
        identity: ublk_identity(settings.move_id),
        geometry,
        depth: UBLK_DEPTH,
        longest: UBLK_LONGEST,
    }
}

/// What tells a move's device from others, as ublk keeps it.
pub(crate) fn ublk_identity(move_id: MoveId) -> u64 {
    let mut identity = [0; 8];
    identity.copy_from_slice(&move_id.0[..8]);
    u64::from_le_bytes(identity)
}

/// The same, as the kernel's NBD client keeps it.
pub(crate) fn nbd_identity(move_id: MoveId) -> String {
    format!("localstor-{move_id}")
}

/// What kind of device to show, and which number it has already.
fn choose(
    wanted: FrontendKind,
    predecessor: Option<(FrontendKind, u32)>,
) -> (FrontendKind, Option<u32>) {
    match (wanted, predecessor) {
        (FrontendKind::Auto, Some((kind, number))) => (kind, Some(number)),
        (FrontendKind::Auto, None) if ublk::is_there() => (FrontendKind::Ublk, None),
        (FrontendKind::Auto, None) => (FrontendKind::Nbd, None),
        (kind, Some((before, number))) if kind == before => (kind, Some(number)),
        (kind, _) => (kind, None),
    }
}

/// What else holds a block device: a device-mapper node, usually.
pub(crate) fn holder(device: &std::path::Path) -> Option<String> {
    let name = device.file_name()?.to_str()?;
    let holders = std::fs::read_dir(format!("/sys/class/block/{name}/holders")).ok()?;
    let holder = holders.filter_map(Result::ok).next()?;
    Some(holder.file_name().to_string_lossy().into_owned())
}

/// A process that serves a disk must not need memory to be written to disk
/// before it can go on.
pub(crate) fn stay_in_memory() {
    // SAFETY: takes no pointers.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        warn!(
            "memory is not locked, the node may hang when it is short of it: {}",
            std::io::Error::last_os_error()
        );
    }
    // SAFETY: takes no pointers.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        warn!(
            "the kernel does not know that others wait for this process: {}",
            std::io::Error::last_os_error()
        );
    }
}

/// What is mapped from now on is locked when it is used, not at once: all of a
/// guest's memory would come into being, though hardly any of it is looked at.
fn lock_on_touch() {
    // SAFETY: takes no pointers.
    if unsafe { libc::mlockall(libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        warn!(
            "the guest's memory may be locked: {}",
            std::io::Error::last_os_error()
        );
    }
}
