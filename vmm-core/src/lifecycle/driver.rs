//! The one thread that owns the machine: takes a request or a notice, acts, publishes, takes the next.

mod channels;
mod panic;
mod reset;
mod snapshot;
mod watchdog;

use std::{
    os::fd::OwnedFd,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use devices::log_limit::LogLimit;
use tracing::{debug, info, warn};
use vmm_protocol::vmm::{Boot, ErrorKind, ExitKind, ExitRecord, OnCrash, WatchdogAction, request::Op};

use self::reset::{ResetCause, is_of_the_guest};
use super::{
    Builder, Failure, Input, Machine, Notice, Notifier, Progress, Request, Token,
    admission::{Admission, State, admit},
    publisher::{Audience, Publisher, exit_record},
};

/// Drives one machine from an empty process to its end.
pub struct Driver<A, B: Builder> {
    inputs: Receiver<Input>,
    notifier: Notifier,
    publisher: Publisher<A>,
    builder: B,
    machine: Option<B::Machine>,
    /// The guest's kernel panicked and has not been reset since.
    panicked: bool,
    /// The serial port shows what looks like a panic.
    suspicion: Option<panic::Suspicion>,
    /// The run ends with a triple fault, which else resets the machine.
    stops_on_crash: bool,
    /// Action when the watchdog expires.
    watchdog: WatchdogAction,
    /// Limit for log lines about events that a guest can cause repeatedly.
    log_limit: LogLimit,
    /// The machine could not be paused after a disk's error: when it is tried again, and the error.
    pause_again: Option<(Instant, DiskError)>,
    /// When the channels were published, and are published again.
    channels: channels::Published,
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
            watchdog: WatchdogAction::None,
            log_limit: LogLimit::new(),
            pause_again: None,
            channels: channels::Published::default(),
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
                    exit_record(ExitKind::VmmError, "all senders of requests are gone"),
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
        if self.channels.due.is_some_and(|due| Instant::now() >= due) {
            self.publish_channels();
        }
        Next::GoOn
    }

    fn next_input(&self) -> Result<Input, RecvTimeoutError> {
        let again = self.pause_again.as_ref().map(|(when, _)| *when);
        let answer = self.machine.as_ref().and_then(|machine| machine.next_deadline());
        let reset = self.continues_reset_at();
        let panic = self.suspicion.as_ref().map(panic::Suspicion::due);
        let channels = self.channels.due;
        match [again, answer, reset, panic, channels]
            .into_iter()
            .flatten()
            .min()
        {
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
            Input::Request(token, request) => self.request(token, *request),
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
            let failure = Failure::of(ErrorKind::State, "the machine ended before this was done");
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
        let Request { op, fds } = request;
        if let Some(result) = self.answered(&op) {
            self.publisher.reply(token, result);
            return Next::GoOn;
        }
        let result = match op {
            Op::Stop(_) => return Next::End(self.stopped(), Some(token)),
            Op::Boot(boot) => return self.boot(token, boot, fds),
            Op::Save(save) => match self.begin_snapshot(token, save, fds) {
                Ok(Ok(())) => return Next::GoOn,
                Ok(Err(failure)) => Err(failure),
                Err(failure) => return Self::lost(&failure),
            },
            Op::Send(send) => match self.begin_migration(token, &send, fds) {
                Ok(()) => return Next::GoOn,
                Err(failure) => Err(failure),
            },
            Op::ResetMachine(_) => return self.reset(ResetCause::Request(token)),
            Op::Pause(_) => self.pause(),
            Op::Resume(_) => self.resume(),
            Op::Release(release) => {
                let released = match release.give_up {
                    true => self.give_up(),
                    false => self.release(),
                };
                match released {
                    Ok(result) => result,
                    Err(failure) => return Self::lost(&failure),
                }
            }
            op => {
                self.operate(token, op, fds);
                return Next::GoOn;
            }
        };
        self.publisher.reply(token, result);
        Next::GoOn
    }

    /// Answers an operation that is not carried out: it is refused, or its result exists already. `None` if it is to be
    /// carried out.
    fn answered(&mut self, op: &Op) -> Option<Result<(), Failure>> {
        if let Some(failure) = self.refused_by_reset(op) {
            return Some(Err(failure));
        }
        match admit(self.publisher.state(), op) {
            Admission::Already => {
                if matches!(op, Op::Pause(_)) {
                    self.stays_paused();
                }
                Some(Ok(()))
            }
            Admission::Refuse(reason) => Some(Err(Failure::of(ErrorKind::State, reason))),
            Admission::Go => self.refused_by_capture(op).map(Err),
        }
    }

    /// Passes an operation on to the machine. Reports the immediate effects before the answer.
    fn operate(&mut self, token: Token, op: Op, fds: Vec<OwnedFd>) {
        let progress = self.machine().and_then(|it| it.operate(token, op, fds));
        let result = match progress {
            Ok(Progress::Answered(answer)) => return self.publisher.reply_with(token, answer),
            Ok(Progress::Pending) => {
                self.pending.push(token);
                return self.collect();
            }
            Ok(Progress::Done) => Ok(()),
            Err(failure) => Err(failure),
        };
        self.collect();
        self.publisher.reply(token, result);
    }

    fn boot(&mut self, token: Token, boot: Boot, fds: Vec<OwnedFd>) -> Next {
        let Boot {
            machine: Some(spec),
            paused,
            restore,
        } = boot
        else {
            let missing = Failure::of(ErrorKind::Invalid, "Boot without a machine");
            self.publisher.reply(token, Err(missing));
            return Next::GoOn;
        };
        self.publisher.set_name(&spec.name);
        self.stops_on_crash = spec.on_crash() == OnCrash::Stop;
        if let Some(watchdog) = &spec.watchdog {
            self.watchdog = watchdog.action();
        }
        let started = self
            .builder
            .build(&spec, fds, restore.as_ref(), self.notifier.clone())
            .and_then(|mut machine| {
                match &restore {
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
                let late = format!("{message}; the machine cannot be paused yet: {}", failure.message);
                self.publisher.device_error(device.clone(), late);
                self.pause_again = Some((Instant::now() + PAUSE_AGAIN, error));
            }
        }
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
        let paused = self.machine.take().ok_or_else(no_machine)?;
        self.machine = Some(self.builder.renew(paused)?);
        self.machine()?.resume()?;
        self.publisher.enter(State::Running);
        Ok(())
    }

    fn machine(&mut self) -> Result<&mut dyn Machine, Failure> {
        match &mut self.machine {
            Some(machine) => Ok(machine),
            None => Err(no_machine()),
        }
    }

    fn notice(&mut self, notice: Notice) -> Next {
        match notice {
            Notice::PowerOff if self.panicked => Next::End(self.panic_record(), None),
            Notice::PowerOff => Next::End(exit_record(ExitKind::PowerOff, "the guest powered off"), None),
            Notice::Reset => self.reset(ResetCause::Guest),
            Notice::TripleFault(message) if !self.stops_on_crash => self.reset(ResetCause::Crash(message)),
            Notice::GuestPanicked(parameters) => {
                self.guest_panicked(parameters.as_ref().map_or(&[], |them| them));
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
            Notice::WatchdogStarted => Next::GoOn,
            Notice::WatchdogExpired => self.watchdog_expired(),
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
            Notice::ChannelsChanged => {
                self.on_channels();
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

fn no_machine() -> Failure {
    Failure::of(ErrorKind::State, "no machine was booted")
}
