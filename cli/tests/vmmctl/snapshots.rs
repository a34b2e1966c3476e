//! `vmmctl snapshot`.

use std::{fs, os::unix::fs::PermissionsExt as _};

use crate::support::{
    Daemon, done, run,
    snapshot::{DAMAGED, OLD},
};

fn names(folder: &std::path::Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_snapshot_goes_to_a_file_of_its_owner_alone_and_back() {
    let (daemon, folder) = (Daemon::start(), tempfile::tempdir().unwrap());
    let archive = vec![7; 300 << 10];
    daemon.state.put_snapshot("one", &archive);
    let path = folder.path().join("file");
    fs::write(&path, "what was there before").unwrap();
    fs::write(
        folder.path().join("file.partial"),
        "what an export left that was killed",
    )
    .unwrap();
    let path = path.to_str().unwrap();
    let exported = run(&daemon, &["snapshot", "export", "one", "-q", "-o", path]);
    assert_eq!(
        exported,
        done(&format!("snapshot/one exported to {path} (300Ki)\n"))
    );
    assert_eq!(fs::read(path).unwrap(), archive);
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(names(folder.path()), ["file"]);

    let imported = run(&daemon, &["snapshot", "import", path, "-q"]);
    assert_eq!(imported, done("snapshot/own imported (300Ki)\n"));
    assert_eq!(daemon.state.snapshot("own").unwrap(), archive);
    // Sent again, with the same id, when the daemon goes away before it answers.
    daemon.state.refuse_first();
    let imported = run(&daemon, &["snapshot", "import", path, "-q", "--name", "two"]);
    assert_eq!(imported, done("snapshot/two imported (300Ki)\n"));
    assert_eq!(daemon.state.snapshot("two").unwrap(), archive);
}

#[test]
fn a_snapshot_goes_through_pipes() {
    let daemon = Daemon::start();
    daemon.state.put_snapshot("one", &[0xff; 5000]);
    let export = daemon
        .vmmctl()
        .args(["snapshot", "export", "one", "-o", "-"])
        .output()
        .unwrap();
    assert!(export.status.success());
    assert_eq!(export.stdout, [0xff; 5000]);
    let mut import = daemon.vmmctl();
    import
        .args(["snapshot", "import", "-", "--name", "two"])
        .write_stdin(export.stdout);
    assert!(import.output().unwrap().status.success());
    assert_eq!(daemon.state.snapshot("two").unwrap(), [0xff; 5000]);
}

#[test]
fn an_export_that_fails_leaves_no_file() {
    let (daemon, folder) = (Daemon::start(), tempfile::tempdir().unwrap());
    daemon.state.put_snapshot(DAMAGED, &[1; 5000]);
    let path = folder.path().join("file");
    let path = path.to_str().unwrap();
    let (code, stdout, stderr) = run(&daemon, &["snapshot", "export", DAMAGED, "-q", "-o", path]);
    assert!(code != 0 && stdout.is_empty(), "{code} {stdout}");
    assert!(stderr.contains("input/output error"), "{stderr}");
    let (code, _, stderr) = run(&daemon, &["snapshot", "export", "none", "-q", "-o", path]);
    assert!(code != 0 && stderr.contains("`vmmctl get snapshot`"), "{stderr}");
    assert!(names(folder.path()).is_empty());
    let missing = run(&daemon, &["snapshot", "import", path, "-q"]);
    assert!(
        missing.0 != 0 && missing.2.contains("No such file"),
        "{}",
        missing.2
    );
}

#[test]
fn a_snapshot_of_disks_alone_says_that_it_is_one() {
    let daemon = Daemon::start();
    let line = ["snapshot", "create", "one", "--vm", "web"];
    let whole = run(&daemon, &line);
    assert_eq!(
        whole,
        done("snapshot/one created (0 written, VM paused for 0.0 ms)\n")
    );
    let (_, shown, _) = run(&daemon, &["snapshot", "describe", "one"]);
    assert!(
        shown
            .lines()
            .any(|line| line.split_whitespace().eq(["Kind:", "full"])),
        "{shown}"
    );
    let disks = run(&daemon, &[line.as_slice(), &["--disks-only"]].concat());
    assert_eq!(
        disks,
        done("snapshot/one created (0 disks, VM paused for 0.0 ms)\n")
    );
    let (_, shown, _) = run(&daemon, &["snapshot", "describe", "one"]);
    assert!(
        shown
            .lines()
            .any(|line| line.split_whitespace().eq(["Kind:", "disks"])),
        "{shown}"
    );
    let old = ["snapshot", "create", OLD, "--vm", "web", "--disks-only"];
    let (code, stdout, stderr) = run(&daemon, &old);
    assert_eq!((code, stdout.as_str()), (5, ""));
    assert!(
        stderr.contains("the memory of the VM too") && stderr.contains("delete snapshot"),
        "{stderr}"
    );
}

#[test]
fn a_snapshot_is_taken_with_a_retention_and_shows_it() {
    let daemon = Daemon::start();
    let take = |name: &str, more: &[&str]| {
        let line = [&["snapshot", "create", name, "--vm", "web"], more].concat();
        run(&daemon, &line)
    };
    let (code, _, stderr) = take(
        "one",
        &[
            "--keep-last",
            "7",
            "--max-age",
            "14d",
            "--retention-group",
            "daily",
        ],
    );
    assert_eq!(code, 0, "{stderr}");
    let (_, shown, _) = run(&daemon, &["snapshot", "describe", "one"]);
    assert!(
        shown.contains("the last 7, at most 14d old, group daily"),
        "{shown}"
    );
    assert!(shown.contains("3Mi (3145728 bytes)"), "{shown}");
    assert_eq!(take("two", &["--max-age", "36h"]).0, 0);
    let (_, shown, _) = run(&daemon, &["snapshot", "describe", "two"]);
    assert!(shown.contains("at most 129600s old"), "{shown}");
    assert_eq!(take("three", &[]).0, 0);
    let (_, shown, _) = run(&daemon, &["snapshot", "describe", "three"]);
    assert!(
        !shown.contains("at most") && !shown.contains("the last"),
        "{shown}"
    );
    for wrong in [
        &["--keep-last", "0"][..],
        &["--max-age", "soon"],
        &["--retention-group", "daily"],
    ] {
        assert_ne!(take("four", wrong).0, 0, "{wrong:?}");
    }
}
