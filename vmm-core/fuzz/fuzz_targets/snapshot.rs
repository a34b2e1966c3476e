//! Snapshot files.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmm_core::snapshot::fuzzing::snapshot(data));
