//! Names that no public name server knows (RFC 6761, RFC 6303, RFC 7686, RFC 8375).

use hickory_proto::rr::Name;

/// A special-use name, and the zone that it is of.
#[derive(Debug, PartialEq, Eq)]
pub enum Special {
    /// The host itself (RFC 6761, 6.3).
    Loopback(Name),
    /// The name does not exist.
    Nothing(Name),
}

/// Zones that never exist (RFC 6761, 6.4; RFC 7686, 2).
const NOWHERE: [&str; 2] = ["invalid.", "onion."];
/// Zones of a site, which only the site's own name servers know: RFC 6762, 3; RFC 8375; RFC 6761, 6.2;
/// the private-use zone of ICANN (2024), reverse names (RFC 6303, 4; RFC 7793). [`find`] has the ranges within an octet.
const SITE: [&str; 22] = [
    "local.",
    "home.arpa.",
    "internal.",
    "test.",
    "10.in-addr.arpa.",
    "168.192.in-addr.arpa.",
    "0.in-addr.arpa.",
    "127.in-addr.arpa.",
    "254.169.in-addr.arpa.",
    "2.0.192.in-addr.arpa.",
    "100.51.198.in-addr.arpa.",
    "113.0.203.in-addr.arpa.",
    "255.255.255.255.in-addr.arpa.",
    "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.ip6.arpa.",
    "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.ip6.arpa.",
    "c.f.ip6.arpa.",
    "d.f.ip6.arpa.",
    "8.e.f.ip6.arpa.",
    "9.e.f.ip6.arpa.",
    "a.e.f.ip6.arpa.",
    "b.e.f.ip6.arpa.",
    "8.b.d.0.1.0.0.2.ip6.arpa.",
];

/// Finds the special use of a name in lower case. With `site`, the site's own name servers answer for its zones.
pub fn find(name: &Name, site: bool) -> Option<Special> {
    let text = name.to_ascii();
    let zone = |zone: &str| Name::from_ascii(zone).ok();
    if is_in(&text, "localhost.") {
        return zone("localhost.").map(Special::Loopback);
    }
    let nowhere = NOWHERE.iter().find(|zone| is_in(&text, zone));
    let of_site = || SITE.iter().find(|zone| is_in(&text, zone)).copied();
    let found = nowhere.copied().or_else(|| (!site).then(of_site).flatten());
    if let Some(found) = found {
        return zone(found).map(Special::Nothing);
    }
    let rest = (!site).then(|| text.strip_suffix(".in-addr.arpa.")).flatten()?;
    let mut octets = rest.rsplit('.').map_while(|octet| octet.parse::<u8>().ok());
    let (first, second) = (octets.next()?, octets.next()?);
    // 172.16.0.0/12 (RFC 1918), 100.64.0.0/10 (RFC 6598).
    let is_private = matches!((first, second), (172, 16..=31) | (100, 64..=127));
    let found = is_private.then(|| zone(&format!("{second}.{first}.in-addr.arpa.")));
    found.flatten().map(Special::Nothing)
}

/// Whether a name is that of a zone, or below it.
fn is_in(name: &str, zone: &str) -> bool {
    name.strip_suffix(zone)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(name: &str, site: bool) -> Option<String> {
        match find(&Name::from_ascii(name).unwrap(), site)? {
            Special::Loopback(zone) | Special::Nothing(zone) => Some(zone.to_ascii()),
        }
    }

    #[test]
    fn special_names_are_those_of_the_registries() {
        for (name, expected) in [
            ("localhost.", Some("localhost.")),
            ("a.localhost.", Some("localhost.")),
            ("notlocalhost.", None),
            ("x.onion.", Some("onion.")),
            ("host.local.", Some("local.")),
            ("local.", Some("local.")),
            ("9.0.81.10.in-addr.arpa.", Some("10.in-addr.arpa.")),
            ("1.110.in-addr.arpa.", None),
            ("1.0.16.172.in-addr.arpa.", Some("16.172.in-addr.arpa.")),
            ("31.172.in-addr.arpa.", Some("31.172.in-addr.arpa.")),
            ("1.0.32.172.in-addr.arpa.", None),
            ("1.64.100.in-addr.arpa.", Some("64.100.in-addr.arpa.")),
            ("1.63.100.in-addr.arpa.", None),
            ("1.0.0.0.d.f.ip6.arpa.", Some("d.f.ip6.arpa.")),
            ("8.8.8.8.in-addr.arpa.", None),
            ("www.example.com.", None),
            (".", None),
        ] {
            assert_eq!(zone(name, false).as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn servers_of_a_site_know_its_zones() {
        assert_eq!(zone("host.local.", true), None);
        assert_eq!(zone("1.0.16.172.in-addr.arpa.", true), None);
        assert!(zone("a.invalid.", true).is_some() && zone("localhost.", true).is_some());
    }
}
