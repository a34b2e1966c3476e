//! What a client sends after its connection was upgraded to SPDY.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmmd_kube_fuzz::spdy_session(data));
