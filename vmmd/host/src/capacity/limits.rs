//! Configuration of the share of the node that VMs may use.

use serde::{Deserialize, Serialize};

/// `[overcommit]`: ratio of promised to existing resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Overcommit {
    /// Overcommit of guaranteed processor time (cores times core fraction). Default 4.0.
    pub cpu: Ratio,
    /// Overcommit of cores, without regard to the core fraction. A core fraction of 1 % allows 100.0.
    /// Default 100.0.
    pub vcpu: Ratio,
    /// Overcommit of memory outside the huge page pools. Default 1.0.
    pub memory: Ratio,
}

/// A factor in thousandths: above 0, at most 1,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "f64")]
#[serde(into = "f64")]
pub struct Ratio(u32);

impl From<Ratio> for f64 {
    fn from(ratio: Ratio) -> f64 {
        Self::from(ratio.0) / 1000.0
    }
}

/// `[reserved]`: resources of the node that VMs never get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Reserved {
    /// Processor time, in thousandths of a logical processor. Default 0.
    pub cpu_millis: u64,
    /// Memory in MiB. Default 256.
    pub memory_mib: u64,
    /// Space in GiB on the file system with the daemon's state: with less than that free no VM is started. Default 0.
    pub disk_gib: u64,
}

/// `[pressure]`: when the node says that it runs short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Pressure {
    /// `DiskPressure` when less than this share of the file system with the daemon's state is free, in percent. Default 5.
    pub disk_percent: u8,
    /// `MemoryPressure` when less than this share of the memory is available, in percent. Default 5.
    pub memory_percent: u8,
}

impl Default for Overcommit {
    fn default() -> Self {
        Self {
            cpu: Ratio(4_000),
            vcpu: Ratio(100_000),
            memory: Ratio(1_000),
        }
    }
}

impl Default for Reserved {
    fn default() -> Self {
        Self {
            cpu_millis: 0,
            memory_mib: 256,
            disk_gib: 0,
        }
    }
}

impl Default for Pressure {
    fn default() -> Self {
        Self {
            disk_percent: 5,
            memory_percent: 5,
        }
    }
}

impl TryFrom<f64> for Ratio {
    type Error = String;

    fn try_from(ratio: f64) -> Result<Self, String> {
        if !(0.001..=1000.0).contains(&ratio) {
            return Err(format!("a ratio must be 0.001 to 1000, is {ratio}"));
        }
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "1 to 1,000,000"
        )]
        Ok(Self((ratio * 1000.0).round() as u32))
    }
}

impl Ratio {
    /// So many times `amount`.
    pub fn of(self, amount: u64) -> u64 {
        let product = u128::from(amount) * u128::from(self.0) / 1000;
        u64::try_from(product).unwrap_or(u64::MAX)
    }
}

impl Reserved {
    /// In bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib.saturating_mul(1 << 20)
    }

    /// In bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_gib.saturating_mul(1 << 30)
    }
}

impl Pressure {
    /// Checks the value ranges.
    pub fn check(&self) -> Result<(), String> {
        for (key, value) in [
            ("disk_percent", self.disk_percent),
            ("memory_percent", self.memory_percent),
        ] {
            if value > 99 {
                return Err(format!("`{key}` must be 0 to 99, is {value}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_exact_to_the_thousandth_and_has_bounds() {
        let of = |ratio: f64, amount| Ratio::try_from(ratio).map(|ratio| ratio.of(amount));
        assert_eq!(of(1.5, 2000), Ok(3000));
        assert_eq!(of(0.1, 10), Ok(1));
        assert_eq!(of(1000.0, u64::MAX), Ok(u64::MAX));
        for wrong in [0.0, -1.0, 1000.1, f64::NAN, f64::INFINITY] {
            assert!(Ratio::try_from(wrong).is_err(), "{wrong}");
        }
    }
}
