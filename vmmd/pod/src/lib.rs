//! The private protocol between `vmmd-pod`, the launcher of a VM in its pod, and vmmd: its messages and its bounds. A reader
//! starts at `proto/vmmd/pod/v1/launcher.proto`; the framing is [`vmmd_wire`].

/// `vmmd.pod.v1`: the messages.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod message {
    include!(concat!(env!("OUT_DIR"), "/vmmd.pod.v1.rs"));
}

/// Most volumes of a pod.
pub const MAX_VOLUMES: usize = 64;
/// Most files of Secrets and ConfigMaps of a pod.
pub const MAX_FILES: usize = 256;
/// Largest file in bytes.
pub const MAX_FILE: usize = 1 << 20;
/// Most bytes of all files of a pod.
pub const MAX_FILES_TOTAL: usize = 4 << 20;
/// Longest path of a file in bytes: the name of a volume, a slash, and a key (253 bytes in Kubernetes).
pub const MAX_FILE_PATH: usize = 63 + 1 + 253;
/// Largest piece of a file, and largest piece of output, in bytes.
pub const MAX_PIECE: usize = 64 << 10;
/// Largest piece of input in bytes.
pub const MAX_INPUT: usize = 4 << 10;
/// Most name servers of a pod.
pub const MAX_SERVERS: usize = 8;
/// Most domains of a search list (Kubernetes allows 32).
pub const MAX_SEARCH: usize = 32;
/// Longest domain of a search list in bytes (RFC 1035, 2.3.4).
pub const MAX_DOMAIN: usize = 255;
/// Descriptors with Hello before those of the volumes: the network namespace and the lifeline.
pub const FIXED_FDS: usize = 2;
