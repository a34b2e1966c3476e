//! Memory of a VMM: guest RAM, own memory and shared memory.

use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;

/// Mappings of at least this many KiB are guest RAM: no VMM maps anything else of its size.
const GUEST_RAM_KIB: u64 = 120 << 10;

/// Resident memory of a process in KiB (proc(5), smaps).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Guest RAM that the host has given.
    pub guest_kib: u64,
    /// Guest RAM in huge pages: transparent ones or the host's.
    pub guest_huge_kib: u64,
    /// Beyond guest RAM: pages that this process has written. No file has their content.
    pub written_kib: u64,
    /// Beyond guest RAM: pages of files, mostly the program's text, that no other process has mapped.
    pub unshared_files_kib: u64,
    /// Beyond guest RAM: pages that other processes have too.
    pub shared_kib: u64,
    /// Beyond guest RAM: the proportional set size, in which a page of two processes counts half for each.
    pub pss_kib: u64,
}

/// Reads it.
pub fn of(pid: u32) -> Result<Memory> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).context("read smaps")?;
    Ok(sum(&text))
}

fn sum(smaps: &str) -> Memory {
    let (mut memory, mut size) = (Memory::default(), 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or_default();
        let value: u64 = words.next().and_then(|value| value.parse().ok()).unwrap_or(0);
        if name == "Size:" {
            size = value;
        }
        match (name, size >= GUEST_RAM_KIB) {
            ("Rss:", true) => memory.guest_kib += value,
            ("AnonHugePages:" | "ShmemPmdMapped:", true) => memory.guest_huge_kib += value,
            // The host's huge pages are in no Rss.
            ("Shared_Hugetlb:" | "Private_Hugetlb:", true) => {
                memory.guest_kib += value;
                memory.guest_huge_kib += value;
            }
            ("Private_Dirty:", false) => memory.written_kib += value,
            ("Private_Clean:", false) => memory.unshared_files_kib += value,
            ("Shared_Clean:" | "Shared_Dirty:", false) => memory.shared_kib += value,
            ("Pss:", false) => memory.pss_kib += value,
            _ => {}
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_ram_is_told_from_the_rest_by_its_size() {
        let mapping = |size: u64, more: &str| {
            format!("7f0000000000-7f0000001000 rw-p 00000000 00:00 0\nSize: {size} kB\n{more}")
        };
        let smaps = [
            mapping(
                4412,
                "Rss: 4000 kB\nPss: 2100 kB\nShared_Clean: 3800 kB\nPrivate_Clean: 200 kB\n",
            ),
            mapping(
                256,
                "Rss: 12 kB\nPss: 12 kB\nPrivate_Dirty: 12 kB\nAnonHugePages: 0 kB\n",
            ),
            mapping(
                262_144,
                "Rss: 8192 kB\nPss: 8192 kB\nPrivate_Dirty: 8192 kB\nAnonHugePages: 4096 kB\n",
            ),
            mapping(
                524_288,
                "Rss: 0 kB\nShared_Hugetlb: 0 kB\nPrivate_Hugetlb: 2048 kB\n",
            ),
        ];
        let expected = Memory {
            guest_kib: 8192 + 2048,
            guest_huge_kib: 4096 + 2048,
            written_kib: 12,
            unshared_files_kib: 200,
            shared_kib: 3800,
            pss_kib: 2112,
        };
        assert_eq!(sum(&smaps.concat()), expected);
    }
}
