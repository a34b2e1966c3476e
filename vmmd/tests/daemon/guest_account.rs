//! Passwords and SSH keys of users of guests.

use std::{
    fs,
    sync::{Arc, Mutex},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};
use tonic::{Code, Status};
use vmmd_api::v1;

use crate::{
    agent::{guest, refuse, reply},
    harness::{Daemon, assert_refused, assert_says},
};

impl Daemon {
    async fn set_password(&self, user: &str, password: &str, crypted: bool) -> Result<(), Status> {
        let request = v1::SetGuestPasswordRequest {
            name: "web".into(),
            user: user.into(),
            password: password.into(),
            crypted,
        };
        self.client().set_guest_password(request).await.map(drop)
    }

    async fn ssh_keys(&self, user: &str) -> Result<Vec<String>, Status> {
        let request = v1::ListGuestSshKeysRequest {
            name: "web".into(),
            user: user.into(),
        };
        Ok(self
            .client()
            .list_guest_ssh_keys(request)
            .await?
            .into_inner()
            .keys)
    }

    async fn change_ssh_keys(&self, user: &str, add: &[&str], remove: &[&str]) -> Result<(), Status> {
        let all = |keys: &[&str]| keys.iter().map(ToString::to_string).collect();
        let request = v1::UpdateGuestSshKeysRequest {
            name: "web".into(),
            user: user.into(),
            add: all(add),
            remove: all(remove),
        };
        self.client().update_guest_ssh_keys(request).await.map(drop)
    }
}

/// The questions of the daemon, except those at the beginning of a connection.
type Asked = Arc<Mutex<Vec<Value>>>;

fn noted(asked: &Asked) -> impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static {
    let asked = Arc::clone(asked);
    move |question| {
        asked.lock().unwrap().push(question.clone());
        reply(&json!({}))
    }
}

const SECRET: &str = "correct horse battery";

#[tokio::test]
async fn password_reaches_the_agent_and_no_log() {
    let daemon = Daemon::with_log("").await;
    let asked = Asked::default();
    guest(&daemon, noted(&asked)).await;
    daemon.set_password("root", SECRET, false).await.unwrap();
    daemon.set_password("ann", "$6$salt$hash", true).await.unwrap();
    let questions = asked.lock().unwrap().clone();
    for (question, (user, password, crypted)) in questions
        .iter()
        .zip([("root", SECRET, false), ("ann", "$6$salt$hash", true)])
    {
        assert_eq!(question["execute"], "guest-set-user-password");
        let arguments = &question["arguments"];
        assert_eq!(
            (&arguments["username"], &arguments["crypted"]),
            (&json!(user), &json!(crypted))
        );
        let sent = BASE64.decode(arguments["password"].as_str().unwrap()).unwrap();
        assert_eq!(sent, password.as_bytes());
    }
    let log = fs::read_to_string(daemon.path("log.txt")).unwrap();
    assert!(
        log.contains("SetGuestPassword") && !log.contains("horse"),
        "{log}"
    );
    assert!(!log.contains(&BASE64.encode(SECRET)));
}

#[tokio::test]
async fn wrong_users_passwords_and_keys_are_refused() {
    let daemon = Daemon::start().await;
    let asked = Asked::default();
    guest(&daemon, noted(&asked)).await;
    let long = "x".repeat(1025);
    for (user, password) in [
        ("", "p"),
        ("-x", "p"),
        ("a:b", "p"),
        ("root", ""),
        ("root", "a\nroot:b"),
        ("root", long.as_str()),
    ] {
        let refused = daemon.set_password(user, password, false).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(!refused.message().contains("a\nroot"), "{refused}");
    }
    let refused = daemon.set_password("root", "a:b", true).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let many = vec!["ssh-ed25519 A"; 65];
    for (add, remove) in [
        (&[][..], &[][..]),
        (&["a\nb"][..], &[][..]),
        (&[""][..], &[][..]),
        (&many[..], &[][..]),
        (&[][..], &["# x"][..]),
    ] {
        let refused = daemon.change_ssh_keys("root", add, remove).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    assert!(asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn ssh_keys_are_added_removed_and_listed() {
    let daemon = Daemon::start().await;
    let asked = Asked::default();
    let note = noted(&asked);
    guest(&daemon, move |question| {
        let answer = note(question);
        match question["execute"].as_str() {
            Some("guest-ssh-get-authorized-keys") => {
                let long = format!("ssh-ed25519 \u{1b}[2J{}", "x".repeat(10_000));
                let mut keys = vec![json!("ssh-ed25519 AAAA ann"), json!(long)];
                keys.extend(vec![json!("more"); 1000]);
                reply(&json!({"keys": keys}))
            }
            _ => answer,
        }
    })
    .await;
    daemon
        .change_ssh_keys("ann", &["new"], &["old", "older"])
        .await
        .unwrap();
    let questions: Vec<_> = asked.lock().unwrap().drain(..).collect();
    assert_eq!(
        questions,
        [
            json!({"execute": "guest-ssh-add-authorized-keys", "arguments": {"username": "ann", "keys": ["new"]}}),
            json!({"execute": "guest-ssh-remove-authorized-keys",
                   "arguments": {"username": "ann", "keys": ["old", "older"]}}),
        ]
    );
    let keys = daemon.ssh_keys("ann").await.unwrap();
    assert_eq!((keys[0].as_str(), keys.len()), ("ssh-ed25519 AAAA ann", 64));
    assert!(keys[1].len() == 8192 && !keys[1].contains(char::is_control));
}

#[tokio::test]
async fn agent_without_the_command_is_named() {
    let daemon = Daemon::start().await;
    guest(&daemon, |question| match question["execute"].as_str().unwrap() {
        "guest-set-user-password" => refuse(
            "GenericError",
            "Command guest-set-user-password has been disabled: the command is not allowed",
        ),
        word => refuse(
            "CommandNotFound",
            &format!("The command {word} has not been found"),
        ),
    })
    .await;
    let refused = daemon.set_password("root", "p", false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "GUEST_AGENT_UNSUPPORTED");
    let refused = daemon.ssh_keys("root").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "GUEST_AGENT_UNSUPPORTED");
    assert_says(&refused, "update qemu-guest-agent");
}
