//! `wait`, against events in the daemon's watches.

use vmmd_api::v1::{VmPhase, WatchEventType};

use crate::support::{Daemon, Running, done, run};

fn begin(daemon: &Daemon, args: &[&str]) -> Running {
    let running = daemon.begin(&[&["wait"], args].concat());
    while daemon.state.watchers() == 0 {
        std::thread::yield_now();
    }
    running
}

fn end(running: Running) -> (i32, String) {
    let (code, stdout, _) = running.end();
    (code.unwrap(), stdout)
}

fn change(daemon: &Daemon, name: &str, phase: VmPhase) {
    daemon.state.put(name, phase, &[]);
    daemon.state.announce(WatchEventType::Modified, name);
}

#[test]
fn a_wait_for_what_is_so_ends_at_once() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Running, &[("tier", "front")]);
    daemon.state.put("b", VmPhase::Running, &[]);
    assert_eq!(
        run(&daemon, &["wait", "a", "b", "--for", "phase=Running"]),
        done("vm/a is Running\nvm/b is Running\n")
    );
    assert_eq!(
        run(&daemon, &["wait", "-l", "tier=front", "--for", "condition=ready"]),
        done("vm/a has ready=true\n")
    );
    assert_eq!(
        run(&daemon, &["wait", "nope", "--for", "deleted"]),
        done("vm/nope is deleted\n")
    );
    let (code, _, said) = run(&daemon, &["wait", "nope", "--for", "phase=Running"]);
    assert!(code == 3 && said.contains("vm/nope does not exist"), "{said}");
}

#[test]
fn it_ends_when_the_last_of_them_is_as_wanted() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Starting, &[]);
    daemon.state.put("b", VmPhase::Starting, &[]);
    let child = begin(&daemon, &["--all", "--for", "phase=running"]);
    change(&daemon, "b", VmPhase::Running);
    change(&daemon, "a", VmPhase::Running);
    assert_eq!(end(child), (0, "vm/b is Running\nvm/a is Running\n".into()));
}

#[test]
fn a_deletion_is_waited_for() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Stopped, &[]);
    let deleted = begin(&daemon, &["a", "--for", "deleted"]);
    daemon.state.announce(WatchEventType::Deleted, "a");
    assert_eq!(end(deleted), (0, "vm/a is deleted\n".into()));
}

#[test]
fn a_deletion_is_a_failure_of_every_other_wait() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Stopped, &[]);
    let running = begin(&daemon, &["a", "--for", "phase=Running"]);
    daemon.state.announce(WatchEventType::Deleted, "a");
    assert_eq!(end(running), (3, String::new()));
}

#[test]
fn a_wait_that_takes_too_long_says_how_it_is() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Stopped, &[]);
    let (code, out, said) = run(
        &daemon,
        &["wait", "a", "--for", "phase=Running", "--timeout", "1s"],
    );
    assert_eq!((code, out.as_str()), (10, ""));
    assert_eq!(
        said,
        "error: vm/a did not reach the wanted state (is Running) in time: it is Stopped\n"
    );
}

#[test]
fn it_goes_on_when_the_daemon_is_restarted() {
    let mut daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Starting, &[]);
    let child = begin(&daemon, &["a", "--for", "phase=Running"]);
    daemon.restart();
    daemon.state.put("a", VmPhase::Running, &[]);
    assert_eq!(end(child), (0, "vm/a is Running\n".into()));
}

#[test]
fn operations_are_waited_for_by_id_and_by_vm() {
    let daemon = Daemon::start();
    daemon.state.put("a", VmPhase::Running, &[]);
    daemon.state.operation("op-7", "a");
    assert_eq!(
        run(&daemon, &["wait", "a", "--for", "operation"]),
        done("vm/a has no operation in progress\n")
    );
    assert_eq!(
        run(&daemon, &["wait", "operation/op-7"]),
        done("operation/op-7 is complete\n")
    );
    assert_eq!(run(&daemon, &["wait", "operation/nope"]).0, 3);
    assert_eq!(run(&daemon, &["wait", "a"]).0, 2, "a VM needs --for");
    assert_eq!(run(&daemon, &["wait", "--for", "deleted"]).0, 2);
}
