//! The archive of a snapshot, as somebody sends it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::snapshot_archive(data));
