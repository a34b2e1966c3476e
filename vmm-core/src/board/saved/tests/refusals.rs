//! States that were changed after the save: refused with the name of the invalid part, or restored
//! without harm.

use proptest::{prelude::*, sample::Index};
use prost::Message;
use vmm_protocol::state::{self, Section};

use super::*;
use crate::memory::{Backing, GuestRam};

/// Spec, descriptors, memory and state of a saved machine.
pub(super) struct Saved {
    spec: MachineSpec,
    fds: Vec<OwnedFd>,
    ram: GuestRam,
    pub state: state::Machine,
}

impl Saved {
    pub fn new(vcpus: u32) -> Self {
        Self::with(vcpus, |_| {})
    }

    /// With what `program` did to the paused machine.
    pub fn with(vcpus: u32, program: fn(&Machine)) -> Self {
        let (spec, fds) = spec(vcpus, &ECHO);
        let (inputs, _notices) = channel();
        let (mut near, mut consoles) = console();
        let mut assembler = Assembler::new(consoles().unwrap());
        let clones = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let mut machine = assembler.assemble(&spec, clones, Notifier::new(inputs)).unwrap();
        machine.start().unwrap();
        near.write_all(b"a").unwrap();
        near.read_exact(&mut [0]).unwrap();
        machine.pause().unwrap();
        program(&machine);
        let state = machine.save().unwrap();
        let ram = machine.ram.clone();
        machine.halt();
        Self {
            spec,
            fds,
            ram,
            state,
        }
    }

    pub fn restore(&self, state: state::Machine) -> Result<Machine, Failure> {
        let (_near, mut consoles) = console();
        let (inputs, _notices) = channel();
        let fds = self.fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let mut assembler = Assembler::new(consoles().unwrap());
        assembler.restore(&self.spec, fds, Notifier::new(inputs), self.ram.clone(), state)
    }

    /// Why the state is refused when its sections are changed like this.
    fn refused(&self, change: impl FnOnce(&mut Vec<Section>)) -> String {
        let mut state = self.state.clone();
        change(&mut state.sections);
        match self.restore(state) {
            Err(failure) => failure.message,
            Ok(_) => panic!("it is taken"),
        }
    }
}

#[test]
fn each_section_is_needed_and_belongs_to_something() {
    let saved = Saved::new(2);
    let all = saved.state.sections.len();
    let ids: Vec<&str> = saved
        .state
        .sections
        .iter()
        .map(|section| section.id.as_str())
        .collect();
    for id in [
        "machine",
        "serial",
        "disk root",
        "disk data",
        "balloon",
        "rng",
        "vcpu 0",
        "vcpu 1",
        "kvmclock",
    ] {
        assert!(ids.contains(&id), "{id} of {ids:?}");
    }
    for index in 0..all {
        let id = &saved.state.sections[index].id;
        let lacking = saved.refused(|sections| drop(sections.remove(index)));
        assert_eq!(
            lacking,
            format!("checking the machine's state: the state has no section `{id}`")
        );
        let twice = saved.refused(|sections| sections.push(sections[index].clone()));
        assert!(
            twice.contains(&format!("section `{id}`")) && twice.ends_with("is there twice"),
            "{twice}"
        );
        let renamed = saved.refused(|sections| sections[index].id.push('x'));
        assert!(renamed.contains(&format!("no section `{id}`")), "{renamed}");
        let kind = saved.refused(|sections| sections[index].kind = "toaster".to_owned());
        assert!(
            kind.contains(id) && kind.contains("is of kind `toaster`"),
            "{kind}"
        );
        let version = saved.refused(|sections| sections[index].version = 99);
        assert!(
            version.contains(id) && version.contains("has version 99"),
            "{version}"
        );
        let cut = saved.refused(|sections| {
            let payload = &mut sections[index].payload;
            payload.insert(0, 0xff);
        });
        assert!(cut.contains(id) && cut.contains("decode"), "{cut}");
    }
    let more = saved.refused(|sections| {
        let mut disk = sections
            .iter()
            .find(|section| section.id == "disk root")
            .unwrap()
            .clone();
        disk.id = "disk other".to_owned();
        sections.push(disk);
    });
    assert!(
        more.contains("nothing that section `disk other` of kind `virtio-pci` is the state of"),
        "{more}"
    );
    saved.restore(saved.state.clone()).unwrap();
}

#[test]
fn a_machine_that_was_built_otherwise_does_not_take_the_state() {
    let mut saved = Saved::new(2);
    let message = |saved: &Saved| saved.restore(saved.state.clone()).err().unwrap().message;
    let whole = saved.spec.clone();
    saved.spec.disks[0].pci_slot = 11;
    assert!(
        message(&saved).contains("\"disk root\" in PCI slot 10, this one has \"disk root\" in PCI slot 11")
    );
    saved.spec = whole.clone();
    saved.spec.disks.truncate(1);
    assert!(message(&saved).contains("\"disk data\" in PCI slot 33, this one has no more devices"));
    saved.spec = whole.clone();
    saved.spec.vcpus = 3;
    assert!(message(&saved).contains("field `apic_ids`"));
    saved.spec = whole;
    saved.spec.memory_bytes *= 2;
    assert!(message(&saved).contains("bytes of memory"));
    saved.ram = GuestRam::new(saved.spec.memory_bytes, Backing::Private).unwrap();
    assert!(message(&saved).contains("field `memory_bytes`"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]
    /// Random changes of bytes in the sections of devices, buses and controllers. The vCPU has
    /// tests of its own, since KVM checks the values of a vCPU's state.
    #[test]
    fn damaged_bytes_are_refused_with_a_message_or_do_no_harm(
        changes in prop::collection::vec((any::<Index>(), any::<Index>(), any::<u8>()), 1..4),
    ) {
        static SAVED: std::sync::LazyLock<Saved> = std::sync::LazyLock::new(|| Saved::new(1));
        let mut state = SAVED.state.clone();
        for (section, at, value) in &changes {
            let mut candidates: Vec<&mut Section> = state
                .sections
                .iter_mut()
                .filter(|section| section.kind != "vcpu" && !section.payload.is_empty())
                .collect();
            let section = section.index(candidates.len());
            let section = &mut candidates[section];
            let length = section.payload.len();
            section.payload[at.index(length)] = *value;
        }
        match SAVED.restore(state) {
            Err(failure) => prop_assert!(failure.message.contains(": "), "{}", failure.message),
            // It is a machine like any other: it can be saved and reset.
            Ok(mut machine) => {
                let _saved = machine.save();
                machine.reset().unwrap();
            }
        }
    }

    #[test]
    fn damaged_bytes_of_the_whole_are_no_panic(
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 1..4),
        length in any::<Index>(),
    ) {
        static SAVED: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| Saved::new(1).state.encode_to_vec());
        let mut bytes = SAVED.clone();
        for (at, value) in &changes {
            let place = at.index(bytes.len());
            bytes[place] = *value;
        }
        bytes.truncate(length.index(bytes.len() * 4));
        if let Ok(state) = state::Machine::decode(bytes.as_slice()) {
            let _sections = super::super::Sections::new(state.sections);
        }
    }
}
