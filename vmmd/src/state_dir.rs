//! Writes the files of VMs that have a `state_dir`: the state and the history of the VM, beside the
//! files of the VM's user.
//!
//! | file | content | written |
//! |---|---|---|
//! | `vm.json` | the VM as GetVm shows it, without secrets | with each change of it |
//! | `metrics.json` | its counters, with their time | with that and every [`PERIOD`], while it runs |
//! | `serial.log`, `vmm.log` | the present content of these logs of its last run | the same, when they have changed |
//!
//! Each such VM has one task, so that an unresponsive file system blocks only this task. The task
//! reads the state that the VM's actor publishes, and the daemon's own log files. It keeps no state
//! that a later daemon would need: a new daemon writes all files at its start. One event reports a
//! failed write, and the task retries. Before a VM's logs are removed with it, its actor writes the
//! files for the last time ([`write_last`]).

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{self, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{failure::Failure, text};
use vmmd_objects::event::{Draft, Object};

use crate::registry::state_dirs::Written;
use crate::{files::state_dir::StateDir, host::Host, paths::LogDir, registry::vms::Entry, stats};

/// How old counters and logs can be.
const PERIOD: Duration = Duration::from_secs(30);
/// From one look to the next, however fast a VM changes.
const PAUSE: Duration = Duration::from_millis(500);

/// Never ends.
pub async fn keep(host: Arc<Host>) {
    let mut writers: HashMap<String, JoinHandle<()>> = HashMap::new();
    let mut news = host.vms.registry.news();
    let mut until = None;
    loop {
        let revision = *news.borrow_and_update();
        let changed = host.vms.registry.lock().changed(until);
        for seen in changed {
            begin(&host, &mut writers, &seen.record.vm);
        }
        until = Some(revision);
        if news.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Starts to write a VM's files, unless a task exists or the VM has no state directory.
fn begin(host: &Arc<Host>, writers: &mut HashMap<String, JoinHandle<()>>, vm: &v1::Vm) {
    let has_dir = vm.spec.as_ref().is_some_and(|spec| !spec.state_dir.is_empty());
    let metadata = vm.metadata.clone().unwrap_or_default();
    if !has_dir || writers.get(&metadata.uid).is_some_and(|task| !task.is_finished()) {
        return;
    }
    writers.retain(|_, task| !task.is_finished());
    let Some(entry) = host.vms.get(&metadata.name) else {
        return;
    };
    let writer = Writer {
        host: Arc::clone(host),
        name: metadata.name,
        state: entry.state.clone(),
        entry,
        failed: String::new(),
    };
    writers.insert(metadata.uid, tokio::spawn(writer.run()));
}

struct Writer {
    host: Arc<Host>,
    name: String,
    entry: Entry,
    state: watch::Receiver<Arc<v1::Vm>>,
    /// Present problem; empty without one.
    failed: String,
}

impl Writer {
    /// Ends when the VM is deleted.
    async fn run(mut self) {
        loop {
            match self.write().await {
                None => self.failed.clear(),
                Some(result) => self.tell(result),
            }
            sleep(PAUSE).await;
            if let Ok(Err(_)) = timeout(PERIOD, self.state.changed()).await {
                // Another actor has taken the VM over, unless it is gone.
                let entry = self.host.vms.find(self.entry.uid);
                let Some(entry) = entry.filter(|entry| entry.state.has_changed().is_ok()) else {
                    return self.host.state_dirs.forget(self.entry.uid);
                };
                self.state = entry.state.clone();
                self.entry = entry;
            }
        }
    }

    /// `None` while the VM has no directory.
    async fn write(&mut self) -> Option<Result<(), Failure>> {
        self.state.mark_unchanged();
        dir_of(&self.state.borrow())?;
        // A VM that does not run has no counters, and its last file stays.
        let counters = stats::of(&self.host, &self.name, &self.entry).await.ok();
        let last = self.host.state_dirs.of(self.entry.uid);
        let mut written = last.lock().await;
        // A deleted VM has had its last write, and another VM may have the directory by now.
        self.host.vms.find(self.entry.uid)?;
        let vm = Arc::clone(&self.state.borrow());
        let dir = dir_of(&vm)?;
        let result = write(
            &self.host,
            self.entry.uid,
            (&vm, counters.as_ref()),
            &dir,
            &mut written,
        );
        Some(result.await)
    }

    /// Reports a repeated failure once.
    fn tell(&mut self, result: Result<(), Failure>) {
        let object = || Object::Vm(self.name.clone(), self.entry.uid);
        match result {
            Ok(()) if self.failed.is_empty() => {}
            Ok(()) => {
                self.failed.clear();
                let message = "the VM's files in its state directory are written again";
                self.host
                    .events
                    .emit(Draft::normal(object(), "StateDirRestored", message));
            }
            Err(failure) if failure.message == self.failed => {}
            Err(failure) => {
                let message = format!("the VM's files in its state directory: {}", failure.message);
                self.host
                    .events
                    .emit(Draft::warning(object(), "StateDirFailed", message));
                self.failed = failure.message;
            }
        }
    }
}

/// The directory of a VM that has one.
fn dir_of(vm: &v1::Vm) -> Option<PathBuf> {
    let dir = &vm.spec.as_ref()?.state_dir;
    (!dir.is_empty()).then(|| dir.into())
}

/// Guard against writes of the VM's files.
#[derive(Debug)]
pub struct Held {
    _written: Option<sync::OwnedMutexGuard<Written>>,
}

/// Writes the files of a VM before the removal of its logs, so that they contain its end in any
/// case. The files stay unchanged until the returned guard is dropped.
pub async fn write_last(host: &Arc<Host>, uid: Uuid, vm: &v1::Vm) -> Held {
    let Some(dir) = dir_of(vm) else {
        return Held { _written: None };
    };
    let mut written = host.state_dirs.of(uid).lock_owned().await;
    if let Err(failure) = write(host, uid, (vm, None), &dir, &mut written).await {
        tracing::warn!(%uid, %failure, "write the files of a VM that is deleted");
    }
    Held {
        _written: Some(written),
    }
}

/// Writes the VM's description and logs if they have changed, and its counters if there are any.
async fn write(
    host: &Arc<Host>,
    uid: Uuid,
    (vm, counters): (&v1::Vm, Option<&v1::VmStats>),
    dir: &Path,
    written: &mut Written,
) -> Result<(), Failure> {
    let pretty = |json: serde_json::Result<Vec<u8>>| {
        let mut json = json.map_err(|error| Failure::internal(error.to_string()))?;
        json.push(b'\n');
        Ok::<_, Failure>(json)
    };
    let content = pretty(serde_json::to_vec_pretty(vm))?;
    let counters = counters.map(|stats| pretty(serde_json::to_vec_pretty(stats)));
    let counters = counters.transpose()?;
    let logs = LogDir::of(&host.config, uid);
    let (of, before, dir) = (Arc::clone(host), written.clone(), dir.to_owned());
    let path = dir.clone();
    let writing = host.pools.files.run(&[path], move || {
        let open = StateDir::open(&dir, &of.config.roots.shares)?;
        let before = if before.dir == dir {
            before
        } else {
            Written::default()
        };
        let failed =
            |error: io::Error| Failure::internal(format!("they can't be written: {}", text::words(&error)));
        let sources = [
            (logs.serial_old(), "serial.log"),
            (logs.serial(), "serial.log"),
            (logs.vmm(), "vmm.log"),
        ];
        let states: Vec<_> = sources.iter().map(|(path, _)| state(path)).collect();
        if content != before.vm {
            open.write("vm.json", &content).map_err(failed)?;
        }
        if let Some(counters) = counters {
            open.write("metrics.json", &counters).map_err(failed)?;
        }
        if states != before.logs {
            for name in ["serial.log", "vmm.log"] {
                let parts = sources.iter().filter(|(_, of)| *of == name);
                let parts: Vec<_> = parts.filter_map(|(path, _)| fs::read(path).ok()).collect();
                // There is none before the first run.
                if !parts.is_empty() {
                    open.write(name, &parts.concat()).map_err(failed)?;
                }
            }
        }
        Ok::<_, Failure>(Written {
            vm: content,
            logs: states,
            dir,
        })
    });
    *written = writing.await??;
    Ok(())
}

fn state(path: &Path) -> Option<(u64, SystemTime)> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.len(), metadata.modified().ok()?))
}
