//! A walk through the steps that the daemon goes (`step` of `vmmd/host/src/fault.rs`), as many as there are: it is killed before each of them.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, flock};
use vmmd_api::v1::{self, AttachmentPhase, VmPhase};

use crate::harness::{Daemon, PATIENCE, status};

/// Limit on the steps of an action, and on attempts to kill the daemon before missed steps.
const MOST: usize = 100;
/// Of the store: operations are written down by the way, with others or alone. So a step may have another number the next time.
pub const STORE: &str = "write the store";

/// Result of a round of a [`Walk`].
pub enum Round {
    /// The daemon was killed. Contains the description for a failed check.
    Killed(String),
    /// It was not killed, and some steps were missed.
    Missed,
    /// It was not killed, and was before each step once.
    End,
}

/// A folder in which the daemon finds before which step it is killed, and before which it was.
pub struct Walk {
    folder: tempfile::TempDir,
    /// Steps before the one where it is killed.
    left: usize,
    /// All steps, once they are known.
    all: Option<usize>,
    /// Before which it was killed.
    killed: Vec<String>,
}

impl Walk {
    /// With a daemon that will look there.
    pub async fn begin(daemon: &mut Daemon) -> Self {
        let walk = Self {
            folder: tempfile::tempdir().unwrap(),
            left: 0,
            all: None,
            killed: Vec::new(),
        };
        walk.launch(daemon).await;
        walk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Another daemon after the one that there is, or was.
    pub async fn launch(&self, daemon: &mut Daemon) {
        daemon.kill();
        let folder = self.folder.path().to_str().unwrap();
        daemon.relaunch_with(&[("VMMD_STEPS", folder)]).await;
    }

    /// Waits until the daemon is idle. Then the next daemon compares the node with the wanted
    /// state, as at each start.
    pub async fn settle_anew(&self, daemon: &mut Daemon, place: &str) {
        until_settled(daemon, place).await;
        self.launch(daemon).await;
    }

    /// From now on steps are counted, and before one of them the daemon is killed.
    pub fn start(&self) {
        fs::write(self.path("walked"), "").unwrap();
        fs::write(self.path("left"), self.left.to_string()).unwrap();
    }

    /// Ends a round. The walk is to come to the steps `expected`.
    pub fn end(&mut self, expected: &[&str]) -> Round {
        let turn = fs::File::create(self.path("turn")).unwrap();
        flock(&turn, FlockOperation::LockExclusive).unwrap();
        fs::remove_file(self.path("left")).unwrap();
        drop(turn);
        let walked = fs::read_to_string(self.path("walked")).unwrap();
        let walked: Vec<_> = walked.lines().map(str::to_owned).collect();
        assert!(self.killed.len() < MOST, "there is no end: {:?}", self.killed);
        if walked.len() > self.left {
            self.killed.push(walked.last().unwrap().clone());
            let place = format!("killed before step {} of {walked:?}", self.left);
            self.left = self.all.unwrap_or(self.left + 1);
            return Round::Killed(place);
        }
        let missing = expected
            .iter()
            .find(|step| !walked.iter().any(|walked| walked == *step));
        assert_eq!(missing, None, "in {walked:?}");
        let (times, of) = (counted(&walked), counted(&self.killed));
        let missed = |step: &String| {
            let wanted = if step == STORE { 1 } else { times[step.as_str()] };
            of.get(step.as_str()).is_none_or(|killed| *killed < wanted)
        };
        // With room for steps that come by the way.
        self.all = Some(walked.len() + 10);
        match walked.iter().rposition(missed) {
            Some(at) => {
                self.left = at;
                Round::Missed
            }
            None => Round::End,
        }
    }
}

/// Number of occurrences of each step.
fn counted(steps: &[String]) -> BTreeMap<&str, usize> {
    let mut counted = BTreeMap::new();
    for step in steps {
        *counted.entry(step.as_str()).or_default() += 1;
    }
    counted
}

/// Waits until the daemon does nothing more with its VMs.
async fn until_settled(daemon: &Daemon, place: &str) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let vms = daemon.list().await;
        let settled = |vm: &v1::Vm| {
            let status = status(vm);
            let phases = [VmPhase::Running, VmPhase::Stopped, VmPhase::Failed];
            let nics = status.nics.iter();
            let attached =
                |nic: &v1::NicStatus| nic.tap.is_empty() || nic.phase() == AttachmentPhase::Attached;
            phases.contains(&status.phase())
                && status.pending_changes.is_empty()
                && nics.clone().all(attached)
        };
        if vms.iter().all(settled) {
            return;
        }
        assert!(Instant::now() < deadline, "{place}: {vms:#?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
