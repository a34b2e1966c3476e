//! Directories of the node that guests mount.

use std::fmt::Write as _;

use serde_json::{Value, json};
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Console, Vm, VmSpec};
use vmmd_tests::{Case, Node};

/// Whose the shared directories are.
const OWNER: &str = "1234:1235";

/// What a guest sees otherwise than a program of the directory's owner on the node, by the name of the check, and why.
const DIFFERENCES: [(&str, &str); 1] = [
    // The daemon's unit lets nothing that it starts set these bits.
    ("set-user-id and set-group-id bits", "errno 1 errno 1 644"),
];

/// Folders of a test below /srv; removed with it.
struct Srv<'case> {
    node: &'case Node,
    path: String,
}

impl<'case> Srv<'case> {
    fn new(case: &'case Case, folders: &[&str]) -> Self {
        let srv = Srv {
            node: case.node(),
            path: format!("/srv/{}", case.name()),
        };
        for folder in folders {
            srv.sh(&format!("mkdir -p {folder} && chown {OWNER} {folder}"));
        }
        srv
    }

    /// In the node, with the folder as the working directory.
    fn sh(&self, script: &str) -> String {
        let script = format!("mkdir -p {0} && cd {0} && {script}", self.path);
        self.node.sh(&script).expect("in the node")
    }

    fn share(&self, folder: &str) -> Value {
        json!({"name": folder, "path": format!("{}/{folder}", self.path)})
    }
}

impl Drop for Srv<'_> {
    fn drop(&mut self) {
        let _ = self.node.ssh(&format!("rm -rf {}", self.path));
    }
}

fn with_shares(case: &Case, shares: &[Value]) -> VmSpec {
    let spec = case.share_guest(Kernel::Cloud612).expect("guest");
    spec.cores(2).set("/shares", json!(shares))
}

fn booted(vm: &Vm<'_>) -> Console {
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    console
}

/// The process that serves the VM's first share.
fn server(vm: &Vm<'_>) -> String {
    vm.field("/status/shares/0/pid").expect("pid")
}

/// Waits in the node until a shell's condition holds.
fn until(node: &Node, condition: &str) {
    node.sh(&format!(
        "for i in $(seq 300); do if {condition}; then exit 0; fi; sleep 0.1; done; echo 'not so after 30 s' >&2; exit 1"
    ))
    .expect(condition);
}

#[test]
fn files_behave_in_a_share_as_they_do_on_the_node() {
    let case = Case::new("share-posix").expect("node");
    let srv = Srv::new(&case, &["data", "here"]);
    let fscheck = case.fscheck().expect("fscheck");
    let as_owner = "setpriv --reuid=1234 --regid=1235 --clear-groups";
    srv.sh(&format!("install -m 755 {fscheck} fscheck"));
    let here = srv.sh(&format!("{as_owner} ./fscheck table here"));
    let mut share = srv.share("data");
    share["xattr"] = json!(true);
    let vm = Vm::start(&case, "", &with_shares(&case, &[share])).expect("start");
    let mut console = booted(&vm);
    let there = console
        .run(
            "mount -t virtiofs data /mnt && mkdir /mnt/table && fscheck table /mnt/table",
            300,
        )
        .expect("the table");
    let mut differences = String::new();
    for (one, other) in here.lines().zip(there.trim().lines()) {
        let expected = DIFFERENCES
            .iter()
            .find(|(name, _)| one.starts_with(&format!("{name}: ")))
            .map(|(name, outcome)| format!("{name}: {outcome}"));
        if *other != expected.unwrap_or_else(|| one.to_owned()) {
            writeln!(differences, "node  {one}\nguest {other}").expect("a string");
        }
    }
    assert_eq!(here.lines().count(), there.trim().lines().count(), "{there}");
    assert!(differences.is_empty(), "{differences}");

    // Many renames and look-ups at once, in the guest and on the node.
    let storm = console
        .run("mkdir /mnt/storm && fscheck storm /mnt/storm 5", 120)
        .expect("storm");
    assert!(storm.contains(" lost 0 left 4"), "{storm}");
    let small = console
        .run("mkdir /mnt/small && fscheck small /mnt/small 2000", 300)
        .expect("small files");
    println!("2,000 files, in microseconds: {}", small.trim());

    // All of it belongs to the directory's owner, whoever made it in the guest.
    console
        .run(
            "echo kept >/mnt/kept && chown 5:6 /mnt/kept; sync; sha256sum /mnt/table/*/a | sort >/tmp/sums; wc -l </tmp/sums",
            60,
        )
        .expect("a file");
    let foreign = srv.sh("find data ! -uid 1234 -o ! -gid 1235");
    assert_eq!(foreign, "");
    assert_eq!(srv.sh("cat data/kept"), "kept\n");
    // What the node writes is seen in the guest.
    srv.sh("echo of the node >data/node && chmod 644 data/node");
    let read = console.run("sleep 2; cat /mnt/node", 30).expect("read");
    assert_eq!(read, "of the node\n");
}

#[test]
fn nothing_outside_a_share_is_reached_and_a_read_only_one_stays_as_it_is() {
    let case = Case::new("share-out").expect("node");
    let srv = Srv::new(&case, &["data", "only"]);
    srv.sh("mkdir -m 755 canary && echo SECRET >canary/secret && chmod 600 canary/secret && echo public >canary/public");
    // What the node's own programs have put into the share.
    srv.sh(&format!(
        "cd data && ln -s {0}/canary/public absolute && ln -s ../canary up && ln -s /proc/1/root root && ln -s /proc/self/fd fd && \
         ln ../canary/secret linked && cp -p ../canary/secret of-root && mkdir -m 777 moving && echo inside >moving/inside && \
         chown {OWNER} moving moving/inside && cd .. && echo fixed >only/file && chown {OWNER} only/file",
        srv.path
    ));
    let sums = "find canary only -type f -exec sha256sum {} + | sort; find canary only -printf '%p %m %u %T@\\n' | sort";
    let before = srv.sh(sums);
    let mut read_only = srv.share("only");
    read_only["readOnly"] = json!(true);
    let vm = Vm::start(&case, "", &with_shares(&case, &[srv.share("data"), read_only])).expect("start");

    // What serves it.
    let pid = server(&vm);
    let status = srv.sh(&format!("cat /proc/{pid}/status"));
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(field("Uid:"), "1234 1234 1234 1234");
    assert_eq!(field("Gid:"), "1235 1235 1235 1235");
    assert_eq!(
        (field("NoNewPrivs:"), field("Seccomp:")),
        ("1".into(), "2".into())
    );
    // chown, dac_override, fowner, fsetid, setgid, setuid, mknod, setfcap.
    assert_eq!(field("CapEff:"), "00000000880000db");
    let root = srv.sh(&format!("readlink /proc/{pid}/root"));
    assert_eq!(root.trim(), format!("{}/data", srv.path));
    let group = srv.sh(&format!(
        "cmp /proc/{pid}/cgroup /proc/{}/cgroup && echo same",
        vm.pid().expect("pid")
    ));
    assert_eq!(group, "same\n");
    let namespaces = srv.sh(&format!(
        "for n in user pid net ipc uts; do [ $(readlink /proc/{pid}/ns/$n) != $(readlink /proc/self/ns/$n) ] && echo $n; done"
    ));
    assert_eq!(namespaces, "user\npid\nnet\nipc\nuts\n");

    let mut console = booted(&vm);
    let mut guest = |command: &str| console.run(command, 60).expect(command);
    guest("mkdir /only && mount -t virtiofs data /mnt && mount -t virtiofs only /only");
    // Links are the guest's own business: they lead into the guest.
    for link in [
        "absolute",
        "up/secret",
        "up/public",
        "root/etc/shadow",
        "root/srv",
    ] {
        guest(&format!("! cat /mnt/{link} 2>/dev/null"));
    }
    assert_eq!(guest("readlink /mnt/root"), "/proc/1/root\n");
    guest("cd /mnt/.. && [ $(pwd -P) = / ] && cd");
    // Files of the node's root, one of them also outside: neither read nor changed, and not given away.
    for file in ["linked", "of-root"] {
        guest(&format!("! cat /mnt/{file} 2>/dev/null"));
        guest(&format!("! sh -c 'echo x >>/mnt/{file}' 2>/dev/null"));
        guest(&format!("! chmod 666 /mnt/{file} 2>/dev/null"));
        guest(&format!("! chown 0:0 /mnt/{file} 2>/dev/null"));
        guest(&format!("! ln /mnt/{file} /mnt/again 2>/dev/null"));
    }
    // Devices and set-user-id programs are not made.
    guest("! mknod /mnt/null c 1 3 2>/dev/null && ! mknod /mnt/vda b 254 0 2>/dev/null");
    guest("cp /bin/busybox /mnt/busybox && ! chmod 4755 /mnt/busybox 2>/dev/null");
    // A folder that the node moves out while the guest is in it leads nowhere else.
    guest("cd /mnt/moving && cat inside >/dev/null");
    srv.sh("mv data/moving moved");
    let seen = guest(
        "ls /mnt/moving/.. 2>/dev/null | grep -c canary; cat ../canary/public ../../canary/public 2>/dev/null; cd; true",
    );
    assert_eq!(seen.trim(), "0");
    // Names race with links that take their place.
    srv.sh("(for i in $(seq 400); do mkdir data/race && rmdir data/race; ln -s ../canary data/race; rm data/race; done) </dev/null >/dev/null 2>&1 &");
    let caught = guest(
        "for i in $(seq 200); do cat /mnt/race/public 2>/dev/null; echo x 2>/dev/null >/mnt/race/planted; done | grep -c public; true",
    );
    assert_eq!(caught.trim(), "0");
    // A read-only share.
    for write in [
        "echo x >>/only/file",
        "touch /only/new",
        "rm /only/file",
        "mkdir /only/folder",
        "chmod 777 /only/file",
        "mv /only/file /only/other",
        "ln /only/file /only/other",
        "truncate -s 0 /only/file",
    ] {
        guest(&format!("! sh -c '{write}' 2>/dev/null"));
    }
    assert_eq!(guest("cat /only/file"), "fixed\n");
    guest("mount -o remount,rw /only 2>/dev/null; ! touch /only/new 2>/dev/null");

    assert_eq!(srv.sh(sums), before);
    let odd = srv.sh("find data moved \\( -perm /6000 -o -type b -o -type c \\) -print; find data moved -user root -newer only/file");
    assert_eq!(odd, "");
}

#[test]
fn a_share_works_again_whatever_ends() {
    let case = Case::new("share-ends").expect("node");
    let srv = Srv::new(&case, &["data"]);
    let node = case.node();
    let vm = Vm::start(&case, "", &with_shares(&case, &[srv.share("data")])).expect("start");
    let mut console = booted(&vm);
    let mount = "mount -t virtiofs data /mnt";
    console
        .run(
            &format!("{mount} && echo first >/mnt/file && fsync /mnt/file 2>/dev/null; sync"),
            60,
        )
        .expect("mount");
    let first = server(&vm);

    // A pause under load.
    console
        .run(
            "(i=0; while :; do i=$((i + 1)); dd if=/dev/zero of=/mnt/load bs=64k count=16 conv=fsync 2>/dev/null || break; echo $i >/tmp/rounds; done) & sleep 2; true",
            60,
        )
        .expect("load");
    for _ in 0..3 {
        vm.ctl("pause").expect("pause");
        node.sh("sleep 0.5").expect("a while");
        vm.ctl("resume").expect("resume");
        console
            .run("a=$(cat /tmp/rounds); sleep 3; [ $(cat /tmp/rounds) -gt $a ]", 60)
            .expect("the load goes on");
    }
    assert_eq!(server(&vm), first);

    // What serves it is killed under load: the mount fails at once, and works when it is made anew.
    console.run("echo kept >/mnt/kept && sync", 60).expect("a file");
    node.sh(&format!("kill -9 {first}")).expect("kill");
    until(
        node,
        &format!(
            "[ -n \"$(vmmctl share ls {} | grep served)\" ] && ! vmmctl share ls {} | grep -qw {first}",
            vm.name(),
            vm.name()
        ),
    );
    console
        .run(
            "sleep 1; ! timeout 5 cat /mnt/kept 2>/tmp/error; cat /tmp/error",
            60,
        )
        .map(|said| assert!(said.contains("not connected"), "{said}"))
        .expect("an error, at once");
    let read = console
        .run(&format!("umount -l /mnt && {mount} && cat /mnt/kept"), 60)
        .expect("mounted anew");
    assert_eq!(read, "kept\n");
    let events = node.sh("vmmctl events").expect("events");
    assert!(
        events.contains("ShareFailed") && events.contains("ShareRestored"),
        "{events}"
    );
    let second = server(&vm);
    assert_ne!(second, first);

    // The daemon is killed; what serves the share is found again, and made anew.
    node.sh(
        "pid=$(systemctl show -P MainPID vmmd); kill -9 $pid; \
         while [ \"$(systemctl show -P MainPID vmmd)\" = $pid ] || ! systemctl is-active -q vmmd; do sleep 0.1; done",
    )
    .expect("the daemon is killed");
    assert_eq!(server(&vm), second);
    console
        .run("echo x >/mnt/after && cat /mnt/after", 60)
        .expect("the share goes on");
    node.sh(&format!("kill -9 {second}")).expect("kill");
    until(
        node,
        &format!("vmmctl share ls {} | grep served | grep -vqw {second}", vm.name()),
    );
    let read = console
        .run(
            &format!("umount -l /mnt && {mount} && cat /mnt/kept /mnt/after"),
            60,
        )
        .expect("mounted anew");
    assert_eq!(read, "kept\nx\n");

    // The guest reboots: the share is there for the next one.
    console.type_line("reboot").expect("reboot");
    console.until("GUEST-READY", BOOT).expect("boot");
    let read = console
        .run(&format!("{mount} && cat /mnt/kept"), 60)
        .expect("mounted after a reboot");
    assert_eq!(read, "kept\n");

    // The vmm is killed, and the VM is started again; then it is stopped, and nothing is left.
    let third = server(&vm);
    node.sh(&format!("kill -9 {}", vm.pid().expect("pid")))
        .expect("kill");
    until(node, &format!("[ ! -d /proc/{third} ]"));
    vm.wait_phase("FAILED", 20).expect("failed");
    vm.ctl("start").expect("start");
    let mut console = booted(&vm);
    let read = console
        .run(&format!("{mount} && cat /mnt/kept"), 60)
        .expect("mounted after a start");
    assert_eq!(read, "kept\n");
    let last = server(&vm);
    vm.ctl("stop --force").expect("stop");
    until(node, &format!("[ ! -d /proc/{last} ]"));
    let left = node
        .sh("grep -c /srv/ /proc/mounts; find /run/vmmd/vms -name 'share-*.sock'; true")
        .expect("look");
    assert_eq!(left, "0\n");
}
