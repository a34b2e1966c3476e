//! The control queue.

use rstest::rstest;

use super::*;
use crate::virtio::testing::Area;

/// A frame from somewhere to `to`, of a VLAN if there is one.
fn frame(to: [u8; 6], vlan: Option<u16>) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend(to);
    frame.extend([0x52, 0x54, 0, 7, 7, 7]);
    if let Some(id) = vlan {
        frame.extend([0x81, 0]);
        frame.extend(id.to_be_bytes());
    }
    frame.extend([0x08, 0]);
    frame.extend([0x42; 60]);
    frame
}

/// Sends `frames` and says which of them reached the driver, in order.
fn reaching(peer: &Peer, driver: &mut Driver, frames: &[Vec<u8>]) -> Vec<bool> {
    // The last frame passes every filter of the driver.
    let last = frame(MAC, None);
    for frame in frames.iter().chain([&last]) {
        driver.submit(RECEIVE, &[Buffer::Writable(2000)]);
        peer.send(frame);
    }
    let mut frames = frames.iter().chain([&last]);
    let mut reached = Vec::new();
    loop {
        let (_, mut written) = driver.wait_used(RECEIVE);
        written[10] = 0;
        for frame in frames.by_ref() {
            reached.push(*frame == written);
            if *frame == written {
                break;
            }
        }
        if written == last {
            reached.pop();
            return reached;
        }
    }
}

const OTHER: [u8; 6] = [0x52, 0x54, 0, 9, 9, 9];
const GROUP: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const ALL_NODES: [u8; 6] = [0xff; 6];

#[test]
fn a_driver_gets_what_its_filter_says() {
    let (peer, mut driver) = running(ALL);
    let frames = [frame(OTHER, None), frame(GROUP, None), frame(ALL_NODES, None)];
    let of = |peer: &Peer, driver: &mut Driver| reaching(peer, driver, &frames);
    assert_eq!(of(&peer, &mut driver), [true, true, true]);
    assert!(command(&mut driver, CONTROL, 0, 0, &[0]));
    assert_eq!(of(&peer, &mut driver), [false, false, true]);
    let tables = [&[1, 0, 0, 0][..], &OTHER, &[1, 0, 0, 0], &GROUP].concat();
    assert!(command(&mut driver, CONTROL, 1, 0, &tables));
    assert_eq!(of(&peer, &mut driver), [true, true, true]);
    // No multicast, no broadcast.
    assert!(command(&mut driver, CONTROL, 0, 3, &[1]));
    assert!(command(&mut driver, CONTROL, 0, 5, &[1]));
    assert_eq!(of(&peer, &mut driver), [true, false, false]);
    // A reset forgets the filter.
    driver.start(ALL);
    assert_eq!(of(&peer, &mut driver), [true, true, true]);
}

#[test]
fn packets_of_vlans_that_were_not_added_are_kept_out_and_counted() {
    let (peer, control, mut driver) = controlled(ALL);
    let frames = [frame(MAC, Some(7)), frame(MAC, Some(8))];
    assert!(command(&mut driver, CONTROL, 0, 0, &[0]));
    assert!(command(&mut driver, CONTROL, 2, 0, &[7, 0]));
    assert_eq!(reaching(&peer, &mut driver, &frames), [true, false]);
    assert!(command(&mut driver, CONTROL, 2, 1, &[7, 0]));
    assert_eq!(reaching(&peer, &mut driver, &frames), [false, false]);
    assert_eq!(control.stats().receive_filtered, 3);
    assert_eq!(control.stats().receive_dropped, 0);
}

#[test]
fn an_address_that_the_driver_sets_is_its_own_until_it_resets_the_device() {
    let (peer, mut driver) = running(ALL);
    let shown = |driver: &Driver| driver.rig.read(Area::Device, 4, 2);
    assert!(command(&mut driver, CONTROL, 0, 0, &[0]));
    assert!(command(&mut driver, CONTROL, 1, 1, &OTHER));
    assert_eq!(shown(&driver), 0x0909);
    driver.submit(RECEIVE, &[Buffer::Writable(2000)]);
    peer.send(&frame(MAC, None));
    peer.send(&frame(OTHER, None));
    assert_eq!(driver.wait_used(RECEIVE).1[12..18], OTHER);
    driver.rig.reset_device();
    assert_eq!(shown(&driver), 0x0302);
}

#[rstest]
#[case::unknown_class(99, 0, &[])]
#[case::unknown_receive_mode(0, 6, &[1])]
#[case::receive_mode_without_a_value(0, 0, &[])]
#[case::receive_mode_of_two(0, 0, &[2])]
#[case::multicast_address(1, 1, &[1, 0, 0, 0, 0, 0])]
#[case::short_address(1, 1, &[2, 0, 0, 0, 0])]
#[case::table_without_addresses(1, 0, &[1, 0, 0, 0])]
#[case::table_of_too_many(1, 0, &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0])]
#[case::one_table(1, 0, &[0, 0, 0, 0])]
#[case::something_behind_the_tables(1, 0, &[0, 0, 0, 0, 0, 0, 0, 0, 1])]
#[case::vlan_of_13_bits(2, 0, &[0, 0x10])]
#[case::unknown_vlan_command(2, 2, &[1, 0])]
#[case::pairs_of_an_interface_with_one(4, 0, &[1, 0])]
#[case::offloads_that_were_not_negotiated(5, 0, &[0xff; 8])]
#[case::short_offloads(5, 0, &[0; 7])]
#[case::very_long(1, 0, &[0; 66_000])]
fn commands_that_make_no_sense_are_refused_and_change_nothing(
    #[case] class: u8,
    #[case] number: u8,
    #[case] data: &[u8],
) {
    let (_peer, front) = Peer::new();
    let shared = Arc::clone(&front.control().shared);
    let mut driver = Driver::new(Rig::new(front));
    driver.start(ALL);
    let before = shared.save();
    assert!(!command(&mut driver, CONTROL, class, number, data));
    assert_eq!(shared.save(), before);
    let faults = &driver.rig.device.counters().guest_faults;
    assert_eq!(faults.load(std::sync::atomic::Ordering::Relaxed), 1);
    // The next one is carried out.
    assert!(command(&mut driver, CONTROL, 0, 1, &[1]));
}

#[test]
fn commands_of_features_that_were_not_accepted_are_refused() {
    let (_peer, mut driver) = running(CTRL_VQ);
    let address = [0x52, 0, 0, 0, 0, 1];
    let commands: [(u8, u8, &[u8]); 6] = [
        (0, 0, &[1]),
        (0, 2, &[1]),
        (1, 1, &address),
        (2, 0, &[7, 0]),
        (3, 0, &[]),
        (5, 0, &[0; 8]),
    ];
    for (class, number, data) in commands {
        assert!(!command(&mut driver, CONTROL, class, number, data), "{class}");
    }
}

#[test]
fn a_driver_chooses_what_it_takes_unfinished_until_the_reset() {
    let (peer, mut driver) = running(ALL);
    // An answer says that the worker runs.
    assert!(command(&mut driver, CONTROL, 0, 1, &[1]));
    assert_eq!(peer.told.last_offloads(), Some(Offloads::all()));
    let bits = GUEST_CSUM | GUEST_TSO6;
    assert!(command(&mut driver, CONTROL, 5, 0, &bits.to_le_bytes()));
    let chosen = Offloads::CHECKSUM | Offloads::TSO6;
    assert_eq!(peer.told.last_offloads(), Some(chosen));
    driver.rig.pause();
    crate::component::Component::resume(&mut driver.rig.device).unwrap();
    assert!(command(&mut driver, CONTROL, 0, 1, &[1]));
    assert_eq!(peer.told.last_offloads(), Some(chosen));
    driver.start(ALL);
    assert!(command(&mut driver, CONTROL, 0, 1, &[1]));
    assert_eq!(peer.told.last_offloads(), Some(Offloads::all()));
}

#[test]
fn a_packet_that_waited_since_a_driver_took_more_does_not_reach_the_next_one() {
    let (peer, control, mut driver) = controlled(ALL);
    driver.rig.reset_device();
    let mut segments = packet(1, 3000);
    (segments[0], segments[1], segments[4]) = (1, 1, 100);
    peer.send(&segments);
    let mut checked = packet(2, 60);
    checked[0] = 2;
    peer.send(&checked);
    driver.start(MRG_RXBUF);
    driver.submit(RECEIVE, &[Buffer::Writable(4000)]);
    let (_, written) = driver.wait_used(RECEIVE);
    assert_eq!((written[0], &written[12..20]), (0, &2_u64.to_le_bytes()[..]));
    assert_eq!(control.stats().receive_dropped, 1);
}
