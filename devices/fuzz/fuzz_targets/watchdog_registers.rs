//! Fuzz target for the registers of a watchdog: accesses of a guest.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::watchdog_registers(data));
