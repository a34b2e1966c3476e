//! The memory target: how much of its memory a guest is left with.

use tonic::{Code, Status};
use vmmd_api::v1::{self, BalloonSpec, HugePages};

use crate::{
    console::Client,
    harness::{Daemon, assert_refused, assert_says, refusal, status},
};

const MIB: u64 = 1 << 20;

impl Daemon {
    pub async fn memory_target(&self, vm: &str, target_bytes: u64) -> Result<v1::Vm, Status> {
        let balloon = BalloonSpec {
            target_bytes,
            ..Default::default()
        };
        let change = |spec: &mut v1::VmSpec| spec.balloon = Some(balloon);
        self.change_fields(vm, &["spec.balloon.target_bytes"], change)
            .await
    }
}

fn target(vm: &v1::Vm) -> u64 {
    let balloon = vm.spec.as_ref().unwrap().balloon;
    balloon.map_or(0, |balloon| balloon.target_bytes)
}

fn size(vm: &v1::Vm) -> u64 {
    vm.spec.as_ref().unwrap().memory.unwrap().size_bytes
}

#[tokio::test]
async fn memory_target_reaches_a_running_guest_and_later_runs() {
    let daemon = Daemon::start().await;
    let vm = daemon.create(daemon.manifest("web", "")).await.unwrap();
    let memory = size(&vm);
    assert_eq!(
        target(&daemon.memory_target("web", 64 * MIB).await.unwrap()),
        64 * MIB
    );
    daemon.start_vm("web").await.unwrap();
    let mut console = Client::open(&daemon, "web").await;
    console
        .expect(&format!("balloon {}\r\n", memory - 64 * MIB))
        .await;
    let vm = daemon.memory_target("web", 96 * MIB).await.unwrap();
    assert_eq!(target(&vm), 96 * MIB);
    console
        .expect(&format!("balloon {}\r\n", memory - 96 * MIB))
        .await;
    assert_eq!(
        status(&vm).observed_generation,
        vm.metadata.as_ref().unwrap().generation
    );
    let vm = daemon.memory_target("web", 0).await.unwrap();
    assert_eq!(target(&vm), 0);
    console.expect("balloon 0\r\n").await;
}

#[tokio::test]
async fn a_target_that_is_not_possible_is_refused_and_changes_nothing() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    let memory = size(&vm);
    for bytes in [1, 62 * MIB, 64 * MIB + 4096, memory + 2 * MIB, u64::MAX] {
        let refused = daemon.memory_target("web", bytes).await.unwrap_err();
        assert_eq!(
            refusal(&refused),
            (Code::InvalidArgument, "INVALID_FIELDS".into()),
            "{bytes}"
        );
        assert_says(&refused, "targetBytes");
    }
    assert_eq!(target(&daemon.get("web").await.unwrap()), 0);
    let refused = daemon.memory_target("none", 0).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
}

#[tokio::test]
async fn without_a_balloon_there_is_no_target() {
    let daemon = Daemon::start().await;
    let vm = daemon.manifest_with("web", "", |spec| {
        spec.balloon = Some(BalloonSpec {
            disabled: true,
            ..Default::default()
        });
    });
    daemon.create(vm).await.unwrap();
    let refused = daemon.memory_target("web", 64 * MIB).await.unwrap_err();
    assert_refused(&refused, Code::InvalidArgument, "INVALID_FIELDS");
    assert_says(&refused, "spec.balloon.disabled");

    let mut vm = daemon.manifest("huge", "");
    let spec = vm.spec.as_mut().unwrap();
    spec.memory.as_mut().unwrap().huge_pages = HugePages::HugePages2m.into();
    spec.balloon = Some(BalloonSpec::default());
    let refused = daemon.create(vm).await.unwrap_err();
    assert_says(&refused, "spec.balloon");
}

#[tokio::test]
async fn target_that_the_machine_refuses_waits_for_its_next_start() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.balloon=missing").await;
    let vm = daemon.memory_target("web", 64 * MIB).await.unwrap();
    assert_eq!(target(&vm), 64 * MIB);
    let [waiting] = status(&vm).pending_changes.as_slice() else {
        panic!("{vm:?}")
    };
    assert_eq!(waiting.path, "spec.balloon.targetBytes");
    assert!(waiting.message.contains("restart"), "{waiting:?}");
    let vm = daemon.memory_target("web", 0).await.unwrap();
    assert!(status(&vm).pending_changes.is_empty(), "{vm:?}");
}

#[tokio::test]
async fn target_with_pending_memory_is_of_the_running_machine() {
    let daemon = Daemon::start().await;
    let memory = size(&daemon.run("web", "").await);
    let larger = |spec: &mut v1::VmSpec| spec.memory.get_or_insert_default().size_bytes = 2 * memory;
    daemon.change("web", larger).await.unwrap();
    let mut console = Client::open(&daemon, "web").await;
    daemon.memory_target("web", 64 * MIB).await.unwrap();
    console
        .expect(&format!("balloon {}\r\n", memory - 64 * MIB))
        .await;
    // More than the machine has: the guest keeps all of it.
    daemon.memory_target("web", memory + 64 * MIB).await.unwrap();
    console.expect("balloon 0\r\n").await;
    let request = v1::GetVmStatsRequest { name: "web".into() };
    let stats = daemon.client().get_vm_stats(request).await.unwrap().into_inner();
    let shown = stats.stats.unwrap().memory.unwrap().size_bytes;
    assert_eq!(shown, memory, "what the machine has");
}
