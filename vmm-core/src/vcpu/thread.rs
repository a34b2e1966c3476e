//! The thread of a vCPU.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};

use devices::bus::Effect;
use vmm_base::thread::{self, ThreadKind};
use vmm_protocol::state::StateError;

use super::{ExitCounts, ExitHandlers, Identity, Report, ReportKind};
use crate::kvm::{Exit, Kicker, KvmError, MACHINE_CHECK_BANKS, ThreadClock, Vcpu, VcpuState, address_bits};

/// Call to the thread of a parked vCPU.
pub(super) enum Call {
    /// Enter the guest.
    Run,
    /// Back to the power-on state.
    Reset(mpsc::Sender<Result<(), KvmError>>),
    /// Anything else. The error is why the vCPU could not be set up.
    #[allow(clippy::type_complexity)]
    With(Box<dyn FnOnce(Result<Parked<'_>, KvmError>) + Send>),
}

/// Access of a call to a vCPU.
pub(super) struct Parked<'a> {
    pub(super) vcpu: &'a mut Vcpu,
    /// Its state after power-on.
    pub(super) power_on: &'a VcpuState,
    /// Whether the guest has run. The next run then reports the stop to the guest.
    pub(super) has_run: &'a mut bool,
}

impl Parked<'_> {
    /// Adds to the vCPU's time stamp counter.
    pub(super) fn correct_counter(&self, by: u64) -> Result<(), StateError> {
        self.vcpu.correct_counter(by, self.power_on.has_deadline())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Not set up yet.
    New,
    /// By the controller.
    Parked,
    /// By itself: it has reported why. Parked for all but [`Shared::allow_stopped`].
    Ended,
    Running,
    Gone,
}

/// Shared state of controller and thread.
pub(super) struct Shared {
    pub(super) kicker: Kicker,
    phase: Mutex<Phase>,
    changed: Condvar,
    /// Written by the thread only.
    accesses: AtomicU64,
    interruptions: AtomicU64,
    /// Processor time of the thread; set when that begins.
    pub(super) clock: OnceLock<ThreadClock>,
}

impl Shared {
    pub(super) fn new(kicker: Kicker) -> Self {
        Self {
            kicker,
            phase: Mutex::new(Phase::New),
            changed: Condvar::new(),
            accesses: AtomicU64::new(0),
            interruptions: AtomicU64::new(0),
            clock: OnceLock::new(),
        }
    }

    /// Goes from `Parked` or `Ended` to `Running`, for the controller; says whether it was parked.
    pub(super) fn allow(&self) -> bool {
        self.allow_from(&[Phase::Parked, Phase::Ended])
    }

    /// The same, unless the vCPU has ended its run on its own.
    pub(super) fn allow_stopped(&self) -> bool {
        self.allow_from(&[Phase::Parked])
    }

    fn allow_from(&self, from: &[Phase]) -> bool {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let parked = from.contains(&*phase);
        if parked {
            self.kicker.clear();
            *phase = Phase::Running;
        }
        parked
    }

    /// Whether it is in its thread's hands, and not in the guest.
    pub(super) fn is_parked(&self) -> bool {
        let phase = *self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(phase, Phase::New | Phase::Parked | Phase::Ended)
    }

    /// Whether it has ended its run and was not reset since.
    pub(super) fn has_ended(&self) -> bool {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) == Phase::Ended
    }

    /// Waits until it is set up, or has failed to be: KVM knows the local APIC id only then, and would lose an INIT that another vCPU
    /// sends it.
    pub(super) fn wait_until_set_up(&self) {
        let phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(phase, |phase| *phase == Phase::New);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Fails when the thread is gone.
    pub(super) fn wait_until_parked(&self) -> Result<(), ()> {
        let phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let phase = self
            .changed
            .wait_while(phase, |phase| *phase == Phase::Running)
            .unwrap_or_else(PoisonError::into_inner);
        if *phase == Phase::Gone { Err(()) } else { Ok(()) }
    }

    /// Waits for a thread that is about to end.
    pub(super) fn wait_until_gone(&self) {
        let phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(phase, |phase| *phase != Phase::Gone);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn leave(&self, to: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = to;
        self.changed.notify_all();
    }

    pub(super) fn counts(&self) -> ExitCounts {
        ExitCounts {
            accesses: self.accesses.load(Ordering::Relaxed),
            interruptions: self.interruptions.load(Ordering::Relaxed),
        }
    }
}

/// Counts without a locked instruction: the vCPU's thread is the only writer.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// A vCPU and what its thread needs.
pub(super) struct VcpuThread {
    index: usize,
    vcpu: Vcpu,
    identity: Identity,
    shared: Arc<Shared>,
    handlers: Arc<ExitHandlers>,
    has_run: bool,
}

/// Reports the end of the thread to the controller, also after a panic.
struct Farewell(Arc<Shared>);

impl Drop for Farewell {
    fn drop(&mut self) {
        self.0.leave(Phase::Gone);
    }
}

impl VcpuThread {
    pub(super) fn new(
        index: usize,
        vcpu: Vcpu,
        identity: Identity,
        shared: Arc<Shared>,
        handlers: Arc<ExitHandlers>,
    ) -> Self {
        Self {
            index,
            vcpu,
            identity,
            shared,
            handlers,
            has_run: false,
        }
    }

    /// Starts it, parked. It ends when the sender of `calls` is dropped.
    pub(super) fn spawn(self, calls: mpsc::Receiver<Call>) -> io::Result<JoinHandle<()>> {
        let farewell = Farewell(Arc::clone(&self.shared));
        thread::spawn(ThreadKind::Vcpu, format!("vcpu-{}", self.index), move || {
            let _ = farewell.0.clock.set(ThreadClock::of_this_thread());
            let _farewell = farewell;
            self.serve(&calls);
        })
    }

    fn serve(mut self, calls: &mpsc::Receiver<Call>) {
        // Here and not in the controller: all vCPUs at once, while the machine is still being built.
        let mut power_on = self.set_up();
        self.shared.leave(Phase::Parked);
        for call in calls {
            match (call, &power_on) {
                (Call::Run, Ok(_)) => {
                    let phase = self.run();
                    self.shared.leave(phase);
                }
                (Call::Run, Err(_)) => {
                    if let Err(error) = std::mem::replace(&mut power_on, Err(not_set_up())) {
                        self.report(ReportKind::Failed(error));
                    }
                    self.shared.leave(Phase::Ended);
                }
                (Call::Reset(reply), Ok(state)) => {
                    self.has_run = false;
                    let restored = state.restore(&self.vcpu);
                    if restored.is_ok() {
                        self.shared.leave(Phase::Parked);
                    }
                    let _ = reply.send(restored);
                }
                (Call::With(call), Ok(power_on)) => call(Ok(Parked {
                    vcpu: &mut self.vcpu,
                    power_on,
                    has_run: &mut self.has_run,
                })),
                (Call::Reset(reply), Err(_)) => {
                    let failed = std::mem::replace(&mut power_on, Err(not_set_up()));
                    let _ = reply.send(failed.map(|_| ()));
                }
                (Call::With(call), Err(_)) => {
                    if let Err(error) = std::mem::replace(&mut power_on, Err(not_set_up())) {
                        call(Err(error));
                    }
                }
            }
        }
    }

    fn set_up(&self) -> Result<VcpuState, KvmError> {
        let cpuid = &self.identity.cpuid;
        if self.identity.hyperv {
            self.vcpu.enable_hyperv()?;
        }
        self.vcpu.set_cpuid(cpuid)?;
        if let Some(value) = self.identity.arch_capabilities {
            self.vcpu.set_arch_capabilities(value)?;
        }
        self.vcpu.set_machine_check_banks(MACHINE_CHECK_BANKS)?;
        let bits = address_bits(cpuid.as_slice());
        VcpuState::power_on(&self.vcpu, bits, self.identity.hyperv)
    }

    /// Runs the guest until it is stopped (`Parked`), crashes or ends itself (`Ended`).
    fn run(&mut self) -> Phase {
        if self.has_run {
            self.vcpu.note_pause();
        }
        self.has_run = true;
        loop {
            match self.vcpu.enter(&self.handlers.spaces) {
                Ok(Exit::Access(effect)) => {
                    count(&self.shared.accesses);
                    match effect {
                        Effect::None => {}
                        Effect::Remap => (self.handlers.remap)(),
                        Effect::Eject => (self.handlers.eject)(),
                        Effect::GuestPanicked => self.report(ReportKind::GuestPanicked(None)),
                        Effect::Reset => return self.end(ReportKind::Reset),
                        Effect::PowerOff => return self.end(ReportKind::PowerOff),
                    }
                }
                Ok(Exit::Panicked(parameters)) => {
                    count(&self.shared.accesses);
                    self.report(ReportKind::GuestPanicked(Some(parameters)));
                }
                Ok(Exit::Interrupted) => {
                    count(&self.shared.interruptions);
                    match self.vcpu.raise_machine_check() {
                        Ok(None) => {}
                        Ok(Some(address)) => tracing::warn!(
                            vcpu = self.index,
                            "the host's memory behind guest address {address:#x} has failed: the guest gets a machine check"
                        ),
                        Err(error) => {
                            self.report(ReportKind::Failed(error));
                            return Phase::Ended;
                        }
                    }
                    if self.shared.kicker.is_set() {
                        return Phase::Parked;
                    }
                }
                Ok(Exit::Crashed(crash)) => {
                    self.report(ReportKind::Crashed(crash));
                    return Phase::Ended;
                }
                Err(error) => {
                    self.report(ReportKind::Failed(error));
                    return Phase::Ended;
                }
            }
        }
    }

    /// Parks after an access that ended the machine's run: the access is completed, the guest runs no further.
    fn end(&mut self, kind: ReportKind) -> Phase {
        self.report(kind);
        self.shared.kicker.set();
        // Each entry completes one element of the access that is pending (a page of them at the most).
        const ELEMENTS_MAX: usize = 4096;
        for _ in 0..ELEMENTS_MAX {
            match self.vcpu.enter(&self.handlers.spaces) {
                Ok(Exit::Access(_) | Exit::Panicked(_)) => {}
                Ok(Exit::Interrupted | Exit::Crashed(_)) | Err(_) => break,
            }
        }
        Phase::Ended
    }

    fn report(&self, kind: ReportKind) {
        (self.handlers.report)(Report {
            vcpu: self.index,
            kind,
        });
    }
}

fn not_set_up() -> KvmError {
    KvmError::Ioctl {
        operation: "running a vCPU that could not be set up",
        source: io::ErrorKind::InvalidInput.into(),
    }
}
