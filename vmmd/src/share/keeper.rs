//! Restarts the process of a share when it ends while its VM runs.
//!
//! ```text
//!  served ──▶ its process ends ──▶ restarting ──▶ a new one is started, the vmm has its connection ──▶ served
//!                                     ▲  │ fails
//!                                     └──┘ after a pause, twice as long each time
//! ```
//!
//! Each share of a machine has one task. After the end of the `vmm`, or after the drop of
//! [`Keepers`] with the run, the task starts no further process and ends with the present one. When
//! the machine loses the share ([`Keepers::remove`]), the task ensures that the process ends.

use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;
use vmm_protocol::vmm::{SetShareBackend, request::Op};
use vmmd_host::{failure::Failure, fault, process::Process, text};
use vmmd_objects::event::{Draft, Object};
use vmmd_spec::{share::Share, vm::VmSpec};

use super::process::{Serving, find, forget, noted_inode, serve};
use crate::{host::Host, paths::RuntimeDir};

/// How long after the end of a process the next one is made; twice as long each time when it ends soon again, as the `vmm` can have it
/// end at will.
const PAUSE: Duration = Duration::from_millis(200);
/// A process that served for so long did not end soon.
const GOOD: Duration = Duration::from_secs(60);
/// A share's process ends when the `vmm`'s descriptors are closed. The `vmm` itself ends later,
/// because the kernel first destroys its VM. During this time a failed restart of the process is
/// not reported, and the next try follows after the same time.
const UNTIL_GONE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How a share is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The process that serves the share; `None` during a restart.
    pub pid: Option<u32>,
    /// Last problem.
    pub message: String,
    /// Number of restarts.
    pub restarts: u32,
}

/// A run that has shares, or gets some.
#[derive(Debug)]
pub struct Run<'a> {
    /// Its VM.
    pub uid: Uuid,
    /// The VM's name.
    pub vm: &'a str,
    /// Its process.
    pub vmm: &'a Process,
}

/// A share with the state that its task reports.
#[derive(Debug)]
struct Kept {
    name: String,
    tag: String,
    state: watch::Receiver<State>,
    /// It is gone from the machine.
    gone: CancellationToken,
}

/// The tasks of a run.
#[derive(Debug)]
pub struct Keepers {
    kept: Vec<Kept>,
    /// Records of processes that serve no known share. The end of such a process deletes its record,
    /// unless [`Self::add`] has taken it out.
    strays: HashMap<PathBuf, DropGuard>,
    ends: CancellationToken,
    _ends_them: DropGuard,
}

impl Default for Keepers {
    fn default() -> Self {
        let ends = CancellationToken::new();
        Self {
            kept: Vec::new(),
            strays: HashMap::new(),
            _ends_them: ends.clone().drop_guard(),
            ends,
        }
    }
}

impl Keepers {
    /// Starts the tasks of a run that has begun with these processes, in the order of the spec's
    /// shares.
    pub fn begin(host: &Arc<Host>, run: &Run<'_>, spec: &VmSpec, processes: Vec<Process>) -> Self {
        let mut keepers = Self::default();
        for (share, process) in spec.shares.iter().zip(processes) {
            keepers.add(host, run, share, Some(process));
        }
        keepers
    }

    /// Starts the tasks of a run that an earlier daemon has begun, whose machine has the shares of
    /// `spec`. The tasks restart processes that have ended meanwhile.
    pub fn adopt(host: &Arc<Host>, run: &Run<'_>, spec: &VmSpec) -> Self {
        let runtime = RuntimeDir::of(&host.config, run.uid);
        let mut keepers = Self::default();
        for (index, share) in spec.shares.iter().enumerate() {
            let note = runtime.share(share.name.as_str());
            if !note.exists() {
                let _none = fs::rename(runtime.numbered_share(index), note);
            }
            keepers.add(host, run, share, None);
        }
        // Records of removed shares, which an earlier daemon did not delete before its end.
        let mut notes = runtime.noted_shares();
        notes.retain(|note| keepers.kept.iter().all(|kept| runtime.share(&kept.name) != *note));
        for note in notes {
            match find(&note) {
                Some(process) => keepers.forget_at_end(note, process),
                None => {
                    fault::step("forget the process of a share");
                    let _gone_with_the_run = fs::remove_file(note);
                }
            }
        }
        keepers
    }

    /// Deletes the record of a process when it ends. The process serves a share that the machine has lost,
    /// and ends soon, or one that the machine has received without the daemon's knowledge.
    fn forget_at_end(&mut self, note: PathBuf, process: Process) {
        let wait = self.ends.child_token();
        self.strays.insert(note.clone(), wait.clone().drop_guard());
        tokio::spawn(async move {
            tokio::select! {
                _ = process.ended() => {
                    let pid = process.pid();
                    let _gone_with_the_run = spawn_blocking(move || forget(&note, pid)).await;
                }
                () = wait.cancelled() => {}
            }
        });
    }

    /// Adds a share of the machine, unless it exists. Without `process` the task uses the recorded
    /// process, or restarts one that has ended.
    pub fn add(&mut self, host: &Arc<Host>, run: &Run<'_>, share: &Share, process: Option<Process>) {
        if self.state(share.name.as_str()).is_some() {
            return;
        }
        let note = RuntimeDir::of(&host.config, run.uid).share(share.name.as_str());
        self.strays.remove(&note);
        let process = process.or_else(|| find(&note));
        let vmm = run.vmm.again().map(Arc::new);
        let vmm = vmm
            .inspect_err(|error| tracing::error!(vm = run.vm, %error, "watch the vmm of a VM with shares"));
        let (state, seen) = watch::channel(State {
            pid: process.as_ref().map(Process::pid),
            ..State::default()
        });
        let gone = CancellationToken::new();
        self.kept.push(Kept {
            name: share.name.to_string(),
            tag: share.tag.clone(),
            state: seen,
            gone: gone.clone(),
        });
        let keeper = Keeper {
            host: Arc::clone(host),
            uid: run.uid,
            vm: run.vm.to_owned(),
            note,
            share: share.clone(),
            state,
            vmm: vmm.ok(),
            ends: self.ends.clone(),
            gone,
            last: AtomicU32::new(0),
        };
        tokio::spawn(keeper.run(process));
    }

    /// The machine does not have the share any more: its process ends.
    pub fn remove(&mut self, share: &str) {
        for kept in self.kept.extract_if(.., |kept| kept.name == share) {
            kept.gone.cancel();
        }
    }

    /// State of the share with this name; `None` when the machine does not have it.
    pub fn state(&self, share: &str) -> Option<State> {
        let kept = self.kept.iter().find(|kept| kept.name == share)?;
        Some(kept.state.borrow().clone())
    }

    /// Names and tags of the shares that the machine has.
    pub fn kept(&self) -> impl Iterator<Item = (&str, &str)> {
        self.kept
            .iter()
            .map(|kept| (kept.name.as_str(), kept.tag.as_str()))
    }

    /// Waits until a share is otherwise than when this returned last. Cancel-safe.
    pub async fn changed(&mut self) {
        if self.kept.is_empty() {
            return std::future::pending().await;
        }
        let waiting = self.kept.iter_mut().map(|kept| Box::pin(kept.state.changed()));
        if futures_any(waiting.collect()).await.is_err() {
            // A task that has ended sends no further changes.
            std::future::pending::<()>().await;
        }
    }
}

/// The first of several that is ready.
async fn futures_any<F: Future + Unpin>(mut waiting: Vec<F>) -> F::Output {
    std::future::poll_fn(|context| {
        for future in &mut waiting {
            if let std::task::Poll::Ready(output) = std::pin::Pin::new(future).poll(context) {
                return std::task::Poll::Ready(output);
            }
        }
        std::task::Poll::Pending
    })
    .await
}

/// How long after the end of a process the next one is made, when so many before it ended soon.
fn pause_after(short: u32) -> Duration {
    PAUSE
        .saturating_mul(2_u32.saturating_pow(short))
        .min(LONGEST_PAUSE)
}

struct Keeper {
    host: Arc<Host>,
    uid: Uuid,
    vm: String,
    /// Where its process is noted.
    note: PathBuf,
    share: Share,
    state: watch::Sender<State>,
    /// `None` when the daemon cannot watch the process.
    vmm: Option<Arc<Process>>,
    ends: CancellationToken,
    gone: CancellationToken,
    /// Its last process.
    last: AtomicU32,
}

impl Keeper {
    async fn run(self, mut process: Option<Process>) {
        let mut pause = UNTIL_GONE;
        // Unreported message: the end of a process may be due to the end of the VM, which is no
        // failure of the share.
        let mut untold = None;
        // Processes in a row that ended soon.
        let mut short = 0;
        loop {
            if let Some(process) = process.take() {
                self.last.store(process.pid(), Ordering::Relaxed);
                let since = Instant::now();
                // Also when the run has ended: it ends too, and is reaped here.
                let status = tokio::select! {
                    status = process.status() => status,
                    () = self.gone.cancelled() => return self.end(&process).await,
                };
                if since.elapsed() >= GOOD {
                    short = 0;
                }
                if self.is_over_after(pause_after(short)).await {
                    return self.forget().await;
                }
                short = short.saturating_add(1);
                let how = match status.and_then(|status| status.terminating_signal()) {
                    Some(signal) => format!("was ended by signal {signal}"),
                    None => "has ended".to_owned(),
                };
                let message = format!("the process that serves it {how}");
                self.note(&message);
                untold = Some(message);
                pause = UNTIL_GONE;
            }
            match self.restart().await {
                Ok(new) => {
                    if let Some(message) = untold.take() {
                        self.tell(&message);
                    }
                    let pid = new.pid();
                    self.state.send_modify(|state| {
                        state.pid = Some(pid);
                        state.restarts += 1;
                    });
                    let message = format!(
                        "share \"{}\" has a new process: the guest has to mount it again",
                        self.share.name
                    );
                    self.host
                        .events
                        .emit(Draft::normal(self.object(), "ShareRestored", message));
                    process = Some(new);
                }
                Err(failure) => {
                    if self.is_over_after(pause).await {
                        return self.forget().await;
                    }
                    if let Some(message) = untold.take() {
                        self.tell(&message);
                    }
                    // The share's name precedes the message of a failure.
                    let prefix = format!("share \"{}\": ", self.share.name);
                    let message = failure.message.strip_prefix(&prefix).unwrap_or(&failure.message);
                    if self.note(message) {
                        self.tell(message);
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// Waits so long; true as soon as the run is over.
    async fn is_over_after(&self, pause: Duration) -> bool {
        let gone = async {
            match &self.vmm {
                Some(vmm) => vmm.gone().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.ends.cancelled() => true,
            () = self.gone.cancelled() => true,
            () = gone => true,
            () = sleep(pause) => false,
        }
    }

    /// The share is gone from the machine, which has closed the connection to the process.
    async fn end(&self, process: &Process) {
        if timeout(UNTIL_GONE, process.ended()).await.is_err() {
            process.kill();
            process.ended().await;
        }
        self.forget().await;
    }

    /// Deletes the record of the process when the machine has lost the share. A record of another
    /// process under the same name stays.
    async fn forget(&self) {
        if !self.gone.is_cancelled() {
            return;
        }
        let (note, pid) = (self.note.clone(), self.last.load(Ordering::Relaxed));
        let forgotten = spawn_blocking(move || forget(&note, pid)).await;
        if let Err(error) = forgotten {
            tracing::error!(vm = self.vm, %error, "forget the process of a share");
        }
    }

    fn object(&self) -> Object {
        Object::Vm(self.vm.clone(), self.uid)
    }

    /// Notes that there is no process, and why; returns whether that is news.
    fn note(&self, message: &str) -> bool {
        self.state.send_if_modified(|state| {
            let news = state.pid.is_some() || state.message != message;
            state.pid = None;
            message.clone_into(&mut state.message);
            news
        })
    }

    fn tell(&self, message: &str) {
        let message = format!("share \"{}\": {message}", self.share.name);
        self.host
            .events
            .emit(Draft::warning(self.object(), "ShareFailed", message));
    }

    async fn restart(&self) -> Result<Process, Failure> {
        let Some(client) = self.host.clients.get(self.uid) else {
            return Err(Failure::internal("the VM's vmm can't be reached"));
        };
        let note = self.note.clone();
        let begun_with = spawn_blocking(move || noted_inode(&note)).await;
        let begun_with = begun_with.map_err(|error| Failure::internal(error.to_string()))?;
        let mut made = serve(&self.host, self.uid, vec![self.share.clone()], begun_with).await?;
        let Some(Serving { child, socket, .. }) = made.pop() else {
            return Err(Failure::internal("no process was made"));
        };
        self.last.store(child.pid(), Ordering::Relaxed);
        let process = child.watched(Process::new);
        let process = process.map_err(|error| Failure::internal(format!("watch its process: {error}")))?;
        let set = SetShareBackend {
            name: self.share.name.to_string(),
            fd: 0,
        };
        fault::step("give the vmm the new process of a share");
        let set = client.request(Op::SetShareBackend(set), &[socket]).await;
        match set {
            Ok(_) => Ok(process),
            Err(error) => {
                process.kill();
                process.ended().await;
                let message = format!("give the vmm its new process: {}", text::chain(&error));
                Err(Failure::internal(message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_keeps_ending_is_restarted_with_back_off() {
        let waits: Vec<_> = (0..9).map(|short| pause_after(short).as_millis()).collect();
        assert_eq!(waits, [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000]);
        assert_eq!(pause_after(u32::MAX), LONGEST_PAUSE);
    }
}
