//! Fuzz target for the registers of a TPM: accesses of a guest.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::tpm_registers(data));
