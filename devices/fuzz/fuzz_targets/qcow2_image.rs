//! Images in the qcow2 format.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::qcow2_image(data));
