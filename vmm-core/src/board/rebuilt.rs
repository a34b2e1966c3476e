//! A test machine that is discarded and restored at each resume. The machine is saved, dropped with
//! all its threads and descriptors, rebuilt from its spec, and restored from the encoded state.
//! Only its memory is handed over. A feature that works on such a machine across a pause also works
//! across a migration.
//!
//! Disks and NICs that were attached after the start are not in the spec, so a machine with one is
//! not restored.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use prost::Message;
use vmm_protocol::{
    state,
    vmm::{self, ErrorKind, MachineSpec, request::Op},
};

use super::{
    assemble::{Assembler, Console},
    machine::Machine,
};
use crate::lifecycle::{self, Builder, Detached, Failure, Machine as _, Notifier, Progress, Reset, Token};
use crate::snapshot::saving::{GoesOn, Purpose, Report};

/// Makes the console of each machine.
pub type Consoles = Box<dyn FnMut() -> io::Result<Console>>;

/// Builds machines that are restored at each resume.
pub struct Rebuilder {
    consoles: Option<Consoles>,
    restores: Arc<AtomicU64>,
}

impl Rebuilder {
    /// For one machine, whose consoles `consoles` makes.
    pub fn new(consoles: Consoles) -> Self {
        Self {
            consoles: Some(consoles),
            restores: Arc::default(),
        }
    }

    /// How often the machine was restored.
    pub fn restores(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.restores)
    }

    pub(super) fn assemble(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        notifier: Notifier,
    ) -> Result<Rebuilt, Failure> {
        let Some(consoles) = self.consoles.take() else {
            return Err(gone("there was a machine already"));
        };
        let mut rebuilt = Rebuilt {
            machine: None,
            spec: spec.clone(),
            fds,
            notifier,
            consoles,
            restores: self.restores(),
        };
        let machine =
            rebuilt
                .assembler()?
                .assemble(&rebuilt.spec, rebuilt.clone_fds()?, rebuilt.notifier.clone())?;
        rebuilt.machine = Some(machine);
        Ok(rebuilt)
    }
}

impl Builder for Rebuilder {
    fn build(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        restore: Option<&vmm::Restore>,
        notifier: Notifier,
    ) -> Result<Box<dyn lifecycle::Machine>, Failure> {
        if restore.is_some() {
            return Err(gone(
                "a machine that is rebuilt at each resume begins without a snapshot",
            ));
        }
        Ok(Box::new(self.assemble(spec, fds, notifier)?))
    }
}

fn gone(why: &str) -> Failure {
    Failure::of(ErrorKind::State, why.to_owned())
}

/// See the module.
pub struct Rebuilt {
    /// `None` after a restore that failed.
    pub(super) machine: Option<Machine>,
    spec: MachineSpec,
    /// Each machine has duplicates of them.
    fds: Vec<OwnedFd>,
    notifier: Notifier,
    consoles: Consoles,
    restores: Arc<AtomicU64>,
}

impl Rebuilt {
    fn machine(&mut self) -> Result<&mut Machine, Failure> {
        self.machine
            .as_mut()
            .ok_or_else(|| gone("the machine could not be restored"))
    }

    fn assembler(&mut self) -> Result<Assembler, Failure> {
        let console = (self.consoles)();
        let console = console.map_err(|error| Failure::new(ErrorKind::Resources, &error))?;
        Ok(Assembler::new(console))
    }

    fn clone_fds(&self) -> Result<Vec<OwnedFd>, Failure> {
        let fds = self.fds.iter().map(OwnedFd::try_clone);
        fds.collect::<Result<_, _>>()
            .map_err(|error| Failure::new(ErrorKind::Resources, &error))
    }

    /// Replaces the paused machine by a restored one, as a migration does.
    pub(super) fn rebuild(&mut self) -> Result<(), Failure> {
        let machine = self.machine()?;
        let (saved, ram) = (machine.save()?.encode_to_vec(), machine.ram.clone());
        // Outputs the guest's pending console data.
        machine.halt();
        self.machine = None;
        let saved = state::Machine::decode(saved.as_slice());
        let saved = saved.map_err(|error| Failure::new(ErrorKind::Internal, &error))?;
        let (fds, notifier) = (self.clone_fds()?, self.notifier.clone());
        let restored = self.assembler()?.restore(&self.spec, fds, notifier, ram, saved)?;
        self.machine = Some(restored);
        self.restores.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl lifecycle::Machine for Rebuilt {
    fn pause(&mut self) -> Result<(), Failure> {
        self.machine()?.pause()
    }

    fn resume(&mut self) -> Result<(), Failure> {
        // One whose guest has asked for a reset just before is not saved.
        if self.machine()?.vcpus.ended().is_none() {
            self.rebuild()?;
        }
        self.machine()?.resume()
    }

    fn reset(&mut self) -> Result<Reset, Failure> {
        self.machine()?.reset()
    }

    fn start(&mut self) -> Result<(), Failure> {
        self.machine()?.start()
    }

    fn operate(&mut self, token: Token, op: Op, fds: Vec<OwnedFd>) -> Result<Progress, Failure> {
        self.machine()?.operate(token, op, fds)
    }

    fn collect_detached(&mut self) -> Vec<Detached> {
        let machine = self.machine.as_mut();
        machine
            .map(lifecycle::Machine::collect_detached)
            .unwrap_or_default()
    }

    fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)> {
        let machine = self.machine.as_mut();
        machine
            .map(lifecycle::Machine::collect_answers)
            .unwrap_or_default()
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.machine.as_ref()?.next_deadline()
    }

    fn may_have_panicked(&mut self, printed: u64) -> Result<bool, Failure> {
        self.machine()?.may_have_panicked(printed)
    }

    fn holds_requests(&self) -> bool {
        let machine = self.machine.as_ref();
        machine.is_some_and(lifecycle::Machine::holds_requests)
    }

    fn commit_disks(&mut self) -> Result<(), Failure> {
        self.machine()?.commit_disks()
    }

    fn begin_snapshot(&mut self, file: File, runs: bool) -> Result<(), Failure> {
        self.machine()?.begin_snapshot(file, runs)
    }

    fn begin_migration(&mut self, socket: File, purpose: Purpose, disks: &[String]) -> Result<(), Failure> {
        self.machine()?.begin_migration(socket, purpose, disks)
    }

    fn throttle(&mut self, percent: u8) -> Result<(), Failure> {
        self.machine()?.throttle(percent)
    }

    fn keep_time(&mut self) -> Result<(), Failure> {
        self.machine()?.keep_time()
    }

    fn complete_snapshot(&mut self, description: Vec<u8>, panicked: bool) -> Result<GoesOn, Failure> {
        self.machine()?.complete_snapshot(description, panicked)
    }

    fn end_snapshot(&mut self) -> Result<Report, Failure> {
        self.machine()?.end_snapshot()
    }

    fn give_up_snapshot(&mut self) {
        if let Some(machine) = &mut self.machine {
            machine.give_up_snapshot();
        }
    }

    fn halt(&mut self) {
        if let Some(machine) = &mut self.machine {
            machine.halt();
        }
    }
}
