//! `vmm.state.v1`: the saved state of a machine.
//!
//! A saved machine is a list of [`Section`]s, one for each component. The payload of a section is one message; its
//! kind says which one, its version which format. All messages that may be a payload are listed at the end of
//! this file with their kind and version. A section that is read back is untrusted.

use std::io;

use prost::DecodeError;

pub use generated::*;

#[allow(missing_docs, clippy::all, clippy::pedantic)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/vmm.state.v1.rs"));
}

/// A message that is the saved state of one component, and the payload of a [`Section`].
pub trait Saved: prost::Message + Default {
    /// Kind of the component: "serial", "virtio-blk". Never changes once released.
    const KIND: &'static str;
    /// Version of the format that this program writes, from 1. It also reads all older ones.
    const VERSION: u32;
}

/// Reason why a state cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The component does not support a save at this time or in general.
    #[error("{component} can't be saved: {reason}")]
    NotMigratable {
        /// Name of the component.
        component: String,
        /// Why.
        reason: String,
    },
    /// The section is of another component.
    #[error("section `{id}` is of kind `{found}` instead of `{wanted}`")]
    WrongKind {
        /// The section's id.
        id: String,
        /// The section's kind.
        found: String,
        /// The kind that was to be restored.
        wanted: &'static str,
    },
    /// The section was written by a newer program, or its version makes no sense.
    #[error("section `{id}` of kind `{kind}` has version {found}; versions 1 to {known} are known")]
    UnknownVersion {
        /// The section's id.
        id: String,
        /// The section's kind.
        kind: &'static str,
        /// The section's version.
        found: u32,
        /// The latest version that this program knows.
        known: u32,
    },
    /// The payload is no such message.
    #[error("section `{id}` can't be decoded")]
    Decode {
        /// The section's id.
        id: String,
        /// Problem with the encoding.
        source: DecodeError,
    },
    /// The machine has a component that the state lacks.
    #[error("the state has no section `{id}`")]
    Missing {
        /// The section's id.
        id: String,
    },
    /// The state has a component that the machine lacks.
    #[error("the machine has nothing that section `{id}` of kind `{kind}` is the state of")]
    Unused {
        /// The section's id.
        id: String,
        /// The section's kind.
        kind: String,
    },
    /// Two components of the state are the same one.
    #[error("section `{id}` of kind `{kind}` is there twice")]
    Twice {
        /// The section's id.
        id: String,
        /// The section's kind.
        kind: String,
    },
    /// A field has a value that the component can't have.
    #[error("field `{field}`: {why}")]
    Invalid {
        /// Name of the field in the message.
        field: &'static str,
        /// Problem with the value.
        why: String,
    },
    /// The host refused something that saving or restoring needs.
    #[error("{0}")]
    Host(&'static str, #[source] io::Error),
}

impl StateError {
    /// The component cannot be saved: `reason` completes the sentence.
    pub fn not_migratable(component: &str, reason: impl Into<String>) -> Self {
        Self::NotMigratable {
            component: component.to_owned(),
            reason: reason.into(),
        }
    }

    /// `field` has an invalid value.
    pub fn invalid(field: &'static str, why: impl Into<String>) -> Self {
        Self::Invalid {
            field,
            why: why.into(),
        }
    }
}

impl Section {
    /// The section of the component `id` with that state.
    pub fn new<M: Saved>(id: &str, message: &M) -> Self {
        Self {
            kind: M::KIND.to_owned(),
            version: M::VERSION,
            id: id.to_owned(),
            payload: message.encode_to_vec(),
        }
    }

    /// The state in the section, if the section is of that kind and of a known version.
    pub fn open<M: Saved>(&self) -> Result<M, StateError> {
        if self.kind != M::KIND {
            return Err(StateError::WrongKind {
                id: self.id.clone(),
                found: self.kind.clone(),
                wanted: M::KIND,
            });
        }
        if !(1..=M::VERSION).contains(&self.version) {
            return Err(StateError::UnknownVersion {
                id: self.id.clone(),
                kind: M::KIND,
                found: self.version,
                known: M::VERSION,
            });
        }
        M::decode(self.payload.as_slice()).map_err(|source| StateError::Decode {
            id: self.id.clone(),
            source,
        })
    }
}

/// Kind and version of each message that may be a payload.
macro_rules! saved {
    ($($message:ident: $kind:literal, $version:literal;)*) => {
        $(impl Saved for $message {
            const KIND: &'static str = $kind;
            const VERSION: u32 = $version;
        })*

        /// All kinds with the version that this program writes.
        pub const KINDS: &[(&str, u32)] = &[$(($kind, $version)),*];
    };
}

saved! {
    MachineHeader: "machine", 1;
    Vcpu: "vcpu", 1;
    InterruptControllers: "interrupt-controllers", 1;
    Pit: "pit", 1;
    Clock: "kvmclock", 1;
    VirtioPci: "virtio-pci", 1;
    VirtioBlk: "virtio-blk", 1;
    VirtioBlkQueue: "virtio-blk-queue", 1;
    VirtioBalloon: "virtio-balloon", 1;
    VirtioBalloonQueues: "virtio-balloon-queues", 1;
    VirtioRng: "virtio-rng", 1;
    VirtioRngQueue: "virtio-rng-queue", 1;
    VirtioFs: "virtio-fs", 1;
    VirtioFsQueues: "virtio-fs-queues", 1;
    VirtioNet: "virtio-net", 1;
    VirtioNetQueues: "virtio-net-queues", 1;
    VirtioGpu: "virtio-gpu", 1;
    VirtioGpuQueues: "virtio-gpu-queues", 1;
    VirtioInput: "virtio-input", 1;
    VirtioInputQueues: "virtio-input-queues", 1;
    VirtioConsole: "virtio-console", 1;
    VirtioConsoleQueues: "virtio-console-queues", 1;
    VirtioChannels: "virtio-channels", 1;
    VirtioChannelsQueues: "virtio-channels-queues", 1;
    VirtioVsock: "virtio-vsock", 1;
    VirtioVsockQueues: "virtio-vsock-queues", 1;
    Ahci: "ahci", 1;
    PciRoot: "pci-root", 1;
    HotPlug: "hot-plug", 1;
    Serial: "serial", 1;
    LegacyDevices: "legacy", 2;
    Firmware: "firmware", 1;
    Tpm: "tpm", 1;
    Watchdog: "watchdog", 1;
    SnapshotInfo: "snapshot", 1;
    SnapshotMemory: "snapshot-memory", 1;
}
