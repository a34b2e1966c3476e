//! `vmmctl run`.

use vmmd_api::v1::VmPhase;

use crate::support::{Daemon, disk::DISK_MADE};

/// Runs it for a VM `web` of the image `debian`; returns the exit code and the text of a failure.
fn run(daemon: &Daemon, args: &[&str]) -> (i32, String) {
    let output = daemon
        .vmmctl()
        .args(["run", "debian", "--name", "web"])
        .args(args)
        .output()
        .unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

/// A copy of a disk takes minutes: known obstacles are reported before the copy.
#[test]
fn vm_is_refused_before_its_disk_is_created() {
    let daemon = Daemon::start();
    let (code, said) = run(&daemon, &["--share", "/root"]);
    assert_eq!((code, said.contains("--share: ")), (5, true), "{said}");
    daemon.state.put("web", VmPhase::Running, &[]);
    let (code, said) = run(&daemon, &[]);
    assert_eq!(
        (code, said.contains("there is a VM \"web\" already")),
        (4, true),
        "{said}"
    );
    assert_eq!(daemon.state.calls(), ["create web start=true dry_run=true"; 2]);
}

#[test]
fn the_disk_is_made_then_the_vm_and_it_is_started() {
    let daemon = Daemon::start();
    daemon.state.operation_of(DISK_MADE, "web-root", "");
    assert_eq!(run(&daemon, &["--quiet"]), (0, String::new()));
    let calls = daemon.state.calls();
    let made = [
        "create web start=true dry_run=true",
        "create disk web-root",
        "create web start=true dry_run=false",
    ];
    assert!(calls.starts_with(&made.map(str::to_owned)), "{calls:?}");
}

#[test]
fn a_command_line_needs_a_kernel_that_is_booted_directly() {
    let daemon = Daemon::start();
    let (code, said) = run(&daemon, &["--cmdline", "quiet"]);
    assert_eq!(
        (code, said.contains("give --fast-boot or --kernel")),
        (2, true),
        "{said}"
    );
    assert!(daemon.state.calls().is_empty());
}
