//! Programs of the release before, and those of today: a daemon drives the `vmm` of the other one. `make nightly` runs these.

use std::path::PathBuf;

use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::{Case, Guests, programs};

/// The release before. Raise it with each release.
const PREVIOUS: &str = "847a55b98ba6b82beff60a4bea6cb048b08c8d57";
const INSTALLED: &str = "/usr/lib/vmmd/vmm";

fn previous() -> PathBuf {
    programs::of_commit(PREVIOUS).expect("programs of the release before")
}

#[test]
fn daemon_controls_a_vm_of_the_previous_release() {
    let programs = previous();
    let case = Case::new("previous-vmm");
    let node = case.node();
    let (data, more) = (
        case.image("data", Format::Raw, 8),
        case.image("more", Format::Qcow2, 8),
    );
    let spec = VmSpec::busybox(Kernel::Cloud612).with_disk(Disk::new("data", Format::Raw, &data));
    // As after an upgrade: the VM was started with the older program, whose place the newer one has taken since.
    let old = format!("{INSTALLED}.previous");
    node.copy_in(&programs.join("vmm"), &old).expect("copy");
    node.sh(&format!(
        "cp -a {INSTALLED} {INSTALLED}.today && mv {old} {INSTALLED}"
    ));
    // When the start fails, too.
    case.at_end(format!(
        "[ ! -e {INSTALLED}.today ] || mv -f {INSTALLED}.today {INSTALLED}"
    ));
    let vm = Vm::start(&case, "", &spec);
    node.sh(&format!("mv -f {INSTALLED}.today {INSTALLED}"));
    let pid = vm.pid();
    vm.booted();

    node.restart_daemon().expect("a daemon that finds the VM");
    vm.still_runs(pid);
    let mut console = vm.console();
    console.run("test -b /dev/vda");
    vm.ctl("pause");
    vm.ctl("resume");
    vm.ctl_with("attach", &format!("--path {more} --format qcow2 --name more"));
    console.run("until test -b /dev/vdb; do usleep 50000; done");
    vm.ctl_with("detach", "more --timeout 60s");
    vm.disk_stats("data");
    vm.ctl("stop --grace 60s");
    let reason = vm.exit_reason();
    assert_eq!(reason, "STOPPED");
    vm.ctl("start");
}

#[test]
fn a_daemon_of_the_previous_release_runs_todays_vmm() {
    let programs = previous();
    let case = Case::new("previous-vmmd");
    let (node, name, folder) = (case.node(), case.name(), case.folder());
    for program in ["vmmd", "vmmctl"] {
        node.copy_in(&programs.join(program), &format!("{folder}/{program}"))
            .expect("copy");
    }
    node.sh(&format!(
        "cd {folder} && printf '%s\\n' 'state_dir = \"{folder}/state\"' 'run_dir = \"{folder}/run\"' 'log_dir = \"{folder}/log\"' \
             'vmm = \"{INSTALLED}\"' '[vm_uids]' 'first = 1800000000' '[overcommit]' 'cpu = 100.0' >vmmd.toml && \
         systemd-run -q --collect --unit={name} -p Type=notify -p Delegate=yes -p KillMode=process \
             {folder}/vmmd --config {folder}/vmmd.toml"
    ));
    let ctl = format!("{folder}/vmmctl --socket {folder}/run/vmmd.sock");
    // A manifest as that release has it.
    let (kernel, initrd) = (Guests.vmlinuz(Kernel::Cloud612), Guests.initrd(Kernel::Cloud612));
    let manifest = format!(
        "{{apiVersion: vmmd/v1, kind: Vm, metadata: {{name: web}}, spec: {{cpu: {{cores: 1}}, memory: {{sizeBytes: 268435456}}, \
         runPolicy: RUN_POLICY_MANUAL, boot: {{linux: {{kernel: {kernel}, initrd: {initrd}, cmdline: console=ttyS0 quiet panic=-1}}}}}}}}"
    );
    node.sh(&format!(
        "{ctl} create -f - <<'MANIFEST'\n{manifest}\nMANIFEST\n{ctl} start web"
    ));
    let mut console = Console::open(&case, &format!("{ctl} console web"));
    console.booted();
    for verb in ["pause", "resume", "stop --grace 60s"] {
        node.sh(&format!("{ctl} {verb} web"));
    }
    let vm = node.sh(&format!("{ctl} get vm web -o json"));
    assert!(vm.contains("STOPPED"), "{vm}");
    node.sh(&format!("{ctl} delete web; systemctl stop {name}"));
}
