//! The seed of a VM's first boot: a small ISO 9660 image, which the daemon makes at each start. It is in memory alone, so that nothing
//! of it stays on the node. Blocking.
//!
//! | form | label | read by |
//! |---|---|---|
//! | NoCloud | `cidata` | cloud-init |
//! | ConfigDrive | `config-2` | cloud-init, cloudbase-init, Ignition |
//! | sysprep | `sysprep` | Windows Setup, sysprep |
//!
//! The daemon's own files are YAML with one key on a line, which readers without a YAML parser understand.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsRawFd, OwnedFd},
};

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Map, json};
use uuid::Uuid;
use vmmd_network::netd::metadata::{Document, Instance};
use vmmd_spec::{
    cloud_init::{CloudInit, SeedType},
    nic::Mac,
    share::Share,
};

use super::{iso, vendor};

/// Length of the disk in bytes, with room for the longest files.
const SIZE: usize = 1 << 20;

/// Contents of a seed.
#[derive(Clone, Copy, Debug)]
pub struct Seed<'a> {
    /// cloud-init settings of the spec.
    pub init: &'a CloudInit,
    /// The VM.
    pub uid: Uuid,
    /// Its name.
    pub name: &'a str,
    /// Its NICs by name, in the order of the spec.
    pub nics: &'a [(String, Mac)],
    /// Its shares.
    pub shares: &'a [Share],
}

impl Seed<'_> {
    /// The documents for the metadata service.
    pub fn instance(&self) -> Instance {
        let documents = self.files().into_iter();
        Instance {
            instance_id: self.instance_id(),
            hostname: self.hostname(),
            public_keys: self.init.ssh_authorized_keys.clone(),
            documents: documents
                .map(|(name, content)| (name.to_owned(), Document(content)))
                .collect(),
        }
    }

    fn instance_id(&self) -> String {
        or(&self.init.instance_id, || self.uid.to_string())
    }

    fn hostname(&self) -> String {
        or(&self.init.hostname, || self.name.to_owned())
    }

    /// Label and files of the disk.
    fn content(&self) -> (&'static str, Vec<(&'static str, Vec<u8>)>) {
        match self.init.kind {
            SeedType::NoCloud => ("cidata", self.files()),
            SeedType::ConfigDrive | SeedType::Ignition => ("config-2", self.config_drive()),
            SeedType::Sysprep => {
                // Setup reads the first, sysprep the second one (Microsoft, "Windows Setup Automation Overview").
                let file = |name| (name, self.init.user_data.clone());
                ("sysprep", vec![file("Autounattend.xml"), file("Unattend.xml")])
            }
        }
    }

    /// The files of a ConfigDrive (OpenStack, "Config drives").
    fn config_drive(&self) -> Vec<(&'static str, Vec<u8>)> {
        let init = self.init;
        let keys = init.ssh_authorized_keys.iter().enumerate();
        let keys: Map<_, _> = keys
            .map(|(number, key)| (format!("key-{number}"), key.as_str().into()))
            .collect();
        let meta = json!({
            "uuid": self.instance_id(),
            "name": self.name,
            "hostname": self.hostname(),
            "launch_index": 0,
            "public_keys": keys,
        });
        let mut files = vec![("openstack/latest/meta_data.json", meta.to_string().into_bytes())];
        if !init.user_data.is_empty() {
            files.push(("openstack/latest/user_data", init.user_data.clone()));
        }
        if !init.network_config.is_empty() {
            let network = init.network_config.clone().into_bytes();
            files.push(("openstack/latest/network_data.json", network));
        }
        let vendor_data = match (&init.vendor_data, vendor::data(init, self.shares)) {
            (given, own) if *given == own => own,
            // The daemon's data is for cloud-init, which has a key of its own there.
            (_, own) => json!({"cloud-init": own}).to_string(),
        };
        if !vendor_data.is_empty() {
            files.push(("openstack/latest/vendor_data.json", vendor_data.into_bytes()));
        }
        files
    }

    /// The files of NoCloud.
    fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let init = self.init;
        let (instance, hostname) = (scalar(&self.instance_id()), scalar(&self.hostname()));
        let mut meta = format!("instance-id: {instance}\nlocal-hostname: {hostname}\n");
        if !init.ssh_authorized_keys.is_empty() {
            meta.push_str("public-keys:\n");
            let keys = init.ssh_authorized_keys.iter();
            meta.extend(keys.map(|key| format!("- {}\n", quoted(key))));
        }
        let mut files = vec![
            // cloud-init takes a source only when both are there.
            ("meta-data", meta.into_bytes()),
            (
                "user-data",
                match init.user_data.is_empty() {
                    true => b"#cloud-config\n{}\n".to_vec(),
                    false => init.user_data.clone(),
                },
            ),
        ];
        let vendor_data = vendor::data(init, self.shares);
        if !vendor_data.is_empty() {
            files.push(("vendor-data", vendor_data.into_bytes()));
        }
        let network = or(&init.network_config, || self.network());
        if !network.is_empty() {
            files.push(("network-config", network.into_bytes()));
        }
        files
    }

    /// Version 2 of the network configuration: DHCP on each NIC, which is known by its address.
    fn network(&self) -> String {
        if self.nics.is_empty() {
            return String::new();
        }
        let mut text = "version: 2\nethernets:\n".to_owned();
        for (name, mac) in self.nics {
            let (name, mac) = (quoted(name), mac.to_string().to_lowercase());
            text.push_str(&format!(
                "  {name}:\n    match:\n      macaddress: {}\n    dhcp4: true\n",
                quoted(&mac)
            ));
            // systemd-networkd ignores the domain otherwise, and short names are not found.
            text.push_str("    dhcp4-overrides:\n      use-domains: true\n    dhcp6: false\n");
        }
        text
    }

    /// The disk, open for reading only. The same seed is the same disk, byte for byte.
    pub fn make(&self) -> io::Result<OwnedFd> {
        let mut memory = File::from(memfd_create("cloud-init", MemfdFlags::CLOEXEC)?);
        let (label, files) = self.content();
        memory.write_all(&iso::image(label, &files, SIZE))?;
        Ok(File::open(format!("/proc/self/fd/{}", memory.as_raw_fd()))?.into())
    }
}

fn or(given: &str, other: impl FnOnce() -> String) -> String {
    match given.is_empty() {
        true => other(),
        false => given.to_owned(),
    }
}

/// A scalar of YAML. Letters and digits need no quotes, and readers without a parser of YAML do not remove quotes.
fn scalar(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_word = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
    match is_word && text.bytes().all(plain) && !WORDS.contains(&text.to_lowercase().as_str()) {
        true => text.to_owned(),
        // A UUID begins with a digit and has dashes, so it is no number.
        false if text.len() == 36 && text.bytes().all(plain) && text.contains('-') => text.to_owned(),
        false => quoted(text),
    }
}

/// Words of YAML 1.1 that are no text.
const WORDS: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];

/// A double-quoted scalar: JSON is YAML.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn read(seed: &Seed<'_>) -> Vec<(String, String)> {
        let disk = File::from(seed.make().unwrap());
        let mut content = Vec::new();
        (&disk).read_to_end(&mut content).unwrap();
        assert_eq!(content.len(), SIZE);
        let (label, files) = iso::read(&content);
        let expected = match seed.init.kind {
            SeedType::NoCloud => "cidata",
            SeedType::ConfigDrive | SeedType::Ignition => "config-2",
            SeedType::Sysprep => "sysprep",
        };
        assert_eq!(label, expected);
        let text = |(name, content)| (name, String::from_utf8(content).unwrap());
        files.into_iter().map(text).collect()
    }

    #[test]
    fn a_seed_has_what_the_spec_says_and_defaults_for_the_rest() {
        let init = CloudInit {
            user_data: "#cloud-config\npackages: [vim]\n".into(),
            ssh_authorized_keys: vec!["ssh-ed25519 AAAA me".into()],
            password_hash: "$6$salt$hash".into(),
            ..Default::default()
        };
        let uid = Uuid::from_bytes([7; 16]);
        let nics = [("lan".to_owned(), Mac::local([2, 0, 0, 0, 0, 9]))];
        let seed = Seed {
            init: &init,
            uid,
            name: "web",
            nics: &nics,
            shares: &[],
        };
        let files = read(&seed);
        let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["meta-data", "network-config", "user-data", "vendor-data"]);
        assert_eq!(
            files[0].1,
            format!("instance-id: {uid}\nlocal-hostname: web\npublic-keys:\n- \"ssh-ed25519 AAAA me\"\n")
        );
        let mac = nics[0].1.to_string().to_lowercase();
        assert_eq!(
            files[1].1,
            format!(
                "version: 2\nethernets:\n  \"lan\":\n    match:\n      macaddress: \"{mac}\"\n    dhcp4: true\n    \
                 dhcp4-overrides:\n      use-domains: true\n    dhcp6: false\n"
            )
        );
        assert_eq!(files[2].1.as_bytes(), init.user_data);
        assert!(files[3].1.starts_with("#cloud-config\n") && files[3].1.contains("$6$salt$hash"));
    }

    fn seed(init: &CloudInit) -> Seed<'_> {
        Seed {
            init,
            uid: Uuid::nil(),
            name: "web",
            nics: &[],
            shares: &[],
        }
    }

    #[test]
    fn config_drive_has_the_files_of_openstack() {
        let init = CloudInit {
            kind: SeedType::ConfigDrive,
            user_data: b"#!/bin/sh\n".to_vec(),
            network_config: "{\"links\": []}".into(),
            ssh_authorized_keys: vec!["ssh-ed25519 AAAA me".into()],
            password_hash: "$6$salt$hash".into(),
            ..Default::default()
        };
        let files = read(&seed(&init));
        let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        let expected = [
            "meta_data.json",
            "network_data.json",
            "user_data",
            "vendor_data.json",
        ];
        assert_eq!(names, expected.map(|name| format!("openstack/latest/{name}")));
        let json = |at: usize| serde_json::from_str::<serde_json::Value>(&files[at].1).unwrap();
        let meta = json(0);
        assert_eq!(
            (&meta["uuid"], &meta["hostname"]),
            (&Uuid::nil().to_string().into(), &"web".into())
        );
        assert_eq!(meta["public_keys"]["key-0"], "ssh-ed25519 AAAA me");
        assert_eq!(
            (files[1].1.as_str(), files[2].1.as_str()),
            ("{\"links\": []}", "#!/bin/sh\n")
        );
        let vendor = json(3);
        let vendor = vendor["cloud-init"].as_str().unwrap();
        assert!(vendor.starts_with("#cloud-config\n") && vendor.contains("$6$salt$hash"));
    }

    #[test]
    fn config_drive_without_data_has_its_metadata_alone() {
        let kind = SeedType::ConfigDrive;
        let init = CloudInit {
            kind,
            ..Default::default()
        };
        let files = read(&seed(&init));
        assert_eq!(files.len(), 1, "{files:?}");
        let given = CloudInit {
            kind,
            vendor_data: "{\"a\": 1}".into(),
            ..Default::default()
        };
        assert_eq!(read(&seed(&given))[1].1, given.vendor_data);
    }

    #[test]
    fn answer_file_of_windows_has_both_names() {
        let init = CloudInit {
            kind: SeedType::Sysprep,
            user_data: b"<unattend/>".to_vec(),
            ..Default::default()
        };
        let file = |name: &str| (name.to_owned(), "<unattend/>".to_owned());
        let expected = [file("Autounattend.xml"), file("Unattend.xml")];
        assert_eq!(read(&seed(&init)), expected);
    }

    #[test]
    fn ignition_without_firmware_is_user_data_of_a_config_drive() {
        let init = CloudInit {
            kind: SeedType::Ignition,
            user_data: b"{\"ignition\": {}}".to_vec(),
            ..Default::default()
        };
        let files = read(&seed(&init));
        let (name, content) = &files[1];
        assert_eq!(
            (name.as_str(), content.as_bytes()),
            ("openstack/latest/user_data", &init.user_data[..])
        );
    }

    #[test]
    fn the_longest_seed_fits_and_is_the_same_each_time() {
        let long = "x".repeat(vmmd_spec::cloud_init::MAX_DATA);
        let init = CloudInit {
            user_data: long.clone().into_bytes(),
            vendor_data: long.clone(),
            network_config: long.clone(),
            ssh_authorized_keys: vec!["y".repeat(8 << 10); 64],
            ..Default::default()
        };
        let seed = Seed {
            init: &init,
            uid: Uuid::nil(),
            name: "web",
            nics: &[],
            shares: &[],
        };
        let bytes = || {
            let mut content = Vec::new();
            File::from(seed.make().unwrap())
                .read_to_end(&mut content)
                .unwrap();
            content
        };
        assert_eq!(read(&seed)[2].1, long);
        assert!(bytes() == bytes());
        let disk = File::from(seed.make().unwrap());
        assert!((&disk).write_all(b"x").is_err(), "it can't be written to");
    }

    #[test]
    fn scalars_are_plain_where_yaml_reads_them_as_text() {
        for (text, expected) in [
            ("web-1", "web-1"),
            ("no", "\"no\""),
            ("1e3", "\"1e3\""),
            ("a: b", "\"a: b\""),
            ("a\nb", "\"a\\nb\""),
        ] {
            assert_eq!(scalar(text), expected);
        }
    }

    #[test]
    fn without_nics_there_is_no_network_configuration() {
        let init = CloudInit::default();
        let seed = Seed {
            init: &init,
            uid: Uuid::nil(),
            name: "web",
            nics: &[],
            shares: &[],
        };
        let names: Vec<_> = read(&seed).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["meta-data", "user-data"]);
    }
}
