//! The life of a machine. One thread (`main`) owns the machine and handles one request or notice at
//! a time ([`driver`]). A pure function decides which requests are allowed in which state
//! ([`admission`]). The [`publisher`] notifies the clients.

pub mod admission;
pub mod driver;
pub mod publisher;

use std::{
    fmt,
    fs::File,
    os::fd::OwnedFd,
    sync::mpsc::Sender,
    time::{Duration, Instant},
};

use vmm_protocol::vmm::{
    Disk, DiskStats, MachineSpec, MachineStats, Nic, Restore, SaveReply, SendReply, Share, Status,
};
use vmmd_spec::disk::RateLimit;

use crate::snapshot::saving;

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
    Request(Token, Request),
    /// Notice of the machine.
    Notice(Notice),
    /// No client will boot a machine in this process.
    Abandoned,
}

/// Requests to the driver; see [`vmm_protocol::vmm::request::Op`].
#[derive(Debug)]
pub enum Request {
    /// Builds the machine and starts the guest.
    Boot {
        /// Specification of the machine.
        spec: Box<MachineSpec>,
        /// The descriptors that the spec names.
        fds: Vec<OwnedFd>,
        /// Leave the vCPUs stopped.
        paused: bool,
        /// Continue from a snapshot, whose descriptor is among `fds`.
        restore: Option<Restore>,
    },
    /// Writes a snapshot of it.
    Save {
        /// Into this file. Without one nothing is written: it is paused with quiet disks until [`Release`](Request::Release).
        file: Option<OwnedFd>,
        /// It is paused all the time.
        paused: bool,
        /// Description that the snapshot contains.
        description: Vec<u8>,
        /// The machine stays paused, from the moment when its state is taken, until [`Release`](Request::Release).
        keep_paused: bool,
        /// Is said again when the disks are quiet.
        number: u64,
    },
    /// Ends the pause of a snapshot with `keep_paused`, or without a file.
    Release {
        /// Ends the snapshot as well, however far it is.
        give_up: bool,
    },
    /// Gives up the locks of its disks until it is resumed.
    UnlockDisks,
    /// Sends it to another `vmm`; it stays paused then.
    Send {
        /// Over this socket.
        socket: OwnedFd,
        /// How long sending the rest may take; zero: no matter how long.
        downtime: Duration,
        /// Policy for a guest that changes memory too fast for `downtime`.
        policy: saving::Policy,
        /// Disks whose content is sent too.
        disks: Vec<String>,
    },
    /// Makes it quiet.
    Pause,
    /// Goes on.
    Resume,
    /// Presses the ACPI power button.
    PowerButton,
    /// Presses the reset button.
    Reset,
    /// Ends it.
    Stop,
    /// Plugs a disk in.
    AttachDisk {
        /// What it is.
        disk: Box<Disk>,
        /// The descriptors that it names.
        fds: Vec<OwnedFd>,
    },
    /// Asks the guest for a disk, or takes it away.
    DetachDisk {
        /// Which.
        name: String,
        /// Take it away without the guest's cooperation.
        force: bool,
    },
    /// Makes a disk larger.
    ResizeDisk {
        /// Which.
        name: String,
        /// New size in bytes; `None` for the current size of a block device.
        capacity: Option<u64>,
    },
    /// Changes a limit.
    SetRateLimit {
        /// Whose.
        target: LimitTarget,
        /// To what.
        limit: RateLimit,
    },
    /// Plugs a NIC in.
    AttachNic {
        /// What it is.
        nic: Box<Nic>,
        /// Its descriptors.
        fds: Vec<OwnedFd>,
    },
    /// Asks the guest for a NIC, or takes it away.
    DetachNic {
        /// Which.
        name: String,
        /// Take it away without the guest's cooperation.
        force: bool,
    },
    /// Changes a NIC.
    UpdateNic {
        /// Which.
        name: String,
        /// In what.
        change: NicChange,
    },
    /// Plugs a share in.
    AttachShare {
        /// What it is.
        share: Box<Share>,
        /// Its descriptor.
        fds: Vec<OwnedFd>,
    },
    /// Asks the guest for a share, or takes it away.
    DetachShare {
        /// Which.
        name: String,
        /// Take it away without the guest's cooperation.
        force: bool,
    },
    /// Gives a share another process.
    SetShareBackend {
        /// Which.
        name: String,
        /// Connected to it.
        socket: OwnedFd,
    },
    /// Changes how many bytes the balloon is to hold.
    SetBalloon(u64),
    /// Sends a break to the serial port.
    SendBreak,
    /// Sends the size of the terminal at the virtio-console to the guest.
    ResizeConsole {
        /// Characters in a line.
        columns: u16,
        /// Lines.
        rows: u16,
    },
    /// Asks for the counters of all disks.
    GetDiskStats,
    /// Asks for all counters.
    GetMachineStats,
}

/// Changes of a NIC; `None` leaves a property unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicChange {
    /// The link comes up, or goes down.
    pub link_up: Option<bool>,
    /// Limit for the guest's received data. All zeroes removes the limit.
    pub receive_limit: Option<RateLimit>,
    /// Limit for the guest's sent data.
    pub transmit_limit: Option<RateLimit>,
}

/// Target of a rate limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitTarget {
    /// The disk of that name.
    Disk(String),
    /// The rate group of that name.
    Group(String),
}

/// Answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The state after it.
    Status(Status),
    /// Counters of the disks, in order of their slots.
    DiskStats(Vec<DiskStats>),
    /// All counters.
    MachineStats(Box<MachineStats>),
    /// A snapshot is whole.
    Saved(SaveReply),
    /// The machine was sent.
    Sent(SendReply),
}

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

/// How far a request of a machine has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is done.
    Done,
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
    /// The guest's kernel said that it panicked.
    GuestPanicked,
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
    /// Presses the power button.
    fn press_power_button(&mut self);
    /// Begins to attach a disk: another thread opens its image, for as long as that takes. The
    /// machine then plugs in the disk and notifies the guest, which may be paused or have been
    /// reset meanwhile. The result comes from [`collect_answers`](Self::collect_answers); an error
    /// of this call is final.
    fn attach_disk(&mut self, token: Token, disk: &Disk, fds: Vec<OwnedFd>) -> Result<(), Failure>;
    /// Asks the guest for a disk. With `force`, removes the disk at once: on success the disk is
    /// gone, and a removal that takes too long completes later. A disk whose image is not open yet
    /// is not attached, and its attach request gets an error.
    fn detach_disk(&mut self, token: Token, name: &str, force: bool) -> Result<Progress, Failure>;
    /// Handles the disks that the guest ejected; returns the devices that are gone since the last
    /// call.
    fn collect_detached(&mut self) -> Vec<Detached>;
    /// Plugs in the disks whose images are open by now; gives the answers of requests that were pending. To be asked after
    /// [`collect_detached`](Self::collect_detached), and at [`next_deadline`](Self::next_deadline).
    fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)>;
    /// When a request that is pending has waited long enough.
    fn next_deadline(&self) -> Option<Instant>;
    /// Enlarges a disk, and notifies the guest.
    fn resize_disk(&mut self, name: &str, capacity: Option<u64>) -> Result<(), Failure>;
    /// Changes a limit.
    fn set_rate_limit(&mut self, target: &LimitTarget, limit: RateLimit) -> Result<(), Failure>;
    /// Plugs a NIC in, and notifies the guest.
    fn attach_nic(&mut self, nic: &Nic, fds: Vec<OwnedFd>) -> Result<(), Failure>;
    /// Asks the guest for a NIC, or takes it away, as [`detach_disk`](Self::detach_disk) does with a disk.
    fn detach_nic(&mut self, token: Token, name: &str, force: bool) -> Result<Progress, Failure>;
    /// Changes a NIC, and notifies the guest of the changes that it can see.
    fn update_nic(&mut self, name: &str, change: &NicChange) -> Result<(), Failure>;
    /// Plugs a share in, and notifies the guest. Refused while the machine is saved.
    fn attach_share(&mut self, share: &Share, fds: Vec<OwnedFd>) -> Result<(), Failure>;
    /// Asks the guest for a share, or takes it away, as [`detach_disk`](Self::detach_disk) does with a disk.
    fn detach_share(&mut self, token: Token, name: &str, force: bool) -> Result<Progress, Failure>;
    /// Connects the share `name` to another process, behind this connected socket, after the old
    /// process has ended.
    fn set_share_backend(&mut self, name: &str, socket: OwnedFd) -> Result<(), Failure>;
    /// Changes the number of bytes that the balloon is to hold, and notifies the guest.
    fn set_balloon(&mut self, bytes: u64) -> Result<(), Failure>;
    /// Sends a break to the serial port.
    fn send_break(&mut self) -> Result<(), Failure>;
    /// Sends the size of the terminal at the virtio-console to the guest.
    fn resize_console(&mut self, columns: u16, rows: u16) -> Result<(), Failure>;
    /// Counters of all disks.
    fn disk_stats(&self) -> Vec<DiskStats>;
    /// All counters.
    fn stats(&self) -> MachineStats;
    /// Whether the guest may have ended in a panic whose last line is at byte `printed` of the serial port's output: nothing was printed since, and
    /// no vCPU waits for an interrupt or runs a program. The machine must run. An error ends it.
    fn may_have_panicked(&mut self, printed: u64) -> Result<bool, Failure>;
    /// Whether a disk keeps requests that failed ([`Notice::DiskHeld`]).
    fn holds_requests(&self) -> bool;
    /// Writes the images' buffered data to their files: with the machine paused, a copy of the
    /// files has all of the guest's writes.
    fn commit_disks(&mut self) -> Result<(), Failure>;
    /// Gives up the locks of the disks of the paused machine that the guest can write to, with all that it has written durable. `resume` takes
    /// them again, or fails while somebody else has one.
    fn unlock_disks(&mut self) -> Result<(), Failure>;
    /// Begins to write a snapshot into `file`; `runs` means that the machine continues meanwhile.
    /// [`Notice::Snapshot`] reports the progress.
    fn begin_snapshot(&mut self, file: File, runs: bool) -> Result<(), Failure>;
    /// Begins to send the running machine over `socket`, with the content of `disks`. The save
    /// works like a snapshot, except for the end: the machine stays paused.
    fn begin_migration(
        &mut self,
        socket: File,
        purpose: saving::Purpose,
        disks: &[String],
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
    /// From a spec and its descriptors; the machine's notices go to `notifier`. With `restore` it is paused in the state of a
    /// snapshot.
    fn build(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        restore: Option<&Restore>,
        notifier: Notifier,
    ) -> Result<Box<dyn Machine>, Failure>;
}

#[cfg(test)]
mod tests;
