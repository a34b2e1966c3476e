use proptest::prelude::*;
use rstest::rstest;
use vmm_sys_util::eventfd::EFD_NONBLOCK;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn bytes(bytes_per_second: u64, burst_bytes: u64) -> Limits {
    Limits {
        bytes_per_second,
        burst_bytes,
        ..Limits::default()
    }
}

fn operations(operations_per_second: u64, burst_operations: u64) -> Limits {
    Limits {
        operations_per_second,
        burst_operations,
        ..Limits::default()
    }
}

fn cost(bytes: u64) -> Cost {
    Cost { bytes, operations: 1 }
}

fn waker() -> Arc<EventFd> {
    Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())
}

fn tenant(limiter: &Arc<Limiter>) -> Tenant {
    limiter.join(waker())
}

/// Tenant that always has another request of that size, and tries again at the given time.
struct Greedy {
    tenant: Tenant,
    size: u64,
    next: Instant,
    served: u64,
    requests: u64,
    largest_wait: Duration,
}

impl Greedy {
    fn new(limiter: &Arc<Limiter>, size: u64, start: Instant) -> Self {
        Self {
            tenant: tenant(limiter),
            size,
            next: start,
            served: 0,
            requests: 0,
            largest_wait: Duration::ZERO,
        }
    }

    /// All that may pass at `self.next`.
    fn turn(&mut self) {
        loop {
            match self.tenant.pass(cost(self.size), self.next) {
                Ok(()) => {
                    self.served += self.size;
                    self.requests += 1;
                }
                Err(wait) => {
                    self.largest_wait = self.largest_wait.max(wait);
                    self.next += wait;
                    return;
                }
            }
        }
    }
}

/// Lets them compete until `end`, in the order of their wake-ups.
fn compete(all: &mut [Greedy], end: Instant) {
    loop {
        let next = all.iter_mut().min_by_key(|one| one.next).unwrap();
        if next.next >= end {
            return;
        }
        next.turn();
    }
}

fn within(value: u64, expected: u64, percent: u64) -> bool {
    value.abs_diff(expected) * 100 <= expected * percent
}

#[rstest]
#[case::small(10 << 20, 4096)]
#[case::larger_than_the_burst(10 << 20, 4 << 20)]
#[case::slow(100_000, 512)]
#[case::fast(1 << 30, 4096)]
fn over_a_second_bytes_are_within_5_percent_of_the_limit(#[case] rate: u64, #[case] size: u64) {
    let start = Instant::now();
    let limiter = Limiter::new_at(bytes(rate, 0), start);
    let mut user = [Greedy::new(&limiter, size, start)];
    // The burst of 100 ms is used up first.
    compete(&mut user, start + SECOND);
    for second in 1..=10 {
        let before = user[0].served;
        compete(&mut user, start + SECOND * (second + 1));
        let served = user[0].served - before;
        // A whole request more or less is in the nature of large ones.
        let slack = size.max(rate / 20);
        assert!(
            served.abs_diff(rate) <= slack,
            "{served} of {rate} in second {second}"
        );
    }
    assert!(within(user[0].served, rate * 11 + rate / 10, 3));
}

#[rstest]
#[case(10)]
#[case(1000)]
#[case(123_456)]
#[case(1_000_000)]
fn over_a_second_operations_are_within_5_percent_of_the_limit(#[case] rate: u64) {
    let start = Instant::now();
    let limiter = Limiter::new_at(operations(rate, 0), start);
    let mut user = [Greedy::new(&limiter, 4096, start)];
    compete(&mut user, start + SECOND);
    for second in 1..=5 {
        let before = user[0].requests;
        compete(&mut user, start + SECOND * (second + 1));
        let done = user[0].requests - before;
        assert!(
            within(done, rate, 5) || done.abs_diff(rate) <= 1,
            "{done} of {rate}"
        );
    }
}

#[test]
fn what_passes_is_smooth_at_10_ms() {
    let start = Instant::now();
    let limiter = Limiter::new_at(operations(1000, 10), start);
    let mut user = [Greedy::new(&limiter, 1, start)];
    compete(&mut user, start + SECOND);
    for step in 0..100 {
        let before = user[0].requests;
        compete(&mut user, start + SECOND + Duration::from_millis(10) * (step + 1));
        let done = user[0].requests - before;
        assert!((8..=12).contains(&done), "{done} in 10 ms");
    }
    assert!(user[0].largest_wait <= Duration::from_millis(10));
}

#[test]
fn a_burst_passes_at_once_after_a_pause_and_no_more() {
    let start = Instant::now();
    let limiter = Limiter::new_at(operations(100, 50), start);
    let user = tenant(&limiter);
    let burst = |now| (0..1000).take_while(|_| user.pass(cost(0), now).is_ok()).count();
    // The one that empties the bucket makes no debt.
    assert!((50..=51).contains(&burst(start)));
    assert!((50..=51).contains(&burst(start + 3600 * SECOND)));
    assert_eq!(burst(start + 3600 * SECOND), 0);
    assert!((10..=11).contains(&burst(start + 3600 * SECOND + SECOND / 10)));
}

#[test]
fn a_request_larger_than_the_burst_passes_and_the_next_one_waits_for_it() {
    let start = Instant::now();
    let limiter = Limiter::new_at(bytes(1 << 20, 4096), start);
    let user = tenant(&limiter);
    assert_eq!(user.pass(cost(8 << 20), start), Ok(()));
    let wait = user.pass(cost(512), start).unwrap_err();
    assert!((SECOND * 7..SECOND * 8).contains(&wait), "{wait:?}");
    assert!(
        user.pass(cost(512), start + wait - Duration::from_millis(1))
            .is_err()
    );
    assert_eq!(user.pass(cost(512), start + wait), Ok(()));
}

#[test]
fn both_limits_are_kept() {
    let start = Instant::now();
    let limits = Limits {
        bytes_per_second: 1 << 20,
        operations_per_second: 100,
        ..Limits::default()
    };
    for (size, expected) in [(512, 100), (1 << 16, 16)] {
        let limiter = Limiter::new_at(limits, start);
        let mut user = [Greedy::new(&limiter, size, start)];
        compete(&mut user, start + SECOND);
        let before = user[0].requests;
        compete(&mut user, start + 11 * SECOND);
        assert!(within(user[0].requests - before, expected * 10, 5));
    }
}

#[test]
fn operations_without_bytes_do_not_wait_for_a_debt_of_bytes() {
    let start = Instant::now();
    let limiter = Limiter::new_at(bytes(1000, 1), start);
    let user = tenant(&limiter);
    user.pass(cost(1_000_000), start).unwrap();
    assert!(user.pass(cost(1), start).is_err());
    assert_eq!(user.pass(cost(0), start), Ok(()));
}

#[test]
fn new_limits_hold_at_once_also_for_those_who_wait_and_they_are_woken() {
    let start = Instant::now();
    let limiter = Limiter::new_at(bytes(1, 1), start);
    let wake = waker();
    let user = limiter.join(Arc::clone(&wake));
    user.pass(cost(1 << 20), start).unwrap();
    assert!(user.pass(cost(512), start).unwrap_err() > 100_000 * SECOND);
    assert!(wake.read().is_err());
    limiter.set_at(bytes(1 << 20, 0), start);
    assert_eq!(wake.read().unwrap(), 1);
    let wait = user.pass(cost(512), start).unwrap_err();
    assert!(wait.abs_diff(SECOND) < SECOND / 100, "{wait:?}");
    limiter.set_at(Limits::default(), start);
    for _ in 0..1000 {
        assert_eq!(user.pass(cost(1 << 30), start), Ok(()));
    }
    // From no limit to one: with a full bucket.
    limiter.set_at(operations(10, 5), start);
    assert_eq!(
        (0..100).take_while(|_| user.pass(cost(0), start).is_ok()).count(),
        6
    );
}

#[rstest]
#[case::the_same(4096, 4096)]
#[case::large_and_small(1 << 20, 4096)]
fn tenants_of_a_group_get_the_same_share_of_bytes(#[case] one: u64, #[case] other: u64) {
    let start = Instant::now();
    for many in [2_u64, 5] {
        let limiter = Limiter::new_at(bytes(50 << 20, 0), start);
        let mut users: Vec<_> = (0..many)
            .map(|at| Greedy::new(&limiter, if at == 0 { one } else { other }, start))
            .collect();
        compete(&mut users, start + 10 * SECOND);
        let total: u64 = users.iter().map(|user| user.served).sum();
        assert!(within(total, 505 << 20, 2), "{total}");
        for user in &users {
            assert!(
                within(user.served, total / many, 10),
                "{} of {total}",
                user.served
            );
        }
    }
}

#[test]
fn a_share_that_is_not_used_goes_to_the_others_and_is_not_saved() {
    let start = Instant::now();
    let limiter = Limiter::new_at(operations(1000, 0), start);
    let mut users = vec![Greedy::new(&limiter, 0, start)];
    let idle = tenant(&limiter);
    compete(&mut users, start + 5 * SECOND);
    assert!(within(users[0].requests, 5100, 2));
    drop(idle);
    let mut late = Greedy::new(&limiter, 0, start + 5 * SECOND);
    late.requests = 0;
    users[0].requests = 0;
    users.push(late);
    compete(&mut users, start + 6 * SECOND);
    assert!(within(users[0].requests, 500, 10) && within(users[1].requests, 500, 10));
}

#[test]
fn one_who_waits_and_never_comes_back_does_not_hold_the_others_up() {
    let start = Instant::now();
    let limiter = Limiter::new_at(operations(1000, 1), start);
    let lost = tenant(&limiter);
    while lost.pass(cost(0), start).is_ok() {}
    let mut users = [Greedy::new(&limiter, 0, start)];
    compete(&mut users, start + SECOND);
    assert!(users[0].requests >= 950, "{}", users[0].requests);
    lost.give_up();
    compete(&mut users, start + 2 * SECOND);
    assert!(users[0].requests >= 1950);
}

#[test]
fn threads_share_a_limit() {
    let start = Instant::now();
    let limiter = Limiter::new_at(operations(1000, 100), start);
    let passed: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let user = tenant(&limiter);
                    (0..1000).filter(|_| user.pass(cost(0), start).is_ok()).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!((100..=101).contains(&passed), "{passed}");
}

proptest! {
    #[test]
    fn no_sequence_of_requests_and_changes_exceeds_the_limits_or_stops(
        steps in proptest::collection::vec((any::<u64>(), 0_u64..1 << 40, 0_u64..1 << 40, 0_u32..5000), 1..60),
    ) {
        let start = Instant::now();
        let limiter = Limiter::new_at(Limits::default(), start);
        let user = tenant(&limiter);
        let mut now = start;
        for (bytes_per_second, size, burst_bytes, ms) in steps {
            now += Duration::from_millis(ms.into());
            limiter.set_at(Limits { bytes_per_second, burst_bytes, ..Limits::default() }, now);
            if let Err(wait) = user.pass(cost(size), now) {
                prop_assert!(wait >= TICK);
                if let Some(then) = now.checked_add(wait) {
                    prop_assert_eq!(user.pass(cost(size), then), Ok(()));
                    now = then.min(now + SECOND);
                }
            }
        }
    }
}
