//! `[images]`: limits of imports.

use std::{net::IpAddr, str::FromStr};

use serde::{Deserialize, Serialize, Serializer};

/// Limits of imports.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImportRules {
    /// Networks that no import connects to: `["10.0.0.0/8", "fd00::/8"]`. Behind a proxy, only an address in the URL is checked. The
    /// proxy itself may be in such a network. Default: none.
    pub deny: Vec<Network>,
    /// Registries that are reached by HTTP, as `HOST` or `HOST:PORT`. An agent of a cluster can use a registry on a loopback or link-local
    /// address only when it is in this list. Default: none.
    pub insecure_registries: Vec<String>,
    /// Most bytes of an image that an agent of a cluster imports, and of the disk in it. At least 1. Default 137438953472.
    pub agent_max_bytes: u64,
}

impl Default for ImportRules {
    fn default() -> Self {
        Self {
            deny: Vec::new(),
            insecure_registries: Vec::new(),
            agent_max_bytes: 128 << 30,
        }
    }
}

impl ImportRules {
    /// The key that is 0, which would allow no image.
    pub fn zero(&self) -> Option<&'static str> {
        (self.agent_max_bytes == 0).then_some("images.agent_max_bytes")
    }

    /// Whether the configuration names this registry, `HOST[:PORT]`, as one without TLS.
    pub fn is_insecure(&self, registry: &str) -> bool {
        self.insecure_registries.iter().any(|known| known == registry)
    }
}

/// Addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Network {
    address: IpAddr,
    prefix: u32,
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is not a network such as 10.0.0.0/8 or fd00::/8");
        let (address, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let prefix = prefix.parse().map_err(|_| wrong())?;
        match prefix <= if address.is_ipv4() { 32 } else { 128 } {
            true => Ok(Self { address, prefix }),
            false => Err(wrong()),
        }
    }
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl Serialize for Network {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}/{}", self.address, self.prefix))
    }
}

impl Network {
    /// Whether `address` is in the network.
    pub fn has(self, address: IpAddr) -> bool {
        let same = |ours: u128, theirs: u128, bits: u32| {
            let shift = bits.saturating_sub(self.prefix);
            (ours ^ theirs).checked_shr(shift).unwrap_or(0) == 0
        };
        match (self.address, address) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                same(u32::from(ours).into(), u32::from(theirs).into(), 32)
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => same(ours.into(), theirs.into(), 128),
            _ => false,
        }
    }
}
