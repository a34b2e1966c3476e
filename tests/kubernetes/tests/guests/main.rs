//! The nodes of a cluster that run guests: daemons and agents are in the test node, the control plane is beside it.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod beats;
mod ground;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use vmmd_kubernetes_tests::{
    faults::{self, Deck, Fault, Random},
    vms,
};
use vmmd_tests::Case;

use ground::{Ground, Struck};

/// A guest boots for half a minute on a loaded machine, after a fault that has its own waits; and one that is moved is sent in a minute.
const PATIENCE: Duration = Duration::from_secs(300);

/// 3 rounds, and 20 with `VMMD_LONG`.
#[tokio::test]
async fn no_guest_runs_twice_or_is_lost_whatever_is_killed() {
    let rounds = faults::rounds(if vmmd_tests::long() { 20 } else { 3 });
    let seed = faults::seed();
    let (mut random, mut deck) = (Random::new(seed), Deck::default());
    let case = Case::new("kubernetes");
    let mut ground = Ground::start(&case, PATIENCE).await;
    let names: Vec<String> = (0..3).map(|number| format!("vm-{number}")).collect();
    for (number, name) in names.iter().enumerate() {
        ground.cluster.apply(&ground.vm(name, number));
    }
    ground.all_run(&names, PATIENCE).await;
    let known = vms::list(&ground.cluster.api).await.unwrap();
    let name_of = |uid: &String| known.iter().find(|vm| vm.uid == *uid).unwrap().name.as_str();
    let mut kills = BTreeMap::new();
    let mut longest = Duration::ZERO;
    let began = Instant::now();
    for round in 0..rounds {
        let before: Vec<_> = names.iter().map(|name| ground.beats.boots(name)).collect();
        let moved = (random.below(3) == 0).then(|| names[random.below(names.len())].as_str());
        if let Some(name) = moved {
            let wish = format!("vmmd.dev/migrate={round}");
            ground
                .cluster
                .kubectl(&["annotate", "--overwrite", "vmmvm", name, &wish]);
        }
        sleep(Duration::from_millis(random.below(6000) as u64)).await;
        let mut faults = deck.deal(&mut random).and_another(&mut random);
        // Which VM's it is is asked of a daemon.
        faults.sort_by_key(|fault| !matches!(fault, Fault::Vmm(_)));
        println!("round {round}: {faults:?}, to be moved: {moved:?}");
        let struck: Vec<Struck> = faults
            .iter()
            .map(|fault| ground.kill(*fault, &mut random))
            .collect();
        for fault in &faults {
            *kills.entry(fault.kind()).or_insert(0) += 1;
        }
        sleep(Duration::from_millis(random.below(3000) as u64)).await;
        for (fault, struck) in faults.iter().zip(&struck) {
            ground.mend(*fault, struck);
        }
        let mended = Instant::now();
        ground.all_run(&names, PATIENCE).await;
        longest = longest.max(mended.elapsed());
        println!(
            "round {round}: converged {:.1} s later",
            mended.elapsed().as_secs_f32()
        );
        let victim = struck.iter().find_map(|struck| struck.vm.as_ref()).map(name_of);
        let vmmd_died = faults.iter().any(|fault| matches!(fault, Fault::Daemon(_)));
        for (name, before) in names.iter().zip(before) {
            let (killed, moved) = (victim == Some(name.as_str()), moved == Some(name.as_str()));
            // A migrating VM has two vmms. A VM whose vmmd is killed at the same time may have to
            // restart.
            let least = usize::from(killed && !moved);
            let most = usize::from(killed || (moved && vmmd_died));
            let boots = ground.beats.boots(name) - before;
            assert!(
                (least..=most).contains(&boots),
                "{name} has booted {boots} times in round {round}, not {least} to {most}: {:?}",
                ground.beats
            );
        }
    }
    println!(
        "{rounds} rounds of seed {seed} in {:.0} s, the longest way back took {:.1} s; killed: {kills:?}",
        began.elapsed().as_secs_f32(),
        longest.as_secs_f32()
    );
    for (program, times) in ground.ended_by_themselves() {
        println!("{program} ended by itself and was started again {times} times");
    }
    for vm in vms::list(&ground.cluster.api).await.unwrap() {
        println!("{vm:?} has booted {} times", ground.beats.boots(&vm.name));
    }
    ground
        .cluster
        .kubectl(&["delete", "vmmvm", "--all", "--wait=false"]);
    ground.nothing_left(PATIENCE).await;
    assert_eq!(ground.panics(), "");
}
