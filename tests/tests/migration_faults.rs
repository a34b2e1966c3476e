//! Migrations that end early by a kill, a cut connection or a cancellation. The guest continues at
//! the source, and the target keeps no remains.

use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::two_daemons::traveller::{PATIENCE, SMALL, Traveller};
use vmmd_tests::two_daemons::{self, Daemon};
use vmmd_tests::vm::VmSpec;

/// Fault during the transfer of memory.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Cancel,
    TargetsVmm,
    TargetsDaemon,
    SourcesDaemon,
    Cut,
}

#[test]
fn whatever_is_killed_cut_or_cancelled_while_memory_is_sent_the_guest_runs_on() {
    let case = Case::new("migration-kill").expect("node");
    let daemons = two_daemons::pair(&case, 4).expect("daemons");
    let name = case.name();
    let node = case.node();
    let mut guest = Traveller::boot(name, &daemons, &VmSpec::busybox(Kernel::Cloud612).cmdline(SMALL));
    let (source, target) = (guest.home(), guest.away());
    let kill = |daemon: &Daemon<'_>| {
        let pids = daemon.processes().expect("processes");
        let [pid] = pids.as_slice() else {
            panic!("{pids:?}");
        };
        node.sh(&format!("kill -9 {pid}")).expect("kill");
    };
    // Slow enough to be met on its way.
    let begin = || {
        source
            .migrate(name, target, "--bandwidth 2Mi --detach")
            .expect("begin");
        let comes = format!(
            "timeout {PATIENCE} sh -c 'until {} | grep -q Starting; do sleep 0.1; done'",
            target.command(&format!("get vm {name} 2>/dev/null"))
        );
        node.sh(&comes).expect("it comes to the target");
    };
    for trouble in [
        Trouble::Cancel,
        Trouble::TargetsVmm,
        Trouble::TargetsDaemon,
        Trouble::SourcesDaemon,
        Trouble::Cut,
    ] {
        println!("{trouble:?}");
        begin();
        match trouble {
            Trouble::Cancel => drop(source.ctl(&format!("migrate cancel {name}")).expect("cancel")),
            Trouble::TargetsVmm => kill(target),
            Trouble::TargetsDaemon => target.kill().expect("kill"),
            Trouble::SourcesDaemon => source.kill().expect("kill"),
            Trouble::Cut => source.link(false).expect("cut"),
        }
        source
            .ctl(&format!("wait {name} --for operation --timeout 2m"))
            .expect("the source gives up");
        if matches!(trouble, Trouble::Cut) {
            target
                .ctl(&format!("wait {name} --for deleted --timeout 2m"))
                .expect("the target gives up by itself");
            source.link(true).expect("join");
        }
        target
            .ctl(&format!("wait {name} --for deleted --timeout 2m"))
            .expect("the target forgets it");
        assert_eq!(target.traces().expect("look"), "", "{trouble:?}");
        let shown = source.ctl(&format!("get vm {name}")).expect("get");
        assert!(shown.contains("Running"), "{trouble:?}: {shown}");
        guest.goes_on();
    }

    // Without its own vmm it has ended, as it would have without a migration.
    begin();
    kill(source);
    target
        .ctl(&format!("wait {name} --for deleted --timeout 2m"))
        .expect("the target forgets it");
    source
        .ctl(&format!("wait {name} --for phase=Failed --timeout 2m"))
        .expect("it has ended");
    assert_eq!(target.traces().expect("look"), "");
}
