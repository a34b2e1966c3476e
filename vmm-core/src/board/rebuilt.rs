//! A machine that is discarded and restored at each resume, for tests. The machine is saved, dropped
//! with all its threads and descriptors, rebuilt from its spec, and restored from the encoded state.
//! Only its memory is handed over. A feature that works on such a machine across a pause also works
//! across a migration.
//!
//! Disks and NICs that were attached after the start are not in the spec, so a machine with one is
//! not restored.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use prost::Message;
use vmm_protocol::{
    state,
    vmm::{self, ErrorKind, MachineSpec},
};

use super::{
    assemble::{Assembler, Console},
    machine::Machine,
};
use crate::lifecycle::{Builder, Failure, Machine as _, Notifier};

/// Makes the console of each machine.
pub type Consoles = Box<dyn FnMut() -> io::Result<Console>>;

/// Builds a machine that is restored at each resume.
pub struct Rebuilder {
    consoles: Consoles,
    origin: Option<Origin>,
    restores: Arc<AtomicU64>,
}

/// Sources of the machine.
struct Origin {
    spec: MachineSpec,
    /// Each machine has duplicates of them.
    fds: Vec<OwnedFd>,
    notifier: Notifier,
}

impl Origin {
    fn clone_fds(&self) -> Result<Vec<OwnedFd>, Failure> {
        let fds = self.fds.iter().map(OwnedFd::try_clone);
        fds.collect::<Result<_, _>>()
            .map_err(|error| Failure::new(ErrorKind::Resources, &error))
    }
}

impl Rebuilder {
    /// For one machine, whose consoles `consoles` makes.
    pub fn new(consoles: Consoles) -> Self {
        Self {
            consoles,
            origin: None,
            restores: Arc::default(),
        }
    }

    /// How often the machine was restored.
    pub fn restores(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.restores)
    }

    fn assembler(&mut self) -> Result<Assembler, Failure> {
        let console = (self.consoles)();
        let console = console.map_err(|error| Failure::new(ErrorKind::Resources, &error))?;
        Ok(Assembler::new(console))
    }

    /// Replaces the paused machine by a restored one, as a migration does.
    pub(super) fn rebuild(&mut self, mut machine: Machine) -> Result<Machine, Failure> {
        let (saved, ram) = (machine.save()?.encode_to_vec(), machine.ram.clone());
        // Outputs the guest's pending console data.
        machine.halt();
        drop(machine);
        let saved = state::Machine::decode(saved.as_slice());
        let saved = saved.map_err(|error| Failure::new(ErrorKind::Internal, &error))?;
        let mut assembler = self.assembler()?;
        let Some(origin) = &self.origin else {
            return Err(Failure::of(ErrorKind::State, "no machine was built"));
        };
        let (fds, notifier) = (origin.clone_fds()?, origin.notifier.clone());
        let restored = assembler.restore(&origin.spec, fds, notifier, ram, saved)?;
        self.restores.fetch_add(1, Ordering::Relaxed);
        Ok(restored)
    }
}

impl Builder for Rebuilder {
    type Machine = Machine;

    fn build(
        &mut self,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        restore: Option<&vmm::Restore>,
        notifier: Notifier,
    ) -> Result<Machine, Failure> {
        if restore.is_some() {
            let message = "a machine that is rebuilt at each resume begins without a snapshot";
            return Err(Failure::of(ErrorKind::State, message));
        }
        let origin = Origin {
            spec: spec.clone(),
            fds,
            notifier: notifier.clone(),
        };
        let machine = self.assembler()?.assemble(spec, origin.clone_fds()?, notifier)?;
        self.origin = Some(origin);
        Ok(machine)
    }

    fn renew(&mut self, machine: Machine) -> Result<Machine, Failure> {
        // A machine whose guest has just asked for a reset is not saved.
        match machine.vcpus.ended() {
            None => self.rebuild(machine),
            Some(_) => Ok(machine),
        }
    }
}
