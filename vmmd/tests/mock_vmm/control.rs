//! The control socket.

use std::{
    fs::File,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process,
    sync::{Arc, Mutex, mpsc::sync_channel},
    thread,
};

use vmm_protocol::{
    machine::Machine,
    vmm::{
        Boot, Error, ErrorKind, ExitKind, HelloReply, Message, PauseReason, Request, Response, State, Status,
        message::Kind, request::Op, response::Result as Outcome,
    },
    wire,
};

use crate::{
    balloon, console,
    disks::{self, Plugged},
    guest::Guest,
    lies, nics, shares, snapshot, vsock,
};

pub fn serve(guest: &Guest, stream: &Arc<UnixStream>) {
    if !guest.is_controlled_by(stream) {
        return;
    }
    let (sender, receiver) = sync_channel(1024);
    let sending = Mutex::new(());
    thread::scope(|scope| {
        scope.spawn(|| {
            for event in receiver {
                let _whole = sending.lock().unwrap();
                let message = Message {
                    kind: Some(Kind::Event(event)),
                };
                if wire::send_all(stream, &message, &[]).is_err() {
                    return;
                }
            }
        });
        let reply = |id, result| {
            let _whole = sending.lock().unwrap();
            let message = Message {
                kind: Some(Kind::Response(Response {
                    id,
                    result: Some(result),
                })),
            };
            wire::send_all(stream, &message, &[]).is_ok()
        };
        // A Save that waits for a Release, with its answer. Without an answer, only a Release that
        // gives up ends it.
        let mut kept: Option<(u64, Option<Outcome>)> = None;
        let mut frames = wire::Receiver::new();
        while let Ok(Some((message, fds))) = wire::receive(stream, &mut frames) {
            let Some(Kind::Request(Request {
                id,
                op: Some(op),
                trace_id,
            })) = message.kind
            else {
                return;
            };
            eprintln!("asked as part of \"{trace_id}\"");
            if matches!(op, Op::Hello(_)) {
                guest.listen(sender.clone());
            }
            let save = match &op {
                Op::Save(save) => Some(save.clone()),
                _ => None,
            };
            if let Op::Release(release) = &op
                && let Some((id, saved)) = kept.take_if(|(_, saved)| release.give_up || saved.is_some())
            {
                snapshot::released(guest);
                let saved = saved.filter(|_| !release.give_up);
                reply(id, saved.unwrap_or_else(|| snapshot::given_up(guest)));
            }
            let Some(result) = carry_out(guest, op, fds) else {
                kept = save.map(|_| (id, None)).or(kept);
                continue;
            };
            if let Some(save) = save.filter(|save| save.keep_paused || save.disks_alone)
                && matches!(result, Outcome::Saved(_))
            {
                snapshot::quiet(guest, save.number);
                kept = Some((id, Some(result)));
                continue;
            }
            if !reply(id, result) {
                return;
            }
        }
        drop(sender);
    });
}

fn carry_out(guest: &Guest, op: Op, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let status = match op {
        Op::Hello(_) => {
            return Some(Outcome::Hello(HelloReply {
                major: wire::MAJOR,
                minor: wire::MINOR,
                build: "mock".into(),
                features: Vec::new(),
                status: Some(guest.status()),
                pid: process::id(),
            }));
        }
        Op::Boot(boot) => return boot_machine(guest, &boot, fds),
        Op::Pause(_) if guest.option("mock.pause").as_deref() == Some("hang") => return None,
        Op::Pause(_) if guest.option("mock.pause").as_deref() == Some("fade") => guest.fade(),
        Op::Pause(_) => change(guest, State::Paused)?,
        // As with a lock server that does not answer.
        Op::Resume(_)
            if guest
                .option("mock.locks")
                .is_some_and(|path| !std::path::Path::new(&path).exists()) =>
        {
            return refuse(ErrorKind::Image, "lock disk root: No locks available");
        }
        Op::Resume(_) => {
            let status = change(guest, State::Running)?;
            if guest.option("mock.resume").is_some() {
                guest.stall("data");
            }
            status
        }
        Op::PowerButton(_) => {
            let heard = guest.status().state() == State::Running && guest.option("mock.power").is_none();
            if heard {
                guest.end(ExitKind::PowerOff, "");
            }
            guest.status()
        }
        Op::Stop(_) => guest.end(ExitKind::Stopped, ""),
        Op::GetStatus(_) => guest.status(),
        Op::AttachNic(request) => return nics::attach(guest, request, fds),
        Op::DetachNic(request) => return nics::detach(guest, &request),
        Op::AttachDisk(request) => return disks::attach(guest, request, fds),
        Op::DetachDisk(request) => return disks::detach(guest, &request),
        Op::ChangeMedium(request) => return disks::change_medium(guest, request, fds),
        Op::ResizeDisk(request) => return disks::resize(guest, &request),
        Op::SetRateLimit(request) => return disks::limit(guest, &request),
        Op::GetDiskStats(_) => return disks::stats(guest),
        Op::ResetMachine(_) => {
            guest.type_in(b"reset by the host\n");
            guest.status()
        }
        Op::InjectNmi(_) => {
            guest.type_in(b"an NMI\n");
            guest.status()
        }
        Op::GetMachineStats(_) => return disks::machine_stats(guest),
        Op::SetBalloon(request) => return balloon::set(guest, request),
        Op::Save(request) => return snapshot::save(guest, &request, fds),
        Op::Release(_) if guest.status().pause_reason() == PauseReason::Snapshot => {
            change(guest, State::Running)?
        }
        Op::Release(_) => guest.status(),
        Op::UnlockDisks(_) => guest.status(),
        Op::Send(request) => return snapshot::send(guest, &request, fds),
        Op::UpdateNic(update) => {
            let line = format!("nic {} link {:?}\n", update.name, update.link_up);
            guest.type_in(line.as_bytes());
            guest.status()
        }
        Op::SendBreak(_) => {
            guest.type_in(b"a break\n");
            guest.status()
        }
        Op::ResizeConsole(size) => {
            guest.type_in(format!("a terminal of {}x{}\n", size.columns, size.rows).as_bytes());
            guest.status()
        }
        Op::SetShareBackend(set) => {
            guest.type_in(format!("share {} has a new process\n", set.name).as_bytes());
            return shares::renew(guest, &set.name, fds);
        }
        Op::AttachShare(request) => return shares::attach(guest, request, fds),
        Op::DetachShare(request) => return shares::detach(guest, &request),
        Op::OpenVsock(request) => return vsock::open(guest, request, fds),
    };
    Some(Outcome::Status(status))
}

fn change(guest: &Guest, state: State) -> Option<Status> {
    Some(guest.set_state(state))
}

fn boot_machine(guest: &Guest, boot: &Boot, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let wire = boot.machine.clone().unwrap();
    let machine = match Machine::new(&wire, fds.len()) {
        Ok(machine) => machine,
        Err(problems) => return refuse(ErrorKind::Invalid, &problems.to_string()),
    };
    let kernel = wire.kernel.as_ref();
    let cmdline = kernel.map_or("", |kernel| kernel.cmdline.as_str());
    let mut words = cmdline.split(' ');
    match words.clone().find_map(|word| word.strip_prefix("mock.boot=")) {
        Some("image") => return refuse(ErrorKind::Image, "the kernel is no bzImage"),
        Some("kvm") => return refuse(ErrorKind::Kvm, "the host's KVM can't run guests"),
        Some("exit") => guest.end(ExitKind::StartFailed, "no luck at all"),
        Some("hang") => return None,
        Some(word) => {
            if let Some(path) = word.strip_prefix("stick:") {
                lies::stick(path);
                return None;
            }
        }
        None => {}
    }
    let alone = words.find_map(|word| word.strip_prefix("mock.alone="));
    if alone.is_some_and(|word| !guest.take_name(&format!("{word} {}", wire.name))) {
        return refuse(ErrorKind::Invalid, "the machine runs already");
    }
    let mut fds: Vec<_> = fds.into_iter().map(Some).collect();
    let log = machine
        .serial_log
        .map(|(current, _)| File::from(fds[current.0].take().unwrap()));
    let restored = boot.restore.as_ref().map(|restore| {
        let file = fds[restore.snapshot_fd as usize].take().unwrap();
        if restore.stream {
            if cmdline.split(' ').any(|word| word == "mock.receive=hang") {
                snapshot::never_read(&file);
            }
            return snapshot::receive(file).map(|text| format!("received {text}"));
        }
        let suffix = if restore.on_demand { " on demand" } else { "" };
        snapshot::read(file).map(|text| format!("restored from {text}{suffix}"))
    });
    if let Some(None) = restored {
        return refuse(ErrorKind::Invalid, "the snapshot is damaged");
    }
    if let Some(socket) = machine.console.as_ref().and_then(|console| console.socket) {
        console::serve_hvc(&wire.name, fds[socket.0].take().unwrap().into());
    }
    if let Some(display) = &machine.display {
        for (what, socket) in [("screen", display.vnc), ("view", display.vnc_view)] {
            let socket = socket.map(|index| fds[index.0].take().unwrap());
            if let Some(socket) = socket {
                console::serve_screen(&format!("{what} of {}", wire.name), socket.into());
            }
        }
    }
    let disks = wire.disks.iter().cloned();
    let disks: Vec<_> = disks.map(|disk| Plugged::new(disk, &mut fds)).collect();
    guest.disks().extend(disks);
    let restored = match restored {
        Some(_) if cmdline.contains("mock.receive=full") => {
            return refuse(ErrorKind::Resources, "writing disk root: No space left on device");
        }
        Some(Some(text)) => {
            let names = boot.restore.as_ref().map(|restore| restore.disks.as_slice());
            match snapshot::take_disks(guest, &text, names.unwrap_or_default()) {
                Some(text) => Some(text),
                None => return refuse(ErrorKind::Invalid, "the snapshot is damaged"),
            }
        }
        _ => None,
    };
    nics::boot(guest, &wire, &mut fds);
    shares::boot(guest, &wire, &mut fds);
    let fds = fds.into_iter().flatten().collect();
    let status = guest.boot(&wire, log, fds);
    if let Some(text) = restored {
        guest.print(&format!("{text}\r\n"));
        if text.ends_with(snapshot::PANICKED) {
            guest.type_in(b"halt\n");
        }
    }
    if boot.paused {
        return Some(Outcome::Status(guest.set_state(State::Paused)));
    }
    guest.runs(true);
    Some(Outcome::Status(status))
}

pub fn refuse(kind: ErrorKind, message: &str) -> Option<Outcome> {
    Some(Outcome::Error(Error {
        message: message.into(),
        kind: kind.into(),
    }))
}
