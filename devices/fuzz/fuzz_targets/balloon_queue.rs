//! The rings and requests of a balloon.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::balloon_queue(data));
