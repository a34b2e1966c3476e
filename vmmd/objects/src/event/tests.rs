use super::*;

fn open(dir: &Path, boot_id: &str) -> Events {
    Events::open(dir, boot_id).unwrap()
}

/// Waits until clients can see all events so far.
fn settle(events: &Events) {
    let given = events.shared.lock().given;
    while *events.shared.news.borrow() < given {
        thread::yield_now();
    }
}

/// As a daemon that is killed when all is in its file.
fn kill(events: Events) {
    settle(&events);
    drop(events);
}

/// All of them, and the place after them.
fn list(events: &Events) -> (Vec<v1::Event>, Cursor) {
    settle(events);
    let bounds = Bounds {
        count: usize::MAX,
        bytes: usize::MAX,
    };
    let (all, end, more) = events.list(None, bounds, |_| true).unwrap();
    assert!(!more);
    (all, end)
}

fn draft(reason: &str) -> Draft {
    Draft::normal(Object::Node, reason, "something happened")
}

fn reasons(events: &Events) -> Vec<String> {
    let all = list(events).0;
    all.into_iter().map(|event| event.reason).collect()
}

#[test]
fn events_and_cursors_outlive_a_daemon_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let events = open(folder.path(), "boot");
    events.emit(draft("One"));
    let cursor = list(&events).1.to_string();
    events.emit(draft("Two"));
    kill(events);
    let events = open(folder.path(), "boot");
    assert_eq!(reasons(&events), ["One", "Two"]);
    events.emit(draft("Three"));
    settle(&events);
    let after = events.follow(Some(&cursor)).unwrap();
    let (rest, _) = after.shared.lock().history.after(after.position()).unwrap();
    assert_eq!(
        rest.iter().map(|event| event.reason.as_str()).collect::<Vec<_>>(),
        ["Two", "Three"]
    );
}

#[test]
fn an_event_of_any_length_is_cut_and_the_journal_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let events = open(folder.path(), "boot");
    let mut long = draft("Long");
    long.message = "m\u{1b}[2J".repeat(100_000);
    events.emit(long);
    // Only the message comes from outside. If another field is this long, only that event is lost.
    let mut odd = draft("Odd");
    odd.operation = "o".repeat(100_000);
    events.emit(odd);
    events.emit(draft("Next"));
    kill(events);
    let events = open(folder.path(), "boot");
    assert_eq!(reasons(&events), ["Long", "Next"]);
    let message = &list(&events).0[0].message;
    assert!(message.len() <= LONGEST_MESSAGE && !message.contains(char::is_control));
}

#[test]
fn a_damaged_end_costs_that_end_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.log");
    let events = open(folder.path(), "boot");
    for reason in ["One", "Two"] {
        events.emit(draft(reason));
    }
    kill(events);
    let whole = std::fs::read(&path).unwrap();
    for cut in 1..40 {
        std::fs::write(&path, &whole[..whole.len() - cut]).unwrap();
        let events = open(folder.path(), "boot");
        assert_eq!(reasons(&events), ["One"], "{cut}");
        events.emit(draft("Next"));
        kill(events);
        assert_eq!(reasons(&open(folder.path(), "boot")), ["One", "Next"], "{cut}");
    }
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &flipped).unwrap();
    assert_eq!(reasons(&open(folder.path(), "boot")), ["One"]);
}

#[test]
fn a_cursor_that_a_power_failure_may_have_made_wrong_is_expired() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.log");
    let events = open(folder.path(), "boot");
    events.emit(draft("One"));
    let kept = list(&events).1.to_string();
    let length = std::fs::metadata(&path).unwrap().len();
    events.emit(draft("Lost"));
    let lost = list(&events).1.to_string();
    kill(events);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(length).unwrap();
    let events = open(folder.path(), "next boot");
    events.emit(draft("Two"));
    assert_eq!(reasons(&events), ["One", "Two"]);
    assert!(events.follow(Some(&kept)).is_ok());
    assert_eq!(events.follow(Some(&lost)).unwrap_err(), Expired);
    // The same without the loss, but the daemon can't know.
    kill(events);
    let events = open(folder.path(), "third boot");
    assert!(events.follow(Some(&kept)).is_ok());
}

#[test]
fn cursors_are_good_in_the_next_boot_after_an_orderly_end() {
    let folder = tempfile::tempdir().unwrap();
    let events = open(folder.path(), "boot");
    events.emit(draft("One"));
    events.close();
    let end = list(&events).1.to_string();
    kill(events);
    let events = open(folder.path(), "next boot");
    assert!(events.follow(Some(&end)).is_ok());
}

#[test]
fn the_files_hold_the_newest_ten_thousand_and_not_much_more() {
    let folder = tempfile::tempdir().unwrap();
    let events = open(folder.path(), "boot");
    // Each of a reason of its own: no flood.
    for n in 0..25_000 {
        events.emit(draft(&format!("R{n}")));
        if n % 1000 == 0 {
            settle(&events);
        }
    }
    kill(events);
    let events = open(folder.path(), "boot");
    let found = reasons(&events);
    assert_eq!(
        (found.len(), found[0].as_str(), found[9_999].as_str()),
        (10_000, "R15000", "R24999")
    );
    let lengths =
        ["events.log", "events.log.1"].map(|name| std::fs::metadata(folder.path().join(name)).unwrap().len());
    assert!(lengths.iter().sum::<u64>() < 4 << 20, "{lengths:?}");
}

#[test]
fn files_that_cannot_be_written_cost_their_durability_alone() {
    let events = open(Path::new("/nonexistent"), "boot");
    events.emit(draft("One"));
    assert_eq!(reasons(&events), ["One"]);
}

#[tokio::test]
async fn a_flood_is_told_as_one_event_when_its_minute_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let events = open(folder.path(), "boot");
    let mut follower = events.follow(None).unwrap();
    for _ in 0..1000 {
        events.emit(draft("Odd"));
    }
    settle(&events);
    assert_eq!(follower.next().await.unwrap().len(), 30);
    events.shared.lock().flood.age();
    events.shared.sweep();
    settle(&events);
    let last = follower.next().await.unwrap();
    assert_eq!(last.iter().map(|event| event.count).collect::<Vec<_>>(), [970]);
}

#[tokio::test]
async fn a_follower_that_is_too_slow_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let events = open(folder.path(), "boot");
    let mut follower = events.follow(None).unwrap();
    for n in 0..=history::KEPT {
        events.emit(draft(&format!("R{n}")));
        if n % 1000 == 0 {
            settle(&events);
        }
    }
    settle(&events);
    assert_eq!(follower.next().await.unwrap_err(), Expired);
}

#[tokio::test]
async fn file_that_takes_nothing_delays_no_event_and_losses_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let fault = folder.path().join("fault");
    std::fs::create_dir(&fault).unwrap();
    std::fs::write(fault.join("events"), "").unwrap();
    let events = open(folder.path(), "boot");
    let told = WAITING + 100;
    for n in 0..told {
        events.emit(draft(&format!("R{n}")));
    }
    let lost = events.shared.lock().lost;
    assert!((1..=100).contains(&lost), "{lost}");
    assert_eq!(
        *events.shared.news.borrow(),
        0,
        "what is not in the file is not seen"
    );
    events.told().await;
    std::fs::remove_dir_all(&fault).unwrap();
    settle(&events);
    events.emit(draft("Next"));
    let found = list(&events).0;
    let [.., loss, next] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!(
        (loss.reason.as_str(), loss.count, next.reason.as_str()),
        ("EventsLost", lost, "Next")
    );
    assert_eq!(
        u64::try_from(found.len()).unwrap() + lost,
        u64::try_from(told).unwrap() + 2
    );
    kill(events);
    assert_eq!(reasons(&open(folder.path(), "boot")).len(), found.len());
}

#[test]
fn line_of_the_log_names_the_object() {
    let uid = Uuid::nil();
    for (object, expected) in [
        (Object::Vm("web".into(), uid), "VM \"web\": it is being started"),
        (
            Object::Disk("data".into(), uid),
            "disk \"data\": it is being started",
        ),
        (Object::Node, "it is being started"),
    ] {
        assert_eq!(line(&object, "it is being started"), expected);
    }
}
