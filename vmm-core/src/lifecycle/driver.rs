//! The one thread that owns the machine: takes a request or a notice, acts, publishes, takes the next.

mod panic;
mod reset;
mod snapshot;

use std::{
    os::fd::OwnedFd,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use devices::log_limit::LogLimit;
use tracing::{debug, info, warn};
use vmm_protocol::vmm::{ErrorKind, ExitKind, ExitRecord, MachineSpec, OnCrash, Restore};

use crate::snapshot::saving::Purpose;

use self::reset::{ResetCause, is_of_the_guest};
use super::{
    Answer, Builder, Failure, Input, Machine, Notice, Notifier, Progress, Request, Token,
    admission::{Action, Admission, State, admit},
    publisher::{Audience, Publisher, exit_record},
};

/// Drives one machine from an empty process to its end.
pub struct Driver<A, B> {
    inputs: Receiver<Input>,
    notifier: Notifier,
    publisher: Publisher<A>,
    builder: B,
    machine: Option<Box<dyn Machine>>,
    /// The guest's kernel panicked and has not been reset since.
    panicked: bool,
    /// The serial port shows what looks like a panic.
    suspicion: Option<panic::Suspicion>,
    /// The run ends with a triple fault, which else resets the machine.
    stops_on_crash: bool,
    /// Limit for log lines about events that a guest can cause repeatedly.
    log_limit: LogLimit,
    /// The machine could not be paused after a disk's error: when it is tried again, and the error.
    pause_again: Option<(Instant, DiskError)>,
    /// Requests that the machine answers later.
    pending: Vec<Token>,
    /// A snapshot that is being taken.
    snapshot: Option<snapshot::Underway>,
    /// A reset that is not done yet.
    waiting: Option<reset::Waiting>,
}

/// Why a disk holds requests.
struct DiskError {
    /// "disk root".
    device: String,
    message: String,
}

/// How long after a pause for a disk's error that failed it is tried again. The machine runs meanwhile, the disk's requests
/// stay unanswered.
const PAUSE_AGAIN: Duration = Duration::from_secs(10);

/// Continuation of the run.
enum Next {
    GoOn,
    /// The run is over. The requester of the end gets its answer when the end is complete.
    End(ExitRecord, Option<Token>),
}

impl<A: Audience, B: Builder> Driver<A, B> {
    /// Takes its inputs from `inputs`; the machine's notices come back to it through `notifier`.
    pub fn new(inputs: Receiver<Input>, notifier: Notifier, audience: A, builder: B) -> Self {
        Self {
            inputs,
            notifier,
            publisher: Publisher::new(audience),
            builder,
            machine: None,
            panicked: false,
            suspicion: None,
            stops_on_crash: false,
            log_limit: LogLimit::new(),
            pause_again: None,
            pending: Vec::new(),
            snapshot: None,
            waiting: None,
        }
    }

    /// Runs until the end of the run. `before_publishing` gets the record when the machine is
    /// quiet, before any client is notified.
    pub fn run(mut self, before_publishing: impl FnOnce(&ExitRecord)) -> ExitRecord {
        loop {
            let next = match self.next_input() {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => self.on_time(),
                Err(RecvTimeoutError::Disconnected) => Next::End(
                    exit_record(ExitKind::VmmError, "nobody is left to ask for anything"),
                    None,
                ),
            };
            let next = match next {
                Next::GoOn => self.continue_reset(),
                end @ Next::End(..) => end,
            };
            if let Next::End(record, asker) = next {
                return self.end(record, asker, before_publishing);
            }
        }
    }

    /// Something is due.
    fn on_time(&mut self) -> Next {
        self.collect();
        if let Err(failure) = self.keep_time().and_then(|()| self.check_panic()) {
            return Next::End(exit_record(ExitKind::VmmError, &failure.message), None);
        }
        if let Some((_, error)) = self.pause_again.take_if(|(when, _)| Instant::now() >= *when) {
            self.pause_for_error(error);
        }
        Next::GoOn
    }

    fn next_input(&self) -> Result<Input, RecvTimeoutError> {
        let again = self.pause_again.as_ref().map(|(when, _)| *when);
        let answer = self.machine.as_ref().and_then(|machine| machine.next_deadline());
        let reset = self.continues_reset_at();
        let panic = self.suspicion.as_ref().map(panic::Suspicion::due);
        match [again, answer, reset, panic].into_iter().flatten().min() {
            Some(when) => self
                .inputs
                .recv_timeout(when.saturating_duration_since(Instant::now())),
            None => self.inputs.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }

    fn keep_time(&mut self) -> Result<(), Failure> {
        match &mut self.machine {
            Some(machine) => machine.keep_time(),
            None => Ok(()),
        }
    }

    fn take(&mut self, input: Input) -> Next {
        if self.is_resetting() && is_of_the_guest(&input) {
            // Another vCPU may have asked for the reset that is under way.
            return Next::GoOn;
        }
        match input {
            Input::Request(token, request) => self.request(token, request),
            Input::Notice(notice) => self.notice(notice),
            Input::Abandoned if self.machine.is_none() => Next::End(
                exit_record(
                    ExitKind::StartFailed,
                    "the daemon went away before it booted a machine",
                ),
                None,
            ),
            Input::Abandoned => Next::GoOn,
        }
    }

    fn end(
        mut self,
        record: ExitRecord,
        asker: Option<Token>,
        before_publishing: impl FnOnce(&ExitRecord),
    ) -> ExitRecord {
        for token in std::mem::take(&mut self.pending) {
            let failure = Failure {
                kind: ErrorKind::State,
                message: "the machine ended before this was done".to_owned(),
            };
            self.publisher.reply(token, Err(failure));
        }
        if let Some(machine) = &mut self.machine {
            machine.halt();
        }
        info!(
            kind = record.kind().as_str_name(),
            message = record.message,
            "the run ended"
        );
        before_publishing(&record);
        self.publisher.ended(&record);
        if let Some(token) = asker {
            self.publisher.reply(token, Ok(()));
        }
        record
    }

    fn request(&mut self, token: Token, request: Request) -> Next {
        let action = match &request {
            Request::Boot { .. } => Action::Boot,
            Request::Pause => Action::Pause,
            Request::Resume => Action::Resume,
            Request::PowerButton => Action::PowerButton,
            Request::Reset => Action::Reset,
            Request::Stop => Action::Stop,
            Request::Save { .. } => Action::Save,
            Request::Send { .. } => Action::Send,
            Request::AttachDisk { .. }
            | Request::DetachDisk { .. }
            | Request::ResizeDisk { .. }
            | Request::SetRateLimit { .. }
            | Request::AttachNic { .. }
            | Request::DetachNic { .. }
            | Request::UpdateNic { .. }
            | Request::AttachShare { .. }
            | Request::DetachShare { .. }
            | Request::SetShareBackend { .. }
            | Request::SetBalloon(_)
            | Request::Release { .. }
            | Request::UnlockDisks
            | Request::SendBreak
            | Request::ResizeConsole { .. }
            | Request::GetDiskStats
            | Request::GetMachineStats => Action::Disk,
        };
        if let Some(failure) = self.refused_by_reset(&request) {
            self.publisher.reply(token, Err(failure));
            return Next::GoOn;
        }
        let result = match admit(self.publisher.state(), action) {
            Admission::Already => {
                if action == Action::Pause {
                    self.stays_paused();
                }
                Ok(())
            }
            Admission::Refuse(reason) => Err(Failure {
                kind: ErrorKind::State,
                message: reason.to_owned(),
            }),
            Admission::Go => match request {
                Request::Stop => return Next::End(self.stopped(), Some(token)),
                Request::Boot {
                    spec,
                    fds,
                    paused,
                    restore,
                } => return self.boot(token, &spec, fds, paused, restore.as_ref()),
                Request::Save {
                    file,
                    paused,
                    description,
                    keep_paused,
                    number,
                } => match self.begin_snapshot((token, number), file, (paused, keep_paused), description) {
                    Ok(Ok(())) => return Next::GoOn,
                    Ok(Err(failure)) => Err(failure),
                    Err(failure) => return Self::lost(&failure),
                },
                Request::Send {
                    socket,
                    downtime,
                    policy,
                    disks,
                } => {
                    let purpose = Purpose::Migration { downtime, policy };
                    match self.begin_migration(token, socket, purpose, &disks) {
                        Ok(()) => return Next::GoOn,
                        Err(failure) => Err(failure),
                    }
                }
                Request::Reset => return self.reset(ResetCause::Request(token)),
                Request::Pause => self.pause(),
                Request::Resume => self.resume(),
                Request::Release { give_up } => {
                    let released = if give_up { self.give_up() } else { self.release() };
                    match released {
                        Ok(result) => result,
                        Err(failure) => return Self::lost(&failure),
                    }
                }
                Request::UnlockDisks => self.unlock_disks(),
                Request::PowerButton => self.machine().map(Machine::press_power_button),
                Request::AttachDisk { disk, fds } => {
                    let begun = self
                        .plugging()
                        .and_then(|it| it.attach_disk(token, &disk, fds))
                        .map(|()| Progress::Pending);
                    return self.answer(token, begun);
                }
                Request::DetachDisk { name, force } => {
                    let begun = self.plugging().and_then(|it| it.detach_disk(token, &name, force));
                    return self.answer(token, begun);
                }
                Request::ResizeDisk { name, capacity } => {
                    let sizes = self.keeps_sizes();
                    sizes.and_then(|()| self.machine()?.resize_disk(&name, capacity))
                }
                Request::SetRateLimit { target, limit } => {
                    self.machine().and_then(|it| it.set_rate_limit(&target, limit))
                }
                Request::AttachNic { nic, fds } => self.plugging().and_then(|it| it.attach_nic(&nic, fds)),
                Request::DetachNic { name, force } => {
                    let begun = self.plugging().and_then(|it| it.detach_nic(token, &name, force));
                    return self.answer(token, begun);
                }
                Request::UpdateNic { name, change } => {
                    self.machine().and_then(|it| it.update_nic(&name, &change))
                }
                Request::AttachShare { share, fds } => {
                    self.plugging().and_then(|it| it.attach_share(&share, fds))
                }
                Request::DetachShare { name, force } => {
                    let begun = self
                        .plugging()
                        .and_then(|it| it.detach_share(token, &name, force));
                    return self.answer(token, begun);
                }
                Request::SetShareBackend { name, socket } => {
                    self.machine().and_then(|it| it.set_share_backend(&name, socket))
                }
                Request::SetBalloon(bytes) => self.machine().and_then(|it| it.set_balloon(bytes)),
                Request::SendBreak => self.machine().and_then(Machine::send_break),
                Request::ResizeConsole { columns, rows } => {
                    self.machine().and_then(|it| it.resize_console(columns, rows))
                }
                Request::GetDiskStats => {
                    let stats = self.machine().map(|it| it.disk_stats()).unwrap_or_default();
                    self.publisher.reply_with(token, Answer::DiskStats(stats));
                    return Next::GoOn;
                }
                Request::GetMachineStats => {
                    let stats = self.machine().map(|it| it.stats()).unwrap_or_default();
                    self.publisher
                        .reply_with(token, Answer::MachineStats(Box::new(stats)));
                    return Next::GoOn;
                }
            },
        };
        self.publisher.reply(token, result);
        Next::GoOn
    }

    fn boot(
        &mut self,
        token: Token,
        spec: &MachineSpec,
        fds: Vec<OwnedFd>,
        paused: bool,
        restore: Option<&Restore>,
    ) -> Next {
        self.publisher.set_name(&spec.name);
        self.stops_on_crash = spec.on_crash() == OnCrash::Stop;
        let started = self
            .builder
            .build(spec, fds, restore, self.notifier.clone())
            .and_then(|mut machine| {
                match restore {
                    _ if paused => {}
                    Some(_) => machine.resume()?,
                    None => machine.start()?,
                }
                Ok(machine)
            });
        match started {
            Ok(machine) => {
                self.machine = Some(machine);
                if paused {
                    self.publisher.paused(None);
                } else {
                    self.publisher.enter(State::Running);
                }
                self.publisher.reply(token, Ok(()));
                Next::GoOn
            }
            Err(failure) => {
                let record = exit_record(ExitKind::StartFailed, &failure.message);
                self.publisher.reply(token, Err(failure));
                Next::End(record, None)
            }
        }
    }

    fn pause(&mut self) -> Result<(), Failure> {
        self.machine()?.pause()?;
        // The next resume retries held requests, independent of the reason of the pause.
        self.pause_again = None;
        self.publisher.paused(None);
        Ok(())
    }

    /// Pauses the machine because of a disk's error, unless that is over (the disk was reset, or is gone), or the machine
    /// is paused already: then it keeps its reason.
    fn pause_for_error(&mut self, error: DiskError) {
        if self.publisher.state() != State::Running || self.is_resetting() {
            return;
        }
        let paused = match self.machine() {
            Ok(machine) if machine.holds_requests() => machine.pause(),
            _ => return,
        };
        let DiskError { device, message } = &error;
        match paused {
            Ok(()) => {
                warn!(
                    device,
                    message, "the machine is paused because of an error of a disk"
                );
                self.publisher.paused(Some(format!("{device}: {message}")));
                self.pause_again = None;
            }
            Err(failure) => {
                warn!(
                    device,
                    message,
                    failure = failure.message,
                    "pausing because of an error of a disk"
                );
                let late = format!(
                    "{message}; the machine can't be paused for it yet: {}",
                    failure.message
                );
                self.publisher.device_error(device.clone(), late);
                self.pause_again = Some((Instant::now() + PAUSE_AGAIN, error));
            }
        }
    }

    /// Answers a request, unless the answer comes later. Reports the request's immediate effects
    /// first.
    fn answer(&mut self, token: Token, result: Result<Progress, Failure>) -> Next {
        let result = match result {
            Ok(Progress::Pending) => {
                self.pending.push(token);
                self.collect();
                return Next::GoOn;
            }
            Ok(Progress::Done) => Ok(()),
            Err(failure) => Err(failure),
        };
        self.collect();
        self.publisher.reply(token, result);
        Next::GoOn
    }

    /// Reports the detached devices, then answers the pending requests that are done.
    fn collect(&mut self) {
        self.tell_detached();
        let answers = self.machine().map(|it| it.collect_answers()).unwrap_or_default();
        for (token, result) in answers {
            self.pending.retain(|pending| *pending != token);
            self.publisher.reply(token, result);
        }
    }

    fn tell_detached(&mut self) {
        let gone = self.machine().map(|it| it.collect_detached()).unwrap_or_default();
        for gone in gone {
            info!(what = %gone.what, name = gone.name, forced = gone.forced, "a device is gone");
            self.publisher.detached(gone);
        }
    }

    fn resume(&mut self) -> Result<(), Failure> {
        if let Some(failure) = self.needs_pause() {
            return Err(failure);
        }
        self.machine()?.resume()?;
        self.publisher.enter(State::Running);
        Ok(())
    }

    fn unlock_disks(&mut self) -> Result<(), Failure> {
        if let Some(failure) = self.needs_pause() {
            return Err(failure);
        }
        if self.publisher.state() != State::Paused {
            return Err(Failure {
                kind: ErrorKind::State,
                message: "the machine runs: pause it first".to_owned(),
            });
        }
        self.machine()?.unlock_disks()
    }

    /// For plugging devices in and taking them away.
    fn plugging(&mut self) -> Result<&mut dyn Machine, Failure> {
        self.keeps_devices()?;
        self.machine()
    }

    fn machine(&mut self) -> Result<&mut dyn Machine, Failure> {
        match &mut self.machine {
            Some(machine) => Ok(machine.as_mut()),
            None => Err(Failure {
                kind: ErrorKind::State,
                message: "no machine was booted".to_owned(),
            }),
        }
    }

    fn notice(&mut self, notice: Notice) -> Next {
        match notice {
            Notice::PowerOff if self.panicked => Next::End(self.panic_record(), None),
            Notice::PowerOff => Next::End(exit_record(ExitKind::PowerOff, "the guest powered off"), None),
            Notice::Reset => self.reset(ResetCause::Guest),
            Notice::TripleFault(message) if !self.stops_on_crash => self.reset(ResetCause::Crash(message)),
            Notice::GuestPanicked => {
                self.guest_panicked();
                Next::GoOn
            }
            Notice::PanicPrinted { printed } => {
                self.suspect_panic(printed);
                Next::GoOn
            }
            Notice::TripleFault(_) | Notice::GuestCrashed(_) if self.panicked => {
                Next::End(self.panic_record(), None)
            }
            Notice::TripleFault(message) | Notice::GuestCrashed(message) => {
                Next::End(exit_record(ExitKind::GuestCrash, message), None)
            }
            Notice::VmmFailed(message) => Next::End(exit_record(ExitKind::VmmError, message), None),
            Notice::DeviceError { device, message } => {
                debug!(device, message, "device error");
                self.publisher.device_error(device, message);
                Next::GoOn
            }
            Notice::DiskHeld { device, message } => {
                self.pause_for_error(DiskError { device, message });
                Next::GoOn
            }
            Notice::Snapshot(event) => self.on_snapshot(event),
            Notice::Unplugged | Notice::ImageOpened => {
                self.collect();
                Next::GoOn
            }
        }
    }

    fn stopped(&self) -> ExitRecord {
        if self.panicked {
            self.panic_record()
        } else {
            exit_record(ExitKind::Stopped, "stopped")
        }
    }

    fn panic_record(&self) -> ExitRecord {
        exit_record(
            ExitKind::GuestPanic,
            "the guest's kernel panicked and did not reset the machine",
        )
    }
}
