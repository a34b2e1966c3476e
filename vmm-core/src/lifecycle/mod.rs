//! The life of a machine: one thread (`main`) owns it and takes one request or notice at a time ([`driver`]); what
//! may happen when is a pure function ([`admission`]); who listens is told by the [`publisher`].

pub mod admission;
pub mod driver;
pub mod publisher;

use std::{os::fd::OwnedFd, sync::mpsc::Sender};

use proto::vmm::{ErrorKind, MachineSpec};

/// Names a request, so that its answer finds the way back; the asker chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    /// Which of the asker's connections.
    pub connection: u64,
    /// The request's id there.
    pub request: u64,
}

/// What the driver takes.
#[derive(Debug)]
pub enum Input {
    /// Somebody asks for something and gets one answer.
    Request(Token, Request),
    /// The machine tells something.
    Notice(Notice),
    /// Nobody will ever boot a machine here.
    Abandoned,
}

/// What can be asked for; see [`proto::vmm::request::Op`].
#[derive(Debug)]
pub enum Request {
    /// Builds the machine and starts the guest.
    Boot {
        /// What it is built of.
        spec: Box<MachineSpec>,
        /// The descriptors that the spec names.
        fds: Vec<OwnedFd>,
        /// Leave the vCPUs stopped.
        paused: bool,
    },
    /// Makes it quiet.
    Pause,
    /// Goes on.
    Resume,
    /// Presses the ACPI power button.
    PowerButton,
    /// Ends it.
    Stop,
}

/// What a machine tells its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The guest powered off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest's kernel said that it panicked.
    GuestPanicked,
    /// A vCPU can't go on: triple fault, emulation failure. Holds what happened.
    GuestCrashed(String),
    /// The host or the vmm failed. Holds what happened.
    VmmFailed(String),
    /// A device had an error; the machine goes on.
    DeviceError {
        /// "disk root".
        device: String,
        /// What happened.
        message: String,
    },
}

/// Where a machine's parts send their notices.
#[derive(Clone, Debug)]
pub struct Notifier(Sender<Input>);

impl Notifier {
    /// Sends to the driver at the other end of `inputs`.
    pub fn new(inputs: Sender<Input>) -> Self {
        Self(inputs)
    }

    /// Tells. When the driver is gone the process is about to end, and nobody needs to know.
    pub fn notify(&self, notice: Notice) {
        let _ = self.0.send(Input::Notice(notice));
    }
}

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which kind.
    pub kind: ErrorKind,
    /// For people, with causes; holds no path.
    pub message: String,
}

impl Failure {
    /// From an error and its causes.
    pub fn new(kind: ErrorKind, error: &dyn std::error::Error) -> Self {
        Self {
            kind,
            message: with_causes(error),
        }
    }
}

/// "message: cause: its cause".
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    message
}

/// A machine as the driver drives it.
pub trait Machine {
    /// Stops the vCPUs, then makes the devices quiet. On an error everything runs on.
    fn pause(&mut self) -> Result<(), Failure>;
    /// The reverse.
    fn resume(&mut self) -> Result<(), Failure>;
    /// To the state after power-on with the kernel loaded; the vCPUs are stopped on return, and nothing that they
    /// did before it can still send a notice.
    fn reset(&mut self) -> Result<(), Failure>;
    /// Starts the vCPUs of a machine that is new or was reset.
    fn start(&mut self) -> Result<(), Failure>;
    /// Presses the power button.
    fn press_power_button(&mut self);
    /// Stops the vCPUs and lets the devices finish and flush what they took. There is no way back.
    fn halt(&mut self);
}

/// Builds a machine that does not run yet.
pub trait Builder {
    /// From a spec and its descriptors; the machine's notices go to `notifier`.
    fn build(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        notifier: Notifier,
    ) -> Result<Box<dyn Machine>, Failure>;
}

#[cfg(test)]
mod tests;
