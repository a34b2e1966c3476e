//! Options of `create` for the VM's share of the node's resources.

use clap::Args;
use vmmd_api::v1;

use crate::manifest::quantity;

/// Processor time and how memory is got.
#[derive(Debug, Args)]
pub struct Resources {
    /// Share of a physical processor that each vCPU is guaranteed, in percent: 1 to 100 [default: 100].
    #[arg(long, value_name = "PERCENT", conflicts_with = "files")]
    pub core_fraction: Option<u32>,
    /// Maximum use by each vCPU, in percent of a physical processor, from the core fraction to 100
    /// [default: no limit]
    #[arg(long, value_name = "PERCENT", conflicts_with = "files")]
    pub core_limit: Option<u32>,
    /// Processors of the node that the VM runs on, as in 0-3,8 [default: all].
    #[arg(long, value_name = "LIST", conflicts_with = "files")]
    pub host_cpus: Option<String>,
    /// Make the guest RAM of huge pages that the node has set aside: 2Mi or 1Gi each.
    #[arg(long, value_name = "SIZE", value_parser = huge_pages, conflicts_with = "files")]
    pub huge_pages: Option<v1::HugePages>,
    /// Have all guest RAM there before the guest starts.
    #[arg(long, conflicts_with = "files")]
    pub prefault: bool,
    /// Let the node merge equal pages of this VM and others (KSM).
    #[arg(long, conflicts_with = "files")]
    pub mergeable: bool,
    /// NUMA node of the host that all guest RAM comes from, and whose processors the VM runs on unless --host-cpus says others.
    #[arg(long, value_name = "N", conflicts_with = "files")]
    pub numa_node: Option<u32>,
}

impl Resources {
    /// With that many vCPUs.
    pub fn cpu(&self, cores: u32) -> v1::CpuSpec {
        v1::CpuSpec {
            cores,
            core_fraction_percent: self.core_fraction.unwrap_or_default(),
            core_limit_percent: self.core_limit.unwrap_or_default(),
            host_cpus: self.host_cpus.clone().unwrap_or_default(),
        }
    }

    /// With that much RAM.
    pub fn memory(&self, size_bytes: u64) -> v1::MemorySpec {
        v1::MemorySpec {
            size_bytes,
            huge_pages: self.huge_pages.unwrap_or_default().into(),
            prefault: self.prefault,
            mergeable: self.mergeable,
            numa_node: self.numa_node,
            ..v1::MemorySpec::default()
        }
    }
}

fn huge_pages(text: &str) -> Result<v1::HugePages, String> {
    match quantity::bytes(text) {
        Ok(bytes) if bytes == 2 << 20 => Ok(v1::HugePages::HugePages2m),
        Ok(bytes) if bytes == 1 << 30 => Ok(v1::HugePages::HugePages1g),
        _ => Err("must be 2Mi or 1Gi".into()),
    }
}
