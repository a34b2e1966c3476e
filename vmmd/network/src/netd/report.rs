//! Reports of a helper to the daemon: lines in a pipe with a name.
//!
//! The helper has the pipe open in both directions, so a report stays there while no daemon runs. A
//! write never waits: with a full pipe the report is lost. The daemon takes a line from a helper as
//! hostile input: it acts only on addresses of its own records.

use std::{fmt, net::IpAddr, os::fd::AsFd, str::FromStr};

use vmmd_spec::nic::Mac;

/// Name of the pipe in the folder of a helper.
pub const PIPE: &str = "reports";
/// Longest line in bytes, with its end: a MAC address and an IPv6 address.
pub const LONGEST: usize = 64;

/// A guest has declined an address, because another host of the network uses it (RFC 2131, 3.1.5; RFC 8415, 18.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Declined {
    /// MAC address of the guest's NIC.
    pub mac: Mac,
    /// The declined address.
    pub address: IpAddr,
}

/// A line is no report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidReport;

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.mac, self.address)
    }
}

impl FromStr for Declined {
    type Err = InvalidReport;

    fn from_str(line: &str) -> Result<Self, InvalidReport> {
        let (mac, address) = line.split_once(' ').ok_or(InvalidReport)?;
        Ok(Self {
            mac: mac.parse().map_err(|_| InvalidReport)?,
            address: address.parse().map_err(|_| InvalidReport)?,
        })
    }
}

/// Writes a report into the pipe.
pub fn send(pipe: impl AsFd, report: &Declined) {
    let _full = rustix::io::write(pipe, format!("{report}\n").as_bytes());
}

/// Takes complete lines out of `text`, the bytes of the pipe. Returns their reports.
pub fn take(text: &mut Vec<u8>) -> Vec<Declined> {
    let end = text
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |end| end + 1);
    let lines: Vec<u8> = text.drain(..end).collect();
    if text.len() > LONGEST {
        text.clear();
    }
    let lines = lines.split(|byte| *byte == b'\n');
    let lines = lines.filter_map(|line| std::str::from_utf8(line).ok()?.parse().ok());
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(address: &str) -> Declined {
        Declined {
            mac: "52:54:00:00:00:01".parse().unwrap(),
            address: address.parse().unwrap(),
        }
    }

    #[test]
    fn reports_are_taken_by_line_and_others_are_left_out() {
        let (v4, v6) = (report("10.80.0.2"), report("fd00:80::5054:ff:fe00:1"));
        let mut text = format!("{v4}\nnonsense\n{v6}\n\u{ff}\n52:54").into_bytes();
        assert!(format!("{v6}\n").len() <= LONGEST);
        assert_eq!(take(&mut text), [v4, v6]);
        assert_eq!(text, b"52:54");
        text.extend(&format!("{v4}\n").as_bytes()[5..]);
        assert_eq!((take(&mut text), text.as_slice()), (vec![v4], &b""[..]));
        text.resize(LONGEST + 1, b'x');
        assert_eq!((take(&mut text), text.as_slice()), (vec![], &b""[..]));
    }
}
