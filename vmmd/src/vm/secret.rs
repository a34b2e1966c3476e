//! What of a spec is nobody's business: shown as digests, and kept where a client sends the digest back.

use proto::{
    model::{Violations, image::checksum_text},
    v1,
};
use sha2::{Digest, Sha256};

/// "sha256:…" of a secret; empty of none.
fn digest_of(text: &str) -> String {
    match text {
        "" => String::new(),
        text => checksum_text(&Sha256::digest(text)),
    }
}

/// Puts digests in the place of secrets.
pub fn redact(spec: &mut v1::VmSpec) {
    if let Some(init) = &mut spec.cloud_init {
        for (digest, secret) in [
            (&mut init.user_data_digest, &mut init.user_data),
            (&mut init.password_hash_digest, &mut init.password_hash),
        ] {
            if !secret.is_empty() {
                *digest = digest_of(secret);
                secret.clear();
            }
        }
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
    for (field, digest, secret, known) in [
        (
            "userDataDigest",
            &mut init.user_data_digest,
            &mut init.user_data,
            &present.user_data,
        ),
        (
            "passwordHashDigest",
            &mut init.password_hash_digest,
            &mut init.password_hash,
            &present.password_hash,
        ),
    ] {
        if secret.is_empty() && !digest.is_empty() && *digest == digest_of(known) {
            secret.clone_from(known);
        }
        if *digest == digest_of(secret) {
            digest.clear();
        } else if !digest.is_empty() {
            let problem = "is not that of what the VM has: give the content itself";
            found.add(format_args!("spec.cloudInit.{field}"), problem);
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
