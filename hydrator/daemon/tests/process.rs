// SPDX-License-Identifier: Apache-2.0
//! The program, over files, with NBD clients; killed and started anew.

#![allow(clippy::unwrap_used)]

#[path = "../../frontends/tests/guest/mod.rs"]
mod guest;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_localstor-hydrator");
const MOVE: &str = "a6f07385-e34d-48a1-930e-7179e7b63cdb";
const OTHER: &str = "b6f07385-e34d-48a1-930e-7179e7b63cdb";
const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const PATIENCE: Duration = Duration::from_secs(60);

/// The disks of a move, and its helper.
struct Move {
    folder: PathBuf,
    id: &'static str,
    frontend: &'static str,
    verify: &'static str,
    zeroed: bool,
    process: Option<Child>,
    detached: bool,
}

impl Move {
    /// A source of random bytes, a destination full of another tenant's, and
    /// blank metadata.
    fn new(name: &str) -> Move {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let mut content = vec![0; SIZE as usize];
        std::fs::File::open("/dev/urandom")
            .unwrap()
            .read_exact(&mut content)
            .unwrap();
        std::fs::write(folder.join("source"), content).unwrap();
        std::fs::write(folder.join("data"), vec![0xaa; SIZE as usize]).unwrap();
        std::fs::write(folder.join("metadata"), vec![0; 8 * MIB as usize]).unwrap();
        Move {
            folder,
            id: MOVE,
            frontend: "socket",
            verify: "off",
            zeroed: false,
            process: None,
            detached: false,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn content(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    fn command(&self) -> Command {
        self.command_of(Path::new(PROGRAM))
    }

    fn command_of(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.args(["run", "--move", self.id, "--new"]);
        command.args(["--frontend", self.frontend]);
        command.args(["--verify", self.verify]);
        command.args(self.zeroed.then_some("--zeroed"));
        for name in ["data", "metadata", "source", "runtime"] {
            command.arg(format!("--{name}")).arg(self.path(name));
        }
        command.stdin(Stdio::null());
        command
    }

    fn start(&mut self) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .unwrap();
        let mut command = self.command();
        let process = command.stdout(Stdio::null()).stderr(log).spawn();
        self.process = Some(process.unwrap());
        self.wait("it is usable", |status| !status["device"].is_null());
    }

    /// Starts it in the background, unless it is there: what is printed.
    fn detach(&mut self) -> Output {
        self.detached = true;
        self.command().arg("--detach").output().unwrap()
    }

    /// Starts it in the background; its process id.
    fn served(&mut self) -> u64 {
        self.served_at("nbd")
    }

    /// The same, with its socket's name.
    fn served_at(&mut self, socket: &str) -> u64 {
        let output = self.detach();
        assert!(output.status.success(), "{output:?}");
        let printed = String::from_utf8(output.stdout).unwrap();
        let path = self.path("runtime").join(socket);
        assert_eq!(printed, format!("{}\n", path.display()));
        self.pid()
    }

    /// Serves it to a guest by vhost-user, and then takes all of the source but
    /// `left` bytes away: what is asked of the rest is not answered.
    fn serve_with_source_cut_off(&mut self, left: u64) -> guest::Guest {
        self.frontend = "vhost-user-blk";
        self.served_at("vhost");
        let mut guest = guest::Guest::new();
        guest.connect(&self.path("runtime/vhost"));
        let mut options = std::fs::File::options();
        let source = options.write(true).open(self.path("source")).unwrap();
        source.set_len(left).unwrap();
        guest
    }

    /// Gives the source its content back.
    fn give_source_back(&self, content: &[u8]) {
        let mut options = std::fs::File::options();
        let source = options.write(true).open(self.path("source")).unwrap();
        source.write_all_at(content, 0).unwrap();
    }

    /// The serving process, now.
    fn pid(&self) -> u64 {
        let status = self.wait("an answer", |_| true);
        status["pid"].as_u64().unwrap()
    }

    /// The serving process after `pid`, when the device is usable.
    fn successor_of(&self, pid: u64) -> u64 {
        let status = self.wait("a successor", |status| {
            status["pid"] != pid && !status["device"].is_null()
        });
        status["pid"].as_u64().unwrap()
    }

    fn supervisor(&self) -> u64 {
        let lock = std::fs::read_to_string(self.path("runtime/lock")).unwrap();
        lock.trim_end().parse().unwrap()
    }

    /// A start that must fail; what it complains of.
    fn refused(&self) -> String {
        let output = self.command().output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(PROGRAM);
        command.arg(arguments[0]).arg(self.path("runtime"));
        command.args(&arguments[1..]).output().unwrap()
    }

    /// Copies its metadata to the file "copy".
    fn copy_metadata(&self, id: &str, new: &str) -> Output {
        let mut command = Command::new(PROGRAM);
        command.arg("copy").arg(self.path("metadata"));
        command.args(["--move", id, "--new-move", new]);
        command.arg("--to").arg(self.path("copy")).output().unwrap()
    }

    /// Another move, of the same source, over what "data" and "copy" are now.
    fn copied(&self, name: &str) -> Move {
        let mut copied = Move::new(name);
        copied.id = OTHER;
        for (from, to) in [("source", "source"), ("data", "data"), ("copy", "metadata")] {
            std::fs::copy(self.path(from), copied.path(to)).unwrap();
        }
        copied
    }

    fn must(&self, arguments: &[&str]) {
        let output = self.ask(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let output = self.ask(&["status"]);
            if output.status.success() {
                let status = serde_json::from_slice(&output.stdout).unwrap();
                if wanted(&status) {
                    return status;
                }
            }
            if start.elapsed() > PATIENCE {
                let log = ["log", "runtime/log"].map(|name| {
                    let log = std::fs::read(self.path(name)).unwrap_or_default();
                    String::from_utf8_lossy(&log).into_owned()
                });
                panic!("waited for: {what}; {output:?}\n{}", log.concat());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Waits for the process to end by itself.
    fn ended(&mut self) -> bool {
        self.process.take().unwrap().wait().unwrap().success()
    }

    fn qemu(&self, commands: &[&str]) {
        let uri = format!("nbd+unix:///?socket={}", self.path("runtime/nbd").display());
        let mut arguments = vec!["-f", "raw"];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        arguments.push(&uri);
        let output = Command::new("qemu-io").args(arguments).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        let wrong = !output.status.success() || printed.contains("verification failed");
        assert!(!wrong, "{commands:?}: {output:?}");
    }

    /// All that the guest sees.
    fn seen(&self) -> Vec<u8> {
        let uri = format!("nbd+unix:///?socket={}", self.path("runtime/nbd").display());
        let copy = self.path("copy");
        let output = Command::new("nbdcopy")
            .arg(uri)
            .arg(&copy)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        std::fs::read(copy).unwrap()
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        self.kill();
        if self.detached {
            let lock = std::fs::read_to_string(self.path("runtime/lock")).unwrap_or_default();
            if let Ok(supervisor) = lock.trim_end().parse() {
                send(supervisor, Signal::TERM);
            }
            self.ask(&["abort"]);
        }
    }
}

/// Sends a signal to a process that may be gone.
fn send(pid: u64, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    let _ = kill_process(pid, signal);
}

/// Waits until a process has ended; nobody may have asked for its status.
fn await_end(pid: u64) {
    let start = Instant::now();
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    while !matches!(state().rsplit(") ").next(), None | Some("")) && !state().contains(") Z ") {
        assert!(start.elapsed() < PATIENCE, "process {pid} does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What the kernel says of a process, as a hexadecimal number.
fn figure(process: &str, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
}

/// Changes how many files a process may have open; how many it might before.
fn limit_files(pid: u64, most: Option<u64>) -> Option<u64> {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: most,
        maximum,
    };
    prlimit(pid, Resource::Nofile, limit).unwrap().current
}

/// The processor time of a process, in hundredths of a second.
fn cpu_time(pid: u64) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields = stat.rsplit(") ").next().unwrap().split(' ');
    let times = fields.skip(11).take(2);
    times.map(|time| time.parse::<u64>().unwrap()).sum()
}

fn complaint(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a client on the control socket is told.
fn told(stream: &mut UnixStream) -> String {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line
}

#[test]
fn a_move_ends_with_the_source_and_what_the_guest_wrote() {
    let mut volume = Move::new("whole");
    volume.start();
    let mut expected = volume.content("source");
    assert!(volume.seen() == expected);
    volume.qemu(&[
        "write -P 0x5c 512 1M",
        "discard 4M 1M",
        "write -z 9M 64k",
        "flush",
    ]);
    expected[512..512 + MIB as usize].fill(0x5c);
    expected[4 << 20..5 << 20].fill(0);
    expected[9 << 20..(9 << 20) + 65536].fill(0);
    assert!(volume.seen() == expected);
    volume.must(&["start"]);
    volume.wait("all is local", |status| status["state"] == "done");
    volume.must(&["finish"]);
    assert!(volume.ended());
    assert!(volume.content("data") == expected);
    assert!(!volume.path("runtime").exists());
}

#[test]
fn what_was_flushed_survives_kills_in_mid_move() {
    let mut volume = Move::new("killed");
    let mut expected = volume.content("source");
    volume.start();
    volume.must(&["throttle", "--limit", "8M", "--minimum", "1M"]);
    volume.must(&["start"]);
    for round in 0..8u8 {
        let offset = usize::from(round) * 5_000_192;
        let pattern = 0x10 + round;
        let write = format!("write -P {pattern} {offset} 300k");
        volume.qemu(&[&write, "flush"]);
        expected[offset..offset + 300 * 1024].fill(pattern);
        volume.kill();
        volume.start();
        assert!(volume.seen() == expected, "after kill {round}");
    }
    volume.wait("all is local", |status| status["state"] == "done");
    volume.must(&["finish"]);
    assert!(volume.ended());
    assert!(volume.content("data") == expected);
}

#[test]
fn a_guest_by_vhost_user_loses_nothing_to_kills_in_mid_move() {
    const RINGS: usize = 3;
    let mut volume = Move::new("vhost-killed");
    volume.frontend = "vhost-user-blk";
    let socket = volume.path("runtime/vhost");
    let mut expected = volume.content("source");
    volume.start();
    volume.must(&["throttle", "--limit", "8M", "--minimum", "1M"]);
    volume.must(&["start"]);
    let mut guest = guest::Guest::with_rings(RINGS);
    guest.connect(&socket);
    for round in 0..8u8 {
        let mut asked = Vec::new();
        for request in 0..u64::from(guest::REQUESTS) {
            // Partly over what the round before has written.
            let sector = u64::from(round) * 9_001 + request * 100;
            let data = vec![0x10 + round; 50 * 1024];
            guest.ring = request as usize % RINGS;
            asked.push((guest.ring, guest.submit_write(sector, &data)));
            let offset = sector as usize * 512;
            expected[offset..offset + data.len()].copy_from_slice(&data);
        }
        volume.kill();
        volume.start();
        guest.connect(&socket);
        for (ring, request) in asked {
            guest.ring = ring;
            while !guest.is_free(request) {
                assert_eq!(guest.wait().1, guest::OK);
            }
        }
        assert_eq!(guest.ask(guest::FLUSH, 0, 0), guest::OK);
        assert!(guest.seen(SIZE) == expected, "after kill {round}");
    }
    volume.must(&["throttle", "--minimum", "1M"]);
    volume.wait("all is local", |status| status["state"] == "done");
    for ring in 0..RINGS {
        guest.ring = ring;
        guest.stop();
    }
    guest.disconnect();
    volume.must(&["finish"]);
    assert!(volume.ended());
    assert!(!volume.path("runtime").exists());
    assert!(volume.content("data") == expected);
}

/// Two writes to a device in a second, for whom this control group has.
struct Limited {
    device: String,
    group: PathBuf,
}

impl Limited {
    /// Of a loop device over this file; None where that can't be had.
    fn new(file: &Path) -> Option<Limited> {
        let losetup = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file)
            .output();
        let output = losetup.ok().filter(|output| output.status.success())?;
        let device = String::from_utf8(output.stdout).unwrap();
        let limited = Limited {
            device: device.trim_end().to_owned(),
            group: format!("/sys/fs/cgroup/blkio/localstor-{}", std::process::id()).into(),
        };
        let name = limited.device.trim_start_matches("/dev/");
        let number = std::fs::read_to_string(format!("/sys/block/{name}/dev")).unwrap();
        let limit = format!("{} 2", number.trim_end());
        std::fs::create_dir(&limited.group).ok()?;
        let limits = limited.group.join("blkio.throttle.write_iops_device");
        std::fs::write(limits, limit).ok()?;
        Some(limited)
    }

    fn take(&self, process: u32) {
        std::fs::write(self.group.join("cgroup.procs"), process.to_string()).unwrap();
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.group);
        let mut detach = Command::new("losetup");
        let _ = detach.args(["--detach", &self.device]).status();
    }
}

/// Take from the disk what the killed helper was writing to the journal, as if the
/// disk had failed it once nobody was there to learn of it; how many blocks.
/// `before` is the spool as the helper found it: that was written long ago.
fn fail_what_was_being_written(volume: &Move, device: &str, before: &[u8]) -> usize {
    let disk = std::fs::File::options().read(true).write(true).open(device);
    let disk = disk.unwrap();
    // Granted when the kernel is through with what the process had begun.
    rustix::fs::flock(&disk, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut content = vec![0; 8 * MIB as usize];
    disk.read_exact_at(&mut content, 0).unwrap();
    let spool = volume.content("runtime/spool");
    let is_new = |block: &&[u8]| {
        block[..512] != [0; 512] && !before.chunks(4096).any(|there| there == *block)
    };
    let kept: Vec<_> = spool.chunks(4096).filter(is_new).collect();
    let mut failed = 0;
    for (block, at) in content.chunks(4096).zip((0u64..).step_by(4096)) {
        if kept.contains(&block) {
            disk.write_all_at(&[0; 4096], at).unwrap();
            failed += 1;
        }
    }
    disk.sync_all().unwrap();
    failed
}

#[test]
fn what_was_answered_is_there_after_a_kill_though_its_intent_waited_for_an_io_limit() {
    const WRITES: usize = guest::REQUESTS as usize;
    let mut volume = Move::new("limited");
    volume.frontend = "vhost-user-blk";
    let mut expected = volume.content("source");
    let metadata = volume.path("metadata");
    std::fs::rename(&metadata, volume.path("disk")).unwrap();
    let Some(limited) = Limited::new(&volume.path("disk")) else {
        eprintln!("not tried: it takes a loop device, control groups (blkio), and root");
        return;
    };
    std::os::unix::fs::symlink(&limited.device, &metadata).unwrap();
    let socket = volume.path("runtime/vhost");
    let mut guest = guest::Guest::new();
    let mut failed = 0;
    for round in 0..3u8 {
        volume.start();
        guest.connect(&socket);
        assert!(guest.seen(SIZE) == expected, "after {round} kills");
        let before = volume.content("runtime/spool");
        limited.take(volume.process.as_ref().unwrap().id());
        for write in 0..WRITES {
            // Some are over what was written in the round before.
            let offset = (usize::from(round) * 20 + write) * 12288;
            let data = [0x10 + round; 4096];
            guest.submit_write(offset as u64 / 512, &data);
            expected[offset..offset + data.len()].copy_from_slice(&data);
        }
        for _ in 0..WRITES {
            assert_eq!(guest.wait().1, guest::OK);
        }
        volume.kill();
        failed += fail_what_was_being_written(&volume, &limited.device, &before);
    }
    assert!(failed > 0, "the limit has held nothing up");
    volume.start();
    guest.connect(&socket);
    assert!(guest.seen(SIZE) == expected, "after the last kill");
    // The device is free when the process is gone.
    drop(volume);
    drop(limited);
}

#[test]
fn a_guest_by_vhost_user_loses_nothing_to_a_helper_that_leaves() {
    let mut volume = Move::new("vhost-left");
    volume.frontend = "vhost-user-blk";
    let socket = volume.path("runtime/vhost");
    let before = volume.served_at("vhost");
    let mut guest = guest::Guest::new();
    guest.connect(&socket);
    let mut asked = Vec::new();
    for request in 0..u64::from(guest::REQUESTS) {
        asked.push(guest.submit_write(request * 64, &[0x5c; 32768]));
    }
    send(before, Signal::TERM);
    volume.successor_of(before);
    guest.connect(&socket);
    while !asked.iter().all(|request| guest.is_free(*request)) {
        assert_eq!(guest.wait().1, guest::OK);
    }
    let mut expected = volume.content("source");
    expected[..asked.len() * 32768].fill(0x5c);
    assert!(guest.seen(SIZE) == expected);
}

#[test]
fn what_waits_for_the_source_is_answered_by_the_successor_of_who_leaves() {
    let mut volume = Move::new("vhost-away");
    let mut expected = volume.content("source");
    let mut guest = volume.serve_with_source_cut_off(0);
    let before = volume.pid();
    let read = guest.submit(guest::IN, 128, 8192);
    let write = guest.submit_write(1025, &[0x5c; 512]);
    volume.wait("it is stalled", |status| {
        status["state"] == "stalled" && status["waiting"] == 2
    });
    send(before, Signal::TERM);
    await_end(before);
    assert_eq!(guest.answer(), None);
    volume.give_source_back(&expected);
    volume.successor_of(before);
    guest.connect(&volume.path("runtime/vhost"));
    let mut answers = [guest.wait(), guest.wait()];
    answers.sort_unstable();
    assert_eq!(answers, [(read, guest::OK), (write, guest::OK)]);
    let found = guest.content(read, 8192);
    assert!(found == expected[128 * 512..][..8192]);
    expected[1025 * 512..][..512].fill(0x5c);
    assert!(guest.seen(SIZE) == expected);
}

#[test]
fn an_abort_does_not_wait_for_the_source() {
    let mut volume = Move::new("vhost-abort-away");
    let mut guest = volume.serve_with_source_cut_off(0);
    let helper = volume.pid();
    guest.submit(guest::IN, 128, 8192);
    volume.wait("it is stalled", |status| {
        status["state"] == "stalled" && status["waiting"] == 1
    });
    volume.must(&["abort"]);
    await_end(helper);
}

#[test]
fn what_the_source_does_not_answer_waits_and_is_asked_for_again() {
    let mut volume = Move::new("vhost-silent");
    let expected = volume.content("source");
    let mut guest = volume.serve_with_source_cut_off(SIZE / 2);
    let read = guest.submit(guest::IN, SIZE / 512 - 16, 8192);
    volume.must(&["start"]);
    let status = volume.wait("the rest is copied", |status| {
        status["local"] == SIZE / 2 && status["unanswered_blocks"] != 0
    });
    assert_eq!(status["state"], "stalled", "{status}");
    assert_eq!(
        (&status["waiting"], &status["bad_blocks"]),
        (&1.into(), &0.into())
    );
    assert_eq!(guest.ask(guest::IN, 8, 4096), guest::OK);
    assert_eq!(guest.answer(), None);
    volume.give_source_back(&expected);
    volume.must(&["retry"]);
    assert_eq!(guest.wait(), (read, guest::OK));
    assert!(guest.content(read, 8192) == expected[SIZE as usize - 8192..]);
    volume.wait("all is local", |status| status["state"] == "done");
    assert!(guest.seen(SIZE) == expected);
}

#[test]
fn who_can_not_be_let_in_for_now_waits_and_costs_no_time() {
    for (frontend, socket) in [
        ("socket", "control"),
        ("socket", "nbd"),
        ("vhost-user-blk", "vhost"),
    ] {
        let mut volume = Move::new(&format!("crowded-{socket}"));
        volume.frontend = frontend;
        volume.start();
        let pid = volume.pid();
        let path = volume.path("runtime").join(socket);
        let before = limit_files(pid, Some(0));
        // One may have been awaited before.
        drop(UnixStream::connect(&path).unwrap());
        let waiting = UnixStream::connect(&path).unwrap();
        let start = cpu_time(pid);
        std::thread::sleep(Duration::from_secs(2));
        let spent = cpu_time(pid) - start;
        assert!(spent < 20, "{socket}: {spent} hundredths of a second");
        limit_files(pid, before);
        drop(waiting);
        match socket {
            "control" => assert_eq!(volume.pid(), pid),
            "nbd" => volume.qemu(&["read 0 4k"]),
            _ => drop(guest::Guest::new().connect(&path)),
        }
    }
}

#[test]
fn a_move_is_not_finished_early_but_may_be_aborted() {
    let mut volume = Move::new("aborted");
    volume.start();
    let output = volume.ask(&["finish"]);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("not complete"), "{complaint}");
    volume.must(&["abort"]);
    assert!(volume.ended());
    assert!(!volume.path("runtime").exists());
}

#[test]
fn a_move_that_is_verified_says_how_much_was_compared() {
    for (how_much, compared) in [("full", SIZE), ("sample", MIB), ("off", 0)] {
        let mut volume = Move::new(&format!("verified-{how_much}"));
        volume.verify = how_much;
        volume.start();
        volume.must(&["start"]);
        let status = volume.wait("all is local", |status| status["state"] == "done");
        assert_eq!(status["verify"], how_much);
        assert_eq!(status["copied"], SIZE, "{status}");
        assert_eq!(status["verified"], compared, "{status}");
        assert_eq!(status["differences"], 0);
        volume.must(&["finish"]);
        assert!(volume.ended());
        assert!(volume.content("data") == volume.content("source"));
    }
}

#[test]
fn what_differs_from_the_source_is_told_and_copied_again() {
    let mut volume = Move::new("differs");
    volume.verify = "full";
    volume.start();
    volume.must(&["throttle", "--limit", "20M", "--minimum", "20M"]);
    volume.must(&["start"]);
    // The source changes, though it must not: what is copied differs then.
    let mut options = std::fs::File::options();
    let source = options.write(true).open(volume.path("source")).unwrap();
    let byte = std::cell::Cell::new(0);
    volume.wait("a difference", |status| {
        byte.set(byte.get() + 1);
        for block in 0..SIZE / 4096 {
            source.write_all_at(&[byte.get()], block * 4096).unwrap();
        }
        status["differences"] != 0
    });
    volume.kill();
    let log = std::fs::read_to_string(volume.path("log")).unwrap();
    assert!(log.contains("read differently"), "{log}");
    // The source is at rest now: whatever differed is copied anew.
    volume.start();
    volume.wait("all is local", |status| status["state"] == "done");
    volume.must(&["finish"]);
    assert!(volume.ended());
}

#[test]
fn each_command_has_a_manual_page_with_its_options() {
    let page = |arguments: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.arg("man").args(arguments).output().unwrap()
    };
    let text = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let whole = text(&page(&[]));
    assert!(whole.contains("localstor\\-hydrator\\-run(1)"), "{whole}");
    let run = text(&page(&["run"]));
    for part in [".TH localstor-hydrator-run", "\\-\\-verify", "sample"] {
        assert!(run.contains(part), "{run}");
    }
    let none = page(&["dance"]);
    assert!(!none.status.success() && complaint(&none).contains("dance"));
}

#[test]
fn noise_on_the_control_socket_is_answered_and_nothing_else_happens() {
    let mut volume = Move::new("noise");
    volume.start();
    let control = volume.path("runtime/control");
    let mut stream = UnixStream::connect(&control).unwrap();
    stream.write_all(b"dance\n").unwrap();
    assert!(told(&mut stream).contains("this is no request"));
    stream.write_all(b"{\"command\": \"dance\"}\n").unwrap();
    assert!(told(&mut stream).contains("dance"));
    let mut long = UnixStream::connect(&control).unwrap();
    long.write_all(&[b'x'; 5000]).unwrap();
    assert!(told(&mut long).contains("longer than"));
    // More clients than there is room for: some wait, none does harm.
    let many: Vec<_> = (0..40).map(|_| UnixStream::connect(&control)).collect();
    drop(many);
    stream.write_all(b"{\"command\": \"status\"}\n").unwrap();
    assert!(told(&mut stream).contains("starting"));
}

#[test]
fn a_second_helper_and_the_offline_tools_keep_away() {
    let mut volume = Move::new("second");
    volume.start();
    for command in ["dump", "check"] {
        let output = Command::new(PROGRAM)
            .arg(command)
            .arg(volume.path("metadata"))
            .output()
            .unwrap();
        assert!(!output.status.success());
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(complaint.contains("in use"), "{complaint}");
    }
    volume.kill();
    let output = Command::new(PROGRAM)
        .arg("dump")
        .arg(volume.path("metadata"))
        .output()
        .unwrap();
    let dump: Value = serde_json::from_slice(&output.stdout).unwrap();
    let copies = dump["superblocks"].as_array().unwrap();
    assert!(copies.iter().any(|copy| copy["move"] == MOVE), "{dump}");
    let output = Command::new(PROGRAM)
        .arg("check")
        .arg(volume.path("metadata"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn what_was_copied_in_a_pause_is_served_as_the_volume_was_then() {
    let mut volume = Move::new("paused");
    volume.frontend = "vhost-user-blk";
    volume.start();
    volume.must(&["throttle", "--limit", "8M", "--minimum", "8M"]);
    volume.must(&["start"]);
    let mut guest = guest::Guest::new();
    guest.connect(&volume.path("runtime/vhost"));
    let mut expected = volume.content("source");
    for round in 0..6u8 {
        let mut copied = {
            // Some are local for good, of some there are intents only.
            for request in 0..8 {
                let sector = u64::from(round) * 16_001 + request * 900;
                let data = vec![0x10 + round; 7 * 1024];
                let asked = guest.submit_write(sector, &data);
                assert_eq!(guest.wait(), (asked, guest::OK));
                expected[sector as usize * 512..][..data.len()].copy_from_slice(&data);
            }
            volume.must(&["pause", "--seconds", "60"]);
            let late = guest.submit_write(8 + u64::from(round), &[0xff; 512]);
            let disks = ["data", "metadata"].map(|name| volume.content(name));
            std::fs::write(volume.path("copy"), vec![0x5c; 8 * MIB as usize]).unwrap();
            let output = volume.copy_metadata(MOVE, OTHER);
            assert!(output.status.success(), "{output:?}");
            let copied = volume.copied("paused-copy");
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(guest.answer(), None);
            assert!(disks == ["data", "metadata"].map(|name| volume.content(name)));
            let complaint = complaint(&volume.ask(&["pause", "--seconds", "1"]));
            assert!(complaint.contains("already"), "{complaint}");
            volume.must(&["resume"]);
            assert_eq!(guest.wait(), (late, guest::OK));
            copied
        };
        copied.start();
        assert!(copied.seen() == expected, "round {round}");
        copied.qemu(&["write -P 0x77 1M 64k", "flush"]);
        copied.kill();
        copied.start();
        copied.must(&["start"]);
        copied.wait("all is local", |status| status["state"] == "done");
        copied.must(&["finish"]);
        assert!(copied.ended());
        let mut found = copied.content("data");
        found[MIB as usize..][..65536].copy_from_slice(&expected[MIB as usize..][..65536]);
        assert!(found == expected, "round {round}, at its end");
        expected[(8 + usize::from(round)) * 512..][..512].fill(0xff);
    }
    assert!(guest.seen(SIZE) == expected);
}

#[test]
fn a_pause_ends_by_itself_and_with_the_move() {
    let mut volume = Move::new("pause-ends");
    volume.start();
    let mut stream = UnixStream::connect(volume.path("runtime/control")).unwrap();
    let mut ask = |line: &str| {
        stream.write_all(format!("{line}\n").as_bytes()).unwrap();
        told(&mut stream)
    };
    let resume = r#"{"command": "resume"}"#;
    for seconds in [0, 61, u64::MAX] {
        let refused = ask(&format!(r#"{{"command": "pause", "seconds": {seconds}}}"#));
        assert!(refused.contains("1 to 60"), "{refused}");
    }
    assert!(ask(resume).contains("counts for nothing"));
    let begun = Instant::now();
    let ok = "{\"ok\":true}\n";
    assert_eq!(ask(r#"{"command": "pause", "seconds": 1}"#), ok);
    volume.qemu(&["read 0 4k"]);
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert!(ask(resume).contains("ended by itself"));
    assert_eq!(ask(r#"{"command": "pause", "seconds": 60}"#), ok);
    assert!(ask(r#"{"command": "status"}"#).contains("starting"));
    assert_eq!(ask(resume), ok);
    assert_eq!(ask(r#"{"command": "pause", "seconds": 60}"#), ok);
    volume.must(&["abort"]);
    assert!(volume.ended());
    volume.start();
    volume.must(&["pause", "--seconds", "60"]);
    send(volume.pid(), Signal::TERM);
    assert!(!volume.ended());
    volume.start();
    let complaint = complaint(&volume.ask(&["resume"]));
    assert!(complaint.contains("counts for nothing"), "{complaint}");
}

#[test]
fn metadata_are_copied_whole_or_not_at_all() {
    let mut volume = Move::new("copy");
    volume.start();
    volume.qemu(&["write -P 0x5c 0 1M", "write -P 0x5d 40M 4k"]);
    volume.kill();
    let refused = |id: &str, new: &str| {
        let output = volume.copy_metadata(id, new);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        complaint(&output)
    };
    let write = |name: &str, offset: u64, bytes: &[u8]| {
        let mut options = std::fs::File::options();
        let file = options.write(true).open(volume.path(name)).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    };
    assert!(refused(MOVE, OTHER).contains("copy"), "it is not there");
    std::os::unix::fs::symlink(volume.path("metadata"), volume.path("copy")).unwrap();
    assert!(refused(MOVE, OTHER).contains("itself"));
    std::fs::remove_file(volume.path("copy")).unwrap();
    std::fs::write(volume.path("copy"), vec![0x5c; MIB as usize]).unwrap();
    assert!(refused(MOVE, OTHER).contains("the copy needs"));
    let blank = vec![0x5c; 8 * MIB as usize];
    std::fs::write(volume.path("copy"), &blank).unwrap();
    assert!(refused(OTHER, MOVE).contains(MOVE));
    assert!(refused(MOVE, MOVE).contains("must differ"));
    assert!(volume.content("copy") == blank);
    // A whole copy, and one over it that comes to a damaged sector.
    assert!(volume.copy_metadata(MOVE, OTHER).status.success());
    let whole = volume.content("copy");
    let bitmap = (2 + 256) * 4096 + 2 * 512;
    let sector = &volume.content("metadata")[bitmap..][..512];
    write("metadata", bitmap as u64, &[0x5c; 512]);
    let complaint = refused(MOVE, OTHER);
    assert!(complaint.contains("bitmap:2"), "{complaint}");
    let complaint = volume.copied("copy-unfinished").refused();
    assert!(complaint.contains("not a superblock"), "{complaint}");
    write("metadata", bitmap as u64, sector);
    // It may be begun again; and one superblock is enough.
    write("metadata", 0, &[0; 4096]);
    assert!(volume.copy_metadata(MOVE, OTHER).status.success());
    assert!(volume.content("copy") == whole);
    let mut copied = volume.copied("copy-whole");
    copied.start();
    let mut expected = volume.content("source");
    expected[..MIB as usize].fill(0x5c);
    expected[40 << 20..(40 << 20) + 4096].fill(0x5d);
    assert!(copied.seen() == expected);
    // Metadata that are in use are not written over.
    let mut command = Command::new(PROGRAM);
    command.arg("copy").arg(volume.path("metadata"));
    command.args(["--move", MOVE, "--new-move", OTHER]);
    command.arg("--to").arg(copied.path("metadata"));
    let output = command.output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("in use"));
}

#[test]
fn damaged_metadata_are_refused_until_exactly_what_is_lost_is_accepted() {
    let mut volume = Move::new("damaged");
    volume.start();
    volume.kill();
    let journal = 256;
    let damage = |offset: u64| {
        let mut options = std::fs::File::options();
        let file = options.write(true).open(volume.path("metadata")).unwrap();
        file.write_all_at(&[0x5c; 512], offset).unwrap();
    };
    // The third sector of the bitmap, and one of the superblocks.
    damage((2 + journal) * 4096 + 2 * 512);
    damage(0);
    let complaint = volume.refused();
    assert!(complaint.contains("the first is bitmap:2"), "{complaint}");
    let tool = |arguments: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).arg(volume.path("metadata"));
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        (output.status.code(), said)
    };
    let (status, said) = tool(&["check"]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("wrong: superblock 0"), "{said}");
    assert!(said.contains("from byte 33030144 to 49545216"), "{said}");
    assert!(said.contains("repair --accept-loss bitmap:2 /"), "{said}");
    let before = volume.content("metadata");
    for wrong in [&["bitmap:1"][..], &["bitmap:2", "journal:0"]] {
        let accepted = wrong.iter().flat_map(|part| ["--accept-loss", part]);
        let (status, said) = tool(&["repair"].into_iter().chain(accepted).collect::<Vec<_>>());
        assert_eq!(status, Some(2), "{said}");
        assert!(volume.content("metadata") == before, "{said}");
    }
    let (status, said) = tool(&["repair", "--accept-loss", "bitmap:2"]);
    assert_eq!((status, said.as_str()), (Some(0), "mended: bitmap:2\n"));
    // The superblock is mended by the opening.
    volume.start();
    volume.kill();
    let output = Command::new(PROGRAM)
        .arg("check")
        .arg(volume.path("metadata"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn what_a_destination_reads_where_nothing_was_written_is_recorded_once() {
    for zeroed in [true, false] {
        let mut volume = Move::new(&format!("zeroed-{zeroed}"));
        for told in [zeroed, !zeroed] {
            volume.zeroed = told;
            volume.start();
            volume.kill();
        }
        let metadata = volume.path("metadata");
        let said = |command: &str| {
            let output = Command::new(PROGRAM).arg(command).arg(&metadata).output();
            String::from_utf8(output.unwrap().stdout).unwrap()
        };
        let dump: Value = serde_json::from_str(&said("dump")).unwrap();
        for copy in dump["superblocks"].as_array().unwrap() {
            assert_eq!(copy["zeroed"], zeroed, "{dump}");
        }
        assert_eq!(said("check").contains("reads zeros"), zeroed);
    }
}

#[test]
fn bad_disks_are_named_and_nothing_is_written() {
    let volume = Move::new("bad");
    let write = |name: &str, bytes: &[u8]| std::fs::write(volume.path(name), bytes).unwrap();
    // Foreign metadata
    write("metadata", &vec![0x5c; 8 * MIB as usize]);
    let complaint = volume.refused();
    assert!(complaint.contains("metadata"), "{complaint}");
    assert!(volume.content("metadata") == vec![0x5c; 8 * MIB as usize]);
    let output = Command::new(PROGRAM)
        .arg("check")
        .arg(volume.path("metadata"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    // Too small ones
    write("metadata", &[0; 8192]);
    let complaint = volume.refused();
    assert!(complaint.contains("need"), "{complaint}");
    write("metadata", &vec![0; 8 * MIB as usize]);
    write("data", &[0; 4096]);
    let complaint = volume.refused();
    assert!(complaint.contains("too small"), "{complaint}");
    assert!(volume.content("metadata") == vec![0; 8 * MIB as usize]);
    // A missing one
    std::fs::remove_file(volume.path("source")).unwrap();
    let complaint = volume.refused();
    assert!(complaint.contains("source"), "{complaint}");
}

#[test]
fn metadata_of_another_move_are_refused() {
    let mut volume = Move::new("foreign");
    volume.start();
    volume.must(&["abort"]);
    assert!(volume.ended());
    let metadata = volume.content("metadata");
    let other = MOVE.replace("a6f0", "b6f0");
    let mut command = Command::new(PROGRAM);
    command.args(["run", "--move", &other, "--new", "--frontend", "socket"]);
    for name in ["data", "metadata", "source", "runtime"] {
        command.arg(format!("--{name}")).arg(volume.path(name));
    }
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("another move"), "{complaint}");
    assert!(volume.content("metadata") == metadata);
    // Without --new blank metadata are no move, either.
    let file = std::fs::File::options()
        .write(true)
        .open(volume.path("metadata"))
        .unwrap();
    file.write_all_at(&[0; 8192], 0).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["run", "--move", MOVE, "--frontend", "socket"]);
    for name in ["data", "metadata", "source", "runtime"] {
        command.arg(format!("--{name}")).arg(volume.path(name));
    }
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("--new"), "{complaint}");
}

#[test]
fn who_detaches_gets_a_device_that_is_usable_and_survives_the_end_of_the_move_only() {
    for (name, verb) in [("detached-abort", "abort"), ("detached-finish", "finish")] {
        let mut volume = Move::new(name);
        volume.served();
        let supervisor = volume.supervisor();
        let mut expected = volume.content("source");
        assert!(volume.seen() == expected);
        volume.qemu(&["write -P 0x5c 512 1M", "flush"]);
        expected[512..512 + MIB as usize].fill(0x5c);
        if verb == "finish" {
            volume.must(&["start"]);
            volume.wait("all is local", |status| status["state"] == "done");
        }
        volume.must(&[verb]);
        assert!(!volume.path("runtime").exists());
        await_end(supervisor);
        assert!(!volume.path("runtime").exists());
        assert_eq!(volume.content("data") == expected, verb == "finish");
    }
}

#[test]
fn a_killed_process_has_a_successor_by_itself() {
    let mut volume = Move::new("detached-killed");
    let mut pid = volume.served();
    for round in 0..3u8 {
        let write = format!("write -P {} {round}M 300k", 0x10 + round);
        volume.qemu(&[&write, "flush"]);
        send(pid, Signal::KILL);
        pid = volume.successor_of(pid);
        let read = write.replace("write", "read");
        volume.qemu(&[&read]);
    }
}

#[test]
fn the_kernel_kills_others_when_memory_is_short() {
    const SYS_RESOURCE: u32 = 24;
    let capabilities = figure("self", "CapEff:");
    let mut volume = Move::new("detached-memory");
    let child = volume.served();
    for pid in [child, volume.supervisor()] {
        let score = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        if capabilities >> SYS_RESOURCE & 1 == 1 {
            assert_eq!(score.trim_end(), "-1000");
        } else {
            let log = std::fs::read_to_string(volume.path("runtime/log")).unwrap();
            assert!(log.contains("may kill this process"), "{log}");
        }
    }
    volume.must(&["abort"]);
}

#[test]
fn a_process_without_its_supervisor_is_taken_for_running() {
    let mut volume = Move::new("detached-orphan");
    let pid = volume.served();
    let supervisor = volume.supervisor();
    send(supervisor, Signal::KILL);
    await_end(supervisor);
    assert_eq!(volume.served(), pid);
    assert_eq!(volume.supervisor(), supervisor);
    // Nobody starts it again, until somebody asks for it.
    send(pid, Signal::KILL);
    await_end(pid);
    assert!(!volume.ask(&["status"]).status.success());
    let pid = volume.served();
    assert_ne!(volume.supervisor(), supervisor);
    send(pid, Signal::KILL);
    volume.successor_of(pid);
}

#[test]
fn who_serves_a_guest_has_given_up_what_it_does_not_need() {
    const IPC_LOCK: u64 = 1 << 14;
    const FILTERED: u64 = 2;
    for (frontend, socket) in [("socket", "nbd"), ("vhost-user-blk", "vhost")] {
        let mut volume = Move::new(&format!("confined-{socket}"));
        volume.frontend = frontend;
        let pid = volume.served_at(socket).to_string();
        for name in ["CapEff:", "CapPrm:", "CapInh:"] {
            assert_eq!(figure(&pid, name) & !IPC_LOCK, 0, "{name}");
        }
        assert_eq!(figure(&pid, "Seccomp:"), FILTERED);
        assert_eq!(figure(&pid, "NoNewPrivs:"), 1);
        // Who starts its successor is what it was.
        let supervisor = volume.supervisor().to_string();
        assert_eq!(figure(&supervisor, "CapEff:"), figure("self", "CapEff:"));
        assert_eq!(figure(&supervisor, "Seccomp:"), figure("self", "Seccomp:"));
        volume.must(&["abort"]);
    }
}

#[test]
fn many_starts_are_one() {
    let mut volume = Move::new("detached-many");
    volume.detached = true;
    let starts: Vec<_> = (0..4)
        .map(|_| {
            let mut command = volume.command();
            let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
            piped.arg("--detach").spawn().unwrap()
        })
        .collect();
    for start in starts {
        let output = start.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(
            printed.trim_end(),
            volume.path("runtime/nbd").to_str().unwrap()
        );
    }
    let (pid, supervisor) = (volume.pid(), volume.supervisor());
    assert_eq!(volume.served(), pid);
    assert_eq!(volume.supervisor(), supervisor);
    // Even those that begin at the same moment
    let mut late = Command::new(PROGRAM);
    late.arg("supervise")
        .args(volume.command().get_args().skip(1));
    assert_eq!(late.output().unwrap().status.code(), Some(5));
    let log = std::fs::read_to_string(volume.path("runtime/log")).unwrap();
    assert_eq!(log.matches("supervising").count(), 1, "{log}");
    assert_eq!(log.matches("is usable after").count(), 1, "{log}");
}

#[test]
fn another_move_in_the_same_place_is_refused() {
    let mut volume = Move::new("detached-other");
    let pid = volume.served();
    let other = MOVE.replace("a6f0", "b6f0");
    let mut command = Command::new(PROGRAM);
    command.args(["run", "--detach", "--move", &other, "--frontend", "socket"]);
    for name in ["data", "metadata", "source", "runtime"] {
        command.arg(format!("--{name}")).arg(volume.path(name));
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let complaint = complaint(&output);
    assert!(
        complaint.contains(MOVE) && complaint.contains(&other),
        "{complaint}"
    );
    assert_eq!(volume.pid(), pid);
}

#[test]
fn what_can_not_begin_says_why_and_ends() {
    let mut volume = Move::new("detached-bad");
    std::fs::remove_file(volume.path("source")).unwrap();
    let output = volume.detach();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let reason = complaint(&output);
    assert_eq!(reason.lines().count(), 1, "{reason}");
    let source = volume.path("source").display().to_string();
    assert!(
        reason.contains(&format!("cannot open {source}")),
        "{reason}"
    );
    await_end(volume.supervisor());
    // Mended, it begins as if nothing had been.
    std::fs::write(volume.path("source"), vec![0; SIZE as usize]).unwrap();
    volume.served();
}

#[test]
fn what_has_worked_is_tried_again_after_a_failure() {
    let mut volume = Move::new("detached-failed");
    let pid = volume.served();
    std::fs::rename(volume.path("source"), volume.path("elsewhere")).unwrap();
    send(pid, Signal::KILL);
    let start = Instant::now();
    let log = || std::fs::read_to_string(volume.path("runtime/log")).unwrap();
    while log().matches("a successor in").count() < 3 {
        assert!(start.elapsed() < PATIENCE, "{}", log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(log().contains("died of signal 9"), "{}", log());
    assert!(log().contains("has failed: cannot open"), "{}", log());
    std::fs::rename(volume.path("elsewhere"), volume.path("source")).unwrap();
    volume.successor_of(pid);
}

#[test]
fn who_leaves_has_the_program_of_now_as_its_successor() {
    let mut volume = Move::new("detached-upgrade");
    volume.detached = true;
    let program = volume.path("program");
    std::os::unix::fs::symlink(PROGRAM, &program).unwrap();
    let mut command = volume.command_of(&program);
    let output = command.arg("--detach").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let pid = volume.pid();
    let upgrade = format!("#!/bin/sh\necho upgraded >&2\nexec {PROGRAM} \"$@\"\n");
    std::fs::remove_file(&program).unwrap();
    std::fs::write(&program, upgrade).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    send(pid, Signal::TERM);
    volume.successor_of(pid);
    let log = std::fs::read_to_string(volume.path("runtime/log")).unwrap();
    assert!(log.contains("upgraded"), "{log}");
}

#[test]
fn who_leaves_in_mid_move_leaves_soon_however_slow_the_move_is() {
    let mut volume = Move::new("detached-slow");
    let mut pid = volume.served();
    for round in 0..8u8 {
        volume.must(&["throttle", "--limit", "1M", "--minimum", "1M"]);
        volume.must(&["start"]);
        // What is to be recorded at the end
        volume.qemu(&[&format!("write -P 0x5c {round}M 1M")]);
        send(pid, Signal::TERM);
        pid = volume.successor_of(pid);
    }
}

#[test]
fn a_supervisor_that_is_ended_takes_its_process_along() {
    let mut volume = Move::new("detached-ended");
    let pid = volume.served();
    let supervisor = volume.supervisor();
    volume.qemu(&["write -P 0x5c 512 1M", "flush"]);
    send(supervisor, Signal::TERM);
    await_end(supervisor);
    await_end(pid);
    assert!(!volume.ask(&["status"]).status.success());
    assert_ne!(volume.served(), pid);
    volume.qemu(&["read -P 0x5c 512 1M"]);
}

#[test]
fn an_end_by_a_signal_is_told_from_the_end_of_the_move() {
    let mut volume = Move::new("departed");
    volume.start();
    let pid = volume.pid();
    send(pid, Signal::TERM);
    let status = volume.process.take().unwrap().wait().unwrap();
    assert_eq!(status.code(), Some(3));
}

#[test]
fn patience_ends_before_the_work_does() {
    let mut volume = Move::new("detached-patience");
    volume.detached = true;
    let data = std::fs::File::open(volume.path("data")).unwrap();
    rustix::fs::flock(&data, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut command = volume.command();
    let output = command
        .args(["--detach", "--patience", "1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert!(output.stdout.is_empty());
    let complaint = complaint(&output);
    assert!(
        complaint.contains("localstor-hydrator status"),
        "{complaint}"
    );
    drop(data);
    volume.wait("it is usable", |status| !status["device"].is_null());
    volume.served();
}

#[test]
fn nobody_else_may_reach_a_volume_whatever_the_umask() {
    let mut volume = Move::new("private");
    volume.detached = true;
    let mut command = Command::new("sh");
    command.args(["-c", "umask 0; exec \"$@\"", "sh", PROGRAM]);
    command.args(volume.command().get_args()).arg("--detach");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mode = |name: &str| {
        let found = std::fs::symlink_metadata(volume.path(name)).unwrap();
        found.permissions().mode() & 0o777
    };
    assert_eq!(mode("runtime"), 0o700);
    assert_eq!(mode("runtime/control"), 0o600);
    for name in ["nbd", "log", "lock"] {
        assert_eq!(mode(&format!("runtime/{name}")) & 0o077, 0, "{name}");
    }
}

#[test]
fn a_long_log_begins_anew() {
    let mut volume = Move::new("detached-log");
    volume.served();
    let log = volume.path("runtime/log");
    let mut file = std::fs::File::options().append(true).open(&log).unwrap();
    file.write_all(&vec![b'x'; MIB as usize]).unwrap();
    let start = Instant::now();
    while std::fs::metadata(&log).unwrap().len() > 0 {
        assert!(start.elapsed() < PATIENCE, "the log stays long");
        std::thread::sleep(Duration::from_millis(20));
    }
    let old = std::fs::read(volume.path("runtime/log.old")).unwrap();
    assert!(old.len() as u64 > MIB);
    // What is printed from now on is in the new one.
    let pid = volume.pid();
    send(pid, Signal::KILL);
    volume.successor_of(pid);
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(log.contains("died of signal 9"), "{log}");
    volume.must(&["abort"]);
    assert!(!volume.path("runtime").exists());
}

#[test]
fn what_died_for_good_is_removed_by_an_abort() {
    let mut volume = Move::new("detached-leftover");
    let child = volume.served();
    let supervisor = volume.supervisor();
    for pid in [supervisor, child] {
        send(pid, Signal::KILL);
        await_end(pid);
    }
    volume.must(&["abort"]);
    assert!(!volume.path("runtime").exists());
    let again = volume.ask(&["abort"]);
    assert!(complaint(&again).contains("no hydrator"), "{again:?}");
}
