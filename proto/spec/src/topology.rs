//! How virtual CPUs are laid out in sockets when only their number is given.

/// Sockets and cores of a VM; one thread per core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// 1, 2, 4 or 8.
    pub sockets: u32,
    /// Cores in each socket.
    pub cores_per_socket: u32,
}

/// A number of cores that the platform doesn't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be 1 to {max}, is {cores}", max = Topology::MAX_CORES)]
pub struct InvalidCores {
    /// Requested number of cores.
    pub cores: u32,
}

impl Topology {
    /// Most virtual CPUs of a VM: as many as local APICs have ids below 255, the broadcast (Intel SDM vol. 3, 11.6.1).
    /// Interrupts reach each of them without remapping: an I/O APIC's input and a message of MSI name the destination in
    /// eight bits.
    pub const MAX_CORES: u32 = 254;

    /// 1–16 cores are one socket, 17–32 two, 33–64 four, more eight; a count that does not divide evenly has half as many
    /// sockets, until it does.
    ///
    /// So each count from 1 to 254 has a topology in which all sockets are alike, and, since the number of sockets is a power
    /// of two, one whose local APIC ids (socket above core, each in whole bits) stay below 255.
    pub fn for_cores(cores: u32) -> Result<Self, InvalidCores> {
        let most = match cores {
            1..=16 => 1,
            17..=32 => 2,
            33..=64 => 4,
            65..=Self::MAX_CORES => 8,
            _ => return Err(InvalidCores { cores }),
        };
        // The power of two up to `most` that divides the count.
        let sockets = 1 << cores.trailing_zeros().min(u32::trailing_zeros(most));
        Ok(Self {
            sockets,
            cores_per_socket: cores / sockets,
        })
    }

    /// All cores.
    pub fn cores(self) -> u32 {
        self.sockets * self.cores_per_socket
    }
}
