//! Deliberate faults of the daemon (`vmmd/host/src/fault.rs`): each must make the test fail that detects
//! it.

use std::{env, process::Command};

use rstest::rstest;

#[rstest]
#[case::an_event_is_not_written(
    "event-lost",
    "events::events_survive_a_kill_and_a_watch_resumes_by_its_cursor"
)]
#[case::a_cgroup_is_not_removed("cgroup-left", "hygiene::twenty_vms_in_a_loop_leave_nothing")]
fn a_deliberate_fault_is_noticed_by_its_test(#[case] fault: &str, #[case] test: &str) {
    let run = |fault: &str| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", test]).env("VMMD_FAULT", fault);
        let output = command.output().unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let (passed, said) = run("none");
    assert!(passed && said.contains("1 passed"), "without a fault: {said}");
    let (passed, said) = run(fault);
    assert!(!passed && said.contains("1 failed"), "with {fault}: {said}");
}
