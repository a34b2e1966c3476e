//! Messages of a `vmm` under the control of its guest.

use std::{
    io::Write,
    os::unix::{fs::FileExt, net::UnixStream},
    process::{self, Command, Stdio},
    sync::{Arc, Weak},
};

use prost::Message as _;
use vmm_protocol::{
    vmm::{
        DeviceError, DiskDetached, DiskStats, DiskStatsReply, Event, ExitRecord, Message, Response, State,
        StateChanged, Status, event::Kind as EventKind, message::Kind, response::Result as Outcome,
    },
    wire,
};

use crate::guest::Guest;

/// Leaves a child behind that shares only its user and its cgroup with this process.
pub fn fork(guest: &Guest) {
    let mut sleep = Command::new("/bin/sleep");
    sleep
        .arg("1000")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // The child must not be waited for.
    std::mem::forget(sleep.spawn().unwrap());
    guest.print("forked\r\n");
}

/// Asks a file system that does not answer, on a thread of its own: as long as it waits, nothing ends the process.
pub fn stick(path: &str) {
    let path = path.to_owned();
    std::thread::spawn(move || std::fs::metadata(path));
}

/// Tells a lie.
pub fn tell(guest: &Guest, word: &str, controls: &[Weak<UnixStream>]) {
    match word {
        // Long, with what clears a terminal.
        "text" => guest.tell(error("disk root", &"\u{1b}[2J\n".repeat(30_000))),
        "device" => guest.tell(error("disk \u{1b}[2J", "m")),
        "disk" => guest.tell(EventKind::DiskDetached(DiskDetached {
            name: "d".repeat(100_000),
            forced: false,
        })),
        "flood" => {
            for number in 0..3000 {
                let kind = Some(error("disk root", &format!("error {number}")));
                let event = Message {
                    kind: Some(Kind::Event(Event { kind })),
                };
                send_to_all(controls, &event);
            }
        }
        // Paused and running, over and over again.
        "flap" => {
            for number in 0..3000 {
                let state = if number % 2 == 0 {
                    State::Paused
                } else {
                    State::Running
                };
                let status = Some(Status {
                    state: state.into(),
                    ..Status::default()
                });
                let kind = Some(EventKind::StateChanged(StateChanged { status }));
                let event = Message {
                    kind: Some(Kind::Event(Event { kind })),
                };
                send_to_all(controls, &event);
            }
        }
        // Into its log files, as fast as it can.
        "logs" => {
            let line = [b'x'; 64 << 10];
            for _ in 0..256 {
                std::io::stderr().write_all(&line).unwrap();
                guest.print_to_log(&line);
            }
        }
        // Two bytes for each of many structures.
        "many" => send_to_all(controls, &disks(100_000)),
        "long" => send_to_all(controls, &disks(140_000)),
        "garbage" => {
            for stream in controls.iter().filter_map(Weak::upgrade) {
                let _ = (&*stream).write_all(&[0xff; 64]);
            }
        }
        // Ends with a record whose time is not representable.
        "time" => {
            let record = ExitRecord {
                kind: 1,
                message: "bye".into(),
                time_unix_ms: u64::MAX,
            };
            guest
                .exit_file()
                .write_all_at(&record.encode_to_vec(), 0)
                .unwrap();
            process::exit(0);
        }
        // Killed, but it says that all was well.
        "kind" => {
            let record = ExitRecord {
                kind: 1,
                message: "all is well".into(),
                time_unix_ms: 1,
            };
            guest
                .exit_file()
                .write_all_at(&record.encode_to_vec(), 0)
                .unwrap();
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
        _ => {}
    }
    guest.print(&format!("lied {word}\r\n"));
}

fn error(device: &str, message: &str) -> EventKind {
    EventKind::DeviceError(DeviceError {
        device: device.into(),
        message: message.into(),
    })
}

/// An unsolicited reply.
fn disks(count: usize) -> Message {
    Message {
        kind: Some(Kind::Response(Response {
            id: u64::MAX,
            result: Some(Outcome::DiskStats(DiskStatsReply {
                disks: vec![DiskStats::default(); count],
            })),
        })),
    }
}

fn send_to_all(controls: &[Weak<UnixStream>], message: &Message) {
    for stream in controls.iter().filter_map(Weak::upgrade) {
        let stream: Arc<UnixStream> = stream;
        let _ = wire::send_all(&*stream, message, &[]);
    }
}
