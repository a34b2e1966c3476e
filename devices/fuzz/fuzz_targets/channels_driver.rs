//! Fuzz target for the channels: actions of a driver, with its control messages, and of clients on the host.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::channels_driver(data));
