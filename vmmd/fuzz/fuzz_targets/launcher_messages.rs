//! Messages of a launcher in a pod, up to its Hello.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_fuzz::launcher_messages(data));
