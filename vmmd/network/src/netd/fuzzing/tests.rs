use std::{fs, path::Path};

use proptest::prelude::*;

use super::*;

/// A seed: its name, and its bytes.
type Seed = (&'static str, Vec<u8>);

/// A message of the client with the MAC address 52:54:00:00:00:01, with these options behind its type.
fn client(kind: u8, address: [u8; 4], options: &[u8]) -> Vec<u8> {
    let mut packet = vec![1, 1, 6, 0, 0, 0, 0, 7, 0, 0, 0, 0];
    packet.extend(address);
    packet.resize(28, 0);
    packet.extend([0x52, 0x54, 0, 0, 0, 1]);
    packet.resize(236, 0);
    packet.extend([99, 130, 83, 99, 53, 1, kind]);
    packet.extend(options);
    packet.push(255);
    packet
}

/// With the type of the answer (RFC 2132, 9.6), if there is one.
fn dhcp_seeds() -> Vec<(Seed, Option<MessageType>)> {
    use MessageType::{Ack, Nak, Offer};
    let none = [0; 4];
    let mut relayed = client(1, none, &[]);
    relayed[24..28].copy_from_slice(&[10, 1, 1, 1]);
    let mut stranger = client(1, none, &[]);
    stranger[33] = 9;
    // Parameter request list, vendor class, client FQDN, option overload, padding (RFC 2132;
    // RFC 4702).
    let options = [
        55, 4, 1, 3, 6, 15, 60, 4, b'u', b'd', b'h', b'c', 81, 4, 0, 0, 0, b'a', 52, 1, 3, 0, 0,
    ];
    let requested = [50, 4, 10, 80, 0, 2, 54, 4, 10, 80, 0, 1];
    let elsewhere = [50, 4, 10, 80, 0, 2, 54, 4, 10, 80, 0, 7];
    vec![
        (("discover", client(1, none, &[])), Some(Offer)),
        (("discover_with_options", client(1, none, &options)), Some(Offer)),
        (("request", client(3, none, &requested)), Some(Ack)),
        (
            ("request_of_another", client(3, none, &[50, 4, 10, 80, 0, 3])),
            Some(Nak),
        ),
        (("request_elsewhere", client(3, none, &elsewhere)), None),
        (("renew", client(3, [10, 80, 0, 2], &[])), Some(Ack)),
        (("renew_of_another", client(3, [10, 80, 0, 3], &[])), Some(Nak)),
        (("decline", client(4, none, &requested)), None),
        (("release", client(7, [10, 80, 0, 2], &[])), None),
        (("inform", client(8, [10, 80, 0, 2], &[])), Some(Ack)),
        (("relayed", relayed), None),
        (("stranger", stranger), None),
    ]
}

#[test]
fn the_seeds_of_dhcp_client_get_the_answers_that_they_are_for() {
    for ((name, packet), expected) in dhcp_seeds() {
        let reply = dhcp::respond(&TABLES[0], &packet);
        let kind = reply.map(|(reply, _)| v4::Message::decode(&mut Decoder::new(&reply)).unwrap());
        assert_eq!(
            kind.and_then(|message| message.opts().msg_type()),
            expected,
            "{name}"
        );
    }
    let seeds: Vec<_> = dhcp_seeds().into_iter().map(|(seed, _)| seed).collect();
    run("dhcp_client", dhcp_client, &seeds);
}

/// A frame of the client with the MAC address 52:54:00:00:00:01, with these options behind its identifier.
fn client6(kind: u8, options: &[u8]) -> Vec<u8> {
    let payload = [&[kind, 1, 2, 3, 0, 1, 0, 4, 0, 4, 9, 9][..], options].concat();
    let length = u16::try_from(payload.len() + 8).unwrap().to_be_bytes();
    let mut frame = vec![0x33, 0x33, 0, 1, 0, 2, 0x52, 0x54, 0, 0, 0, 1, 0x86, 0xdd];
    frame.extend([0x60, 0, 0, 0, length[0], length[1], 17, 1]);
    frame.extend(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0xabcd).octets());
    frame.extend(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2).octets());
    frame.extend([2, 34, 2, 35, length[0], length[1], 0, 0]);
    frame.extend(payload);
    frame
}

/// With the type of the answer, if there is one.
fn dhcp6_seeds() -> Vec<(Seed, Option<v6::MessageType>)> {
    use v6::MessageType::{Advertise, Reply};
    // RFC 8415, 21.3, 21.4, 21.6, 21.14.
    let server = [0, 2, 0, 10, 0, 3, 0, 1, 2, 0, 0, 0, 0, 1];
    let none = [0, 3, 0, 12, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0];
    let own = Ipv6Addr::new(0xfd00, 0x80, 0, 0, 0x5054, 0xff, 0xfe00, 1);
    let has = |address: Ipv6Addr| {
        let head = [0, 3, 0, 40, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 24];
        [&head[..], &address.octets(), &[0, 0, 0, 5, 0, 0, 0, 5]].concat()
    };
    let (with, other) = (has(own), has(Ipv6Addr::LOCALHOST));
    let all = |parts: &[&[u8]]| parts.concat();
    let mut stranger = client6(1, &none);
    stranger[11] = 0xff;
    vec![
        (("solicit", client6(1, &none)), Some(Advertise)),
        (("rapid", client6(1, &all(&[&none, &[0, 14, 0, 0]]))), Some(Reply)),
        (("request", client6(3, &all(&[&server, &with]))), Some(Reply)),
        (
            ("renew_of_two", client6(5, &all(&[&server, &with, &other]))),
            Some(Reply),
        ),
        (("rebind", client6(6, &other)), Some(Reply)),
        (("confirm", client6(4, &with)), Some(Reply)),
        (("confirm_elsewhere", client6(4, &other)), Some(Reply)),
        (("release", client6(8, &all(&[&server, &with]))), Some(Reply)),
        (("decline", client6(9, &all(&[&server, &with]))), Some(Reply)),
        (("decline_without_server", client6(9, &with)), None),
        (("information", client6(11, &[])), Some(Reply)),
        (("relayed", client6(12, &none)), None),
        (("stranger", stranger), None),
        (("cut", client6(1, &none)[..70].to_vec()), None),
    ]
}

#[test]
fn the_seeds_of_dhcp6_client_get_the_answers_that_they_are_for() {
    for ((name, frame), expected) in dhcp6_seeds() {
        let reply = dhcp6::respond(&TABLES[0], &frame);
        let kind = reply.map(|reply| v6::Message::decode(&mut Decoder::new(&reply[62..])).unwrap());
        assert_eq!(kind.map(|message| message.msg_type()), expected, "{name}");
    }
    let seeds: Vec<_> = dhcp6_seeds().into_iter().map(|(seed, _)| seed).collect();
    run("dhcp6_client", dhcp6_client, &seeds);
}

/// A query for records of a type.
fn asks(name: &str, kind: u8) -> Vec<u8> {
    let mut packet = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        packet.push(u8::try_from(label.len()).unwrap());
        packet.extend(label.as_bytes());
    }
    packet.extend([0, 0, kind, 0, 1]);
    packet
}

/// With the number of records in the answer, and its code; `None` for forwarded queries.
fn dns_seeds() -> Vec<(Seed, Option<(usize, ResponseCode)>)> {
    use ResponseCode::{FormErr, NXDomain, NoError, NotImp};
    let changed = |mut packet: Vec<u8>, place: usize, value: u8| {
        packet[place] = value;
        packet
    };
    let web = || asks("web.lan.internal", 1);
    let six = "1.0.0.0.0.0.e.f.f.f.0.0.4.5.0.5.0.0.0.0.0.0.0.0.0.8.0.0.0.0.d.f.ip6.arpa";
    // An OPT record: 1,232 bytes by UDP (RFC 6891, 6.1.2).
    let mut edns = changed(asks("example.com", 1), 11, 1);
    edns.extend([0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    vec![
        (("address", web()), Some((1, NoError))),
        (
            ("address_of_ipv6", asks("web.lan.internal", 28)),
            Some((1, NoError)),
        ),
        (
            ("any_of_two_nics", asks("DB.Lan.Internal", 255)),
            Some((4, NoError)),
        ),
        (("text", asks("web.lan.internal", 16)), Some((0, NoError))),
        (("network", asks("lan.internal", 6)), Some((0, NoError))),
        (("unknown", asks("none.lan.internal", 1)), Some((0, NXDomain))),
        (("below", asks("a.web.lan.internal", 1)), Some((0, NXDomain))),
        (
            ("reverse", asks("2.0.80.10.in-addr.arpa", 12)),
            Some((1, NoError)),
        ),
        (("reverse_of_ipv6", asks(six, 12)), Some((1, NoError))),
        (
            ("reverse_unknown", asks("99.0.80.10.in-addr.arpa", 12)),
            Some((0, NXDomain)),
        ),
        (("notify", changed(web(), 2, 0x21)), Some((0, NotImp))),
        (("two_questions", changed(web(), 5, 2)), Some((0, FormErr))),
        (("cut", web()[..20].to_vec()), Some((0, FormErr))),
        (
            (
                "pointer",
                vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 0, 0, 1, 0, 1],
            ),
            Some((0, FormErr)),
        ),
        (("chaos", changed(web(), 33, 3)), None),
        (("outside", asks("example.com", 28)), None),
        (("outside_edns", edns), None),
        (("root", asks("", 2)), None),
    ]
}

#[test]
fn the_seeds_of_dns_query_get_the_answers_that_they_are_for() {
    for ((name, packet), expected) in dns_seeds() {
        let found = match dns::decide(&TABLES[0], &packet, Way::Udp) {
            Verdict::Answer(reply) => {
                let message = Message::from_vec(&reply).unwrap();
                Some((message.answers.len(), message.metadata.response_code))
            }
            Verdict::Forward(_) => None,
            Verdict::Ignore => panic!("{name} is ignored"),
        };
        assert_eq!(found, expected, "{name}");
    }
    let seeds: Vec<_> = dns_seeds().into_iter().map(|(seed, _)| seed).collect();
    run("dns_query", dns_query, &seeds);
}

fn name_server_seeds() -> Vec<Seed> {
    let flood = |guest: u8| (0..70_u8).flat_map(move |id| [1, guest, id, 0, id]);
    let packet = asks("example.com", 1);
    let length = u8::try_from(packet.len()).unwrap();
    vec![
        ("answered", vec![1, 0, 0, 0, 7, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0]),
        (
            "raw",
            [&[0, 0, length, 0, 0][..], &packet, &[2, 0, 0, 0, 0]].concat(),
        ),
        ("other_case", vec![1, 0, 0, 0, 7, 2, 0, 0x20, 0, 0]),
        (
            "by_the_second_server",
            vec![1, 0, 0, 0, 7, 3, 8, 0, 0, 0, 2, 0, 0, 0, 0],
        ),
        (
            "too_late",
            vec![
                1, 0, 0, 0, 7, 3, 8, 0, 0, 0, 2, 1, 0, 0, 0, 3, 8, 0, 0, 0, 2, 0, 0, 0, 0,
            ],
        ),
        (
            "asked_twice",
            vec![
                1, 0, 0, 0, 7, 1, 0, 0, 0, 7, 1, 1, 0, 0, 7, 2, 1, 0, 0, 0, 2, 0, 0, 0, 0,
            ],
        ),
        (
            "forged",
            (0..6)
                .flat_map(|flaw| [1, 0, 0, 0, flaw, 2, 0, 1 << flaw, 13, b'X'])
                .collect(),
        ),
        (
            "flood",
            flood(0)
                .chain(flood(1))
                .chain([3, 8, 0, 0, 0, 2, 3, 0, 0, 0])
                .collect(),
        ),
    ]
}

#[test]
fn the_seeds_of_name_servers_do_no_harm() {
    run("name_servers", name_servers, &name_server_seeds());
}

#[test]
fn all_guests_together_fill_the_places_and_no_more() {
    let ask = |guest: u8| (0..64_u8).flat_map(move |id| [1, guest, 0, id, id]);
    let data: Vec<_> = (0..20).flat_map(ask).collect();
    name_servers(&data);
}

fn router_seeds() -> Vec<Seed> {
    let solicitation = [133, 0, 0, 0, 0, 0, 0, 0];
    // With the link-layer address of the sender (RFC 4861, 4.6.1).
    let option = [1, 1, 0x52, 0x54, 0, 0, 0, 1];
    let after = |seconds: u8, message: &[u8]| {
        let length = u8::try_from(message.len()).unwrap();
        [&[seconds, length][..], message].concat()
    };
    vec![
        ("solicitation", after(1, &[solicitation, option].concat())),
        ("solicitations", after(1, &solicitation).repeat(8)),
        (
            "period",
            [after(1, &solicitation), after(250, &[]), after(2, &solicitation)].concat(),
        ),
        (
            "others",
            [134, 135, 136, 128]
                .iter()
                .flat_map(|kind| after(0, &[*kind, 0, 0, 0, 0, 0, 0, 0]))
                .collect(),
        ),
        ("code", after(0, &[133, 1, 0, 0, 0, 0, 0, 0])),
        ("short", after(0, &solicitation[..7])),
    ]
}

#[test]
fn the_seeds_of_router_solicitations_do_no_harm() {
    run("router_solicitations", router_solicitations, &router_seeds());
}

/// Runs `target` over the committed seeds of this name: `seeds`, and inputs that once caused a
/// failure.
fn run(name: &str, target: fn(&[u8]), seeds: &[Seed]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(name);
    for (seed, data) in seeds {
        let path = folder.join(seed);
        if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
            fs::create_dir_all(&folder).unwrap();
            fs::write(&path, data).unwrap();
        }
        assert_eq!(&fs::read(&path).unwrap(), data, "{}", path.display());
    }
    for entry in fs::read_dir(&folder).unwrap() {
        target(&fs::read(entry.unwrap().path()).unwrap());
    }
}

fn metadata_seeds() -> Vec<Seed> {
    let request = |head: &str| format!("{head}\r\nHost: 169.254.169.254\r\n\r\n").into_bytes();
    vec![
        ("get", request("GET /latest/meta-data/instance-id HTTP/1.1")),
        ("list", request("GET /latest/meta-data/ HTTP/1.1")),
        ("head", request("HEAD /user-data HTTP/1.0")),
        (
            "token",
            request("PUT /latest/api/token HTTP/1.1\r\nX-aws-ec2-metadata-token-ttl-seconds: 60"),
        ),
        (
            "with_token",
            request("GET / HTTP/1.1\r\nX-aws-ec2-metadata-token: AAAAAAAAADw"),
        ),
        (
            "forwarded",
            request("GET / HTTP/1.1\r\nX-Forwarded-For: 10.80.0.2"),
        ),
        ("body", request("PUT / HTTP/1.1\r\nContent-Length: 3")),
    ]
}

#[test]
fn seeds_of_metadata_request_do_no_harm() {
    run("metadata_request", metadata_request, &metadata_seeds());
}

/// Seeds with some bytes changed, cut or repeated.
fn changed(seeds: Vec<Seed>) -> impl Strategy<Value = Vec<u8>> {
    let seeds: Vec<_> = seeds.into_iter().map(|(_, data)| data).collect();
    let value = prop_oneof![any::<u8>(), 0..4_u8, Just(0x80), Just(0xc0), Just(0xff)];
    let place = prop_oneof![3 => 0..48_usize, 1 => 228..320_usize, 1 => any::<usize>()];
    let changes = proptest::collection::vec((place, value), 0..8);
    let cut = proptest::option::weighted(0.2, any::<usize>());
    (proptest::sample::select(seeds), changes, cut, 1..3_usize).prop_map(|(seed, changes, cut, times)| {
        let mut data = seed.repeat(times);
        for (place, value) in changes {
            let place = place % data.len();
            data[place] = value;
        }
        let length = cut.map_or(data.len(), |cut| cut % data.len());
        data.truncate(length);
        data
    })
}

fn dhcp_packets() -> impl Strategy<Value = Vec<u8>> {
    changed(dhcp_seeds().into_iter().map(|(seed, _)| seed).collect())
}

fn dhcp6_frames() -> impl Strategy<Value = Vec<u8>> {
    changed(dhcp6_seeds().into_iter().map(|(seed, _)| seed).collect())
}

fn dns_packets() -> impl Strategy<Value = Vec<u8>> {
    changed(dns_seeds().into_iter().map(|(seed, _)| seed).collect())
}

fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..600)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_changes_make_dhcp_client_do_harm(data in dhcp_packets()) {
        dhcp_client(&data);
    }

    #[test]
    fn no_changes_make_dhcp6_client_do_harm(data in dhcp6_frames()) {
        dhcp6_client(&data);
    }

    #[test]
    fn no_changes_make_metadata_request_do_harm(data in changed(metadata_seeds())) {
        metadata_request(&data);
    }

    #[test]
    fn no_bytes_harm_dhcp6_client(data in any_bytes()) {
        dhcp6_client(&data);
    }

    #[test]
    fn no_changes_make_dns_query_do_harm(data in dns_packets()) {
        dns_query(&data);
    }

    #[test]
    fn no_changes_make_router_solicitations_do_harm(data in changed(router_seeds())) {
        router_solicitations(&data);
    }

    #[test]
    fn no_bytes_harm_dhcp_client(data in any_bytes()) {
        dhcp_client(&data);
    }

    #[test]
    fn no_bytes_harm_dns_query(data in any_bytes()) {
        dns_query(&data);
    }

    #[test]
    fn no_bytes_harm_name_servers(data in any_bytes()) {
        name_servers(&data);
    }

    #[test]
    fn no_bytes_harm_router_solicitations(data in any_bytes()) {
        router_solicitations(&data);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_changes_make_name_servers_do_harm(data in changed(name_server_seeds())) {
        name_servers(&data);
    }
}
