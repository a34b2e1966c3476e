//! Fuzz target for flash memory: accesses of a guest.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::flash(data));
