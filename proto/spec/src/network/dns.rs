//! Names of a network: its domain, and records of names.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use vmmd_api::v1;

use crate::{Violations, name::Name};

/// Longest domain in bytes: an answer of DHCP has to have room for it.
pub const MAX_DOMAIN: usize = 100;
/// Most records of a network, and most addresses of a record.
pub const MAX_RECORDS: usize = 256;
/// See [`MAX_RECORDS`].
pub const MAX_ADDRESSES: usize = 16;
/// Longest name in bytes, without a dot at its end (RFC 1035, 2.3.4).
const MAX_NAME: usize = 253;
/// Zones with names of a fixed meaning (RFC 6761, 6.3, 6.4; RFC 7686).
const SPECIAL: [&str; 3] = ["localhost", "invalid", "onion"];

/// Validates a domain; `field` is its path.
pub(super) fn domain(found: &mut Violations, field: &str, domain: &str) -> Option<String> {
    if domain.is_empty() {
        return None;
    }
    if domain.len() > MAX_DOMAIN || !is_name(domain) {
        let wrong = format_args!(
            "must be a domain of at most {MAX_DOMAIN} bytes in lower case, such as lan.example.com"
        );
        found.add(field, wrong);
        return None;
    }
    let last = domain.rsplit('.').next().unwrap_or_default();
    if SPECIAL.contains(&last) || domain == "internal" {
        found.add(
            field,
            format_args!("must not be \"{domain}\": choose a domain of your own"),
        );
        return None;
    }
    Some(domain.to_owned())
}

/// Validates records; `field` is their path. The addresses by name, as in the request.
pub(super) fn records(
    found: &mut Violations,
    field: &str,
    wire: &[v1::DnsRecord],
) -> BTreeMap<String, Vec<IpAddr>> {
    let mut records = BTreeMap::new();
    if wire.len() > MAX_RECORDS {
        found.add(
            field,
            format_args!("at most {MAX_RECORDS} records, are {}", wire.len()),
        );
        return records;
    }
    for (index, record) in wire.iter().enumerate() {
        let at = format!("{field}[{index}]");
        if record.name.len() > MAX_NAME || !is_name(&record.name) {
            let wrong = "must be a host name in lower case, such as db or db.example.com";
            found.add(format_args!("{at}.name"), wrong);
        }
        let number = record.addresses.len();
        if !(1..=MAX_ADDRESSES).contains(&number) {
            let wrong = format_args!("must be 1 to {MAX_ADDRESSES} addresses, are {number}");
            found.add(format_args!("{at}.addresses"), wrong);
            continue;
        }
        let mut addresses = BTreeSet::new();
        for (index, text) in record.addresses.iter().enumerate() {
            match text.parse::<IpAddr>() {
                Ok(address) => drop(addresses.insert(address)),
                Err(_) => found.add(format_args!("{at}.addresses[{index}]"), "must be an IP address"),
            }
        }
        let addresses: Vec<_> = addresses.into_iter().collect();
        if records.insert(record.name.clone(), addresses).is_some() {
            let wrong = format_args!(
                "\"{}\" is given twice: give all addresses in one record",
                record.name
            );
            found.add(format_args!("{at}.name"), wrong);
        }
    }
    records
}

/// Whether a text is labels of host names with dots between.
fn is_name(text: &str) -> bool {
    text.split('.').all(|label| Name::try_from(label).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domain_is_a_name_of_host_labels() {
        let checked = |text: &str| {
            let mut found = Violations::default();
            (domain(&mut found, "d", text), found.0.is_empty())
        };
        assert_eq!(checked(""), (None, true));
        for good in ["lan", "lan.example.com", "lab.internal"] {
            assert_eq!(checked(good), (Some(good.to_owned()), true));
        }
        let long = vec!["a".repeat(50); 2].join(".");
        for bad in [
            "LAN",
            "lan.",
            ".lan",
            "a b",
            "internal",
            "a.localhost",
            "onion",
            &long,
        ] {
            assert_eq!(checked(bad), (None, false), "{bad}");
        }
    }

    #[test]
    fn records_have_a_name_and_some_addresses() {
        let record = |name: &str, addresses: &[&str]| v1::DnsRecord {
            name: name.into(),
            addresses: addresses.iter().map(|address| (*address).to_owned()).collect(),
        };
        let mut found = Violations::default();
        let valid = records(
            &mut found,
            "r",
            &[
                record("db", &["10.80.0.9", "fd00::9"]),
                record("a.example", &["192.0.2.1"]),
            ],
        );
        assert_eq!((valid.len(), found.0.is_empty()), (2, true));
        assert_eq!(valid["db"].len(), 2);
        for (wire, expected) in [
            (
                vec![record("Db", &["10.0.0.1"])],
                "r[0].name: must be a host name",
            ),
            (vec![record("", &["10.0.0.1"])], "r[0].name: must be a host name"),
            (
                vec![record("*.db", &["10.0.0.1"])],
                "r[0].name: must be a host name",
            ),
            (vec![record("db", &[])], "r[0].addresses: must be 1 to 16"),
            (vec![record("db", &["x"])], "r[0].addresses[0]: must be an IP"),
            (
                vec![record("db", &["10.0.0.1"]), record("db", &["10.0.0.2"])],
                "r[1].name: \"db\" is given twice",
            ),
            (vec![record("db", &["10.0.0.1"]); 257], "at most 256 records"),
        ] {
            let mut found = Violations::default();
            records(&mut found, "r", &wire);
            assert!(found.to_string().contains(expected), "{expected}: {found}");
        }
    }
}
