//! Fuzz target for the socket device: actions of a driver and of clients on the host.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::vsock_driver(data));
