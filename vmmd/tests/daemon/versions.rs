//! Remains of other versions of the project: the store of the first release (`golden/` documents
//! its origin), and a running `vmm` with the previous protocol version.

use std::{
    fs,
    process::{Command, Stdio},
};

use tonic::{Code, Status};
use vmmd_api::v1::{self, AttachmentPhase, ConditionStatus, ExitReason, VmPhase};

use crate::{
    attach::{disk, phase},
    console::Client,
    harness::{Daemon, refusal, status, vm_pid},
    namespace::Namespace,
    snapshots::disks_alone::of_disks,
};

const STORE: &[u8] = include_bytes!("golden/first-release.redb.gz");
/// VMs as the first release reported them when it wrote the store.
const TOLD: &str = include_str!("golden/first-release.json");

/// Today's daemon with the first release's store, in a network as that had one.
async fn after_the_first_release() -> (Namespace, Daemon, Vec<v1::Vm>) {
    let network = Namespace::new();
    network.ip("link add br0 type bridge");
    network.ip("tuntap add tap9 mode tap");
    let folder = tempfile::Builder::new()
        .prefix("vmmd")
        .tempdir_in("/tmp")
        .unwrap();
    let path = |name: &str| folder.path().join(name);
    for image in ["root.img", "data.img", "spare.img"] {
        fs::write(path(image), [0; 4096]).unwrap();
    }
    fs::create_dir(path("state")).unwrap();
    let mut unpack = Command::new("gzip")
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(fs::File::create(path("state/vmmd.redb")).unwrap())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut unpack.stdin.take().unwrap(), STORE).unwrap();
    assert!(unpack.wait().unwrap().success());
    let daemon = Daemon::with(folder, "", Some(network.0.clone())).await;
    let told = TOLD.lines().map(|line| {
        // The VM message of that release corresponds to the present manifest.
        let mut manifest: serde_json::Map<_, _> = serde_json::from_str(line).unwrap();
        manifest.retain(|field, _| !["apiVersion", "kind"].contains(&field.as_str()));
        serde_json::from_value(manifest.into()).unwrap()
    });
    (network, daemon, told.collect())
}

fn name(vm: &v1::Vm) -> &str {
    &vm.metadata.as_ref().unwrap().name
}

fn macs(vm: &v1::Vm) -> Vec<&str> {
    status(vm).nics.iter().map(|nic| nic.mac.as_str()).collect()
}

#[tokio::test]
async fn the_store_of_the_first_release_is_taken_over_with_all_that_it_told() {
    let (_network, mut daemon, told) = after_the_first_release().await;
    assert_eq!(
        told.iter().map(name).collect::<Vec<_>>(),
        [
            "created",
            "killed",
            "lost",
            "panicked",
            "powered-off",
            "refused",
            "running",
            "stopped"
        ]
    );
    // The record says that it runs, and the node has been restarted since.
    let pid = daemon
        .wait_phase("running", VmPhase::Running)
        .await
        .instance
        .unwrap()
        .pid;
    // The second round reads the store as the first round has left it.
    for _ in 0..2 {
        let found = daemon.list().await;
        assert_eq!(found.len(), told.len());
        for (old, new) in told.iter().zip(&found) {
            assert_eq!((&old.metadata, &old.spec), (&new.metadata, &new.spec));
            assert_eq!(macs(old), macs(new));
            let (was, is) = (status(old), status(new));
            assert_eq!(was.phase(), is.phase(), "{}", name(old));
            if name(old) == "running" {
                assert_eq!(is.last_exit.as_ref().unwrap().reason(), ExitReason::NodeRestart);
                assert_eq!(is.instance.as_ref().unwrap().pid, pid);
                continue;
            }
            assert_eq!(
                (&was.reason, &was.message),
                (&is.reason, &is.message),
                "{}",
                name(old)
            );
            assert_eq!((&was.last_exit, &is.instance), (&is.last_exit, &None));
            // It was down in a release without run policies: no policy starts it.
            let next = is.restart.as_ref().and_then(|restart| restart.next_start_time);
            assert_eq!(next, None, "{}", name(old));
        }
        daemon.kill_and_restart().await;
    }
}

#[tokio::test]
async fn vms_of_the_first_release_can_do_all_that_new_ones_can() {
    let (network, daemon, told) = after_the_first_release().await;
    daemon.wait_phase("running", VmPhase::Running).await;
    assert_eq!(network.ports("br0").len(), 1);
    assert_eq!(daemon.plugged("running").await, ["root", "data"]);
    let attached = daemon.attach("running", disk(&daemon, "more")).await.unwrap();
    assert_eq!(phase(status(&attached), "more"), Some(AttachmentPhase::Attached));
    let error = daemon.start_vm("refused").await.unwrap_err();
    assert_eq!(
        refusal(&error),
        (Code::FailedPrecondition, "IMAGE_UNUSABLE".into())
    );
    // Its policy would start it again in a moment.
    daemon.stop("refused", None).await.unwrap();
    for vm in &told {
        let name = name(vm);
        let changed = daemon.change(name, |spec| {
            spec.cpu.as_mut().unwrap().cores = 2;
            if let Some(v1::boot_spec::Source::Linux(boot)) = &mut spec.boot.as_mut().unwrap().source {
                boot.cmdline.clear();
            }
        });
        let generation = vm.metadata.as_ref().unwrap().generation;
        assert!(
            changed.await.unwrap().metadata.unwrap().generation > generation,
            "{name}"
        );
        if name != "running" {
            daemon.start_vm(name).await.unwrap();
        }
        let request = v1::RestartVmRequest {
            name: name.into(),
            ..Default::default()
        };
        let restarted = daemon.client().restart_vm(request).await.unwrap().into_inner();
        assert_eq!(macs(&restarted.vm.unwrap()), macs(vm));
        let mut console = Client::open(&daemon, name).await;
        console.type_in("machine\n").await;
        console.expect("vcpus=2 ").await;
        let stopped = daemon.stop(name, None).await.unwrap();
        assert_eq!(
            status(&stopped).last_exit.as_ref().unwrap().reason(),
            ExitReason::Stopped
        );
        daemon.delete(name, false).await.unwrap();
    }
    assert_eq!(
        (daemon.list().await, daemon.vmm_processes()),
        (Vec::new(), Vec::new())
    );
}

async fn reset(daemon: &Daemon, name: &str) -> Result<(), Status> {
    let request = v1::ResetVmRequest {
        name: name.into(),
        ..Default::default()
    };
    daemon.client().reset_vm(request).await.map(drop)
}

#[tokio::test]
async fn a_vmm_of_the_protocol_version_before_is_driven_until_a_restart_replaces_it() {
    let folder = tempfile::Builder::new()
        .prefix("vmmd")
        .tempdir_in("/tmp")
        .unwrap();
    let old = folder.path().join("old");
    fs::copy(env!("CARGO_BIN_EXE_mock-vmm"), &old).unwrap();
    let mut daemon = Daemon::in_folder(folder, &format!("vmm = {old:?}\n")).await;
    let started = daemon.run("web", "").await;
    let too_old = (Code::FailedPrecondition, "VMM_TOO_OLD".to_owned());
    // The first time with the daemon that started it, then with others that have found it.
    for round in 0..3 {
        let vm = daemon.get("web").await.unwrap();
        assert_eq!(
            (status(&vm).phase(), vm_pid(&vm)),
            (VmPhase::Running, vm_pid(&started))
        );
        let ready = &status(&vm).conditions[0];
        assert_eq!(
            (ready.r#type.as_str(), ready.status()),
            ("Ready", ConditionStatus::True)
        );
        let mut console = Client::open(&daemon, "web").await;
        console.type_in(&format!("round {round}\n")).await;
        console.expect(&format!("round {round}\r\n")).await;
        assert_eq!(
            status(&daemon.pause("web").await.unwrap()).phase(),
            VmPhase::Paused
        );
        daemon.kill_and_restart().await;
        assert_eq!(status(&daemon.get("web").await.unwrap()).phase(), VmPhase::Paused);
        assert_eq!(
            status(&daemon.resume("web").await.unwrap()).phase(),
            VmPhase::Running
        );
        let snapshot = of_disks("one", "web", true);
        let refused = daemon.snapshots().await.create_snapshot(snapshot).await;
        assert_eq!(refusal(&refused.unwrap_err()), too_old);
        // Disks come and go as they did.
        let attached = daemon.attach("web", disk(&daemon, "data")).await.unwrap();
        assert_eq!(phase(status(&attached), "data"), Some(AttachmentPhase::Attached));
        assert_eq!(daemon.plugged("web").await, ["data"]);
        daemon.detach("web", "data", 0, true).await.unwrap();
        // Operations unknown to the `vmm` are refused, with the reason.
        let refused = reset(&daemon, "web").await.unwrap_err();
        assert_eq!(refusal(&refused), too_old);
        assert!(refused.message().contains("restart"), "{refused}");
        let waits = daemon.memory_target("web", 64 << 20).await.unwrap();
        let waiting = &status(&waits).pending_changes[0];
        assert_eq!(waiting.path, "spec.balloon.targetBytes");
        assert!(waiting.message.contains("restart"), "{waiting:?}");
        daemon.memory_target("web", 0).await.unwrap();
    }
    // The package has been upgraded: what starts now is today's.
    daemon.kill();
    let config = fs::read_to_string(daemon.path("config.toml")).unwrap();
    let config = config.replace(old.to_str().unwrap(), env!("CARGO_BIN_EXE_mock-vmm"));
    fs::write(daemon.path("config.toml"), config).unwrap();
    daemon.relaunch().await;
    assert_eq!(refusal(&reset(&daemon, "web").await.unwrap_err()), too_old);
    let request = v1::RestartVmRequest {
        name: "web".into(),
        ..Default::default()
    };
    daemon.client().restart_vm(request).await.unwrap();
    reset(&daemon, "web").await.unwrap();
    let stopped = daemon.stop("web", None).await.unwrap();
    assert_eq!(
        status(&stopped).last_exit.as_ref().unwrap().reason(),
        ExitReason::Stopped
    );
}
