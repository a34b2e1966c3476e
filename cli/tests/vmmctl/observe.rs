//! Events, usage of VMs, and data for troubleshooting.

use std::{collections::BTreeMap, io::Read as _};

use vmmd_api::v1::VmPhase;

use crate::support::{Daemon, line as run};

fn with_vm() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon
}

#[test]
fn events_are_a_table_or_a_document_a_line() {
    let daemon = with_vm();
    insta::assert_snapshot!(run(&daemon, "events").1, @r#"
TIME                   SEVERITY   OBJECT   REASON       MESSAGE
2023-11-14T22:13:21Z   Normal     vm/web   Started      what happened was Started
2023-11-14T22:13:22Z   Warning    vm/web   GuestPanic   what happened was GuestPanic (2 times)
"#);
    let warnings = run(&daemon, "events --severity warning -o json").1;
    assert_eq!(warnings.lines().count(), 1);
    let json: serde_json::Value = serde_json::from_str(&warnings).unwrap();
    assert_eq!(json["reason"], "GuestPanic");
    assert!(!run(&daemon, "events --vm db").1.contains("Started"));
    // Both are of the year 2023.
    assert!(!run(&daemon, "events --since 2h").1.contains("Started"));
    assert!(run(&daemon, "events --since 30000d").1.contains("Started"));
    assert!(run(&daemon, "describe vm web").1.contains("Last events:"));
}

#[test]
fn event_watch_continues_from_its_cursor() {
    let daemon = with_vm();
    let mut running = daemon.begin(&["events", "-w", "-o", "json"]);
    let mut reason = || {
        let json: serde_json::Value = serde_json::from_str(&running.line()).unwrap();
        json["reason"].as_str().unwrap().to_owned()
    };
    assert_eq!([reason(), reason()], ["Started", "GuestPanic"]);
    while daemon.state.event_watchers() == 0 {
        std::thread::yield_now();
    }
    daemon.state.tell(7, "Ended");
    assert_eq!(reason(), "Ended");
    // It ends the first stream, and the second begins where that was.
    daemon.state.tell(8, "Last");
    assert!(running.error().contains("continuing when vmmd is back"));
    while daemon.state.calls().len() < 2 {
        std::thread::yield_now();
    }
    assert_eq!(
        daemon.state.calls(),
        ["watch events from c2", "watch events from c7"]
    );
}

#[test]
fn top_shows_rates_between_two_samples() {
    let daemon = with_vm();
    daemon.state.put("idle", VmPhase::Stopped, &[]);
    insta::assert_snapshot!(run(&daemon, "top -1 -i 10ms").1, @r#"
NAME   CPU%    STEAL%   MEMORY   READ/S   WRITE/S   IOPS   RX/S   TX/S   EXITS/S
web    150.0   5.0      300Mi    0        0         0      1Mi    0      1000
"#);
    let (code, _, problem) = run(&daemon, "top -1 nope");
    assert_eq!(code, 3);
    assert!(problem.contains("there is no VM \"nope\""), "{problem}");
}

#[test]
fn logs_are_printed_as_they_are() {
    let daemon = with_vm();
    assert_eq!(run(&daemon, "logs web").1, "serial one\nserial two\n");
    assert_eq!(
        run(&daemon, "logs web --vmm --previous").1,
        "previous vmm one\nprevious vmm two\n"
    );
    assert_eq!(run(&daemon, "logs nope").0, 3);
}

#[test]
fn log_has_no_control_sequences_without_raw() {
    let daemon = with_vm();
    daemon.state.put("rude", VmPhase::Running, &[]);
    assert_eq!(run(&daemon, "logs rude").1, "shown\n");
    assert_eq!(
        run(&daemon, "logs rude --raw").1,
        "\x1b[2J\x1b]0;mine\x07shown\r\n"
    );
    // The console is the guest's, whole.
    daemon.state.print("rude", b"\x1b[1mbold\n");
    let console = daemon
        .vmmctl()
        .args(["console", "rude"])
        .write_stdin("\x1d")
        .output()
        .unwrap();
    assert!(console.stdout.ends_with(b"\x1b[1mbold\n"), "{console:?}");
}

#[test]
fn the_end_of_a_log_is_shown_by_lines() {
    let daemon = with_vm();
    for tail in ["--tail 1", "-n 1"] {
        assert_eq!(run(&daemon, &format!("logs web {tail}")).1, "serial two\n");
    }
    assert_eq!(run(&daemon, "logs web --tail 0 --vmm").1, "");
    let (code, _, said) = run(&daemon, "logs web --since 5m");
    assert!(code == 2 && said.contains("--vmm"), "{said}");
    assert_eq!(run(&daemon, "logs web --vmm --since 5m").0, 0);
}

#[test]
fn followed_log_continues_after_a_restart() {
    let mut daemon = with_vm();
    let mut running = daemon.begin(&["logs", "web", "-f"]);
    assert_eq!(running.line(), "old output");
    daemon.state.print("web", b"more\r\n");
    daemon.restart();
    assert_eq!(running.line(), "more");
    assert_eq!(
        running.error(),
        "lost the connection to vmmd; continuing when vmmd is back"
    );
}

/// The files of an archive by name.
fn unpack(path: &std::path::Path) -> BTreeMap<String, String> {
    let file = flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap());
    let mut archive = tar::Archive::new(file);
    let files = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_str().unwrap().to_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        (name, text)
    });
    files.collect()
}

#[test]
fn archive_has_all_parts_and_names_missing_ones() {
    let daemon = with_vm();
    daemon.state.put("bare", VmPhase::Stopped, &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("web.tar.gz");
    let command = format!("diagnose web -o {}", path.display());
    let (code, _, problems) = run(&daemon, &command);
    assert_eq!((code, problems.as_str()), (0, ""));
    let files = unpack(&path);
    for (file, text) in [
        ("vm.json", "\"web\""),
        ("events.json", "GuestPanic"),
        ("stats.json", "\"usedBytes\""),
        ("node.json", "node-1"),
        ("serial.log", "serial two"),
        ("vmm.previous.log", "previous vmm one"),
        ("operations.json", "{}"),
    ] {
        assert!(files[&format!("web/{file}")].contains(text), "{file}: {files:?}");
    }
    let (code, _, problem) = run(&daemon, &command);
    assert_eq!(code, 6, "{problem}");

    let path = folder.path().join("bare.tar.gz");
    let (code, _, problems) = run(&daemon, &format!("diagnose bare -o {}", path.display()));
    assert_eq!(code, 0);
    assert!(
        problems.contains("stats.json") && problems.contains("no log today"),
        "{problems}"
    );
    assert!(!unpack(&path).contains_key("bare/vmm.log"));
}
