//! How much of the node's processors a VM gets, and which processor its guest sees.

pub mod features;
mod model;

use vmmd_api::v1;

pub use model::{Model, Processor, baseline};

use super::Violations;

/// Share of a logical processor of the node for each core of a VM, in percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuShare {
    /// Guaranteed share: 1 to 100.
    pub fraction_percent: u32,
    /// Maximum share, from the fraction to 100; without it all free time.
    pub limit_percent: Option<u32>,
}

impl CpuShare {
    /// A whole processor, without a cap: the default of a spec.
    pub const WHOLE: Self = Self {
        fraction_percent: 100,
        limit_percent: None,
    };

    /// Reads `spec.cpu` and records violations.
    pub fn new(found: &mut Violations, cpu: &v1::CpuSpec) -> Self {
        let fraction_percent = match cpu.core_fraction_percent {
            0 => Self::WHOLE.fraction_percent,
            fraction => fraction,
        };
        if fraction_percent > 100 {
            let problem = format_args!("must be 1 to 100, or 0 for 100, is {fraction_percent}");
            found.add("spec.cpu.coreFractionPercent", problem);
        }
        let limit_percent = Some(cpu.core_limit_percent).filter(|limit| *limit != 0);
        // Beside a wrong fraction only the upper end is known.
        let least = fraction_percent.min(100);
        if let Some(limit) = limit_percent
            && !(least..=100).contains(&limit)
        {
            let problem = format_args!(
                "must be from the core fraction to 100 ({least} to 100), or 0 for no cap, is {limit}"
            );
            found.add("spec.cpu.coreLimitPercent", problem);
        }
        Self {
            fraction_percent,
            limit_percent,
        }
    }

    /// Guaranteed processor time of this many cores, in thousandths of a logical processor.
    pub fn millis(self, cores: u32) -> u64 {
        u64::from(cores) * u64::from(self.fraction_percent) * 10
    }
}
