//! Commands to a VM's actor, and their answers.

use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Notify, OwnedMutexGuard, mpsc, oneshot};
use uuid::Uuid;
pub use vm_lifecycle::admission::Request;
use vm_lifecycle::handover::{Message, Resolution, SourceEvent};
use vmmd_api::v1;
use vmmd_host::failure::Failure;
use vmmd_objects::{
    context::Context,
    operation::{Pending, Reporter},
};
use vmmd_spec::mask::UpdateMask;
use vmmd_store::{AbortRecord, Hardware, VmRecord};

use super::Vms;
use crate::control::Client;

/// Where an answer goes: the VM's state after the request, or why not.
pub type Reply = oneshot::Sender<Result<Arc<v1::Vm>, Failure>>;

/// Where the answer to a request about a VM's life goes. It comes when the request is admitted, with the operation that
/// has begun, or that it has joined, if it takes long.
pub type LifeReply = oneshot::Sender<Result<Answer, Failure>>;

/// Answer to a request about a VM's life cycle.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The VM now.
    pub vm: Arc<v1::Vm>,
    /// Operation under way; `None` if the request is done.
    pub pending: Option<Pending>,
}

/// A request about the life of a VM.
#[derive(Debug)]
pub struct Life {
    /// Context of the request.
    pub context: Context,
    /// Requested action.
    pub request: Request,
    /// Grace time of the guest for a stop or restart; `None` by force.
    pub grace: Option<Duration>,
    /// When the operation is cancelled; never without.
    pub deadline: Option<Duration>,
    /// The stop drains the node. No run policy refuses it, and the requested state of the VM stays:
    /// the policy may start the VM when the node takes VMs again.
    pub evacuate: bool,
    /// The launcher of the VM's pod stops it: no run policy refuses that, or starts the VM again.
    pub of_pod: bool,
    /// Of a start: the snapshot that the VM is restored from. Refused unless the VM is down.
    pub restore: Option<Box<Restore>>,
    /// Of a start: the firmware begins with new variables. Refused unless the VM is down.
    pub reset_nvram: bool,
    /// Where the answer goes.
    pub reply: LifeReply,
}

impl Life {
    /// A request without more.
    pub fn new(context: Context, request: Request, reply: LifeReply) -> Self {
        Self {
            context,
            request,
            grace: None,
            deadline: None,
            evacuate: false,
            of_pod: false,
            restore: None,
            reset_nvram: false,
            reply,
        }
    }
}

/// A snapshot that a VM is restored from.
#[derive(Clone, Debug)]
pub struct Restore {
    /// Its file, open for reading. Without one the machine boots.
    pub file: Option<Arc<OwnedFd>>,
    /// Memory is read when the guest accesses it.
    pub on_demand: bool,
    /// It is no file but a socket, over which another node sends the machine: that stays paused.
    pub stream: bool,
    /// Length of the file.
    pub bytes: u64,
    /// The spec of the machine and the addresses of its devices, where they are not those of the VM.
    pub machine: Option<(v1::VmSpec, Hardware)>,
    /// Disks that are replaced by copies when the machine runs.
    pub rollback: Option<DiskRollback>,
}

/// The disks of a snapshot that a VM gets back.
#[derive(Clone, Debug)]
pub struct DiskRollback {
    /// UUID of the snapshot.
    pub snapshot: Uuid,
    /// By their names in the VM: the files in the snapshot.
    pub copies: Vec<(String, PathBuf)>,
}

/// Update of a VM.
#[derive(Debug)]
pub struct Update {
    /// Of the request; without status, and the formats of disks are filled in.
    pub vm: v1::Vm,
    /// The fields of `vm` that are changed; all when `None`.
    pub mask: Option<UpdateMask>,
    /// How the update is applied.
    pub mode: v1::ApplyMode,
    /// Time that the guest has for requests of the update.
    pub grace: Option<Duration>,
    /// The answer is sent when the live changes have begun.
    pub no_wait: bool,
    /// Guests cannot keep the media of their drives.
    pub force_media: bool,
    /// Who asks.
    pub context: Context,
}

/// A request with what belongs to it.
#[derive(Debug)]
pub enum Command {
    /// About the life of the VM.
    Life(Life),
    /// The run policy, or whether the node takes VMs, may be another: see what follows.
    Reconsider,
    /// See whether its `vmm` answers.
    Probe,
    /// A network has given one of its NICs another address: publish its state.
    Addresses,
    /// About its disks.
    Disk {
        /// Context of the request.
        context: Context,
        /// Requested change.
        request: DiskRequest,
        /// Where the answer goes.
        reply: Reply,
    },
    /// About its spec.
    Update {
        /// The update.
        update: Box<Update>,
        /// Where the answer goes.
        reply: LifeReply,
    },
    /// About its migration; the answer has the messages for the other daemon.
    Handover(
        Box<HandoverRequest>,
        oneshot::Sender<Result<Vec<Message>, Failure>>,
    ),
    /// For asking the running `vmm` itself.
    Client(Purpose, oneshot::Sender<Result<Client, Failure>>),
    /// For copying the disks that its guest can write to.
    Quiet(oneshot::Sender<Result<Quiet, Failure>>),
    /// The agent has described its guest, or has not answered.
    Guest(Box<Result<v1::GuestInfo, Failure>>),
    /// A probe of the guest has changed its state.
    Probed(Report),
    /// Note durably whether the file systems of the guest may be frozen.
    Frozen(bool, oneshot::Sender<Result<(), Failure>>),
}

/// The probes of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// `spec.probes.startup`.
    Startup,
    /// `spec.probes.readiness`.
    Readiness,
    /// `spec.probes.liveness`.
    Liveness,
}

impl Probe {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Startup => "startup",
            Self::Readiness => "readiness",
            Self::Liveness => "liveness",
        }
    }
}

/// State of a probe, which has changed. Reports of a failure that ends the run are repeated, since
/// another action may be under way.
#[derive(Debug)]
pub struct Report {
    /// Number of the prober that reports: see `vm::instance::Health`.
    pub prober: u64,
    /// The probe.
    pub kind: Probe,
    /// It succeeds, or why it has failed.
    pub state: Result<(), String>,
}

/// How writes to the disks of a VM are prevented.
#[derive(Debug)]
pub enum Quiet {
    /// Its `vmm` can be asked to pause it.
    Runs(Client),
    /// It does not run, and does not start before this is dropped.
    Stopped(OwnedMutexGuard<()>),
}

/// Purpose of a `vmm`'s client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A snapshot.
    Snapshot,
    /// A migration.
    Migration,
}

/// A request about a VM's hand-over. A request with the number of another migration has no effect.
#[derive(Debug)]
pub enum HandoverRequest {
    /// At the source: begin.
    Begin(Box<Begin>, oneshot::Sender<Begun>),
    /// At the source: something has happened.
    Source {
        /// Number of the migration.
        migration: u64,
        /// What.
        event: SourceEvent,
    },
    /// At the target: receive the machine.
    Receive {
        /// Who sends it.
        from: String,
        /// Number of the migration.
        migration: u64,
        /// Where it comes from.
        stream: Arc<OwnedFd>,
        /// Who asks.
        context: Context,
        /// Receives the success or failure when the machine is loaded.
        started: oneshot::Sender<Result<(), Failure>>,
    },
    /// At the target: the source says something.
    Target {
        /// Who says it.
        from: String,
        /// What.
        message: Message,
    },
    /// Continue with what an earlier daemon left.
    Resume {
        /// Number of the migration.
        migration: u64,
    },
    /// Remove the remains of the migration: at the target an unprepared VM, on either side a VM
    /// whose removal failed after the end of the migration. Answered with `Refuse` if the VM is
    /// being removed, and without a message if it stays.
    Expire {
        /// Number of the migration.
        migration: u64,
        /// Only if nothing of it has come or comes.
        unless_begun: bool,
    },
    /// The guest runs.
    Runs,
    /// The guest is to run, and can't yet.
    Waits {
        /// One CamelCase word.
        reason: &'static str,
        /// Why.
        why: String,
    },
    /// An operator decides.
    Resolve {
        /// Number of the migration.
        migration: u64,
        /// The decision.
        resolution: Resolution,
        /// The caller and its preconditions.
        context: Context,
    },
}

/// A migration that is to begin.
#[derive(Debug)]
pub struct Begin {
    /// Where the target is.
    pub peer: String,
    /// Generation of the VM that was looked at: another one is refused.
    pub generation: u64,
    /// Hears how far the `vmm` is.
    pub reporter: Reporter,
    /// Id of the migration's operation.
    pub operation: String,
    /// Hears why, when the VM itself ends the migration.
    pub give_up: oneshot::Sender<Failure>,
    /// UUIDs of the disks that go along.
    pub disks: Vec<Vec<u8>>,
}

/// A migration that has begun: nothing except the migration changes the VM.
#[derive(Debug)]
pub struct Begun {
    /// Number of the migration.
    pub migration: u64,
    /// The VM as it goes to the target.
    pub record: VmRecord,
    /// The `vmm` that sends it.
    pub client: Client,
}

/// Remaining work of a migration.
#[derive(Debug)]
pub enum ResumeMigration {
    /// An earlier daemon has left it: failed writes and unanswered messages are repeated.
    Left {
        /// The VM.
        uid: Uuid,
        /// Its name.
        name: String,
        /// Number of the migration.
        migration: u64,
        /// Where the target is.
        target: String,
    },
    /// It was taken back, and its target is to be told.
    Abort {
        /// As in the store.
        abort: AbortRecord,
        /// It was read there, which does not say that it is durable.
        was_read: bool,
    },
}

/// Request about a VM's disks.
#[derive(Debug)]
pub enum DiskRequest {
    /// Add it.
    Attach(v1::DiskSpec),
    /// Take it away.
    Detach {
        /// Its name in the VM.
        disk: String,
        /// How long the guest may take.
        timeout: Duration,
        /// Detach the disk after the timeout even if the guest has not ejected it.
        force: bool,
    },
    /// Make it larger.
    Resize {
        /// Its name in the VM.
        disk: String,
        /// Size in bytes; 0 takes the size of the block device.
        size: u64,
    },
}

impl Command {
    /// Trace id of the request, or an empty string.
    pub fn trace(&self) -> &str {
        self.context().map_or("", |context| &context.trace)
    }

    /// Context of the request.
    pub fn context(&self) -> Option<&Context> {
        match self {
            Self::Life(Life { context, .. }) | Self::Disk { context, .. } => Some(context),
            Self::Update { update, .. } => Some(&update.context),
            Self::Reconsider
            | Self::Probe
            | Self::Addresses
            | Self::Client(..)
            | Self::Quiet(..)
            | Self::Guest(_)
            | Self::Probed(_)
            | Self::Frozen(..)
            | Self::Handover(..) => None,
        }
    }

    /// A stop or a deletion by force.
    fn is_urgent(&self) -> bool {
        match self {
            Self::Life(life) => match life.request {
                Request::Stop => life.grace.is_none(),
                Request::Delete { force } => force,
                _ => false,
            },
            _ => false,
        }
    }
}

/// Commands that wait for an actor at most; more wait at their senders.
const MAILBOX: usize = 32;

/// Where the actor of a VM takes commands from. They are boxed, as a channel keeps room for 32 of what goes through it for as long as
/// it lives: a pointer each, where nothing waits.
#[derive(Clone, Debug)]
pub struct Mailbox {
    commands: mpsc::Sender<Box<Queued>>,
    urgent: Arc<Urgent>,
}

/// Where the commands come out.
#[derive(Debug)]
pub struct Commands {
    commands: mpsc::Receiver<Box<Queued>>,
    urgent: Arc<Urgent>,
}

#[derive(Debug)]
struct Queued {
    command: Command,
    _urgent: Option<Waiting>,
}

/// How many urgent commands the actor has not taken yet.
#[derive(Debug, Default)]
struct Urgent {
    count: AtomicUsize,
    more: Notify,
}

/// One of them.
#[derive(Debug)]
struct Waiting(Arc<Urgent>);

impl Waiting {
    fn new(urgent: &Arc<Urgent>) -> Self {
        urgent.count.fetch_add(1, Ordering::SeqCst);
        urgent.more.notify_waiters();
        Self(Arc::clone(urgent))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The actor is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl Mailbox {
    /// One, and where its commands come out.
    pub fn new() -> (Self, Commands) {
        let (sender, receiver) = mpsc::channel(MAILBOX);
        let urgent = Arc::<Urgent>::default();
        let commands = Commands {
            commands: receiver,
            urgent: Arc::clone(&urgent),
        };
        let mailbox = Self {
            commands: sender,
            urgent,
        };
        (mailbox, commands)
    }

    /// Waits until there is room for the command. Cancel-safe.
    pub async fn send(&self, command: Command) -> Result<(), Gone> {
        self.commands.send(self.queued(command)).await.map_err(|_| Gone)
    }

    /// Sends the command if there is room for it.
    pub fn offer(&self, command: Command) {
        let _ = self.commands.try_send(self.queued(command));
    }

    fn queued(&self, command: Command) -> Box<Queued> {
        Box::new(Queued {
            _urgent: command.is_urgent().then(|| Waiting::new(&self.urgent)),
            command,
        })
    }

    /// Waits until the actor is gone. Cancel-safe.
    pub async fn closed(&self) {
        self.commands.closed().await;
    }
}

impl Commands {
    /// The next command; `None` when there can be no more. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Command> {
        Some(self.commands.recv().await?.command)
    }

    /// Waits until a stop or a deletion by force waits to be taken. Cancel-safe.
    pub async fn urgent(&self) {
        let mut more = pin!(self.urgent.more.notified());
        loop {
            more.as_mut().enable();
            if self.urgent.count.load(Ordering::SeqCst) > 0 {
                return;
            }
            more.as_mut().await;
            more.set(self.urgent.more.notified());
        }
    }
}

/// Asks the actor of the VM with this UUID about its migration; returns the messages to the other daemon.
pub async fn hand_over(
    vms: &Vms,
    (vm, uid): (&str, Uuid),
    request: HandoverRequest,
) -> Result<Vec<Message>, Failure> {
    let entry = vms.find(uid).ok_or_else(|| Failure::no_vm(vm))?;
    hand_over_to(&entry.mailbox, vm, request).await
}

/// The same for an actor that was found already.
pub async fn hand_over_to(
    mailbox: &Mailbox,
    vm: &str,
    request: HandoverRequest,
) -> Result<Vec<Message>, Failure> {
    let (reply, answer) = oneshot::channel();
    let sent = mailbox.send(Command::Handover(Box::new(request), reply)).await;
    sent.map_err(|_| Failure::unavailable(vm))?;
    answer.await.map_err(|_| Failure::unavailable(vm))?
}
