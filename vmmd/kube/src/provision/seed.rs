//! The guest's cloud-init settings that are in Secrets and ConfigMaps.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use vmmd_api::v1;

use super::{Error, Kind, Lack, Objects};
use crate::sources::{CloudInitFrom, Sources, ValueFrom};

/// Reads all values that `from` names into the VM. Adds missing ones to `lacks`.
///
/// # Errors
///
/// A failure of a query.
pub async fn fill(
    objects: &impl Objects,
    from: &CloudInitFrom,
    vm: &mut v1::Vm,
    lacks: &mut Vec<Lack>,
) -> Result<(), Error> {
    let mut known = BTreeMap::new();
    let mut values = Vec::new();
    let single = from.single().into_iter();
    let single = single.filter_map(|(field, value)| Some((field, value?)));
    let keys = from.ssh_authorized_keys.iter();
    for (field, value) in single.chain(keys.map(|value| ("sshAuthorizedKeys", value))) {
        let (kind, reference) = match value {
            ValueFrom {
                secret_key_ref: Some(reference),
                ..
            } => (Kind::Secret, reference),
            ValueFrom {
                config_map_key_ref: Some(reference),
                ..
            } => (Kind::ConfigMap, reference),
            _ => continue,
        };
        let object = (kind, reference.name.clone());
        if !known.contains_key(&object) {
            let data = objects.data(kind, &reference.name).await?;
            known.insert(object.clone(), data);
        }
        match known.get(&object) {
            Some(Ok(data)) => match data.get(&reference.key) {
                Some(value) => values.push((field, value.clone())),
                None => lacks.push(Lack::new(
                    "KeyNotFound",
                    format!(
                        "{kind:?} {} has no key {}, which spec.cloudInitFrom.{field} names",
                        reference.name, reference.key
                    ),
                )),
            },
            Some(Err(lack)) if !lacks.contains(lack) => lacks.push(lack.clone()),
            _ => {}
        }
    }
    if let Some(spec) = &mut vm.spec {
        let seed = spec.cloud_init.get_or_insert_default();
        for (field, value) in values {
            if let Err(lack) = set(seed, field, value) {
                lacks.push(lack);
            }
        }
    }
    Ok(())
}

/// Sets a field of the seed.
fn set(seed: &mut v1::CloudInit, field: &str, value: Vec<u8>) -> Result<(), Lack> {
    let text = match String::from_utf8(value) {
        Ok(text) => text,
        Err(error) if field == "userData" => {
            let coded = serde_json::to_value(ByteString(error.into_bytes())).unwrap_or_default();
            coded
                .as_str()
                .unwrap_or_default()
                .clone_into(&mut seed.user_data_base64);
            return Ok(());
        }
        Err(_) => {
            let message = format!("the value that spec.cloudInitFrom.{field} names is no text");
            return Err(Lack::new("InvalidValue", message));
        }
    };
    match field {
        "userData" => seed.user_data = text,
        "networkConfig" => seed.network_config = text,
        "passwordHash" => text.trim().clone_into(&mut seed.password_hash),
        _ => {
            let lines = text.lines().map(str::trim);
            let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
            seed.ssh_authorized_keys.extend(keys.map(str::to_owned));
        }
    }
    Ok(())
}

/// Translates vmmd's message about the VM to the field names of the VirtualMachine.
pub fn as_given(mut message: String, sources: &Sources) -> String {
    let Some(from) = &sources.cloud_init_from else {
        return message;
    };
    for (field, value) in from.single() {
        if value.is_some() {
            for own in [format!("{field}Base64"), field.to_owned()] {
                let path = format!("spec.vm.cloudInit.{own}:");
                message = message.replace(&path, &format!("spec.cloudInitFrom.{field}:"));
            }
        }
    }
    if !from.ssh_authorized_keys.is_empty() {
        message = message.replace(
            "spec.vm.cloudInit.sshAuthorizedKeys[",
            "spec.vm.cloudInit and spec.cloudInitFrom, sshAuthorizedKeys[",
        );
    }
    message
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_go_where_vmmd_wants_them() {
        let mut seed = v1::CloudInit::default();
        set(&mut seed, "userData", b"#cloud-config\n".to_vec()).unwrap();
        set(&mut seed, "passwordHash", b"$6$salt$hash\n".to_vec()).unwrap();
        set(&mut seed, "networkConfig", b"version: 2\n".to_vec()).unwrap();
        let keys = b"# the team\nssh-ed25519 AAAA one\n\n ssh-ed25519 BBBB two \r\n";
        set(&mut seed, "sshAuthorizedKeys", keys.to_vec()).unwrap();
        let wanted = v1::CloudInit {
            user_data: "#cloud-config\n".to_owned(),
            password_hash: "$6$salt$hash".to_owned(),
            network_config: "version: 2\n".to_owned(),
            ssh_authorized_keys: vec![
                "ssh-ed25519 AAAA one".to_owned(),
                "ssh-ed25519 BBBB two".to_owned(),
            ],
            ..v1::CloudInit::default()
        };
        assert_eq!(seed, wanted);
        let mut packed = v1::CloudInit::default();
        set(&mut packed, "userData", vec![0x1f, 0x8b, 0xff]).unwrap();
        assert_eq!((&*packed.user_data, &*packed.user_data_base64), ("", "H4v/"));
        let lack = set(&mut packed, "passwordHash", vec![0xff]).unwrap_err();
        assert_eq!(lack.reason, "InvalidValue");
    }

    #[test]
    fn what_vmmd_refuses_is_said_of_the_field_that_was_given() {
        let sources: Sources = serde_json::from_value(json!({"cloudInitFrom": {
            "passwordHash": {"secretKeyRef": {"name": "web", "key": "hash"}},
        }}))
        .unwrap();
        let text =
            "spec.vm.cloudInit.passwordHash: must be a hash; spec.vm.cloudInit.hostname: must be short";
        assert_eq!(
            as_given(text.to_owned(), &sources),
            "spec.cloudInitFrom.passwordHash: must be a hash; spec.vm.cloudInit.hostname: must be short"
        );
    }
}
