//! The verbs that are about disks.

use vmmd_api::v1::{self, VmPhase};

use crate::support::{Daemon, disk::DISK_MADE, done, failed, line as run};

fn run_with_input(daemon: &Daemon, args: &str, input: &str) -> (i32, String, String) {
    crate::support::run_with_input(daemon, &args.split_whitespace().collect::<Vec<_>>(), input)
}

/// A daemon with a running VM `web` and a disk `data`.
fn with_vm() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    assert_eq!(
        run(&daemon, "create disk data --size 1Gi"),
        done("disk/data created\n")
    );
    daemon
}

fn web_disk(daemon: &Daemon, name: &str) -> v1::DiskSpec {
    let disks = daemon.state.vm("web").spec.unwrap().disks;
    disks.into_iter().find(|disk| disk.name == name).unwrap()
}

#[test]
fn a_disk_is_created_listed_described_and_deleted() {
    let daemon = Daemon::start();
    let create = "create disk base --size 10Gi --format qcow2 --preallocation metadata -l tier=gold";
    assert_eq!(run(&daemon, create), done("disk/base created\n"));
    assert_eq!(
        run(&daemon, "create disk copy --from-file /srv/a.raw"),
        done("disk/copy created\n")
    );
    assert_eq!(
        run(&daemon, "create disk over --overlay-of base"),
        done("disk/over created\n")
    );
    insta::assert_snapshot!(run(&daemon, "get disk").1, @r#"
NAME   PHASE   FORMAT   SIZE   ALLOCATED   USED BY   AGE
base   Ready   qcow2    10Gi   192Ki       -         -
copy   Ready   raw      2Gi    192Ki       -         -
over   Ready   qcow2    10Gi   192Ki       -         -
"#);
    insta::assert_snapshot!(run(&daemon, "get disks base over -o wide").1, @r#"
NAME   PHASE   FORMAT   SIZE   ALLOCATED   USED BY   AGE   OVERLAY OF   LABELS      PATH
base   Ready   qcow2    10Gi   192Ki       -         -     -            tier=gold   /var/lib/vmmd/disks/base
over   Ready   qcow2    10Gi   192Ki       -         -     base         -           /var/lib/vmmd/disks/over
"#);
    insta::assert_snapshot!(run(&daemon, "describe disk over").1, @r#"
Name:            over
UID:             0c6b9b07-4f0d-4f5a-8f3e-2d3a6a1c9f10
Generation:      1
Phase:           Ready
Format:          qcow2
Size:            10Gi (10737418240 bytes)
Allocated:       192Ki (196608 bytes)
Overlay of:      base
Path:            /var/lib/vmmd/disks/over
Used by:         no VM
Last events:     none
"#);
    assert_eq!(run(&daemon, "get disk -l tier=gold -o name"), done("disk/base\n"));
    let refused = "error: disk \"base\" has overlays (over): delete those first\n";
    assert_eq!(run(&daemon, "delete disk base -y"), failed(5, refused));
    assert_eq!(
        run(&daemon, "delete disk over base --yes"),
        done("disk/over deleted\ndisk/base deleted\n")
    );
    let missing = "error: there is no disk \"over\" on this node; `vmmctl get disk` lists the disks\n";
    assert_eq!(run(&daemon, "delete disk over -y"), failed(3, missing));
    assert_eq!(run(&daemon, "delete disk over -y --ignore-not-found"), done(""));
    let exists = "error: there is a disk \"copy\" already; `vmmctl describe disk copy` shows it\n";
    assert_eq!(run(&daemon, "create disk copy --size 1Mi"), failed(4, exists));
}

#[test]
fn warning_of_the_daemon_is_printed_with_a_disk() {
    let daemon = Daemon::start();
    daemon.state.warn_of_disks("the disk may take more than is free");
    let warned = |said: &str| {
        let warning = "warning: disk/data: the disk may take more than is free\n";
        (0, said.to_owned(), warning.to_owned())
    };
    assert_eq!(
        run(&daemon, "create disk data --size 10Gi"),
        warned("disk/data created\n")
    );
    assert_eq!(
        run(&daemon, "resize disk data --size 20Gi"),
        warned("disk/data resized to 20Gi\n")
    );
    daemon.state.operation_of(DISK_MADE, "web-root", "");
    let (code, said, warning) = run(&daemon, "run debian --name web -q");
    assert_eq!((code, said.as_str()), (0, "vm/web started\n"));
    assert!(warning.contains("warning: disk/web-root: "), "{warning}");
}

#[test]
fn delete_disk_with_all_deletes_what_nothing_uses() {
    let daemon = Daemon::start();
    for name in ["a", "b"] {
        run(&daemon, &format!("create disk {name} --size 1Gi"));
    }
    let refused = "error: this deletes disk/a, disk/b with all their data; confirm with --yes\n";
    assert_eq!(run(&daemon, "delete disk --all"), failed(2, refused));
    assert_eq!(
        run(&daemon, "delete disk --all -y"),
        done("disk/a deleted\ndisk/b deleted\n")
    );
    let nothing = (0, String::new(), "There are no disks to delete.\n".to_owned());
    assert_eq!(run(&daemon, "delete disk --all -y"), nothing);
}

#[test]
fn deleting_a_disk_touches_no_vm_of_that_name() {
    let daemon = with_vm();
    daemon.state.put("data", VmPhase::Stopped, &[]);
    daemon.state.put("disk", VmPhase::Stopped, &[]);
    assert_eq!(run(&daemon, "delete disk data -y"), done("disk/data deleted\n"));
    assert_eq!(daemon.state.phase("data"), Some(VmPhase::Stopped));
    assert_eq!(run(&daemon, "delete vm disk"), done("vm/disk deleted\n"));
    assert_eq!(run(&daemon, "delete data"), done("vm/data deleted\n"));
}

#[test]
fn there_are_no_disks() {
    let daemon = Daemon::start();
    assert_eq!(
        run(&daemon, "get disk"),
        (0, String::new(), "There are no disks.\n".into())
    );
    assert_eq!(run(&daemon, "get disk -o json"), done("[]\n"));
}

#[test]
fn a_disk_grows_and_does_not_shrink() {
    let daemon = with_vm();
    assert_eq!(
        run(&daemon, "resize disk data --size 1.5Gi"),
        done("disk/data resized to 1.5Gi\n")
    );
    let smaller = "error: --size: a disk can't be made smaller: it has 1610612736 bytes\n";
    assert_eq!(run(&daemon, "resize disk data --size 1Gi"), failed(6, smaller));
    assert_eq!(run(&daemon, "attach web --disk data").0, 0);
    assert_eq!(
        run(&daemon, "resize disk data --vm web --size 2Gi"),
        done("vm/web disk data resized to 2Gi\n")
    );
    assert_eq!(
        run(&daemon, "resize disk data --vm web --rescan"),
        done("vm/web disk data resized to 7Gi\n")
    );
    let missing = "error: VM \"web\" has no disk \"nope\"; `vmmctl describe vm web` shows its disks\n";
    assert_eq!(
        run(&daemon, "resize disk nope --vm web --size 2Gi"),
        failed(3, missing)
    );
}

const DISKS: &str = "\
apiVersion: vmmd/v1
kind: Vm
metadata: {name: web}
spec:
  cpu: {cores: 1}
  memory: {sizeBytes: 256Mi}
  boot: {linux: {kernel: /k}}
---
apiVersion: vmmd/v1
kind: Disk
metadata:
  name: base
  labels: {tier: gold}
spec:
  format: qcow2
  sizeBytes: 10Gi
  preallocation: metadata
---
apiVersion: vmmd/v1
kind: Disk
metadata: {name: over}
spec: {overlayOf: base, format: qcow2}
";

#[test]
fn apply_creates_disks_before_vms_and_grows_them() {
    let daemon = Daemon::start();
    let apply = |text: &str| run_with_input(&daemon, "apply -f -", text);
    assert_eq!(
        run_with_input(&daemon, "apply -f - --dry-run", DISKS),
        done("disk/base created (dry run)\ndisk/over created (dry run)\nvm/web created (dry run)\n")
    );
    assert_eq!(daemon.state.disk("base"), None);
    assert_eq!(
        apply(DISKS),
        done("disk/base created\ndisk/over created\nvm/web created\n")
    );
    assert_eq!(
        apply(DISKS),
        done("disk/base unchanged\ndisk/over unchanged\nvm/web unchanged\n")
    );
    let larger = DISKS.replace("10Gi", "12Gi");
    assert_eq!(
        apply(&larger),
        done("disk/base resized to 12Gi\ndisk/over unchanged\nvm/web unchanged\n")
    );
    let labelled = larger.replace("gold", "iron");
    assert_eq!(
        apply(&labelled),
        done(
            "disk/base changed\n  metadata.labels.tier: gold -> iron\ndisk/over unchanged\nvm/web unchanged\n"
        )
    );
    let expected = "error: disk/base exists and differs from the manifest in immutable fields; give the new disk \
                    another name\n  spec.preallocation: DISK_PREALLOCATION_METADATA -> DISK_PREALLOCATION_OFF\n  \
                    spec.sizeBytes: 12884901888 -> 10737418240\n";
    let changed = DISKS.replace("preallocation: metadata", "preallocation: off");
    assert_eq!(
        apply(&changed),
        (
            4,
            "disk/over unchanged\nvm/web unchanged\n".into(),
            expected.into()
        )
    );
}

#[test]
fn apply_gives_a_vm_disks_and_takes_them_away() {
    let daemon = Daemon::start();
    let apply = |args: &str, text: &str| run_with_input(&daemon, &format!("apply -f - {args}"), text);
    assert_eq!(apply("", DISKS).0, 0);
    let with = |disk: &str| {
        DISKS.replace(
            "{kernel: /k}}",
            &format!("{{kernel: /k}}}}\n  disks:\n  - {disk}"),
        )
    };
    let disks = "disk/base unchanged\ndisk/over unchanged\n";
    let data = with("{name: data, disk: over, onError: pause}");
    assert_eq!(
        apply("--dry-run", &data),
        done(
            "disk/base unchanged (dry run)\ndisk/over unchanged (dry run)\nvm/web changed (dry run)\n  spec.disks[data]: \
             added\n"
        )
    );
    assert_eq!(daemon.state.vm("web").spec.unwrap().disks, []);
    assert_eq!(
        apply("", &data),
        done(&format!("{disks}vm/web changed\n  spec.disks[data]: added\n"))
    );
    assert_eq!(apply("", &data), done(&format!("{disks}vm/web unchanged\n")));
    let limited = with("{name: data, disk: over, onError: pause, rateLimit: {bytesPerSecond: 5Mi}}");
    assert_eq!(
        apply("--start", &limited),
        done(&format!(
            "{disks}vm/web changed, started\n  spec.disks[data].rateLimit.bytesPerSecond: not set -> 5242880\n"
        ))
    );
    assert_eq!(apply("", &limited), done(&format!("{disks}vm/web unchanged\n")));
    assert_eq!(
        apply("", DISKS),
        done(&format!(
            "{disks}vm/web changed\n  spec.disks[data]: removed (live)\n"
        ))
    );
    let expected =
        "error: vm/web: there is no disk \"nope\" on this node; `vmmctl get disk` lists the disks\n";
    let missing = with("{name: data, disk: over, onError: pause}\n  - {name: more, disk: nope}");
    assert_eq!(apply("", &missing), (3, disks.into(), expected.into()));
}

#[test]
fn what_get_prints_of_a_disk_can_be_applied_again() {
    let daemon = Daemon::start();
    run_with_input(&daemon, "create -f -", DISKS);
    insta::assert_snapshot!(run(&daemon, "get disk over -o yaml").1, @r#"
apiVersion: vmmd/v1
kind: Disk
metadata:
  name: over
  uid: 0c6b9b07-4f0d-4f5a-8f3e-2d3a6a1c9f10
  generation: 1
spec:
  format: DISK_FORMAT_QCOW2
  sizeBytes: 10737418240
  overlayOf: base
status:
  phase: DISK_PHASE_READY
  path: /var/lib/vmmd/disks/over
  allocatedBytes: 196608
  backingDisk: base
"#);
    for format in ["yaml", "json"] {
        for name in ["base", "over"] {
            let printed = run(&daemon, &format!("get disk {name} -o {format}")).1;
            assert_eq!(
                run_with_input(&daemon, "apply -f -", &printed),
                done(&format!("disk/{name} unchanged\n")),
                "{printed}"
            );
        }
    }
}

#[test]
fn what_the_daemon_refuses_of_a_disk_is_shown_with_its_line() {
    let daemon = Daemon::start();
    let text = "apiVersion: vmmd/v1\nkind: Disk\nmetadata: {name: a}\nspec:\n  rawFile: /missing.raw\n";
    let expected = "error: stdin:5: spec.rawFile: there is no such file\n";
    assert_eq!(run_with_input(&daemon, "apply -f -", text), failed(6, expected));
}

#[test]
fn a_disk_is_attached_with_all_its_options() {
    let daemon = with_vm();
    assert_eq!(
        run(&daemon, "attach web --disk data"),
        done("vm/web disk data attached\n")
    );
    let data = v1::DiskSpec {
        name: "data".into(),
        source: Some(v1::disk_spec::Source::Disk("data".into())),
        ..v1::DiskSpec::default()
    };
    assert_eq!(web_disk(&daemon, "data"), data);
    let attach = "attach web --path /srv/scratch.qcow2 --format qcow2 --read-only --serial S1 --cache none --queues 4 \
                  --block-size 4096 --on-error pause --bps 100Mi --iops 500 --burst 200Mi --burst-ops 50";
    assert_eq!(run(&daemon, attach), done("vm/web disk scratch attached\n"));
    let scratch = v1::DiskSpec {
        name: "scratch".into(),
        source: Some(v1::disk_spec::Source::Path("/srv/scratch.qcow2".into())),
        format: v1::DiskFormat::Qcow2.into(),
        read_only: true,
        serial: "S1".into(),
        cache: v1::DiskCache::None.into(),
        queues: 4,
        logical_block_bytes: 4096,
        on_error: v1::DiskErrorPolicy::Pause.into(),
        rate_limit: Some(v1::RateLimit {
            bytes_per_second: 100 << 20,
            operations_per_second: 500,
            burst_bytes: 200 << 20,
            burst_operations: 50,
        }),
        rate_group: String::new(),
        beneath: String::new(),
        any_content: false,
        bus: v1::DiskBus::Unspecified.into(),
        cdrom: false,
        boot_order: 0,
    };
    assert_eq!(web_disk(&daemon, "scratch"), scratch);
    let text = run(&daemon, "describe vm web").1;
    let disks: Vec<_> = text
        .lines()
        .skip_while(|line| *line != "Disks:")
        .take(6)
        .collect();
    insta::assert_snapshot!(disks.join("\n"), @r#"
Disks:
  NAME      PHASE      FORMAT   MODE   CAPACITY   SLOT   SERIAL   SOURCE
  data      Attached   -        rw     1Gi        9      -        disk data
  scratch   Attached   qcow2    ro     1Gi        9      S1       /srv/scratch.qcow2
Disk options:
  NAME      OPTIONS                                              LIMIT
"#);
    let nested = "attach web --path /srv/nested.raw --format raw --any-content";
    assert_eq!(run(&daemon, nested), done("vm/web disk nested attached\n"));
    assert!(web_disk(&daemon, "nested").any_content);
}

#[test]
fn a_disk_of_a_stopped_vm_waits_for_its_start() {
    let daemon = with_vm();
    daemon.state.put("db", VmPhase::Stopped, &[]);
    assert_eq!(
        run(&daemon, "attach db --disk data"),
        done("vm/db disk data will be attached at the next start\n")
    );
}

#[test]
fn why_a_disk_can_not_be_attached_is_said_with_what_to_do() {
    let daemon = with_vm();
    let expected = "error: disk: there is no disk \"nope\" on this node; `vmmctl get disk` lists the disks\n";
    assert_eq!(run(&daemon, "attach web --disk nope"), failed(3, expected));
    let expected = "error: there is no VM \"nope\"; `vmmctl get vm` lists the VMs\n";
    assert_eq!(run(&daemon, "attach nope --disk data"), failed(3, expected));
    let expected = "error: VM \"web\" has 64 disks and NICs, as many as there are slots: detach one first; `vmmctl describe vm web` \
                    shows them\n";
    assert_eq!(
        run(&daemon, "attach web --disk data --name one-too-many"),
        failed(9, expected)
    );
    let expected = "error: the name of the file is not a valid name of a disk (it must be 1 to 63 lower-case letters, digits \
                    or '-', beginning and ending with a letter or digit): set the name with --name\n";
    assert_eq!(
        run(&daemon, "attach web --path /srv/My_Disk.raw --format raw"),
        failed(2, expected)
    );
    let expected = "error: --path must be an absolute path on the node, is \"a.raw\"\n";
    assert_eq!(
        run(&daemon, "attach web --path a.raw --format raw"),
        failed(2, expected)
    );
}

/// Invalid values are reported with their options, before any call to a daemon.
#[test]
fn wrong_values_are_told_of_the_options() {
    let daemon = Daemon::start();
    for (args, expected) in [
        (
            "attach web --disk data --queues 17 --block-size 1Ki",
            "error: the disk is not valid (2 problems)\n  --queues: must be 1 to 16, or 0 to have it chosen, is 17\n  \
             --block-size: must be 512 (also when 0) or 4096, is 1024\n",
        ),
        (
            "attach web --disk data --burst 1Mi",
            "error: --burst: needs --bps: without that limit everything flows at once\n",
        ),
        (
            "create disk data --size 1048577",
            "error: --size: must be a multiple of 512 from 512 to 70368744177664 (64 TiB), is 1048577\n",
        ),
        (
            "create disk data --from-file /a --format qcow2",
            "error: --format: must be DISK_FORMAT_RAW (or left out): a copy of a raw file or an image is raw\n",
        ),
        (
            "create disk Data --size 1Gi",
            "error: NAME: must be 1 to 63 lower-case letters, digits or '-', beginning and ending with a letter or \
             digit, is \"Data\"\n",
        ),
    ] {
        assert_eq!(run(&daemon, args), failed(6, expected));
    }
    assert_eq!(daemon.state.calls(), [""; 0]);
}

#[test]
fn a_disk_that_the_guest_keeps_is_detached_by_force_only() {
    let daemon = with_vm();
    for name in ["busy", "calm"] {
        assert_eq!(
            run(&daemon, &format!("attach web --disk data --name {name}")).0,
            0
        );
    }
    let expected = "error: vm/web: the guest did not eject disk \"busy\" within 30s: it stays attached; unmount it in \
                    the guest first, or use `vmmctl detach web busy --force`\n";
    assert_eq!(
        run(&daemon, "detach web busy calm"),
        (10, "vm/web disk calm detached\n".into(), expected.into())
    );
    assert_eq!(
        run(&daemon, "detach web busy --timeout 5s --force"),
        done("vm/web disk busy detached\n")
    );
    let expected = "error: VM \"web\" has no disk \"busy\"; `vmmctl describe vm web` shows its disks\n";
    assert_eq!(run(&daemon, "detach web busy"), failed(3, expected));
    let calls = daemon.state.calls();
    assert!(
        calls.contains(&"detach web busy timeout=Some(5) force=true".to_owned()),
        "{calls:?}"
    );
}

#[test]
fn a_limit_changes_only_what_is_named() {
    let daemon = with_vm();
    run(&daemon, "attach web --disk data --bps 50Mi --burst 1Gi");
    assert_eq!(
        run(&daemon, "limit web --disk data --iops 500"),
        done("vm/web disk data: 50Mi/s, 500 requests/s, burst 1Gi\n")
    );
    assert_eq!(
        run(&daemon, "limit web --disk data --bps 0 --burst-ops 20"),
        done("vm/web disk data: 500 requests/s, burst 20 requests\n")
    );
    assert_eq!(
        run(&daemon, "limit web --disk data --none"),
        done("vm/web disk data: no limit\n")
    );
    assert_eq!(web_disk(&daemon, "data").rate_limit, None);
    let expected = "error: no change is given: use --bps, --iops, --burst, --burst-ops, or --none to remove all limits\n";
    assert_eq!(run(&daemon, "limit web --disk data"), failed(2, expected));
    let expected =
        "error: the VM has no rate group \"g\": it has none; `vmmctl describe vm web` shows its disks\n";
    assert_eq!(run(&daemon, "limit web --group g --iops 1"), failed(3, expected));
}

#[test]
fn statistics_are_a_table_with_latencies() {
    let daemon = with_vm();
    assert!(run(&daemon, "stats web").1.ends_with("Disks:           none\n"));
    run(&daemon, "attach web --disk data");
    let all = run(&daemon, "stats web").1;
    for line in [
        "CPU user:        2s",
        "  Used:          300Mi",
        "  exits     2000",
    ] {
        assert!(all.contains(line), "{line}\n{all}");
    }
    insta::assert_snapshot!(run(&daemon, "stats web data").1, @r#"
DISK   KIND    REQUESTS   BYTES   ERRORS   MEAN   P99      WAITING   IN FLIGHT   THROTTLED   HELD
data   all     1010       4.9Mi   2        90us   <256us   2         3           1           0
data   read    1000       3.9Mi   0        90us   <256us   -         -           -           -
data   write   10         1Mi     2        90us   <64us    -         -           -           -
"#);
    let (code, table, problem) = run(&daemon, "stats web data nope");
    assert_eq!((code, table), (3, run(&daemon, "stats web data").1));
    let expected =
        "error: the run of vm/web has no disk \"nope\"; `vmmctl describe vm web` shows its disks\n";
    assert_eq!(problem, expected);
    let json: serde_json::Value = serde_json::from_str(&run(&daemon, "stats web -o json").1).unwrap();
    assert_eq!(json["disks"][0]["read"]["requests"], "1000");
    let yaml = run(&daemon, "stats web -o yaml").1;
    assert!(yaml.contains("inFlight: 3"), "{yaml}");
    daemon.state.put("db", VmPhase::Stopped, &[]);
    let expected = "error: VM \"db\" does not run; `vmmctl start db` starts it\n";
    assert_eq!(run(&daemon, "stats db"), failed(5, expected));
}

#[test]
fn create_takes_disks_with_options_and_rate_groups() {
    let daemon = with_vm();
    let create = "create db --kernel /k --disk /a.raw,b --disk path=/c.raw,cache=writeback,on-error=pause,queues=2 \
                  --disk path=/d.raw,name=slow,bps=10Mi,burst=5Mi,block-size=4Ki \
                  --disk path=/e.raw,readonly,rate-group=shared --rate-group name=shared,iops=100,bps=1Mi";
    assert_eq!(run(&daemon, create), done("vm/db created\n"));
    let spec = daemon.state.vm("db").spec.unwrap();
    let names: Vec<_> = spec.disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["root", "disk1", "slow", "disk3"]);
    assert_eq!(spec.disks[0].path(), "/a.raw,b");
    assert_eq!(spec.disks[1].cache(), v1::DiskCache::Writeback);
    assert_eq!(spec.disks[1].on_error(), v1::DiskErrorPolicy::Pause);
    assert_eq!(spec.disks[2].logical_block_bytes, 4096);
    assert_eq!(spec.disks[2].rate_limit.unwrap().bytes_per_second, 10 << 20);
    assert_eq!(spec.disks[3].rate_group, "shared");
    assert_eq!(spec.rate_groups[0].limit.unwrap().operations_per_second, 100);
    assert_eq!(
        run(&daemon, "limit db --group shared --iops 200"),
        done("vm/db group shared: 1Mi/s, 200 requests/s\n")
    );
}

#[test]
fn create_and_run_take_sata_disks_and_cdroms() {
    let daemon = with_vm();
    let tools = run(&daemon, "create disk tools --size 1Gi");
    assert_eq!(tools.0, 0, "{tools:?}");
    let create = "create vm db --firmware uefi --disk disk=data,bus=sata --cdrom /srv/a.iso --cdrom tools";
    assert_eq!(run(&daemon, create), done("vm/db created\n"));
    let spec = daemon.state.vm("db").spec.unwrap();
    let sata = v1::DiskBus::Sata;
    let disks: Vec<_> = spec
        .disks
        .iter()
        .map(|disk| (disk.name.as_str(), disk.bus(), disk.cdrom, disk.format()))
        .collect();
    let expected = [
        ("data", sata, false, v1::DiskFormat::Unspecified),
        ("cdrom", sata, true, v1::DiskFormat::Iso),
        ("cdrom1", sata, true, v1::DiskFormat::Unspecified),
    ];
    assert_eq!(disks, expected);
    assert_eq!(
        (spec.disks[1].path(), spec.disks[2].disk()),
        ("/srv/a.iso", "tools")
    );
    let text = run(&daemon, "describe vm db").1;
    for words in ["bus=sata", "cdrom", "ro"] {
        assert!(text.contains(words), "{text}");
    }
    let (code, _, said) = run(&daemon, "create vm x --kernel /k --cdrom /srv/a.iso");
    assert_eq!(code, 6, "{said}");
    assert!(
        said.contains("spec.disks[0].bus: DISK_BUS_SATA needs spec.boot.firmware"),
        "{said}"
    );
    let (code, _, said) = run(&daemon, "attach web --disk data --bus virtio --cdrom");
    assert_eq!(code, 6, "{said}");
    assert!(said.contains("--bus: must be DISK_BUS_SATA"), "{said}");
}

#[test]
fn disk_is_created_without_wait_and_adopted() {
    let daemon = Daemon::start();
    assert_eq!(
        run(
            &daemon,
            "create disk big --size 1Ti --preallocation full --no-wait"
        ),
        done("disk/big being created (operation/0d6b9b07-4f0d-4f5a-8f3e-2d3a6a1c9f10)\n")
    );
    assert_eq!(
        run(&daemon, "create disk --adopt /var/lib/vmmd/disks/a.raw"),
        done("disk/adopted created\n")
    );
    assert_eq!(
        run(&daemon, "create disk other --adopt /var/lib/vmmd/disks/a.raw"),
        done("disk/other created\n")
    );
    let (code, _, error) = run(&daemon, "create disk other --adopt /a.raw --size 1Gi");
    assert_eq!(code, 2, "{error}");
    let (code, _, error) = run(&daemon, "create disk --size 1Gi");
    assert_eq!(code, 2, "{error}");
    let (_, text, _) = run(&daemon, "describe disk other");
    assert!(
        text.contains("Adopted from:    /var/lib/vmmd/disks/a.raw"),
        "{text}"
    );
}

#[test]
fn disk_labels_survive_a_concurrent_change() {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Stopped, &[]);
    run(&daemon, "create disk data --size 1Mi -l old=1");
    daemon.state.change_before_updates(1);
    assert_eq!(
        run(&daemon, "label disk/data web tier=db old-"),
        done("disk/data labelled\nvm/web labelled\n")
    );
    let labels = daemon.state.disk("data").unwrap().metadata.unwrap().labels;
    let labels: Vec<_> = labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    assert_eq!(labels, ["other=1", "tier=db"]);
    let update = "update disk data metadata.labels metadata.annotations metadata.owner";
    let calls = daemon.state.calls();
    assert_eq!(
        calls.iter().filter(|call| *call == update).count(),
        2,
        "{calls:?}"
    );
    assert_eq!(
        run(&daemon, "label disk/data tier=db"),
        done("disk/data unchanged\n")
    );
    let (code, _, error) = run(&daemon, "label disk/none a=b");
    assert!(code == 3 && error.contains("none"), "{error}");
}

#[test]
fn a_watch_of_disks_prints_what_there_is_and_then_each_change() {
    let daemon = Daemon::start();
    run(&daemon, "create disk data --size 1Mi -l tier=db");
    let mut running = daemon.begin(&["get", "disk", "-w", "-l", "tier=db"]);
    let mut next = || running.line();
    assert!(next().starts_with("NAME"));
    assert!(next().starts_with("data   Ready"));
    let mut disk = daemon.state.disk("data").unwrap();
    disk.status.as_mut().unwrap().set_phase(v1::DiskPhase::Resizing);
    daemon
        .state
        .announce_disk(v1::WatchEventType::Modified, disk.clone());
    assert!(next().starts_with("data   Resizing"));
    daemon.state.announce_disk(v1::WatchEventType::Deleted, disk);
    assert!(next().starts_with("data   Deleted"));
    let calls = daemon.state.calls();
    assert!(
        calls.iter().any(|call| call == "watch disks  tier=db "),
        "{calls:?}"
    );
    assert_eq!(run(&daemon, "get disk none -w").0, 3);
}

#[test]
fn operations_are_printed_for_programs() {
    let daemon = Daemon::start();
    daemon.state.operation("op-7", "web");
    assert_eq!(run(&daemon, "get operation -o name"), done("operation/op-7\n"));
    assert_eq!(
        run(&daemon, "get operation op-7 -o jsonpath={.target.name}"),
        done("web\n")
    );
    let (_, yaml, _) = run(&daemon, "get operation op-7 -o yaml");
    assert!(yaml.contains("id: op-7\ntype: vm.start\n"), "{yaml}");
    let (_, json, _) = run(&daemon, "get operation --vm none -o json");
    assert_eq!(json, "[]\n");
}
