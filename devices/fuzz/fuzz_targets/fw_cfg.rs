//! Fuzz target for the configuration device of firmware: accesses and DMA requests of a guest.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::fw_cfg(data));
