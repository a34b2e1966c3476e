//! Fills in the parts of a pod's VM that come from the cluster: reads Secrets, ConfigMaps and claims
//! by name, and has disks created.

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret};
use kube::{Api, Client, ResourceExt as _};
use vmmd_api::v1::{self, disk_spec};

use super::{step, work::Worker};
use crate::{
    provision::{Data, Error, Kind, Lack, Objects, Prepared, seed},
    sources::{self, Place, Sources},
};

/// Secrets and ConfigMaps of a namespace, read from the API server.
struct InNamespace<'a> {
    client: Client,
    namespace: &'a str,
}

impl Objects for InNamespace<'_> {
    async fn data(&self, kind: Kind, name: &str) -> Result<Result<Data, Lack>, Error> {
        let (client, namespace) = (self.client.clone(), self.namespace);
        match kind {
            Kind::Secret => {
                let secrets = Api::<Secret>::namespaced(client, namespace);
                let found = readable(secrets.get_opt(name).await, "Secret", namespace, name)?;
                Ok(found.map(|secret| {
                    let data = secret.data.unwrap_or_default().into_iter();
                    data.map(|(key, value)| (key, value.0)).collect()
                }))
            }
            Kind::ConfigMap => {
                let maps = Api::<ConfigMap>::namespaced(client, namespace);
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
}

impl Worker {
    /// Prepares the VM of an admitted pod.
    pub async fn prepare(&self, pod: &Pod, mut vm: v1::Vm, sources: &Sources) -> Result<Prepared, Error> {
        let namespace = pod.namespace().unwrap_or_default();
        let objects = InNamespace {
            client: self.client.clone(),
            namespace: &namespace,
        };
        let mut lacks = Vec::new();
        if let Some(from) = &sources.cloud_init_from {
            seed::fill(&objects, from, &mut vm, &mut lacks).await?;
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
        self.provisioner
            .finish(&step::run_pod(pod), vm, sources, &objects, lacks)
            .await
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
}
