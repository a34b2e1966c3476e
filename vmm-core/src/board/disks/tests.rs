//! Disks of a machine without KVM, whose images are opened when a test says so.

use std::{
    sync::{
        Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use block::RawImage;
use vm_memory::GuestAddress;
use vmm_base::GuestMemory;

use super::*;
use crate::{
    board::{leaving::Leaving, silent::Silent},
    lifecycle::{Detached, Input, Notice, Notifier},
};

const PATIENCE: Duration = Duration::from_secs(20);

/// Disks, the notices that come of them, and what opens an image or makes it fail.
struct Rig {
    disks: Disks,
    notices: Receiver<Input>,
    open: Sender<Result<(), Failure>>,
}

impl Rig {
    fn new() -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let (sender, notices) = channel();
        let silent = Arc::new(Silent);
        let sockets = Sockets::of(memory, silent.clone(), silent.clone(), Notifier::new(sender));
        let (open, told) = channel::<Result<(), Failure>>();
        let told = Mutex::new(told);
        let opener: Opener = Arc::new(move |_, _| {
            told.lock().unwrap().recv().unwrap()?;
            let file = tempfile::tempfile().unwrap();
            file.set_len(1 << 20).unwrap();
            Ok(Box::new(RawImage::open(file.into(), false).unwrap()))
        });
        let topology = Topology::for_cores(1).unwrap();
        let disks = Disks::with(sockets, HotPlug::new(silent), Groups::new(), topology, opener);
        Self { disks, notices, open }
    }

    fn attach(&mut self, request: u64, name: &str, slot: u32) -> Result<(), Failure> {
        let disk = vmm::Disk {
            name: name.into(),
            pci_slot: slot,
            ..vmm::Disk::default()
        };
        let fd = tempfile::tempfile().unwrap().into();
        self.disks.attach(token(request), &disk, vec![fd])
    }

    fn detach(&mut self, request: u64, name: &str, force: bool) -> Result<Progress, Failure> {
        self.disks.detach(token(request), name, force)
    }

    /// Runs the part of a machine's reset that concerns disks. Returns the disk that the reset
    /// waits for.
    fn reset(&mut self, deadline: Instant) -> Result<Option<String>, Failure> {
        for slot in self.disks.hotplug.reset() {
            self.disks.sockets.pci.remove(slot, &self.disks.sockets.mmio);
        }
        let pci = &self.disks.sockets.pci;
        self.disks.hotplug.power_on(|slot| pci.is_taken(slot));
        self.disks.wait_for_leaving(deadline)
    }

    /// Waits for the next notice.
    fn notice(&self) -> Notice {
        match self.notices.recv_timeout(PATIENCE).unwrap() {
            Input::Notice(notice) => notice,
            other => panic!("{other:?}"),
        }
    }

    /// Requests that are answered by now, and how.
    fn answers(&mut self) -> Vec<(u64, Result<(), ErrorKind>)> {
        let answers = self.disks.collect_answers().into_iter();
        answers
            .map(|(token, result)| (token.request, result.map_err(|failure| failure.kind)))
            .collect()
    }

    fn names(&self) -> Vec<String> {
        self.disks.stats().into_iter().map(|disk| disk.name).collect()
    }
}

fn token(request: u64) -> Token {
    Token {
        connection: 1,
        request,
    }
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn gone(name: &str, forced: bool) -> Vec<Detached> {
    let name = name.to_owned();
    vec![Detached {
        what: Pluggable::Disk,
        name,
        forced,
    }]
}

#[test]
fn attach_completes_when_the_image_is_open_and_nothing_waits() {
    let mut rig = Rig::new();
    rig.attach(1, "data", 5).unwrap();
    // A pause and a reset find nothing to wait for.
    assert_eq!(rig.disks.wait_for_leaving(Instant::now()), Ok(None));
    assert_eq!(rig.reset(Instant::now()), Ok(None));
    assert_eq!(rig.answers(), []);
    assert!(rig.names().is_empty());
    assert!(!rig.disks.sockets.pci.is_taken(5));
    rig.open.send(Ok(())).unwrap();
    assert_eq!(rig.notice(), Notice::ImageOpened);
    assert_eq!(rig.answers(), [(1, Ok(()))]);
    assert_eq!(rig.names(), ["data"]);
    assert!(rig.disks.sockets.pci.is_taken(5));
}

#[test]
fn name_and_slot_are_taken_while_an_image_opens() {
    let mut rig = Rig::new();
    rig.attach(1, "data", 5).unwrap();
    for (name, slot) in [("data", 6), ("other", 5)] {
        assert_eq!(rig.attach(2, name, slot).unwrap_err().kind, ErrorKind::State);
    }
    assert_eq!(
        rig.disks.resize("data", None).unwrap_err().kind,
        ErrorKind::NotFound
    );
    let failure = Failure::of(ErrorKind::Image, "no qcow2 image");
    rig.open.send(Err(failure)).unwrap();
    assert_eq!(rig.notice(), Notice::ImageOpened);
    assert_eq!(rig.answers(), [(1, Err(ErrorKind::Image))]);
    rig.attach(3, "data", 5).unwrap();
    rig.open.send(Ok(())).unwrap();
    assert_eq!(rig.notice(), Notice::ImageOpened);
    assert_eq!(rig.answers(), [(3, Ok(()))]);
}

#[test]
fn detach_cancels_an_attach_and_ends_with_the_closed_image() {
    for force in [false, true] {
        let mut rig = Rig::new();
        rig.attach(1, "data", 5).unwrap();
        let expected = if force { Progress::Pending } else { Progress::Done };
        assert_eq!(rig.detach(2, "data", force), Ok(expected));
        assert_eq!(rig.disks.collect_detached(), []);
        assert_eq!(rig.answers(), [(1, Err(ErrorKind::State))]);
        assert_eq!(rig.disks.next_deadline().is_some(), force);
        // The image may be locked, so the name stays taken. A wait for leaving disks ignores a disk
        // that was never plugged in.
        assert_eq!(rig.attach(3, "data", 5).unwrap_err().kind, ErrorKind::State);
        assert_eq!(rig.disks.wait_for_leaving(Instant::now()), Ok(None));
        rig.open.send(Ok(())).unwrap();
        assert_eq!(rig.notice(), Notice::ImageOpened);
        assert_eq!(rig.notice(), Notice::Unplugged);
        assert_eq!(rig.disks.collect_detached(), gone("data", force));
        let answered: &[_] = if force { &[(2, Ok(()))] } else { &[] };
        assert_eq!(rig.answers(), answered);
        assert_eq!(rig.disks.next_deadline(), None);
        assert!(rig.names().is_empty());
        rig.attach(4, "data", 5).unwrap();
    }
}

#[test]
fn machine_end_leaves_an_image_to_the_opening_thread() {
    let mut rig = Rig::new();
    rig.attach(1, "data", 5).unwrap();
    let Rig { disks, notices, open } = rig;
    drop(disks);
    open.send(Ok(())).unwrap();
    // The thread ends and drops the last sender of notices.
    while notices.recv_timeout(PATIENCE).is_ok() {}
    assert_eq!(
        notices.recv_timeout(PATIENCE).unwrap_err(),
        std::sync::mpsc::RecvTimeoutError::Disconnected
    );
}

#[test]
fn disk_with_requests_in_flight_delays_a_reset_and_its_end() {
    let mut rig = Rig::new();
    let (tell_gone, receiver) = channel();
    let mut leaving = Leaving::new(Pluggable::Disk, "data".into(), true, true, receiver);
    leaving.waiting.push((token(1), Instant::now()));
    leaving.waiting.push((token(2), soon()));
    rig.disks.add_leaving(leaving);
    assert_eq!(rig.disks.collect_detached(), []);
    assert_eq!(
        rig.answers(),
        [(1, Err(ErrorKind::Internal))],
        "its time has come"
    );
    let waits = Ok(Some("disk data".to_owned()));
    assert_eq!(rig.disks.wait_for_leaving(Instant::now()), waits);
    assert_eq!(rig.reset(Instant::now()), waits);
    tell_gone.send(()).unwrap();
    assert_eq!(rig.disks.wait_for_leaving(Instant::now()), Ok(None));
    assert_eq!(rig.disks.collect_detached(), gone("data", true));
    assert_eq!(rig.answers(), [(2, Ok(()))]);
}

#[test]
fn a_disk_that_can_not_be_ended_is_lost_and_never_told_as_gone() {
    let mut rig = Rig::new();
    let (tell_gone, receiver) = channel();
    let mut leaving = Leaving::new(Pluggable::Disk, "data".into(), true, true, receiver);
    leaving.waiting.push((token(1), soon()));
    rig.disks.add_leaving(leaving);
    drop(tell_gone);
    // At once: there is nothing to wait for.
    assert!(rig.disks.wait_for_leaving(soon()).is_err());
    assert_eq!(rig.disks.collect_detached(), []);
    assert_eq!(rig.answers(), [(1, Err(ErrorKind::Internal))]);
    assert!(rig.disks.wait_for_leaving(soon()).is_err());
}

#[test]
fn drive_at_a_sata_port_is_one_of_the_disks_that_stays() {
    let mut rig = Rig::new();
    let at_port = |name: &str| vmm::Disk {
        name: name.into(),
        sata_port: Some(2),
        ..vmm::Disk::default()
    };
    let topology = Topology::for_cores(1).unwrap();
    let spec = machine::Disk::new(&at_port("root"), 1, topology, |_| false).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let image = Box::new(RawImage::open(file.into(), false).unwrap());
    let _drive = rig.disks.fit_drive(&spec, false, image).unwrap();
    assert_eq!(rig.names(), ["root"]);
    rig.disks.resize("root", Some(2 << 20)).unwrap();
    assert_eq!(rig.disks.stats()[0].capacity_bytes, 2 << 20);
    let limit = RateLimit {
        operations_per_second: 100,
        ..RateLimit::default()
    };
    rig.disks
        .set_rate_limit(&Target::Disk("root".into()), limit)
        .unwrap();
    rig.disks.unlock().unwrap();
    rig.disks.lock().unwrap();
    assert_eq!(rig.disks.mirror(&["root".to_owned()]).unwrap().len(), 1);

    let kind = |result: Result<Progress, Failure>| result.err().map(|failure| failure.kind);
    assert_eq!(kind(rig.detach(1, "root", true)), Some(ErrorKind::State));
    assert!(rig.attach(2, "root", 5).is_err());
    let fd = tempfile::tempfile().unwrap().into();
    let attached = rig.disks.attach(token(3), &at_port("data"), vec![fd]);
    assert_eq!(attached.unwrap_err().kind, ErrorKind::State);
    assert_eq!(rig.names(), ["root"]);
}
