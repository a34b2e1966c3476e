//! Selection of VMs for a verb: by name, by label, all; and the confirmation before data is
//! destroyed.

use std::fs;

use vmmd_api::v1::VmPhase;

use crate::support::{Daemon, done, failed, run, run_with_input};

/// Two of the front, one of which runs, and one of the back that is paused.
fn three() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web-1", VmPhase::Running, &[("tier", "front")]);
    daemon.state.put("web-2", VmPhase::Stopped, &[("tier", "front")]);
    daemon.state.put("db", VmPhase::Paused, &[("tier", "back")]);
    daemon
}

#[test]
fn selector_selects_vms_that_the_verb_applies_to() {
    let daemon = three();
    assert_eq!(
        run(&daemon, &["start", "-l", "tier=front"]),
        done("vm/web-2 started\n")
    );
    assert_eq!(
        run(&daemon, &["pause", "-l", "tier=front"]),
        done("vm/web-1 paused\nvm/web-2 paused\n")
    );
    assert_eq!(run(&daemon, &["resume", "-l", "tier!=back"]).0, 0);
    assert_eq!(daemon.state.phase("db"), Some(VmPhase::Paused));
    assert_eq!(
        run(&daemon, &["restart", "-l", "tier=front"]),
        done("vm/web-1 restarted\nvm/web-2 restarted\n")
    );
    assert_eq!(
        run(&daemon, &["stop", "-l", "tier"]),
        done("vm/db stopped\nvm/web-1 stopped\nvm/web-2 stopped\n")
    );
    let nothing = (0, String::new(), "There are no VMs to pause.\n".to_owned());
    assert_eq!(run(&daemon, &["pause", "--all"]), nothing);
    assert_eq!(
        run(&daemon, &["start", "--all"]),
        done("vm/db started\nvm/web-1 started\nvm/web-2 started\n")
    );
    assert_eq!(
        run(&daemon, &["delete", "-l", "tier=front", "--force"]),
        done("vm/web-1 deleted\nvm/web-2 deleted\n")
    );
}

#[test]
fn names_selectors_and_all_exclude_each_other() {
    let daemon = three();
    for verb in ["start", "stop", "restart", "pause", "resume", "reset", "delete"] {
        for wrong in [
            &[][..],
            &["a", "--all"],
            &["a", "-l", "b=c"],
            &["--all", "-l", "b=c"],
            &["disk/a"],
        ] {
            let (code, _, said) = run(&daemon, &[&[verb], wrong].concat());
            assert_eq!(code, 2, "{verb} {wrong:?}: {said}");
        }
    }
    assert_eq!(daemon.state.calls(), [""; 0]);
}

#[test]
fn what_o_name_prints_is_taken_by_every_verb() {
    let daemon = three();
    assert_eq!(
        run(&daemon, &["get", "vm", "-o", "name"]),
        done("vm/db\nvm/web-1\nvm/web-2\n")
    );
    for (args, expected) in [
        (&["start", "vm/web-2"][..], "vm/web-2 started\n"),
        (&["label", "vm/web-2", "a=b"], "vm/web-2 labelled\n"),
        (
            &["patch", "vm/web-2", "--set", "spec.cpu.cores=2"],
            "vm/web-2 unchanged\n",
        ),
        (
            &["wait", "vm/web-2", "--for", "phase=running"],
            "vm/web-2 is Running\n",
        ),
        (&["stop", "vm/web-2"], "vm/web-2 stopped\n"),
        (&["delete", "vm", "vm/web-2"], "vm/web-2 deleted\n"),
        (
            &["create", "disk", "disk/data", "--size", "1Mi"],
            "disk/data created\n",
        ),
        (&["get", "disk", "disk/data", "-o", "name"], "disk/data\n"),
        (
            &["attach", "vm/web-1", "--disk", "disk/data"],
            "vm/web-1 disk data attached\n",
        ),
    ] {
        assert_eq!(run(&daemon, args), done(expected), "{args:?}");
    }
    for args in [&["describe", "vm", "vm/web-1"], &["logs", "vm/web-1", "--vmm"]] {
        assert_eq!(run(&daemon, args).0, 0, "{args:?}");
    }
    assert_eq!(run(&daemon, &["start", "disk/data"]).0, 2);
}

#[test]
fn data_is_not_destroyed_without_confirmation() {
    let daemon = three();
    run(&daemon, &["create", "disk", "data", "--size", "1Mi"]);
    let refused = "error: this deletes disk/data with all their data; confirm with --yes\n";
    assert_eq!(run(&daemon, &["delete", "disk", "data"]), failed(2, refused));
    let refused = "error: this deletes vm/db, vm/web-1, vm/web-2; confirm with --yes\n";
    assert_eq!(run(&daemon, &["delete", "--all", "--force"]), failed(2, refused));
    assert!(daemon.state.disk("data").is_some() && daemon.state.phase("db").is_some());

    run(&daemon, &["attach", "web-2", "--disk", "data"]);
    let (code, _, refused) = run(&daemon, &["delete", "web-2", "--with-disks"]);
    assert!(
        code == 2 && refused.contains("vm/web-2 and disk/data with all their data"),
        "{refused}"
    );
    assert_eq!(
        run(&daemon, &["delete", "web-2", "--with-disks", "-y"]),
        done("vm/web-2 deleted\ndisk/data deleted\n")
    );
    assert_eq!(run(&daemon, &["delete", "--all", "--force", "-y"]).0, 0);
    assert_eq!(daemon.state.phase("db"), None);
}

const PAIR: &str = "\
apiVersion: vmmd/v1
kind: Disk
metadata: {name: data}
spec: {sizeBytes: 1Mi}
---
apiVersion: vmmd/v1
kind: Vm
metadata: {name: web}
spec:
  cpu: {cores: 2}
  memory: {sizeBytes: 256Mi}
  boot: {linux: {kernel: /boot/vmlinuz}}
";

#[test]
fn what_a_manifest_made_is_deleted_by_it_vms_first() {
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pair.yaml");
    fs::write(&file, PAIR).unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(
        run(&daemon, &["apply", "-f", file]),
        done("disk/data created\nvm/web created\n")
    );
    let (code, _, refused) = run(&daemon, &["delete", "-f", file]);
    assert!(code == 2 && refused.contains("disk/data"), "{refused}");
    assert_eq!(
        run(&daemon, &["delete", "-f", file, "-y"]),
        done("vm/web deleted\ndisk/data deleted\n")
    );
    assert_eq!(run(&daemon, &["delete", "-f", file, "-y"]).0, 3);
    assert_eq!(
        run(&daemon, &["delete", "-f", file, "-y", "--ignore-not-found"]),
        done("")
    );
    assert_eq!(run_with_input(&daemon, &["delete", "-f", "-"], "kind: Vm\n").0, 6);
}

#[test]
fn many_vms_of_a_manifest_are_started_side_by_side() {
    let daemon = Daemon::start();
    daemon.state.slow_starts();
    let vm = PAIR.split("---\n").nth(1).unwrap();
    let many: Vec<_> = (0..30)
        .map(|number| vm.replace("web", &format!("web-{number:02}")))
        .collect();
    let (code, out, err) = run_with_input(&daemon, &["apply", "--start", "-f", "-"], &many.join("---\n"));
    assert_eq!((code, err.as_str()), (0, ""));
    let names: Vec<_> = out.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(
        names,
        (0..30)
            .map(|number| format!("vm/web-{number:02}"))
            .collect::<Vec<_>>()
    );
    let most = daemon.state.most_starts();
    assert!((2..=16).contains(&most), "{most} starts at once");
}
