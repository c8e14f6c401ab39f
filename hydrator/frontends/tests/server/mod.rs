// SPDX-License-Identifier: Apache-2.0
//! A frontend's server over a file, in a thread.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use localstor_hydrator_disks::{Access, Disk, Memory, Owner, Ring};
use localstor_hydrator_frontends::linear::Linear;
use localstor_hydrator_frontends::{Arrival, Frontend, FrontendError, Geometry, Stage};

/// How a frontend listens on a socket.
pub(crate) struct Kind<F> {
    /// The bytes of memory that it needs.
    pub(crate) memory: fn() -> usize,
    pub(crate) listen: fn(&Path, Geometry, &mut Ring, &mut Memory) -> Result<F, FrontendError>,
}

/// How long a server lets a request wait at the most.
const LONGEST_WAIT: Duration = Duration::from_secs(20);

pub(crate) struct Server {
    pub(crate) image: PathBuf,
    pub(crate) socket: PathBuf,
    /// Whether what is asked of the last block has to wait, as if its disk were
    /// away.
    #[allow(dead_code, reason = "not all tests have use for it")]
    pub(crate) away: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves a file of random bytes.
    pub(crate) fn start<F: Frontend + 'static>(name: &str, size: usize, kind: Kind<F>) -> Server {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let image = folder.join(format!("{name}.img"));
        let socket = folder.join(format!("{name}.sock"));
        let _ = std::fs::remove_file(&socket);
        let mut content = vec![0; size];
        std::fs::File::open("/dev/urandom")
            .unwrap()
            .read_exact(&mut content)
            .unwrap();
        std::fs::write(&image, content).unwrap();
        let away = Arc::new(AtomicBool::new(false));
        let ended = Arc::new(AtomicBool::new(false));
        let (ready, listening) = channel();
        let thread = std::thread::spawn({
            let (image, socket) = (image.clone(), socket.clone());
            let (away, ended) = (Arc::clone(&away), Arc::clone(&ended));
            move || serve(&kind, &image, &socket, &away, &ended, &ready)
        });
        listening.recv().expect("a server");
        Server {
            image,
            socket,
            away,
            ended,
            thread: Some(thread),
        }
    }

    pub(crate) fn content(&self) -> Vec<u8> {
        std::fs::read(&self.image).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
            assert!(!self.socket.exists());
        }
    }
}

fn serve<F: Frontend>(
    kind: &Kind<F>,
    image: &Path,
    socket: &Path,
    away: &AtomicBool,
    ended: &AtomicBool,
    ready: &Sender<()>,
) {
    let mut ring = Ring::new(256, false).unwrap();
    // The kernel lets go of a predecessor's ring, and so of the image, later.
    let access = Access::Exclusive(Duration::from_secs(10));
    let disk = Disk::open(image, access, &mut ring).unwrap();
    let geometry = Geometry {
        size: disk.size(),
        logical_block: disk.logical_block(),
    };
    let mut memory = Memory::new((kind.memory)()).unwrap();
    let mut frontend = (kind.listen)(socket, geometry, &mut ring, &mut memory).unwrap();
    ready.send(()).unwrap();
    let mut engine = Linear::new(disk);
    let mut arrivals = Vec::new();
    let mut waiting: Vec<Arrival> = Vec::new();
    let mut since = Instant::now();
    while frontend.stage() != Stage::Gone {
        if frontend.stage() == Stage::Ready && ended.load(Ordering::Relaxed) {
            frontend.stop(&mut ring).unwrap();
        }
        if since.elapsed() > LONGEST_WAIT {
            away.store(false, Ordering::Relaxed);
        }
        if !away.load(Ordering::Relaxed) {
            for arrival in waiting.drain(..) {
                engine.submit(&mut ring, arrival);
            }
        }
        ring.wait(Some(Duration::from_millis(10))).unwrap();
        while let Some(event) = ring.next_event() {
            match event.token.owner() {
                Owner::Frontend => frontend.on_event(&mut ring, event, &mut arrivals).unwrap(),
                Owner::Engine => {
                    if let Some((tag, outcome)) = engine.on_event(&mut ring, event) {
                        frontend.complete(&mut ring, tag, outcome, &mut arrivals);
                    }
                }
                _ => {}
            }
            for arrival in arrivals.drain(..) {
                let is_last = arrival.request.offset >= geometry.size - 4096;
                if is_last && away.load(Ordering::Relaxed) {
                    since = Instant::now();
                    waiting.push(arrival);
                } else {
                    engine.submit(&mut ring, arrival);
                }
            }
        }
    }
}
