//! The VM of a launcher pod, from the spec of its VirtualMachine.
//!
//! Such a VM names nothing of its node: its disks and shares are the volumes, and its NICs are
//! connected to the pod's network. All its runs have one identity, which is derived from the uid of
//! the VirtualMachine.

use kube::ResourceExt as _;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use vmmd_api::v1::{self, disk_spec, nic_spec::Attachment};

use crate::{
    crd::VirtualMachine,
    run::{self, Plan},
    sources::{self, Sources},
    spec::Invalid,
};

/// Stands for the pod's network while vmmd's rules are checked. Interfaces that other fields name are refused.
const STAND_IN: &str = "pod";

/// Plan of a VirtualMachine's run in a launcher pod.
///
/// # Errors
///
/// Returns all errors of its VM, or the fields that are no part of a pod.
pub fn plan(machine: &VirtualMachine) -> Result<Plan, Invalid> {
    let sources = machine.spec.sources();
    let mut manifest = machine.spec.vm.clone();
    refuse_pod_fields(&manifest)?;
    let networks = take_networks(&mut manifest)?;
    let mut vm = run::vm(machine, &manifest, &sources)?;
    // Its NICs have stand-ins.
    let nics = vm.spec.as_mut().map(|spec| std::mem::take(&mut spec.nics));
    if let Some(field) = node_field(&vm) {
        return Err(of_node(&format!("spec.vm.{field}")));
    }
    connect(&mut vm, nics.unwrap_or_default(), &networks);
    join(&mut vm, &sources);
    identify(&mut vm, &machine.uid().unwrap_or_default());
    let manifest = serde_json::to_string(&machine.spec.vm).map_err(|error| Invalid(error.to_string()))?;
    let plan = Plan {
        vm,
        manifest,
        sources,
    };
    // Only the creation of a pod shows whether the other fields are valid.
    super::pod(
        machine,
        &plan,
        0,
        &run::Settings::default(),
        &super::Claims::new(),
    )?;
    Ok(plan)
}

/// A VM as vmmd gets it for the pod with this uid.
pub fn with_pod(mut vm: v1::Vm, uid: &str) -> v1::Vm {
    if let Some(spec) = &mut vm.spec {
        spec.pod = Some(v1::PodSpec { uid: uid.to_owned() });
    }
    vm
}

/// A VM whose sources vmmd's rules accept without a pod, with the same needs of resources.
pub fn closed(vm: &v1::Vm, sources: &Sources) -> v1::Vm {
    let mut vm = sources::closed(vm, sources);
    for nic in vm.spec.iter_mut().flat_map(|spec| &mut spec.nics) {
        nic.attachment = Some(Attachment::Bridge(STAND_IN.to_owned()));
    }
    for share in vm.spec.iter_mut().flat_map(|spec| &mut spec.shares) {
        share.pod_volume.clear();
    }
    if let Some(spec) = &mut vm.spec {
        spec.pod = None;
    }
    vm
}

/// The first field of a VM without NICs that names a thing of the node.
fn node_field(vm: &v1::Vm) -> Option<String> {
    let spec = vm.spec.as_ref()?;
    let boot = spec.boot.as_ref().and_then(|boot| boot.source.as_ref());
    let kernel = matches!(boot, Some(v1::boot_spec::Source::Linux(_)));
    let kernel = kernel.then(|| "boot.linux".to_owned());
    let state = (!spec.state_dir.is_empty()).then(|| "stateDir".to_owned());
    let disk = spec.disks.iter().position(|disk| disk.source.is_some());
    let disk = disk.map(|index| format!("disks[{index}]"));
    let share = spec.shares.iter().position(|share| !share.path.is_empty());
    let share = share.map(|index| format!("shares[{index}]"));
    kernel.or(state).or(disk).or(share)
}

fn of_node(field: &str) -> Invalid {
    Invalid(format!(
        "{field}: names a thing of a node, which a VM in a launcher pod cannot have: use spec.volumes for disks and shares, \
         spec.vm.boot.fromDisk or firmware to boot, and podNetwork for NICs"
    ))
}

/// Refuses fields that the agent sets.
fn refuse_pod_fields(manifest: &Map<String, Value>) -> Result<(), Invalid> {
    if manifest.contains_key("pod") {
        return Err(Invalid(
            "spec.vm.pod: must be left out: the agent sets it".to_owned(),
        ));
    }
    for kind in ["disks", "shares"] {
        let items = manifest.get(kind).and_then(Value::as_array);
        for (index, item) in items.into_iter().flatten().enumerate() {
            if item.get("podVolume").is_some() {
                return Err(Invalid(format!(
                    "spec.vm.{kind}[{index}].podVolume: must be left out: a volume of spec.volumes with the same name is the content"
                )));
            }
        }
    }
    Ok(())
}

/// Puts stand-ins into the places of pod networks, and returns the interfaces of the pod by NIC. A
/// VM without NICs gets one.
fn take_networks(manifest: &mut Map<String, Value>) -> Result<Vec<String>, Invalid> {
    let none = manifest
        .get("nics")
        .is_none_or(|nics| nics.as_array().is_some_and(Vec::is_empty));
    if none {
        manifest.insert("nics".to_owned(), json!([{"name": "eth0", "podNetwork": {}}]));
    }
    let mut interfaces = Vec::new();
    let nics = manifest.get_mut("nics").and_then(Value::as_array_mut);
    for (index, nic) in nics.into_iter().flatten().enumerate() {
        let field = format!("spec.vm.nics[{index}]");
        let Some(nic) = nic.as_object_mut() else {
            return Err(Invalid(format!("{field}: must be an object")));
        };
        if ["bridge", "tap", "network"]
            .iter()
            .any(|key| nic.contains_key(*key))
        {
            return Err(of_node(&field));
        }
        let interface = match nic.remove("podNetwork") {
            Some(network) => network["interface"].as_str().unwrap_or_default().to_owned(),
            None => String::new(),
        };
        nic.insert("bridge".to_owned(), STAND_IN.into());
        interfaces.push(interface);
    }
    Ok(interfaces)
}

/// Gives the VM these NICs, connected to the pod's network.
fn connect(vm: &mut v1::Vm, mut nics: Vec<v1::NicSpec>, interfaces: &[String]) {
    for (nic, interface) in nics.iter_mut().zip(interfaces) {
        nic.attachment = Some(Attachment::PodNetwork(v1::PodNetwork {
            interface: interface.clone(),
        }));
    }
    if let Some(spec) = &mut vm.spec {
        spec.nics = nics;
    }
}

/// Claims are volumes of the pod. The agent fills in the places of the other volumes.
fn join(vm: &mut v1::Vm, sources: &Sources) {
    let Some(spec) = &mut vm.spec else { return };
    for volume in &sources.volumes {
        let Some(claim) = &volume.persistent_volume_claim else {
            continue;
        };
        for disk in spec.disks.iter_mut().filter(|disk| disk.name == volume.name) {
            disk.source = Some(disk_spec::Source::PodVolume(volume.name.clone()));
            disk.read_only |= claim.read_only;
        }
        for share in spec.shares.iter_mut().filter(|share| share.name == volume.name) {
            share.pod_volume.clone_from(&volume.name);
            share.read_only |= claim.read_only;
        }
    }
}

/// One identity for all runs: the guest recognizes its first boot, its system and its NICs. Values
/// of the spec are not changed.
fn identify(vm: &mut v1::Vm, machine: &str) {
    let Some(spec) = &mut vm.spec else { return };
    let id = uuid::Builder::from_custom_bytes(derived(&format!("system/{machine}")))
        .into_uuid()
        .to_string();
    let smbios = spec.smbios.get_or_insert_default();
    if smbios.uuid.is_empty() {
        smbios.uuid.clone_from(&id);
    }
    if let Some(seed) = &mut spec.cloud_init
        && seed.instance_id.is_empty()
    {
        seed.instance_id = id;
    }
    for nic in spec.nics.iter_mut().filter(|nic| nic.mac.is_empty()) {
        let [first, rest @ ..] = derived::<6>(&format!("nic/{machine}/{}", nic.name));
        // Unicast, and locally administered (IEEE 802, 8.4).
        let first = first & 0b1111_1100 | 0b10;
        let bytes = [first].into_iter().chain(rest);
        let bytes: Vec<_> = bytes.map(|byte| format!("{byte:02x}")).collect();
        nic.mac = bytes.join(":");
    }
}

/// The first bytes of the SHA-256 of a text, the same in each release.
fn derived<const LENGTH: usize>(text: &str) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    let digest = Sha256::digest(format!("vmmd.dev/{text}").as_bytes());
    for (byte, of) in bytes.iter_mut().zip(digest) {
        *byte = of;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::machine as any;

    /// A VirtualMachine that can have a launcher pod.
    fn machine(change: impl FnOnce(&mut Value)) -> VirtualMachine {
        any(|value| {
            value["spec"]["vm"]["boot"] = json!({"fromDisk": {}});
            value["spec"]["vm"]["disks"] = json!([{"name": "root"}]);
            value["spec"]["volumes"] =
                json!([{"name": "root", "persistentVolumeClaim": {"claimName": "web"}}]);
            change(value);
        })
    }

    #[test]
    fn vm_has_the_pods_volumes_and_network() {
        let machine = machine(|value| {
            value["spec"]["vm"]["disks"] = json!([{"name": "root"}, {"name": "tmp"}]);
            value["spec"]["vm"]["shares"] = json!([{"name": "site"}]);
            value["spec"]["vm"]["nics"] =
                json!([{"name": "a"}, {"name": "b", "podNetwork": {"interface": "net1"}}]);
            value["spec"]["volumes"] = json!([
                {"name": "root", "persistentVolumeClaim": {"claimName": "web"}},
                {"name": "site", "persistentVolumeClaim": {"claimName": "site", "readOnly": true}},
                {"name": "tmp", "emptyDisk": {"size": "1Gi"}},
            ]);
        });
        let spec = with_pod(plan(&machine).unwrap().vm, "p-3").spec.unwrap();
        assert_eq!(spec.pod.unwrap().uid, "p-3");
        let disks: Vec<_> = spec.disks.iter().map(|disk| disk.source.clone()).collect();
        assert_eq!(disks, [Some(disk_spec::Source::PodVolume("root".into())), None]);
        assert_eq!(spec.disks[0].format(), v1::DiskFormat::Raw);
        let share = &spec.shares[0];
        assert_eq!(
            (&*share.pod_volume, &*share.path, share.read_only),
            ("site", "", true)
        );
        let interfaces: Vec<_> = spec
            .nics
            .iter()
            .map(|nic| nic.attachment.clone().unwrap())
            .collect();
        let of = |interface: &str| {
            Attachment::PodNetwork(v1::PodNetwork {
                interface: interface.to_owned(),
            })
        };
        assert_eq!(interfaces, [of(""), of("net1")]);
    }

    #[test]
    fn vm_without_nics_is_in_the_pods_network() {
        let spec = plan(&machine(|_| {})).unwrap().vm.spec.unwrap();
        assert_eq!(spec.nics.len(), 1);
        assert_eq!(spec.nics[0].name, "eth0");
        assert!(matches!(
            &spec.nics[0].attachment,
            Some(Attachment::PodNetwork(_))
        ));
    }

    #[test]
    fn things_of_a_node_are_refused_with_their_field() {
        type Change = fn(&mut Value);
        let table: [(Change, &str); 12] = [
            (
                |vm| vm["boot"] = json!({"linux": {"kernel": "/srv/vmlinuz"}}),
                "spec.vm.boot.linux",
            ),
            (|vm| vm["stateDir"] = "/srv/state".into(), "spec.vm.stateDir"),
            (
                |vm| {
                    vm["disks"] =
                        json!([{"name": "root"}, {"name": "b", "path": "/dev/sda", "format": "raw"}]);
                },
                "spec.vm.disks[1]",
            ),
            (
                |vm| vm["disks"] = json!([{"name": "root"}, {"name": "b", "disk": "other"}]),
                "spec.vm.disks[1]",
            ),
            (
                |vm| vm["disks"] = json!([{"name": "root"}, {"name": "b", "podVolume": "root"}]),
                "spec.vm.disks[1].podVolume",
            ),
            (
                |vm| vm["shares"] = json!([{"name": "b", "path": "/etc"}]),
                "spec.vm.shares[0]",
            ),
            (
                |vm| vm["shares"] = json!([{"name": "b", "podVolume": "root"}]),
                "spec.vm.shares[0].podVolume",
            ),
            (
                |vm| vm["nics"] = json!([{"name": "a", "bridge": "pod"}]),
                "spec.vm.nics[0]",
            ),
            (
                |vm| vm["nics"] = json!([{"name": "a", "tap": "tap0"}]),
                "spec.vm.nics[0]",
            ),
            (
                |vm| vm["nics"] = json!([{"name": "a", "network": "vmmd0"}]),
                "spec.vm.nics[0]",
            ),
            (
                |vm| {
                    vm["nics"] =
                        json!([{"name": "a", "publishedPorts": [{"nodePort": 22, "guestPort": 22}]}]);
                },
                "spec.vm.nics[0].publishedPorts",
            ),
            (|vm| vm["pod"] = json!({"uid": "x"}), "spec.vm.pod"),
        ];
        for (change, field) in table {
            let machine = machine(|value| change(&mut value["spec"]["vm"]));
            let Invalid(text) = plan(&machine).unwrap_err();
            assert!(text.starts_with(&format!("{field}: ")), "{field}: {text}");
        }
    }

    #[test]
    fn runs_of_one_machine_have_one_identity() {
        let with = |uid: &str| {
            let machine = machine(|value| {
                value["metadata"]["uid"] = uid.into();
                value["spec"]["vm"]["cloudInit"] = json!({});
                value["spec"]["vm"]["nics"] = json!([{"name": "a"}, {"name": "b"}]);
            });
            plan(&machine).unwrap().vm.spec.unwrap()
        };
        let one = with("u-1");
        assert_eq!(one, with("u-1"));
        let id = one.smbios.as_ref().unwrap().uuid.clone();
        assert_eq!(id, one.cloud_init.as_ref().unwrap().instance_id);
        // Any change changes the identity of existing VMs.
        assert_eq!(id, "f5714692-84e8-81d2-9781-4761e5859626");
        let mac = |spec: &v1::VmSpec, index: usize| spec.nics[index].mac.clone();
        let first = u8::from_str_radix(&one.nics[0].mac[..2], 16).unwrap();
        assert_eq!(first & 0b11, 0b10, "{}", one.nics[0].mac);
        let other = with("u-2");
        assert_ne!(mac(&one, 0), mac(&other, 0));
        assert_ne!(mac(&one, 0), mac(&one, 1));
        assert_ne!(id, other.smbios.unwrap().uuid);
    }

    #[test]
    fn identity_of_the_spec_is_not_changed() {
        let machine = machine(|value| {
            let vm = &mut value["spec"]["vm"];
            vm["smbios"] = json!({"uuid": "6fd1bd2c-8a4e-4c39-9a6f-2c4f9c7a1b10", "serial": "S1"});
            vm["cloudInit"] = json!({"instanceId": "first"});
            vm["nics"] = json!([{"name": "a", "mac": "52:54:00:12:34:56"}]);
        });
        let spec = plan(&machine).unwrap().vm.spec.unwrap();
        let smbios = spec.smbios.unwrap();
        assert_eq!(
            (&*smbios.uuid, &*smbios.serial),
            ("6fd1bd2c-8a4e-4c39-9a6f-2c4f9c7a1b10", "S1")
        );
        assert_eq!(spec.cloud_init.unwrap().instance_id, "first");
        assert_eq!(spec.nics[0].mac, "52:54:00:12:34:56");
    }

    #[test]
    fn digest_binds_the_spec_and_the_sources() {
        let digest = |change: &dyn Fn(&mut Value)| plan(&machine(|value| change(value))).unwrap().digest();
        let same = digest(&|_| {});
        assert_eq!(same, digest(&|value| value["metadata"]["generation"] = 9.into()));
        assert_ne!(
            same,
            digest(&|value| value["spec"]["vm"]["cpu"]["cores"] = 3.into())
        );
        assert_ne!(
            same,
            digest(&|value| value["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = "db".into())
        );
    }
}
