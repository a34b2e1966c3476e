//! The stream of a live migration.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmm_core::migration::fuzzing::stream(data));
