//! The shortest way through all programs.

use std::time::{Duration, Instant};

use vmmd_kubernetes_tests::{fleet::Fleet, program::Program};

#[tokio::test]
async fn a_vm_is_placed_runs_and_is_deleted() {
    let began = Instant::now();
    let mut fleet = Fleet::start(1, 1).await;
    println!("the node is ready after {:.1} s", began.elapsed().as_secs_f32());
    let created = Instant::now();
    fleet.cluster.apply(&fleet.vm("web"));
    fleet.all_run(&["web".into()], Duration::from_secs(60)).await;
    println!("the VM runs after {:.1} s", created.elapsed().as_secs_f32());
    let listed = fleet.cluster.kubectl(&["get", "vmmvm", "-o", "wide"]);
    assert!(
        listed.contains("web") && listed.contains("Running") && listed.contains("node-0"),
        "{listed}"
    );
    fleet.end(Duration::from_secs(30)).await;
    let mebibytes = |program: &mut Program| program.memory() >> 20;
    println!(
        "MiB resident: control plane {}, controller {}, agent {}",
        fleet.cluster.memory() >> 20,
        mebibytes(&mut fleet.controllers[0]),
        mebibytes(&mut fleet.nodes[0].agent)
    );
}
