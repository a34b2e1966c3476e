//! Disks that come and go while a guest runs that knows nothing of them.

use std::fs::{File, OpenOptions};

use vmm_protocol::vmm::{
    DetachDisk, ErrorKind, GetDiskStats, GetMachineStats, Pause, ResizeDisk, Resume, State, Stop, event,
    request::Op, response::Result as Answer,
};

use crate::{boot, guest, kind, process::Client, process::Vmm, state};

const SIZE: u64 = 1 << 20;

fn image(dir: &tempfile::TempDir, name: &str) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true);
    let file = options.truncate(false).open(dir.path().join(name)).unwrap();
    if file.metadata().unwrap().len() == 0 {
        file.set_len(SIZE).unwrap();
    }
    file
}

fn detach(client: &mut Client, name: &str, force: bool) -> Answer {
    client.ask(Op::DetachDisk(DetachDisk {
        name: name.into(),
        force,
    }))
}

fn capacities(client: &mut Client) -> Vec<(String, u64)> {
    match client.ask(Op::GetDiskStats(GetDiskStats {})) {
        Answer::DiskStats(stats) => {
            let disks = stats.disks.into_iter();
            disks.map(|disk| (disk.name, disk.capacity_bytes)).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_machine_counts_its_exits_and_the_time_of_its_vcpus() {
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start();
    let mut client = vmm.client();
    let stats = Op::GetMachineStats(GetMachineStats {});
    assert_eq!(kind(&client.ask(stats.clone())), ErrorKind::State);
    boot(
        &mut client,
        &guest::program(&[guest::PRINT_HI, guest::HALT].concat()),
    );
    // A vCPU that is paused at once has never run.
    vmm.wait_for_serial("hi");
    client.attach(&image(&dir, "a"), "a", 5);
    client.ask(Op::Pause(Pause {}));
    let Answer::MachineStats(stats) = client.ask(stats) else {
        panic!("no counters");
    };
    assert_eq!(stats.vcpus.len(), 1);
    assert!(stats.vcpus[0].time_ns > 0, "{stats:?}");
    assert!(
        stats.exits.get("exits").is_some_and(|exits| *exits > 0),
        "{stats:?}"
    );
    assert_eq!(stats.disks.len(), 1);
    client.ask(Op::Stop(Stop {}));
}

#[test]
fn disks_change_while_the_machine_is_paused() {
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start();
    let mut client = vmm.client();
    assert_eq!(kind(&client.attach(&image(&dir, "a"), "a", 5)), ErrorKind::State);
    boot(&mut client, &guest::program(guest::HALT));

    assert_eq!(state(&client.attach(&image(&dir, "a"), "a", 5)), State::Running);
    for (file, name, slot, expected) in [
        ("b", "b", 5, ErrorKind::State),
        ("b", "a", 6, ErrorKind::State),
        ("b", "b", 1, ErrorKind::State),
        ("b", "b", 0, ErrorKind::Invalid),
        ("b", "b", 32, ErrorKind::Invalid),
        ("a", "b", 6, ErrorKind::InUse),
    ] {
        let answer = client.attach(&image(&dir, file), name, slot);
        assert_eq!(kind(&answer), expected, "{file} {name} {slot}: {answer:?}");
    }
    client.ask(Op::Pause(Pause {}));
    assert_eq!(state(&client.attach(&image(&dir, "b"), "b", 4)), State::Paused);
    assert_eq!(
        capacities(&mut client),
        [("b".to_owned(), SIZE), ("a".to_owned(), SIZE)]
    );
    let resize = |capacity_bytes| {
        let name = "b".into();
        Op::ResizeDisk(ResizeDisk { name, capacity_bytes })
    };
    assert_eq!(state(&client.ask(resize(2 * SIZE))), State::Paused);
    assert_eq!(kind(&client.ask(resize(SIZE))), ErrorKind::Invalid);
    assert_eq!(image(&dir, "b").metadata().unwrap().len(), 2 * SIZE);
    assert_eq!(state(&client.ask(Op::Resume(Resume {}))), State::Running);

    assert_eq!(kind(&detach(&mut client, "none", true)), ErrorKind::NotFound);
    // The guest never answers.
    assert_eq!(state(&detach(&mut client, "a", false)), State::Running);
    assert_eq!(state(&detach(&mut client, "a", true)), State::Running);
    let gone = client.wait_for_event(|kind| match kind {
        event::Kind::DiskDetached(gone) => Some((gone.name.clone(), gone.forced)),
        _ => None,
    });
    assert_eq!(gone, ("a".to_owned(), true));
    // Image, name and slot are free.
    assert_eq!(state(&client.attach(&image(&dir, "a"), "a", 5)), State::Running);
    client.ask(Op::Stop(Stop {}));
}
