//! Disks that a kernel is looked for on.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmm_core::bootdisk::fuzzing::disk(data));
