// SPDX-License-Identifier: Apache-2.0
//! The program, over files, with NBD clients; killed and started anew.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_localstor-hydrator");
const MOVE: &str = "a6f07385-e34d-48a1-930e-7179e7b63cdb";
const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const PATIENCE: Duration = Duration::from_secs(60);

/// The disks of a move, and its helper.
struct Move {
    folder: PathBuf,
    process: Option<Child>,
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
            process: None,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn content(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    fn command(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["run", "--move", MOVE, "--new", "--frontend", "socket"]);
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
        self.process = Some(self.command().stderr(log).spawn().unwrap());
        self.wait("it is usable", |status| !status["device"].is_null());
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
                let log = std::fs::read_to_string(self.path("log")).unwrap();
                panic!("waited for: {what}; {output:?}\n{log}");
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
    }
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
