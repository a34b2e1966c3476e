//! Which frames a bridge passes up to the node, and which a tap passes to its guest: programs of
//! classic BPF (linux/filter.h) in the traffic control, which need no right beyond those on the
//! interface. They do not depend on the packet filter.

use std::net::{Ipv4Addr, Ipv6Addr};

use rtnetlink::{
    packet_core::DefaultNla,
    packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption},
};

use crate::netd::metadata::ADDRESS;

/// Conditions for frames that reach the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// A bit of the packet's mark, which the packet filter sets.
    pub mark: u32,
    /// The only destinations besides groups, the link and the metadata service, in a network without a way out.
    pub only: Option<(Option<Ipv4Addr>, Option<Ipv6Addr>)>,
}

/// Conditions for frames to a guest: they have this bit of the mark, or are the node's own. A bridge does not change the type of a
/// packet from another port, which is never `PACKET_HOST`: such a packet is the node's (linux/if_packet.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TapGuard(pub u32);

/// Condition for frames from a guest: this source MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacFilter(pub [u8; 6]);

/// Attributes of the classifier "bpf" (linux/pkt_cls.h), and the flag that makes the program's result
/// the verdict.
const TCA_BPF_OPS_LEN: u16 = 4;
const TCA_BPF_OPS: u16 = 5;
const TCA_BPF_FLAGS: u16 = 8;
const ACT_DIRECT: u32 = 1;
/// Verdicts: the next filter decides, and drop.
const UNSPECIFIED: u32 = u32::MAX;
const SHOT: u32 = 2;
/// Where a program finds the mark of a packet: SKF_AD_OFF and SKF_AD_MARK.
const MARK: u32 = (-0x1000_i32 + 20).cast_unsigned();
/// Where it finds the type: SKF_AD_OFF and SKF_AD_PKTTYPE. And the type of packets of the node.
const TYPE: u32 = (-0x1000_i32 + 4).cast_unsigned();
const PACKET_HOST: u32 = 0;
/// Steps of a program: load 32 or 16 bits, compare, and return.
const LOAD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const EQUAL: u16 = 0x15;
const AT_LEAST: u16 = 0x35;
const HAS_BITS: u16 = 0x45;
const RETURN: u16 = 0x06;
/// EtherTypes, and their place in a frame.
const ETHER_TYPE: u32 = 12;
const IPV4: u32 = 0x0800;
const ARP: u32 = 0x0806;
const IPV6: u32 = 0x86dd;
/// Place of the source MAC address in a frame.
const SOURCE: u32 = 6;
/// Places of the destination addresses in a frame.
const DESTINATION4: u32 = 14 + 16;
const DESTINATION6: u32 = 14 + 24;
/// All protocols (linux/if_ether.h).
const ETH_P_ALL: u16 = 3;

/// What follows a comparison.
#[derive(Clone, Copy)]
enum Then {
    Next,
    /// That many steps are left out.
    Skip(u8),
    Pass,
    Drop,
}

use Then::{Drop, Next, Pass, Skip};

/// A step: its kind, its number, and what follows when the comparison holds, and when not.
type Step = (u16, u32, Then, Then);

impl Guard {
    /// The filter for received packets of an interface.
    pub fn filter(self, index: i32) -> TcMessage {
        filter(index, TcHandle::MIN_INGRESS, &self.steps())
    }

    fn steps(self) -> Vec<Step> {
        let mut steps = vec![(LOAD, MARK, Next, Next)];
        let Some((gateway, gateway6)) = self.only else {
            steps.push((HAS_BITS, self.mark, Pass, Drop));
            return steps;
        };
        steps.extend([
            (HAS_BITS, self.mark, Next, Drop),
            (LOAD_HALF, ETHER_TYPE, Next, Next),
            (EQUAL, ARP, Pass, Next),
            (EQUAL, IPV4, Next, Skip(4)),
            (LOAD, DESTINATION4, Next, Next),
            (EQUAL, ADDRESS.to_bits(), Pass, Next),
            // Without IPv4 a broadcast address, which passes anyway.
            (
                EQUAL,
                gateway.unwrap_or(Ipv4Addr::BROADCAST).to_bits(),
                Pass,
                Next,
            ),
            // Groups, and the broadcast address of the link.
            (AT_LEAST, 0xe000_0000, Pass, Drop),
            (EQUAL, IPV6, Next, Drop),
            (LOAD, DESTINATION6, Next, Next),
            // ff00::/8 and fe80::/10 (RFC 4291, 2.4).
            (AT_LEAST, 0xff00_0000, Pass, Next),
            (AT_LEAST, 0xfec0_0000, Drop, Next),
            (AT_LEAST, 0xfe80_0000, Pass, Next),
        ]);
        let words = gateway6.map(Ipv6Addr::to_bits).into_iter().flat_map(|bits| {
            let words = bits.to_be_bytes();
            let words: Vec<_> = words
                .chunks_exact(4)
                .map(|word| word.iter().fold(0_u32, |all, byte| all << 8 | u32::from(*byte)))
                .collect();
            words
        });
        for (place, word) in (DESTINATION6..).step_by(4).zip(words) {
            steps.push((LOAD, place, Next, Next));
            steps.push((EQUAL, word, Next, Drop));
        }
        if gateway6.is_none() {
            steps.push((AT_LEAST, 0, Drop, Drop));
        }
        steps
    }
}

impl TapGuard {
    /// The filter for packets that an interface sends.
    pub fn filter(self, index: i32) -> TcMessage {
        filter(index, TcHandle::MIN_EGRESS, &self.steps())
    }

    fn steps(self) -> Vec<Step> {
        vec![
            (LOAD, TYPE, Next, Next),
            (EQUAL, PACKET_HOST, Pass, Next),
            (LOAD, MARK, Next, Next),
            (HAS_BITS, self.0, Pass, Drop),
        ]
    }
}

impl MacFilter {
    /// The filter for packets that an interface receives.
    pub fn filter(self, index: i32) -> TcMessage {
        filter(index, TcHandle::MIN_INGRESS, &self.steps())
    }

    fn steps(self) -> Vec<Step> {
        let [a, b, c, d, e, f] = self.0;
        vec![
            (LOAD, SOURCE, Next, Next),
            (EQUAL, u32::from_be_bytes([a, b, c, d]), Next, Drop),
            (LOAD_HALF, SOURCE + 4, Next, Next),
            (EQUAL, u32::from_be_bytes([0, 0, e, f]), Pass, Drop),
        ]
    }
}

/// A filter of an interface, in the direction `minor`.
fn filter(index: i32, minor: u16, steps: &[Step]) -> TcMessage {
    let program = assemble(steps);
    let length = u16::try_from(program.len() / 8).unwrap_or_default();
    let option = |kind, value: Vec<u8>| TcOption::Other(DefaultNla::new(kind, value));
    let mut message = TcMessage::with_index(index);
    message.header.handle = TcHandle::from(1);
    message.header.parent = TcHandle {
        major: u16::MAX,
        minor,
    };
    message.header.info = 1 << 16 | u32::from(ETH_P_ALL.to_be());
    message.attributes = vec![
        TcAttribute::Kind("bpf".to_owned()),
        TcAttribute::Options(vec![
            option(TCA_BPF_OPS_LEN, length.to_ne_bytes().to_vec()),
            option(TCA_BPF_OPS, program),
            option(TCA_BPF_FLAGS, ACT_DIRECT.to_ne_bytes().to_vec()),
        ]),
    ];
    message
}

/// The program: the steps, and the two verdicts behind them.
fn assemble(steps: &[Step]) -> Vec<u8> {
    let verdicts = [(RETURN, UNSPECIFIED, Next, Next), (RETURN, SHOT, Next, Next)];
    let mut bytes = Vec::new();
    for (place, (kind, number, yes, no)) in steps.iter().chain(&verdicts).enumerate() {
        let distance = |then: &Then| match then {
            Next => 0,
            Skip(steps) => *steps,
            Pass => u8::try_from(steps.len() - place - 1).unwrap_or(u8::MAX),
            Drop => u8::try_from(steps.len() - place).unwrap_or(u8::MAX),
        };
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([distance(yes), distance(no)]);
        bytes.extend(number.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const BIT: u32 = 0x0800_0000;

    /// Runs a program on a frame with a mark. True when the frame passes.
    fn passes(guard: Guard, mark: u32, frame: &[u8]) -> bool {
        run(&guard.steps(), (mark, 3), frame)
    }

    /// Runs steps on a frame with a mark and a type of packet. True when the frame passes.
    fn run(steps: &[Step], (mark, kind_of_packet): (u32, u32), frame: &[u8]) -> bool {
        let program = assemble(steps);
        let (mut place, mut value) = (0, 0_u32);
        loop {
            let step = &program[place * 8..][..8];
            let number = u32::from_ne_bytes(step[4..].try_into().unwrap());
            let at = |length: usize| {
                let bytes = &frame[usize::try_from(number).unwrap()..][..length];
                bytes.iter().fold(0_u32, |all, byte| all << 8 | u32::from(*byte))
            };
            let holds = match u16::from_ne_bytes([step[0], step[1]]) {
                LOAD if number == MARK => {
                    value = mark;
                    None
                }
                LOAD if number == TYPE => {
                    value = kind_of_packet;
                    None
                }
                LOAD => {
                    value = at(4);
                    None
                }
                LOAD_HALF => {
                    value = at(2);
                    None
                }
                RETURN => return number == UNSPECIFIED,
                EQUAL => Some(value == number),
                AT_LEAST => Some(value >= number),
                HAS_BITS => Some(value & number != 0),
                kind => panic!("{kind:#x}"),
            };
            place += 1 + holds.map_or(0, |holds| usize::from(step[if holds { 2 } else { 3 }]));
        }
    }

    fn frame(kind: u32, place: u32, address: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 64];
        frame[12..14].copy_from_slice(&kind.to_be_bytes()[2..]);
        let place = usize::try_from(place).unwrap();
        frame[place..place + address.len()].copy_from_slice(address);
        frame
    }

    #[test]
    fn guard_drops_frames_without_the_mark() {
        let guard = Guard {
            mark: BIT,
            only: None,
        };
        let frame = frame(IPV4, DESTINATION4, &[198, 51, 100, 2]);
        assert!(passes(guard, BIT | 1, &frame));
        assert!(!passes(guard, 1, &frame));
    }

    #[test]
    fn guard_of_a_tap_drops_frames_of_other_ports_without_the_mark() {
        let steps = TapGuard(BIT).steps();
        // PACKET_HOST, PACKET_BROADCAST, PACKET_MULTICAST, PACKET_OTHERHOST.
        for (kind, passes) in [(0, true), (1, false), (2, false), (3, false)] {
            assert_eq!(run(&steps, (1, kind), &[]), passes, "{kind}");
            assert!(run(&steps, (BIT | 1, kind), &[]), "{kind}");
        }
    }

    #[test]
    fn filter_of_a_mac_address_drops_frames_of_all_others() {
        let own = [0x52, 0x54, 0, 0, 0x12, 0x34];
        let steps = MacFilter(own).steps();
        let passes = |source: &[u8]| run(&steps, (0, 3), &frame(IPV4, SOURCE, source));
        assert!(passes(&own));
        for place in 0..6 {
            let mut other = own;
            other[place] ^= 1;
            assert!(!passes(&other), "{place}");
        }
    }

    #[test]
    fn guard_of_an_isolated_network_lets_nothing_out() {
        let gateway6: Ipv6Addr = "fd00:81::1".parse().unwrap();
        for gateway6 in [None, Some(gateway6)] {
            let guard = Guard {
                mark: BIT,
                only: Some((Some([10, 81, 0, 1].into()), gateway6)),
            };
            for (address, expected) in [
                ("10.81.0.1", true),
                ("255.255.255.255", true),
                ("10.81.0.2", false),
                ("198.51.100.2", false),
            ] {
                let address: Ipv4Addr = address.parse().unwrap();
                let frame = frame(IPV4, DESTINATION4, &address.octets());
                assert_eq!(passes(guard, BIT, &frame), expected, "{address}");
                assert!(!passes(guard, 0, &frame));
            }
            for (address, expected) in [
                ("fd00:81::1", gateway6.is_some()),
                ("ff02::1", true),
                ("fe80::1", true),
                ("fec0::1", false),
                ("fd00:81::2", false),
                ("fd00:99::1", false),
            ] {
                let address: Ipv6Addr = address.parse().unwrap();
                let frame = frame(IPV6, DESTINATION6, &address.octets());
                assert_eq!(passes(guard, BIT, &frame), expected, "{address}");
            }
            assert!(passes(guard, BIT, &frame(ARP, 40, &[])));
            assert!(!passes(guard, BIT, &frame(0x8100, 40, &[])));
        }
    }
}
