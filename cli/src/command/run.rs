//! `run`: a VM from an image, in one command.

use vmmd_api::v1::{self, boot_spec::Source as Boot, volume_spec::Source};
use vmmd_spec::vm::Manifest;

use super::{apply, create, disk, port_forward, progress};
use crate::{
    args::{verbs::Console, vm::Run},
    client::{COPY, Client, Kind as _, about_disk, send},
    console,
    failure::{Code, Failure, Result},
    output,
};

/// Digits after the image's name in the name of a VM without --name.
const DIGITS: usize = 5;
/// Port of SSH.
const SSH: u16 = 22;
/// Reason of a failure: the disk does not exist.
const NO_DISK: &str = "DISK_NOT_FOUND";
/// Maximum length of the part of an image's name in such a name.
const LONGEST: usize = 40;

/// The options of `run` that set fields of the VM and of its disk; the longest prefixes come first.
const OPTIONS: [(&str, &str); 21] = [
    ("metadata.name", "--name"),
    ("disk.metadata.name", "--name"),
    ("disk.spec.sizeBytes", "--disk-size"),
    ("disk.spec.image", "IMAGE"),
    ("spec.disks[0]", "--name"),
    ("spec.cpu.model", "--cpu-model"),
    ("spec.cpu.features", "--cpu-features"),
    ("spec.cpu", "--cpus"),
    ("spec.memory", "--memory"),
    ("spec.boot.linux.kernel", "--kernel"),
    ("spec.boot.linux.initrd", "--initrd"),
    ("spec.boot.firmware", "--firmware"),
    ("spec.boot", "--cmdline"),
    ("spec.cloudInit.hostname", "--hostname"),
    ("spec.cloudInit.sshAuthorizedKeys", "--ssh-key"),
    ("spec.cloudInit.networkConfig", "--network-config"),
    ("spec.cloudInit", "--user-data"),
    ("spec.credentials", "--credential"),
    ("spec.shares", "--share"),
    ("spec.stateDir", "--state-dir"),
    ("metadata.labels", "--label"),
];

/// Creates the disk, then the VM, and starts it. Deletes the disk when the VM could not be created.
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
        // An invalid name is reported for the VM and for its disk.
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
            v1::Disk::delete(client, &disk).await?;
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

/// Removes the missing disk from a refusal with several reasons: the disk is created when there is no other reason.
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
    let request = v1::CreateDiskRequest {
        disk: Some(v1::Disk {
            metadata: super::metadata(name, &args.guest.labels),
            spec: Some(v1::VolumeSpec {
                size_bytes: args.disk_size.unwrap_or_default(),
                source: Some(Source::Image(v1::ImageClone {
                    name: args.image.clone(),
                    clone: args.clone.unwrap_or_default().into(),
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
    nics.extend(args.guest.nics.iter().cloned());
    let cmdline = args.cmdline.clone().unwrap_or_default();
    let boot = match (&args.kernel, args.fast_boot) {
        (Some(kernel), _) => Boot::Linux(v1::LinuxBoot {
            kernel: kernel.clone(),
            initrd: args.initrd.clone().unwrap_or_default(),
            cmdline,
        }),
        (None, true) => Boot::FromDisk(v1::DiskBoot {
            disk: String::new(),
            cmdline_append: cmdline,
        }),
        (None, false) if !cmdline.is_empty() => {
            let message =
                "--cmdline: firmware reads the command line from the disk: give --fast-boot or --kernel too";
            return Err(Failure::new(Code::Usage, message));
        }
        (None, false) => Boot::Firmware(v1::FirmwareBoot {
            r#type: args.firmware.unwrap_or(v1::FirmwareType::Auto).into(),
            menu_seconds: 0,
        }),
    };
    let mut spec = v1::VmSpec {
        cpu: Some(args.guest.cpu()),
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
        ..create::of_guest(&args.guest, &nics)?
    };
    spec.disks.extend(create::cdroms(&args.guest));
    // Even without these flags, the guest receives its name and its network.
    spec.cloud_init.get_or_insert_default();
    let vm = v1::Vm {
        metadata: super::metadata(name, &args.guest.labels),
        spec: Some(spec),
        status: None,
    };
    match Manifest::try_from(&vm) {
        Ok(_) => Ok(vm),
        Err(found) => Err(Failure::invalid("the VM is not valid", found)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn violation_names_the_option() {
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
    fn invalid_name_of_vm_and_disk_is_reported_once() {
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
    fn missing_disk_is_no_reason() {
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
    fn name_is_the_image_name_with_digits() {
        let name = new_name("debian13");
        assert!(name.starts_with("debian13-") && name.len() == "debian13-".len() + DIGITS);
        assert!(new_name(&"a".repeat(63)).len() <= 63 - "-root".len());
    }
}
