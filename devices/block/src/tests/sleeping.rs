//! Sleeping in the ring, for completions and for something else.

use std::{os::fd::AsRawFd as _, time::Duration};

use vmm_base::sys::event::wait_for;
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::*;

/// A test that sleeps so long has failed.
const LONG: Duration = Duration::from_secs(1000);

fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

/// A write of 4 KiB is submitted, and slept on; says whether that was possible.
fn sleep_on_a_write(engine: &mut dyn Engine, memory: &Arc<GuestMemory>, other: &EventFd) -> bool {
    engine.submit(request(memory, 1, write(0), 0, 4096));
    engine.commit_and_sleep(other.as_raw_fd(), None).unwrap()
}

/// Takes the completions of all requests in flight.
fn take_one(engine: &mut dyn Engine) {
    while engine.in_flight() > 0 {
        if let Some(completion) = engine.completed() {
            completion.result.unwrap();
        } else {
            engine.wait(late()).unwrap();
        }
    }
    assert!(engine.completed().is_none());
}

fn ring() -> Option<(Setup, Box<dyn Engine>)> {
    let setup = Setup::new(Which::Uring, Cache::Buffered, 1 << 20)?;
    let engine = setup.engine();
    Some((setup, engine))
}

#[test]
fn who_sleeps_is_woken_by_a_completion() {
    let Some((_setup, mut engine)) = ring() else {
        return;
    };
    let (memory, other) = (memory(), event());
    for _ in 0..3 {
        assert!(sleep_on_a_write(&mut *engine, &memory, &other));
        take_one(&mut *engine);
        assert!(!engine.other_called());
    }
    assert!(
        !engine.commit_and_sleep(other.as_raw_fd(), None).unwrap(),
        "slept for nothing"
    );
}

#[test]
fn the_other_calls_once_and_nobody_sleeps_before_it_is_asked_about() {
    let Some((_setup, mut engine)) = ring() else {
        return;
    };
    let (memory, other) = (memory(), event());
    assert!(sleep_on_a_write(&mut *engine, &memory, &other));
    take_one(&mut *engine);
    other.write(1).unwrap();
    assert!(sleep_on_a_write(&mut *engine, &memory, &other));
    take_one(&mut *engine);
    assert!(!sleep_on_a_write(&mut *engine, &memory, &other));
    engine.commit().unwrap();
    take_one(&mut *engine);
    assert!(engine.other_called());
    assert!(!engine.other_called());
    other.read().unwrap();
    assert!(sleep_on_a_write(&mut *engine, &memory, &other));
    take_one(&mut *engine);
    assert!(!engine.other_called());
}

#[test]
fn what_was_forgotten_does_not_call() {
    let Some((_setup, mut engine)) = ring() else {
        return;
    };
    let (memory, former, other) = (memory(), event(), event());
    assert!(sleep_on_a_write(&mut *engine, &memory, &former));
    take_one(&mut *engine);
    engine.forget_other();
    former.write(1).unwrap();
    for _ in 0..3 {
        assert!(sleep_on_a_write(&mut *engine, &memory, &other));
        take_one(&mut *engine);
        assert!(!engine.other_called());
    }
    other.write(1).unwrap();
    assert!(sleep_on_a_write(&mut *engine, &memory, &other));
    take_one(&mut *engine);
    assert!(engine.other_called());
}

#[test]
fn who_can_not_sleep_so_says_so_and_loses_nothing() {
    for which in [Which::OldUring, Which::Threads] {
        let Some(setup) = Setup::new(which, Cache::Buffered, 1 << 20) else {
            continue;
        };
        let (mut engine, memory, other) = (setup.engine(), memory(), event());
        assert!(!sleep_on_a_write(&mut *engine, &memory, &other));
        engine.commit().unwrap();
        assert!(!engine.commit_and_sleep(other.as_raw_fd(), Some(LONG)).unwrap());
        take_one(&mut *engine);
        assert!(!engine.other_called());
    }
}

#[test]
fn what_the_page_cache_has_is_read_at_once() {
    let Some((setup, mut engine)) = ring() else {
        return;
    };
    let (memory, other) = (memory(), event());
    assert!(sleep_on_a_write(&mut *engine, &memory, &other));
    take_one(&mut *engine);
    let mut buffers = request(&memory, 1, read(0), 0, 4096).buffers;
    if let Err(error) = buffers.read_cached_at(&setup.target.file, 0) {
        return lacking("file system that says what is in the page cache", error);
    }
    for _ in 0..3 {
        engine.submit(request(&memory, 1, read(0), 0, 4096));
        assert_eq!(engine.in_flight(), 1);
        assert!(!engine.commit_and_sleep(other.as_raw_fd(), None).unwrap());
        engine.completed().unwrap().result.unwrap();
        assert_eq!(engine.in_flight(), 0);
    }
}

#[test]
fn without_requests_the_other_or_the_limit_ends_the_sleep() {
    let Some((_setup, mut engine)) = ring() else {
        return;
    };
    let (memory, other) = (memory(), event());
    let fd = other.as_raw_fd();
    engine.commit().unwrap();
    assert!(
        !engine.commit_and_sleep(fd, None).unwrap(),
        "nothing would wake it but the other"
    );
    for _ in 0..3 {
        assert!(
            engine
                .commit_and_sleep(fd, Some(Duration::from_millis(1)))
                .unwrap()
        );
        assert!(engine.completed().is_none());
        assert!(!engine.other_called());
    }
    other.write(1).unwrap();
    assert!(engine.commit_and_sleep(fd, Some(LONG)).unwrap());
    assert!(engine.completed().is_none());
    assert!(engine.other_called());
    other.read().unwrap();
    engine.submit(request(&memory, 1, write(0), 0, 4096));
    engine.commit().unwrap();
    assert!(engine.commit_and_sleep(fd, Some(LONG)).unwrap());
    take_one(&mut *engine);
    assert!(!engine.other_called());
}

/// The ring has no room for the poll request beside the requests, or the kernel takes nothing.
#[test]
fn who_could_not_sleep_this_time_is_woken_where_it_sleeps_then() {
    let Some((_setup, mut engine)) = ring() else {
        return;
    };
    let (memory, other) = (memory(), event());
    for token in 0..u32::try_from(engine.depth()).unwrap() {
        engine.submit(request(&memory, token, write(0), 0, 4096));
    }
    assert!(!engine.commit_and_sleep(other.as_raw_fd(), None).unwrap());
    assert_ne!(engine.event().unwrap().read().unwrap(), 0, "the event is silent");
    engine.commit().unwrap();
    take_one(&mut *engine);
}

#[test]
fn nobody_sleeps_beside_what_the_pool_is_done_with() {
    let Some(setup) = Setup::new(Which::Uring, Cache::Coarse, 1 << 20) else {
        return;
    };
    let (mut engine, memory, other) = (setup.engine(), memory(), event());
    // Not aligned: a thread does it.
    engine.submit(request(&memory, 0, read(512), 512, 512));
    engine.commit().unwrap();
    // It has called, and is not looked for.
    wait_for(engine.event().unwrap(), late()).unwrap();
    engine.submit(request(&memory, 1, write(0), 0, 4096));
    assert!(!engine.commit_and_sleep(other.as_raw_fd(), None).unwrap());
    engine.commit().unwrap();
    take_one(&mut *engine);
}

#[test]
fn an_epoll_instance_that_nobody_asks_calls_for_each_event() {
    let Some((_setup, mut engine)) = ring() else {
        return;
    };
    let (kick, epoll) = (event(), Epoll::new().unwrap());
    let edges = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
    epoll.ctl(ControlOperation::Add, kick.as_raw_fd(), edges).unwrap();
    engine.commit().unwrap();
    for _ in 0..5 {
        kick.write(1).unwrap();
        assert!(engine.commit_and_sleep(epoll.as_raw_fd(), Some(LONG)).unwrap());
        assert!(engine.completed().is_none());
        assert!(engine.other_called());
        // It was ready all the time, and that is no event.
        let short = Some(Duration::from_millis(1));
        assert!(engine.commit_and_sleep(epoll.as_raw_fd(), short).unwrap());
        assert!(engine.completed().is_none());
        assert!(!engine.other_called());
    }
}
