//! Which packets are let through, by their headers.

use proptest::prelude::*;
use rstest::rstest;
use zerocopy::FromBytes;

use super::{
    super::header::{Header, check, for_driver},
    *,
};

#[rstest]
#[case::plain(Header::default(), 60, 0, true)]
#[case::too_short(Header::default(), 13, 0, false)]
#[case::longest(Header::default(), 65_554, 0, true)]
#[case::too_long(Header::default(), 65_555, 0, false)]
#[case::checksum(checksum(34, 16), 60, CSUM, true)]
#[case::checksum_at_the_end(checksum(34, 24), 60, CSUM, true)]
#[case::checksum_beyond_the_end(checksum(34, 25), 60, CSUM, false)]
#[case::checksum_overflows(checksum(0xffff, 0xffff), 60, CSUM, false)]
#[case::checksum_not_negotiated(checksum(34, 16), 60, 0, false)]
#[case::tso4(segments(1, 1448), 9000, CSUM | HOST_TSO4, true)]
#[case::tso4_not_negotiated(segments(1, 1448), 9000, CSUM | HOST_TSO6, false)]
#[case::tso6(segments(4, 1448), 9000, CSUM | HOST_TSO6, true)]
#[case::ecn(segments(0x81, 1448), 9000, CSUM | HOST_TSO4 | HOST_ECN, true)]
#[case::ecn_not_negotiated(segments(0x81, 1448), 9000, CSUM | HOST_TSO4, false)]
#[case::ecn_alone(segments(0x80, 1448), 9000, CSUM | HOST_TSO4 | HOST_ECN, false)]
#[case::ufo(segments(3, 1448), 9000, u64::MAX, false)]
#[case::uso(segments(5, 1448), 9000, CSUM | HOST_USO, true)]
#[case::uso_not_negotiated(segments(5, 1448), 9000, CSUM | HOST_TSO4, false)]
#[case::uso_with_ecn(segments(0x85, 1448), 9000, u64::MAX, false)]
#[case::no_size(segments(1, 0), 9000, CSUM | HOST_TSO4, false)]
#[case::no_checksum(Header { flags: 0, ..segments(1, 1448) }, 9000, CSUM | HOST_TSO4, false)]
fn headers_are_let_through_or_not(
    #[case] header: Header,
    #[case] length: u32,
    #[case] features: u64,
    #[case] passes: bool,
) {
    let checked = check(&header, length, features);
    assert_eq!(checked.is_ok(), passes, "{checked:?}");
    if let Ok(checked) = checked {
        assert_eq!(checked, header);
    }
}

fn checksum(start: u16, offset: u16) -> Header {
    Header {
        flags: 1,
        csum_start: start.into(),
        csum_offset: offset.into(),
        ..Header::default()
    }
}

fn segments(gso_type: u8, gso_size: u16) -> Header {
    Header {
        gso_type,
        gso_size: gso_size.into(),
        hdr_len: 54.into(),
        ..checksum(34, 16)
    }
}

proptest! {
    #[test]
    fn what_the_host_gets_to_see_was_negotiated_and_lies_in_the_packet(
        bytes: [u8; 12], gso in prop_oneof![0_u8..7, any::<u8>()], length in 0_u32..70_000, features: u64
    ) {
        let mut header = Header::read_from_bytes(&bytes).unwrap();
        header.gso_type = gso;
        let Ok(checked) = check(&header, length, features) else { return Ok(()) };
        prop_assert!(checked.flags & !1 == 0 && checked.num_buffers.get() == 0);
        if checked.flags == 1 {
            prop_assert!(features & CSUM != 0);
            let end = u32::from(checked.csum_start.get()) + u32::from(checked.csum_offset.get()) + 2;
            prop_assert!(end <= length);
        }
        prop_assert!(u32::from(checked.hdr_len.get()) <= length);
        let needed = match checked.gso_type {
            0 => 0,
            1 => HOST_TSO4,
            4 => HOST_TSO6,
            5 => HOST_USO,
            0x81 => HOST_TSO4 | HOST_ECN,
            0x84 => HOST_TSO6 | HOST_ECN,
            _ => return Err(TestCaseError::fail("segmentation that was never on offer")),
        };
        prop_assert_eq!(features & needed, needed);
        prop_assert_eq!(checked.gso_type == 0, checked.gso_size.get() == 0);
    }
}

#[rstest]
#[case::plain(0, 0, Offloads::empty(), Some(0))]
#[case::checksum_is_missing(1, 0, Offloads::CHECKSUM, Some(1))]
#[case::checksum_is_missing_and_not_taken(1, 0, Offloads::empty(), None)]
#[case::checksum_was_checked(2, 0, Offloads::CHECKSUM, Some(2))]
#[case::a_driver_without_checksums_is_told_nothing_of_them(2, 0, Offloads::empty(), Some(0))]
#[case::segments(1, 1, Offloads::CHECKSUM | Offloads::TSO4, Some(1))]
#[case::segments_that_are_not_taken(1, 1, Offloads::CHECKSUM | Offloads::TSO6, None)]
#[case::segments_with_ecn_that_are_not_taken(1, 0x81, Offloads::CHECKSUM | Offloads::TSO4, None)]
#[case::datagrams(1, 5, Offloads::CHECKSUM | Offloads::USO, Some(1))]
#[case::datagrams_that_are_not_taken(1, 5, Offloads::all() - Offloads::USO, None)]
#[case::of_an_unknown_kind(1, 3, Offloads::all(), None)]
fn a_driver_gets_only_what_it_takes(
    #[case] flags: u8,
    #[case] gso_type: u8,
    #[case] offloads: Offloads,
    #[case] expected: Option<u8>,
) {
    let header = Header {
        flags,
        gso_type,
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..Header::default()
    };
    let shown = for_driver(&header, offloads);
    assert_eq!(shown.map(|shown| shown.flags), expected);
    if let Some(shown) = shown {
        assert_eq!(shown.gso_type, gso_type);
        assert_eq!(
            shown.csum_start.get() == 34,
            offloads.contains(Offloads::CHECKSUM)
        );
    }
}

#[test]
fn each_segment_counts_as_a_packet_in_a_rate_limit() {
    let cost = |header: Header, length| header.cost(length).operations;
    assert_eq!(cost(Header::default(), 9000), 1);
    assert_eq!(cost(segments(1, 1000), 9000), 9);
    assert_eq!(cost(segments(1, 9000), 60), 1);
    assert_eq!(cost(segments(1, 0), 9000), 1);
}
