//! The answers of an agent in a guest.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::agent_answers(data));
