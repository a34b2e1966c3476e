//! The rings of a network interface: packets both ways, and the control queue.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::net_queue(data));
