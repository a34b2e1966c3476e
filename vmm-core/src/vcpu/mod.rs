//! The vCPUs of a machine and their threads.
//!
//! Each vCPU is owned by a thread of its own; [`Vcpus`] is the one controller, held by the
//! lifecycle driver.
//!
//! ```text
//!            run                         access asks for reset or power-off, crash
//! Parked ───────────▶ Running ─────────────────────────────────────────▶ Ended
//!    ▲                   │ stop: immediate_exit, then a signal              │
//!    └───────────────────┘                            reset: Parked; run: Running ┘
//! ```
//!
//! Invariants:
//! - Any thread may set `immediate_exit` while the vCPU runs. Only the controller clears it, while
//!   the vCPU is parked. A stop therefore cannot be lost at any time.
//! - A parked vCPU has no incomplete access.
//! - No lock is held while waiting for a vCPU.

#[cfg(test)]
mod tests;
mod thread;

use std::{
    io,
    sync::{Arc, mpsc},
    thread::JoinHandle,
};

use kvm_bindings::{CpuId, kvm_regs, kvm_sregs};
use vmm_protocol::state::{self, StateError};

use crate::kvm::{
    AddressSpaces, CRASH_PARAMETERS, Crash, GuestTime, KvmError, StatsReader, Vcpu, Vm, install_handler,
    interrupt,
};
use thread::{Call, Parked, Shared, VcpuThread};

/// Report from a vCPU to the machine. Sent from the vCPU's thread, with no lock held.
#[derive(Debug)]
pub struct Report {
    /// Which vCPU, counted from 0.
    pub vcpu: usize,
    /// What happened.
    pub kind: ReportKind,
}

/// See [`Report`].
#[derive(Debug)]
pub enum ReportKind {
    /// The guest reset the machine. The vCPU is parked.
    Reset,
    /// The guest powered the machine off. The vCPU is parked.
    PowerOff,
    /// The guest's kernel says that it panicked, with parameters by Hyper-V's interface. The vCPU runs on.
    GuestPanicked(Option<[u64; CRASH_PARAMETERS]>),
    /// The vCPU cannot continue. It is parked.
    Crashed(Crash),
    /// The host failed. The vCPU is parked.
    Failed(KvmError),
}

/// Handling of accesses that leave KVM.
pub struct ExitHandlers {
    /// Where accesses go.
    pub spaces: AddressSpaces,
    /// Remaps PCI functions' BARs ([`devices::bus::Effect::Remap`]), before the guest's next
    /// instruction.
    pub remap: Box<dyn Fn() + Send + Sync>,
    /// Takes PCI functions away that the guest ejected ([`devices::bus::Effect::Eject`]), before the guest's next
    /// instruction.
    pub eject: Box<dyn Fn() + Send + Sync>,
    /// Takes reports; must not wait for vCPUs.
    pub report: Box<dyn Fn(Report) + Send + Sync>,
}

/// Error of an operation on vCPUs.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// A thread could not be made.
    #[error("starting the thread of vCPU {vcpu}")]
    Thread {
        /// Counted from 0.
        vcpu: usize,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// KVM refused.
    #[error("vCPU {vcpu}: {source}")]
    Kvm {
        /// Counted from 0.
        vcpu: usize,
        /// Why.
        source: KvmError,
    },
    /// The vCPU's state could not be saved or restored.
    #[error("vCPU {vcpu}")]
    State {
        /// Counted from 0.
        vcpu: usize,
        /// Why.
        source: StateError,
    },
    /// The thread is gone (it panicked).
    #[error("the thread of vCPU {0} is gone")]
    Gone(usize),
    /// Asked for while vCPUs run.
    #[error("vCPUs are running")]
    Running,
}

/// Counts of what left KVM for this process, of one vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitCounts {
    /// Port and memory accesses.
    pub accesses: u64,
    /// Entries that ended without one: kicks, signals.
    pub interruptions: u64,
}

struct Handle {
    commands: Option<mpsc::Sender<Call>>,
    shared: Arc<Shared>,
    stats: Option<StatsReader>,
    thread: Option<JoinHandle<()>>,
}

/// Properties of a vCPU that never change.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Local APIC id.
    pub apic_id: u32,
    /// CPUID.
    pub cpuid: CpuId,
    /// IA32_ARCH_CAPABILITIES; `None` leaves the host's value.
    pub arch_capabilities: Option<u64>,
    /// CPUID has Hyper-V's leaves.
    pub hyperv: bool,
}

/// All vCPUs of a machine.
pub struct Vcpus {
    handles: Vec<Handle>,
}

impl Vcpus {
    /// Makes one vCPU with a thread per entry of `identities`. All are parked in their power-on state; the first is the bootstrap processor, the others wait for its INIT and SIPI.
    pub fn new(
        vm: &Arc<Vm>,
        identities: Vec<Identity>,
        handlers: &Arc<ExitHandlers>,
    ) -> Result<Self, VcpuError> {
        let kvm = |vcpu| move |source| VcpuError::Kvm { vcpu, source };
        install_handler().map_err(kvm(0))?;
        let mut handles = Vec::with_capacity(identities.len());
        for (index, identity) in identities.into_iter().enumerate() {
            let vcpu = vm.create_vcpu(identity.apic_id).map_err(kvm(index))?;
            let stats = vcpu.stats();
            let shared = Arc::new(Shared::new(vcpu.kicker().map_err(kvm(index))?));
            let (commands, calls) = mpsc::channel();
            let thread = VcpuThread::new(index, vcpu, identity, Arc::clone(&shared), Arc::clone(handlers));
            let thread = thread
                .spawn(calls)
                .map_err(|source| VcpuError::Thread { vcpu: index, source })?;
            handles.push(Handle {
                commands: Some(commands),
                shared,
                stats,
                thread: Some(thread),
            });
        }
        Ok(Self { handles })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.handles.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.handles.is_empty()
    }

    /// Sets the registers with which the bootstrap processor begins.
    pub fn set_entry(
        &mut self,
        entry: impl FnOnce(&mut kvm_sregs) -> kvm_regs + Send + 'static,
    ) -> Result<(), VcpuError> {
        self.call_one(0, move |vcpu| vcpu.set_registers(entry))
    }

    /// Puts all vCPUs, which are stopped, back into their power-on state. The bootstrap processor wants
    /// [`set_entry`](Self::set_entry) after that.
    pub fn reset(&mut self) -> Result<(), VcpuError> {
        let mut pending = Vec::with_capacity(self.handles.len());
        for (index, handle) in self.handles.iter().enumerate() {
            let (reply, replied) = mpsc::channel();
            handle.send(index, Call::Reset(reply))?;
            pending.push(replied);
        }
        for (index, (handle, replied)) in self.handles.iter().zip(pending).enumerate() {
            handle.receive(index, &replied)?;
        }
        Ok(())
    }

    /// Lets all vCPUs run, also vCPUs that have ended their run. Running vCPUs are not disturbed.
    pub fn run(&mut self) -> Result<(), VcpuError> {
        self.run_those(Shared::allow)
    }

    /// Lets all vCPUs run except vCPUs that have ended their run and were not [reset](Self::reset)
    /// since.
    pub fn release(&mut self) -> Result<(), VcpuError> {
        self.run_those(Shared::allow_stopped)
    }

    fn run_those(&self, allow: fn(&Shared) -> bool) -> Result<(), VcpuError> {
        for handle in &self.handles {
            handle.shared.wait_until_set_up();
        }
        // First all, so that none sees another that is still to be allowed to run.
        let allowed: Vec<_> = self.handles.iter().map(|handle| allow(&handle.shared)).collect();
        for (index, (handle, allowed)) in self.handles.iter().zip(allowed).enumerate() {
            if allowed {
                handle.send(index, Call::Run)?;
            }
        }
        Ok(())
    }

    /// The first vCPU that has ended its run and was not reset since: its report is on the way, or was taken.
    pub fn ended(&self) -> Option<usize> {
        self.handles.iter().position(|handle| handle.shared.has_ended())
    }

    /// Stops all. On return none is in the guest, and no access is half done.
    pub fn stop(&mut self) -> Result<(), VcpuError> {
        for handle in &self.handles {
            handle.kick();
        }
        for (index, handle) in self.handles.iter().enumerate() {
            handle
                .shared
                .wait_until_parked()
                .map_err(|()| VcpuError::Gone(index))?;
        }
        Ok(())
    }

    /// Runs `call` on the thread of vCPU `index`, which is stopped.
    pub fn call_one<R: Send + 'static>(
        &mut self,
        index: usize,
        call: impl FnOnce(&mut Vcpu) -> Result<R, KvmError> + Send + 'static,
    ) -> Result<R, VcpuError> {
        let handle = self.handles.get(index).ok_or(VcpuError::Gone(index))?;
        let replied = handle.call(index, move |parked| call(parked.vcpu))?;
        handle.receive(index, &replied)
    }

    /// The state of all, which are stopped, in the form in which it moves.
    pub fn save(&mut self) -> Result<Vec<state::Vcpu>, VcpuError> {
        let mut pending = Vec::with_capacity(self.handles.len());
        for (index, handle) in self.handles.iter().enumerate() {
            pending.push(handle.call(index, |parked| Ok(parked.vcpu.save(parked.power_on)))?);
        }
        let pending = self.handles.iter().zip(pending).enumerate();
        let saved = pending.map(|(index, (handle, replied))| {
            let state = |source| VcpuError::State { vcpu: index, source };
            handle.receive(index, &replied)?.map_err(state)
        });
        saved.collect()
    }

    /// Puts all, which have never run, into a saved state: one for each. On an error some are in it.
    pub fn restore(&mut self, saved: Vec<state::Vcpu>) -> Result<(), VcpuError> {
        let state = |vcpu| move |source| VcpuError::State { vcpu, source };
        let (found, wanted) = (saved.len(), self.handles.len());
        if found != wanted {
            let why = format!("there are {found} for {wanted} vCPUs");
            return Err(state(0)(StateError::invalid("vcpus", why)));
        }
        let mut shift = None;
        for (index, (handle, saved)) in self.handles.iter().zip(saved).enumerate() {
            let replied = handle.call(index, move |parked| {
                *parked.has_run = true;
                Ok(parked.vcpu.restore(parked.power_on, saved, shift))
            })?;
            let done = handle.receive(index, &replied)?.map_err(state(index))?;
            shift.get_or_insert(done);
        }
        Ok(())
    }

    /// kvmclock and the first vCPU's counter now, with all stopped.
    pub fn time(&mut self) -> Result<GuestTime, VcpuError> {
        self.with_first(|parked| parked.vcpu.time())
    }

    /// Makes the counters of all stopped vCPUs continue from `then`, together with kvmclock, which
    /// is set before. The differences between the counters stay. On a kernel without offsets (older
    /// than 5.16), the counters have run on during the pause.
    pub fn go_on_from(&mut self, then: GuestTime) -> Result<(), VcpuError> {
        let correction = self.with_first(move |parked| parked.vcpu.counter_correction(&then))?;
        let Some(correction) = correction else {
            return Ok(());
        };
        let mut pending = Vec::with_capacity(self.handles.len());
        for (index, handle) in self.handles.iter().enumerate() {
            pending.push(handle.call(index, move |parked| Ok(parked.correct_counter(correction)))?);
        }
        for (index, (handle, replied)) in self.handles.iter().zip(pending).enumerate() {
            let state = |source| VcpuError::State { vcpu: index, source };
            handle.receive(index, &replied)?.map_err(state)?;
        }
        Ok(())
    }

    /// Runs `call` on the first vCPU's thread.
    fn with_first<R: Send + 'static>(
        &self,
        call: impl FnOnce(Parked<'_>) -> Result<R, StateError> + Send + 'static,
    ) -> Result<R, VcpuError> {
        let handle = self.handles.first().ok_or(VcpuError::Gone(0))?;
        let replied = handle.call(0, move |parked| Ok(call(parked)))?;
        let state = |source| VcpuError::State { vcpu: 0, source };
        handle.receive(0, &replied)?.map_err(state)
    }

    /// Whether one of them, which are stopped, waits for an interrupt, as an idle one does, or runs a program.
    pub fn lives(&mut self) -> Result<bool, VcpuError> {
        let mut lives = false;
        for (index, handle) in self.handles.iter().enumerate() {
            let replied = handle.call(index, |parked| parked.vcpu.lives())?;
            lives |= handle.receive(index, &replied)?;
        }
        Ok(lives)
    }

    /// Sends a non-maskable interrupt to all, which are stopped, that take one at LINT1 of their local APIC.
    pub fn inject_nmi(&mut self) -> Result<(), VcpuError> {
        for (index, handle) in self.handles.iter().enumerate() {
            let replied = handle.call(index, |parked| parked.vcpu.inject_nmi())?;
            handle.receive(index, &replied)?;
        }
        Ok(())
    }

    /// KVM's statistics of each vCPU, readable while it runs; none on kernels before 5.14.
    pub fn stats(&self) -> impl Iterator<Item = Option<&StatsReader>> {
        self.handles.iter().map(|handle| handle.stats.as_ref())
    }

    /// Ids of the threads of all vCPUs and their processor time, in nanoseconds; `None` for one that has not begun.
    pub fn times(&self) -> impl Iterator<Item = Option<(u32, u64)>> {
        self.handles.iter().map(|handle| {
            let clock = handle.shared.clock.get()?;
            Some((clock.thread(), clock.read()))
        })
    }

    /// Number of exits from KVM to this process so far, for each vCPU.
    pub fn exit_counts(&self) -> impl Iterator<Item = ExitCounts> {
        self.handles.iter().map(|handle| handle.shared.counts())
    }
}

impl Handle {
    /// Has the vCPU's thread run `call`; the reply comes by the channel.
    fn call<R: Send + 'static>(
        &self,
        vcpu: usize,
        call: impl FnOnce(Parked<'_>) -> Result<R, KvmError> + Send + 'static,
    ) -> Result<mpsc::Receiver<Result<R, KvmError>>, VcpuError> {
        let (reply, replied) = mpsc::channel();
        let call = move |parked: Result<Parked<'_>, KvmError>| {
            // The send fails only if the caller is gone.
            let _ = reply.send(parked.and_then(call));
        };
        self.send(vcpu, Call::With(Box::new(call)))?;
        Ok(replied)
    }

    fn receive<R>(&self, vcpu: usize, replied: &mpsc::Receiver<Result<R, KvmError>>) -> Result<R, VcpuError> {
        match replied.recv() {
            Ok(result) => result.map_err(|source| VcpuError::Kvm { vcpu, source }),
            Err(mpsc::RecvError) => {
                // The thread panicked, and dropped its end of the channel while it unwinds.
                self.shared.wait_until_gone();
                Err(VcpuError::Gone(vcpu))
            }
        }
    }

    fn send(&self, vcpu: usize, call: Call) -> Result<(), VcpuError> {
        if !matches!(call, Call::Run) && !self.shared.is_parked() {
            return Err(VcpuError::Running);
        }
        let commands = self.commands.as_ref().ok_or(VcpuError::Gone(vcpu))?;
        commands.send(call).map_err(|_| VcpuError::Gone(vcpu))
    }

    fn kick(&self) {
        self.shared.kicker.set();
        if let Some(thread) = &self.thread {
            interrupt(thread);
        }
    }
}

impl Drop for Vcpus {
    /// Stops all and ends their threads.
    fn drop(&mut self) {
        for handle in &mut self.handles {
            handle.commands = None;
            handle.kick();
        }
        for handle in &mut self.handles {
            if let Some(thread) = handle.thread.take() {
                // A panic was reported when it happened.
                let _ = thread.join();
            }
        }
    }
}
