//! A whole Debian: systemd and sshd on a virtio disk and a virtio NIC in a network of the node.

use serde_json::json;

use vmmd_tests::Case;
use vmmd_tests::vm::{Console, Vm, VmSpec};

/// A whole Debian takes one to three minutes to boot in an emulated node, and its services as long to end.
const BOOT: u64 = 300;

#[test]
fn debian_boots_from_its_disk_takes_ssh_and_keeps_what_it_synced_when_killed() {
    let case = Case::new("debian").expect("node");
    let node = case.node();
    let network = Network::new(&case);
    let disk = case.debian_disk().expect("a disk");
    let guests = node.guests();
    let spec = VmSpec::new(guests.debian_vmlinuz(), Some(guests.debian_initrd()))
        .memory_mib(512)
        .disk("root", &disk, false)
        .set(
            "/nics",
            json!([{"name": "eth0", "network": network.0, "address": "10.77.0.2"}]),
        )
        .cmdline("norandmaps root=/dev/vda rw ip=:::::eth0:dhcp net.ifnames=0");
    let vm = Vm::start(&case, "", &spec).expect("start");
    vm.console()
        .expect("console")
        .until("login:", BOOT)
        .expect("a login prompt");

    // By the daemon, with the node's key; the guest's is remembered. A connection takes an emulated guest ten seconds, so each does much.
    let name = vm.name();
    let ssh = format!("vmmctl ssh root@{name} --");
    let run = |command: &str| node.sh(&format!("{ssh} '{command}'")).expect("ssh to the guest");
    // The login prompt does not wait for sshd.
    let first = |command: &str| {
        node.sh(&format!(
            "timeout 120 sh -c 'until {ssh} \"{command}\"; do sleep 1; done'"
        ))
        .expect("sshd answers")
    };
    let said = first("cat /etc/machine-id && uname -a && lsblk -o NAME,SERIAL");
    let (machine, said) = said.split_once('\n').expect("an id");
    assert!(said.contains("Linux"), "{said}");
    assert!(
        said.contains("root"),
        "the disk has the serial of the manifest: {said}"
    );
    node.sh("ping -c 3 -W 5 10.77.0.2").expect("ping");
    // Much data through both, with a checksum at each end.
    let sum = run(
        "dd if=/dev/urandom of=/srv/data bs=1M count=4 2>/dev/null; sync; sha256sum </srv/data; \
                   echo kept >/srv/kept; sync /srv/kept /srv/data",
    );
    let folder = case.folder().expect("folder");
    let copied = node
        .sh(&format!(
            "cd {folder} && vmmctl scp root@{name}:/srv/data . && vmmctl scp -r data root@{name}:/srv/back && sha256sum < data"
        ))
        .expect("copy it both ways");
    assert_eq!(copied, sum);
    assert_eq!(run("sha256sum </srv/back"), sum);
    // A port of the node's own leads there, for as long as vmmctl runs.
    let forwarded = node
        .sh(&format!(
            "cd {folder} && {{ vmmctl port-forward {name} 0:22 >forward 2>&1 & echo $! >pid; }} && \
             timeout 20 sh -c 'until grep -q leads forward; do sleep 0.1; done' && \
             place=$(cut -d' ' -f1 forward) && ssh -p ${{place##*:}} root@127.0.0.1 cat /etc/machine-id; kill $(cat pid)"
        ))
        .expect("a forwarded port");
    assert_eq!(forwarded.trim(), machine);

    node.sh(&format!("kill -9 {}", vm.pid().expect("pid")))
        .expect("kill");
    vm.wait_phase("FAILED", 20).expect("failed");
    vm.ctl("start").expect("start again");
    // Not the login prompt of the first run, which a console shows again no more: another process, another history.
    vm.console()
        .expect("console")
        .until("login:", BOOT)
        .expect("a login prompt again");
    assert_eq!(
        first("cat /srv/kept && sha256sum </srv/data"),
        format!("kept\n{sum}")
    );
    vm.ctl(&format!("stop --grace {BOOT}s"))
        .expect("systemd powers off when the button is pressed");
    assert_eq!(
        vm.field("/status/lastExit/reason").expect("reason"),
        "EXIT_REASON_STOPPED"
    );
    // Debian's ssh writes hashes of the names.
    let uid = vm.field("/metadata/uid").expect("UUID");
    node.sh(&format!(
        "ssh-keygen -F vmmd-{uid} -f ~/.local/state/vmmctl/known_hosts"
    ))
    .expect("vmmctl remembers the guest's key");
    drop(vm);
}

/// A network of the node with 10.77.0.0/24, which is removed with the test.
struct Network<'case>(String, &'case Case);

impl<'case> Network<'case> {
    fn new(case: &'case Case) -> Self {
        let network = Self(case.name().to_owned(), case);
        case.node()
            .sh(&format!(
                "vmmctl network create {} --cidr 10.77.0.0/24",
                network.0
            ))
            .expect("a network");
        network
    }
}

impl Drop for Network<'_> {
    fn drop(&mut self) {
        let _ = self.1.node().ssh(&format!("vmmctl network rm {}", self.0));
    }
}

#[test]
fn the_foreground_vmm_needs_no_daemon() {
    let case = Case::new("run").expect("node");
    let node = case.node();
    let manifest = VmSpec::busybox(vmmd_tests::node::Kernel::Cloud612)
        .manifest("alone")
        .to_string();
    let file = format!("{}/alone.yaml", case.folder().expect("folder"));
    node.sh(&format!("cat > {file} <<'MANIFEST'\n{manifest}\nMANIFEST\n"))
        .expect("manifest");
    let mut console = Console::open(&case, &format!("vmm run --spec {file}; echo vmm-exit=$?")).expect("vmm");
    console.until("GUEST-READY", BOOT).expect("boot");
    console.run("test -c /dev/hwrng", 30).expect("a shell");
    console.type_line("poweroff").expect("type");
    console
        .until("vmm-exit=0", 60)
        .expect("it ends with 0 when the guest powers off");
    let refused = node
        .ssh(&format!("runuser -u nobody -- vmm run --spec {file} </dev/null"))
        .expect("ssh");
    assert!(!refused.success());
    let expected = "no permission to open /dev/kvm: run as root, or as a member of the group that owns it";
    assert!(refused.stderr.contains(expected), "{}", refused.stderr);
}
