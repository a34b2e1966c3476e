//! Packets from a DHCP client.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::dhcp_client(data));
