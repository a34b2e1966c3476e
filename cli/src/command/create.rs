//! `create`: VMs and disks that must not exist yet, from manifests; a VM from flags.

use vmmd_api::v1::{self, boot_spec::Source as Boot};
use vmmd_spec::vm::Manifest;

use super::{apply, cloud_init, disk, disk_spec, interrupt, memory, nic_spec, share_spec};
use crate::{
    args::{CreateVm, Output},
    client::Client,
    failure::{Code, Failure, Result},
    manifest::{Document, Object},
    output::{self, format::Layout},
};

/// Creates what manifests describe.
pub async fn files(client: &Client, documents: &[Document], args: &CreateVm) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for document in documents {
        let done = match document.object.clone() {
            Object::Vm(made) => vm(client, *made, args).await.map(Ok),
            Object::Disk(_) if args.dry_run => {
                Ok(output::line(format!("{} created (dry run)", document.title())))
            }
            Object::Disk(request) => match disk::create(client, *request).await {
                Ok((made, operation)) => Ok(disk::report(&made, operation.as_ref(), args.output.as_ref())),
                Err(failure) => Err(failure),
            },
        };
        match done {
            Ok(reported) => reported.map_err(super::one)?,
            Err(failure) => failures.push(document.locate(failure)),
        }
    }
    super::all(failures)
}

/// Creates a VM.
pub async fn vm(client: &Client, vm: v1::Vm, args: &CreateVm) -> Result<()> {
    let creation = apply::create(client, vm.clone(), args.start, args.dry_run);
    report(&interrupt::guarded(client, creation).await?, args)?;
    if !args.start && !args.dry_run {
        for line in apply::obstacles(client, &vm).await {
            eprintln!("warning: {line}");
        }
    }
    Ok(())
}

/// The VM that the flags describe.
pub fn from_flags(args: &CreateVm) -> Result<v1::Vm> {
    let cmdline = args.cmdline.clone();
    let boot = match args.from_disk {
        true => Boot::FromDisk(v1::DiskBoot {
            disk: String::new(),
            cmdline_append: cmdline.unwrap_or_default(),
        }),
        false => Boot::Linux(v1::LinuxBoot {
            kernel: args.kernel.clone().unwrap_or_default(),
            initrd: args.initrd.clone().unwrap_or_default(),
            cmdline: cmdline.unwrap_or_else(|| "console=ttyS0".to_owned()),
        }),
    };
    let numbered = |texts: &[String]| texts.iter().cloned().enumerate().collect::<Vec<_>>();
    let disks = numbered(&args.disks)
        .into_iter()
        .map(|(index, text)| disk_spec::from_text(index, &text));
    let groups = args.rate_groups.iter().map(|text| disk_spec::rate_group(text));
    let nics = numbered(&args.nics)
        .into_iter()
        .map(|(index, text)| nic_spec::from_text(index, &text));
    let vm = v1::Vm {
        metadata: super::metadata::labelled(args.name.as_deref().unwrap_or_default(), &args.labels),
        spec: Some(v1::VmSpec {
            cpu: Some(args.resources.cpu(args.cpus)),
            memory: Some(args.resources.memory(args.memory)),
            boot: Some(v1::BootSpec { source: Some(boot) }),
            disks: disks.collect::<Result<_>>()?,
            nics: nics.collect::<Result<_>>()?,
            rate_groups: groups.collect::<Result<_>>()?,
            run_policy: args.run_policy.unwrap_or_default().into(),
            on_crash: v1::CrashPolicy::Unspecified.into(),
            on_panic: args.on_panic.unwrap_or_default().into(),
            clock: None,
            cloud_init: cloud_init::from_flags(&args.cloud_init)?,
            balloon: memory::from_flags(args.no_balloon, args.free_page_reporting),
            display: args.display.map(|layout| v1::DisplaySpec {
                keyboard_layout: layout.into(),
                ..v1::DisplaySpec::default()
            }),
            shares: args
                .shares
                .iter()
                .map(|text| share_spec::from_text(text))
                .collect::<Result<_>>()?,
            state_dir: args.state_dir.clone().unwrap_or_default(),
            virtio_console: args.virtio_console.then_some(v1::VirtioConsoleSpec {}),
        }),
        status: None,
    };
    if let Err(violations) = Manifest::try_from(&vm) {
        let found = violations
            .0
            .into_iter()
            .map(|violation| (option(violation.field), violation.description));
        let failure = Failure::new(Code::Invalid, "the VM is not valid");
        return Err(Failure {
            violations: found.collect(),
            ..failure
        });
    }
    Ok(vm)
}

/// The option that sets a field, or the field itself: that of a list or of a part of an option is more exact.
fn option(field: String) -> String {
    const OPTIONS: [(&str, &str); 5] = [
        ("metadata.name", "NAME"),
        ("spec.cpu.cores", "--cpus"),
        ("spec.memory.sizeBytes", "--memory"),
        ("spec.boot.linux.kernel", "--kernel"),
        ("spec.boot.linux.initrd", "--initrd"),
    ];
    let known = OPTIONS.iter().find(|(name, _)| *name == field);
    known.map_or(field, |(_, option)| (*option).to_owned())
}

fn report(vm: &v1::Vm, args: &CreateVm) -> Result<()> {
    let name = vm
        .metadata
        .as_ref()
        .map(|metadata| metadata.name.as_str())
        .unwrap_or_default();
    match &args.output {
        Some(output) if *output != Output::Wide => output::print_documents(&[vm], output, Layout::default()),
        _ => {
            let started = if args.start { " and started" } else { "" };
            let suffix = if args.dry_run { " (dry run)" } else { "" };
            output::line(format!("vm/{name} created{started}{suffix}"))
        }
    }
}
