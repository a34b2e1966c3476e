//! State that the front, the back and the server of a console share: the output, and the input that
//! waits for the driver.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::config::Config;
use crate::{
    serial::{History, Port},
    state::{StateError, check, message},
    virtio::signals::Signals,
};

/// Input that waits for buffers of the driver, in bytes.
pub(super) const BACKLOG: usize = 4096;

pub(super) struct Shared {
    history: Arc<History>,
    state: Mutex<State>,
    /// Signalled when input has come for the worker.
    wake: EventFd,
    /// Signalled when there is room again, after a sender found none.
    room: EventFd,
    signals: OnceLock<Arc<Signals>>,
}

#[derive(Default)]
struct State {
    backlog: VecDeque<u8>,
    /// The machine is paused: no input is let in.
    paused: bool,
    /// A sender found no room.
    starved: bool,
    config: Config,
}

impl Shared {
    pub fn new(history: Arc<History>) -> io::Result<Self> {
        let event = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        Ok(Self {
            history,
            state: Mutex::default(),
            wake: event()?,
            room: event()?,
            signals: OnceLock::new(),
        })
    }

    pub fn connect(&self, signals: &Arc<Signals>) {
        // There is one device for each, so it is set once.
        let _again = self.signals.set(Arc::clone(signals));
    }

    pub fn wake(&self) -> &EventFd {
        &self.wake
    }

    pub fn print(&self, text: &[u8]) {
        self.history.extend(text);
    }

    pub fn config(&self) -> Config {
        self.lock().config
    }

    pub fn set_config(&self, config: Config) {
        self.lock().config = config;
    }

    pub fn resize(&self, columns: u16, rows: u16) {
        let config = Config { columns, rows };
        let before = std::mem::replace(&mut self.lock().config, config);
        if let Some(signals) = self.signals.get().filter(|_| before != config) {
            signals.config_changed();
        }
    }

    /// How many bytes of input wait.
    pub fn waiting(&self) -> usize {
        self.lock().backlog.len()
    }

    /// Copies the oldest bytes of input, at most as many as `space` holds. The bytes stay in the
    /// backlog until [`taken`](Self::taken).
    pub fn peek(&self, space: &mut [u8]) -> usize {
        let state = self.lock();
        let mut count: usize = 0;
        for (to, from) in space.iter_mut().zip(&state.backlog) {
            *to = *from;
            count = count.saturating_add(1);
        }
        count
    }

    /// The driver has that many of the oldest bytes.
    pub fn taken(&self, count: usize) {
        let mut state = self.lock();
        let count = count.min(state.backlog.len());
        drop(state.backlog.drain(..count));
        // Half of it free: a sender is not woken for every handful of bytes.
        let news = state.backlog.len() <= BACKLOG / 2 && !state.paused && std::mem::take(&mut state.starved);
        drop(state);
        if news {
            signal(&self.room);
        }
    }

    /// Lets no input in, or lets it in again.
    pub fn set_paused(&self, paused: bool) {
        let mut state = self.lock();
        state.paused = paused;
        let news = !paused && state.backlog.len() <= BACKLOG / 2 && std::mem::take(&mut state.starved);
        drop(state);
        if news {
            signal(&self.room);
        }
    }

    pub fn save(&self) -> message::VirtioConsoleQueues {
        message::VirtioConsoleQueues {
            backlog: self.lock().backlog.iter().copied().collect(),
        }
    }

    /// Input that came meanwhile is kept behind the saved one.
    pub fn restore(&self, saved: &message::VirtioConsoleQueues) -> Result<(), StateError> {
        check(
            saved.backlog.len() <= BACKLOG,
            "backlog",
            "more than a console keeps",
        )?;
        let mut state = self.lock();
        let came = std::mem::take(&mut state.backlog);
        state.backlog = saved.backlog.iter().copied().chain(came).take(BACKLOG).collect();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Port for Shared {
    fn history(&self) -> Arc<History> {
        Arc::clone(&self.history)
    }

    fn room(&self) -> usize {
        let mut state = self.lock();
        let room = BACKLOG.saturating_sub(state.backlog.len());
        state.starved |= room == 0 || state.paused;
        if state.starved { 0 } else { room }
    }

    fn room_event(&self) -> io::Result<EventFd> {
        self.room.try_clone()
    }

    fn receive(&self, input: &[u8]) {
        let mut state = self.lock();
        let room = BACKLOG.saturating_sub(state.backlog.len());
        state.backlog.extend(input.get(..room).unwrap_or(input));
        drop(state);
        signal(&self.wake);
    }
}

fn signal(event: &EventFd) {
    // It can only fail when the counter is full, and then it is readable.
    let _full = event.write(1);
}
