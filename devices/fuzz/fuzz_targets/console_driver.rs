//! What happens to a console.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::console_driver(data));
