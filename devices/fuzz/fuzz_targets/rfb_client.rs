//! Fuzz target for the screen's server: bytes from a client.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::rfb_client(data));
