//! Requests to the metadata service of a network.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::metadata_request(data));
