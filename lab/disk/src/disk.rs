// SPDX-License-Identifier: Apache-2.0
//! One disk, shared by the node that uses it and the lab that controls it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use thiserror::Error;

use crate::cache::{self, Cache, Content, Losses, Moment};
use crate::loss::Lose;

/// What is known of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Its size in bytes.
    pub capacity: u64,
    /// Whether a node is connected.
    pub connected: bool,
    /// Whether a flush does what it promises.
    pub obeys_flushes: bool,
    /// Whether everything that it is asked for fails.
    pub fails: bool,
    /// How many flushes were asked for since the disk's start.
    pub flushes: u64,
    /// How many writes were not flushed.
    pub unflushed: usize,
    /// How many bytes of the cache are taken.
    pub held: u64,
}

struct State {
    cache: Cache,
    // Sessions of before the last power cut have no say any more.
    power_cycle: u64,
    connected: bool,
    obeys_flushes: bool,
    fails: bool,
    flushes: u64,
}

/// The disk.
pub struct Disk {
    state: Mutex<State>,
}

impl Disk {
    /// A disk that has power and no node.
    pub fn new(cache: Cache) -> Self {
        Disk {
            state: Mutex::new(State {
                cache,
                power_cycle: 0,
                connected: false,
                obeys_flushes: true,
                fails: false,
                flushes: 0,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic happens between two changes that belong
        // together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of it.
    pub fn status(&self) -> Status {
        let state = self.lock();
        Status {
            capacity: state.cache.capacity(),
            connected: state.connected,
            obeys_flushes: state.obeys_flushes,
            fails: state.fails,
            flushes: state.flushes,
            unflushed: state.cache.unflushed(),
            held: state.cache.held(),
        }
    }

    /// A node connects. The power is on again, if it was off.
    pub fn plug_in(self: &Arc<Self>) -> Plug {
        let mut state = self.lock();
        state.connected = true;
        Plug {
            disk: self.clone(),
            power_cycle: state.power_cycle,
        }
    }

    /// Cut the power: unflushed writes are lost or not, as the seed decides.
    /// Who is connected is not answered any more.
    pub fn cut_power(&self, seed: u64, lose: Lose) -> Result<Losses, cache::Error> {
        let mut state = self.lock();
        state.power_cycle += 1;
        state.cache.cut_power(seed, lose)
    }

    /// Let flushes do what they promise, or let the disk lie.
    pub fn obey_flushes(&self, obeys: bool) {
        self.lock().obeys_flushes = obeys;
    }

    /// Let everything that it is asked for fail, as a disk does that has died, or
    /// let it work again.
    pub fn fail(&self, fails: bool) {
        self.lock().fails = fails;
    }

    /// Make everything durable and switch off.
    pub fn shut_down(&self) -> Result<(), cache::Error> {
        let mut state = self.lock();
        state.power_cycle += 1;
        state.cache.write_out()
    }
}

/// Why a disk does not do what its node asks for.
#[derive(Debug, Error)]
pub enum Refusal {
    /// The power was cut since the node connected: it gets no answer.
    #[error("the disk has no power")]
    NoPower,
    /// Every request fails.
    #[error("the disk has died")]
    Dead,
    /// The request fails.
    #[error(transparent)]
    Failed(#[from] cache::Error),
}

/// The disk as a node sees it, until the power is cut.
///
/// Unplugging it loses nothing: the disk still has power.
pub struct Plug {
    disk: Arc<Disk>,
    power_cycle: u64,
}

impl Plug {
    fn lock(&self) -> Result<MutexGuard<'_, State>, Refusal> {
        let state = self.disk.lock();
        if state.power_cycle == self.power_cycle {
            Ok(state)
        } else {
            Err(Refusal::NoPower)
        }
    }

    fn working(&self) -> Result<MutexGuard<'_, State>, Refusal> {
        let state = self.lock()?;
        if state.fails {
            Err(Refusal::Dead)
        } else {
            Ok(state)
        }
    }

    /// The disk's size in bytes.
    pub fn capacity(&self) -> u64 {
        self.disk.lock().cache.capacity()
    }

    /// The size of a block in bytes.
    pub fn block(&self) -> u64 {
        self.disk.lock().cache.block()
    }

    /// Now.
    pub fn now(&self) -> Result<Moment, Refusal> {
        Ok(self.lock()?.cache.now())
    }

    /// As [`Cache::read`].
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Refusal> {
        Ok(self.working()?.cache.read(offset, buffer)?)
    }

    /// As [`Cache::write`].
    pub fn write(&self, offset: u64, content: Content) -> Result<(), Refusal> {
        Ok(self.working()?.cache.write(offset, content)?)
    }

    /// As [`Cache::flush`], unless the disk lies.
    pub fn flush(&self, before: Moment) -> Result<(), Refusal> {
        let mut state = self.working()?;
        state.flushes += 1;
        if state.obeys_flushes {
            state.cache.flush(before)?;
        }
        Ok(())
    }
}

impl Drop for Plug {
    fn drop(&mut self) {
        self.disk.lock().connected = false;
    }
}
