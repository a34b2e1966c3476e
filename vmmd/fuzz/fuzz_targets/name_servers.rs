//! Queries that are forwarded, and what name servers reply.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::name_servers(data));
