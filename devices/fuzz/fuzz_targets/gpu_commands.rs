//! The commands of a driver of the graphics adapter.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::gpu_commands(data));
