//! Messages of another daemon about a migration.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::peer_messages(data));
