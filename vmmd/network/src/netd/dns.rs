//! Response to a guest's DNS query (RFC 1035): a pure function of the table.
//!
//! The helper is the authority for the domains of a network with names, for its addresses, and for the
//! names of its records. It answers for special-use names itself ([`special`]). It forwards all other names
//! ([`super::forward`], [`super::streams`]), unless the network is isolated.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hickory_proto::{
    op::{Edns, Header, Message, MessageType, Metadata, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, Name, RData, Record, RecordType,
        rdata::{PTR, SOA},
    },
    serialize::binary::{BinDecodable as _, BinDecoder},
};

use super::{Table, special};

/// Lifetime of an answer in a resolver, in seconds. A recreated VM is soon reachable at its new
/// address.
const TTL: u32 = 30;
/// Bytes of a message before its question (RFC 1035, 4.1.1).
const HEADER: usize = 12;
/// Largest query in bytes; a forwarded query is stored until its answer. Resolvers add some hundred
/// bytes to a question at most, and 4,096 is the largest message that they use UDP for (RFC 6891,
/// 6.2.5).
pub const MAX_QUERY: usize = 4096;
/// Largest answer by UDP in bytes to a client without EDNS (RFC 1035, 4.2.1).
pub const MAX_ANSWER: usize = 512;
/// Largest answer by UDP in bytes about the network's own names: no link fragments it (RFC 9715, 3.1, R5).
pub const MAX_EDNS: u16 = 1232;
/// Largest message by TCP in bytes (RFC 1035, 4.2.2).
pub const MAX_STREAM: usize = 65_535;
/// Most records of an answer: a VM has fewer NICs.
const MAX_RECORDS: usize = 256;
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
    /// Largest reply that the client takes, in bytes.
    pub limit: usize,
}

/// Way of a query, and of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Answers are at most as long as the client says, and are truncated.
    Udp,
    Tcp,
}

/// Parts of a query that its answer depends on.
struct Request {
    metadata: Metadata,
    edns: Option<Edns>,
    way: Way,
}

impl Request {
    /// The largest packet that the client takes, in bytes.
    fn takes(&self) -> usize {
        match (self.way, &self.edns) {
            (Way::Tcp, _) => MAX_STREAM,
            (Way::Udp, None) => MAX_ANSWER,
            (Way::Udp, Some(edns)) => usize::from(edns.max_payload()).max(MAX_ANSWER),
        }
    }
}

/// Decides what becomes of a packet from a guest.
///
/// The header and the question are decoded first. Only the record of EDNS (RFC 6891) matters beside them.
pub fn decide(table: &Table, packet: &[u8], way: Way) -> Verdict {
    if packet.len() > MAX_QUERY {
        return Verdict::Ignore;
    }
    let mut decoder = BinDecoder::new(packet);
    let Ok(header) = Header::read(&mut decoder) else {
        return Verdict::Ignore;
    };
    // A reply to a reply would cause an endless loop.
    if header.metadata.message_type != MessageType::Query {
        return Verdict::Ignore;
    }
    let has_more = header.counts.additionals > 0;
    let edns = || Message::from_vec(packet).ok()?.edns;
    let request = Request {
        metadata: header.metadata,
        edns: has_more.then(edns).flatten(),
        way,
    };
    let refuse = |query, code| reply(&request, query, code, Vec::new(), None);
    if request.metadata.op_code != OpCode::Query {
        return refuse(None, ResponseCode::NotImp);
    }
    let query = (header.counts.queries == 1).then(|| Query::read(&mut decoder).ok());
    let bytes = packet.get(HEADER..decoder.index()).unwrap_or_default();
    let Some(query) = query.flatten().filter(|query| is_whole(&query.name, bytes)) else {
        return refuse(None, ResponseCode::FormErr);
    };
    // RFC 6891, 6.1.3.
    if request.edns.as_ref().is_some_and(|edns| edns.version() != 0) {
        return refuse(Some(query), ResponseCode::BADVERS);
    }
    if query.query_class == DNSClass::IN
        && let Some((code, answers, zone)) = own(table, &query)
    {
        return reply(&request, Some(query), code, answers, Some(&zone));
    }
    if table.forward.is_empty() {
        return refuse(Some(query), ResponseCode::Refused);
    }
    Verdict::Forward(Question {
        id: request.metadata.id,
        bytes: bytes.to_vec(),
        limit: request.takes(),
    })
}

/// The answer that the helper has itself, with the zone that it is of.
fn own(table: &Table, query: &Query) -> Option<(ResponseCode, Vec<Record>, Name)> {
    let name = query.name.to_lowercase();
    if let Some(addresses) = table.records.get(name.to_ascii().trim_end_matches('.')) {
        let answers = answers(&name, query.query_type, addresses.iter().copied());
        return Some((ResponseCode::NoError, answers, name));
    }
    let zones = || {
        table
            .zones()
            .filter_map(|zone| Name::from_ascii(format!("{zone}.")).ok())
    };
    if let Some(zone) = zones().find(|zone| zone.zone_of(&name)) {
        let (code, answers) = forward_lookup(table, &zone, &name, query.query_type);
        return Some((code, answers, zone));
    }
    if let Some(address) = reverse(&name)
        && let Some(zone) = zones().next()
    {
        let target = name_of(table, &zone, address);
        if target.is_some() || is_own(table, address) {
            let (code, answers) = reverse_lookup(&name, target, query.query_type);
            return Some((code, answers, zone));
        }
    }
    match special::find(&name, table.site)? {
        special::Special::Loopback(zone) => {
            let data = match query.query_type {
                RecordType::A => Some(RData::A(Ipv4Addr::LOCALHOST.into())),
                RecordType::AAAA => Some(RData::AAAA(Ipv6Addr::LOCALHOST.into())),
                _ => None,
            };
            let record = data.map(|data| Record::from_rdata(name, TTL, data));
            Some((ResponseCode::NoError, record.into_iter().collect(), zone))
        }
        special::Special::Nothing(zone) => Some((ResponseCode::NXDomain, Vec::new(), zone)),
    }
}

/// A reply without records to a client's question.
pub fn bare(query: &[u8], question: &Question, code: ResponseCode, truncated: bool) -> Vec<u8> {
    // Only "recursion desired" is repeated (RFC 1035, 4.1.1).
    let desired = query.get(2).copied().unwrap_or_default() & 1;
    let mut packet = question.id.to_be_bytes().to_vec();
    packet.extend([0x80 | u8::from(truncated) << 1 | desired, 0x80 | code.low()]);
    packet.extend([0, 1, 0, 0, 0, 0, 0, 0]);
    packet.extend(&question.bytes);
    packet
}

/// Whether another server may have a better answer than this reply.
pub fn is_failure(packet: &[u8]) -> bool {
    let code = packet.get(3).map(|flags| flags & 0xf);
    [ResponseCode::ServFail, ResponseCode::Refused]
        .iter()
        .any(|failure| Some(failure.low()) == code)
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
        IpAddr::V4(address) => table
            .ipv4
            .as_ref()
            .is_some_and(|ipv4| address & ipv4.mask == ipv4.gateway & ipv4.mask),
        IpAddr::V6(address) => table.ipv6.as_ref().is_some_and(|ipv6| ipv6.has(address)),
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
    let v4 = named.iter().filter_map(|found| Some(found.address?.into()));
    let v6 = named.iter().filter_map(|found| Some(found.address6?.into()));
    (ResponseCode::NoError, answers(name, kind, v4.chain(v6)))
}

/// Records of a name with these addresses, as far as the client asks for them.
fn answers(name: &Name, kind: RecordType, addresses: impl Iterator<Item = IpAddr>) -> Vec<Record> {
    let wants = |record| kind == record || kind == RecordType::ANY;
    let data = addresses.filter_map(|address| match address {
        IpAddr::V4(address) => wants(RecordType::A).then(|| RData::A(address.into())),
        IpAddr::V6(address) => wants(RecordType::AAAA).then(|| RData::AAAA(address.into())),
    });
    let records = data.map(|data| Record::from_rdata(name.clone(), TTL, data));
    records.take(MAX_RECORDS).collect()
}

/// The name of an address: that of a VM, or of a record.
fn name_of(table: &Table, zone: &Name, address: IpAddr) -> Option<Name> {
    let has = |host: &&super::Host| match address {
        IpAddr::V4(address) => host.address == Some(address),
        IpAddr::V6(address) => host.address6 == Some(address),
    };
    let name = match table.hosts.values().find(has) {
        Some(host) => format!("{}.{zone}", host.name),
        None => {
            let mut records = table.records.iter();
            let (name, _) = records.find(|(_, addresses)| addresses.contains(&address))?;
            format!("{name}.")
        }
    };
    Name::from_ascii(name).ok()
}

fn reverse_lookup(name: &Name, target: Option<Name>, kind: RecordType) -> (ResponseCode, Vec<Record>) {
    let Some(target) = target else {
        return (ResponseCode::NXDomain, Vec::new());
    };
    let target = Some(target).filter(|_| matches!(kind, RecordType::PTR | RecordType::ANY));
    let record = target.map(|target| Record::from_rdata(name.clone(), TTL, RData::PTR(PTR(target))));
    (ResponseCode::NoError, record.into_iter().collect())
}

fn reply(
    request: &Request,
    query: Option<Query>,
    code: ResponseCode,
    answers: Vec<Record>,
    zone: Option<&Name>,
) -> Verdict {
    let mut message = Message::response(request.metadata.id, request.metadata.op_code);
    message.metadata = Metadata::response_from_request(&request.metadata);
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
    let mut limit = request.takes();
    // An answer to a client with EDNS has EDNS (RFC 6891, 6.1.1).
    if let Some(asked) = &request.edns {
        let mut edns = Edns::new();
        edns.set_max_payload(MAX_EDNS);
        edns.set_dnssec_ok(asked.flags().dnssec_ok);
        message.set_edns(edns);
    }
    if request.way == Way::Udp {
        limit = limit.min(MAX_EDNS.into());
    }
    loop {
        match message.to_vec() {
            Ok(reply) if reply.len() <= limit => return Verdict::Answer(reply),
            // A VM with dozens of NICs has many addresses. The client gets all by TCP (RFC 7766, 5).
            Ok(_) if message.answers.pop().is_some() => message.metadata.truncation = true,
            _ => return Verdict::Ignore,
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeMap;

    pub use super::super::dhcp::tests::table;
    use super::*;

    /// A query as a client sends it.
    pub fn query(name: &str, kind: RecordType) -> Vec<u8> {
        let mut message = Message::new(7, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        message.to_vec().unwrap()
    }

    fn answered(name: &str, kind: RecordType) -> Message {
        match decide(&table(), &query(name, kind), Way::Udp) {
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
    fn network_with_a_domain_has_names_there_and_records() {
        let table = Table {
            domain: "lab.example".into(),
            forward: Vec::new(),
            records: BTreeMap::from([
                (
                    "db.lab.example".to_owned(),
                    vec![[192, 0, 2, 9].into(), [192, 0, 2, 10].into()],
                ),
                ("registry.test".to_owned(), vec!["2001:db8::9".parse().unwrap()]),
                ("web.lab.example".to_owned(), vec![[192, 0, 2, 11].into()]),
            ]),
            ..table()
        };
        let ask = |name: &str, kind| {
            let (_, message) = reply_to(&table, &query(name, kind), Way::Udp);
            (message.metadata.response_code, data(&message))
        };
        let found = |texts: &[&str]| {
            (
                ResponseCode::NoError,
                texts.iter().map(|text| (*text).to_owned()).collect(),
            )
        };
        for (name, kind, expected) in [
            (
                "DB.lab.example.",
                RecordType::A,
                found(&["192.0.2.9", "192.0.2.10"]),
            ),
            ("db.lab.example.", RecordType::AAAA, found(&[])),
            ("registry.test.", RecordType::AAAA, found(&["2001:db8::9"])),
            // A record precedes a VM, which has its name in the other domain still.
            ("web.lab.example.", RecordType::A, found(&["192.0.2.11"])),
            ("web.lan.internal.", RecordType::A, found(&["10.80.0.2"])),
            (
                "2.0.80.10.in-addr.arpa.",
                RecordType::PTR,
                found(&["web.lab.example."]),
            ),
            (
                "9.2.0.192.in-addr.arpa.",
                RecordType::PTR,
                found(&["db.lab.example."]),
            ),
        ] {
            assert_eq!(ask(name, kind), expected, "{name}");
        }
        for (name, code) in [
            ("other.lab.example.", ResponseCode::NXDomain),
            ("other.example.", ResponseCode::Refused),
        ] {
            assert_eq!(ask(name, RecordType::A), (code, Vec::new()), "{name}");
        }
        assert_eq!(table.domains(), ["lab.example"]);
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
        let Verdict::Forward(question) = decide(&table(), &packet, Way::Udp) else {
            panic!("not forwarded");
        };
        assert_eq!((question.id, &question.bytes[..]), (7, &packet[HEADER..]));
        let isolated = Table {
            forward: Vec::new(),
            ..table()
        };
        let Verdict::Answer(reply) = decide(&isolated, &packet, Way::Udp) else {
            panic!("no answer");
        };
        let reply = Message::from_vec(&reply).unwrap();
        assert_eq!(reply.metadata.response_code, ResponseCode::Refused);
    }

    #[test]
    fn what_is_no_query_is_not_answered_or_told_so() {
        let mut packet = query("web.lan.internal.", RecordType::A);
        packet[2] |= 0x80;
        assert_eq!(decide(&table(), &packet, Way::Udp), Verdict::Ignore, "a reply");
        let mut packet = query("web.lan.internal.", RecordType::A);
        packet[5] = 2;
        let Verdict::Answer(reply) = decide(&table(), &packet, Way::Udp) else {
            panic!("two questions");
        };
        let reply = Message::from_vec(&reply).unwrap();
        assert_eq!(reply.metadata.response_code, ResponseCode::FormErr);
        assert_eq!(decide(&table(), &[0; 5], Way::Udp), Verdict::Ignore);
    }

    #[test]
    fn a_question_whose_name_leads_into_the_header_is_none() {
        // The number of the query is the name: a label of no bytes.
        let packet = [0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 0, 0, 1, 0, 1];
        let Verdict::Answer(reply) = decide(&table(), &packet, Way::Udp) else {
            panic!("forwarded");
        };
        let reply = Message::from_vec(&reply).unwrap();
        assert_eq!(reply.metadata.response_code, ResponseCode::FormErr);
    }

    #[test]
    fn a_query_may_have_more_than_a_question_but_not_too_much() {
        let mut packet = query("example.com.", RecordType::A);
        packet.resize(MAX_QUERY, 0);
        assert!(matches!(decide(&table(), &packet, Way::Udp), Verdict::Forward(_)));
        packet.push(0);
        assert_eq!(decide(&table(), &packet, Way::Udp), Verdict::Ignore);
    }

    /// The same query with a record of EDNS: the largest answer by UDP, and the version.
    fn with_edns(query: &[u8], payload: u16, version: u8) -> Vec<u8> {
        let mut message = Message::from_vec(query).unwrap();
        let mut edns = Edns::new();
        edns.set_max_payload(payload).set_version(version);
        message.set_edns(edns);
        message.to_vec().unwrap()
    }

    fn reply_to(table: &Table, packet: &[u8], way: Way) -> (usize, Message) {
        let Verdict::Answer(reply) = decide(table, packet, way) else {
            panic!("no answer");
        };
        (reply.len(), Message::from_vec(&reply).unwrap())
    }

    #[test]
    fn long_answer_is_truncated_by_udp_and_whole_by_tcp() {
        let mut table = table();
        for number in 2..64 {
            let host = super::super::Host {
                address: Some([10, 80, 0, number].into()),
                address6: Some(Ipv6Addr::from(u128::from(number))),
                name: "web".into(),
                primary: true,
                metadata: None,
            };
            table.hosts.insert(format!("52:54:00:00:01:{number:02x}"), host);
        }
        for (kind, all) in [
            (RecordType::A, 63),
            (RecordType::AAAA, 63),
            (RecordType::ANY, 126),
        ] {
            let packet = query("web.lan.internal.", kind);
            for (packet, limit) in [
                (packet.clone(), MAX_ANSWER),
                (with_edns(&packet, 700, 0), 700),
                (with_edns(&packet, 4096, 0), 1232),
                (with_edns(&packet, 0, 0), MAX_ANSWER),
            ] {
                let (length, message) = reply_to(&table, &packet, Way::Udp);
                let is_whole = message.answers.len() == all;
                assert_eq!(message.metadata.truncation, !is_whole, "{kind} {limit}");
                assert!(
                    length <= limit && (is_whole || length > limit - 28),
                    "{kind} {limit}"
                );
            }
            let (_, message) = reply_to(&table, &packet, Way::Tcp);
            assert_eq!((message.answers.len(), message.metadata.truncation), (all, false));
        }
    }

    #[test]
    fn client_with_edns_has_edns_in_its_answer() {
        let packet = query("web.lan.internal.", RecordType::A);
        assert!(reply_to(&table(), &packet, Way::Udp).1.edns.is_none());
        let (_, message) = reply_to(&table(), &with_edns(&packet, 4096, 0), Way::Udp);
        let edns = message.edns.unwrap();
        assert_eq!((edns.max_payload(), edns.version()), (1232, 0));
        let (_, message) = reply_to(&table(), &with_edns(&packet, 4096, 1), Way::Udp);
        assert_eq!(message.metadata.response_code.low(), 0);
        assert_eq!(
            (message.edns.unwrap().rcode_high(), message.answers.len()),
            (1, 0)
        );
        let forwarded = query("example.com.", RecordType::A);
        for (packet, limit) in [(forwarded.clone(), 512), (with_edns(&forwarded, 4096, 0), 4096)] {
            let Verdict::Forward(question) = decide(&table(), &packet, Way::Udp) else {
                panic!("not forwarded");
            };
            assert_eq!(question.limit, limit);
        }
    }

    #[test]
    fn special_names_are_not_forwarded() {
        for (name, kind, expected) in [
            ("localhost.", RecordType::A, vec!["127.0.0.1"]),
            ("a.LOCALHOST.", RecordType::AAAA, vec!["::1"]),
            ("localhost.", RecordType::MX, vec![]),
        ] {
            let reply = answered(name, kind);
            assert_eq!(data(&reply), expected, "{name}");
            assert_eq!(reply.metadata.response_code, ResponseCode::NoError);
        }
        for name in ["printer.local.", "1.2.0.192.in-addr.arpa.", "web.other.internal."] {
            let reply = answered(name, RecordType::A);
            assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain, "{name}");
            assert_eq!(reply.authorities[0].record_type(), RecordType::SOA);
            let site = Table {
                site: true,
                ..table()
            };
            let verdict = decide(&site, &query(name, RecordType::A), Way::Udp);
            assert!(matches!(verdict, Verdict::Forward(_)), "{name}");
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
            decide(&table(), &packet, Way::Udp);
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
            decide(&table(), &packet, Way::Udp);
        }
    }
}
