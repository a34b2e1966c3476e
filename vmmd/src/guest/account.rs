//! Passwords and SSH keys of a guest's users.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::Deserialize;
use serde_json::{Value, json};
use vmmd_api::v1;
use vmmd_host::{failure::Failure, text};
use vmmd_spec::access::{self, AccessCredential, MAX_KEY, MAX_KEYS};
use vmmd_store::AccessKeysRecord;

use super::{Agent, Session, list::First};

/// Longest password in bytes.
const PASSWORD: usize = 1024;
/// Text of the agent's refusal for a user that the guest does not have.
const NO_USER: &str = "failed to lookup user";

/// Answer to `guest-ssh-get-authorized-keys`.
#[derive(Deserialize)]
struct AuthorizedKeys {
    keys: First<String, MAX_KEYS>,
}

impl Agent<'_> {
    /// Sets the password of a user.
    pub async fn set_password(&self, request: &v1::SetGuestPasswordRequest) -> Result<(), Failure> {
        check_user(&request.user)?;
        let password = &request.password;
        if password.is_empty() || password.len() > PASSWORD || password.chars().any(char::is_control) {
            return Err(Failure::field(
                "password",
                "must be 1 to 1,024 bytes without control characters",
            ));
        }
        if request.crypted && password.contains(':') {
            return Err(Failure::field("password", "must be a hash as in /etc/shadow"));
        }
        let mut session = self.session().await?;
        set_password(&mut session, &request.user, password, request.crypted).await
    }

    /// The public keys that may log in as a user.
    pub async fn ssh_keys(&self, user: &str) -> Result<Vec<String>, Failure> {
        check_user(user)?;
        let question = json!({"username": user});
        let keys: AuthorizedKeys = self.ask("guest-ssh-get-authorized-keys", question).await?;
        let keys = keys.keys.items.iter();
        Ok(keys.map(|key| text::one_line(key, MAX_KEY)).collect())
    }

    /// Adds public keys of a user, and removes others.
    pub async fn change_ssh_keys(&self, request: &v1::UpdateGuestSshKeysRequest) -> Result<(), Failure> {
        check_user(&request.user)?;
        check_keys("add", &request.add)?;
        check_keys("remove", &request.remove)?;
        if request.add.is_empty() && request.remove.is_empty() {
            return Err(Failure::field("add", "must have a key, or `remove` must"));
        }
        let mut session = self.session().await?;
        change_keys(&mut session, ADD, &request.user, &request.add).await?;
        change_keys(&mut session, REMOVE, &request.user, &request.remove).await
    }

    /// Gives `users` their passwords and keys, and takes the keys of `noted` that they do not have. The
    /// failure of a user does not prevent the others.
    pub async fn set_access(
        &self,
        users: &[AccessCredential],
        noted: &[AccessKeysRecord],
    ) -> Result<(), Failure> {
        let mut session = self.session().await?;
        let mut result = Ok(());
        let mut note = |user: &str, done: Result<(), Failure>| {
            let Err(mut failure) = done else {
                return Ok(());
            };
            if failure.reason == "GUEST_AGENT_SILENT" {
                return Err(failure);
            }
            failure.message = format!("user \"{user}\": {}", failure.message);
            if result.is_ok() {
                result = Err(failure);
            }
            Ok(())
        };
        for user in users {
            let added = change_keys(&mut session, ADD, &user.name, &user.ssh_authorized_keys).await;
            note(&user.name, added)?;
            if !user.password_hash.is_empty() {
                let set = set_password(&mut session, &user.name, &user.password_hash, true).await;
                note(&user.name, set)?;
            }
        }
        for noted in noted {
            let user = users.iter().find(|user| user.name == noted.user);
            let has = |key: &String| user.is_some_and(|user| user.ssh_authorized_keys.contains(key));
            let gone: Vec<_> = noted.keys.iter().filter(|key| !has(key)).cloned().collect();
            let removed = change_keys(&mut session, REMOVE, &noted.user, &gone).await;
            // The user has gone, and its keys with it.
            let is_gone = |failure: &Failure| user.is_none() && failure.message.contains(NO_USER);
            note(
                &noted.user,
                removed.or_else(|failure| if is_gone(&failure) { Ok(()) } else { Err(failure) }),
            )?;
        }
        result
    }
}

/// Commands of the agent that change the keys of a user.
const ADD: &str = "guest-ssh-add-authorized-keys";
const REMOVE: &str = "guest-ssh-remove-authorized-keys";

async fn change_keys(
    session: &mut Session,
    command: &str,
    user: &str,
    keys: &[String],
) -> Result<(), Failure> {
    if keys.is_empty() {
        return Ok(());
    }
    let question = json!({"username": user, "keys": keys});
    session.ask::<Value>(command, question).await.map(drop)
}

async fn set_password(
    session: &mut Session,
    user: &str,
    password: &str,
    crypted: bool,
) -> Result<(), Failure> {
    let arguments = json!({
        "username": user,
        "password": BASE64.encode(password),
        "crypted": crypted,
    });
    session
        .ask::<Value>("guest-set-user-password", arguments)
        .await
        .map(drop)
}

fn check_user(user: &str) -> Result<(), Failure> {
    match access::is_user(user) {
        true => Ok(()),
        false => Err(Failure::field("user", "must be the name of a user of the guest")),
    }
}

fn check_keys(field: &str, keys: &[String]) -> Result<(), Failure> {
    if keys.len() > MAX_KEYS {
        return Err(Failure::field(field, "must be at most 64 keys"));
    }
    match keys.iter().position(|key| !access::is_key(key)) {
        Some(index) => Err(Failure::field(&format!("{field}[{index}]"), access::KEY)),
        None => Ok(()),
    }
}
