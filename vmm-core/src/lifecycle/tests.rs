mod channels;
mod disks;
mod held;
mod panic;
mod reset;
mod snapshot;
mod watchdog;

use std::cell::Cell;
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
    mpsc::{Sender, channel},
};

use vmm_protocol::vmm::{
    AttachDisk, AttachNic, AttachShare, Boot, DetachDisk, DetachNic, DetachShare, Disk, DiskStatsReply,
    ErrorKind, Event, ExitKind, ExitRecord, GetDiskStats, MachineSpec, Nic, OnCrash, Pause, PauseReason,
    PowerButton, Release, ResetMachine, ResizeDisk, Resume, Save, Send, Share, Stop, event::Kind,
};

use super::{driver::Driver, publisher::Audience, *};

/// Record of the calls to a machine.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn add(&self, line: impl Into<String>) {
        self.0.lock().unwrap().push(line.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

struct TestMachine {
    log: Log,
    inputs: Sender<Input>,
    pause_fails: bool,
    commit_fails: bool,
    holds: Arc<AtomicBool>,
    /// Gone and not yet told.
    detached: Arc<Mutex<Vec<Detached>>>,
    slow: Option<Token>,
    deadline: Option<(Token, Instant)>,
    answers: Vec<(Token, Result<(), Failure>)>,
    /// A snapshot needs the pause until it has ended.
    late: bool,
    /// The save ends with an error instead of a report.
    unsent: bool,
    /// How often a reset is to be asked for before it is done.
    reset_waits: u32,
    /// The run is stopped when the machine starts again after a reset.
    stops_after_reset: bool,
    was_reset: bool,
    /// Checks for a panic until the run is stopped. A check succeeds when its byte is beyond the number of checks that are left.
    panic_checks: u32,
    /// A vCPU's report just before it is stopped for the state of a capture.
    reported: Option<Notice>,
    /// How often its channels were read. At each time another one is open.
    channels_read: Cell<u32>,
}

impl TestMachine {
    fn tell(&self, event: saving::Event) {
        self.inputs.send(Input::Notice(Notice::Snapshot(event))).unwrap();
    }

    /// The guest is asked; by force it is gone at once, except a disk "slow", which is gone at its deadline.
    fn take_away(
        &mut self,
        what: Pluggable,
        token: Token,
        name: &str,
        force: bool,
    ) -> Result<Progress, Failure> {
        match name {
            "slow" if force => self.deadline = Some((token, Instant::now())),
            "none" => {
                return Err(Failure::of(ErrorKind::NotFound, "there is no disk none"));
            }
            _ if force => {
                self.detached.lock().unwrap().push(Detached {
                    what,
                    name: name.to_owned(),
                    forced: true,
                });
                self.answers.push((token, Ok(())));
            }
            _ => return Ok(Progress::Done),
        }
        Ok(Progress::Pending)
    }
}

impl Machine for TestMachine {
    fn pause(&mut self) -> Result<(), Failure> {
        self.log.add("pause");
        if let Some(token) = self.slow.take() {
            self.answers.push((token, Ok(())));
            self.inputs.send(Input::Notice(Notice::ImageOpened)).unwrap();
        }
        if self.pause_fails {
            return Err(Failure::of(ErrorKind::Internal, "disk root: slow"));
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        self.log.add("resume");
        Ok(())
    }

    fn reset(&mut self) -> Result<Reset, Failure> {
        if self.reset_waits > 0 {
            self.reset_waits -= 1;
            self.log.add("reset waits");
            return Ok(Reset::Waits("disk root".into()));
        }
        // A second vCPU asked too, before it was stopped; and a client is quick.
        self.inputs.send(Input::Notice(Notice::Reset)).unwrap();
        self.inputs.send(Input::Notice(Notice::PowerOff)).unwrap();
        self.inputs
            .send(request(99, Op::PowerButton(PowerButton {})))
            .unwrap();
        self.log.add("reset");
        self.was_reset = true;
        Ok(Reset::Done)
    }

    fn start(&mut self) -> Result<(), Failure> {
        self.log.add("start");
        if self.was_reset && self.stops_after_reset {
            self.inputs.send(request(9, STOP)).unwrap();
        }
        Ok(())
    }

    /// A disk "slow" is open after the next pause.
    fn operate(&mut self, token: Token, op: Op, _fds: Vec<OwnedFd>) -> Result<Progress, Failure> {
        self.log.add(match &op {
            Op::AttachDisk(attach) => format!("attach {}", attach.disk.as_ref().unwrap().name),
            Op::DetachDisk(detach) => format!("detach {}", detach.name),
            Op::PowerButton(_) => "button".into(),
            op => format!("{op:?}"),
        });
        match op {
            Op::AttachDisk(attach) if attach.disk.as_ref().unwrap().name == "slow" => self.slow = Some(token),
            Op::AttachDisk(_) => self.answers.push((token, Ok(()))),
            Op::DetachDisk(gone) => return self.take_away(Pluggable::Disk, token, &gone.name, gone.force),
            Op::DetachNic(gone) => return self.take_away(Pluggable::Nic, token, &gone.name, gone.force),
            Op::DetachShare(gone) => return self.take_away(Pluggable::Share, token, &gone.name, gone.force),
            Op::GetDiskStats(_) => {
                let counters = DiskStatsReply::default();
                return Ok(Progress::Answered(Answer::DiskStats(counters)));
            }
            _ => return Ok(Progress::Done),
        }
        Ok(Progress::Pending)
    }

    fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)> {
        let late = self.deadline.take_if(|(_, deadline)| Instant::now() > *deadline);
        self.answers.extend(late.map(|(token, _)| (token, Ok(()))));
        std::mem::take(&mut self.answers)
    }

    fn open_channels(&self) -> Vec<String> {
        self.channels_read.update(|count| count + 1);
        vec![format!("channel {}", self.channels_read.get())]
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.deadline.map(|(_, deadline)| deadline)
    }

    fn collect_detached(&mut self) -> Vec<Detached> {
        std::mem::take(&mut self.detached.lock().unwrap())
    }

    fn may_have_panicked(&mut self, printed: u64) -> Result<bool, Failure> {
        self.log.add(format!("panic at {printed}?"));
        self.panic_checks -= 1;
        if self.panic_checks == 0 {
            self.inputs.send(request(9, STOP)).unwrap();
        }
        Ok(printed > self.panic_checks.into())
    }

    fn holds_requests(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }

    fn commit_disks(&mut self) -> Result<(), Failure> {
        self.log.add("commit disks");
        match self.commit_fails {
            true => Err(Failure::of(
                ErrorKind::Resources,
                "disk \"root\": No space left on device",
            )),
            false => Ok(()),
        }
    }

    fn begin_snapshot(&mut self, _file: File, runs: bool) -> Result<(), Failure> {
        self.log.add(format!("begin snapshot, runs: {runs}"));
        self.tell(saving::Event::Ready);
        Ok(())
    }

    fn begin_migration(
        &mut self,
        _socket: File,
        purpose: saving::Purpose,
        send: &Send,
    ) -> Result<(), Failure> {
        let disks = &send.disks;
        self.log.add(format!("begin migration, disks: {disks:?}"));
        if !disks.is_empty() {
            self.tell(saving::Event::Disks { done: 3, total: 8 });
        }
        self.late = true;
        let saving::Purpose::Migration { downtime, policy } = purpose else {
            panic!("{purpose:?}");
        };
        let round = saving::Round {
            sent_bytes: 9,
            throttle: if policy == saving::Policy::PreferForced {
                20
            } else {
                0
            },
            ..saving::Round::default()
        };
        self.tell(saving::Event::Round(round));
        self.tell(saving::Event::Ready);
        self.unsent = downtime.is_zero();
        Ok(())
    }

    fn throttle(&mut self, percent: u8) -> Result<(), Failure> {
        if percent != 0 {
            self.log.add(format!("throttle {percent}"));
        }
        Ok(())
    }

    fn keep_time(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn complete_snapshot(&mut self, description: Vec<u8>, panicked: bool) -> Result<saving::GoesOn, Failure> {
        let description = String::from_utf8(description).unwrap();
        let mark = if panicked { " of a panicked guest" } else { "" };
        self.log.add(format!("complete snapshot {description}{mark}"));
        if let Some(notice) = self.reported.take() {
            self.inputs.send(Input::Notice(notice)).unwrap();
        }
        if description == "none" {
            return Err(Failure::of(ErrorKind::Internal, "no state"));
        }
        let send_release = || {
            let give_up = description.contains("given up");
            self.inputs.send(release(8, give_up)).unwrap();
        };
        if description.contains("copied first") {
            send_release();
        }
        self.tell(saving::Event::Ended);
        if description.contains("written first") {
            send_release();
        }
        match description.as_str() {
            _ if self.late => Ok(saving::GoesOn::WhenEnded),
            "late" | "late, copied first" => Ok(saving::GoesOn::WhenEnded),
            _ => Ok(saving::GoesOn::Now),
        }
    }

    fn end_snapshot(&mut self) -> Result<saving::Report, Failure> {
        self.log.add("end snapshot");
        self.inputs.send(request(9, STOP)).unwrap();
        if self.unsent {
            return Err(Failure::of(ErrorKind::Internal, "not sent"));
        }
        Ok(saving::Report {
            file_bytes: 7,
            ..saving::Report::default()
        })
    }

    fn give_up_snapshot(&mut self) {
        self.log.add("give up snapshot");
        self.tell(saving::Event::Ended);
    }

    fn halt(&mut self) {
        self.log.add("halt");
    }
}

struct TestBuilder {
    log: Log,
    inputs: Sender<Input>,
    pause_fails: bool,
    commit_fails: bool,
    fails: bool,
    holds: Arc<AtomicBool>,
    detached: Arc<Mutex<Vec<Detached>>>,
    reset_waits: u32,
    stops_after_reset: bool,
    reported: Option<Notice>,
}

impl TestBuilder {
    fn new(log: &Log, inputs: &Sender<Input>) -> Self {
        Self {
            log: log.clone(),
            inputs: inputs.clone(),
            pause_fails: false,
            commit_fails: false,
            fails: false,
            holds: Arc::default(),
            detached: Arc::default(),
            reset_waits: 0,
            stops_after_reset: false,
            reported: None,
        }
    }
}

impl Builder for TestBuilder {
    type Machine = TestMachine;

    fn build(
        &mut self,
        _spec: &MachineSpec,
        _fds: Vec<OwnedFd>,
        restore: Option<&Restore>,
        _notifier: Notifier,
    ) -> Result<TestMachine, Failure> {
        if restore.is_some() {
            self.log.add("restore");
        }
        if self.fails {
            return Err(Failure::of(ErrorKind::Image, "kernel: not a kernel"));
        }
        let (log, inputs) = (self.log.clone(), self.inputs.clone());
        Ok(TestMachine {
            log,
            inputs,
            pause_fails: self.pause_fails,
            commit_fails: self.commit_fails,
            holds: Arc::clone(&self.holds),
            detached: Arc::clone(&self.detached),
            slow: None,
            deadline: None,
            answers: Vec::new(),
            late: false,
            unsent: false,
            reset_waits: self.reset_waits,
            stops_after_reset: self.stops_after_reset,
            was_reset: false,
            panic_checks: 5,
            reported: self.reported.take(),
            channels_read: Cell::new(0),
        })
    }
}

impl Audience for Log {
    fn event(&self, event: Event) {
        self.add(match event.kind.unwrap() {
            Kind::StateChanged(changed) => {
                let status = changed.status.unwrap();
                match status.pause_reason() {
                    PauseReason::DiskError => format!("is {:?}: {}", status.state(), status.pause_message),
                    PauseReason::Migration => format!("is {:?} for a migration", status.state()),
                    PauseReason::Watchdog => format!("is {:?} for the watchdog", status.state()),
                    PauseReason::Snapshot => format!("is {:?} for a snapshot", status.state()),
                    reason => {
                        let requested = reason == PauseReason::Requested;
                        assert_eq!(requested, status.state() == vmm_protocol::vmm::State::Paused);
                        assert_eq!(status.pause_message, "");
                        format!("is {:?}", status.state())
                    }
                }
            }
            Kind::GuestReset(reset) => format!("guest reset {}", reset.guest_resets),
            Kind::CrashReset(reset) => format!("crash reset {}: {}", reset.crash_resets, reset.message),
            Kind::GuestPanicked(_) => "guest panicked".into(),
            Kind::WatchdogExpired(_) => "watchdog expired".into(),
            Kind::DeviceError(error) => format!("{}: {}", error.device, error.message),
            Kind::Ended(ended) => format!("ended {:?}", ended.exit.unwrap().kind()),
            Kind::DisksQuiet(quiet) => {
                assert_eq!(quiet.number, NUMBER);
                "disks quiet".into()
            }
            Kind::MigrationDisks(disks) => format!("disks {} of {}", disks.done_bytes, disks.total_bytes),
            Kind::MigrationRound(round) => format!("round {}, {} sent", round.number, round.sent_bytes),
            Kind::DiskDetached(gone) => format!("disk {} detached, forced {}", gone.name, gone.forced),
            Kind::NicDetached(gone) => format!("nic {} detached, forced {}", gone.name, gone.forced),
            Kind::ShareDetached(gone) => format!("share {} detached, forced {}", gone.name, gone.forced),
            Kind::ChannelsChanged(channels) => format!("open: {}", channels.open.join(", ")),
        });
    }

    fn reply(&self, token: Token, answer: Result<Answer, Failure>) {
        self.add(match answer {
            Ok(Answer::Sent(reply)) => format!("{} sent {}", token.request, reply.sent_bytes),
            Ok(Answer::Saved(reply)) => format!("{} saved {}", token.request, reply.file_bytes),
            Ok(Answer::DiskStats(_)) => format!("{} stats", token.request),
            Ok(Answer::Status(status)) => {
                format!("{} ok {:?} {}", token.request, status.state(), status.name)
            }
            Ok(other) => panic!("{other:?}"),
            Err(failure) => format!("{} {:?}", token.request, failure.kind),
        });
    }
}

fn token(request: u64) -> Token {
    Token {
        connection: 1,
        request,
    }
}

/// Number of each save.
const NUMBER: u64 = 5;
const PAUSE: Op = Op::Pause(Pause {});
const RESUME: Op = Op::Resume(Resume {});
const STOP: Op = Op::Stop(Stop {});
const RESET: Op = Op::ResetMachine(ResetMachine {});
const GET_DISK_STATS: Op = Op::GetDiskStats(GetDiskStats {});

fn boot(paused: bool) -> Op {
    boot_with(OnCrash::Unspecified, paused)
}

fn boot_with(on_crash: OnCrash, paused: bool) -> Op {
    let spec = MachineSpec {
        name: "web".into(),
        on_crash: on_crash.into(),
        ..MachineSpec::default()
    };
    Op::Boot(Boot {
        machine: Some(spec),
        paused,
        restore: None,
    })
}

fn release(id: u64, give_up: bool) -> Input {
    request(id, Op::Release(Release { give_up }))
}

fn triple_fault() -> Input {
    Input::Notice(Notice::TripleFault("vCPU 0: triple fault".into()))
}

/// Puts all inputs in the queue, runs the driver to its end, and gives what happened in order.
fn run(inputs: Vec<Input>, change: impl FnOnce(&mut TestBuilder)) -> (Vec<String>, ExitRecord) {
    let (sender, receiver) = channel();
    let log = Log::default();
    let mut builder = TestBuilder::new(&log, &sender);
    change(&mut builder);
    for input in inputs {
        sender.send(input).unwrap();
    }
    let driver = Driver::new(receiver, Notifier::new(sender), log.clone(), builder);
    let record = driver.run(|record| log.add(format!("record {:?}", record.kind())));
    (log.take(), record)
}

fn request(id: u64, request: impl Into<super::Request>) -> Input {
    Input::Request(token(id), Box::new(request.into()))
}

#[test]
fn power_off_writes_the_record_before_the_event() {
    let (log, record) = run(
        vec![request(1, boot(false)), Input::Notice(Notice::PowerOff)],
        |_| (),
    );
    assert_eq!(
        log,
        [
            "start",
            "is Running",
            "1 ok Running web",
            "halt",
            "record PowerOff",
            "is Ended",
            "ended PowerOff"
        ],
    );
    assert_eq!(record.kind(), ExitKind::PowerOff);
    assert_ne!(record.time_unix_ms, 0);
}

#[test]
fn pause_and_resume_change_the_state_once_and_succeed_again() {
    let (log, _) = run(
        vec![
            request(1, boot(true)),
            request(2, RESUME),
            request(3, RESUME),
            request(4, PAUSE),
            request(5, PAUSE),
            request(6, Op::PowerButton(PowerButton {})),
            request(7, STOP),
        ],
        |_| (),
    );
    assert_eq!(
        log,
        [
            "is Paused",
            "1 ok Paused web",
            "resume",
            "is Running",
            "2 ok Running web",
            "3 ok Running web",
            "pause",
            "is Paused",
            "4 ok Paused web",
            "5 ok Paused web",
            "6 State",
            "halt",
            "record Stopped",
            "is Ended",
            "ended Stopped",
            "7 ok Ended web",
        ],
    );
}

#[test]
fn operations_without_their_parts_are_invalid() {
    let log = run(
        vec![
            request(1, Op::Boot(Boot::default())),
            request(2, boot(false)),
            request(3, Op::Save(Save::default())),
            request(4, Op::Send(Send::default())),
            request(5, STOP),
        ],
        |_| (),
    )
    .0;
    assert_eq!(log[0], "1 Invalid");
    assert_eq!(log[4..6], ["3 Invalid", "4 Invalid"]);
}

#[test]
fn a_pause_that_fails_leaves_the_machine_running() {
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            request(2, PAUSE),
            request(3, Op::PowerButton(PowerButton {})),
            request(4, STOP),
        ],
        |builder| builder.pause_fails = true,
    );
    assert_eq!(log[3..7], ["pause", "2 Internal", "button", "3 ok Running web"]);
}

#[test]
fn crash_or_host_failure_ends_the_run_with_its_kind() {
    let crashed = Notice::GuestCrashed("vCPU 0: emulation failure".into());
    let failed = Notice::VmmFailed("KVM_RUN: bad address".into());
    for (notice, on_crash, kind) in [
        (triple_fault(), OnCrash::Stop, ExitKind::GuestCrash),
        (
            Input::Notice(crashed.clone()),
            OnCrash::Stop,
            ExitKind::GuestCrash,
        ),
        (Input::Notice(crashed), OnCrash::Restart, ExitKind::GuestCrash),
        (Input::Notice(failed), OnCrash::Restart, ExitKind::VmmError),
    ] {
        let (log, record) = run(vec![request(1, boot_with(on_crash, false)), notice], |_| ());
        assert_eq!(record.kind(), kind);
        assert!(record.message.contains(": "));
        assert!(!log.contains(&"reset".to_owned()), "{log:?}");
    }
}

#[test]
fn a_failed_boot_answers_with_its_kind_and_ends_the_process() {
    let (log, record) = run(vec![request(1, boot(false))], |builder| builder.fails = true);
    assert_eq!(
        log,
        ["1 Image", "record StartFailed", "is Ended", "ended StartFailed"]
    );
    assert_eq!(record.message, "kernel: not a kernel");
}

#[test]
fn a_process_that_nobody_will_boot_ends_and_a_running_one_stays() {
    let (_, record) = run(vec![Input::Abandoned], |_| ());
    assert_eq!(record.kind(), ExitKind::StartFailed);
    let inputs = vec![
        request(1, boot(false)),
        Input::Abandoned,
        Input::Notice(Notice::PowerOff),
    ];
    assert_eq!(run(inputs, |_| ()).1.kind(), ExitKind::PowerOff);
}

#[test]
fn device_errors_are_passed_on() {
    let error = Notice::DeviceError {
        device: "disk root".into(),
        message: "read: I/O error".into(),
    };
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            Input::Notice(error),
            Input::Notice(Notice::PowerOff),
        ],
        |_| (),
    );
    assert!(log.contains(&"disk root: read: I/O error".to_owned()));
}
