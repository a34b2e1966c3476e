//! The registers and commands of a SATA port.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::ahci_port(data));
