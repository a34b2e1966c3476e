use std::sync::{
    Arc, Mutex,
    mpsc::{Sender, channel},
};

use proto::vmm::{Event, ExitKind, ExitRecord, Status, event::Kind};

use super::{driver::Driver, publisher::Audience, *};

/// Notes what it is told to do.
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
}

impl Machine for TestMachine {
    fn pause(&mut self) -> Result<(), Failure> {
        self.log.add("pause");
        if self.pause_fails {
            return Err(Failure {
                kind: ErrorKind::Internal,
                message: "disk root: slow".into(),
            });
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        self.log.add("resume");
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Failure> {
        // A second vCPU asked too, before it was stopped; and a client is quick.
        self.inputs.send(Input::Notice(Notice::Reset)).unwrap();
        self.inputs.send(Input::Notice(Notice::PowerOff)).unwrap();
        self.inputs
            .send(Input::Request(token(99), Request::PowerButton))
            .unwrap();
        self.log.add("reset");
        Ok(())
    }

    fn start(&mut self) -> Result<(), Failure> {
        self.log.add("start");
        Ok(())
    }

    fn press_power_button(&mut self) {
        self.log.add("button");
    }

    fn halt(&mut self) {
        self.log.add("halt");
    }
}

struct TestBuilder {
    log: Log,
    inputs: Sender<Input>,
    pause_fails: bool,
    fails: bool,
}

impl Builder for TestBuilder {
    fn build(
        &mut self,
        _spec: &MachineSpec,
        _fds: Vec<OwnedFd>,
        _notifier: Notifier,
    ) -> Result<Box<dyn Machine>, Failure> {
        if self.fails {
            return Err(Failure {
                kind: ErrorKind::Image,
                message: "kernel: not a kernel".into(),
            });
        }
        let (log, inputs) = (self.log.clone(), self.inputs.clone());
        Ok(Box::new(TestMachine {
            log,
            inputs,
            pause_fails: self.pause_fails,
        }))
    }
}

impl Audience for Log {
    fn event(&self, event: Event) {
        self.add(match event.kind.unwrap() {
            Kind::StateChanged(changed) => format!("is {:?}", changed.status.unwrap().state()),
            Kind::GuestReset(reset) => format!("guest reset {}", reset.guest_resets),
            Kind::GuestPanicked(_) => "guest panicked".into(),
            Kind::DeviceError(error) => format!("{}: {}", error.device, error.message),
            Kind::Ended(ended) => format!("ended {:?}", ended.exit.unwrap().kind()),
            Kind::DiskDetached(gone) => format!("disk {} detached", gone.name),
        });
    }

    fn reply(&self, token: Token, answer: Result<Status, Failure>) {
        self.add(match answer {
            Ok(status) => format!("{} ok {:?} {}", token.request, status.state(), status.name),
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

fn boot(paused: bool) -> Request {
    let spec = Box::new(MachineSpec {
        name: "web".into(),
        ..MachineSpec::default()
    });
    Request::Boot {
        spec,
        fds: Vec::new(),
        paused,
    }
}

/// Puts all inputs in the queue, runs the driver to its end, and gives what happened in order.
fn run(inputs: Vec<Input>, change: impl FnOnce(&mut TestBuilder)) -> (Vec<String>, ExitRecord) {
    let (sender, receiver) = channel();
    let log = Log::default();
    let mut builder = TestBuilder {
        log: log.clone(),
        inputs: sender.clone(),
        pause_fails: false,
        fails: false,
    };
    change(&mut builder);
    for input in inputs {
        sender.send(input).unwrap();
    }
    let driver = Driver::new(receiver, Notifier::new(sender), log.clone(), builder);
    let record = driver.run(|record| log.add(format!("record {:?}", record.kind())));
    (log.take(), record)
}

fn request(id: u64, request: Request) -> Input {
    Input::Request(token(id), request)
}

#[test]
fn a_guest_that_powers_off_ends_its_run_with_the_record_before_the_event() {
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
            request(2, Request::Resume),
            request(3, Request::Resume),
            request(4, Request::Pause),
            request(5, Request::Pause),
            request(6, Request::PowerButton),
            request(7, Request::Stop),
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
fn a_pause_that_fails_leaves_the_machine_running() {
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            request(2, Request::Pause),
            request(3, Request::PowerButton),
            request(4, Request::Stop),
        ],
        |builder| builder.pause_fails = true,
    );
    assert_eq!(log[3..7], ["pause", "2 Internal", "button", "3 ok Running web"]);
}

#[test]
fn a_reset_drops_what_the_old_guest_still_said_and_keeps_requests() {
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            Input::Notice(Notice::Reset),
            request(2, Request::Stop),
        ],
        |_| (),
    );
    assert_eq!(log[3..6], ["reset", "guest reset 1", "start"]);
    assert!(log.contains(&"ended Stopped".to_owned()), "{log:?}");
}

#[test]
fn a_panic_is_told_once_and_is_the_reason_when_the_machine_is_stopped_after_it() {
    let panic = || Input::Notice(Notice::GuestPanicked);
    let (log, record) = run(
        vec![
            request(1, boot(false)),
            panic(),
            panic(),
            request(2, Request::Stop),
        ],
        |_| (),
    );
    assert_eq!(log.iter().filter(|line| *line == "guest panicked").count(), 1);
    assert_eq!(record.kind(), ExitKind::GuestPanic);
}

#[test]
fn a_guest_that_resets_after_its_panic_is_not_called_panicked_later() {
    let inputs = vec![
        request(1, boot(false)),
        Input::Notice(Notice::GuestPanicked),
        Input::Notice(Notice::Reset),
        request(2, Request::Stop),
    ];
    assert_eq!(run(inputs, |_| ()).1.kind(), ExitKind::Stopped);
}

#[test]
fn a_triple_fault_is_a_crash_and_a_failure_of_the_host_is_ours() {
    for (notice, kind) in [
        (
            Notice::GuestCrashed("vCPU 0: triple fault".into()),
            ExitKind::GuestCrash,
        ),
        (
            Notice::VmmFailed("KVM_RUN: bad address".into()),
            ExitKind::VmmError,
        ),
    ] {
        let (_, record) = run(vec![request(1, boot(false)), Input::Notice(notice)], |_| ());
        assert_eq!(record.kind(), kind);
        assert!(record.message.contains(": "));
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
