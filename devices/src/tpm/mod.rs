//! A TPM 2.0 with the CRB interface. The program swtpm on the other ends of two sockets is the TPM.
//!
//! ```text
//! vCPU ── registers ──▶ Crb ── wake ──▶ worker ── commands ──▶ data channel ───┐
//!                        ▲                │                                    ├─ swtpm
//!                        └─── answer ─────┘      pause, reset, save, restore ──┘
//!                                                            control channel
//! ```
//!
//! [`Crb`] owns the registers and the data buffer. At most one command is in progress. Only the worker
//! exchanges commands and answers with swtpm, because a command takes up to some seconds. The driver
//! polls the register CTRL_START meanwhile. The control channel is used at power-on and at resets, and
//! while the machine is paused.
//!
//! swtpm is not trusted. Each answer has bounds in length and time. After an error the TPM has failed
//! until the VM's next start: it answers each command with TPM_RC_FAILURE. Another process would have
//! empty PCRs, and a guest could extend them to any value.

mod crb;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fuzz;
mod swtpm;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use vmm_base::{
    sys::event::event_fd,
    thread::{Server, ThreadKind},
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use self::crb::{ADDRESS, CONTROL_AREA, LENGTH};
use self::{
    crb::Crb,
    swtpm::{Blob, Control, Data, Wait},
};
use crate::{
    bus::SharedDevice,
    component::{Component, ComponentError},
    state::{Section, StateError, check, message},
    virtio::fault::{DeviceEvent, EventSink},
};

/// The device.
pub struct Tpm {
    control: Control,
    shared: Arc<Shared>,
    /// Ends with the device.
    _worker: Server,
}

/// Parts that the component and its worker use.
struct Shared {
    crb: Arc<Mutex<Crb>>,
    /// Signalled when a command has its answer.
    answered: Condvar,
    /// swtpm is unusable.
    failed: AtomicBool,
    sink: Arc<dyn EventSink>,
}

impl Shared {
    fn crb(&self) -> MutexGuard<'_, Crb> {
        self.crb.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that swtpm is unusable, and reports it once.
    fn fail(&self, error: &io::Error) {
        if !self.failed.swap(true, Ordering::Relaxed) {
            let message = format!("{error}: the TPM fails all commands until the VM's next start");
            self.sink.report(NAME, DeviceEvent::BackendError(message));
        }
    }
}

/// Name of the component.
const NAME: &str = "tpm";
/// How long a reset waits for a command. The machine tries the reset again after that.
const RESET_WAIT: Duration = Duration::from_millis(100);

impl Tpm {
    /// Switches on the TPM of a swtpm that has its state directory. `data` and `control` are connected
    /// stream sockets, the other ends of its options `--fd` and `--ctrl type=unixio,clientfd=`.
    ///
    /// # Errors
    ///
    /// swtpm gives no valid answer in time, or does not accept its state.
    pub fn new(data: OwnedFd, control: OwnedFd, sink: Arc<dyn EventSink>) -> io::Result<Self> {
        let control = Control::new(control);
        control.power_on()?;
        let wake = EventFd::new(EFD_NONBLOCK)?;
        let shared = Arc::new(Shared {
            crb: Arc::new(Mutex::new(Crb::new(wake.try_clone()?))),
            answered: Condvar::new(),
            failed: AtomicBool::new(false),
            sink,
        });
        let of_worker = Arc::clone(&shared);
        let worker = Server::start(ThreadKind::Worker, NAME, |stop| {
            let worker = Worker {
                shared: of_worker,
                wake,
                data: Data::new(data, stop),
            };
            Ok(move || worker.run())
        })?;
        Ok(Self {
            control,
            shared,
            _worker: worker,
        })
    }

    /// Its registers: [`LENGTH`] bytes at the address [`ADDRESS`].
    pub fn registers(&self) -> SharedDevice {
        self.shared.crb.clone()
    }

    fn has_failed(&self) -> bool {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// Waits until no command is in progress, at most this long.
    fn settle(&self, left: Duration) -> Result<(), ComponentError> {
        let waited = self
            .shared
            .answered
            .wait_timeout_while(self.shared.crb(), left, |crb| crb.executes());
        let (crb, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match crb.executes() {
            true => Err(ComponentError::DrainTimeout),
            false => Ok(()),
        }
    }
}

impl Component for Tpm {
    fn name(&self) -> &str {
        NAME
    }

    fn pause(&mut self, deadline: Instant) -> Result<(), ComponentError> {
        self.settle(deadline.saturating_duration_since(Instant::now()))
    }

    fn resume(&mut self) -> Result<(), ComponentError> {
        Ok(())
    }

    /// The machine continues without a TPM if swtpm fails here.
    fn reset(&mut self) -> Result<(), ComponentError> {
        self.settle(RESET_WAIT)?;
        self.shared.crb().reset();
        if !self.has_failed()
            && let Err(error) = self.control.power_on()
        {
            self.shared.fail(&error);
        }
        Ok(())
    }

    /// The state of swtpm is part of the state, so it goes wherever the machine goes.
    fn save(&self) -> Result<Section, StateError> {
        if self.has_failed() {
            let why = "swtpm has failed: stop and start the VM";
            return Err(StateError::not_migratable("the TPM", why));
        }
        let blob = |blob| {
            let read = self.control.blob(blob);
            read.map_err(|error| StateError::not_migratable("the TPM", error.to_string()))
        };
        let mut state = self.shared.crb().save();
        state.permanent = blob(Blob::Permanent)?;
        state.volatile = blob(Blob::Volatile)?;
        state.save_state = blob(Blob::SaveState)?;
        Ok(Section::new(NAME, &state))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let saved: message::Tpm = section.open()?;
        let blobs = [
            ("permanent", Blob::Permanent, &saved.permanent),
            ("volatile", Blob::Volatile, &saved.volatile),
            ("save_state", Blob::SaveState, &saved.save_state),
        ];
        for (field, _, content) in blobs {
            check(content.len() <= swtpm::MAX_BLOB, field, "it is too large")?;
        }
        check(!saved.permanent.is_empty(), "permanent", "it is absent")?;
        self.shared.crb().restore(&saved)?;
        let refused = |field| move |error: io::Error| StateError::invalid(field, error.to_string());
        self.control.power_off().map_err(refused("permanent"))?;
        for (field, blob, content) in blobs {
            self.control.set_blob(blob, content).map_err(refused(field))?;
        }
        self.control.resume().map_err(refused("volatile"))
    }
}

/// Carries out commands.
struct Worker {
    shared: Arc<Shared>,
    wake: EventFd,
    data: Data,
}

impl Worker {
    fn run(mut self) {
        loop {
            let watches_data = !self.shared.failed.load(Ordering::Relaxed);
            match self.data.wait(event_fd(&self.wake), watches_data) {
                Ok(Wait::Stop) => return,
                Ok(Wait::Woken) => {
                    // A count that another wake-up has read.
                    let _empty = self.wake.read();
                    self.serve();
                }
                Err(error) => self.shared.fail(&error),
            }
        }
    }

    fn serve(&mut self) {
        let Some(command) = self.shared.crb().command() else {
            return;
        };
        let answer = match command {
            Ok(command) if !self.shared.failed.load(Ordering::Relaxed) => {
                let answer = self.data.exchange(&command);
                answer.unwrap_or_else(|error| {
                    self.shared.fail(&error);
                    crb::response(crb::TPM_RC_FAILURE)
                })
            }
            Ok(_) => crb::response(crb::TPM_RC_FAILURE),
            Err(code) => crb::response(code),
        };
        self.shared.crb().complete(&answer);
        self.shared.answered.notify_all();
    }
}
