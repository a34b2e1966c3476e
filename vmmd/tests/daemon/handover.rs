//! A migration with trouble at each of its steps. At most one of both machines runs at any time. In
//! the end one machine runs, or one machine has ended, or an operator must decide. The other side
//! keeps no remains.

pub mod network;
mod stage;
mod steps;

use vmmd_api::v1::{OperationPhase, VmPhase};

use self::{
    network::Network,
    stage::{Expected, Stage},
    steps::{Side, Step, TRANSFER, walk},
};
use crate::{
    migration::{node, pair},
    pki::Pki,
    verbs::{within, within_seconds},
};

/// Trouble at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// A client cancels it.
    Cancel,
    /// The network is cut, then restored.
    Cut,
    /// `kill -9`, and a new one of it comes up.
    SourcesDaemon,
    TargetsDaemon,
    /// `kill -9`.
    SourcesVmm,
    TargetsVmm,
    /// The file system of the daemon's state is full, and has room again.
    SourcesDisk,
    TargetsDisk,
    /// Daemon and `vmm` are gone for good.
    SourceGone,
    TargetGone,
}

/// How it comes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    RunsAtSource,
    RunsAtTarget,
    EndedAtSource,
    EndedAtTarget,
    /// For a node without its peer: it does not have the VM.
    Nothing,
    /// For a node without its peer: it has the VM, which stands still until an operator decides.
    Waits,
}

/// The rows of the table: a test for each step. Where a side is about to say something, the state of both sides is that
/// of the step before, and the exhaustive search of the state machines (`proto/lifecycle`) loses each message too: these
/// rows are `later`, in `make nightly`.
macro_rules! rows {
    (cancelled at $last:literal; $($when:ident $test:ident: $side:ident $name:expr, $aborts:literal;)*) => {
        /// Where a migration is cancelled for the steps behind that.
        const LAST: &str = $last;
        const ROWS: &[(Side, &str, bool)] = &[$((Side::$side, $name, $aborts)),*];
        $(row!($when $test: $side $name, $aborts);)*
    };
}

macro_rules! row {
    (always $test:ident: $side:ident $name:expr, $aborts:literal) => {
        #[tokio::test]
        async fn $test() {
            everything_at(Side::$side, $name, $aborts).await;
        }
    };
    (later $test:ident: $side:ident $name:expr, $aborts:literal) => {
        mod $test {
            use super::{Side, everything_at};

            #[tokio::test]
            async fn nightly() {
                everything_at(Side::$side, $name, $aborts).await;
            }
        }
    };
}

rows! {
    cancelled at "received-Ready";
    always when_the_source_has_written_that_it_migrates: Source "wrote-Migrating", false;
    always when_the_target_has_an_offer: Target "received-OfferVm", false;
    later when_the_target_has_taken_the_offer: Target "says-OfferVm", false;
    always when_the_target_is_to_receive: Target "received-ReceiveVm", false;
    always when_memory_is_on_its_way: Target TRANSFER, false;
    later when_the_target_has_received_everything: Target "says-ReceiveVm", false;
    later when_the_source_is_about_to_prepare: Source "says-Prepare", false;
    always when_the_target_is_to_prepare: Target "received-Prepare", false;
    always when_the_target_has_written_that_it_is_prepared: Target "wrote-Prepared", false;
    later when_the_target_is_about_to_say_that_it_is_prepared: Target "says-Ready", false;
    always when_the_source_has_heard_that_the_target_is_prepared: Source "received-Ready", false;
    always when_the_source_has_written_that_it_has_given_the_vm_away: Source "wrote-Given", false;
    later when_the_source_is_about_to_commit: Source "says-Commit", false;
    always when_the_target_is_to_commit: Target "received-Commit", false;
    always when_the_target_has_written_that_the_vm_is_its_own: Target "wrote-Owned", false;
    later when_the_target_is_about_to_say_that_it_runs: Target "says-Running", false;
    always when_the_source_has_heard_that_it_runs_there: Source "received-Running", false;
    always when_the_source_has_written_that_the_vm_is_gone: Source "wrote-Gone", false;
    always when_the_source_has_written_that_the_vm_stays: Source "wrote-Owner", true;
    later when_the_source_is_about_to_abort: Source "says-Abort", true;
    always when_the_target_is_to_abort: Target "received-Abort", true;
    always when_the_target_has_written_that_it_is_over: Target "wrote-Idle", true;
    later when_the_target_is_about_to_say_that_nothing_is_left: Target "says-Unspecified", true;
    always when_the_source_has_heard_that_nothing_is_left: Source "received-Unspecified", true;
}

#[test]
fn rows_are_the_steps_of_the_state_machines_and_calls() {
    for aborts in [false, true] {
        let rows = ROWS.iter().filter(|(_, _, it)| *it == aborts);
        let rows: Vec<_> = rows.map(|(side, name, _)| Step::new(*side, *name)).collect();
        assert_eq!(rows, walk(aborts), "cancelled: {aborts}");
    }
}

/// Whether a step is before another one.
fn before(step: &Step, name: &str) -> bool {
    let place = |name: &str| ROWS.iter().position(|(_, row, _)| *row == name).unwrap();
    place(&step.name) < place(name)
}

/// Returns the expected result; `None` where the trouble cannot occur. The VM belongs to the source
/// until the source has written that it gives the VM away. A message that the source has not
/// received has no effect.
fn expected(step: &Step, aborts: bool, trouble: Trouble) -> Option<Expected> {
    use End::*;
    let heard = !aborts && !before(step, "received-Ready");
    let given = !aborts && !before(step, "wrote-Given");
    let source_or_target = |target: bool| vec![if target { RunsAtTarget } else { RunsAtSource }];
    let ends = match trouble {
        Trouble::Cancel if aborts => return None,
        Trouble::Cancel | Trouble::SourcesDaemon | Trouble::SourcesDisk => source_or_target(given),
        Trouble::Cut | Trouble::TargetsDaemon => source_or_target(heard),
        Trouble::SourcesVmm if given => vec![RunsAtTarget],
        Trouble::SourcesVmm => vec![EndedAtSource],
        Trouble::TargetsVmm if before(step, TRANSFER) || (aborts && !before(step, "says-Unspecified")) => {
            return None;
        }
        Trouble::TargetsVmm if aborts || before(step, "wrote-Prepared") => vec![RunsAtSource],
        Trouble::TargetsVmm => vec![EndedAtTarget],
        // It writes nothing any more.
        Trouble::TargetsDisk if aborts && !before(step, "says-Unspecified") => return None,
        Trouble::TargetsDisk if !aborts && !before(step, "says-Running") => return None,
        Trouble::TargetsDisk => source_or_target(!aborts && !before(step, "wrote-Prepared")),
        Trouble::SourceGone => match step.name.as_str() {
            "wrote-Owner" | "says-Abort" => vec![Waits],
            // The call may end with its connection, or may not.
            "received-Prepare" => vec![Nothing, Waits],
            "received-Commit" => vec![Waits, RunsAtTarget],
            "received-Abort" => vec![Waits, Nothing],
            _ if aborts || before(step, "received-Prepare") => vec![Nothing],
            _ if before(step, "received-Commit") => vec![Waits],
            _ => vec![RunsAtTarget],
        },
        Trouble::TargetGone if aborts || !heard => vec![RunsAtSource],
        Trouble::TargetGone if before(step, "received-Running") => vec![Waits],
        Trouble::TargetGone => vec![Nothing],
    };
    let last_call_is_over =
        ["received-Running", "wrote-Gone", "received-Unspecified"].contains(&step.name.as_str());
    Some(Expected {
        ends,
        is_noticed: !last_call_is_over,
        stands_still: trouble == Trouble::SourcesDisk && !aborts && !given,
    })
}

async fn everything_at(side: Side, name: &str, aborts: bool) {
    let step = Step::new(side, name);
    let last = Step::new(Side::Source, LAST);
    let first = aborts.then_some(&last);
    let mut stage = Stage::new().await;
    for trouble in [
        Trouble::Cancel,
        Trouble::Cut,
        Trouble::SourcesDaemon,
        Trouble::TargetsDaemon,
        Trouble::SourcesVmm,
        Trouble::TargetsVmm,
        Trouble::SourcesDisk,
        Trouble::TargetsDisk,
    ] {
        let Some(expected) = expected(&step, aborts, trouble) else {
            continue;
        };
        println!("{step:?}: {trouble:?}");
        stage.comes_to(&step, first).await;
        stage.happens(trouble, &step, &expected).await;
        stage.ends(Some(trouble), expected.ends[0]).await;
    }
    stage.is_forgotten().await;
    for (trouble, left) in [
        (Trouble::SourceGone, Side::Target),
        (Trouble::TargetGone, Side::Source),
    ] {
        let expected = expected(&step, aborts, trouble).unwrap();
        println!("{step:?}: {trouble:?}");
        let mut stage = Stage::new().await;
        stage.comes_to(&step, first).await;
        stage.happens(trouble, &step, &expected).await;
        let end = stage.settles(left, &expected.ends).await;
        assert!(
            expected.ends.contains(&end),
            "{end:?} instead of {:?}",
            expected.ends
        );
    }
}

#[tokio::test]
async fn unsuitable_node_refuses_the_offer_and_names_the_cause() {
    for (fault, why) in [
        (
            "other-version",
            "speaks version 1 of the protocol of migrations, the source 2",
        ),
        ("other-processor", "processors lack of-another-processor"),
    ] {
        let mut stage = Stage::new().await;
        let message = stage.is_refused(fault).await;
        assert!(message.contains(why), "{message}");
        stage.is_forgotten().await;
    }
}

#[tokio::test]
async fn daemons_without_disk_space_end_the_migration_when_there_is() {
    let step = Step::new(Side::Source, "says-Prepare");
    let mut stage = Stage::new().await;
    stage.comes_to(&step, None).await;
    stage.comes_up_without_room(&step).await;
    stage.ends(Some(Trouble::SourcesDaemon), End::RunsAtSource).await;
    stage.is_forgotten().await;
}

/// Fate of a VM at the target before its source has heard that the VM runs there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Deleted,
    /// And the target's daemon has been killed since.
    DeletedBefore,
    /// To a third node.
    MovedOn,
}

#[tokio::test]
async fn source_without_an_answer_forgets_a_vm_that_left_the_target() {
    for then in [Then::Deleted, Then::DeletedBefore, Then::MovedOn] {
        println!("{then:?}");
        let pki = Pki::new("ca");
        let (mut source, mut target) = (node(&pki).await, node(&pki).await);
        let network = Network::to(&target).await;
        let step = Step::new(Side::Target, "says-Running");
        target.fault(&step.name);
        source.run("web", "").await;
        source.migrate_to("web", &network.address).await.unwrap();
        target.reached(&step.name).await;
        source.kill();
        target.release(&step.name);
        target.waits_for("web", VmPhase::Running).await;
        if then == Then::MovedOn {
            let third = node(&pki).await;
            let operation = target.migrate("web", &third).await.unwrap();
            target.completes(&operation).await;
        } else {
            within(async || target.delete("web", true).await.ok()).await;
        }
        target.forgets("web").await;
        if then == Then::DeletedBefore {
            target.kill_and_restart().await;
            network.leads_to(&target);
        }
        source.relaunch().await;
        source.forgets("web").await;
        source.wait_no_processes().await;
        assert_eq!(target.list().await.len(), 0);
    }
}

#[tokio::test]
async fn a_network_that_swallows_everything_is_noticed_on_both_sides() {
    let (source, target) = pair().await;
    let network = Network::to(&target).await;
    source.run("web", "mock.send=hang").await;
    let operation = source.migrate_to("web", &network.address).await.unwrap();
    target.waits_for("web", VmPhase::Starting).await;
    network.silent.send_replace(true);
    within_seconds(60, async || {
        let now = source.operation(&operation.id).await;
        (now.phase() == OperationPhase::Failed).then_some(())
    })
    .await;
    source.waits_for("web", VmPhase::Running).await;
    within_seconds(60, async || target.get("web").await.is_err().then_some(())).await;
    target.wait_no_processes().await;
    network.silent.send_replace(false);
    within(async || source.delete("web", true).await.ok()).await;
}
