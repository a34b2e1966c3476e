//! `run`: a VM from an image, in one command.

use std::{fs, path::Path};

use proto::{model::vm::Manifest, v1, v1::volume_spec::Source};

use super::{apply, nic_spec, progress};
use crate::{
    args::{disk::CloneMode, run::Run},
    client::{COPY, Client, WORK, about_disk, send},
    console,
    failure::{Code, Failure, Result},
    output,
};

/// Digits behind the image's name in the name of a VM that was given none.
const DIGITS: usize = 5;
/// Longest name of an image that such a name has in it.
const LONGEST: usize = 40;

/// Makes the disk, then the VM, and starts it. When there is no VM in the end, there is no disk either.
pub async fn run(client: &Client, args: &Run) -> Result<()> {
    let name = args.name.clone().unwrap_or_else(|| new_name(&args.image));
    let disk = format!("{name}-root");
    let vm = vm(args, &name, &disk)?;
    make_disk(client, args, &disk).await?;
    let created = apply::create(client, vm, true, false).await;
    if let Err(failure) = created {
        // A VM that is there and could not be started keeps its disk.
        if client.get(&name).await.is_err() {
            let request = v1::DeleteDiskRequest {
                name: disk.clone(),
                ..Default::default()
            };
            send!(client.limit(WORK), client.disks, delete_disk, request).await?;
        }
        return Err(failure);
    }
    output::line(format!("vm/{name} started"))?;
    match args.console {
        true => console::run(client, &name, false).await,
        false => Ok(()),
    }
}

fn new_name(image: &str) -> String {
    let digits = uuid::Uuid::new_v4().simple().to_string();
    let image: String = image.chars().take(LONGEST).collect();
    format!(
        "{}-{}",
        image.trim_end_matches('-'),
        digits.get(..DIGITS).unwrap_or_default()
    )
}

async fn make_disk(client: &Client, args: &Run, name: &str) -> Result<()> {
    let labels = args
        .labels
        .iter()
        .map(|label| (label.key.clone(), label.value.clone()));
    let clone = match args.clone {
        None => v1::DiskClone::Unspecified,
        Some(CloneMode::Copy) => v1::DiskClone::Copy,
        Some(CloneMode::Overlay) => v1::DiskClone::Overlay,
    };
    let request = v1::CreateDiskRequest {
        disk: Some(v1::Disk {
            metadata: Some(v1::ObjectMetadata {
                name: name.to_owned(),
                labels: labels.collect(),
                ..Default::default()
            }),
            spec: Some(v1::VolumeSpec {
                size_bytes: args.disk_size.unwrap_or_default(),
                source: Some(Source::Image(v1::ImageClone {
                    name: args.image.clone(),
                    clone: clone.into(),
                })),
                ..Default::default()
            }),
            status: None,
        }),
        no_wait: true,
        ..Default::default()
    };
    let response = send!(client.limit(COPY), client.disks, create_disk, request).await;
    let response = response.map_err(|failure| about_disk(failure, name))?;
    match response.operation {
        Some(operation) => progress::follow(client, &operation, args.quiet).await,
        None => Ok(()),
    }
}

/// The VM that the flags describe.
fn vm(args: &Run, name: &str, disk: &str) -> Result<v1::Vm> {
    let user_data = match &args.user_data {
        Some(path) => read(path)?,
        None => String::new(),
    };
    let keys = args
        .ssh_keys
        .iter()
        .map(|key| ssh_keys(key))
        .collect::<Result<Vec<_>>>()?;
    let nics = args.nics.iter().enumerate();
    let nics = nics.map(|(index, text)| nic_spec::from_text(index, text));
    let linux = v1::LinuxBoot {
        kernel: args.kernel.clone(),
        initrd: args.initrd.clone().unwrap_or_default(),
        cmdline: args.cmdline.clone(),
    };
    let labels = args
        .labels
        .iter()
        .map(|label| (label.key.clone(), label.value.clone()));
    let vm = v1::Vm {
        metadata: Some(v1::ObjectMetadata {
            name: name.to_owned(),
            labels: labels.collect(),
            ..Default::default()
        }),
        spec: Some(v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores: args.cpus,
                ..Default::default()
            }),
            memory: Some(v1::MemorySpec {
                size_bytes: args.memory,
                ..Default::default()
            }),
            boot: Some(v1::BootSpec {
                source: Some(v1::boot_spec::Source::Linux(linux)),
            }),
            disks: vec![v1::DiskSpec {
                name: "root".to_owned(),
                source: Some(v1::disk_spec::Source::Disk(disk.to_owned())),
                ..Default::default()
            }],
            nics: nics.collect::<Result<_>>()?,
            cloud_init: Some(v1::CloudInit {
                user_data,
                ssh_authorized_keys: keys.concat(),
                hostname: args.hostname.clone().unwrap_or_default(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        status: None,
    };
    match Manifest::try_from(&vm) {
        Ok(_) => Ok(vm),
        Err(found) => {
            let found = found.0.into_iter();
            let found = found.map(|wrong| (wrong.field, wrong.description));
            Err(Failure {
                violations: found.collect(),
                ..Failure::new(Code::Invalid, "the VM is not valid")
            })
        }
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| {
        let message = format!("{}: {error}", path.display());
        Failure::new(Code::NotFound, message)
    })
}

/// The keys in a file, or one that was given itself.
fn ssh_keys(given: &str) -> Result<Vec<String>> {
    // A key has blanks; a file's name may have some too.
    let is_key = given.split_whitespace().count() > 1 && !Path::new(given).exists();
    let text = match is_key {
        true => given.to_owned(),
        false => read(Path::new(given))?,
    };
    let lines = text.lines().map(str::trim);
    let keys: Vec<_> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    if keys.iter().any(|key| key.contains("PRIVATE KEY")) {
        let message = format!("{given} is a private key: give the public one, {given}.pub");
        return Err(Failure::new(Code::Invalid, message));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_given_or_read_and_private_ones_refused() {
        assert_eq!(ssh_keys("ssh-ed25519 AAAA me").unwrap(), ["ssh-ed25519 AAAA me"]);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "# mine\nssh-ed25519 A a\n\nssh-rsa B b\n").unwrap();
        let keys = ssh_keys(file.to_str().unwrap()).unwrap();
        assert_eq!(keys, ["ssh-ed25519 A a", "ssh-rsa B b"]);
        fs::write(&file, "-----BEGIN OPENSSH PRIVATE KEY-----\n").unwrap();
        assert!(
            ssh_keys(file.to_str().unwrap())
                .unwrap_err()
                .message
                .contains("private")
        );
        assert!(ssh_keys("/nonexistent/key").is_err());
    }

    #[test]
    fn a_name_is_that_of_the_image_with_digits() {
        let name = new_name("debian13");
        assert!(name.starts_with("debian13-") && name.len() == "debian13-".len() + DIGITS);
        assert!(new_name(&"a".repeat(63)).len() <= 63 - "-root".len());
    }
}
