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
fn guest_runs_on_after_a_fault_in_the_transfer_of_memory() {
    let case = Case::new("migration-kill");
    let daemons = two_daemons::pair(&case, 4);
    let name = case.name();
    let node = case.node();
    let mut guest = Traveller::boot(name, &daemons, &VmSpec::busybox(Kernel::Cloud612).cmdline(SMALL));
    let (source, target) = (guest.home(), guest.away());
    let kill = |daemon: &Daemon<'_>| {
        let pids = daemon.processes();
        let [pid] = pids.as_slice() else {
            panic!("{pids:?}");
        };
        node.sh(&format!("kill -9 {pid}"));
    };
    // Slow enough to be met on its way.
    let begin = || {
        source.migrate(name, target, "--bandwidth 2Mi --detach");
        let comes = format!(
            "timeout {PATIENCE} sh -c 'until {} | grep -q Starting; do sleep 0.1; done'",
            target.command(&format!("get vm {name} 2>/dev/null"))
        );
        node.sh(&comes);
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
            Trouble::Cancel => drop(source.ctl(&format!("migrate cancel {name}"))),
            Trouble::TargetsVmm => kill(target),
            Trouble::TargetsDaemon => target.kill(),
            Trouble::SourcesDaemon => source.kill(),
            Trouble::Cut => source.link(false),
        }
        source.ctl(&format!("wait {name} --for operation --timeout 2m"));
        if matches!(trouble, Trouble::Cut) {
            target.ctl(&format!("wait {name} --for deleted --timeout 2m"));
            source.link(true);
        }
        target.ctl(&format!("wait {name} --for deleted --timeout 2m"));
        assert_eq!(target.traces(), "", "{trouble:?}");
        let shown = source.ctl(&format!("get vm {name}"));
        assert!(shown.contains("Running"), "{trouble:?}: {shown}");
        guest.goes_on();
    }

    // Without its own vmm it has ended, as it would have without a migration.
    begin();
    kill(source);
    target.ctl(&format!("wait {name} --for deleted --timeout 2m"));
    source.ctl(&format!("wait {name} --for phase=Failed --timeout 2m"));
    assert_eq!(target.traces(), "");
}
