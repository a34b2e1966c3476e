//! Cloud-init data for a guest, hidden from all others.

use std::{fs, path::Path};

use rustix::process::Pid;
use tonic::{Code, Status};
use vmmd_api::v1;

use crate::{
    harness::{Daemon, refusal, status, vm_pid},
    update::request,
};

const USER_DATA: &str = "#cloud-config\nwrite_files: [{path: /secret, content: VERYSECRET}]\n";
const NETWORK: &str = "{version: 2, wifis: {w: {access-points: {a: {password: VERYSECRET}}}}}";
const HASH: &str = "$6$VERYSECRET$hash";

fn vm(daemon: &Daemon, name: &str) -> v1::Vm {
    let mut vm = daemon.manifest(name, "");
    let spec = vm.spec.get_or_insert_default();
    spec.cloud_init = Some(v1::CloudInit {
        user_data: USER_DATA.into(),
        password_hash: HASH.into(),
        network_config: NETWORK.into(),
        ssh_authorized_keys: vec!["ssh-ed25519 AAAA me".into()],
        ..Default::default()
    });
    vm
}

impl Daemon {
    /// Asks for this VM, as a client has it.
    async fn send(&self, vm: v1::Vm) -> Result<v1::Vm, Status> {
        let response = self.client().update_vm(request(vm)).await?;
        Ok(response.into_inner().vm.unwrap())
    }
}

/// The content of the seed that a `vmm` has open.
fn seed(pid: Pid) -> Option<Vec<u8>> {
    let folder = format!("/proc/{}/fd", pid.as_raw_nonzero());
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_seed = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memfd:cloud-init"))
    };
    entries
        .into_iter()
        .find(is_seed)
        .map(|path| fs::read(path).unwrap())
}

fn has(content: &[u8], words: &str) -> bool {
    content
        .windows(words.len())
        .any(|window| window == words.as_bytes())
}

/// Every file below a folder that has the secret: none, the store neither.
fn leaks(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let kind = fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_dir() {
            found.extend(leaks(&path));
        } else if kind.is_file() && has(&fs::read(&path).unwrap(), "VERYSECRET") {
            found.push(path.display().to_string());
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_gets_its_seed_and_nobody_is_shown_the_secrets() {
    let mut daemon = Daemon::with_log("").await;
    let made = daemon.create(vm(&daemon, "web")).await.unwrap();
    let init = made.spec.clone().unwrap().cloud_init.unwrap();
    assert_eq!((init.user_data.as_str(), init.password_hash.as_str()), ("", ""));
    assert_eq!(init.network_config, "");
    for digest in [
        &init.user_data_digest,
        &init.password_hash_digest,
        &init.network_config_digest,
    ] {
        // Without the node's key a guess of the secret cannot be tested.
        assert!(digest.starts_with("hmac-sha256:"), "{digest}");
    }
    let running = daemon.start_vm("web").await.unwrap();
    let before = seed(vm_pid(&running)).unwrap();
    assert!(
        has(&before, USER_DATA)
            && has(&before, HASH)
            && has(&before, NETWORK)
            && has(&before, "ssh-ed25519 AAAA me")
    );
    // The seed is no disk that clients deal with, and stays over a restart of the daemon.
    assert!(status(&running).disks.is_empty());
    daemon.kill_and_restart().await;
    daemon.wait_phase("web", v1::VmPhase::Running).await;
    let found = daemon.get("web").await.unwrap();
    assert_eq!(
        (vm_pid(&found), status(&found).disks.len()),
        (vm_pid(&running), 0)
    );
    assert!(seed(vm_pid(&running)).unwrap() == before);
    // A client that sends back the VM as shown changes nothing.
    let mut shown = daemon.get("web").await.unwrap();
    let generation = shown.metadata.clone().unwrap().generation;
    shown.status = None;
    let updated = daemon.send(shown.clone()).await.unwrap();
    assert_eq!(updated.metadata.unwrap().generation, generation);
    // Another digest is refused, and another hostname keeps the rest.
    let init = shown.spec.as_mut().unwrap().cloud_init.as_mut().unwrap();
    init.network_config_digest = format!("hmac-sha256:{}", "0".repeat(64));
    let refused = daemon.send(shown.clone()).await.unwrap_err();
    assert_eq!(refusal(&refused).0, Code::InvalidArgument);
    let init = shown.spec.as_mut().unwrap().cloud_init.as_mut().unwrap();
    init.network_config_digest = made.spec.unwrap().cloud_init.unwrap().network_config_digest;
    init.hostname = "other".into();
    daemon.send(shown).await.unwrap();
    let changes = daemon.get("web").await.unwrap().status.unwrap().pending_changes;
    assert_eq!(changes.len(), 1);
    assert!(!format!("{changes:?}").contains("VERYSECRET"));
    daemon.kill_vm("web").await.unwrap();
    let again = daemon.start_vm("web").await.unwrap();
    let after = seed(vm_pid(&again)).unwrap();
    assert!(has(&after, USER_DATA) && has(&after, "local-hostname: other\n"));
    assert_eq!(leaks(daemon.folder.path()), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_digest_without_its_content_makes_no_vm() {
    let daemon = Daemon::start().await;
    let mut vm = vm(&daemon, "web");
    let init = vm.spec.as_mut().unwrap().cloud_init.as_mut().unwrap();
    init.user_data.clear();
    init.user_data_digest = format!("sha256:{}", "0".repeat(64));
    let refused = daemon.create(vm).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn user_data_that_no_guest_knows_is_warned_of() {
    let daemon = Daemon::start().await;
    for (name, data, told) in [
        ("known", "#cloud-config\n", 0),
        ("blank", " #cloud-config\n", 1),
        ("mark", "\u{feff}#cloud-config\n", 2),
    ] {
        let vm = daemon.manifest_with(name, "", |spec| {
            spec.cloud_init = Some(v1::CloudInit {
                user_data: data.into(),
                ..Default::default()
            });
        });
        daemon.create(vm).await.unwrap();
        assert_eq!(daemon.events("UserDataUnknown").await.len(), told, "{name}");
    }
    let init = v1::CloudInit {
        user_data: "hostname: a\n".into(),
        ..Default::default()
    };
    daemon
        .change("known", |spec| spec.cloud_init = Some(init))
        .await
        .unwrap();
    assert_eq!(daemon.events("UserDataUnknown").await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_kept_and_shown_to_nobody() {
    let mut daemon = Daemon::with_log("").await;
    let mut vm = daemon.manifest("web", "");
    vm.spec.get_or_insert_default().credentials = vec![v1::Credential {
        name: "token".into(),
        value: "VERYSECRET".into(),
        ..Default::default()
    }];
    let made = daemon.create(vm).await.unwrap();
    let shown = made.spec.unwrap().credentials.remove(0);
    assert_eq!((shown.name.as_str(), shown.value.as_str()), ("token", ""));
    assert!(shown.value_digest.starts_with("hmac-sha256:"), "{shown:?}");
    daemon.start_vm("web").await.unwrap();
    daemon.kill_and_restart().await;
    daemon.wait_phase("web", v1::VmPhase::Running).await;
    // The VM as shown changes nothing; another value waits for the next start.
    let mut shown = daemon.get("web").await.unwrap();
    let generation = shown.metadata.clone().unwrap().generation;
    shown.status = None;
    let updated = daemon.send(shown.clone()).await.unwrap();
    assert_eq!(updated.metadata.unwrap().generation, generation);
    let credentials = &mut shown.spec.as_mut().unwrap().credentials;
    credentials[0].value = "VERYSECRET, too".into();
    credentials[0].value_digest.clear();
    daemon.send(shown).await.unwrap();
    let changes = daemon.get("web").await.unwrap().status.unwrap().pending_changes;
    assert_eq!(changes.len(), 1);
    let text = format!("{changes:?}");
    assert!(
        text.contains("hmac-sha256:") && !text.contains("VERYSECRET"),
        "{text}"
    );
    assert_eq!(leaks(daemon.folder.path()), Vec::<String>::new());
}
