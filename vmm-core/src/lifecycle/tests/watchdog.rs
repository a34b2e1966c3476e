//! Actions of an expired watchdog.

use rstest::rstest;
use vmm_protocol::vmm::{Watchdog, WatchdogAction};

use super::*;

#[rstest]
#[case::reset(WatchdogAction::Reset, &["guest reset 1"], ExitKind::Stopped)]
#[case::unset(WatchdogAction::Unspecified, &["guest reset 1"], ExitKind::Stopped)]
#[case::poweroff(WatchdogAction::Poweroff, &[], ExitKind::GuestCrash)]
#[case::pause(WatchdogAction::Pause, &["is Paused for the watchdog"], ExitKind::Stopped)]
#[case::none(WatchdogAction::None, &[], ExitKind::Stopped)]
fn expired_watchdog_is_told_before_its_action(
    #[case] action: WatchdogAction,
    #[case] follows: &[&str],
    #[case] end: ExitKind,
) {
    let Op::Boot(mut boot) = boot(false) else {
        panic!("a boot");
    };
    boot.machine.as_mut().unwrap().watchdog = Some(Watchdog {
        action: action.into(),
        ..Watchdog::default()
    });
    let inputs = vec![
        request(1, Op::Boot(boot)),
        Input::Notice(Notice::WatchdogStarted),
        Input::Notice(Notice::WatchdogExpired),
        request(9, STOP),
    ];
    let (log, record) = run(inputs, |_| ());
    assert_eq!(record.kind(), end, "{log:?}");
    let told = log.iter().position(|line| line == "watchdog expired");
    let told = told.unwrap_or_else(|| panic!("{log:?}"));
    for line in follows {
        assert!(log[told..].iter().any(|other| other == line), "{log:?}");
    }
    let acts = ["guest reset 1", "is Paused for the watchdog"];
    let acts = log.iter().filter(|line| acts.contains(&line.as_str()));
    assert_eq!(acts.count(), follows.len(), "{log:?}");
}

#[test]
fn paused_machine_is_not_paused_by_its_watchdog() {
    let Op::Boot(mut boot) = boot(true) else {
        panic!("a boot");
    };
    boot.machine.as_mut().unwrap().watchdog = Some(Watchdog {
        action: WatchdogAction::Pause.into(),
        ..Watchdog::default()
    });
    let expired = Input::Notice(Notice::WatchdogExpired);
    let (log, _) = run(
        vec![request(1, Op::Boot(boot)), expired, request(9, STOP)],
        |_| (),
    );
    assert!(!log.contains(&"is Paused for the watchdog".to_owned()), "{log:?}");
}
