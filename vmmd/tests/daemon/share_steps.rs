//! The daemon is killed before each step that starts, ends and restarts the processes of shares.
//! The next daemon leaves no orphaned process, and the repeated request completes.

use std::time::{Duration, Instant};

use rstest::rstest;
use rustix::process::{Pid, Signal, kill_process};
use tonic::{Code, Status};
use vmmd_api::v1::{self, SharePhase, VmPhase};

use crate::{
    harness::{Daemon, PATIENCE, status},
    share_plug::{notes, running, servers},
    shares::{is_alive, share},
    verbs::within,
    walk::{Round, STORE, Walk},
};

/// Action with the VM `web` and its share `data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Attach,
    Detach,
    /// Its process is killed, and another one serves it then.
    MakeAnew,
    Start,
    Delete,
}

impl Act {
    /// Creates the initial state: `web` runs, except before a start.
    async fn prepare(self, daemon: &Daemon) {
        if daemon.get("web").await.is_err() {
            let mut vm = daemon.manifest("web", "");
            let memory = vm.spec.as_mut().unwrap().memory.as_mut().unwrap();
            memory.set_backing(v1::MemoryBacking::Shared);
            daemon.run_vm(vm).await;
        }
        set_share(daemon, self != Self::Attach).await.unwrap();
        if self == Self::Start {
            daemon.kill_vm("web").await.unwrap();
        }
    }

    /// Does it, or does it again.
    async fn perform(self, daemon: &Daemon) -> Result<(), Status> {
        match self {
            Self::Attach => set_share(daemon, true).await,
            Self::Detach => set_share(daemon, false).await,
            Self::MakeAnew => make_anew(daemon).await,
            Self::Start => match daemon.start_vm("web").await {
                Err(refused) if refused.message().contains("running") => Ok(()),
                other => other.map(drop),
            },
            Self::Delete => match daemon.delete("web", true).await {
                Err(gone) if gone.code() == Code::NotFound => Ok(()),
                other => other,
            },
        }
    }
}

async fn set_share(daemon: &Daemon, attached: bool) -> Result<(), Status> {
    let shares = attached.then(|| share(daemon, "srv/data"));
    let changed = daemon.change("web", |spec| spec.shares = shares.into_iter().collect());
    changed.await.map(drop)
}

/// The process that serves the share, as the daemon says it.
async fn server(daemon: &Daemon) -> Result<Option<u32>, Status> {
    let vm = daemon.get("web").await?;
    let shares = status(&vm).shares.iter();
    let mut served = shares.filter(|share| share.phase() == SharePhase::Served);
    Ok(served.next().map(|share| share.pid))
}

async fn make_anew(daemon: &Daemon) -> Result<(), Status> {
    let before = server(daemon).await?.unwrap();
    kill_process(Pid::from_raw(before.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
    within(async || match server(daemon).await {
        Ok(pid) => pid.is_some_and(|pid| pid != before).then_some(Ok(())),
        Err(status) => Some(Err(status)),
    })
    .await
}

/// Waits until each share of a running VM is served by one process, and there is no other one and no note of another.
async fn agrees(daemon: &Daemon, place: &str) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(difference) = difference(daemon).await {
        assert!(Instant::now() < deadline, "{place}: {difference}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The same, or until the daemon has been killed: some steps come after the answer.
async fn agrees_or_is_dead(daemon: &Daemon) {
    let deadline = Instant::now() + PATIENCE;
    while is_alive(daemon.pid())
        && let Err(difference) = difference(daemon).await
    {
        assert!(Instant::now() < deadline, "{difference}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn difference(daemon: &Daemon) -> Result<(), String> {
    let mut wanted = Vec::new();
    let answer = daemon.client().list_vms(v1::ListVmsRequest::default()).await;
    let vms = answer.map_err(|status| status.to_string())?.into_inner().vms;
    for vm in vms {
        let (now, spec) = (status(&vm), vm.spec.as_ref().unwrap());
        let runs = now.phase() == VmPhase::Running;
        let phases: Vec<_> = now.shares.iter().map(v1::ShareStatus::phase).collect();
        let named = if runs { notes(daemon, &vm) } else { Vec::new() };
        let expected = if runs { spec.shares.len() } else { 0 };
        let served = phases
            .iter()
            .filter(|phase| **phase == SharePhase::Served)
            .count();
        if served != expected || (runs && phases.len() != expected) {
            return Err(format!("{phases:?} of {expected} shares"));
        }
        if named != vec!["share.data"; expected] {
            return Err(format!("{named:?} are noted of {expected} shares"));
        }
        wanted.extend(
            now.shares
                .iter()
                .filter(|share| share.pid != 0)
                .map(|share| share.pid),
        );
    }
    let found: Vec<_> = servers(daemon)
        .iter()
        .map(|pid| pid.as_raw_nonzero().get().cast_unsigned())
        .collect();
    if found == wanted {
        Ok(())
    } else {
        Err(format!("{found:?} serve, and {wanted:?} should"))
    }
}

/// Steps of a process that begins.
const BEGINS: [&str; 3] = [
    "make the socket of a share",
    "start the process of a share",
    "note the process of a share",
];

#[rstest]
#[case::attaches_a_share(Act::Attach, true, &["plug in", "hear that it is plugged in", STORE])]
#[case::detaches_a_share(
    Act::Detach,
    false,
    &["ask for an eject", "hear that it is gone", "forget the process of a share", STORE]
)]
#[case::makes_a_process_anew(Act::MakeAnew, true, &["give the vmm the new process of a share"])]
#[case::starts_a_vm(Act::Start, true, &[STORE])]
#[case::deletes_a_vm(Act::Delete, false, &[STORE])]
#[tokio::test]
async fn daemon_that_is_killed_before_any_step_leaves_one_server(
    #[case] act: Act,
    #[case] begins: bool,
    #[case] others: &[&str],
) {
    let begin = if begins { BEGINS.as_slice() } else { &[] };
    let expected = [begin, others].concat();
    let mut daemon = running("").await;
    let mut walk = Walk::begin(&mut daemon).await;
    loop {
        act.prepare(&daemon).await;
        agrees(&daemon, "prepared").await;
        walk.start();
        let performed = act.perform(&daemon).await;
        agrees_or_is_dead(&daemon).await;
        let place = match walk.end(&expected) {
            Round::Killed(place) => format!("{act:?}: {place}"),
            Round::Missed => continue,
            Round::End => return performed.unwrap(),
        };
        walk.launch(&mut daemon).await;
        walk.settle_anew(&mut daemon, &place).await;
        agrees(&daemon, &place).await;
        act.perform(&daemon).await.expect(&place);
        agrees(&daemon, &place).await;
    }
}
