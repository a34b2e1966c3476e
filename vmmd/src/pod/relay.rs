//! The messages between a connected launcher and the VM of its pod.
//!
//! One task serves a connection, and sends and reads independently: a launcher that does not read its output can still
//! stop its VM. Output stays in the log until the launcher takes it.
//!
//! A migration that is under way decides which node has the VM: until then the VM neither ends nor stops for its launcher. A launcher
//! whose VM does not arrive waits again, and one whose VM has moved ends. The note of a deletion says that the VM has moved
//! ([`Vms::moved_from`](crate::registry::vms::Vms::moved_from)), also after a restart of the daemon.

use std::{future::pending, io, sync::Arc, time::Duration};

use tokio::{
    io::AsyncWriteExt,
    net::{UnixStream, unix::OwnedWriteHalf},
    sync::{mpsc, oneshot, watch},
    time::{sleep, timeout},
};
use vmmd_api::v1::{ExitReason, MigrationPhase, MigrationRole, Vm, VmPhase, VmStatus};
use vmmd_objects::context::Context;
use vmmd_pod::{
    MAX_INPUT,
    message::{Ended, Output as Piece, Position, State, Stop, daemon_message::Kind, launcher_message},
};
use vmmd_wire::Error;

use super::{
    output::Output,
    stream::{Reader, Stream},
};
use crate::{
    host::Host,
    paths::{LogDir, RuntimeDir},
    registry::{
        consoles::{Access, Device, Permit},
        pods::{Connected, Pod},
        vms::{
            Entry,
            command::{Command, Life, Request},
        },
    },
};

/// How long the end of a process may follow after the end of its connection.
const END: Duration = Duration::from_millis(100);
/// How long the lifeline may take to end the VM of a launcher that has ended.
const LIFELINE: Duration = Duration::from_secs(2);
/// Pause before a VM is looked for again whose actor has failed.
const REPLACED: Duration = Duration::from_millis(50);
/// Messages of input that wait for the guest.
const WAITING_INPUT: usize = 8;

/// Serves the connection of a pod to its end.
pub async fn run(
    host: &Arc<Host>,
    stream: &Arc<Stream>,
    connected: Connected,
    reader: Reader,
    position: Option<Position>,
) -> Result<(), Error> {
    let pod = &connected.pod;
    let (stop, stopping) = watch::channel(None);
    let sender = Sender {
        host,
        pod,
        stream,
        stopping,
        shown: State::default(),
        position,
    };
    tokio::select! {
        read = read(host, pod, reader, &stop) => {
            // The connection of a process that ends is closed a moment before its end.
            if timeout(END, pod.launcher.gone()).await.is_ok() {
                end_vm(host, pod).await;
            }
            read
        }
        ended = sender.run() => {
            stream.end(ended?).await;
            Ok(())
        }
        () = pod.launcher.gone() => {
            end_vm(host, pod).await;
            Ok(())
        }
        () = pod.replaced.cancelled() => Ok(()),
        () = host.stopping.cancelled() => Ok(()),
    }
}

/// Ends the VM of a launcher that has ended, if the lifeline has not: the launcher may have given its other end away.
async fn end_vm(host: &Arc<Host>, pod: &Pod) {
    let Some(entry) = host.vms.of_pod(pod.uid.as_str()) else {
        return;
    };
    let mut state = entry.state;
    let gone = state.wait_for(|vm| vm.status.as_ref().is_none_or(|status| status.instance.is_none()));
    if timeout(LIFELINE, gone).await.is_err() {
        tracing::warn!(
            pod = pod.uid.as_str(),
            "the launcher of a VM has ended, and the VM has not: it is killed"
        );
        stop_vm(host, pod, None).await;
    }
}

/// Stops the VM of a pod: within `grace`, or by force. A migration of the VM ends first.
async fn stop_vm(host: &Arc<Host>, pod: &Pod, grace: Option<Duration>) {
    while let Some(entry) = host.vms.of_pod(pod.uid.as_str()) {
        let mut state = entry.state;
        state.mark_unchanged();
        let (reply, answer) = oneshot::channel();
        let life = Life {
            grace,
            of_pod: true,
            ..Life::new(Context::daemon(), Request::Stop, reply)
        };
        if entry.mailbox.send(Command::Life(life)).await.is_err() {
            // Its actor failed, and is being replaced.
            sleep(REPLACED).await;
            continue;
        }
        // The state of the VM shows all other results.
        match answer.await {
            Ok(Err(failure)) if failure.reason == "MIGRATING" => {
                let _gone = state.changed().await;
            }
            _ => return,
        }
    }
}

/// Carries out the requests of the launcher. Returns when the launcher has closed the connection.
async fn read(
    host: &Arc<Host>,
    pod: &Pod,
    mut reader: Reader,
    stop: &watch::Sender<Option<Stop>>,
) -> Result<(), Error> {
    let (input, typed) = mpsc::channel(WAITING_INPUT);
    let stopping = stop.subscribe();
    let reading = async {
        while let Some((message, _)) = reader.next().await? {
            match message.kind {
                Some(launcher_message::Kind::Stop(request)) => {
                    stop.send_replace(Some(request));
                }
                // Input that the guest does not read is dropped.
                Some(launcher_message::Kind::Input(bytes)) if bytes.bytes.len() <= MAX_INPUT => {
                    let _dropped = input.try_send(bytes.bytes);
                }
                _ => return Err(Error::Io(io::ErrorKind::InvalidData.into())),
            }
        }
        Ok(())
    };
    tokio::select! {
        read = reading => read,
        () = type_in(host, pod, typed) => Ok(()),
        () = stop_on_request(host, pod, stopping) => Ok(()),
    }
}

/// Stops the VM when the launcher asks. Never returns while the launcher is connected.
async fn stop_on_request(host: &Arc<Host>, pod: &Pod, mut stopping: watch::Receiver<Option<Stop>>) {
    while stopping.changed().await.is_ok() {
        let request = *stopping.borrow_and_update();
        let grace = request.map(|stop| Duration::from_millis(stop.grace_ms));
        stop_vm(host, pod, grace.filter(|grace| !grace.is_zero())).await;
    }
}

/// Types input into the serial port of the VM. Never returns.
async fn type_in(host: &Arc<Host>, pod: &Pod, mut typed: mpsc::Receiver<Vec<u8>>) {
    let mut console: Option<(OwnedWriteHalf, Permit)> = None;
    while let Some(bytes) = typed.recv().await {
        if console
            .as_mut()
            .is_some_and(|(_, permit)| permit.lost.try_recv().is_ok())
        {
            console = None;
        }
        if console.is_none() {
            console = open_console(host, pod).await;
        }
        if let Some((writer, _)) = &mut console
            && writer.write_all(&bytes).await.is_err()
        {
            console = None;
        }
    }
    pending::<()>().await;
}

/// The serial console of the pod's VM, unless the VM does not run or another client has the console for itself.
async fn open_console(host: &Arc<Host>, pod: &Pod) -> Option<(OwnedWriteHalf, Permit)> {
    let entry = host.vms.of_pod(pod.uid.as_str())?;
    let who = format!("pod {}/{}", pod.names.namespace, pod.names.name);
    let opened = host
        .consoles
        .open((entry.uid, Device::Serial), &who, Access::Shared, false);
    let (permit, _) = opened.ok()?;
    let socket = RuntimeDir::of(&host.config, entry.uid).console();
    // The launcher gets the output from the log. That of this connection is not read: the `vmm` drops it.
    let (reader, writer) = UnixStream::connect(socket).await.ok()?.into_split();
    drop(reader);
    Some((writer, permit?))
}

/// Sends the launcher what happens to its VM.
struct Sender<'a> {
    host: &'a Arc<Host>,
    pod: &'a Pod,
    stream: &'a Stream,
    /// The last request of the launcher for a stop.
    stopping: watch::Receiver<Option<Stop>>,
    /// The state that was sent last.
    shown: State,
    position: Option<Position>,
}

impl Sender<'_> {
    /// Runs until the end of the pod's VM, which is returned for the launcher.
    async fn run(mut self) -> Result<Ended, Error> {
        let mut news = self.host.vms.registry.lock().feed().news();
        let mut report = self.pod.report.subscribe();
        loop {
            news.mark_unchanged();
            let uid = self.pod.uid.as_str();
            if let Some(entry) = self.host.vms.of_pod(uid) {
                if let Some(ended) = self.follow(&entry).await? {
                    return Ok(ended);
                }
                if self.host.vms.find(entry.uid).is_some() {
                    // Its actor failed, and is being replaced.
                    sleep(REPLACED).await;
                    continue;
                }
                let arrived = arrival(&entry.state.borrow()).is_none();
                if arrived && !self.host.vms.moved_from(uid) {
                    return Ok(ended(1, "Deleted", "the VM was deleted"));
                }
                continue;
            }
            if self.host.vms.moved_from(uid) {
                return Ok(ended(0, "Migrated", "the VM runs on another node"));
            }
            if self.stopping.borrow_and_update().is_some() {
                return Ok(stopped_without_vm());
            }
            let reported = report.borrow_and_update().clone();
            let (reason, message) = match reported {
                Some(report) if report.refused => return Ok(ended(1, &report.reason, &report.message)),
                Some(report) => (report.reason, report.message),
                None => ("WaitingForVm".to_owned(), String::new()),
            };
            self.show(State {
                reason,
                message,
                ..State::default()
            })
            .await?;
            tokio::select! {
                _ = news.changed() => {}
                _ = report.changed() => {}
                _ = self.stopping.changed() => {}
            }
        }
    }

    /// Follows a VM to its end; `None` when its actor has gone.
    async fn follow(&mut self, entry: &Entry) -> Result<Option<Ended>, Error> {
        let mut state = entry.state.clone();
        let mut output = Output::new(LogDir::of(&self.host.config, entry.uid), self.position);
        loop {
            let vm = Arc::clone(&state.borrow_and_update());
            let status = vm.status.clone().unwrap_or_default();
            self.show(State {
                phase: status.phase().as_str_name().replace("VM_PHASE_", ""),
                reason: status.reason.clone(),
                message: status.message.clone(),
            })
            .await?;
            // A VM that arrives has no output yet.
            let arrives = arrival(&vm).is_some();
            if !arrives {
                output.watch();
            }
            // The log is whole when the VM has ended.
            let end = self.end_of(&vm, &status);
            while !arrives && let Some((bytes, position)) = output.next().await? {
                self.position = Some(position);
                let piece = Piece {
                    bytes,
                    position: Some(position),
                };
                self.stream.send(Kind::Output(piece)).await?;
                if end.is_none() && state.has_changed().unwrap_or(true) {
                    break;
                }
            }
            if end.is_some() {
                return Ok(end);
            }
            tokio::select! {
                changed = state.changed() => if changed.is_err() {
                    return Ok(None);
                },
                () = output.changed() => {}
                Ok(()) = self.stopping.changed() => {}
            }
        }
    }

    async fn show(&mut self, state: State) -> Result<(), Error> {
        if self.shown != state {
            self.shown = state.clone();
            self.stream.send(Kind::State(state)).await?;
        }
        Ok(())
    }

    /// The end of a VM that is not started again.
    fn end_of(&self, vm: &Vm, status: &VmStatus) -> Option<Ended> {
        if let Some(phase) = arrival(vm) {
            // When everything has arrived, the other node decides in a moment.
            let is_early = phase == MigrationPhase::Transfer && self.stopping.borrow().is_some();
            return is_early.then(stopped_without_vm);
        }
        let migration = status.migration.as_ref();
        if migration.is_some_and(|migration| migration.role() == MigrationRole::Source) {
            return None;
        }
        if !matches!(status.phase(), VmPhase::Stopped | VmPhase::Failed) {
            return None;
        }
        let restart = status.restart.as_ref();
        let is_planned = restart.is_some_and(|restart| restart.next_start_time.is_some());
        let name = vm.metadata.as_ref().map_or("", |metadata| &metadata.name);
        let stopping = self.stopping.borrow().is_some();
        // The agent has created the VM and starts it next.
        if is_planned || self.host.ledger.keeps(name) || (status.reason == "Created" && !stopping) {
            return None;
        }
        let exit = status.last_exit.as_ref().map(|exit| exit.reason());
        let is_good = match exit {
            _ if status.phase() == VmPhase::Failed => false,
            Some(ExitReason::GuestShutdown | ExitReason::Stopped | ExitReason::Killed) | None => true,
            Some(_) => false,
        };
        Some(ended(u32::from(!is_good), &status.reason, &status.message))
    }
}

/// How far the migration of a VM is that comes from another node, until the VM is this node's.
fn arrival(vm: &Vm) -> Option<MigrationPhase> {
    let migration = vm.status.as_ref()?.migration.as_ref()?;
    let phase = migration.phase();
    let arrives = matches!(phase, MigrationPhase::Transfer | MigrationPhase::Prepared);
    (migration.role() == MigrationRole::Target && arrives).then_some(phase)
}

fn stopped_without_vm() -> Ended {
    ended(0, "Stopped", "the pod was stopped before it had a VM")
}

fn ended(code: u32, reason: &str, message: &str) -> Ended {
    Ended {
        code,
        reason: reason.to_owned(),
        message: message.to_owned(),
    }
}
