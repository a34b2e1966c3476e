//! How virtual CPUs are laid out in sockets when only their number is given.

/// Sockets and cores of a VM; one thread per core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// 1 to 8.
    pub sockets: u32,
    /// Cores in each socket.
    pub cores_per_socket: u32,
}

/// A number of cores that the platform doesn't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCores {
    /// Out of range.
    #[error("must be 1 to {max}, is {cores}")]
    Range {
        /// What was asked for.
        cores: u32,
        /// Most that there can be.
        max: u32,
    },
    /// Does not divide evenly over the sockets.
    #[error("must be a multiple of {sockets} (that many sockets above {above} cores), is {cores}")]
    Uneven {
        /// What was asked for.
        cores: u32,
        /// Sockets at this size.
        sockets: u32,
        /// Last size with fewer sockets.
        above: u32,
    },
}

impl Topology {
    /// Most virtual CPUs of a VM at present.
    pub const MAX_CORES: u32 = 32;

    /// 1–16 cores are one socket; 17–32 two; 33–64 four; more eight. The count must divide evenly.
    pub fn for_cores(cores: u32) -> Result<Self, InvalidCores> {
        if cores == 0 || cores > Self::MAX_CORES {
            return Err(InvalidCores::Range {
                cores,
                max: Self::MAX_CORES,
            });
        }
        let (sockets, above) = match cores {
            1..=16 => (1, 0),
            17..=32 => (2, 16),
            33..=64 => (4, 32),
            _ => (8, 64),
        };
        if !cores.is_multiple_of(sockets) {
            return Err(InvalidCores::Uneven {
                cores,
                sockets,
                above,
            });
        }
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
