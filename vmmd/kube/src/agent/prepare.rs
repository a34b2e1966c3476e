//! Fills in the parts of a pod's VM that come from the cluster (see [`crate::sources`]): reads
//! Secrets, ConfigMaps and claims by name, and has disks created.
//!
//! The values are in the request to vmmd alone. Statuses, events and logs name objects and keys,
//! never values.

use std::collections::BTreeMap;

use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret},
};
use kube::{Api, ResourceExt as _};
use tonic::Status;
use vmmd_api::v1::{self, disk_spec};

use super::work::{Error, Worker};
use crate::sources::{self, CloudInitFrom, Place, Sources, ValueFrom};

/// Reason why a VM cannot be created yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// One CamelCase word.
    pub reason: &'static str,
    /// The same for people.
    pub message: String,
}

impl Lack {
    /// With these words.
    pub fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }
}

/// Result of the preparation.
pub enum Prepared {
    /// The VM, whole.
    Ready(Box<v1::Vm>),
    /// Something is not there yet. At least one.
    Lacks(Vec<Lack>),
    /// vmmd has refused to make a disk for a volume.
    Refused {
        /// The volume's name.
        volume: String,
        /// How.
        status: Box<Status>,
    },
}

/// Data of a Secret or a ConfigMap.
pub type Data = BTreeMap<String, Vec<u8>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Secret,
    ConfigMap,
}

impl Worker {
    /// Prepares the VM of an admitted pod.
    pub async fn prepare(&self, pod: &Pod, mut vm: v1::Vm, sources: &Sources) -> Result<Prepared, Error> {
        let namespace = pod.namespace().unwrap_or_default();
        let mut lacks = Vec::new();
        if let Some(from) = &sources.cloud_init_from {
            self.read_cloud_init(&namespace, from, &mut vm, &mut lacks)
                .await?;
        }
        for volume in &sources.volumes {
            let Some(claim) = &volume.persistent_volume_claim else {
                continue;
            };
            let spec = vm.spec.as_ref();
            let share = spec.is_some_and(|spec| spec.shares.iter().any(|share| share.name == volume.name));
            match self.claimed(&namespace, &claim.claim_name, share).await? {
                Ok(place) => {
                    let place = Place {
                        read_only: claim.read_only,
                        ..place
                    };
                    sources::fill(&mut vm, &volume.name, &place);
                }
                Err(lack) => lacks.push(lack),
            }
        }
        // Disks are made last: until then nothing has been done.
        if !lacks.is_empty() {
            return Ok(Prepared::Lacks(lacks));
        }
        for volume in &sources.volumes {
            if volume.persistent_volume_claim.is_some() {
                continue;
            }
            match self.disk(pod, volume, &sources.image_pull_secrets).await? {
                Ok(name) => {
                    let place = Place::of(disk_spec::Source::Disk(name));
                    sources::fill(&mut vm, &volume.name, &place);
                }
                Err(super::disks::NoDisk::Lacks(lack)) => lacks.push(lack),
                Err(super::disks::NoDisk::Refused(status)) => {
                    let volume = volume.name.clone();
                    return Ok(Prepared::Refused { volume, status });
                }
            }
        }
        if lacks.is_empty() {
            Ok(Prepared::Ready(Box::new(vm)))
        } else {
            Ok(Prepared::Lacks(lacks))
        }
    }

    async fn read_cloud_init(
        &self,
        namespace: &str,
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
                let data = self.data(namespace, kind, &reference.name).await?;
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

    async fn data(&self, namespace: &str, kind: Kind, name: &str) -> Result<Result<Data, Lack>, Error> {
        match kind {
            Kind::Secret => self.secret(namespace, name).await,
            Kind::ConfigMap => {
                let maps = Api::<ConfigMap>::namespaced(self.client.clone(), namespace);
                let found = readable(maps.get_opt(name).await, "ConfigMap", namespace, name)?;
                Ok(found.map(|map| {
                    let text = map.data.unwrap_or_default().into_iter();
                    let bytes = map.binary_data.unwrap_or_default().into_iter();
                    text.map(|(key, value)| (key, value.into_bytes()))
                        .chain(bytes.map(|(key, value)| (key, value.0)))
                        .collect()
                }))
            }
        }
    }

    /// The data of a Secret.
    pub async fn secret(&self, namespace: &str, name: &str) -> Result<Result<Data, Lack>, Error> {
        let secrets = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let found = readable(secrets.get_opt(name).await, "Secret", namespace, name)?;
        Ok(found.map(|secret| {
            let data = secret.data.unwrap_or_default().into_iter();
            data.map(|(key, value)| (key, value.0)).collect()
        }))
    }

    /// Volume of a claim on this node: a file, a block device, or a directory for a share.
    async fn claimed(&self, namespace: &str, name: &str, share: bool) -> Result<Result<Place, Lack>, Error> {
        let claims = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), namespace);
        let Some(claim) = claims.get_opt(name).await? else {
            let message = format!("there is no PersistentVolumeClaim {name}");
            return Ok(Err(Lack::new("ClaimNotFound", message)));
        };
        let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
        let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
        let (Some("Bound"), Some(volume)) = (phase, volume) else {
            return Ok(Err(unbound(name)));
        };
        let volumes = Api::<PersistentVolume>::all(self.client.clone());
        let Some(found) = volumes.get_opt(&volume).await? else {
            let message =
                format!("there is no PersistentVolume {volume}, to which the claim {name} is bound");
            return Ok(Err(Lack::new("VolumeNotFound", message)));
        };
        Ok(place(&found, &claim, share))
    }
}

/// An object that is not there, or may not be read, is a lack; all else that goes wrong is tried again.
fn readable<T>(
    found: kube::Result<Option<T>>,
    kind: &str,
    namespace: &str,
    name: &str,
) -> Result<Result<T, Lack>, Error> {
    match found {
        Ok(Some(object)) => Ok(Ok(object)),
        Ok(None) => {
            let reason = if kind == "Secret" {
                "SecretNotFound"
            } else {
                "ConfigMapNotFound"
            };
            Ok(Err(Lack::new(reason, format!("there is no {kind} {name}"))))
        }
        Err(kube::Error::Api(status)) if status.code == 403 => {
            let message = format!(
                "the agent may not read {kind} {name}: bind the ClusterRole vmmd-kube-agent-reads in namespace {namespace}"
            );
            Ok(Err(Lack::new("MayNotRead", message)))
        }
        Err(error) => Err(error.into()),
    }
}

fn unbound(claim: &str) -> Lack {
    let message = format!("the PersistentVolumeClaim {claim} is not bound to a volume");
    Lack::new("ClaimNotBound", message)
}

/// Where the volume of a claim is. The administrator chooses the path of a volume; the users of the volume make the files in it.
fn place(volume: &PersistentVolume, claim: &PersistentVolumeClaim, share: bool) -> Result<Place, Lack> {
    let (name, claim_name) = (volume.name_any(), claim.name_any());
    let spec = volume.spec.clone().unwrap_or_default();
    // Both have to say so.
    let owner = spec.claim_ref.and_then(|owner| owner.uid);
    if owner.is_none() || owner != claim.uid() {
        return Err(unbound(&claim_name));
    }
    let local = spec.local.map(|local| local.path);
    let Some(path) = local.or_else(|| spec.host_path.map(|host| host.path)) else {
        let message = format!(
            "the PersistentVolume {name} of claim {claim_name} is neither a local nor a hostPath volume"
        );
        return Err(Lack::new("UnsupportedVolume", message));
    };
    match (spec.volume_mode.as_deref(), share) {
        (Some("Block"), true) => {
            let message = format!(
                "the PersistentVolume {name} of claim {claim_name} is a block device, and can't be a share"
            );
            Err(Lack::new("UnsupportedVolume", message))
        }
        (Some("Block"), false) | (_, true) => Ok(Place::of(disk_spec::Source::Path(path))),
        (_, false) => {
            let file = format!("{}/disk.img", path.trim_end_matches('/'));
            Ok(Place {
                source: disk_spec::Source::Path(file),
                beneath: path,
                read_only: false,
            })
        }
    }
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
    use serde_json::{Value, json};

    use super::*;

    fn volume(change: impl FnOnce(&mut Value)) -> PersistentVolume {
        let mut value = json!({
            "metadata": {"name": "pv-1"},
            "spec": {"local": {"path": "/srv/volumes/1"}, "claimRef": {"uid": "c-1"}},
        });
        change(&mut value["spec"]);
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_volume_is_a_file_a_device_or_a_directory() {
        let claim: PersistentVolumeClaim =
            serde_json::from_value(json!({"metadata": {"name": "data", "uid": "c-1"}})).unwrap();
        type Change = fn(&mut Value);
        let block: Change = |spec| spec["volumeMode"] = "Block".into();
        let host: Change = |spec| {
            spec["hostPath"] = json!({"path": "/dev/vg/data"});
            spec["local"] = Value::Null;
            spec["volumeMode"] = "Block".into();
        };
        type Wanted = Result<(&'static str, &'static str), &'static str>;
        let table: [(Change, bool, Wanted); 8] = [
            (|_| {}, false, Ok(("/srv/volumes/1/disk.img", "/srv/volumes/1"))),
            (
                |spec| spec["local"]["path"] = "/srv/".into(),
                false,
                Ok(("/srv/disk.img", "/srv/")),
            ),
            (|_| {}, true, Ok(("/srv/volumes/1", ""))),
            (block, false, Ok(("/srv/volumes/1", ""))),
            (host, false, Ok(("/dev/vg/data", ""))),
            (block, true, Err("UnsupportedVolume")),
            (
                |spec| spec["local"] = Value::Null,
                false,
                Err("UnsupportedVolume"),
            ),
            (
                |spec| spec["claimRef"]["uid"] = "c-2".into(),
                false,
                Err("ClaimNotBound"),
            ),
        ];
        for (index, (change, share, wanted)) in table.into_iter().enumerate() {
            let found = place(&volume(change), &claim, share);
            let found = found.map_err(|lack| lack.reason);
            let wanted = wanted.map(|(path, beneath)| Place {
                beneath: beneath.to_owned(),
                ..Place::of(disk_spec::Source::Path(path.to_owned()))
            });
            assert_eq!(found, wanted, "{index}");
        }
    }

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
