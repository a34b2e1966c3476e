//! Bytes from a client after the upgrade of its connection to SPDY.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_kube_fuzz::spdy_session(data));
