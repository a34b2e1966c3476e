//! The rings and requests of a disk.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::blk_queue(data));
