//! `vmmctl node` and its verbs.

use crate::support::{Daemon, run_with_input};

fn run(daemon: &Daemon, args: &[&str], input: &str) -> (i32, String, String) {
    run_with_input(daemon, &[&["node"], args].concat(), input)
}

fn manifest(name: &str, memory: &str) -> String {
    format!(
        "---\napiVersion: vmmd/v1\nkind: Vm\nmetadata: {{name: {name}}}\nspec:\n  cpu: {{cores: 2}}\n  memory: {{sizeBytes: \
         {memory}}}\n  boot: {{linux: {{kernel: /boot/vmlinuz}}}}\n"
    )
}

#[test]
fn a_manifest_that_does_not_fit_ends_with_9_and_all_reasons() {
    let daemon = Daemon::start();
    let (code, out, err) = run(&daemon, &["check", "-f", "-"], &manifest("small", "1Gi"));
    assert_eq!((code, out.as_str(), err.as_str()), (0, "vm/small fits\n", ""));
    let both = manifest("small", "1Gi") + &manifest("large", "8Gi");
    let (code, out, err) = run(&daemon, &["check", "-f", "-"], &both);
    assert_eq!((code, out.as_str()), (9, "vm/small fits\n"));
    for reason in ["NODE_CORDONED", "INSUFFICIENT_MEMORY"] {
        assert!(
            err.contains("vm/large does not fit") && err.contains(reason),
            "{err}"
        );
    }
}

#[test]
fn the_node_is_cordoned_labelled_and_drained_by_what_is_said() {
    let daemon = Daemon::start();
    let ok = |args: &[&str], expected: &str| {
        let (code, out, err) = run(&daemon, args, "");
        assert_eq!((code, out.as_str(), err.as_str()), (0, expected, ""), "{args:?}");
    };
    ok(&["cordon", "--reason", "new kernel"], "node/node-1 cordoned\n");
    ok(&["uncordon"], "node/node-1 uncordoned\n");
    ok(&["label", "zone=a", "old-"], "node/node-1 labelled\n");
    ok(
        &["drain", "--grace", "5s", "--no-wait"],
        "operation/1234 drains the node\n",
    );
    let calls = daemon.state.calls();
    let expected = [
        "cordon new kernel",
        "uncordon",
        "label {\"zone\": \"a\"} [\"old\"]",
        "drain  5",
    ];
    assert_eq!(calls, expected);
    let (code, _, err) = run(&daemon, &["label", "zone"], "");
    assert!(code == 2 && err.contains("KEY=VALUE, or KEY-"), "{err}");
}

#[test]
fn drain_moves_running_vms_and_stops_none_on_failure() {
    use vmmd_api::v1::VmPhase::{Running, Stopped};
    let daemon = Daemon::start();
    for (name, phase) in [("db", Running), ("off", Stopped), ("web", Running)] {
        daemon.state.put(name, phase, &[]);
    }
    let moves = [
        "drain",
        "--migrate-to",
        "full:7443",
        "--migrate",
        "db=node-3:7443",
    ];
    let (code, out, err) = run(&daemon, &moves, "");
    assert_ne!(code, 0);
    assert!(out.contains("vm/db migrated to node-3:7443"), "{out}");
    assert!(
        err.contains("web") && err.contains("does not fit") && err.contains("no VM was stopped"),
        "{err}"
    );
    let tried = ["cordon ", "migrate db to node-3:7443", "migrate web to full:7443"];
    assert_eq!(daemon.state.calls(), tried);

    let rest = ["drain", "--migrate", "web=full:7443", "--stop-rest", "--no-wait"];
    let (code, out, err) = run(&daemon, &rest, "");
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("drains the node"), "{out}");
    assert!(err.contains("vm/web will be stopped"), "{err}");
    assert_eq!(
        daemon.state.calls()[3..],
        ["cordon ", "migrate web to full:7443", "drain  0"]
    );

    let (code, _, err) = run(&daemon, &["drain", "--migrate", "web"], "");
    assert!(code == 2 && err.contains("VM=HOST:PORT"), "{err}");
}

#[test]
fn a_decision_names_the_migration_that_waits() {
    let daemon = Daemon::start();
    daemon.state.put("web", vmmd_api::v1::VmPhase::Paused, &[]);
    let ask = |line: &str| {
        let output = daemon.vmmctl().args(line.split(' ')).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), error)
    };
    let (code, err) = ask("migrate resolve web --run");
    assert!(code == 5 && err.contains("no migration of the VM waits"), "{err}");
    let waiting = vmmd_api::v1::MigrationStatus {
        number: 7,
        waits_for_decision: true,
        ..Default::default()
    };
    daemon.state.migrates("web", waiting);
    let (code, err) = ask("migrate resolve web --run");
    assert_eq!(code, 0, "{err}");
    let (code, err) = ask("migrate resolve web --drop --migration 6");
    assert_eq!(code, 0, "{err}");
    let uid = daemon.state.vm("web").metadata.unwrap().uid;
    let expected = [
        format!("resolve web MIGRATION_RESOLUTION_RUN 7 {uid}"),
        format!("resolve web MIGRATION_RESOLUTION_DROP 6 {uid}"),
    ];
    assert_eq!(daemon.state.calls(), expected);
}
