//! The life of a machine. One thread (`main`) owns the machine and handles one request or notice at
//! a time ([`driver`]). A pure function decides which requests are allowed in which state
//! ([`admission`]). The [`publisher`] notifies the clients.

pub mod admission;
pub mod driver;
pub mod publisher;

use std::{fmt, fs::File, os::fd::OwnedFd, sync::mpsc::Sender, time::Instant};

use vmm_protocol::vmm::{self, MachineSpec, Restore, request::Op};

use crate::{kvm::CRASH_PARAMETERS, snapshot::saving};

pub use crate::failure::{Failure, with_causes};

/// Names a request, so that its answer finds the way back; the asker chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    /// Which of the asker's connections.
    pub connection: u64,
    /// The request's id there.
    pub request: u64,
}

/// Input of the driver.
#[derive(Debug)]
pub enum Input {
    /// Somebody asks for something and gets one answer.
    Request(Token, Box<Request>),
    /// Notice of the machine.
    Notice(Notice),
    /// No client will boot a machine in this process.
    Abandoned,
}

/// An operation of the protocol, with the descriptors that its message came with.
#[derive(Debug)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// Operations name a descriptor by its index here.
    pub fds: Vec<OwnedFd>,
}

impl From<Op> for Request {
    fn from(op: Op) -> Self {
        Self { op, fds: Vec::new() }
    }
}

/// The descriptor that a message names by its index.
pub(crate) fn descriptor(fds: Vec<OwnedFd>, index: u32) -> Option<OwnedFd> {
    fds.into_iter().nth(usize::try_from(index).ok()?)
}

/// Answer to a request that succeeded.
pub use vmm_protocol::vmm::response::Result as Answer;

/// Kinds of hot-plug devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pluggable {
    /// A disk.
    Disk,
    /// A network interface.
    Nic,
    /// A directory of the node.
    Share,
}

impl fmt::Display for Pluggable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Disk => "disk",
            Self::Nic => "NIC",
            Self::Share => "share",
        })
    }
}

/// A device that is gone, with its backend closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detached {
    /// What it was.
    pub what: Pluggable,
    /// Which.
    pub name: String,
    /// It was taken away without the guest.
    pub forced: bool,
}

/// Result of an operation of a machine.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "each value is moved once")]
pub enum Progress {
    /// It is done.
    Done,
    /// It is done, and this is the answer.
    Answered(Answer),
    /// It continues elsewhere; [`Machine::collect_answers`] returns its answer.
    Pending,
}

/// How far a reset of a machine has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reset {
    /// It is done.
    Done,
    /// Requests of this device ("disk root") are under way and may still write to guest memory.
    Waits(String),
}

/// Notice from a machine to its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The guest powered off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest's kernel said that it panicked, with parameters by Hyper-V's interface.
    GuestPanicked(Option<[u64; CRASH_PARAMETERS]>),
    /// The serial port's last line is the one with which a panic of Linux ends. It may have been printed by somebody else.
    PanicPrinted {
        /// How many bytes the port has printed by then.
        printed: u64,
    },
    /// A vCPU shut down. Holds which: "vCPU 0: triple fault".
    TripleFault(String),
    /// A vCPU cannot continue: emulation failure, or a state that the processor refuses. Holds a
    /// description.
    GuestCrashed(String),
    /// The host or the vmm failed. Holds what happened.
    VmmFailed(String),
    /// A device had an error; the machine continues.
    DeviceError {
        /// "disk root".
        device: String,
        /// What happened.
        message: String,
    },
    /// A disk holds failed requests until the machine is paused and resumed.
    DiskHeld {
        /// "disk root".
        device: String,
        /// What happened.
        message: String,
    },
    /// Progress of a snapshot.
    Snapshot(saving::Event),
    /// An image is open, or failed to open: see [`Machine::collect_answers`].
    ImageOpened,
    /// The guest ejected something, or something that was taken away is gone for good: see
    /// [`Machine::collect_detached`].
    Unplugged,
    /// The guest has started its watchdog, or expects it earlier than before: see [`Machine::next_deadline`].
    WatchdogStarted,
    /// The guest did not restart its watchdog in time.
    WatchdogExpired,
    /// Programs of the guest have opened or closed channels: see [`Machine::open_channels`].
    ChannelsChanged,
}

/// Where a machine's parts send their notices.
#[derive(Clone, Debug)]
pub struct Notifier(Sender<Input>);

impl Notifier {
    /// Sends to the driver at the other end of `inputs`.
    pub fn new(inputs: Sender<Input>) -> Self {
        Self(inputs)
    }

    /// Sends a notice. Without a driver, the process is about to end and the notice is dropped.
    pub fn notify(&self, notice: Notice) {
        let _ = self.0.send(Input::Notice(notice));
    }
}

/// A machine as the driver drives it.
pub trait Machine {
    /// Stops the vCPUs, then makes the devices quiet. On an error everything runs on.
    fn pause(&mut self) -> Result<(), Failure>;
    /// The reverse.
    fn resume(&mut self) -> Result<(), Failure>;
    /// To the state after power-on with the kernel loaded; the vCPUs are stopped on return, and nothing that they
    /// did before it can still send a notice. When it [waits](Reset::Waits), call it again until it does not; nothing else
    /// may be done with the machine meanwhile but to look at it or to halt it.
    fn reset(&mut self) -> Result<Reset, Failure>;
    /// Starts the vCPUs of a machine that is new or was reset.
    fn start(&mut self) -> Result<(), Failure>;
    /// Carries out an operation on a device, or reads counters: every operation of the protocol that does not change the
    /// machine's state. `fds` are the descriptors that it names. After an error, the machine is unchanged.
    ///
    /// The attachment of a disk is pending: another thread opens its image, for as long as that takes. The machine then
    /// plugs in the disk and notifies the guest, which may be paused or have been reset meanwhile. A removal by force is
    /// pending until the device's requests have ended. The removal of a disk whose image is not open yet fails the
    /// pending attachment.
    fn operate(&mut self, token: Token, op: Op, fds: Vec<OwnedFd>) -> Result<Progress, Failure>;
    /// Handles the disks that the guest ejected; returns the devices that are gone since the last
    /// call.
    fn collect_detached(&mut self) -> Vec<Detached>;
    /// Plugs in the disks whose images are open by now; gives the answers of requests that were pending. To be asked after
    /// [`collect_detached`](Self::collect_detached), and at [`next_deadline`](Self::next_deadline).
    fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)>;
    /// Names of the channels that programs of the guest have open. After this call the machine
    /// sends [`Notice::ChannelsChanged`] for the next change.
    fn open_channels(&self) -> Vec<String>;
    /// When a request that is pending has waited long enough.
    fn next_deadline(&self) -> Option<Instant>;
    /// Whether the guest may have ended in a panic whose last line is at byte `printed` of the serial port's output: nothing was printed since, and
    /// no vCPU waits for an interrupt or runs a program. The machine must run. An error ends it.
    fn may_have_panicked(&mut self, printed: u64) -> Result<bool, Failure>;
    /// Whether a disk keeps requests that failed ([`Notice::DiskHeld`]).
    fn holds_requests(&self) -> bool;
    /// Writes the images' buffered data to their files: with the machine paused, a copy of the
    /// files has all of the guest's writes.
    fn commit_disks(&mut self) -> Result<(), Failure>;
    /// Begins to write a snapshot into `file`; `runs` means that the machine continues meanwhile.
    /// [`Notice::Snapshot`] reports the progress.
    fn begin_snapshot(&mut self, file: File, runs: bool) -> Result<(), Failure>;
    /// Begins to send the running machine over `socket`, with the content of `disks`. The save
    /// works like a snapshot, except for the end: the machine stays paused.
    fn begin_migration(
        &mut self,
        socket: File,
        purpose: saving::Purpose,
        send: &vmm::Send,
    ) -> Result<(), Failure>;
    /// Stops the vCPUs for this percentage of the time, 0 to 99, until the next pause or the end of
    /// the capture. An error means that the machine cannot continue.
    fn throttle(&mut self, percent: u8) -> Result<(), Failure>;
    /// Does the work that is due at [`next_deadline`](Self::next_deadline), except for answers. An
    /// error means that the machine cannot continue.
    fn keep_time(&mut self) -> Result<(), Failure>;
    /// Takes the state of the paused machine, when the snapshot is [ready](saving::Event::Ready)
    /// for it; returns when the machine may continue. The snapshot contains `description`. The
    /// state marks a guest that has `panicked`: a machine that is restored from it sends
    /// [`Notice::GuestPanicked`].
    fn complete_snapshot(&mut self, description: Vec<u8>, panicked: bool) -> Result<saving::GoesOn, Failure>;
    /// Result of the snapshot, when it has [ended](saving::Event::Ended).
    fn end_snapshot(&mut self) -> Result<saving::Report, Failure>;
    /// Has the snapshot end without a result.
    fn give_up_snapshot(&mut self);
    /// Stops the vCPUs, and lets the devices finish and flush accepted requests. The machine cannot
    /// continue afterwards.
    fn halt(&mut self);
}

/// Builds a machine that does not run yet.
pub trait Builder {
    /// The machines that it builds.
    type Machine: Machine;

    /// From a spec and its descriptors; the machine's notices go to `notifier`. With `restore` it is paused in the state of a
    /// snapshot.
    fn build(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        restore: Option<&Restore>,
        notifier: Notifier,
    ) -> Result<Self::Machine, Failure>;

    /// Takes the paused machine before a client's resume, and returns the machine that continues.
    fn renew(&mut self, machine: Self::Machine) -> Result<Self::Machine, Failure> {
        Ok(machine)
    }
}

#[cfg(test)]
mod tests;
