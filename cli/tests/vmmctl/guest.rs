//! Guests, by their agents.

use vmmd_api::v1::VmPhase;

use crate::support::{Daemon, done, line, run_with_input};

fn daemon() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon
}

#[test]
fn guest_is_shown_for_people_and_for_programs() {
    let daemon = daemon();
    let (code, stdout, stderr) = line(&daemon, "get guest web");
    assert_eq!((code, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout, @r"
    OS:              Debian GNU/Linux 12 (bookworm)
    Kernel:          6.1.0-18-amd64 (x86_64)
    Host name:       web
    Time zone:       CET (UTC-01:30)
    Agent:           7.2.0
    Interfaces:
      NAME   MAC                 ADDRESSES
      eth0   52:54:00:00:00:01   10.0.0.5/24, fe80::1/64
    File systems:
      MOUNTED ON   DEVICE   TYPE   SIZE   USED
      /            vda1     ext4   4Gi    1Gi (25 %)
    Users:           ann
    Incomplete:      the guest has more interfaces, addresses, file systems or users
    ");
    let (code, stdout, _) = line(&daemon, "get guest vm/web -o jsonpath={.os.kernelRelease}");
    assert_eq!((code, stdout.as_str()), (0, "6.1.0-18-amd64\n"));
    assert_eq!(line(&daemon, "get guest nobody").0, 3);
}

#[test]
fn password_comes_from_standard_input_or_a_file() {
    let daemon = daemon();
    let set = ["set", "password", "web", "root"];
    let answer = run_with_input(&daemon, &set, "s3cret word\r\nmore");
    assert_eq!(answer, done("password of root in vm/web set\n"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    std::fs::write(&file, "$6$x$y\n").unwrap();
    let file = file.to_str().unwrap();
    let set = ["set", "password", "web", "ann", "--crypted", "--file", file];
    assert_eq!(run_with_input(&daemon, &set, "").0, 0);
    let calls = daemon.state.calls();
    assert!(
        calls.contains(&"password of root: \"s3cret word\", crypted=false".to_owned()),
        "{calls:?}"
    );
    assert!(
        calls.contains(&"password of ann: \"$6$x$y\", crypted=true".to_owned()),
        "{calls:?}"
    );
    let (code, _, stderr) = run_with_input(&daemon, &["set", "password", "web", "root"], "\n");
    assert_eq!(code, 2);
    assert!(stderr.contains("the password is empty"), "{stderr}");
}

#[test]
fn ssh_keys_of_a_guest_are_listed_added_and_removed() {
    let daemon = daemon();
    assert_eq!(
        line(&daemon, "get ssh-key web ann"),
        done("ssh-ed25519 AAAA ann\n")
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("id.pub");
    std::fs::write(&file, "ssh-ed25519 BBBB b\nssh-ed25519 CCCC c\n").unwrap();
    let file = file.to_str().unwrap();
    let add = ["create", "ssh-key", "web", "ann", "ssh-ed25519 AAAA a", file];
    assert_eq!(
        run_with_input(&daemon, &add, ""),
        done("ssh keys of ann in vm/web added\n")
    );
    let remove = ["delete", "ssh-key", "web", "ann", "ssh-ed25519 AAAA a"];
    assert_eq!(
        run_with_input(&daemon, &remove, ""),
        done("ssh keys of ann in vm/web removed\n")
    );
    let calls = daemon.state.calls();
    let added = "keys of ann: +[\"ssh-ed25519 AAAA a\", \"ssh-ed25519 BBBB b\", \"ssh-ed25519 CCCC c\"] -[]";
    assert!(calls.contains(&added.to_owned()), "{calls:?}");
    assert!(
        calls.contains(&"keys of ann: +[] -[\"ssh-ed25519 AAAA a\"]".to_owned()),
        "{calls:?}"
    );
}

#[test]
fn file_is_copied_to_a_guest_and_from_it() {
    let daemon = daemon();
    let folder = tempfile::tempdir().unwrap();
    let local = folder.path().join("notes.txt");
    std::fs::write(&local, "some notes").unwrap();
    let local = local.to_str().unwrap();
    let said = format!("{local} copied to web:/root/notes.txt (10)\n");
    assert_eq!(
        run_with_input(&daemon, &["cp", "-q", local, "web:/root/"], ""),
        done(&said)
    );
    let piped = run_with_input(&daemon, &["cp", "-q", "-", "web:/root/piped"], "typed");
    assert_eq!(piped.0, 0, "{piped:?}");
    let calls = daemon.state.calls();
    for call in ["/root/notes.txt: some notes", "/root/piped: typed"] {
        assert!(calls.contains(&call.to_owned()), "{calls:?}");
    }
    assert_eq!(
        line(&daemon, "cp -q web:/etc/hosts -"),
        done("content of /etc/hosts")
    );
    let target = folder.path().to_str().unwrap();
    let copied = run_with_input(&daemon, &["cp", "-q", "web:/etc/hosts", target], "");
    assert_eq!(copied.0, 0, "{copied:?}");
    let hosts = std::fs::read_to_string(folder.path().join("hosts")).unwrap();
    assert_eq!(hosts, "content of /etc/hosts");
}

#[test]
fn incomplete_copy_and_wrong_places_are_refused() {
    let daemon = daemon();
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("cut");
    std::fs::write(&target, "before").unwrap();
    let target = target.to_str().unwrap();
    let (code, _, stderr) = run_with_input(&daemon, &["cp", "-q", "web:/cut", target], "");
    assert_ne!(code, 0);
    assert!(stderr.contains("incomplete"), "{stderr}");
    assert_eq!(std::fs::read_to_string(target).unwrap(), "before");
    for (words, wanted) in [
        ("cp a b", "name a file of a guest"),
        ("cp web:/a db:/b", "in two steps"),
        ("cp web:a b", "must be absolute"),
        ("cp - web:/root/", "has no name"),
    ] {
        let (code, _, stderr) = line(&daemon, words);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains(wanted), "{stderr}");
    }
    assert_eq!(line(&daemon, "cp /nonexistent web:/a").0, 3);
    assert_eq!(line(&daemon, "cp nobody:/a b").0, 3);
}
