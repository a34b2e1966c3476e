//! Passwords and SSH keys of a guest's users.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::Deserialize;
use serde_json::{Value, json};
use vmmd_api::v1;
use vmmd_host::{failure::Failure, text};

use super::{Agent, list::First};

/// Longest name of a user in bytes.
const USER: usize = 256;
/// Longest password in bytes.
const PASSWORD: usize = 1024;
/// Most keys of a request and of an answer, and the longest one in bytes.
const KEYS: usize = 64;
const KEY: usize = 8 << 10;

/// Answer to `guest-ssh-get-authorized-keys`.
#[derive(Deserialize)]
struct AuthorizedKeys {
    keys: First<String, KEYS>,
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
        let arguments = json!({
            "username": request.user,
            "password": BASE64.encode(password),
            "crypted": request.crypted,
        });
        let _nothing: Value = self.ask("guest-set-user-password", arguments).await?;
        Ok(())
    }

    /// The public keys that may log in as a user.
    pub async fn ssh_keys(&self, user: &str) -> Result<Vec<String>, Failure> {
        check_user(user)?;
        let question = json!({"username": user});
        let keys: AuthorizedKeys = self.ask("guest-ssh-get-authorized-keys", question).await?;
        let keys = keys.keys.items.iter();
        Ok(keys.map(|key| text::one_line(key, KEY)).collect())
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
        for (command, keys) in [
            ("guest-ssh-add-authorized-keys", &request.add),
            ("guest-ssh-remove-authorized-keys", &request.remove),
        ] {
            if !keys.is_empty() {
                let question = json!({"username": request.user, "keys": keys});
                let _nothing: Value = session.ask(command, question).await?;
            }
        }
        Ok(())
    }
}

fn check_user(user: &str) -> Result<(), Failure> {
    let is_odd = |letter: char| letter.is_control() || letter == ':' || letter == '/';
    if user.is_empty() || user.len() > USER || user.starts_with('-') || user.contains(is_odd) {
        return Err(Failure::field("user", "must be the name of a user of the guest"));
    }
    Ok(())
}

fn check_keys(field: &str, keys: &[String]) -> Result<(), Failure> {
    if keys.len() > KEYS {
        return Err(Failure::field(field, "must be at most 64 keys"));
    }
    let is_key = |key: &String| {
        (1..=KEY).contains(&key.len()) && !key.starts_with('#') && !key.chars().any(char::is_control)
    };
    match keys.iter().position(|key| !is_key(key)) {
        Some(index) => Err(Failure::field(
            &format!("{field}[{index}]"),
            "must be a line of at most 8 KiB as in authorized_keys",
        )),
        None => Ok(()),
    }
}
