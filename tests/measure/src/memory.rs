//! Memory of a VMM beside guest RAM.

use std::fs;

use anyhow::{Context, Result};

/// Mappings of at least this many KiB are guest RAM: no VMM maps anything else of its size.
const GUEST_RAM_KIB: u64 = 200 << 10;

/// Proportional set size in KiB (proc(5), smaps): of guest RAM, and of all else.
pub fn pss(pid: u32) -> Result<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).context("read smaps")?;
    let (mut guest, mut rest, mut size) = (0, 0, 0);
    for line in text.lines() {
        let value = || {
            line.split_whitespace()
                .nth(1)
                .and_then(|value| value.parse().ok())
                .unwrap_or(0)
        };
        if line.starts_with("Size:") {
            size = value();
        } else if line.starts_with("Pss:") {
            if size >= GUEST_RAM_KIB {
                guest += value();
            } else {
                rest += value();
            }
        }
    }
    Ok((guest, rest))
}
