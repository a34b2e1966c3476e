//! Deliberate faults in builds of their own: the tests that are to notice them do. `make nightly` runs these.

use std::path::Path;

use vmmd_tests::{Case, Node, power, programs};

/// A `vmm` whose disks do nothing for a FLUSH, in the place of the installed one until it is dropped.
struct Mutated<'node>(&'node Node);

impl<'node> Mutated<'node> {
    fn install(node: &'node Node, program: &Path) -> Self {
        node.sh("cp -a /usr/lib/vmmd/vmm /var/tmp/vmm.right")
            .expect("keep the right one");
        let mutated = Mutated(node);
        node.copy_in(program, "/usr/lib/vmmd/vmm").expect("copy");
        mutated
    }
}

impl Drop for Mutated<'_> {
    fn drop(&mut self) {
        let _ = self.0.ssh("mv -f /var/tmp/vmm.right /usr/lib/vmmd/vmm");
    }
}

#[test]
fn a_vmm_that_ignores_flushes_is_noticed() {
    let program = programs::build_with("vmm-core", "vmm", &["mutation-flush"]).expect("build");
    let case = Case::new("power-mutation").expect("node");
    let _mutated = Mutated::install(case.node(), &program);
    let wrong = power::lose(&case, 1, "barrier=1");
    assert!(!wrong.is_empty(), "nothing was lost");
}
