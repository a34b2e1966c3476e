//! A guest moves from one node to another, each a machine of its own with vmmd's package, and back.

use vmmd_tests::node::Kernel;
use vmmd_tests::two_daemons::nodes::Nodes;
use vmmd_tests::two_daemons::traveller::{SMALL, Traveller};
use vmmd_tests::vm::VmSpec;
use vmmd_tests::{Case, long};

/// With 128 MiB, of which most is free.
const MEMORY_MIB: u64 = 128;

/// One migration, or a hundred in the long form. After each, the guest's memory is unchanged, its
/// clock continues, and the source has no remains of it.
#[test]
fn a_guest_moves_to_another_node() {
    let case = Case::new("migration-nodes");
    let nodes = Nodes::boot(&case).expect("two nodes");
    let daemons = nodes.daemons();
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .memory_mib(MEMORY_MIB)
        .cmdline(SMALL);
    let mut guest = Traveller::boot(case.name(), &daemons, &spec);
    for migration in 1..=if long() { 100 } else { 1 } {
        println!("migration {migration}");
        guest.moves();
    }
    guest.has_no_complaint();
}
