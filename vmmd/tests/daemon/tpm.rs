//! VMs with a TPM: the process that serves it, and its state.

use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::PathBuf,
};

use rustix::process::{Pid, Signal, kill_process};
use tonic::Code;
use vmmd_api::v1::{self, VmPhase};

use crate::{
    harness::{Daemon, assert_refused, assert_says, status, temporary_folder, uid, vm_pid},
    migration::node_in,
    pki::Pki,
    shares::{is_alive, of, until_gone},
    verbs::within,
};

/// Configuration with a mock of swtpm in this folder.
fn program(folder: &std::path::Path) -> String {
    let program = folder.join("swtpm");
    symlink(env!("CARGO_BIN_EXE_mock-vmm"), &program).unwrap();
    format!("swtpm = {program:?}\n")
}

async fn daemon() -> Daemon {
    let folder = temporary_folder();
    let extra = program(folder.path());
    Daemon::in_folder(folder, &extra).await
}

fn manifest(daemon: &Daemon) -> v1::Vm {
    daemon.manifest_with("web", "", |spec| spec.tpm = Some(v1::TpmSpec {}))
}

fn state(daemon: &Daemon, vm: &v1::Vm) -> PathBuf {
    daemon.path(&format!("state/vms/{}/tpm", uid(vm)))
}

/// The number and the arguments of the process that serves the TPM of a VM with this state.
async fn served(state: &std::path::Path) -> (Pid, String) {
    let file = state.join("served");
    within(async || {
        let said = fs::read_to_string(&file).ok()?;
        let (pid, arguments) = said.split_once('\n')?;
        let pid = Pid::from_raw(pid.parse().ok()?)?;
        Some((pid, arguments.to_owned()))
    })
    .await
}

#[tokio::test]
async fn swtpm_runs_as_the_user_of_the_vmm_without_rights() {
    let daemon = daemon().await;
    daemon.create(manifest(&daemon)).await.unwrap();
    let vm = daemon.start_vm("web").await.unwrap();
    let state = state(&daemon, &vm);
    let (pid, arguments) = served(&state).await;
    assert_eq!(
        arguments.lines().collect::<Vec<_>>(),
        [
            "socket",
            "--tpm2",
            "--fd=3",
            "--ctrl=type=unixio,clientfd=4",
            "--tpmstate=dir=/proc/self/fd/5,mode=0600",
        ]
    );
    let said = fs::read_to_string(of(pid, "status")).unwrap();
    let field = |name: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap()
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let user = fs::metadata(of(vm_pid(&vm), "status")).unwrap().uid();
    assert_eq!(
        (field("Uid:"), field("NoNewPrivs:")),
        (user.to_string(), "1".to_owned())
    );
    assert!(
        ["CapBnd:", "CapEff:", "CapPrm:"]
            .iter()
            .all(|set| field(set) == "0000000000000000")
    );
    let owner = fs::metadata(state.join("served")).unwrap();
    assert_eq!((owner.uid(), owner.gid()), (user, user));
    let cgroup = |pid: Pid| fs::read_to_string(of(pid, "cgroup")).unwrap();
    if !daemon.cgroups().is_empty() {
        assert_eq!(cgroup(pid), cgroup(vm_pid(&vm)));
    }
}

#[tokio::test]
async fn state_lives_from_the_first_start_to_the_deletion() {
    let mut daemon = daemon().await;
    let vm = daemon.create(manifest(&daemon)).await.unwrap();
    let state = state(&daemon, &vm);
    assert!(!state.exists());
    daemon.start_vm("web").await.unwrap();
    let (first, _) = served(&state).await;
    fs::write(state.join("tpm2-00.permall"), "keys").unwrap();
    daemon.kill_and_restart().await;
    assert!(is_alive(first));
    daemon.kill_vm("web").await.unwrap();
    until_gone(first).await;
    fs::remove_file(state.join("served")).unwrap();
    // New variables of the firmware do not clear a TPM.
    let start = v1::StartVmRequest {
        name: "web".into(),
        reset_nvram: true,
        ..Default::default()
    };
    daemon.client().start_vm(start).await.unwrap();
    let (second, _) = served(&state).await;
    assert_eq!(fs::read_to_string(state.join("tpm2-00.permall")).unwrap(), "keys");
    daemon.delete("web", true).await.unwrap();
    until_gone(second).await;
    assert!(!state.exists());
}

#[tokio::test]
async fn missing_swtpm_refuses_the_start_and_says_what_to_install() {
    let folder = temporary_folder();
    let daemon = Daemon::in_folder(folder, "swtpm = '/none/swtpm'\n").await;
    daemon.create(manifest(&daemon)).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "TPM_PROGRAM_MISSING");
    assert_says(&refused, "apt install swtpm");
    let vm = daemon.get("web").await.unwrap();
    assert!(!state(&daemon, &vm).exists());
}

#[tokio::test]
async fn killed_swtpm_is_not_replaced_while_the_vm_runs() {
    let daemon = daemon().await;
    daemon.create(manifest(&daemon)).await.unwrap();
    let vm = daemon.start_vm("web").await.unwrap();
    let state = state(&daemon, &vm);
    let (pid, _) = served(&state).await;
    fs::remove_file(state.join("served")).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    until_gone(pid).await;
    assert_eq!(
        status(&daemon.get("web").await.unwrap()).phase(),
        VmPhase::Running
    );
    assert!(!state.join("served").exists());
    daemon.kill_vm("web").await.unwrap();
    daemon.start_vm("web").await.unwrap();
    assert_ne!(served(&state).await.0, pid);
}

#[tokio::test]
async fn clone_and_migrated_vm_have_a_state_of_their_own() {
    let pki = Pki::new("ca");
    let node = async || {
        let folder = temporary_folder();
        let extra = program(folder.path());
        node_in(folder, &pki, &extra).await
    };
    let (from, to) = (node().await, node().await);
    let vm = from.create(manifest(&from)).await.unwrap();
    from.start_vm("web").await.unwrap();
    from.snapshot("s", "web", true).await.unwrap();
    let other = from.restore("s", "other", false).await.unwrap();
    let (own, others) = (state(&from, &vm), state(&from, &other));
    assert!(own != others && own.exists() && others.exists());
    from.delete("other", true).await.unwrap();
    assert!(own.exists() && !others.exists());
    from.migrate("web", &to).await.unwrap();
    from.forgets("web").await;
    let moved = to.get("web").await.unwrap();
    assert!(state(&to, &moved).exists() && !own.exists());
}
