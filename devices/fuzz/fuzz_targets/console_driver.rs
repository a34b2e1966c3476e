//! Fuzz target for a console: actions of a driver and of the host.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::console_driver(data));
