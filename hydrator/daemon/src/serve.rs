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

use crate::arguments::{FrontendKind, LONGEST_PAUSE, Settings};
use crate::confinement;
use crate::control::{Client, Control};
use crate::devices;
use crate::engine::{self, Disks, Engine};
use crate::marks::Marks;
use crate::protocol::{Answer, Request, State, Status};
use crate::rate::Speed;
use crate::runtime::Runtime;
use crate::spool::Spool;

/// How long to wait for a predecessor's last write.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests of a ublk device in flight, and the longest, in bytes.
const UBLK_DEPTH: u16 = 64;
const UBLK_LONGEST: u32 = 256 << 10;

/// What is read to see whether there are metadata, in bytes.
const SUPERBLOCKS: usize = 8192;

/// In nanoseconds.
const SECOND: u64 = 1_000_000_000;

/// How long to sleep at most, so that signals and time are noticed.
const TICK: Duration = Duration::from_millis(500);

/// Where the kernel is told whom to kill when memory is short, and that it is
/// never this process (`OOM_SCORE_ADJ_MIN` of linux/oom.h). To kill it would gain
/// nothing: its memory does not grow, its successor needs as much at once, and
/// what others have in memory may get to a disk through it only. With vhost-user
/// the kernel would even prefer it, because it counts the guest's memory twice.
const OOM_SCORE: &str = "/proc/self/oom_score_adj";
const NEVER: &str = "-1000";

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
    // When the present turn began; asking the clock costs a system call where
    // the kernel has no vDSO.
    now: Time,
    speed: Speed,
    rate: Rate,
    arrivals: Vec<Arrival>,
    answers: Vec<(Tag, Outcome)>,
    notices: Vec<Notice>,
    // Clients that wait for the start, or for the end, to be recorded.
    starting: Vec<Client>,
    ending: Vec<Client>,
    // The client that waits for what is in flight to end before its pause.
    pausing: Option<Client>,
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
            server.end_pause("the hydrator is ending")?;
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
        if !settings.poll.is_zero() {
            ring.poll(settings.poll);
        }
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
        let mut spool = Spool::open(&runtime.spool(), config.block_slots)?;
        let volume = open_volume(
            settings,
            &config,
            &disks,
            &mut spool,
            &mut ring,
            &mut memory,
        )?;
        let engine = Engine::new(volume, &config, disks, spool, &mut memory)?;
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
            now: Time(0),
            speed: Speed::default(),
            rate: config.rate,
            arrivals: Vec::with_capacity(config.requests),
            answers: Vec::with_capacity(config.requests),
            notices: Vec::new(),
            starting: Vec::new(),
            ending: Vec::new(),
            pausing: None,
            open: false,
            begun: false,
            end: None,
            closing: false,
            closed: false,
        })
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
        let elapsed = self.started.elapsed().as_nanos();
        let now = Time(u64::try_from(elapsed).unwrap_or(u64::MAX));
        self.now = now;
        // Before anybody is told that it has lasted until now.
        if self.engine.expires(now) {
            warn!("the pause ends by itself");
            self.refuse_pause("what is in flight has not ended in that time")?;
        }
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
        if self.pausing.is_some() && self.engine.is_at_rest() {
            self.answer_pause()?;
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
        match self.engine.wake_at() {
            Some(at) => Duration::from_nanos(at.since(self.now)).min(TICK),
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
                    "{}: {length} bytes at {offset} can't be read: they are not copied. When \
                     that is mended, tell it by \"retry\"",
                    self.settings.source.display()
                ),
                Notice::UnreadableData { offset, length } => error!(
                    "{}: {length} bytes at {offset} can't be read, and may be all there is of \
                     what was written there: reads of them fail until they are written or \
                     discarded as a whole, and the move does not end before that",
                    self.settings.data.display()
                ),
                Notice::Differs {
                    offset,
                    length,
                    again,
                } => self.tell_difference(offset, length, again),
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

    fn tell_difference(&self, offset: u64, length: u32, again: bool) {
        let (data, source) = (&self.settings.data, &self.settings.source);
        let (data, source) = (data.display(), source.display());
        if again {
            error!(
                "{length} bytes from {offset} on were copied again and still differ: they \
                 stay on {source}, and the move does not end. Look for errors of {data}, \
                 mend it, and end this process with SIGTERM: its successor copies them anew"
            );
        } else {
            warn!(
                "{length} bytes from {offset} on read differently on {data} and on \
                 {source}: they are copied again"
            );
        }
    }

    /// Makes the device, or takes over a predecessor's.
    fn make_device(&mut self) -> anyhow::Result<()> {
        let move_id = self.settings.move_id;
        let left = devices::of(move_id)?;
        if let Some(other) = self.runtime.move_id().filter(|other| *other != move_id) {
            if !devices::of(other)?.is_empty() {
                bail!(
                    "{} has the device of the move {other}: abort that one, or use another \
                     runtime directory",
                    self.settings.runtime.display()
                );
            }
        }
        // An abort must find the device, whatever happens from here on.
        self.runtime.record(move_id)?;
        let (kind, number) = choose(self.settings.frontend, &left, ublk::is_there());
        let made = self.make_frontend(kind, number);
        if made.is_err() && devices::of(move_id)?.is_empty() {
            self.marks.keep_only(None).context("cannot remove marks")?;
        }
        let frontend = made?;
        self.marks
            .keep_only(Some(frontend.device()))
            .context("cannot remove marks")?;
        self.runtime.show(frontend.device())?;
        self.frontend = Some(frontend);
        if let Err(error) = self.engine.start_discarder() {
            warn!("what the guest discards may go on to take up space: {error}");
        }
        // Nothing has come from a guest yet.
        confinement::confine(kind);
        Ok(())
    }

    fn make_frontend(
        &mut self,
        kind: FrontendKind,
        number: Option<u32>,
    ) -> anyhow::Result<Box<dyn Frontend>> {
        let frontend: Box<dyn Frontend> = match kind {
            FrontendKind::Ublk => Box::new(Ublk::start(
                &ublk_settings(&self.settings, number, self.geometry),
                &mut self.ring,
                &mut self.memory,
                |device| self.marks.take(device),
            )?),
            FrontendKind::Nbd => Box::new(Nbd::kernel(
                number,
                &devices::nbd_identity(self.settings.move_id),
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
        let progress = self.engine.volume().progress();
        if progress.started && !progress.done {
            self.speed.sample(self.now, progress.copied);
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
            Request::Retry => {
                self.engine.volume().retry_source();
                Ok(Some(Answer::ok()))
            }
            Request::Pause { seconds } if !(1..=LONGEST_PAUSE).contains(seconds) => {
                Ok(Some(Answer::error(format!(
                    "a pause is of 1 to {LONGEST_PAUSE} seconds, not of {seconds}"
                ))))
            }
            Request::Pause { .. } if self.engine.is_paused() => {
                Ok(Some(Answer::error("there is a pause already")))
            }
            Request::Pause { seconds } => {
                self.engine.pause(self.now.after(seconds * SECOND));
                self.pausing = Some(client);
                Ok(None)
            }
            Request::Resume => {
                let lasted = self.pausing.is_none();
                if self.end_pause("it was ended before it was answered")? && lasted {
                    info!("the pause has ended");
                    return Ok(Some(Answer::ok()));
                }
                Ok(Some(Answer::error(
                    "there is no pause, or not yet, or it has ended by itself: what was copied \
                     meanwhile counts for nothing",
                )))
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
            if let Some(holder) = devices::holder(frontend.device()) {
                return Ok(Some(Answer::error(format!(
                    "{} is in use by {holder}",
                    frontend.device().display()
                ))));
            }
            if let Err(reason) = frontend.stop(&mut self.ring) {
                return Ok(Some(Answer::error(reason)));
            }
        }
        // The device goes when its last requests are answered, and the source
        // may be away for good.
        self.engine.volume().give_up_source();
        self.end = Some(End::Removal);
        self.ending.push(client);
        self.end_pause("the hydrator is ending")?;
        Ok(None)
    }

    /// Tells the client that nothing is in flight any more; or that there can be
    /// no pause, as the disks do not have all that the guest was answered by.
    fn answer_pause(&mut self) -> anyhow::Result<()> {
        if self.engine.volume().progress().broken {
            self.end_pause("a disk has failed")?;
        } else if let Some(client) = self.pausing.take() {
            info!("paused");
            self.answer(client, &Answer::ok())?;
        }
        Ok(())
    }

    /// Goes on after a pause, and tells who waits for it still why there is
    /// none; whether there was one.
    fn end_pause(&mut self, reason: &str) -> anyhow::Result<bool> {
        let paused = self.engine.resume();
        // There may be something to do, whatever happens.
        self.begun &= !paused;
        self.refuse_pause(reason)?;
        Ok(paused)
    }

    fn refuse_pause(&mut self, reason: &str) -> anyhow::Result<()> {
        match self.pausing.take() {
            Some(client) => self.answer(client, &Answer::error(format!("no pause: {reason}"))),
            None => Ok(()),
        }
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
        let progress = self.engine.volume().progress();
        let rate = self.speed.rate(self.now, progress.copied);
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
            unreadable_blocks: progress.unreadable,
            first_unreadable: progress.first_unreadable,
            written: progress.written,
            metadata_written: progress.metadata_written,
            bad_blocks: progress.bad,
            unanswered_blocks: progress.unanswered,
            verify: self.settings.verify,
            verified: progress.verified,
            differences: progress.differences,
            differing_blocks: progress.differing,
            first_differing: progress.first_differing,
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
        } else if progress.differing > 0 {
            State::Differing
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
    config.verify = settings.verify.into();
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
    spool: &mut Spool,
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
    // What cannot be read was written; the core sees to the rest.
    let read = event.result == SUPERBLOCKS as i32;
    // SAFETY: the read has completed.
    let blank = read && unsafe { span.bytes() }.iter().all(|byte| *byte == 0);
    let volume = match (blank, settings.new) {
        (true, true) => {
            info!("formatting {}", settings.metadata.display());
            spool.clear()?;
            Volume::format(config.clone())
        }
        (true, false) => bail!(
            "{} begins with zeros: no move was begun there (--new begins one)",
            settings.metadata.display()
        ),
        (false, _) => {
            spool.restore(&disks.metadata, ring, span)?;
            Volume::open(config.clone())
        }
    };
    volume.with_context(|| format!("cannot open the volume on {}", settings.data.display()))
}

fn ublk_settings(settings: &Settings, number: Option<u32>, geometry: Geometry) -> ublk::Settings {
    ublk::Settings {
        number,
        identity: devices::ublk_identity(settings.move_id),
        geometry,
        depth: UBLK_DEPTH,
        longest: UBLK_LONGEST,
    }
}

/// What kind of device to show, and which number it has already if predecessors
/// have left one.
fn choose(
    wanted: FrontendKind,
    left: &[devices::Device],
    has_ublk: bool,
) -> (FrontendKind, Option<u32>) {
    let found = |(kind, _): &&devices::Device| wanted == FrontendKind::Auto || wanted == *kind;
    match (left.iter().find(found), wanted) {
        (Some((kind, number)), _) => (*kind, Some(*number)),
        (None, FrontendKind::Auto) if has_ublk => (FrontendKind::Ublk, None),
        (None, FrontendKind::Auto) => (FrontendKind::Nbd, None),
        (None, kind) => (kind, None),
    }
}

/// A process that serves a disk must not need memory to be written to disk
/// before it can go on, nor die for the lack of it.
pub(crate) fn stay_in_memory() {
    if let Err(error) = std::fs::write(OOM_SCORE, NEVER) {
        warn!("the kernel may kill this process when memory is short: {error}");
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_left_is_taken_up_and_none_is_made_beside_it() {
        const UBLK: devices::Device = (FrontendKind::Ublk, 3);
        const NBD: devices::Device = (FrontendKind::Nbd, 5);
        let auto = FrontendKind::Auto;
        assert_eq!(choose(auto, &[], true), (FrontendKind::Ublk, None));
        assert_eq!(choose(auto, &[], false), (FrontendKind::Nbd, None));
        assert_eq!(choose(auto, &[NBD], true), (FrontendKind::Nbd, Some(5)));
        assert_eq!(choose(auto, &[UBLK], true), (FrontendKind::Ublk, Some(3)));
        let nbd = FrontendKind::Nbd;
        assert_eq!(choose(nbd, &[UBLK, NBD], true), (nbd, Some(5)));
        assert_eq!(choose(nbd, &[UBLK], true), (nbd, None));
        let socket = FrontendKind::Socket;
        assert_eq!(choose(socket, &[UBLK], true), (socket, None));
    }
}
