//! Partial changes of existing VMs: `diff`, `patch`, `label`; and messages for a slow daemon and
//! for killed guests.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use vmmd_api::v1::{ExitReason, VmPhase};

use crate::support::{Daemon, done, failed, run, run_with_input};

const MANIFEST: &str = "\
apiVersion: vmmd/v1
kind: Vm
metadata: {name: web}
spec:
  cpu: {cores: 2}
  memory: {sizeBytes: 256Mi}
  boot: {linux: {kernel: /boot/vmlinuz}}
";

fn with_web() -> Daemon {
    let daemon = Daemon::start();
    run_with_input(&daemon, &["apply", "-f", "-"], MANIFEST);
    daemon
}

#[test]
fn diff_says_what_apply_would_change_and_changes_nothing() {
    let daemon = with_web();
    let diff = |text: &str| run_with_input(&daemon, &["diff", "-f", "-"], text);
    assert_eq!(diff(MANIFEST), done(""));
    let before = daemon.state.vm("web");
    let changed = MANIFEST.replace("cores: 2", "cores: 4");
    let both = format!("{changed}---\n{}", MANIFEST.replace("web", "db"));
    let said = "vm/web: to be changed\n  spec.cpu.cores: 2 -> 4\nvm/db: to be created\n";
    let differ = "error: 2 of 2 differ from the manifest\n";
    assert_eq!(diff(&both), (4, said.into(), differ.into()));
    assert_eq!(daemon.state.vm("web"), before);
    assert_eq!(daemon.state.phase("db"), None);
}

#[test]
fn a_patch_changes_some_fields_and_leaves_the_others() {
    let daemon = with_web();
    assert_eq!(
        run(
            &daemon,
            &[
                "patch",
                "web",
                "--set",
                "spec.memory.sizeBytes=1Gi",
                "--set",
                "spec.cpu.cores=4"
            ]
        ),
        done("vm/web changed\n  spec.cpu.cores: 2 -> 4\n  spec.memory.sizeBytes: 268435456 -> 1073741824\n")
    );
    assert_eq!(
        run(
            &daemon,
            &[
                "patch",
                "web",
                "-p",
                "{metadata: {labels: {a: b}}, spec: {runPolicy: manual}}",
                "--dry-run"
            ]
        ),
        done(
            "vm/web changed (dry run)\n  metadata.labels.a: not set -> b\n  spec.runPolicy: not set -> RUN_POLICY_MANUAL\n"
        )
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("patch.json");
    fs::write(&file, r#"{"spec": {"cpu": {"cores": 1}}}"#).unwrap();
    let patched = run(&daemon, &["patch", "web", "--patch-file", file.to_str().unwrap()]);
    assert_eq!(patched, done("vm/web changed\n  spec.cpu.cores: 4 -> 1\n"));
    let spec = daemon.state.vm("web").spec.unwrap();
    assert_eq!(
        (spec.cpu.unwrap().cores, spec.memory.unwrap().size_bytes),
        (1, 1 << 30)
    );

    for (wrong, code, words) in [
        (
            &["--set", "spec.cpu.core=1"][..],
            6,
            "unknown field; did you mean `cores`",
        ),
        (&["--set", "spec.cpu.cores=999"], 6, "must be 1 to 254"),
        (&["--set", "spec.cpu"], 2, "must be PATH=VALUE"),
        (&["-p", "[1]"], 6, "must be an object"),
        (&[], 2, "required"),
    ] {
        let (ended, _, said) = run(&daemon, &[&["patch", "web"], wrong].concat());
        assert!(ended == code && said.contains(words), "{wrong:?}: {ended} {said}");
    }
}

#[test]
fn what_somebody_else_changes_meanwhile_stays() {
    let daemon = with_web();
    let labels = |daemon: &Daemon| {
        let labels = daemon.state.vm("web").metadata.unwrap().labels;
        labels.into_keys().collect::<Vec<_>>()
    };
    daemon.state.change_before_updates(1);
    let patched = run(&daemon, &["label", "web", "tier=front"]);
    assert_eq!(patched, done("vm/web labelled\n"));
    assert_eq!(labels(&daemon), ["other-0", "tier"]);
    run(&daemon, &["label", "web", "other-0-"]);
    daemon.state.change_before_updates(1);
    let patched = run(&daemon, &["patch", "web", "--set", "spec.memory.sizeBytes=1Gi"]);
    assert_eq!((patched.0, patched.2.as_str()), (0, ""));
    assert_eq!(labels(&daemon), ["other-0", "tier"]);
    assert_eq!(
        daemon.state.vm("web").spec.unwrap().memory.unwrap().size_bytes,
        1 << 30
    );
    let calls = daemon.state.calls();
    let masks = calls
        .iter()
        .filter_map(|call| call.strip_prefix("update web APPLY_MODE_UNSPECIFIED grace=None "));
    assert_eq!(
        masks.collect::<Vec<_>>(),
        [
            "metadata.labels[tier]",
            "metadata.labels[other-0]",
            "spec.memory.sizeBytes"
        ]
    );
}

#[test]
fn labels_are_set_and_taken_away_by_name_by_selector_and_of_all() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Running, &[("old", "1")]);
    daemon.state.put("b", VmPhase::Stopped, &[]);
    assert_eq!(
        run(&daemon, &["label", "a", "old-", "tier=front"]),
        done("vm/a labelled\n")
    );
    assert_eq!(
        run(&daemon, &["label", "a", "tier=front"]),
        done("vm/a unchanged\n")
    );
    assert_eq!(
        run(&daemon, &["label", "-l", "tier=front", "zone=x"]),
        done("vm/a labelled\n")
    );
    assert_eq!(
        run(&daemon, &["label", "--all", "zone=x"]),
        done("vm/a unchanged\nvm/b labelled\n")
    );
    let labels = |name: &str| daemon.state.vm(name).metadata.unwrap().labels;
    assert_eq!(
        labels("a").into_iter().collect::<Vec<_>>(),
        [
            ("tier".to_owned(), "front".to_owned()),
            ("zone".to_owned(), "x".to_owned())
        ]
    );
    assert_eq!(
        run(&daemon, &["annotate", "a", "note=x y"]),
        done("vm/a annotated\n")
    );
    assert_eq!(daemon.state.vm("a").metadata.unwrap().annotations["note"], "x y");
    for wrong in [
        &["label", "a"][..],
        &["label", "a=b"],
        &["label", "a", "--all", "b=c"],
        &["label", "node/a", "b=c"],
        &["label", "disk/a", "--all", "b=c"],
    ] {
        assert_eq!(run(&daemon, wrong).0, 2, "{wrong:?}");
    }
}

#[test]
fn a_guest_that_had_to_be_killed_is_told_with_a_code_of_its_own() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon.state.end_with(ExitReason::Killed);
    let warning = "warning: vm/web: the guest did not power off within 5 s and was killed; data that the guest had not written to \
                   its disks is lost\n";
    assert_eq!(
        run(&daemon, &["stop", "web", "--grace", "5s"]),
        (13, "vm/web killed\n".into(), warning.into())
    );
    daemon.state.put("web", VmPhase::Running, &[]);
    assert_eq!(
        run(&daemon, &["stop", "web", "--force"]),
        done("vm/web stopped\n")
    );
}

#[test]
fn stop_of_a_panicked_guest_ends_with_the_code_of_a_kill() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon.state.end_with(ExitReason::GuestPanic);
    let warning = "warning: vm/web: the kernel of the guest had panicked, and the guest was killed; data that the guest had not written to its \
                   disks is lost\n";
    assert_eq!(
        run(&daemon, &["stop", "web"]),
        (13, "vm/web killed\n".into(), warning.into())
    );
    // A kill on request is no warning.
    daemon.state.put("web", VmPhase::Running, &[]);
    assert_eq!(
        run(&daemon, &["stop", "web", "--force"]),
        done("vm/web stopped\n")
    );
}

#[test]
fn restart_of_a_guest_that_was_killed_ends_with_13() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon.state.end_with(ExitReason::Killed);
    let (code, said, warning) = run(&daemon, &["restart", "web", "--grace", "5s"]);
    assert_eq!((code, said.as_str()), (13, "vm/web killed and started again\n"));
    assert!(warning.contains("did not power off within 5 s"), "{warning}");
}

#[test]
fn starting_what_runs_is_no_failure() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    assert_eq!(run(&daemon, &["start", "web"]), done("vm/web runs already\n"));
}

#[test]
fn created_vm_names_the_obstacles_to_its_start() {
    let daemon = Daemon::start();
    let manifest = MANIFEST.replace("256Mi", "8Gi");
    let (code, said, _) = run_with_input(&daemon, &["apply", "-f", "-"], &manifest);
    assert_eq!(code, 0);
    assert_eq!(
        said,
        "vm/web created\n  cannot start yet: the node is cordoned (NODE_CORDONED)\n  cannot start yet: not enough memory \
         (INSUFFICIENT_MEMORY)\n"
    );
}

#[test]
fn interrupted_start_names_the_continuing_operation() {
    let daemon = Daemon::start();
    daemon.state.put("endless", VmPhase::Stopped, &[]);
    let mut running = daemon.begin(&["start", "endless"]);
    while daemon.state.calls().is_empty() {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&running.child), Signal::INT).unwrap();
    assert_eq!(
        running.error(),
        "the start of vm/endless continues; `vmmctl get operation op-1 -w` follows it, `vmmctl operation cancel op-1` ends \
         it"
    );
    assert_eq!(running.end().0, Some(130));
}

#[test]
fn timeout_bounds_the_daemon_and_the_wait() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Stopped, &[]);
    run(&daemon, &["start", "web", "--timeout", "7s"]);
    assert_eq!(daemon.state.calls(), ["start web timeout=7"]);
    daemon.state.put("silent", VmPhase::Running, &[]);
    let (code, _, said) = run(&daemon, &["pause", "silent", "--timeout", "1s"]);
    assert_eq!(code, 10);
    assert!(
        said.contains("the vmm process of VM \"silent\" does not answer, but vmmd does"),
        "{said}"
    );
    assert!(said.contains("`vmmctl stop --force silent`"), "{said}");
}

#[test]
fn a_few_bytes_of_memory_are_asked_about() {
    let daemon = Daemon::start();
    for args in [
        &["create", "a", "--kernel", "/k", "--memory", "512"][..],
        &["create", "disk", "a", "--size", "512"],
        &["set", "memory", "a", "--target", "512"],
    ] {
        let (code, _, said) = run(&daemon, args);
        assert!(
            code == 2 && said.contains("is 512 bytes: did you mean 512Mi or 512Gi?"),
            "{said}"
        );
    }
    assert_eq!(run(&daemon, &["stop", "nope", "--timeout", "2h"]).0, 2);
    let cancelled = "error: vm/cancelled: the start was cancelled\n";
    daemon.state.put("cancelled", VmPhase::Stopped, &[]);
    assert_eq!(run(&daemon, &["start", "cancelled"]), failed(11, cancelled));
}

#[test]
fn unanswered_change_is_repeated_with_its_id() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Stopped, &[]);
    daemon.state.refuse_first();
    let commands = [
        ("CreateVm", "create db --kernel /k"),
        ("UpdateVm", "patch web --set spec.cpu.cores=3"),
        ("StartVm", "start web"),
        ("PauseVm", "pause web"),
        ("ResumeVm", "resume web"),
        ("RestartVm", "restart web"),
        ("CreateDisk", "create disk data --size 1Mi"),
        ("UpdateDisk", "resize disk data --size 2Mi"),
        ("AttachDisk", "attach web --disk data"),
        ("ResizeVmDisk", "resize disk data --vm web --size 3Mi"),
        ("DetachDisk", "detach web data"),
        ("StopVm", "stop web"),
        ("DeleteVm", "delete web"),
        ("DeleteDisk", "delete disk data -y"),
        ("CordonNode", "node cordon"),
        ("UncordonNode", "node uncordon"),
        ("UpdateNodeLabels", "node label a=b"),
        ("DrainNode", "node drain --no-wait"),
    ];
    for (method, command) in commands {
        let words: Vec<_> = command.split(' ').collect();
        let (code, _, said) = run(&daemon, &words);
        assert_eq!((code, said.as_str()), (0, ""), "{command}");
        let calls = daemon.state.calls();
        assert!(
            calls.contains(&format!("refused {method}")),
            "{command}: {calls:?}"
        );
    }
}
