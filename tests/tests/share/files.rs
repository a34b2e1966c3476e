//! Files in a share compared with files of the node, and the guest's cache of them.

use std::fmt::Write as _;

use serde_json::{Value, json};
use vmmd_tests::Case;
use vmmd_tests::vm::Vm;

use crate::{OWNER, Srv, mapped, with_shares};

/// Differences between the view of a guest and that of a program of the directory's owner on the
/// node, by the name of the check, with reasons.
const DIFFERENCES: [(&str, &str); 2] = [
    // The daemon's unit lets nothing that it starts set these bits.
    ("set-user-id and set-group-id bits", "errno 1 errno 1 644"),
    // virtiofsd does not know FUSE_TMPFILE: EOPNOTSUPP, as of file systems that have no such files.
    ("O_TMPFILE, and a name for it", "errno 95"),
];

/// How long a hundred thousand files may take in a slow node, in seconds.
const MANY_FILES: u64 = 3600;

#[test]
fn files_behave_in_a_share_as_they_do_on_the_node() {
    let case = Case::new("share-posix");
    let srv = Srv::new(&case, &["data", "here"]);
    let fscheck = case.fscheck();
    let as_owner = "setpriv --reuid=1234 --regid=1235 --clear-groups";
    srv.sh(&format!("install -m 755 {fscheck} fscheck"));
    let here = srv.sh(&format!("{as_owner} ./fscheck table here"));
    let mut share = srv.share("data");
    share["xattr"] = json!(true);
    let limited = limited(&srv);
    let (_vm, mut console) = Vm::boot(&case, "", &with_shares(&case, &[&[share], &limited[..]].concat()));
    let there = console.run_within(
        "mount -t virtiofs data /mnt && mkdir /mnt/table && fscheck table /mnt/table",
        300,
    );
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
    let storm = console.run("mkdir /mnt/storm && fscheck storm /mnt/storm 5");
    assert!(storm.contains(" lost 0 left 4"), "{storm}");
    // All files belong to the directory's owner, regardless of the guest's user.
    console.run("echo kept >/mnt/kept && chown 5:6 /mnt/kept && sync");
    let foreign = srv.sh("find data ! -uid 1234 -o ! -gid 1235");
    assert_eq!(foreign, "");
    assert_eq!(srv.sh("cat data/kept"), "kept\n");
    // The guest sees writes of the node after its cache has expired, which takes a second.
    console.run("! cat /mnt/node 2>/dev/null");
    srv.sh("echo of the node >data/node && chmod 644 data/node");
    let read = console.run("until cat /mnt/node 2>/dev/null; do sleep 0.1; done");
    assert_eq!(read, "of the node\n");
    // A lock is the guest's own business: the node's programs don't see it.
    console
        .run("(flock -x 9; sleep 1000) 9>>/mnt/kept & until ! flock -n /mnt/kept true; do sleep 0.1; done");
    srv.sh("flock -n data/kept true");

    // The node's limits of space are the guest's.
    for (share, says) in [
        ("full", "No space left on device"),
        ("quota", "Disk quota exceeded"),
    ] {
        let said = console.run(&format!(
            "mkdir /{share} && mount -t virtiofs {share} /{share} && echo kept >/{share}/kept && sync && \
                     ! dd if=/dev/zero of=/{share}/big bs=64k count=64 2>/tmp/said; cat /tmp/said"
        ));
        assert!(said.contains(says), "{share}: {said}");
        let kept = console.run(&format!(
            "rm /{share}/big && until echo again 2>/dev/null >/{share}/small; do sleep 0.1; done; \
                     cat /{share}/kept /{share}/small"
        ));
        assert_eq!(kept, "kept\nagain\n");
    }
}

/// Two shares that hold 1 MiB: `full` is a file system of that size, `quota` has a project quota of ext4.
fn limited(srv: &Srv<'_>) -> [Value; 2] {
    srv.sh(&format!(
        "mkdir full ext4 && mount -t tmpfs -o size=1m,mode=755 tmpfs full && chown {OWNER} full"
    ));
    // quotactl(2): Q_SETQUOTA of project 77, in blocks of 1 KiB, QIF_BLIMITS.
    srv.sh(&format!(
        "truncate -s 32M image && mkfs.ext4 -q -I 256 -O quota,project -E quotatype=prjquota image && mount -o loop,prjquota image ext4 && \
         mkdir ext4/data && chown {OWNER} ext4/data && chattr -p 77 +P ext4/data && \
         perl -e 'syscall(179, 0x80000802, $ARGV[0], 77, my $limits = pack(\"Q8LL\", 1024, 0, 0, 0, 0, 0, 0, 0, 1, 0)) == 0 or die \"quotactl: $!\"' \
             $(findmnt -no SOURCE ext4)"
    ));
    let quota = json!({"name": "quota", "path": format!("{}/ext4/data", srv.path)});
    [srv.share("full"), quota]
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn share_refuses_more_open_files_than_its_limit() {
        let case = Case::new("share-few");
        let srv = Srv::new(&case, &["data"]);
        let mut share = srv.share("data");
        share["maxOpenFiles"] = json!(256);
        let (_vm, mut console) = Vm::boot(&case, "", &with_shares(&case, &[share]));
        let read = console.run("mount -t virtiofs data /mnt && echo few >/mnt/file && cat /mnt/file");
        assert_eq!(read, "few\n");
        // As many as the spec says, and no more: each that the guest remembers is one.
        srv.sh(&format!(
            "for i in $(seq 300); do echo x >data/$i; done; chown {OWNER} data/*"
        ));
        let known = console.run("for i in $(seq 300); do cat /mnt/$i 2>/dev/null; done | wc -l");
        let known: u32 = known.trim().parse().expect("a number");
        assert!((200..256).contains(&known), "{known}");
        let error = console.run("cat /mnt/300 2>&1; true");
        assert!(error.contains("Too many open files in system"), "{error}");
    }

    #[test]
    fn hundred_thousand_small_files_are_made_and_removed() {
        let case = Case::new("share-small");
        let srv = Srv::new(&case, &["data"]);
        let mut share = srv.share("data");
        // The guest remembers all of them.
        share["maxOpenFiles"] = json!(200_000);
        let (_vm, mut console) = Vm::boot(&case, "", &with_shares(&case, &[share]));
        let times = console.run_within(
            "mount -t virtiofs data /mnt && mkdir /mnt/small && fscheck small --threads 4 /mnt/small 100000",
            MANY_FILES,
        );
        println!("100,000 files, in microseconds: {}", times.trim());
        // The server knows no files that are gone.
        let open = srv.sh("find data/small -type f | wc -l");
        assert_eq!(open.trim(), "0");
    }

    #[test]
    fn what_a_guest_remembers_of_a_share_is_as_the_spec_says() {
        let case = Case::new("share-cache");
        let srv = Srv::new(&case, &["never", "always"]);
        srv.sh("mkdir acl && chown 100000:100000 acl");
        let mut never = srv.share("never");
        never["cache"] = json!("SHARE_CACHE_NEVER");
        let mut always = srv.share("always");
        always["cache"] = json!("SHARE_CACHE_ALWAYS");
        always["writeback"] = json!(true);
        always["xattr"] = json!(true);
        let mut acl = mapped(&srv, "acl");
        acl["posixAcl"] = json!(true);
        acl["maxOpenFiles"] = json!(1000);
        let (_vm, mut console) = Vm::boot(&case, "", &with_shares(&case, &[never, always, acl]));
        let mut guest = |command: &str| console.run(command);
        for share in ["never", "always", "acl"] {
            guest(&format!(
                "mkdir /{share} && mount -t virtiofs {share} /{share} && mkdir /{share}/table && echo old >/{share}/file && sync && \
                 dd if=/dev/zero of=/{share}/big bs=64k count=64 conv=fsync 2>/dev/null"
            ));
            let seen = srv.sh(&format!("cat {share}/file && stat -c %s {share}/big"));
            assert_eq!(seen, "old\n4194304\n", "{share}");
        }
        // The guest sees changes by the node at once, or not at all.
        for (share, seen) in [("never", "new\n"), ("always", "old\n")] {
            assert_eq!(guest(&format!("cat /{share}/file")), "old\n");
            srv.sh(&format!("echo new >{share}/file"));
            assert_eq!(guest(&format!("cat /{share}/file")), seen, "{share}");
        }
        let mut check = |share: &str, name: &str| {
            let said = guest(&format!("fscheck table /{share}/table --only '{name}'"));
            said.trim().rsplit_once(": ").map(|(_, said)| said.to_owned())
        };
        // ENODEV: there are no pages to share.
        assert_eq!(check("never", "a shared mapping").as_deref(), Some("errno 19"));
        assert_eq!(check("always", "a shared mapping").as_deref(), Some("(2, 2)"));
        assert_eq!(check("never", "extended attributes").as_deref(), Some("errno 95"));
        let attributes = Some("errno 17 1 1000 [\"user.two\"]");
        assert_eq!(check("always", "extended attributes").as_deref(), attributes);
        assert_eq!(check("acl", "extended attributes").as_deref(), attributes);
    }
}
