//! Files and directories that a guest cannot reach.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::vm::Vm;

use crate::{OWNER, Srv, mapped, server, until, with_shares};

#[test]
fn share_reaches_nothing_outside_and_read_only_holds() {
    let case = Case::new("share-out");
    let srv = Srv::new(&case, &["data", "only"]);
    srv.sh("mkdir -m 755 canary && echo SECRET >canary/secret && chmod 600 canary/secret && echo public >canary/public");
    // Links and files that the node's own programs have put into the share.
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
    srv.sh("mkdir mapped && echo foreign >mapped/foreign && chmod 600 mapped/foreign && chown 100000:100000 mapped && \
         chown 1234:1235 mapped/foreign");
    let mapped = mapped(&srv, "mapped");
    let shares = [srv.share("data"), read_only, mapped];
    let vm = Vm::start(&case, "", &with_shares(&case, &shares));

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
        vm.pid()
    ));
    assert_eq!(group, "same\n");
    let namespaces = srv.sh(&format!(
        "for n in user pid net ipc uts; do [ $(readlink /proc/{pid}/ns/$n) != $(readlink /proc/self/ns/$n) ] && echo $n; done"
    ));
    assert_eq!(namespaces, "user\npid\nnet\nipc\nuts\n");

    let mut console = vm.booted();
    let mut guest = |command: &str| console.run(command);
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
    srv.sh("(for i in $(seq 400); do mkdir data/race && rmdir data/race; ln -s ../canary data/race; rm data/race; done; touch raced) </dev/null >/dev/null 2>&1 &");
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
    // With maps, the guest's root is an ordinary user of the node. Files of the node's other users
    // belong to `nobody`.
    guest(
        "mkdir /mapped && mount -t virtiofs mapped /mapped && cd /mapped && echo x >root && echo y >user && chown 1000:1001 user && cd",
    );
    assert_eq!(
        guest("cd /mapped && stat -c %u:%g root user foreign; cd"),
        "0:0\n1000:1001\n65534:65534\n"
    );
    for refused in [
        "cat /mapped/foreign",
        "echo x >>/mapped/foreign",
        "chown 0:0 /mapped/foreign",
        "chmod 666 /mapped/foreign",
        "chown 70000:0 /mapped/root",
        "chmod 4755 /mapped/root",
    ] {
        guest(&format!("! sh -c '{refused}' 2>/dev/null"));
    }
    assert_eq!(
        srv.sh("cd mapped && stat -c '%u:%g %a' root user foreign"),
        "100000:100000 644\n101000:101001 644\n1234:1235 600\n"
    );

    // The names that raced are gone, too.
    until(case.node(), &format!("[ -e {}/raced ]", srv.path));
    assert_eq!(srv.sh(sums), before);
    let odd = srv.sh("find data moved \\( -perm /6000 -o -type b -o -type c \\) -print; find data moved -user root -newer only/file");
    assert_eq!(odd, "");
}
