//! Packets to a router from the hosts of its link.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::router_solicitations(data));
