//! Deliberate faults in builds of their own: the tests that are to notice them do. `make nightly` runs these.

use std::path::Path;
use std::process::Command;

use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Node, paths, power, programs, run};

/// Replaces the installed `vmm`, until it is dropped, with one whose disks ignore FLUSH.
struct Mutated<'node>(&'node Node);

impl<'node> Mutated<'node> {
    fn install(node: &'node Node, program: &Path) -> Self {
        node.sh("cp -a /usr/lib/vmmd/vmm /var/tmp/vmm.right");
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
    let case = Case::new("power-mutation");
    let _mutated = Mutated::install(case.node(), &program);
    let wrong = power::lose(&case, 1, "barrier=1");
    assert!(!wrong.is_empty(), "nothing was lost");
}

/// Tests of the devices that hold a FLUSH to its word, of raw images and of qcow2.
const NOTICING: [&str; 3] = [
    "a_flush_leaves_nothing_of_a_file_in_the_page_cache_alone",
    "a_flush_empties_the_cache_of_a_block_device",
    "whenever_the_host_dies_the_image_is_consistent_and_holds_what_was_flushed",
];

#[test]
fn devices_that_ignore_flushes_are_noticed_by_their_own_tests() {
    let mut command = Command::new("cargo");
    command
        .args([
            "test",
            "--locked",
            "-p",
            "vmmd-devices",
            "--lib",
            "--features",
            "mutation-flush",
            "--",
        ])
        .args(NOTICING)
        // Failures are neither shrunk nor stored in the tree.
        .env("PROPTEST_MAX_SHRINK_ITERS", "0")
        .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1")
        .current_dir(paths::workspace_dir());
    let output = run::output(&mut command, Deadline::seconds(900)).expect("the tests of the devices");
    assert!(!output.success(), "{}", output.stdout);
    let results = output.stdout.lines().filter(|line| line.starts_with("test "));
    for name in NOTICING {
        let mut of_test = results.clone().filter(|line| line.contains(name)).peekable();
        assert!(of_test.peek().is_some(), "{name} was not run: {}", output.stderr);
        assert!(of_test.all(|line| line.ends_with("FAILED")), "{}", output.stdout);
    }
}
