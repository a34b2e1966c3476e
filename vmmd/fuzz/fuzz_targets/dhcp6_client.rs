//! Frames from a DHCP client for IPv6.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::dhcp6_client(data));
