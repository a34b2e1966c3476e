//! Parts of vmmd-kube that read bytes from clients of the kubelet's API: the files that need no
//! runtime.

#[allow(dead_code, reason = "the program uses the rest")]
#[path = "../../src/kubelet/spdy"]
mod spdy {
    mod dictionary;
    mod frame;
    pub mod fuzzing;
    mod headers;
    mod session;
}

pub use spdy::fuzzing::spdy_session;
