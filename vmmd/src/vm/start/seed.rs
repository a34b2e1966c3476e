//! The seed of a VM's cloud-init: a small disk with a FAT file system called CIDATA, which the daemon makes at each start (cloud-init,
//! "NoCloud"). It is in memory alone, so that nothing of it stays on the node. Blocking.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    os::fd::{AsRawFd, OwnedFd},
};

use fatfs::{FatType, FileSystem, FormatVolumeOptions, FsOptions};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};
use uuid::Uuid;
use vmmd_spec::{cloud_init::CloudInit, nic::Mac, share::Share};

use super::vendor;

/// Length of the disk in bytes: FAT12 with room for the longest files.
const SIZE: u64 = 1 << 20;
/// Padded to 11 bytes, as FAT has labels.
const LABEL: [u8; 11] = *b"CIDATA     ";

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
    /// The files of the seed.
    fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let init = self.init;
        let or = |given: &String, other: String| match given.is_empty() {
            true => other,
            false => given.clone(),
        };
        let mut meta = json!({
            "instance-id": or(&init.instance_id, self.uid.to_string()),
            "local-hostname": or(&init.hostname, self.name.to_owned()),
        });
        if !init.ssh_authorized_keys.is_empty() {
            meta["public-keys"] = init.ssh_authorized_keys.clone().into();
        }
        let mut files = vec![
            // cloud-init takes a source only when both are there.
            ("meta-data", meta.to_string().into_bytes()),
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
        let network = or(&init.network_config, self.network());
        if !network.is_empty() {
            files.push(("network-config", network.into_bytes()));
        }
        files
    }

    /// Version 2 of the network configuration: DHCP on each NIC, which is known by its address.
    fn network(&self) -> String {
        let nics = self.nics.iter().map(|(name, mac)| {
            let nic = json!({
                "match": {"macaddress": mac.to_string().to_lowercase()},
                "dhcp4": true,
                // systemd-networkd ignores the domain otherwise, and short names are not found.
                "dhcp4-overrides": {"use-domains": true},
                "dhcp6": false,
            });
            (name.clone(), nic)
        });
        let nics: serde_json::Map<String, Value> = nics.collect();
        match nics.is_empty() {
            true => String::new(),
            false => json!({"version": 2, "ethernets": nics}).to_string(),
        }
    }

    /// The disk, open for reading only. The same seed is the same disk, byte for byte.
    pub fn make(&self) -> io::Result<OwnedFd> {
        let memory = File::from(memfd_create("cloud-init", MemfdFlags::CLOEXEC)?);
        memory.set_len(SIZE)?;
        self.write(&memory)?;
        Ok(File::open(format!("/proc/self/fd/{}", memory.as_raw_fd()))?.into())
    }

    fn write(&self, mut disk: &File) -> io::Result<()> {
        let options = FormatVolumeOptions::new()
            .fat_type(FatType::Fat12)
            .volume_id(0x4349_4441)
            .volume_label(LABEL);
        fatfs::format_volume(disk, options)?;
        disk.seek(SeekFrom::Start(0))?;
        let volume = FileSystem::new(disk, FsOptions::new())?;
        for (name, content) in self.files() {
            let mut file = volume.root_dir().create_file(name)?;
            file.write_all(&content)?;
            file.flush()?;
        }
        volume.unmount()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn read(seed: &Seed<'_>) -> Vec<(String, String)> {
        let disk = File::from(seed.make().unwrap());
        let mut content = Vec::new();
        (&disk).read_to_end(&mut content).unwrap();
        let volume = FileSystem::new(io::Cursor::new(content), FsOptions::new()).unwrap();
        assert_eq!(volume.volume_label(), "CIDATA");
        let mut files = Vec::new();
        for entry in volume.root_dir().iter() {
            let entry = entry.unwrap();
            if entry.is_file() {
                let mut text = String::new();
                entry.to_file().read_to_string(&mut text).unwrap();
                files.push((entry.file_name(), text));
            }
        }
        files.sort();
        files
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
        let json = |index: usize| -> Value { serde_json::from_str(&files[index].1).unwrap() };
        assert_eq!(
            json(0),
            json!({"instance-id": uid.to_string(), "local-hostname": "web", "public-keys": ["ssh-ed25519 AAAA me"]})
        );
        assert_eq!(
            json(1)["ethernets"]["lan"]["match"]["macaddress"],
            nics[0].1.to_string().to_lowercase()
        );
        assert_eq!(
            json(1)["ethernets"]["lan"]["dhcp4-overrides"],
            json!({"use-domains": true})
        );
        assert_eq!(files[2].1.as_bytes(), init.user_data);
        assert!(files[3].1.starts_with("#cloud-config\n") && files[3].1.contains("$6$salt$hash"));
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
