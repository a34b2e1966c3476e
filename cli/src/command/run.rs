//! `run`: a VM from an image, in one command.

use vmmd_api::v1::{self, boot_spec::Source as Boot, volume_spec::Source};
use vmmd_spec::vm::Manifest;

use super::{apply, cloud_init, disk, nic_spec, port_forward, progress, share_spec};
use crate::{
    args::{Console, disk::CloneMode, run::Run},
    client::{COPY, Client, WORK, about_disk, send},
    console,
    failure::{Code, Failure, Result},
    output,
};

/// Digits behind the image's name in the name of a VM that was given none.
const DIGITS: usize = 5;
/// Port of SSH.
const SSH: u16 = 22;
/// The daemon's word for a disk that is not there.
const NO_DISK: &str = "DISK_NOT_FOUND";
/// Longest name of an image that such a name has in it.
const LONGEST: usize = 40;

/// The options of `run` that set fields of the VM and of its disk; the longest beginnings come first.
const OPTIONS: [(&str, &str); 17] = [
    ("metadata.name", "--name"),
    ("disk.metadata.name", "--name"),
    ("disk.spec.sizeBytes", "--disk-size"),
    ("disk.spec.image", "IMAGE"),
    ("spec.disks[0]", "--name"),
    ("spec.cpu", "--cpus"),
    ("spec.memory", "--memory"),
    ("spec.boot.linux.kernel", "--kernel"),
    ("spec.boot.linux.initrd", "--initrd"),
    ("spec.boot", "--cmdline"),
    ("spec.cloudInit.hostname", "--hostname"),
    ("spec.cloudInit.sshAuthorizedKeys", "--ssh-key"),
    ("spec.cloudInit.networkConfig", "--network-config"),
    ("spec.cloudInit", "--user-data"),
    ("spec.shares", "--share"),
    ("spec.stateDir", "--state-dir"),
    ("metadata.labels", "--label"),
];

/// Makes the disk, then the VM, and starts it. When there is no VM in the end, there is no disk either.
pub async fn run(client: &Client, args: &Run) -> Result<()> {
    let client = &client.with_timeout(args.timeout.timeout);
    let in_network = args.network.is_some();
    let ran = run_as_written(client, args).await;
    ran.map_err(|failure| in_options(failure, in_network))
}

/// Replaces field paths of the VM and its disk by the options of `run`.
fn in_options(mut failure: Failure, in_network: bool) -> Failure {
    let option = |field: &str| match field.strip_prefix("spec.nics[") {
        Some(nic) if in_network && nic.starts_with("0]") => match nic.contains("publishedPorts") {
            true => Some("--publish"),
            false => Some("--network"),
        },
        Some(_) => Some("--nic"),
        None => OPTIONS
            .iter()
            .find(|(begin, _)| field.starts_with(begin))
            .map(|(_, option)| *option),
    };
    let mut options: Vec<&str> = Vec::new();
    failure.violations.retain_mut(|(field, _)| {
        let Some(option) = option(field) else { return true };
        option.clone_into(field);
        // A bad name is one of the disk too.
        let first = option != "--name" || !options.contains(&option);
        options.push(option);
        first
    });
    if let Some((field, rest)) = failure.message.split_once(": ")
        && let Some(option) = option(field)
    {
        failure.message = format!("{option}: {rest}");
    }
    failure
}

async fn run_as_written(client: &Client, args: &Run) -> Result<()> {
    let name = args.name.clone().unwrap_or_else(|| new_name(&args.image));
    let disk = format!("{name}-root");
    let vm = vm(args, &name, &disk)?;
    would_be_taken(client, &vm, &name, &disk).await?;
    make_disk(client, args, &disk).await?;
    let created = apply::create(client, vm, true, false).await;
    if let Err(failure) = created {
        // An existing VM that failed to start keeps its disk.
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
    if let Some(patience) = args.wait {
        port_forward::answers(client, &name, SSH, patience).await?;
        output::line(format!("vm/{name} answers on port {SSH}"))?;
    }
    match args.console {
        true => {
            let args = Console {
                name,
                ..Console::default()
            };
            console::run(client, &args).await
        }
        false => Ok(()),
    }
}

/// Checks whether the node accepts the VM, without its disk: the disk is created only afterwards,
/// which can take minutes.
async fn would_be_taken(client: &Client, vm: &v1::Vm, name: &str, disk: &str) -> Result<()> {
    match apply::create(client, vm.clone(), true, true).await {
        Err(failure) if failure.reason.as_ref() == NO_DISK && failure.violations.is_empty() => {}
        Err(mut failure) => {
            failure.message = without_disk(&failure.message, disk);
            return Err(failure);
        }
        Ok(_) => return Ok(()),
    }
    match client.get(name).await {
        Err(failure) if failure.code == Code::NotFound => Ok(()),
        Err(failure) => Err(failure),
        Ok(_) => {
            let failure = Failure::new(Code::Conflict, format!("there is a VM \"{name}\" already"));
            Err(failure.hint(format!("`vmmctl describe vm {name}` shows it")))
        }
    }
}

/// Leaves the missing disk out of a refusal with several reasons: the disk is made when nothing else is wrong.
fn without_disk(message: &str, disk: &str) -> String {
    let missing = format!("spec.disks[0].disk: there is no disk \"{disk}\" on this node");
    let reasons = message.split("; ").filter(|reason| *reason != missing);
    reasons.collect::<Vec<_>>().join("; ")
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
    let clone = match args.clone {
        None => v1::DiskClone::Unspecified,
        Some(CloneMode::Copy) => v1::DiskClone::Copy,
        Some(CloneMode::Overlay) => v1::DiskClone::Overlay,
    };
    let request = v1::CreateDiskRequest {
        disk: Some(v1::Disk {
            metadata: super::metadata::labelled(name, &args.labels),
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
        Some(operation) => progress::follow(client, &operation, args.quiet).await?,
        None => return Ok(()),
    }
    disk::warn(client, name).await;
    Ok(())
}

/// The VM that the flags describe.
fn vm(args: &Run, name: &str, disk: &str) -> Result<v1::Vm> {
    let mut nics = Vec::new();
    if let Some(network) = &args.network {
        let ports = match args.publish.as_slice() {
            [] => String::new(),
            ports => format!(",publish={}", ports.join("+")),
        };
        nics.push(format!("network={network}{ports}"));
    }
    nics.extend(args.nics.iter().cloned());
    let nics = nics.iter().enumerate();
    let nics = nics.map(|(index, text)| nic_spec::from_text(index, text));
    let cmdline = args.cmdline.clone().unwrap_or_default();
    let boot = match &args.kernel {
        Some(kernel) => Boot::Linux(v1::LinuxBoot {
            kernel: kernel.clone(),
            initrd: args.initrd.clone().unwrap_or_default(),
            cmdline,
        }),
        None => Boot::FromDisk(v1::DiskBoot {
            disk: String::new(),
            cmdline_append: cmdline,
        }),
    };
    let vm = v1::Vm {
        metadata: super::metadata::labelled(name, &args.labels),
        spec: Some(v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores: args.cpus,
                ..Default::default()
            }),
            memory: Some(v1::MemorySpec {
                size_bytes: args.memory,
                ..Default::default()
            }),
            boot: Some(v1::BootSpec { source: Some(boot) }),
            disks: vec![v1::DiskSpec {
                name: "root".to_owned(),
                source: Some(v1::disk_spec::Source::Disk(disk.to_owned())),
                ..Default::default()
            }],
            nics: nics.collect::<Result<_>>()?,
            shares: args
                .shares
                .iter()
                .map(|text| share_spec::from_text(text))
                .collect::<Result<_>>()?,
            state_dir: args.state_dir.clone().unwrap_or_default(),
            run_policy: args.run_policy.unwrap_or_default().into(),
            // Even without these flags, the guest receives its name and its network.
            cloud_init: Some(cloud_init::from_flags(&args.cloud_init)?.unwrap_or_default()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_of_a_field_names_the_option_of_run() {
        let of = |field: &str, in_network| {
            let failure = Failure {
                violations: vec![(field.to_owned(), "is wrong".to_owned())],
                ..Failure::new(Code::Invalid, "the VM is not valid")
            };
            in_options(failure, in_network).violations[0].0.clone()
        };
        for (field, in_network, expected) in [
            ("spec.memory.sizeBytes", false, "--memory"),
            ("disk.spec.sizeBytes", false, "--disk-size"),
            ("metadata.name", false, "--name"),
            ("spec.nics[0].network", true, "--network"),
            ("spec.nics[0].publishedPorts[0].nodePort", true, "--publish"),
            ("spec.nics[1].bridge", true, "--nic"),
            ("spec.nics[0].bridge", false, "--nic"),
            ("spec.cpu.cores", false, "--cpus"),
        ] {
            assert_eq!(of(field, in_network), expected, "{field}");
        }
        let said = in_options(
            Failure::new(Code::Precondition, "spec.nics[0].bridge: there is none"),
            false,
        );
        assert_eq!(said.message, "--nic: there is none");
    }

    #[test]
    fn bad_name_of_vm_and_disk_is_said_once() {
        let wrong = |field: &str, text: &str| (field.to_owned(), text.to_owned());
        let failure = Failure {
            violations: vec![
                wrong("metadata.name", "must be 1 to 63 of a-z, 0-9 and -, is \"X_1\""),
                wrong(
                    "spec.disks[0].disk",
                    "must be 1 to 63 of a-z, 0-9 and -, is \"X_1-root\"",
                ),
            ],
            ..Failure::new(Code::Invalid, "the VM is not valid")
        };
        assert_eq!(
            in_options(failure, false).to_string(),
            "--name: must be 1 to 63 of a-z, 0-9 and -, is \"X_1\""
        );
    }

    #[test]
    fn disk_that_is_not_made_yet_is_no_reason() {
        let missing = "spec.disks[0].disk: there is no disk \"web-root\" on this node";
        for message in [
            format!("not enough memory; {missing}"),
            format!("{missing}; not enough memory"),
            "not enough memory".to_owned(),
        ] {
            assert_eq!(without_disk(&message, "web-root"), "not enough memory");
        }
        let other = "not enough memory; spec.disks[1].disk: there is no disk \"b\" on this node";
        assert_eq!(without_disk(other, "web-root"), other);
    }

    #[test]
    fn a_name_is_that_of_the_image_with_digits() {
        let name = new_name("debian13");
        assert!(name.starts_with("debian13-") && name.len() == "debian13-".len() + DIGITS);
        assert!(new_name(&"a".repeat(63)).len() <= 63 - "-root".len());
    }
}
