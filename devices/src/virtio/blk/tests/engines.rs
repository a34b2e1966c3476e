//! Engines that fail, and engines that take their time.

use std::{os::fd::RawFd, time::Duration};

use block::{Completion, Engine, Geometry, Request};

use super::*;

/// Fails as a host does.
pub struct BadImage(pub io::ErrorKind);

impl Image for BadImage {
    fn capacity(&self) -> u64 {
        4096
    }
    fn read_only(&self) -> bool {
        false
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block: 4096,
            optimal_io: 0,
            discard_granularity: None,
        }
    }
    fn grow(&self, _capacity: Option<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn commit(&self) -> io::Result<()> {
        Ok(())
    }
    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(BadEngine {
            kind: self.0,
            done: Vec::new(),
        }))
    }
}

struct BadEngine {
    kind: io::ErrorKind,
    done: Vec<Completion>,
}

impl Engine for BadEngine {
    fn at_hand(&mut self) -> Option<Completion> {
        self.completed()
    }

    /// It sleeps nowhere but in [`wait`](Engine::wait).
    fn commit_and_sleep(&mut self, _other: RawFd, _limit: Option<Duration>) -> io::Result<bool> {
        Ok(false)
    }

    fn other_called(&mut self) -> bool {
        false
    }

    fn forget_other(&mut self) {}

    fn is_prompt(&self) -> bool {
        true
    }

    fn submit(&mut self, request: Request) {
        let result = Err(self.kind.into());
        self.done.push(Completion {
            token: request.token,
            result,
            buffers: request.buffers,
        });
    }
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn completed(&mut self) -> Option<Completion> {
        self.done.pop()
    }
    fn in_flight(&self) -> usize {
        self.done.len()
    }
    fn depth(&self) -> usize {
        8
    }
    fn event(&self) -> Option<&EventFd> {
        None
    }
    fn wait(&mut self, _deadline: Instant) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn errors_of_the_host_become_io_errors_a_counter_and_an_event() {
    let front = Blk::new(Box::new(BadImage(io::ErrorKind::StorageFull)), options());
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(ALL);
    for _ in 0..20 {
        assert_eq!(write(&mut driver, 0, &[0; 512]), IOERR);
        assert_eq!(read(&mut driver, 0, 512).1, IOERR);
        assert_eq!(request(&mut driver, header(FLUSH, 0), 0).1, IOERR);
    }
    let event = driver.rig.sink.wait();
    let expected = |message: &str| message.starts_with("write to the image: ");
    assert!(
        matches!(&event, DeviceEvent::BackendError(message) if expected(message)),
        "{event:?}"
    );
    // The last answer may be seen before its fault is counted.
    assert!(
        driver
            .rig
            .device
            .counters()
            .backend_faults
            .load(Ordering::Relaxed)
            >= 59
    );
    assert!(driver.rig.sink.events().len() <= 5);
}

/// Image that records operations and completes requests only on demand.
struct SlowImage(Arc<SlowState>);

struct SlowState {
    asked: Mutex<Vec<Operation>>,
    waiting: Mutex<Vec<Request>>,
    done: Mutex<Vec<Request>>,
    event: EventFd,
}

struct SlowEngine(Arc<SlowState>);

impl SlowState {
    /// The last request completes first: any order is allowed.
    fn finish_all(&self) {
        self.done
            .lock()
            .unwrap()
            .append(&mut self.waiting.lock().unwrap());
        self.event.write(1).unwrap();
    }
}

impl Image for SlowImage {
    fn capacity(&self) -> u64 {
        1 << 20
    }
    fn read_only(&self) -> bool {
        false
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block: 4096,
            optimal_io: 0,
            discard_granularity: Some(4096),
        }
    }
    fn grow(&self, _capacity: Option<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn commit(&self) -> io::Result<()> {
        Ok(())
    }
    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(SlowEngine(self.0.clone())))
    }
}

impl Engine for SlowEngine {
    fn at_hand(&mut self) -> Option<Completion> {
        self.completed()
    }

    /// It sleeps nowhere but in [`wait`](Engine::wait).
    fn commit_and_sleep(&mut self, _other: RawFd, _limit: Option<Duration>) -> io::Result<bool> {
        Ok(false)
    }

    fn other_called(&mut self) -> bool {
        false
    }

    fn forget_other(&mut self) {}

    fn is_prompt(&self) -> bool {
        true
    }

    fn submit(&mut self, request: Request) {
        let operation = request.operation;
        self.0.waiting.lock().unwrap().push(request);
        self.0.asked.lock().unwrap().push(operation);
    }
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn completed(&mut self) -> Option<Completion> {
        let Request { token, buffers, .. } = self.0.done.lock().unwrap().pop()?;
        Some(Completion {
            token,
            result: Ok(()),
            buffers,
        })
    }
    fn in_flight(&self) -> usize {
        // One lock after the other: `finish_all` takes them in the other order.
        let waiting = self.0.waiting.lock().unwrap().len();
        waiting + self.0.done.lock().unwrap().len()
    }
    fn depth(&self) -> usize {
        4
    }
    fn event(&self) -> Option<&EventFd> {
        Some(&self.0.event)
    }
    /// As if all were done in time, if there is any.
    fn wait(&mut self, deadline: Instant) -> io::Result<()> {
        if Instant::now() < deadline {
            self.0.finish_all();
        }
        Ok(())
    }
}

fn slow() -> (Arc<SlowState>, Driver) {
    let state = Arc::new(SlowState {
        asked: Mutex::default(),
        waiting: Mutex::default(),
        done: Mutex::default(),
        event: EventFd::new(EFD_NONBLOCK).unwrap(),
    });
    let front = Blk::new(Box::new(SlowImage(state.clone())), options());
    let mut driver = Driver::new(Rig::new(Box::new(front)));
    driver.start(ALL);
    (state, driver)
}

#[test]
fn requests_beyond_an_engines_depth_wait_and_all_are_answered_in_any_order() {
    let (state, mut driver) = slow();
    for sector in 0..10 {
        driver.offer(0, &[Buffer::Readable(header(IN, sector)), Buffer::Writable(513)]);
    }
    driver.kick(0);
    for (asked, left) in [(4, 6), (8, 2), (10, 0)] {
        until(|| state.asked.lock().unwrap().len() == asked);
        state.finish_all();
        while driver.under_way(0) > left {
            assert_eq!(driver.wait_used(0).1.pop(), Some(OK));
        }
    }
}

#[test]
fn a_pause_waits_for_requests_under_way_or_fails_and_the_device_goes_on() {
    use crate::component::Component;
    let (state, mut driver) = slow();
    driver.submit(0, &[Buffer::Readable(header(IN, 0)), Buffer::Writable(513)]);
    until(|| state.asked.lock().unwrap().len() == 1);
    assert!(driver.rig.device.pause(Instant::now()).is_err());
    state.finish_all();
    assert_eq!(driver.wait_used(0).1.pop(), Some(OK));
    driver.submit(0, &[Buffer::Readable(header(IN, 0)), Buffer::Writable(513)]);
    until(|| state.asked.lock().unwrap().len() == 2);
    driver.rig.pause();
    assert_eq!(driver.try_used(0).unwrap().1.pop(), Some(OK));
    driver.rig.device.resume().unwrap();
}

#[test]
fn writes_are_stable_when_answered_if_the_driver_can_not_flush() {
    for (features, expected) in [(ALL, false), (ALL & !F_FLUSH, true)] {
        let (state, mut driver) = slow();
        driver.start(features);
        driver.submit(
            0,
            &[
                Buffer::Readable([header(OUT, 1), vec![0; 512]].concat()),
                Buffer::Writable(1),
            ],
        );
        until(|| !state.waiting.lock().unwrap().is_empty());
        state.finish_all();
        driver.wait_used(0);
        let asked = state.asked.lock().unwrap().clone();
        assert_eq!(
            asked,
            [Operation::Write {
                offset: 512,
                stable: expected
            }]
        );
    }
}

#[test]
fn ranges_are_stable_when_answered_without_flush() {
    let range = |sector: u64| {
        let mut range = sector.to_le_bytes().to_vec();
        range.extend(8_u32.to_le_bytes());
        range.extend([0; 4]);
        range
    };
    for (features, flushes) in [(ALL, 0), (ALL & !F_FLUSH, 1)] {
        for kind in [DISCARD, WRITE_ZEROES] {
            let (state, mut driver) = slow();
            driver.start(features);
            let data = [header(kind, 0), range(0), range(16)].concat();
            driver.submit(0, &[Buffer::Readable(data), Buffer::Writable(1)]);
            for asked in 1..=2 + flushes {
                until(|| state.asked.lock().unwrap().len() == asked);
                assert!(driver.try_used(0).is_none(), "{asked}");
                state.finish_all();
            }
            assert_eq!(driver.wait_used(0).1, [OK]);
            let asked = state.asked.lock().unwrap().clone();
            assert_eq!(asked.len(), 2 + flushes, "{asked:?}");
            let flushed = asked
                .iter()
                .skip(2)
                .all(|operation| *operation == Operation::Flush);
            assert!(flushed, "{asked:?}");
        }
    }
}
