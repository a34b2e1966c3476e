//! What is learnt from which times.

use super::*;

const US: Duration = Duration::from_micros(1);

fn answer(pace: &mut Pace, answers: usize) {
    (0..answers).for_each(|_| pace.answered());
}

fn tell(pace: &mut Pace, answers: usize, now: Instant) {
    answer(pace, answers);
    pace.told(now);
}

#[test]
fn the_window_grows_to_cover_quick_successions_and_only_them() {
    let (mut pace, mut now) = (Pace::default(), Instant::now());
    tell(&mut pace, 1, now);
    assert_eq!(
        pace.look_again(now),
        Look::No,
        "looked without having learnt anything"
    );
    for window in [25, 50, 100, 200, 200] {
        now += 150 * US;
        pace.notified(now);
        pace.taken(1, now);
        tell(&mut pace, 1, now);
        assert_eq!(pace.look_again(now + (window - 1) * US), Look::Yield, "{window}");
        assert_eq!(pace.look_again(now + window * US), Look::No, "{window}");
        assert_eq!(pace.look_again(now + window * US), Look::No, "{window}");
    }
    pace.notified(now + 1000 * US);
    tell(&mut pace, 1, now);
    assert_eq!(pace.look_again(now), Look::No);
}

#[test]
fn a_worker_that_loses_its_processor_stops_looking_for_a_while() {
    let (mut pace, mut now) = (Pace::default(), Instant::now());
    let mut round = |pace: &mut Pace| {
        tell(pace, 1, now);
        let looks = pace.look_again(now) != Look::No;
        now += 120 * US;
        let looks_on = looks && pace.look_again(now) != Look::No;
        pace.notified(now);
        pace.taken(1, now);
        (looks, looks_on)
    };
    for expected in [(false, false), (true, false)] {
        assert_eq!(round(&mut pace), expected);
    }
    for _ in 0..REST {
        assert_eq!(round(&mut pace), (false, false));
    }
    assert_eq!(round(&mut pace), (true, false), "it may learn again");
}

#[test]
fn nobody_is_looked_for_who_owes_nothing() {
    let (mut pace, now) = (Pace::default(), Instant::now());
    tell(&mut pace, 2, now);
    pace.notified(now + 10 * US);
    pace.taken(1, now);
    tell(&mut pace, 0, now);
    assert_eq!(pace.look_again(now), Look::Now);
    pace.taken(1, now);
    assert_eq!(pace.look_again(now), Look::No);
}

#[test]
fn answers_pile_up_only_while_the_driver_has_others_to_work_on_and_not_for_long() {
    let now = Instant::now();
    let pile = |told, answers, under_way, waited| {
        let mut pace = Pace::default();
        answer(&mut pace, told + answers);
        pace.pile_up(answers, under_way, now, now + waited)
    };
    for (told, answers, under_way) in [
        (1, 0, 100),
        (1, 1, 1),
        (0, 1, 100),
        (0, 3, 29),
        (1, 2, 13),
        (4, 4, 24),
    ] {
        let found = pile(told, answers, under_way, Duration::ZERO);
        assert_eq!(found, Pile::No, "{told} told, {answers} of {under_way}");
    }
    assert_eq!(pile(1, 1, 2, Duration::ZERO), Pile::Look);
    assert_eq!(pile(1, 3, 28, Duration::ZERO), Pile::Look);
    assert_eq!(pile(1, 1, 7, MIN_PILE), Pile::No);
}

/// Has learnt that requests come so far apart, that it pays when they are not notified, and that the driver has so many
/// answers to replace.
fn dozing(gap: Duration, owed: usize) -> Pace {
    let (mut pace, _) = learnt(gap, US);
    pace.trial = Trial::of_waiting();
    answer(&mut pace, owed);
    pace
}

#[test]
fn the_driver_notifies_of_half_of_what_it_has_to_add_unless_as_many_are_under_way() {
    for (owed, under_way, unnotified) in [
        // It is not expected to add any.
        (0, 0, None),
        (0, 31, None),
        // Each is notified of.
        (1, 0, None),
        (2, 0, None),
        (2, 1, None),
        // Half, and that is the second, the third, and the 16th.
        (3, 0, Some(1)),
        (5, 4, Some(2)),
        (32, 0, Some(15)),
        (31, 1, Some(15)),
        // None, as one of those completes.
        (1, 1, Some(1)),
        (1, 31, Some(31)),
        (16, 16, Some(16)),
    ] {
        let doze = dozing(US, owed).doze(under_way);
        assert_eq!(
            doze.map(|doze| doze.unnotified),
            unnotified,
            "{owed} to do, {under_way} under way"
        );
    }
    let mut pace = dozing(US, 32);
    pace.trial = Trial::default();
    assert_eq!(pace.doze(0), None, "it may not pay");
    assert_eq!(pace.doze(32), None);
}

#[test]
fn a_worker_dozes_while_requests_go_round_twice() {
    for (gap, under_way, limit) in [
        (US, 1, Some(MIN_PILE)),
        (100 * US, 0, Some(800 * US)),
        (100 * US, 12, Some(3200 * US)),
        (900 * US, 12, Some(MAX_DOZE)),
        (1100 * US, 12, None),
    ] {
        let doze = dozing(gap, 4).doze(under_way);
        assert_eq!(doze.is_some(), limit.is_some(), "{gap:?}");
        if let (Some(doze), Some(limit)) = (doze, limit) {
            assert!(is_close(doze.limit, limit), "{doze:?}, not {limit:?}");
        }
    }
}

#[test]
fn a_worker_that_overslept_does_not_doze_for_a_while() {
    let mut pace = dozing(US, 3);
    assert!(pace.doze(3).is_some());
    pace.overslept(1);
    for _ in 0..ALERT {
        assert_eq!(pace.doze(3), None, "it was told of no answer since");
        pace.answered();
        assert_eq!(pace.doze(3), None);
        pace.taken(1, Instant::now());
    }
    pace.answered();
    assert!(pace.doze(3).is_some());
}

#[test]
fn a_driver_that_adds_nothing_for_long_has_nothing_to_do() {
    let mut pace = dozing(US, 32);
    assert!(pace.doze(0).is_some());
    pace.overslept(0);
    assert_eq!(pace.doze(0), None);
    assert!(!pace.may_pile_up(1, 31), "it waits for that one");
    answer(&mut pace, 3);
    assert!(pace.doze(0).is_some(), "it has again");
}

#[test]
fn enough_answers_are_told_whatever_else_there_is_to_do() {
    let mut pace = Pace::default();
    answer(&mut pace, 32);
    for (answers, under_way, enough) in [
        (0, 0, false),
        (3, 0, false),
        (4, 0, true),
        (32, 0, true),
        (7, 32, false),
        (8, 32, true),
    ] {
        assert_eq!(
            pace.is_enough(answers, under_way),
            enough,
            "{answers} of {under_way}"
        );
    }
    (0..UNWANTED).for_each(|_| pace.unwanted());
    assert!(!pace.is_enough(32, 0), "it looks for them by itself");
}

/// Has learnt how far requests are apart and what an interrupt takes; the last request came at the time it gives.
fn learnt(gap: Duration, interrupt: Duration) -> (Pace, Instant) {
    let (mut pace, mut now) = (Pace::default(), Instant::now());
    for _ in 0..400 {
        now += gap;
        pace.taken(1, now);
        pace.interrupted(interrupt);
    }
    (pace, now)
}

fn is_close(found: Duration, expected: Duration) -> bool {
    found <= expected && expected - found < expected.div_f32(50.0) + US
}

#[test]
fn patience_is_the_time_of_those_waited_for_and_no_more_than_an_interrupt_is_worth() {
    for (gap, interrupt, expected) in [
        // A fast disk; a slow one, where an interrupt costs little, or much, or less than nothing is worth.
        (5 * US, 2 * US, 40 * US),
        (160 * US, 2 * US, 128 * US),
        (160 * US, 100 * US, 1280 * US),
        (Duration::from_secs(3600), Duration::from_secs(1), MAX_PILE),
        (2 * US, US, MIN_PILE),
    ] {
        let (pace, _) = learnt(gap, interrupt);
        let patience = pace.patience(8);
        assert!(is_close(patience, expected), "{patience:?}, not {expected:?}");
    }
}

#[test]
fn requests_that_come_together_are_not_far_apart() {
    let (mut pace, mut now) = learnt(US, US);
    for _ in 0..100 {
        now += 800 * US;
        pace.taken(8, now);
    }
    let gap = Duration::from_nanos(pace.time_of(1));
    assert!(is_close(gap, 100 * US), "{gap:?}");
}

#[test]
fn with_patience_it_sleeps_for_an_eighth_of_what_the_driver_has() {
    let (mut pace, now) = learnt(100 * US, 100 * US);
    // Of one it was told.
    answer(&mut pace, 2);
    // As long as the rest take to come, and no longer than the first may wait.
    for (under_way, waited, more, limit) in [(62, 0, 7, 700), (62, 700, 7, 100), (30, 50, 3, 300)] {
        let pile = pace.pile_up(1, under_way, now, now + waited * US);
        let near = |found: Duration| found.abs_diff(limit * US) < 20 * US;
        assert!(
            matches!(pile, Pile::Sleep { more: found, limit: sleep, unnotified: None } if found == more && near(sleep)),
            "{pile:?}, not {more} in {limit} us"
        );
    }
    answer(&mut pace, 7);
    assert_eq!(pace.pile_up(8, 55, now, now), Pile::No, "there they are");
}

#[test]
fn where_too_few_are_under_way_answers_wait_until_the_driver_has_added_half() {
    let (mut pace, now) = learnt(100 * US, 100 * US);
    answer(&mut pace, 32);
    // Four are told at once, and it has the others to do.
    for (answers, under_way, unnotified) in
        [(1, 2, Some(15)), (2, 0, Some(14)), (2, 1, Some(14)), (2, 3, None)]
    {
        let pile = pace.pile_up(answers, under_way, now, now);
        assert!(
            matches!(pile, Pile::Sleep { unnotified: found, .. } if found == unnotified),
            "{answers} of {under_way}: {pile:?}"
        );
    }
}

#[test]
fn no_more_than_a_nap_is_spent_looking() {
    // The next request is due any moment, but others may wait long.
    let (mut pace, now) = learnt(10 * US, 100 * US);
    answer(&mut pace, 64);
    let nap = Pile::Sleep {
        more: 1,
        limit: NAP,
        unnotified: None,
    };
    for (waited, pile) in [
        (Duration::ZERO, nap),
        (500 * US, nap),
        (630 * US, Pile::Look),
        (640 * US, Pile::No),
    ] {
        assert_eq!(pace.pile_up(63, 448, now, now + waited), pile, "{waited:?}");
    }
}

#[test]
fn a_driver_that_looks_for_answers_by_itself_owes_no_more_than_it_has() {
    let (mut pace, now) = learnt(100 * US, 100 * US);
    for _ in 0..10 {
        // It replaces them before it is told of them.
        answer(&mut pace, 16);
        pace.taken(16, now);
        pace.told(now);
    }
    answer(&mut pace, 1);
    assert_eq!(
        pace.pile_up(1, 15, now, now),
        Pile::No,
        "it has nothing else to do"
    );
    answer(&mut pace, 2);
    assert!(
        matches!(pace.pile_up(2, 29, now, now), Pile::Sleep { more: 2, .. }),
        "4 of 32"
    );
}

#[test]
fn a_driver_that_goes_on_asking_is_expected_to_and_one_that_waits_is_not() {
    let (mut pace, mut now) = learnt(100 * US, 100 * US);
    tell(&mut pace, 64, now);
    let first = now;
    // It has asked for 6 meanwhile, which are answered: 58 more will come.
    for _ in 0..6 {
        now += 100 * US;
        pace.taken(1, now);
    }
    answer(&mut pace, 6);
    assert!(matches!(
        pace.pile_up(6, 0, first, now),
        Pile::Sleep { more: 2, .. }
    ));
    now += 200 * US;
    let pile = pace.pile_up(6, 0, first, now);
    assert_eq!(pile, Pile::No, "the first has waited enough");
    pace.told(now);
    // From now on it asks for one at a time.
    for owed in [64, 32, 16, 8, 4] {
        now += 100 * US;
        pace.taken(1, now);
        let answered = now;
        pace.answered();
        assert!(pace.may_pile_up(1, 0), "{owed} are expected");
        now += MAX_PILE;
        assert_eq!(pace.pile_up(1, 0, answered, now), Pile::No);
        pace.told(now);
    }
    now += 100 * US;
    pace.taken(1, now);
    pace.answered();
    assert!(!pace.may_pile_up(1, 0), "the driver has few requests");
}

#[test]
fn a_driver_with_few_requests_is_told_when_it_has_nothing_else_to_do() {
    let (mut pace, now) = learnt(100 * US, 100 * US);
    pace.answered();
    assert!(!pace.may_pile_up(1, 3), "it has replaced all others");
    pace.told(now);
    // It has not asked again yet.
    pace.answered();
    assert!(matches!(
        pace.pile_up(1, 2, now, now),
        Pile::Sleep { more: 1, .. }
    ));
    pace.answered();
    assert_eq!(pace.pile_up(2, 1, now, now), Pile::No, "two are enough");
    let (mut pace, now) = learnt(100 * US, 100 * US);
    tell(&mut pace, 1, now);
    pace.answered();
    assert!(pace.may_pile_up(1, 2));
    pace.taken(1, now);
    assert!(
        !pace.may_pile_up(1, 3),
        "it goes on by itself, and has done what it was told"
    );
    tell(&mut pace, 1, now);
    pace.answered();
    assert!(!pace.may_pile_up(1, 0), "three are too few to wait");
}

#[test]
fn a_driver_that_wants_no_interrupts_is_not_waited_for() {
    let mut pace = Pace::default();
    answer(&mut pace, 2);
    for _ in 0..UNWANTED {
        assert!(pace.may_pile_up(1, 32), "it may want the next one");
        pace.unwanted();
    }
    assert!(!pace.may_pile_up(1, 32));
    pace.interrupted(US);
    assert!(pace.may_pile_up(1, 32), "it sleeps again");
}
