//! Passwords and SSH keys that the daemon keeps in step in guests: `spec.accessCredentials`.

use std::{
    fs,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};
use vmmd_api::v1::{self, ConditionStatus, VmStatus};

use crate::{
    agent::{QemuAgent, about, guest_with, refuse, reply},
    harness::Daemon,
    policies,
    verbs::condition,
};

fn user(name: &str, keys: &[&str], password_hash: &str) -> v1::AccessCredential {
    v1::AccessCredential {
        name: name.into(),
        ssh_authorized_keys: keys.iter().map(ToString::to_string).collect(),
        password_hash: password_hash.into(),
        ..Default::default()
    }
}

fn state(status: &VmStatus) -> (ConditionStatus, &str) {
    let condition = condition(status, "AccessCredentialsSynchronized");
    (condition.status(), condition.reason.as_str())
}

fn is_set(status: &VmStatus) -> bool {
    state(status) == (ConditionStatus::True, "Synchronized")
}

/// A program of the guest opens the channel of the agent, or closes it.
async fn agent(daemon: &Daemon, word: &str) {
    policies::end(daemon, &daemon.get("web").await.unwrap(), word);
}

/// The questions about users since the last call: the command, the user, and keys or the password.
type Asked = Arc<Mutex<Vec<(String, Value, Value)>>>;

fn take(asked: &Asked) -> Vec<(String, Value, Value)> {
    std::mem::take(&mut asked.lock().unwrap())
}

fn question(command: &str, user: &str, what: Value) -> (String, Value, Value) {
    (command.to_owned(), user.into(), what)
}

/// An agent that refuses while `refuses` is set.
fn answering(asked: &Asked, refuses: &Arc<AtomicBool>) -> impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static {
    let (asked, refuses) = (Arc::clone(asked), Arc::clone(refuses));
    move |question| {
        let command = question["execute"].as_str().unwrap();
        let arguments = &question["arguments"];
        if command == "guest-info" {
            return about(&[]);
        }
        let what = arguments.get("keys").unwrap_or(&arguments["password"]).clone();
        let asking = (command.to_owned(), arguments["username"].clone(), what);
        asked.lock().unwrap().push(asking);
        match refuses.load(Ordering::SeqCst) {
            true => refuse("GenericError", "failed to lookup user 'ann': Success"),
            false => reply(&json!({})),
        }
    }
}

const ADD: &str = "guest-ssh-add-authorized-keys";
const REMOVE: &str = "guest-ssh-remove-authorized-keys";

#[tokio::test]
async fn users_are_set_when_the_agent_opens_and_after_changes() {
    let mut daemon = Daemon::with_log("").await;
    let (asked, refuses) = (Asked::default(), Arc::default());
    let users = |spec: &mut v1::VmSpec| {
        spec.access_credentials = vec![
            user("root", &["A", "B"], "$6$salt$SECRET"),
            user("ann", &["C"], ""),
        ];
    };
    guest_with(&daemon, users, answering(&asked, &refuses)).await;
    let vm = daemon.get("web").await.unwrap();
    assert_eq!(
        state(vm.status.as_ref().unwrap()),
        (ConditionStatus::False, "AgentNotConnected")
    );
    assert!(!format!("{vm:?}").contains("SECRET"));
    agent(&daemon, "open").await;
    daemon.wait("web", is_set).await;
    let set = [
        question(ADD, "root", json!(["A", "B"])),
        question(
            "guest-set-user-password",
            "root",
            BASE64.encode("$6$salt$SECRET").into(),
        ),
        question(ADD, "ann", json!(["C"])),
    ];
    assert_eq!(take(&asked), set);

    // A key that leaves the spec leaves the guest, also after a restart of the daemon in between.
    daemon.kill_and_restart().await;
    daemon.wait("web", is_set).await;
    assert_eq!(take(&asked), set);
    let changed = daemon
        .change("web", |spec| {
            spec.access_credentials[0].ssh_authorized_keys = vec!["B".into()];
            spec.access_credentials.truncate(1);
        })
        .await
        .unwrap();
    let restart = condition(changed.status.as_ref().unwrap(), "RestartRequired");
    assert_eq!(restart.status(), ConditionStatus::False);
    daemon.wait("web", is_set).await;
    let removed = take(&asked).split_off(2);
    let gone = [
        question(REMOVE, "root", json!(["A"])),
        question(REMOVE, "ann", json!(["C"])),
    ];
    assert_eq!(removed, gone);

    daemon
        .change("web", |spec| spec.access_credentials.clear())
        .await
        .unwrap();
    let is_over = |status: &VmStatus| {
        let mut conditions = status.conditions.iter();
        conditions.all(|it| it.r#type != "AccessCredentialsSynchronized")
    };
    daemon.wait("web", is_over).await;
    assert_eq!(take(&asked), [question(REMOVE, "root", json!(["B"]))]);
    let log = fs::read_to_string(daemon.path("log.txt")).unwrap();
    assert!(!log.contains("SECRET"), "{log}");
}

#[tokio::test]
async fn refused_users_are_named_and_set_later() {
    let daemon = Daemon::start().await;
    let (asked, refuses) = (Asked::default(), Arc::new(AtomicBool::new(true)));
    let users = |spec: &mut v1::VmSpec| spec.access_credentials = vec![user("ann", &["C"], "")];
    guest_with(&daemon, users, answering(&asked, &refuses)).await;
    agent(&daemon, "open").await;
    let failed = daemon
        .wait("web", |status| {
            state(status) == (ConditionStatus::False, "Failed")
        })
        .await;
    let message = &condition(&failed, "AccessCredentialsSynchronized").message;
    assert!(
        message.contains("user \"ann\"") && message.contains("lookup"),
        "{message}"
    );
    refuses.store(false, Ordering::SeqCst);
    daemon.wait("web", is_set).await;
    // The keys of a user that the guest does not have any more are gone too.
    refuses.store(true, Ordering::SeqCst);
    daemon
        .change("web", |spec| spec.access_credentials.clear())
        .await
        .unwrap();
    let vm = daemon.get("web").await.unwrap();
    let is_over = |status: &VmStatus| {
        let mut conditions = status.conditions.iter();
        conditions.all(|it| it.r#type != "AccessCredentialsSynchronized")
    };
    if !is_over(vm.status.as_ref().unwrap()) {
        daemon.wait("web", is_over).await;
    }
}

#[tokio::test]
async fn keys_of_others_stay_in_the_file_of_a_real_agent() {
    let daemon = Daemon::start().await;
    let home = daemon.path("home");
    fs::create_dir_all(home.join(".ssh")).unwrap();
    let file = home.join(".ssh/authorized_keys");
    fs::write(&file, "# by hand\nssh-ed25519 HAND admin\n").unwrap();
    let keys = ["ssh-ed25519 ONE a", "ssh-ed25519 TWO b"];
    let users = |spec: &mut v1::VmSpec| spec.access_credentials = vec![user("guest", &keys, "")];
    let _agent = QemuAgent::start_with_user(&daemon, &home, users).await;
    agent(&daemon, "open").await;
    daemon.wait("web", is_set).await;
    let read = || fs::read_to_string(&file).unwrap();
    let all = read();
    assert!(
        ["HAND", "ONE", "TWO"].iter().all(|key| all.contains(key)),
        "{all}"
    );
    daemon
        .change("web", |spec| {
            spec.access_credentials[0].ssh_authorized_keys.remove(0);
        })
        .await
        .unwrap();
    daemon.wait("web", is_set).await;
    let rest = read();
    assert!(!rest.contains("ONE"), "{rest}");
    assert!(
        ["# by hand", "HAND", "TWO"]
            .iter()
            .all(|line| rest.contains(line)),
        "{rest}"
    );
}
