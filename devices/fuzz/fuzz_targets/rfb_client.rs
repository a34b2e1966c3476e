//! What a client of the screen sends.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::fuzzing::rfb_client(data));
