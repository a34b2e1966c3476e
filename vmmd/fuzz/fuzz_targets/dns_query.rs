//! Queries to the name server of a network.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::dns_query(data));
