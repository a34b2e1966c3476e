//! What of a spec is nobody's business: shown as digests, and kept where a client sends the digest back.

use proto::{
    model::{Violations, cloud_init::user_data, image::checksum_text},
    v1,
};
use sha2::{Digest, Sha256};

/// "sha256:…" of a secret; empty of none.
fn digest_of(secret: &[u8]) -> String {
    match secret {
        [] => String::new(),
        secret => checksum_text(&Sha256::digest(secret)),
    }
}

/// "sha256:…" of the user data as the guest gets it. What can't be decoded is refused by whoever validates it.
fn of_user_data(init: &v1::CloudInit) -> String {
    digest_of(&user_data(init).unwrap_or_default())
}

/// Puts digests in the place of secrets.
pub fn redact(spec: &mut v1::VmSpec) {
    let Some(init) = &mut spec.cloud_init else {
        return;
    };
    if !init.user_data.is_empty() || !init.user_data_base64.is_empty() {
        init.user_data_digest = of_user_data(init);
        init.user_data.clear();
        init.user_data_base64.clear();
    }
    if !init.password_hash.is_empty() {
        init.password_hash_digest = digest_of(init.password_hash.as_bytes());
        init.password_hash.clear();
    }
}

/// Puts the secrets of `present` back where `spec` has their digests, and takes the digests away.
///
/// # Errors
///
/// Digests of something else.
pub fn restore(spec: &mut v1::VmSpec, present: Option<&v1::CloudInit>) -> Result<(), Violations> {
    let mut found = Violations::default();
    let Some(init) = &mut spec.cloud_init else {
        return Ok(());
    };
    let none = v1::CloudInit::default();
    let present = present.unwrap_or(&none);
    let mut refuse = |field: &str| {
        let problem = "is not that of what the VM has: give the content itself";
        found.add(format_args!("spec.cloudInit.{field}"), problem);
    };
    let digest = std::mem::take(&mut init.user_data_digest);
    if !digest.is_empty() {
        if init.user_data.is_empty() && init.user_data_base64.is_empty() && digest == of_user_data(present) {
            init.user_data.clone_from(&present.user_data);
            init.user_data_base64.clone_from(&present.user_data_base64);
        }
        if digest != of_user_data(init) {
            refuse("userDataDigest");
        }
    }
    let digest = std::mem::take(&mut init.password_hash_digest);
    if !digest.is_empty() {
        if init.password_hash.is_empty() && digest == digest_of(present.password_hash.as_bytes()) {
            init.password_hash.clone_from(&present.password_hash);
        }
        if digest != digest_of(init.password_hash.as_bytes()) {
            refuse("passwordHashDigest");
        }
    }
    found.or(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(init: v1::CloudInit) -> v1::VmSpec {
        v1::VmSpec {
            cloud_init: Some(init),
            ..Default::default()
        }
    }

    #[test]
    fn secrets_are_shown_as_digests_and_come_back_by_them() {
        let whole = spec(v1::CloudInit {
            user_data: "#cloud-config\n".into(),
            password_hash: "$6$a$b".into(),
            hostname: "web".into(),
            ..Default::default()
        });
        let mut shown = whole.clone();
        redact(&mut shown);
        let text = format!("{shown:?}");
        assert!(!text.contains("#cloud-config") && !text.contains("$6$") && text.contains("web"));
        let mut back = shown.clone();
        restore(&mut back, whole.cloud_init.as_ref()).unwrap();
        assert_eq!(back, whole);
        // Of something else they are refused.
        let found = restore(&mut shown, None).unwrap_err();
        let fields: Vec<_> = found.0.iter().map(|wrong| wrong.field.as_str()).collect();
        assert_eq!(
            fields,
            [
                "spec.cloudInit.userDataDigest",
                "spec.cloudInit.passwordHashDigest"
            ]
        );
        // New content replaces what was there.
        let mut new = spec(v1::CloudInit {
            user_data: "#!/bin/sh\n".into(),
            ..Default::default()
        });
        restore(&mut new, whole.cloud_init.as_ref()).unwrap();
        assert_eq!(new.cloud_init.unwrap().user_data, "#!/bin/sh\n");
    }
}
