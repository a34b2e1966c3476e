//! The capability sets of this process, read at once from `/proc/self/status`: a system call for each of the 41 capabilities of
//! the bounding and of the ambient set are most of those of a start.

use anyhow::{Context, Result};
use caps::Capability;

/// One of the five sets (capabilities(7)), a bit for each capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set {
    /// "effective"
    pub name: &'static str,
    /// Bit n is capability n.
    pub bits: u64,
}

const SETS: [(&str, &str); 5] = [
    ("ambient", "CapAmb:"),
    ("bounding", "CapBnd:"),
    ("effective", "CapEff:"),
    ("inheritable", "CapInh:"),
    ("permitted", "CapPrm:"),
];

impl Set {
    /// The capabilities in it that have a name.
    pub fn known(self) -> impl Iterator<Item = Capability> {
        let known = caps::all().into_iter();
        known.filter(move |capability| self.bits & capability.bitmask() != 0)
    }
}

/// All five sets of the calling thread's process.
pub fn held() -> Result<[Set; 5]> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
    read(&status)
}

fn read(status: &str) -> Result<[Set; 5]> {
    let mut sets = SETS.map(|(name, _)| Set { name, bits: 0 });
    for (set, (name, field)) in sets.iter_mut().zip(SETS) {
        let value = status.lines().find_map(|line| line.strip_prefix(field));
        let value = value.with_context(|| format!("/proc/self/status tells no {name} set"))?;
        set.bits = u64::from_str_radix(value.trim(), 16)
            .with_context(|| format!("the {name} set in /proc/self/status"))?;
    }
    Ok(sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_set_is_read_from_its_line_and_a_missing_one_is_an_error() {
        let status = "Name:\tvmm\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000005\nCapEff:\t0000000000000004\n\
                      CapBnd:\t000001ffffffffff\nCapAmb:\t0000000000000001\n";
        let sets = read(status).unwrap();
        let found = sets.map(|set| (set.name, set.bits));
        let expected = [
            ("ambient", 1),
            ("bounding", 0x1ff_ffff_ffff),
            ("effective", 4),
            ("inheritable", 0),
            ("permitted", 5),
        ];
        assert_eq!(found, expected);
        assert!(read("CapInh:\t0\n").is_err());
        assert!(read(&status.replace("0005", "x")).is_err());
    }

    #[test]
    fn the_kernel_tells_the_sets_of_this_process() {
        let [_, bounding, effective, _, permitted] = held().unwrap();
        assert_eq!(effective.bits & !permitted.bits, 0);
        let by_call = caps::read(None, caps::CapSet::Bounding).unwrap();
        assert_eq!(bounding.known().collect::<caps::CapsHashSet>(), by_call);
    }
}
