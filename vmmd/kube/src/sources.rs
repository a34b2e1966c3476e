//! Parts of a VirtualMachine from the cluster, beside `spec.vm`: volumes, which are disks and
//! shares of the VM by their names, and values of Secrets and ConfigMaps for the guest's
//! cloud-init.
//!
//! The controller checks the fields and leaves the places in the VM open. The agent of the pod's
//! node fills the places in when it creates the VM. So neither the VirtualMachine nor its pods ever
//! hold a secret.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use vmmd_api::v1::{self, disk_spec};
use vmmd_spec::{manifest::quantity, name::Name, oci::Reference};

use crate::{
    schema,
    spec::{self, Invalid},
};

/// A disk or a share of the VM whose content is not named by `spec.vm`. Exactly one source.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// Name of the disk in `spec.vm.disks`, or of the share in `spec.vm.shares`, that it is.
    pub name: String,
    /// A new disk of an OCI image, which goes with the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_disk: Option<ContainerDisk>,
    /// A new disk of zeroes, which goes with the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_disk: Option<EmptyDisk>,
    /// A claim. A disk is its file `disk.img`, or the block device of a volume of mode Block; a share
    /// is its directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<Claim>,
}

/// A disk in an OCI image.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct ContainerDisk {
    /// `HOST[:PORT]/REPOSITORY`, and then `:TAG`, `@sha256:DIGEST` or both. A node imports a
    /// reference once, regardless of later changes of its tag.
    pub image: String,
    /// Bytes, or with a unit as in 20Gi; that of the image when not given, and never less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::quantity")]
    pub size: Option<Value>,
}

/// A disk of zeroes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct EmptyDisk {
    /// Bytes, or with a unit as in 20Gi; a multiple of 512.
    #[schemars(schema_with = "schema::quantity")]
    pub size: Value,
}

/// A PersistentVolumeClaim of the VirtualMachine's namespace.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    /// Its name.
    pub claim_name: String,
    /// The guest can't write to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// Fields of `spec.vm.cloudInit` whose values are elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CloudInitFrom {
    /// User data, which need not be text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data: Option<ValueFrom>,
    /// Version 2 of cloud-init's network configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_config: Option<ValueFrom>,
    /// Hash of the default user's password, as in /etc/shadow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_hash: Option<ValueFrom>,
    /// Values as authorized_keys files, added to the keys of `spec.vm.cloudInit`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ssh_authorized_keys: Vec<ValueFrom>,
}

/// A value of a Secret or a ConfigMap of the VirtualMachine's namespace. Exactly one of them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ValueFrom {
    /// Of a Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeyRef>,
    /// Of a ConfigMap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<KeyRef>,
}

/// Which value of an object.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct KeyRef {
    /// The object.
    pub name: String,
    /// The key in its data.
    pub key: String,
}

/// A Secret of the VirtualMachine's namespace.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct SecretName {
    /// Its name.
    pub name: String,
}

/// All parts of a VirtualMachine from the cluster.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Sources {
    /// Disks and shares.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// For the guest's cloud-init.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cloud_init_from: Option<CloudInitFrom>,
    /// Passwords for the registries of container disks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<SecretName>,
}

impl Sources {
    /// Whether there is nothing to be filled in.
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty() && self.cloud_init_from.is_none()
    }

    /// Whether disks are made for a run, which have to go with it.
    pub fn make_disks(&self) -> bool {
        let made = |volume: &Volume| volume.container_disk.is_some() || volume.empty_disk.is_some();
        self.volumes.iter().any(made)
    }
}

impl CloudInitFrom {
    /// The single values with their field names.
    pub fn single(&self) -> [(&'static str, Option<&ValueFrom>); 3] {
        [
            ("userData", self.user_data.as_ref()),
            ("networkConfig", self.network_config.as_ref()),
            ("passwordHash", self.password_hash.as_ref()),
        ]
    }

    /// All values with the paths of their fields.
    fn all(&self) -> impl Iterator<Item = (String, &ValueFrom)> {
        let single = self.single().into_iter();
        let single = single.filter_map(|(name, value)| Some((format!("spec.cloudInitFrom.{name}"), value?)));
        let keys = self.ssh_authorized_keys.iter().enumerate();
        single.chain(
            keys.map(|(index, value)| (format!("spec.cloudInitFrom.sshAuthorizedKeys[{index}]"), value)),
        )
    }
}

/// Bytes of a size.
///
/// # Errors
///
/// Returns a description of the error.
pub fn bytes(size: &Value) -> Result<u64, String> {
    let wrong = || "must be a number of bytes, or one with a unit, as 20Gi".to_owned();
    match size {
        Value::Number(number) => number.as_u64().ok_or_else(wrong),
        Value::String(text) => quantity::bytes(text).map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

/// The VM of vmmd with this name, in which the places of the sources are open.
///
/// # Errors
///
/// All that is wrong with the VM and its sources.
pub fn vm(name: &str, manifest: &Map<String, Value>, sources: &Sources) -> Result<v1::Vm, Invalid> {
    if sources.is_empty() {
        return spec::vm(name, manifest);
    }
    let mut manifest = manifest.clone();
    let mut problems = Vec::new();
    let volumes = check_volumes(&sources.volumes, &mut problems);
    let mut joined = BTreeSet::new();
    join(&mut manifest, "disks", &volumes, &mut joined, &mut problems);
    join(&mut manifest, "shares", &volumes, &mut joined, &mut problems);
    for (name, (index, _)) in &volumes {
        if !joined.contains(name) {
            problems.push(format!(
                "spec.volumes[{index}].name: there is no disk and no share {name} in spec.vm"
            ));
        }
    }
    if let Some(from) = &sources.cloud_init_from {
        check_cloud_init(&mut manifest, from, &mut problems);
    }
    let vm = match spec::vm(name, &manifest) {
        Ok(vm) => Some(vm),
        Err(Invalid(text)) => {
            problems.push(text);
            None
        }
    };
    match vm {
        Some(mut vm) if problems.is_empty() => {
            open(&mut vm, &joined);
            Ok(vm)
        }
        _ => Err(Invalid(problems.join("; "))),
    }
}

type Volumes<'a> = BTreeMap<&'a str, (usize, &'a Volume)>;

fn check_volumes<'a>(volumes: &'a [Volume], problems: &mut Vec<String>) -> Volumes<'a> {
    let mut known = Volumes::new();
    for (index, volume) in volumes.iter().enumerate() {
        let field = format!("spec.volumes[{index}]");
        if let Err(error) = Name::try_from(volume.name.as_str()) {
            problems.push(format!("{field}.name: {error}"));
        }
        if known.insert(&volume.name, (index, volume)).is_some() {
            problems.push(format!("{field}.name: two volumes are called {}", volume.name));
        }
        let given = [
            volume.container_disk.is_some(),
            volume.empty_disk.is_some(),
            volume.persistent_volume_claim.is_some(),
        ];
        if given.iter().filter(|given| **given).count() != 1 {
            problems.push(format!(
                "{field}: must have one of containerDisk, emptyDisk and persistentVolumeClaim"
            ));
        }
        if let Some(disk) = &volume.container_disk {
            if let Err(problem) = Reference::parse(&disk.image) {
                problems.push(format!("{field}.containerDisk.image: {problem}"));
            }
            if let Some(Err(problem)) = disk.size.as_ref().map(bytes) {
                problems.push(format!("{field}.containerDisk.size: {problem}"));
            }
        }
        if let Some(disk) = &volume.empty_disk {
            match bytes(&disk.size) {
                Ok(size) if size == 0 || size % 512 != 0 => problems.push(format!(
                    "{field}.emptyDisk.size: must be a multiple of 512 bytes, and not 0"
                )),
                Ok(_) => {}
                Err(problem) => problems.push(format!("{field}.emptyDisk.size: {problem}")),
            }
        }
        if let Some(claim) = &volume.persistent_volume_claim
            && claim.claim_name.is_empty()
        {
            problems.push(format!("{field}.persistentVolumeClaim.claimName: must be given"));
        }
    }
    known
}

/// Gives the disks or shares that are volumes a source that vmmd's rules take, so that all else is checked.
fn join<'a>(
    manifest: &mut Map<String, Value>,
    kind: &str,
    volumes: &Volumes<'a>,
    joined: &mut BTreeSet<&'a str>,
    problems: &mut Vec<String>,
) {
    let items = manifest.get_mut(kind).and_then(Value::as_array_mut);
    for (index, item) in items.into_iter().flatten().enumerate() {
        let Some(item) = item.as_object_mut() else {
            continue;
        };
        let name = item.get("name").and_then(Value::as_str).unwrap_or_default();
        let Some((name, (_, volume))) = volumes.get_key_value(name) else {
            continue;
        };
        let field = format!("spec.vm.{kind}[{index}]");
        if ["path", "disk", "beneath"]
            .iter()
            .any(|key| item.contains_key(*key))
        {
            problems.push(format!("{field}: has a source, and so has the volume {name}"));
        }
        if !joined.insert(*name) {
            problems.push(format!(
                "{field}: the volume {name} is a disk, and can't be a share too"
            ));
        }
        let claimed = volume.persistent_volume_claim.is_some();
        if kind == "shares" {
            if !claimed {
                problems.push(format!(
                    "{field}: only a persistentVolumeClaim can be a share, the volume {name} is none"
                ));
            }
            item.insert("path".to_owned(), format!("/volume/{name}").into());
        } else if claimed {
            item.insert("path".to_owned(), format!("/volume/{name}").into());
            item.entry("format").or_insert_with(|| "raw".into());
        } else {
            item.insert("disk".to_owned(), (*name).into());
        }
    }
}

fn check_cloud_init(manifest: &mut Map<String, Value>, from: &CloudInitFrom, problems: &mut Vec<String>) {
    for (field, value) in from.all() {
        let (name, given) = match (&value.secret_key_ref, &value.config_map_key_ref) {
            (Some(given), None) => ("secretKeyRef", given),
            (None, Some(given)) => ("configMapKeyRef", given),
            _ => {
                problems.push(format!(
                    "{field}: must have one of secretKeyRef and configMapKeyRef"
                ));
                continue;
            }
        };
        if given.name.is_empty() || given.key.is_empty() {
            problems.push(format!("{field}.{name}: must have name and key"));
        }
    }
    let cloud_init = manifest.entry("cloudInit").or_insert_with(|| json!({}));
    for (name, value) in from.single() {
        let twice =
            !cloud_init[name].is_null() || name == "userData" && !cloud_init["userDataBase64"].is_null();
        if value.is_some() && twice {
            problems.push(format!("spec.cloudInitFrom.{name}: spec.vm.cloudInit has it too"));
        }
    }
}

/// Takes the sources away that were only there to be checked.
fn open(vm: &mut v1::Vm, joined: &BTreeSet<&str>) {
    let Some(spec) = &mut vm.spec else { return };
    for disk in &mut spec.disks {
        if joined.contains(disk.name.as_str()) {
            disk.source = None;
        }
    }
    for share in &mut spec.shares {
        if joined.contains(share.name.as_str()) {
            share.path.clear();
        }
    }
}

/// Returns a VM with stand-ins in its places. They take as much of a node as the later content from
/// the agent.
pub fn closed(vm: &v1::Vm, sources: &Sources) -> v1::Vm {
    let mut vm = vm.clone();
    for volume in &sources.volumes {
        let format = match (&volume.container_disk, &volume.empty_disk) {
            // An overlay of the image.
            (Some(_), _) => v1::DiskFormat::Qcow2,
            (None, Some(_)) => v1::DiskFormat::Raw,
            (None, None) => {
                let path = disk_spec::Source::Path(format!("/volume/{}", volume.name));
                fill(&mut vm, &volume.name, &path);
                continue;
            }
        };
        let disk = disk_spec::Source::Disk(volume.name.clone());
        fill(&mut vm, &volume.name, &disk);
        let disks = vm.spec.iter_mut().flat_map(|spec| &mut spec.disks);
        for disk in disks.filter(|disk| disk.name == volume.name) {
            disk.set_format(format);
        }
    }
    vm
}

/// Fills in a volume's place: the source of the disk with its name, or the directory of the share
/// with its name.
pub fn fill(vm: &mut v1::Vm, name: &str, source: &disk_spec::Source) {
    let Some(spec) = &mut vm.spec else { return };
    if let disk_spec::Source::Path(path) = source {
        for share in spec.shares.iter_mut().filter(|share| share.name == name) {
            path.clone_into(&mut share.path);
        }
    }
    for disk in spec.disks.iter_mut().filter(|disk| disk.name == name) {
        disk.source = Some(source.clone());
    }
}

#[cfg(test)]
mod tests;
