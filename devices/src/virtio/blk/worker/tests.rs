//! Tests of the learnt times.

#![allow(clippy::arithmetic_side_effects)]

use super::*;

const US: u64 = 1000;

/// A policy that knows requests to come so far apart; the last one came at the time it gives.
fn learnt(gap: u64) -> (PollPolicy, u64) {
    let (mut policy, mut now) = (PollPolicy::default(), 0);
    for _ in 0..400 {
        now += gap;
        policy.found(0, 1, now);
    }
    (policy, now)
}

/// Returns the time that an idle worker polls.
fn polled(policy: &mut PollPolicy, now: &mut u64) -> u64 {
    let begin = *now;
    while policy.polls(false, *now) {
        *now += 5 * US;
    }
    *now - begin
}

/// Simulates an idle worker that sleeps for `time` until a request arrives.
fn sleep(policy: &mut PollPolicy, now: &mut u64, time: u64) {
    policy.sleeps(false, *now);
    *now += time;
    policy.found(0, 1, *now);
}

#[test]
fn the_window_grows_to_cover_what_comes_soon_and_is_closed_by_what_comes_late() {
    let (mut policy, mut now) = (PollPolicy::default(), 0);
    assert!(policy.window(false) == 0, "nothing is learnt yet");
    for window in [0, 25, 50, 100, 200, 200] {
        let begin = now;
        assert_eq!(polled(&mut policy, &mut now), window * US);
        if window < 180 {
            policy.sleeps(false, now);
            now = begin + 180 * US;
        }
        policy.found(0, 1, now);
    }
    assert!(
        policy.window(true) == 0,
        "the device is waited for with a window of its own"
    );
    sleep(&mut policy, &mut now, 2 * MAX_WINDOW);
    assert!(policy.window(false) == 0);
}

#[test]
fn a_worker_whose_processor_is_contended_does_not_poll_for_a_while() {
    let (mut policy, mut now) = (PollPolicy::default(), 0);
    sleep(&mut policy, &mut now, 100 * US);
    assert!(policy.polls(false, now));
    // The yield took long, and nothing has come of it.
    now += CONTENDED + 1;
    assert!(!policy.polls(false, now));
    for _ in 0..REST {
        sleep(&mut policy, &mut now, 20 * US);
        assert!(policy.window(false) == 0);
    }
    sleep(&mut policy, &mut now, 20 * US);
    assert!(policy.window(false) > 0, "it may learn again");
}

#[test]
fn a_long_yield_after_which_there_is_something_to_do_is_no_contention() {
    let (mut policy, mut now) = (PollPolicy::default(), 0);
    sleep(&mut policy, &mut now, 100 * US);
    assert!(policy.polls(false, now));
    now += 10 * CONTENDED;
    policy.found(0, 3, now);
    assert!(policy.polls(false, now));
}

#[test]
fn completions_are_held_only_for_a_driver_that_is_busy() {
    let (mut policy, mut now) = learnt(100 * US);
    assert!(!policy.holds(32, now), "there is none");
    policy.found(1, 0, now);
    assert!(
        !policy.holds(32, now),
        "it has replaced all that it was interrupted for"
    );
    policy.signalled();
    policy.found(15, 0, now);
    policy.signalled();
    now += 30 * US;
    policy.found(1, 1, now);
    assert!(policy.holds(32, now), "it has 15 to replace");
    assert!(policy.holds(32, now + 40 * US));
    assert!(!policy.holds(32, now + 50 * US), "it has fallen silent");
}

#[test]
fn completions_are_not_held_longer_than_a_sixteenth_of_what_requests_take() {
    let (mut policy, begin) = learnt(100 * US);
    policy.found(16, 0, begin);
    policy.signalled();
    // 16 that it has to replace, one that is held, 15 in flight: 3200 us for all.
    policy.found(1, 0, begin);
    let mut now = begin;
    let mut held = 0;
    while policy.holds(15, now) {
        held = now - begin;
        now += 10 * US;
        policy.found(0, 1, now);
        policy.found(1, 0, now);
    }
    assert!((50 * US..=200 * US).contains(&held), "{held}");
}

#[test]
fn a_driver_that_adds_nothing_before_the_worker_sleeps_has_fewer_requests_than_before() {
    let (mut policy, now) = learnt(100 * US);
    policy.found(32, 0, now);
    policy.signalled();
    (0..6).for_each(|_| policy.sleeps(true, now));
    policy.found(1, 1, now);
    assert!(!policy.holds(1, now));
}

#[test]
fn a_driver_that_sees_completions_before_an_interrupt_is_not_taken_for_busy_afterwards() {
    let (mut policy, mut now) = learnt(100 * US);
    for _ in 0..50 {
        now += 100 * US;
        policy.found(1, 0, now);
        // The driver polls, and replaced it meanwhile.
        policy.found(0, 1, now + 10 * US);
        policy.signalled();
    }
    policy.found(1, 0, now + 20 * US);
    assert!(!policy.holds(32, now + 20 * US), "it has nothing else to replace");
}
