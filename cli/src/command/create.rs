//! `create vm`: objects from manifests, or a VM from flags.

use vmmd_api::v1::{self, boot_spec::Source as Boot};
use vmmd_spec::vm::Manifest;

use super::{
    apply, cloud_init, credential, disk, disk_spec, keys, network, nic_spec, probe_spec, share_spec,
    work::guarded,
};
use crate::{
    args::{
        Output,
        vm::{CreateVm, Guest},
    },
    client::{Client, Kind as _},
    failure::{Failure, Result},
    manifest::{Document, Object},
    output::{self, format::Layout},
};

/// Creates what manifests describe.
pub async fn files(client: &Client, documents: &[Document], args: &CreateVm) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for document in documents {
        let done = match document.object.clone() {
            Object::Vm(made) => vm(client, *made, args).await.map(Ok),
            Object::Disk(_) | Object::Network(_) if args.dry_run => {
                Ok(output::line(format!("{} created (dry run)", document.title())))
            }
            Object::Disk(request) => match disk::create(client, *request).await {
                Ok((made, operation)) => Ok(disk::report(&made, operation.as_ref(), args.output.as_ref())),
                Err(failure) => Err(failure),
            },
            Object::Network(wanted) => match network::make(client, *wanted).await {
                Ok(made) => Ok(network::report(&made)),
                Err(failure) => Err(failure),
            },
        };
        match done {
            Ok(reported) => reported?,
            Err(failure) => failures.push(document.locate(failure)),
        }
    }
    super::all(failures)
}

/// Creates a VM.
pub async fn vm(client: &Client, vm: v1::Vm, args: &CreateVm) -> Result<()> {
    let creation = apply::create(client, vm.clone(), args.start, args.dry_run);
    report(&guarded(client, creation).await?, args)?;
    if !args.start && !args.dry_run {
        for line in apply::obstacles(client, &vm).await {
            eprintln!("warning: {line}");
        }
    }
    Ok(())
}

/// The VM that the flags describe.
pub fn from_flags(args: &CreateVm) -> Result<v1::Vm> {
    let (flags, guest) = (&args.flags, &args.guest);
    let cmdline = flags.cmdline.clone();
    let boot = match (flags.firmware, flags.from_disk) {
        (Some(firmware), _) => Boot::Firmware(v1::FirmwareBoot {
            r#type: firmware.into(),
            menu_seconds: flags.boot_menu.unwrap_or_default(),
        }),
        (None, true) => Boot::FromDisk(v1::DiskBoot {
            disk: String::new(),
            cmdline_append: cmdline.unwrap_or_default(),
        }),
        (None, false) => Boot::Linux(v1::LinuxBoot {
            kernel: flags.kernel.clone().unwrap_or_default(),
            initrd: flags.initrd.clone().unwrap_or_default(),
            cmdline: cmdline.unwrap_or_else(|| "console=ttyS0".to_owned()),
        }),
    };
    let disks = flags.disks.iter().enumerate();
    let disks = disks.map(|(index, text)| disk_spec::from_text(index, text));
    let disks = disks.chain(cdroms(guest).map(Ok));
    let groups = flags.rate_groups.iter().map(|text| disk_spec::rate_group(text));
    let (no_balloon, free_page_reporting) = (flags.no_balloon, flags.free_page_reporting);
    let spec = v1::VmSpec {
        cpu: Some(args.resources.cpu(guest)),
        memory: Some(args.resources.memory(flags.memory)),
        boot: Some(v1::BootSpec { source: Some(boot) }),
        disks: disks.collect::<Result<_>>()?,
        rate_groups: groups.collect::<Result<_>>()?,
        on_panic: flags.on_panic.unwrap_or_default().into(),
        // Without these flags, the daemon decides.
        balloon: (no_balloon || free_page_reporting).then_some(v1::BalloonSpec {
            disabled: no_balloon,
            free_page_reporting,
            target_bytes: 0,
        }),
        virtio_console: flags.virtio_console.then_some(v1::VirtioConsoleSpec {}),
        clock: flags.timezone.clone().map(|timezone| v1::ClockSpec {
            timezone,
            ..v1::ClockSpec::default()
        }),
        smbios: flags.smbios.as_deref().map(smbios).transpose()?,
        ..of_guest(guest, &guest.nics)?
    };
    let vm = v1::Vm {
        metadata: super::metadata(args.name.as_deref().unwrap_or_default(), &guest.labels),
        spec: Some(spec),
        status: None,
    };
    if let Err(violations) = Manifest::try_from(&vm) {
        let mut failure = Failure::invalid("the VM is not valid", violations);
        for (field, _) in &mut failure.violations {
            if let Some(option) = option(field) {
                option.clone_into(field);
            }
        }
        return Err(failure);
    }
    Ok(vm)
}

/// The identity that `--smbios` describes.
fn smbios(text: &str) -> Result<v1::SmbiosSpec> {
    const KEYS: &str = "uuid=, serial=, manufacturer=, product=, version=, sku=, family=, asset-tag=";
    let mut smbios = v1::SmbiosSpec::default();
    keys::each("--smbios", text, KEYS, |key, value| {
        let field = match key {
            "uuid" => &mut smbios.uuid,
            "serial" => &mut smbios.serial,
            "manufacturer" => &mut smbios.manufacturer,
            "product" => &mut smbios.product,
            "version" => &mut smbios.version,
            "sku" => &mut smbios.sku,
            "family" => &mut smbios.family,
            "asset-tag" => &mut smbios.asset_tag,
            _ => return Ok(false),
        };
        value.unwrap_or_default().clone_into(field);
        Ok(true)
    })?;
    Ok(smbios)
}

/// The CD-ROM drives that the flags of `create vm` and `run` describe. They follow the disks, which firmware tries first.
pub fn cdroms(guest: &Guest) -> impl Iterator<Item = v1::DiskSpec> {
    let media = guest.cdroms.iter().enumerate();
    media.map(|(index, medium)| disk_spec::cdrom(index, medium))
}

/// The part of a spec that the flags of `create vm` and `run` describe, with these NICs.
pub fn of_guest(guest: &Guest, nics: &[String]) -> Result<v1::VmSpec> {
    let nics = nics.iter().enumerate();
    let nics = nics.map(|(index, text)| nic_spec::from_text(index, text));
    let credentials = guest.credentials.iter().map(|text| credential::from_text(text));
    let shares = guest.shares.iter().map(|text| share_spec::from_text(text));
    Ok(v1::VmSpec {
        nics: nics.collect::<Result<_>>()?,
        shares: shares.collect::<Result<_>>()?,
        run_policy: guest.run_policy.unwrap_or_default().into(),
        cloud_init: cloud_init::from_flags(&guest.cloud_init)?,
        credentials: credentials.collect::<Result<_>>()?,
        state_dir: guest.state_dir.clone().unwrap_or_default(),
        guest_agent: guest.guest_agent.then_some(v1::GuestAgentSpec {}),
        tpm: guest.tpm.then_some(v1::TpmSpec {}),
        watchdog: guest.watchdog.map(|action| v1::WatchdogSpec {
            action: action.into(),
        }),
        vsock: guest.vsock.then_some(v1::VsockSpec::default()),
        channels: guest
            .channels
            .iter()
            .cloned()
            .map(|name| v1::ChannelSpec { name })
            .collect(),
        probes: probe_spec::from_flags(&guest.probes)?,
        display: guest.display.map(|layout| v1::DisplaySpec {
            keyboard_layout: layout.into(),
            ..v1::DisplaySpec::default()
        }),
        ..Default::default()
    })
}

/// The option that sets a field. Lists and parts of options have no entry, as the path of the field is more exact.
fn option(field: &str) -> Option<&'static str> {
    const OPTIONS: [(&str, &str); 8] = [
        ("metadata.name", "NAME"),
        ("spec.cpu.cores", "--cpus"),
        ("spec.cpu.model", "--cpu-model"),
        ("spec.cpu.features.add", "--cpu-features"),
        ("spec.cpu.features.remove", "--cpu-features"),
        ("spec.memory.sizeBytes", "--memory"),
        ("spec.boot.linux.kernel", "--kernel"),
        ("spec.boot.linux.initrd", "--initrd"),
    ];
    let known = OPTIONS.iter().find(|(name, _)| *name == field);
    known.map(|(_, option)| *option)
}

fn report(vm: &v1::Vm, args: &CreateVm) -> Result<()> {
    let name = vm.name();
    match &args.output {
        Some(output) if *output != Output::Wide => output::print_documents(&[vm], output, Layout::default()),
        _ => {
            let started = if args.start { " and started" } else { "" };
            let suffix = if args.dry_run { " (dry run)" } else { "" };
            output::line(format!("vm/{name} created{started}{suffix}"))
        }
    }
}
