//! Requests of each verb to the daemon, its output, and its exit code.

use std::fs;

use vmmd_api::v1::{VmPhase, WatchEventType};

use crate::support::{Daemon, done, failed, output, run, run_with_input};

const MANIFEST: &str = "\
apiVersion: vmmd/v1
kind: Vm
metadata:
  name: web
spec:
  cpu: {cores: 2}
  memory: {sizeBytes: 256Mi}
  boot: {linux: {kernel: /boot/vmlinuz}}
  nics:
  - {name: eth0, bridge: br0}
";

#[test]
fn apply_creates_missing_objects_and_keeps_equal_ones() {
    let daemon = Daemon::start();
    let apply = || run_with_input(&daemon, &["apply", "-f", "-"], MANIFEST);
    assert_eq!(apply(), done("vm/web created\n"));
    assert_eq!(apply(), done("vm/web unchanged\n"));
    let calls = [
        "create web start=false dry_run=false",
        "update web APPLY_MODE_UNSPECIFIED grace=None",
    ];
    assert_eq!(daemon.state.calls(), calls);
}

#[test]
fn apply_with_start_starts_what_does_not_run() {
    let daemon = Daemon::start();
    let apply = || run_with_input(&daemon, &["apply", "--start", "-f", "-"], MANIFEST);
    assert_eq!(apply(), done("vm/web created and started\n"));
    assert_eq!(apply(), done("vm/web unchanged\n"));
    assert_eq!(run(&daemon, &["stop", "web"]), done("vm/web stopped\n"));
    assert_eq!(apply(), done("vm/web unchanged, started\n"));
    assert_eq!(daemon.state.phase("web"), Some(VmPhase::Running));
}

#[test]
fn apply_names_live_and_pending_changes() {
    let daemon = Daemon::start();
    let apply =
        |args: &[&str], text: &str| run_with_input(&daemon, &[&["apply", "-f", "-"], args].concat(), text);
    apply(&["--start"], MANIFEST);
    let changed = MANIFEST
        .replace("cores: 2", "cores: 4")
        .replace("  name: web", "  name: web\n  labels: {tier: front}")
        + "  runPolicy: manual\n";
    let lines = "  metadata.labels.tier: not set -> front\n  spec.cpu.cores: 2 -> 4 (at the next start)\n  \
                 spec.runPolicy: not set -> RUN_POLICY_MANUAL (live)\n";
    let before = daemon.state.vm("web");
    assert_eq!(
        apply(&["--dry-run"], &changed),
        done(&format!("vm/web changed (dry run)\n{lines}"))
    );
    assert_eq!(daemon.state.vm("web"), before);
    assert_eq!(apply(&[], &changed), done(&format!("vm/web changed\n{lines}")));
    // Every update reports the pending changes.
    let waits = "vm/web unchanged\n  spec.cpu.cores: 2 -> 4 (at the next start)\n";
    assert_eq!(apply(&[], &changed), done(waits));
    let (_, described, _) = run(&daemon, &["describe", "vm", "web"]);
    let part = "Changes at the next start:\n  PATH             CURRENT   DESIRED   MESSAGE\n  spec.cpu.cores   2         4         -\n";
    assert!(described.contains(part), "{described}");
    daemon.state.put("web", VmPhase::Stopped, &[]);
    let stopped = apply(&[], &changed).1;
    assert!(stopped.contains("  spec.cpu.cores: 2 -> 4\n"), "{stopped}");
}

#[test]
fn apply_with_restart_restarts_what_needs_it() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    let manifest = MANIFEST
        .replace("256Mi", "1Gi")
        .replace("  nics:\n  - {name: eth0, bridge: br0}\n", "");
    let apply =
        |text: &str| run_with_input(&daemon, &["apply", "-f", "-", "--restart", "--grace", "5"], text);
    assert_eq!(apply(&manifest), done("vm/web unchanged\n"));
    let changed = manifest.replace("cores: 2", "cores: 4");
    assert_eq!(
        apply(&changed),
        done("vm/web changed, restarted\n  spec.cpu.cores: 2 -> 4\n")
    );
    let call = "update web APPLY_MODE_RESTART grace=Some(5)";
    assert_eq!(daemon.state.calls(), [call, call]);
}

/// `edit web` with a shell command in place of an editor.
fn edit(daemon: &Daemon, editor: &str, folder: &std::path::Path) -> (i32, String, String) {
    edit_as(daemon, &["edit", "web"], editor, folder)
}

fn edit_as(daemon: &Daemon, words: &[&str], editor: &str, folder: &std::path::Path) -> (i32, String, String) {
    let mut command = daemon.vmmctl();
    command.args(words).env_remove("VISUAL");
    output(command.env("EDITOR", editor).env("TMPDIR", folder))
}

#[test]
fn edit_applies_what_was_written() {
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    daemon.state.put("web", VmPhase::Running, &[]);
    assert_eq!(edit(&daemon, "true", folder.path()), done("vm/web unchanged\n"));
    assert_eq!(daemon.state.calls(), [""; 0]);
    let edited = edit(&daemon, "sed -i 's/cores: 2/cores: 4/'", folder.path());
    assert_eq!(
        edited,
        done("vm/web changed\n  spec.cpu.cores: 2 -> 4 (at the next start)\n")
    );
    assert_eq!(daemon.state.vm("web").spec.unwrap().cpu.unwrap().cores, 4);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn edit_of_a_name_is_edit_of_a_vm() {
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    daemon.state.put("web", VmPhase::Running, &[]);
    let editor = "sed -i 's/cores: 2/cores: 4/'";
    for words in [&["edit", "web"][..], &["edit", "vm", "web"]] {
        daemon.state.put("web", VmPhase::Running, &[]);
        let (code, stdout, stderr) = edit_as(&daemon, words, editor, folder.path());
        assert_eq!((code, stderr.as_str()), (0, ""), "{words:?}");
        assert!(stdout.contains("spec.cpu.cores: 2 -> 4"), "{stdout}");
    }
    let (code, _, stderr) = edit_as(&daemon, &["edit", "none"], editor, folder.path());
    assert_eq!(code, 3, "{stderr}");
    let (code, _, stderr) = edit_as(&daemon, &["edit"], editor, folder.path());
    assert_eq!(code, 2, "{stderr}");
    // One that does not start has written nothing, of which nothing is kept.
    let (code, stdout, stderr) = edit(&daemon, "no-such-editor", folder.path());
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    assert!(
        stderr.contains("the editor `no-such-editor` ended with"),
        "{stderr}"
    );
    assert!(!stderr.contains("the edited text"), "{stderr}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn edit_disk_changes_labels_and_keeps_a_refused_text() {
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    run(
        &daemon,
        &["create", "disk", "data", "--size", "1Gi", "-l", "tier=gold"],
    );
    let edit = |editor: &str| edit_as(&daemon, &["edit", "disk", "data"], editor, folder.path());
    assert_eq!(edit("true"), done("disk/data unchanged\n"));
    let changed = "disk/data changed\n  metadata.labels.tier: gold -> iron\n";
    assert_eq!(edit("sed -i s/gold/iron/"), done(changed));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    let (code, _, stderr) = edit("sed -i 's/format: .*/format: qcow2/'");
    assert_eq!((code, stderr.contains("immutable fields")), (4, true), "{stderr}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn edit_keeps_what_was_written_when_it_cannot_be_applied() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Stopped, &[]);
    // Somebody else applies while the editor is open.
    let other = tempfile::tempdir().unwrap();
    let manifest = other.path().join("web.yaml");
    fs::write(&manifest, MANIFEST).unwrap();
    let conflict = format!(
        "{} apply -f {} >/dev/null; sed -i 's/cores: 2/cores: 8/'",
        env!("CARGO_BIN_EXE_vmmctl"),
        manifest.display()
    );
    let wrong = "sed -i 's/cores: 2/cores: 999/'";
    let renamed = "sed -i 's/name: web/name: db/'";
    let fails = "fails() { echo >>\"$1\"; false; }; fails";
    for (editor, code, words) in [
        (wrong, 6, "spec.cpu.cores: must be 1 to 254, is 999"),
        (renamed, 6, "the name of vm/web cannot be changed"),
        (fails, 1, "` ended with exit status: 1"),
        (&conflict, 4, "another client has changed vm/web in the meantime"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (ended, stdout, stderr) = edit(&daemon, editor, folder.path());
        assert_eq!((ended, stdout.as_str()), (code, ""), "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
        let files: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        let file = files[0].as_ref().unwrap().path();
        assert!(
            stderr.contains(&format!("the edited text is in {}", file.display())),
            "{stderr}"
        );
        assert!(fs::read_to_string(file).unwrap().contains("kind: Vm"));
    }
    assert_eq!(daemon.state.vm("web").spec.unwrap().cpu.unwrap().cores, 2);
}

#[test]
fn what_get_prints_can_be_applied_again() {
    let daemon = Daemon::start();
    run_with_input(&daemon, &["apply", "-f", "-"], MANIFEST);
    for format in ["yaml", "json"] {
        let (code, printed, _) = run(&daemon, &["get", "vm", "web", "-o", format]);
        assert_eq!(code, 0);
        assert_eq!(
            run_with_input(&daemon, &["apply", "-f", "-"], &printed),
            done("vm/web unchanged\n")
        );
    }
}

#[test]
fn nothing_is_sent_when_one_of_the_files_is_wrong() {
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let (good, bad) = (folder.path().join("good.yaml"), folder.path().join("bad.yaml"));
    fs::write(&good, MANIFEST).unwrap();
    fs::write(&bad, MANIFEST.replace("web", "db").replace("cores", "core")).unwrap();
    let (good, bad) = (good.to_str().unwrap(), bad.to_str().unwrap());
    let expected = format!(
        "error: {bad}:6: spec.cpu.core: unknown field; did you mean `cores` or `coreLimitPercent`?\n"
    );
    assert_eq!(
        run(&daemon, &["apply", "-f", good, "-f", bad]),
        failed(6, &expected)
    );
    let twice = "error: vm/web is in the manifests twice\n";
    assert_eq!(run(&daemon, &["apply", "-f", good, "-f", good]), failed(6, twice));
    assert_eq!(daemon.state.calls(), [""; 0]);
}

#[test]
fn what_the_daemon_refuses_is_shown_with_its_line() {
    let daemon = Daemon::start();
    let manifest = format!("{MANIFEST}  disks:\n  - name: root\n    format: raw\n    path: /missing.raw\n");
    let expected = "error: stdin:14: spec.disks[0].path: there is no such file\n";
    assert_eq!(
        run_with_input(&daemon, &["apply", "-f", "-"], &manifest),
        failed(6, expected)
    );
    let flags = ["create", "web", "--kernel", "/k", "--disk", "/missing.raw"];
    let expected = "error: spec.disks[0].path: there is no such file\n";
    assert_eq!(run(&daemon, &flags), failed(6, expected));
}

#[test]
fn create_makes_a_vm_of_flags() {
    let daemon = Daemon::start();
    let flags = "create db --kernel /k --initrd /i --cmdline console=ttyS0\u{a0}quiet --cpus 4 --memory 2Gi --disk /a.raw \
                 --disk name=data,path=/b.raw,serial=S1,readonly --nic bridge=br0,name=lan,mac=52:54:00:00:00:09 \
                 --nic tap=tap7 -l tier=back --start";
    let flags: Vec<_> = flags.split(' ').filter(|flag| !flag.is_empty()).collect();
    assert_eq!(run(&daemon, &flags), done("vm/db created and started\n"));
    let spec = daemon.state.vm("db").spec.unwrap();
    assert_eq!(spec.cpu.unwrap().cores, 4);
    assert_eq!(spec.memory.unwrap().size_bytes, 2 << 30);
    assert_eq!(
        spec.disks
            .iter()
            .map(|disk| disk.name.as_str())
            .collect::<Vec<_>>(),
        ["root", "data"]
    );
    assert!(spec.disks[1].read_only && !spec.disks[0].read_only);
    assert_eq!(
        spec.nics.iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>(),
        ["lan", "eth1"]
    );
    let expected = "error: there is a VM \"db\" already; `vmmctl describe vm db` shows it\n";
    assert_eq!(run(&daemon, &flags), failed(4, expected));
}

#[test]
fn create_says_what_the_vm_may_have_of_its_node() {
    let daemon = Daemon::start();
    let flags = "create big --kernel /k --cpus 2 --memory 2Gi --core-fraction 20 --core-limit 50 --host-cpus 0-3,8 \
                 --huge-pages 1Gi --prefault --numa-node 0";
    let flags: Vec<_> = flags.split(' ').filter(|flag| !flag.is_empty()).collect();
    assert_eq!(run(&daemon, &flags), done("vm/big created\n"));
    let spec = daemon.state.vm("big").spec.unwrap();
    let cpu = spec.cpu.unwrap();
    assert_eq!((cpu.core_fraction_percent, cpu.core_limit_percent), (20, 50));
    assert_eq!(cpu.host_cpus, "0-3,8");
    let memory = spec.memory.unwrap();
    assert_eq!(memory.huge_pages(), vmmd_api::v1::HugePages::HugePages1g);
    assert_eq!(
        (memory.prefault, memory.mergeable, memory.numa_node),
        (true, false, Some(0))
    );
    let described = run(&daemon, &["describe", "vm", "big"]).1;
    assert!(described.contains("Huge pages:      1Gi\n"), "{described}");

    let merged = ["create", "small", "--kernel", "/k", "--mergeable"];
    assert_eq!(run(&daemon, &merged), done("vm/small created\n"));
    assert!(daemon.state.vm("small").spec.unwrap().memory.unwrap().mergeable);
    let both = [
        "create",
        "odd",
        "--kernel",
        "/k",
        "--mergeable",
        "--huge-pages",
        "2Mi",
    ];
    let (code, _, errors) = run(&daemon, &both);
    assert_ne!(code, 0);
    assert!(errors.contains("spec.memory.mergeable"), "{errors}");
    let (code, _, errors) = run(
        &daemon,
        &["create", "odd", "--kernel", "/k", "--huge-pages", "4Mi"],
    );
    assert_eq!(code, 2);
    assert!(errors.contains("must be 2Mi or 1Gi"), "{errors}");
}

#[test]
fn create_can_print_a_manifest_without_creating_anything() {
    let daemon = Daemon::start();
    let (code, manifest, _) = run(
        &daemon,
        &["create", "a", "--kernel", "/k", "--dry-run", "-o", "yaml"],
    );
    assert_eq!((code, daemon.state.phase("a")), (0, None));
    assert_eq!(
        run_with_input(&daemon, &["create", "-f", "-"], &manifest),
        done("vm/a created\n")
    );
}

#[test]
fn get_lists_and_selects() {
    let daemon = Daemon::start();
    daemon
        .state
        .put("web-1", VmPhase::Running, &[("tier", "front"), ("zone", "a")]);
    daemon.state.put("web-2", VmPhase::Stopped, &[("tier", "front")]);
    daemon.state.put("db", VmPhase::Failed, &[]);
    let table = "NAME    PHASE     CPUS   MEMORY   ADDRESS   UPTIME   AGE\n\
                 db      Failed    2      1Gi      -         -        -\n\
                 web-1   Running   2      1Gi      -         -        -\n\
                 web-2   Stopped   2      1Gi      -         -        -\n";
    assert_eq!(run(&daemon, &["get", "vm"]), done(table));
    let names = |args: &[&str]| run(&daemon, &[&["get", "vms", "-o", "name"], args].concat());
    assert_eq!(names(&["-l", "tier=front"]), done("vm/web-1\nvm/web-2\n"));
    assert_eq!(names(&["-l", "tier=front,zone!=a"]), done("vm/web-2\n"));
    assert_eq!(names(&["-l", "zone"]), done("vm/web-1\n"));
    let missing = "error: there is no VM \"nope\"; `vmmctl get vm` lists the VMs\n";
    assert_eq!(names(&["db", "nope"]), (3, "vm/db\n".into(), missing.into()));
    let json: serde_json::Value =
        serde_json::from_str(&run(&daemon, &["get", "vm", "-o", "json"]).1).unwrap();
    assert_eq!(json[1]["status"]["phase"], "VM_PHASE_RUNNING");
}

#[test]
fn get_lists_each_kind() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    for line in [
        "create disk data --size 1Gi",
        "image import debian /srv/a.raw -q",
        "snapshot create one --vm web",
        "snapshot create two --vm web",
    ] {
        let words: Vec<_> = line.split(' ').collect();
        assert_eq!(run(&daemon, &words).0, 0, "{line}");
    }
    for (kind, listed) in [
        ("vms", "web "),
        ("disks", "data "),
        ("images", "debian "),
        ("snapshots", "two "),
        ("events", "Started "),
        ("nodes", "node-1"),
    ] {
        let (code, shown, said) = run(&daemon, &["get", kind]);
        assert!(code == 0 && shown.contains(listed), "{kind}: {shown}{said}");
    }
    let (code, all, said) = run(&daemon, &["get", "all"]);
    assert_eq!(code, 0, "{said}");
    for listed in ["\nweb ", "\ndata ", "\ndebian ", "\none ", "\ntwo "] {
        assert!(all.contains(listed), "{all}");
    }
    let (code, _, said) = run(&daemon, &["get", "pods"]);
    assert_eq!(code, 3);
    assert!(
        said.contains("there is no VM \"pods\"")
            && said.contains("the kinds of `vmmctl get` are vm, disk, image"),
        "{said}"
    );
}

#[test]
fn fields_are_printed_by_path() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Running, &[("tier", "front")]);
    daemon.state.put("b", VmPhase::Stopped, &[]);
    let template = "jsonpath={.metadata.name} has {.spec.cpu.cores} cores";
    assert_eq!(
        run(&daemon, &["get", "vm", "-o", template]),
        done("a has 2 cores\nb has 2 cores\n")
    );
    let columns = "custom-columns=NAME:.metadata.name,TIER:.metadata.labels.tier";
    assert_eq!(
        run(&daemon, &["get", "-o", columns]),
        done("NAME   TIER\na      front\nb      -\n")
    );
    assert_eq!(
        run(&daemon, &["get", "-o", columns, "--no-headers", "a"]),
        done("a      front\n")
    );
    assert_eq!(
        run(&daemon, &["node", "-o", "jsonpath={.metadata.name}"]),
        done("node-1\n")
    );
    assert_eq!(
        run(&daemon, &["get", "node", "-o", "name"]),
        done("node/node-1\n")
    );
    assert_eq!(run(&daemon, &["get", "vm", "-o", "jsonpath={.a"]).0, 2);
}

#[test]
fn vms_are_meant_when_nothing_is_said_and_list_is_get() {
    let daemon = Daemon::start();
    daemon.state.put("p1", VmPhase::Running, &[]);
    for args in [
        &["get", "p1"][..],
        &["list"],
        &["list", "vms"],
        &["get", "vm", "p1"],
    ] {
        let (code, out, _) = run(&daemon, args);
        assert!(code == 0 && out.contains("p1     Running"), "{args:?}: {out}");
    }
    assert_eq!(
        run(&daemon, &["describe", "p1"]),
        run(&daemon, &["describe", "vm", "p1"])
    );
    let (code, out, _) = run(&daemon, &["describe", "node"]);
    assert!(code == 0 && out.starts_with("Name:            node-1\n"), "{out}");
    let (code, _, said) = run(&daemon, &["get", "p2"]);
    assert!(code == 3 && said.contains("`vmmctl get vm` lists"), "{said}");
}

#[test]
fn names_are_completed_by_the_daemon_that_is_meant_and_soon() {
    let daemon = Daemon::start();
    daemon.state.put("web-1", VmPhase::Running, &[]);
    daemon.state.put("web-2", VmPhase::Running, &[]);
    daemon.state.put("db", VmPhase::Running, &[]);
    run(&daemon, &["create", "disk", "data", "--size", "1Mi"]);
    let complete = |words: &[&str]| {
        let mut command = daemon.vmmctl();
        let output = command
            .env("VMMCTL_COMPLETE", "fish")
            .args(["--", "vmmctl"])
            .args(words)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines()
            .map(|line| line.split('\t').next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(complete(&["start", "w"]), ["web-1", "web-2"]);
    assert_eq!(complete(&["get", "vm", "vm/d"]), ["vm/db"]);
    assert_eq!(complete(&["delete", "disk", "d"]), ["data"]);
    assert_eq!(complete(&["attach", "db", "--disk", "d"]), ["data"]);
    // A daemon that is not there costs no more than a moment.
    let before = std::time::Instant::now();
    assert_eq!(complete(&["--socket", "/nowhere.sock", "start", "w"]), [""; 0]);
    assert!(before.elapsed().as_secs() < 10);
    assert!(complete(&["sta"]).contains(&"start".to_owned()));
}

#[test]
fn get_without_vms_says_so() {
    let daemon = Daemon::start();
    assert_eq!(
        run(&daemon, &["get", "vm"]),
        (0, String::new(), "There are no VMs.\n".into())
    );
    assert_eq!(run(&daemon, &["get", "vm", "-o", "json"]), done("[]\n"));
}

#[test]
fn watch_prints_what_there_is_and_then_each_change() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Stopped, &[]);
    let mut running = daemon.begin(&["get", "vm", "-w"]);
    let mut next = || running.line();
    assert!(next().starts_with("NAME"));
    assert!(next().starts_with("web    Stopped"));
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon.state.announce(WatchEventType::Modified, "web");
    assert!(next().starts_with("web    Running"));
    daemon.state.announce(WatchEventType::Deleted, "web");
    assert!(next().starts_with("web    Deleted"));
    assert_eq!(daemon.state.watchers(), 1);
}

#[test]
fn a_watch_whose_daemon_does_not_come_back_is_a_failure() {
    let daemon = Daemon::start();
    let mut running = daemon.begin(&["get", "vm", "-w"]);
    running.line();
    drop(daemon);
    let (code, _, stderr) = running.end();
    assert_eq!(code, Some(7), "{stderr}");
    let lines: Vec<_> = stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{stderr}");
    assert!(
        lines[0].contains("lost the connection") && lines[1].starts_with("error: "),
        "{stderr}"
    );
}

#[test]
fn describe_shows_everything() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[("tier", "front")]);
    let (code, text, _) = run(&daemon, &["describe", "vm", "web"]);
    assert_eq!(code, 0);
    for part in [
        "Name:            web",
        "tier=front",
        "Phase:           Running",
        "/boot/vmlinuz",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_vm_goes_through_its_life() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Stopped, &[]);
    for (args, said) in [
        (&["start", "web"][..], "started"),
        (&["pause", "web"], "paused"),
        (&["resume", "web"], "resumed"),
        (&["restart", "web", "--grace", "5"], "restarted"),
        (&["stop", "web", "--grace", "1m30s"], "stopped"),
        (&["delete", "web"], "deleted"),
    ] {
        assert_eq!(run(&daemon, args), done(&format!("vm/web {said}\n")));
    }
    let calls = [
        "start web",
        "restart web grace=Some(5) force=false",
        "stop web grace=Some(90) force=false",
        "delete web force=false",
    ];
    assert_eq!(daemon.state.calls(), calls);
}

#[test]
fn each_name_has_its_own_result() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Stopped, &[]);
    daemon.state.put("b", VmPhase::Running, &[]);
    daemon.state.put("c", VmPhase::Stopped, &[]);
    let (code, stdout, stderr) = run(&daemon, &["delete", "a", "vm/b", "nope", "c"]);
    assert_eq!((code, stdout.as_str()), (5, "vm/a deleted\nvm/c deleted\n"));
    let expected = "error: VM \"b\" is VM_PHASE_RUNNING; use `vmmctl stop b`, or `vmmctl delete vm --force b`\n\
                    error: there is no VM \"nope\"; `vmmctl get vm` lists the VMs\n";
    assert_eq!(stderr, expected);
}

#[test]
fn stop_all_stops_what_runs_and_nothing_else() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Stopped, &[]);
    daemon.state.put("b", VmPhase::Running, &[]);
    daemon.state.put("c", VmPhase::Paused, &[]);
    assert_eq!(
        run(&daemon, &["stop", "--all", "--force"]),
        done("vm/b stopped\nvm/c stopped\n")
    );
    let nothing = (0, String::new(), "There are no VMs to stop.\n".to_owned());
    assert_eq!(run(&daemon, &["stop", "--all"]), nothing);
}

#[test]
fn deleting_a_running_vm_needs_force() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    let expected =
        "error: VM \"web\" is VM_PHASE_RUNNING; use `vmmctl stop web`, or `vmmctl delete vm --force web`\n";
    assert_eq!(run(&daemon, &["delete", "web"]), failed(5, expected));
    assert_eq!(
        run(&daemon, &["delete", "web", "--force"]),
        done("vm/web deleted\n")
    );
    assert_eq!(run(&daemon, &["delete", "web", "--ignore-not-found"]), done(""));
}

#[test]
fn a_node_without_enough_memory_has_an_exit_code_of_its_own() {
    let daemon = Daemon::start();
    let expected = "error: vm/greedy: the node has 1Gi of memory left, the VM needs 2Gi\n";
    assert_eq!(run(&daemon, &["start", "greedy"]), failed(9, expected));
    let flags = ["create", "greedy", "--kernel", "/k", "--start"];
    let expected = "error: vm/greedy was created, but did not start: the node has 1Gi of memory left, the VM needs 2Gi\n";
    assert_eq!(run(&daemon, &flags), failed(9, expected));
}

#[test]
fn node_and_version_tell_about_the_daemon() {
    let daemon = Daemon::start();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        run(&daemon, &["version"]),
        done(&format!("vmmctl {version}\nvmmd   9.9.9\n"))
    );
    assert!(
        run(&daemon, &["node"])
            .1
            .starts_with("Name:            node-1\nvmmd:            9.9.9\n")
    );
    let yaml = run(&daemon, &["node", "-o", "yaml"]).1;
    assert!(yaml.contains("memoryBytes: 8589934592"), "{yaml}");
}

#[test]
fn unanswered_request_is_repeated_with_its_id() {
    let daemon = Daemon::start();
    daemon.state.put("restarting", VmPhase::Stopped, &[]);
    assert_eq!(
        run(&daemon, &["start", "restarting"]),
        done("vm/restarting started\n")
    );
    assert_eq!(daemon.state.calls(), ["start restarting", "start restarting"]);
}

#[test]
fn wrong_value_of_create_and_run_names_the_option() {
    let daemon = Daemon::start();
    for (line, expected) in [
        (
            "create vm web --kernel /k --cpus 0",
            "--cpus: must be 1 to 254, is 0",
        ),
        ("create vm web --kernel /k --memory 2000000", "--memory: must be "),
        ("create vm Web --kernel /k", "NAME: must be 1 to 63 "),
        ("create vm web --kernel k", "--kernel: must be "),
        ("run debian --name web --cpus 0", "--cpus: must be 1 to 254, is 0"),
        ("run debian --name web --memory 2000000", "--memory: must be "),
        ("run debian --name X_1", "--name: must be 1 to 63 "),
    ] {
        let words: Vec<_> = line.split(' ').collect();
        let (code, _, said) = run(&daemon, &words);
        assert_eq!(code, 6, "{line}: {said}");
        assert!(said.starts_with(&format!("error: {expected}")), "{line}: {said}");
    }
    assert_eq!(daemon.state.calls(), [""; 0]);
}

#[test]
fn get_chooses_by_phase_and_names_what_is_not_there() {
    let daemon = Daemon::start();
    for (name, phase) in [
        ("a", VmPhase::Running),
        ("b", VmPhase::Stopped),
        ("c", VmPhase::Paused),
        ("d", VmPhase::Running),
    ] {
        daemon.state.put(name, phase, &[]);
    }
    let get = |args: &[&str]| run(&daemon, &[&["get", "vm", "-o", "name"], args].concat());
    assert_eq!(get(&["--phase", "running,Paused"]), done("vm/a\nvm/c\nvm/d\n"));
    assert_eq!(get(&["d", "b", "a", "--phase=running"]), done("vm/d\nvm/a\n"));
    let (code, stdout, stderr) = get(&["a", "x"]);
    assert_eq!((code, stdout.as_str()), (3, "vm/a\n"));
    assert!(stderr.contains("\"x\""), "{stderr}");
}

#[test]
fn set_memory_changes_the_target_and_describe_shows_it() {
    let daemon = Daemon::start();
    run_with_input(&daemon, &["apply", "-f", "-"], MANIFEST);
    assert_eq!(
        run(&daemon, &["set", "memory", "web", "--target", "128Mi"]),
        done("vm/web is asked to keep 128Mi\n")
    );
    let (code, text, _) = run(&daemon, &["describe", "vm", "web"]);
    assert_eq!(code, 0);
    assert!(
        text.lines()
            .any(|line| line.starts_with("Balloon:") && line.ends_with("128Mi left to the guest")),
        "{text}"
    );
    assert_eq!(
        run(&daemon, &["set", "memory", "web", "--all"]),
        done("vm/web gets all of its memory back\n")
    );
    let calls = daemon.state.calls();
    let change = "update web APPLY_MODE_UNSPECIFIED grace=None spec.balloon.target_bytes";
    assert_eq!(calls[1..], [change, change]);
    for wrong in [
        &["set", "memory", "web"][..],
        &["set", "memory", "web", "--all", "--target", "1Gi"],
    ] {
        assert_eq!(run(&daemon, wrong).0, 2);
    }
    assert_eq!(run(&daemon, &["set", "memory", "none", "--all"]).0, 3);
}

#[test]
fn create_takes_what_is_said_of_the_balloon() {
    let daemon = Daemon::start();
    let create = |flag: &str| {
        let args = ["create", "web", "--kernel", "/k", flag, "--dry-run", "-o", "json"];
        let (code, text, problems) = run(&daemon, &args);
        assert_eq!(code, 0, "{problems}");
        let vm: serde_json::Value = serde_json::from_str(&text).unwrap();
        vm["spec"]["balloon"].clone()
    };
    assert_eq!(create("--no-balloon"), serde_json::json!({"disabled": true}));
    assert_eq!(
        create("--free-page-reporting"),
        serde_json::json!({"freePageReporting": true})
    );
}
