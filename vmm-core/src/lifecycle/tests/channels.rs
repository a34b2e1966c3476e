//! Channels that programs of the guest open and close.

use super::*;

fn changed() -> Input {
    Input::Notice(Notice::ChannelsChanged)
}

#[test]
fn flood_of_changes_of_channels_is_published_rarely() {
    let mut inputs = vec![request(1, boot(false))];
    inputs.extend((0..1000).map(|_| changed()));
    inputs.push(request(9, STOP));
    let start = Instant::now();
    let (log, _) = run(inputs, |_| ());
    let published = log.iter().filter(|line| line.starts_with("open: ")).count();
    let most = 1 + start.elapsed().as_millis() / 100;
    assert!((1..=most).contains(&(published as u128)), "{published} of {most}");
}

#[test]
fn last_of_many_changes_of_channels_is_published() {
    let (sender, receiver) = channel();
    let log = Log::default();
    let builder = TestBuilder::new(&log, &sender);
    for input in [request(1, boot(false)), changed(), changed(), changed()] {
        sender.send(input).unwrap();
    }
    let (notifier, audience) = (Notifier::new(sender.clone()), log.clone());
    let thread = std::thread::spawn(move || Driver::new(receiver, notifier, audience, builder).run(|_| ()));
    let start = Instant::now();
    while !log.0.lock().unwrap().contains(&"open: channel 2".to_owned()) {
        assert!(start.elapsed().as_secs() < 20);
        std::thread::yield_now();
    }
    sender.send(request(9, STOP)).unwrap();
    thread.join().unwrap();
}
