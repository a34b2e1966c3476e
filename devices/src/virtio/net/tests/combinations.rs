//! Data compared from end to end, with every combination of offloads.

use super::*;

/// Features that change what packets look like.
const SWITCHES: [u64; 8] = [
    CSUM,
    GUEST_CSUM,
    HOST_TSO4,
    HOST_TSO6 | HOST_ECN,
    GUEST_TSO4,
    GUEST_TSO6 | GUEST_ECN,
    HOST_USO | GUEST_USO,
    MRG_RXBUF,
];

/// Headers that packets may have whose receiver has these features: (flags, kind of segments).
fn headers(features: u64, checksum: u64, kinds: [(u64, u8); 3]) -> Vec<(u8, u8)> {
    let mut headers = vec![(0, 0)];
    if features & checksum != 0 {
        headers.push((1, 0));
        headers.extend(
            kinds
                .iter()
                .filter(|(feature, _)| features & feature != 0)
                .map(|(_, kind)| (1, *kind)),
        );
    }
    headers
}

fn dressed(number: u64, length: usize, (flags, kind): (u8, u8)) -> Vec<u8> {
    let mut packet = packet(number, length);
    packet[0] = flags;
    packet[1] = kind;
    if flags != 0 {
        (packet[6], packet[8]) = (34, 16);
    }
    if kind != 0 {
        packet[2] = 54;
        packet[4..6].copy_from_slice(&1000_u16.to_le_bytes());
    }
    packet
}

fn lengths(header: (u8, u8), mtu: u16) -> Vec<usize> {
    let most = usize::from(mtu) + 14;
    if header.1 == 0 {
        vec![14 + 46, 64, 590, most]
    } else {
        vec![most + 1, 20_000, 65_550]
    }
}

fn carry(pairs: u16, mtu: u16, features: u64) {
    let options = NetOptions::new("eth0", MAC, mtu);
    let (mut peer, front) = Peer::with(pairs.into(), options);
    let control = front.control();
    peer.drain();
    let mut driver = Driver::new(Rig::new(front));
    driver.start(features | CTRL_VQ | MQ);
    if pairs > 1 {
        assert!(command(&mut driver, pairs * 2, 4, 0, &pairs.to_le_bytes()));
    }
    let (mut sent, mut received) = (0, 0);
    for pair in 0..pairs {
        let host = [(HOST_TSO4, 1), (HOST_TSO6, 4), (HOST_USO, 5)];
        for header in headers(features, CSUM, host) {
            for length in lengths(header, mtu) {
                let out = dressed(peer.next(), length, header);
                driver.request(pair * 2 + 1, &[Buffer::Readable(out.clone())]);
                peer.wait_for(pair, &out);
                sent += 1;
            }
        }
        let guest = [(GUEST_TSO4, 1), (GUEST_TSO6, 4), (GUEST_USO, 5)];
        for header in headers(features, GUEST_CSUM, guest) {
            for length in lengths(header, mtu) {
                let mut coming = dressed(peer.next(), length, header);
                let (size, count) = if features & MRG_RXBUF != 0 {
                    (1536, coming.len().div_ceil(1536))
                } else {
                    (65_562 + 4, 1)
                };
                for _ in 0..count {
                    driver.submit(pair * 2, &[Buffer::Writable(size)]);
                }
                peer.send_to(pair, &coming);
                coming[10] = u8::try_from(count).unwrap();
                let mut data = Vec::new();
                for _ in 0..count {
                    data.extend(driver.wait_used(pair * 2).1);
                }
                assert!(data == coming, "{header:?} of {length} bytes with {features:#x}");
                received += 1;
            }
        }
    }
    let stats = control.stats();
    assert_eq!((stats.sent, stats.received), (sent, received));
    assert_eq!((stats.send_dropped, stats.receive_dropped), (0, 0));
}

#[test]
fn packets_arrive_unchanged_with_every_combination_of_offloads() {
    for (pairs, mtu) in [(1, 1500), (4, 9000)] {
        for set in 0..1_u32 << SWITCHES.len() {
            let chosen = SWITCHES.iter().enumerate();
            let features = chosen.filter(|(bit, _)| set & 1 << bit != 0);
            carry(pairs, mtu, features.fold(0, |all, (_, feature)| all | feature));
        }
    }
}

#[test]
fn offloads_that_are_switched_off_are_not_offered() {
    let offered = |options: NetOptions| {
        let (_peer, front) = Peer::with(1, options);
        Driver::new(Rig::new(front)).offered()
    };
    let all = NetOptions::new("eth0", MAC, 1500);
    let everything = SWITCHES.iter().fold(0, |all, feature| all | feature);
    assert_eq!(offered(all.clone()) & everything, everything);
    let none = NetOptions {
        offloads: Offloads::empty(),
        merge: false,
        ..all.clone()
    };
    assert_eq!(offered(none) & everything, 0);
    // Segments need checksums.
    let segments = NetOptions {
        offloads: Offloads::TSO4 | Offloads::USO,
        ..all.clone()
    };
    assert_eq!(offered(segments) & everything, MRG_RXBUF);
    let some = NetOptions {
        offloads: Offloads::CHECKSUM | Offloads::TSO4,
        ..all
    };
    let expected = CSUM | GUEST_CSUM | HOST_TSO4 | GUEST_TSO4 | MRG_RXBUF;
    assert_eq!(offered(some) & everything, expected);
}
