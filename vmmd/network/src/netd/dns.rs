//! Response to a guest's DNS query (RFC 1035): a pure function of the table.
//!
//! The helper is the authority for `<network>.internal` and for the addresses of the network. It
//! forwards all other names ([`super::forward`]), unless the network is isolated.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hickory_proto::{
    op::{Header, Message, MessageType, Metadata, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, Name, RData, Record, RecordType,
        rdata::{PTR, SOA},
    },
    serialize::binary::{BinDecodable as _, BinDecoder},
};

use super::Table;

/// Lifetime of an answer in a resolver, in seconds. A recreated VM is soon reachable at its new
/// address.
const TTL: u32 = 30;
/// Bytes of a message before its question (RFC 1035, 4.1.1).
const HEADER: usize = 12;
/// Largest query in bytes; a forwarded query is stored until its answer. Resolvers add some hundred
/// bytes to a question at most, and 4,096 is the largest message that they use UDP for (RFC 6891,
/// 6.2.5).
pub const MAX_QUERY: usize = 4096;
/// Largest answer in bytes (RFC 1035, 4.2.1).
pub const MAX_ANSWER: usize = 512;
/// Bytes of the shortest record: one with an IPv4 address and a name that is a pointer (RFC 1035, 4.1.3, 4.1.4).
const RECORD: usize = 16;
/// Bytes of type and class (RFC 1035, 4.1.2).
const KIND: usize = 4;

/// Handling of a packet.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The reply.
    Answer(Vec<u8>),
    /// The question is for a name server of the node.
    Forward(Question),
    /// The packet is no query.
    Ignore,
}

/// A query that is forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Number that the client gave it.
    pub id: u16,
    /// Name, type and class as they are in the packet, behind the header. A reply repeats them.
    pub bytes: Vec<u8>,
}

/// Decides what becomes of a packet from a guest.
///
/// Only the header and the question are decoded: a guest's further records are no business of the helper.
pub fn decide(table: &Table, packet: &[u8]) -> Verdict {
    if packet.len() > MAX_QUERY {
        return Verdict::Ignore;
    }
    let mut decoder = BinDecoder::new(packet);
    let Ok(header) = Header::read(&mut decoder) else {
        return Verdict::Ignore;
    };
    let request = header.metadata;
    // A reply to a reply would cause an endless loop.
    if request.message_type != MessageType::Query {
        return Verdict::Ignore;
    }
    if request.op_code != OpCode::Query {
        return reply(&request, None, ResponseCode::NotImp, Vec::new(), None);
    }
    let query = (header.counts.queries == 1).then(|| Query::read(&mut decoder).ok());
    let bytes = packet.get(HEADER..decoder.index()).unwrap_or_default();
    let Some(query) = query.flatten().filter(|query| is_whole(&query.name, bytes)) else {
        return reply(&request, None, ResponseCode::FormErr, Vec::new(), None);
    };
    if query.query_class == DNSClass::IN {
        let name = query.name.to_lowercase();
        if let Some(zone) = zone(table).filter(|zone| zone.zone_of(&name)) {
            let (code, answers) = forward_lookup(table, &zone, &name, query.query_type);
            return reply(&request, Some(query), code, answers, Some(&zone));
        }
        if let Some(address) = reverse(&name).filter(|address| is_own(table, *address)) {
            let (code, answers) = reverse_lookup(table, &name, address, query.query_type);
            return reply(&request, Some(query), code, answers, zone(table).as_ref());
        }
    }
    if table.forward.is_empty() {
        return reply(&request, Some(query), ResponseCode::Refused, Vec::new(), None);
    }
    Verdict::Forward(Question {
        id: request.id,
        bytes: bytes.to_vec(),
    })
}

/// Whether a question has its name without pointers (RFC 1035, 4.1.4). A pointer could only lead to
/// the header. The forwarder changes the number in the header, so the name would change too.
fn is_whole(name: &Name, question: &[u8]) -> bool {
    let labels = if name.is_root() { 0 } else { name.len() };
    question.len() == labels + 1 + KIND
}

/// Whether a packet is the reply to a question with the number `id`.
pub fn is_reply(packet: &[u8], id: u16, question: &[u8]) -> bool {
    let mut decoder = BinDecoder::new(packet);
    let header = Header::read(&mut decoder);
    let answers = |header: &Header| {
        header.metadata.message_type == MessageType::Response
            && header.metadata.id == id
            && header.counts.queries == 1
    };
    let Some(repeated) = packet.get(HEADER..HEADER.saturating_add(question.len())) else {
        return false;
    };
    let name = question.len().saturating_sub(KIND);
    let ((name, kind), (asked, wanted)) = (repeated.split_at(name), question.split_at(name));
    // Servers may write the name in other cases.
    header.is_ok_and(|header| answers(&header)) && name.eq_ignore_ascii_case(asked) && kind == wanted
}

/// `<network>.internal.`
fn zone(table: &Table) -> Option<Name> {
    Name::from_ascii(format!("{}.internal.", table.network)).ok()
}

/// The address in a name such as `9.0.80.10.in-addr.arpa.` (RFC 1035, 3.5), or one of 32 hexadecimal digits below `ip6.arpa.` (RFC
/// 3596, 2.5).
fn reverse(name: &Name) -> Option<IpAddr> {
    let text = name.to_ascii();
    if let Some(digits) = text.strip_suffix(".ip6.arpa.") {
        let mut bits = 0_u128;
        let mut count = 0;
        for digit in digits.split('.').rev() {
            if digit.len() != 1 {
                return None;
            }
            bits = bits << 4 | u128::from_str_radix(digit, 16).ok()?;
            count += 1;
        }
        return (count == 32).then(|| Ipv6Addr::from(bits).into());
    }
    let digits: Ipv4Addr = text.strip_suffix(".in-addr.arpa.")?.parse().ok()?;
    let [a, b, c, d] = digits.octets();
    Some(Ipv4Addr::new(d, c, b, a).into())
}

/// Whether an address is of the network.
fn is_own(table: &Table, address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::from(table.mask);
            u32::from(address) & mask == u32::from(table.gateway) & mask
        }
        IpAddr::V6(address) => table
            .ipv6
            .as_ref()
            .is_some_and(|ipv6| ipv6.prefix.octets().get(..8) == address.octets().get(..8)),
    }
}

fn forward_lookup(table: &Table, zone: &Name, name: &Name, kind: RecordType) -> (ResponseCode, Vec<Record>) {
    if name == zone {
        return (ResponseCode::NoError, Vec::new());
    }
    let host = (name.num_labels() == zone.num_labels().saturating_add(1))
        .then(|| name.iter().next())
        .flatten();
    let named = table
        .hosts
        .values()
        .filter(|found| Some(found.name.as_bytes()) == host);
    let named: Vec<_> = named.collect();
    if named.is_empty() {
        return (ResponseCode::NXDomain, Vec::new());
    }
    let wants = |record| kind == record || kind == RecordType::ANY;
    let v4 = named.iter().filter(|_| wants(RecordType::A));
    let v6 = named.iter().filter(|_| wants(RecordType::AAAA));
    let data = v4
        .map(|found| RData::A(found.address.into()))
        .chain(v6.filter_map(|found| Some(RData::AAAA(found.address6?.into()))));
    let records = data.map(|data| Record::from_rdata(name.clone(), TTL, data));
    // More than that don't fit.
    (ResponseCode::NoError, records.take(MAX_ANSWER / RECORD).collect())
}

fn reverse_lookup(
    table: &Table,
    name: &Name,
    address: IpAddr,
    kind: RecordType,
) -> (ResponseCode, Vec<Record>) {
    let has = |host: &&super::Host| match address {
        IpAddr::V4(address) => host.address == address,
        IpAddr::V6(address) => host.address6 == Some(address),
    };
    let Some(host) = table.hosts.values().find(has) else {
        return (ResponseCode::NXDomain, Vec::new());
    };
    let target = Name::from_ascii(format!("{}.{}.internal.", host.name, table.network));
    let target = target
        .ok()
        .filter(|_| matches!(kind, RecordType::PTR | RecordType::ANY));
    let record = target.map(|target| Record::from_rdata(name.clone(), TTL, RData::PTR(PTR(target))));
    (ResponseCode::NoError, record.into_iter().collect())
}

fn reply(
    request: &Metadata,
    query: Option<Query>,
    code: ResponseCode,
    answers: Vec<Record>,
    zone: Option<&Name>,
) -> Verdict {
    let mut message = Message::response(request.id, request.op_code);
    message.metadata = Metadata::response_from_request(request);
    message.metadata.recursion_available = true;
    message.metadata.authoritative = zone.is_some();
    message.metadata.response_code = code;
    // How long a resolver may believe that there is nothing (RFC 2308, 3).
    if let Some(zone) = zone.filter(|_| answers.is_empty()) {
        let soa = SOA::new(zone.clone(), zone.clone(), 1, 3600, 600, 86400, TTL);
        message.add_authority(Record::from_rdata(zone.clone(), TTL, RData::SOA(soa)));
    }
    message.queries.extend(query);
    message.answers = answers;
    loop {
        match message.to_vec() {
            Ok(reply) if reply.len() <= MAX_ANSWER => return Verdict::Answer(reply),
            // A VM with dozens of NICs has too many addresses. The helper does not serve TCP, so a
            // truncated answer would be useless. Any subset of the addresses is valid.
            Ok(_) if message.answers.pop().is_some() => {}
            _ => return Verdict::Ignore,
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::{super::dhcp::tests::table, *};

    /// A query as a client sends it.
    pub fn query(name: &str, kind: RecordType) -> Vec<u8> {
        let mut message = Message::new(7, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        message.to_vec().unwrap()
    }

    fn answered(name: &str, kind: RecordType) -> Message {
        match decide(&table(), &query(name, kind)) {
            Verdict::Answer(reply) => Message::from_vec(&reply).unwrap(),
            other => panic!("{name}: {other:?}"),
        }
    }

    fn data(message: &Message) -> Vec<String> {
        message
            .answers
            .iter()
            .map(|record| record.data.to_string())
            .collect()
    }

    #[test]
    fn a_vm_is_known_by_its_name_in_its_network() {
        for name in ["web.lan.internal.", "WEB.Lan.Internal."] {
            let reply = answered(name, RecordType::A);
            assert_eq!(data(&reply), ["10.80.0.2"]);
            assert_eq!((reply.metadata.id, reply.metadata.authoritative), (7, true));
            assert_eq!(
                reply.queries[0].name.to_ascii(),
                name,
                "the question is repeated as it came"
            );
        }
    }

    #[test]
    fn an_address_has_the_name_of_its_vm() {
        let reply = answered("2.0.80.10.in-addr.arpa.", RecordType::PTR);
        assert_eq!(data(&reply), ["web.lan.internal."]);
        let six = "1.0.0.0.0.0.e.f.f.f.0.0.4.5.0.5.0.0.0.0.0.0.0.0.0.8.0.0.0.0.d.f.ip6.arpa.";
        assert_eq!(data(&answered(six, RecordType::PTR)), ["web.lan.internal."]);
        let reply = answered(&six.replacen('1', "2", 1), RecordType::PTR);
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
        let reply = answered("9.0.80.10.in-addr.arpa.", RecordType::PTR);
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
    }

    #[test]
    fn a_name_without_addresses_of_that_kind_is_there_and_an_unknown_one_is_not() {
        let reply = answered("web.lan.internal.", RecordType::AAAA);
        assert_eq!(data(&reply), ["fd00:80::5054:ff:fe00:1"]);
        let reply = answered("web.lan.internal.", RecordType::MX);
        assert_eq!(
            (reply.metadata.response_code, data(&reply)),
            (ResponseCode::NoError, Vec::new())
        );
        for name in ["db.lan.internal.", "a.web.lan.internal."] {
            let reply = answered(name, RecordType::A);
            assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
            assert_eq!(reply.authorities[0].record_type(), RecordType::SOA);
        }
    }

    #[test]
    fn other_names_are_forwarded_where_there_is_somebody_to_ask() {
        let packet = query("example.com.", RecordType::AAAA);
        let Verdict::Forward(question) = decide(&table(), &packet) else {
            panic!("not forwarded");
        };
        assert_eq!((question.id, &question.bytes[..]), (7, &packet[HEADER..]));
        // The names of other networks are not known here.
        assert!(matches!(
            decide(&table(), &query("web.other.internal.", RecordType::A)),
            Verdict::Forward(_)
        ));
        let isolated = Table {
            forward: Vec::new(),
            ..table()
        };
        let Verdict::Answer(reply) = decide(&isolated, &packet) else {
            panic!("no answer");
        };
        let reply = Message::from_vec(&reply).unwrap();
        assert_eq!(reply.metadata.response_code, ResponseCode::Refused);
    }

    #[test]
    fn what_is_no_query_is_not_answered_or_told_so() {
        let mut packet = query("web.lan.internal.", RecordType::A);
        packet[2] |= 0x80;
        assert_eq!(decide(&table(), &packet), Verdict::Ignore, "a reply");
        let mut packet = query("web.lan.internal.", RecordType::A);
        packet[5] = 2;
        let Verdict::Answer(reply) = decide(&table(), &packet) else {
            panic!("two questions");
        };
        let reply = Message::from_vec(&reply).unwrap();
        assert_eq!(reply.metadata.response_code, ResponseCode::FormErr);
        assert_eq!(decide(&table(), &[0; 5]), Verdict::Ignore);
    }

    #[test]
    fn a_question_whose_name_leads_into_the_header_is_none() {
        // The number of the query is the name: a label of no bytes.
        let packet = [0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 0, 0, 1, 0, 1];
        let Verdict::Answer(reply) = decide(&table(), &packet) else {
            panic!("forwarded");
        };
        let reply = Message::from_vec(&reply).unwrap();
        assert_eq!(reply.metadata.response_code, ResponseCode::FormErr);
    }

    #[test]
    fn a_query_may_have_more_than_a_question_but_not_too_much() {
        let mut packet = query("example.com.", RecordType::A);
        packet.resize(MAX_QUERY, 0);
        assert!(matches!(decide(&table(), &packet), Verdict::Forward(_)));
        packet.push(0);
        assert_eq!(decide(&table(), &packet), Verdict::Ignore);
    }

    #[test]
    fn a_vm_with_many_nics_is_answered_with_as_many_addresses_as_fit() {
        let mut table = table();
        for number in 2..64 {
            let host = super::super::Host {
                address: [10, 80, 0, number].into(),
                address6: Some(Ipv6Addr::from(u128::from(number))),
                name: "web".into(),
            };
            table.hosts.insert(format!("52:54:00:00:01:{number:02x}"), host);
        }
        for kind in [RecordType::A, RecordType::AAAA, RecordType::ANY] {
            let Verdict::Answer(reply) = decide(&table, &query("web.lan.internal.", kind)) else {
                panic!("{kind}: no answer");
            };
            let message = Message::from_vec(&reply).unwrap();
            assert!(
                !message.answers.is_empty() && !message.metadata.truncation,
                "{kind}"
            );
            assert!(
                reply.len() <= MAX_ANSWER && reply.len() > MAX_ANSWER - 28,
                "{kind}"
            );
        }
    }

    #[test]
    fn a_reply_is_one_to_the_same_question() {
        let packet = query("Example.com.", RecordType::A);
        let mut reply = query("example.com.", RecordType::A);
        let question = &packet[HEADER..];
        assert!(!is_reply(&reply, 7, question), "a query");
        reply[2] |= 0x80;
        assert!(is_reply(&reply, 7, question));
        assert!(!is_reply(&reply, 8, question));
        let mut other = query("example.org.", RecordType::A);
        other[2] |= 0x80;
        assert!(!is_reply(&other, 7, question));
        assert!(!is_reply(&reply[..14], 7, question));
        // 65 and 97 are letters only in a name.
        let asked = query("example.com.", RecordType::HTTPS);
        let mut other = query("example.com.", RecordType::Unknown(97));
        other[2] |= 0x80;
        assert!(!is_reply(&other, 7, &asked[HEADER..]));
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { cases: 5000, ..Default::default() })]

        #[test]
        fn no_packet_does_harm(packet in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            decide(&table(), &packet);
            is_reply(&packet, 7, &packet);
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { cases: 500, ..Default::default() })]

        /// Behind a header that is right; names with lengths and pointers of all kinds.
        #[test]
        fn no_question_does_harm(question in proptest::collection::vec(
            proptest::prop_oneof![proptest::prelude::any::<u8>(), 0_u8..8, 0xc0_u8..=0xff], 0..300,
        )) {
            let mut packet = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
            packet.extend(question);
            decide(&table(), &packet);
        }
    }
}
