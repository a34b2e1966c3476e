//! The program `vmmd-netd`: DHCP, DNS and router advertisements for one network.

use clap::Parser;
use vmmd_network::netd::server::{Arguments, run};

fn main() -> anyhow::Result<()> {
    run(&Arguments::parse())
}
