//! A whole Debian: systemd and sshd on a virtio disk and a virtio NIC in a network of the node.

use serde_json::json;

use vmmd_tests::Case;
use vmmd_tests::vm::{Console, Vm, VmSpec};

/// A whole Debian takes one to three minutes to boot in an emulated node, and its services as long to end.
const BOOT: u64 = 300;

/// A key of `spec.accessCredentials`.
const KEPT_KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJx0Zq5r8yq6V1m3m6wFq0pXbqJb1m2x0WkT8m0S7c1q of-the-spec";

#[test]
fn debian_boots_serves_ssh_and_keeps_synced_data() {
    let case = Case::new("debian");
    let node = case.node();
    let network = case.name();
    node.sh(&format!("vmmctl network create {network} --cidr 10.77.0.0/24"));
    case.at_end(format!("vmmctl network rm {network}"));
    let disk = case.debian_disk();
    let guests = node.guests();
    let spec = VmSpec::new(guests.debian_vmlinuz(), Some(guests.debian_initrd()))
        .memory_mib(512)
        .disk("root", &disk, false)
        .set(
            "/nics",
            json!([{"name": "eth0", "network": network, "address": "10.77.0.2"}]),
        )
        .set("/guestAgent", json!({}))
        .set(
            "/accessCredentials",
            json!([{"name": "root", "sshAuthorizedKeys": [KEPT_KEY]}]),
        )
        .set("/channels", json!([{"name": "org.example.test"}]))
        .set("/vsock", json!({}))
        .cmdline("norandmaps root=/dev/vda rw ip=:::::eth0:dhcp net.ifnames=0");
    let vm = Vm::start(&case, "", &spec);
    vm.console().until("login:", BOOT);

    // By the daemon, with the node's key; the guest's is remembered. A connection takes an emulated guest ten seconds, so each does much.
    let name = vm.name();
    let ssh = format!("vmmctl ssh root@{name} --");
    let run = |command: &str| node.sh(&format!("{ssh} '{command}'"));
    // The login prompt does not wait for sshd.
    let first = |command: &str| {
        node.sh(&format!(
            "timeout 120 sh -c 'until {ssh} \"{command}\"; do sleep 1; done'"
        ))
    };
    let said = first("cat /etc/machine-id && uname -a && lsblk -o NAME,SERIAL");
    let (machine, said) = said.split_once('\n').expect("an id");
    assert!(said.contains("Linux"), "{said}");
    assert!(
        said.contains("root"),
        "the disk has the serial of the manifest: {said}"
    );
    node.sh("ping -c 3 -W 5 10.77.0.2");
    // Much data through both, with a checksum at each end.
    let sum = run(
        "dd if=/dev/urandom of=/srv/data bs=1M count=4 2>/dev/null; sync; sha256sum </srv/data; \
                   echo kept >/srv/kept; sync /srv/kept /srv/data",
    );
    let folder = case.folder();
    let copied = node
        .sh(&format!(
            "cd {folder} && vmmctl scp root@{name}:/srv/data . && vmmctl scp -r data root@{name}:/srv/back && sha256sum < data"
        ));
    assert_eq!(copied, sum);
    assert_eq!(run("sha256sum </srv/back"), sum);
    // The agent of the distribution, which udev starts when it finds the channel.
    node.sh(&format!(
        "vmmctl wait {name} --for condition=AgentReady --timeout 120s"
    ));
    let agent = node.sh(&format!("cat /etc/hostname | vmmctl exec -i {name} -- sh -c 'cat; cat /etc/machine-id; head -c 1000000 /dev/zero | wc -c'"));
    let hostname = node.sh("cat /etc/hostname");
    assert_eq!(agent, format!("{hostname}{machine}\n1000000\n"));
    let output = node.sh(&format!(
        "vmmctl exec {name} -- head -c 8000000 /dev/zero | wc -c"
    ));
    assert_eq!(output.trim(), "8000000");
    let failed = node
        .ssh(&format!("vmmctl exec {name} -- sh -c 'echo no >&2; exit 3'"))
        .expect("ssh");
    assert_eq!((failed.status.code(), failed.stderr.as_str()), (Some(3), "no\n"));
    the_agent_describes_the_guest_and_freezes_it(&vm, &folder);
    the_agent_sets_a_password_and_a_key(&vm, &folder);
    sockets_carry_data_both_ways(&vm, &folder);
    // A key of the spec, and a channel to a program of the guest.
    node.sh(&format!(
        "vmmctl wait {name} --for condition=AccessCredentialsSynchronized --timeout 60s && \
         vmmctl exec {name} -- grep of-the-spec /root/.ssh/authorized_keys"
    ));
    node.sh(&format!(
        "cd {folder} && {{ timeout 100 vmmctl channel connect {name} org.example.test </dev/null >channel & }} && timeout 90 sh -c \
         'until grep -q program channel; do vmmctl exec {name} -- sh -c \"echo from a program >/dev/virtio-ports/org.example.test\"; done'; \
         code=$?; kill $!; exit $code"
    ));

    // A port of the node's own leads there, for as long as vmmctl runs.
    let forwarded = node
        .sh(&format!(
            "cd {folder} && {{ vmmctl port-forward {name} 0:22 >forward 2>&1 & echo $! >pid; }} && \
             timeout 20 sh -c 'until grep -q leads forward; do sleep 0.1; done' && \
             place=$(cut -d' ' -f1 forward) && ssh -p ${{place##*:}} root@127.0.0.1 cat /etc/machine-id; kill $(cat pid)"
        ));
    assert_eq!(forwarded.trim(), machine);

    node.sh(&format!("kill -9 {}", vm.pid()));
    vm.wait_phase("FAILED", 20);
    vm.ctl("start");
    // Not the login prompt of the first run, which a console shows again no more: another process, another history.
    vm.console().until("login:", BOOT);
    assert_eq!(
        first("cat /srv/kept && sha256sum </srv/data"),
        format!("kept\n{sum}")
    );
    // The guest ignores its power button, so the agent powers it off.
    node.sh(&format!(
        "vmmctl wait {name} --for condition=AgentReady --timeout 120s && vmmctl exec {name} -- \
         sh -c 'mkdir /etc/systemd/logind.conf.d && printf \"[Login]\\nHandlePowerKey=ignore\\n\" >/etc/systemd/logind.conf.d/ignore.conf && \
         systemctl restart systemd-logind'"
    ));
    vm.ctl(&format!("stop --grace {BOOT}s"));
    assert_eq!(vm.exit_reason(), "STOPPED");
    // Debian's ssh writes hashes of the names.
    let uid = vm.field("/metadata/uid");
    node.sh(&format!(
        "ssh-keygen -F vmmd-{uid} -f ~/.local/state/vmmctl/known_hosts"
    ));
    drop(vm);
}

#[test]
fn the_foreground_vmm_needs_no_daemon() {
    let case = Case::new("run");
    let node = case.node();
    let manifest = VmSpec::busybox(vmmd_tests::node::Kernel::Cloud612)
        .manifest("alone")
        .to_string();
    let file = format!("{}/alone.yaml", case.folder());
    node.sh(&format!("cat > {file} <<'MANIFEST'\n{manifest}\nMANIFEST\n"));
    let mut console = Console::open(&case, &format!("vmm run --spec {file}; echo vmm-exit=$?"));
    console.booted();
    console.run("test -c /dev/hwrng");
    console.type_line("poweroff");
    console.until("vmm-exit=0", 60);
    let refused = node
        .ssh(&format!("runuser -u nobody -- vmm run --spec {file} </dev/null"))
        .expect("ssh");
    assert!(!refused.success());
    let expected = "no permission to open /dev/kvm: run as root, or as a member of the group that owns it";
    assert!(refused.stderr.contains(expected), "{}", refused.stderr);
}

/// Information, files both ways, and a snapshot of frozen file systems, all by the agent.
fn the_agent_describes_the_guest_and_freezes_it(vm: &Vm<'_>, folder: &str) {
    let (node, name) = (vm.node(), vm.name());
    let guest = node.sh(&format!("vmmctl get guest {name}"));
    assert!(guest.contains("Debian GNU/Linux"), "{guest}");
    node.sh(&format!(
        "cd {folder} && head -c 4194304 /dev/urandom >sent && vmmctl cp sent {name}:/srv/sent && \
         vmmctl cp {name}:/srv/sent received && cmp sent received"
    ));
    // A snapshot while the guest writes has a file system that needs no journal.
    let writer = "nohup sh -c 'while :; do date >>/srv/log; dd if=/dev/urandom of=/srv/written bs=64k count=16 conv=fsync; done' \
                  >/dev/null 2>&1 & echo $!";
    node.sh(&format!("cat >{folder}/writer <<'SCRIPT'\n{writer}\nSCRIPT\n"));
    let snapshot = format!("{name}-frozen");
    node.sh(&format!(
        "cd {folder} && pid=$(vmmctl exec -i {name} -- sh <writer) && touch before && \
         vmmctl create snapshot {snapshot} --vm {name} --disks-only --paused --consistency require-agent && \
         vmmctl exec {name} -- kill $pid"
    ));
    let taken = node.sh(&format!("vmmctl get snapshot {snapshot} -o json"));
    assert!(taken.contains("SNAPSHOT_CONSISTENCY_AGENT"), "{taken}");
    let checked = node.sh(&format!(
        "cd {folder} && disk=$(find /var/lib/vmmd/snapshots -type f -size +64M -newer before) && cp --sparse=always \"$disk\" frozen && \
         dumpe2fs -h frozen 2>/dev/null | grep features && e2fsck -f -p frozen; echo code=$?; vmmctl delete snapshot {snapshot}"
    ));
    assert!(!checked.contains("needs_recovery"), "{checked}");
    assert!(
        checked.contains("has_journal") && (checked.contains("code=0") || checked.contains("code=1")),
        "{checked}"
    );
    // It is thawed: a write is stable.
    node.sh(&format!(
        "timeout 60 vmmctl exec {name} -- sh -c 'echo written >/srv/thawed && sync'"
    ));
}

/// The account of root has another password, and a key until it is deleted.
fn the_agent_sets_a_password_and_a_key(vm: &Vm<'_>, folder: &str) {
    let (node, name) = (vm.node(), vm.name());
    let shadow = format!("vmmctl exec {name} -- getent shadow root");
    let before = node.sh(&shadow);
    node.sh(&format!("echo 'new password' | vmmctl set password {name} root"));
    assert_ne!(node.sh(&shadow), before);
    let keys = node.sh(&format!(
        "cd {folder} && ssh-keygen -q -t ed25519 -N '' -C added -f key && vmmctl create ssh-key {name} root key.pub && \
         vmmctl exec {name} -- cat /root/.ssh/authorized_keys && vmmctl delete ssh-key {name} root key.pub && echo deleted && \
         vmmctl get ssh-key {name} root"
    ));
    let (present, deleted) = keys.split_once("deleted\n").expect("both lists");
    assert!(
        present.contains(" added") && !deleted.contains(" added"),
        "{keys}"
    );
    assert!(deleted.contains("ssh-"), "the other keys stay: {keys}");
}

/// Connections by AF_VSOCK (40) to a server of the guest, and of the guest to a waiting client.
fn sockets_carry_data_both_ways(vm: &Vm<'_>, folder: &str) {
    let (node, name) = (vm.node(), vm.name());
    let server = r#"socket($l, 40, 1, 0) or die $!;
        bind($l, pack("SSLLL", 40, 0, 5000, 0xffffffff, 0)) or die $!;
        listen($l, 5);
        if (fork) { exit }
        open(STDOUT, ">/dev/null"); open(STDERR, ">/dev/null");
        accept($c, $l);
        while (sysread($c, $b, 65536)) { for ($o = 0; $o < length $b; ) { $o += syswrite($c, $b, length($b) - $o, $o) } }
        shutdown($c, 1);"#;
    let client = r#"socket($s, 40, 1, 0) or die $!;
        connect($s, pack("SSLLL", 40, 0, 6000, 2, 0)) or die $!;
        syswrite($s, "from the guest\n");"#;
    node.sh(&format!(
        "cd {folder} && cat >server <<'PERL'\n{server}\nPERL\ncat >client <<'PERL'\n{client}\nPERL\n"
    ));
    node.sh(&format!(
        "cd {folder} && vmmctl exec -i {name} -- perl <server && head -c 4194304 /dev/urandom >sent && \
         timeout 120 vmmctl vsock connect {name} 5000 <sent >echoed && cmp sent echoed"
    ));
    // The client waits before the guest connects.
    let heard = node.sh(&format!(
        "cd {folder} && {{ timeout 120 vmmctl vsock listen {name} 6000 </dev/null >heard & }} && \
         timeout 60 sh -c 'until vmmctl exec -i {name} -- perl <client; do sleep 1; done' && wait && cat heard"
    ));
    assert_eq!(heard.trim(), "from the guest");
}
