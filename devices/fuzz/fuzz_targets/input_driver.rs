//! Fuzz target for an input device: actions of a driver and of the host.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::input_driver(data));
