//! A Debian as clouds get it: cloud-init, a GPT with an EFI system partition, and GRUB's configuration; a qcow2 that xz has packed.

use std::{
    fs,
    io::{Cursor, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};

use crate::{
    cache::{self, Inputs},
    debian::{self, Release, Root, boot_file},
    paths, run,
    wait::Deadline,
};

/// Raise it when the code below makes another image of the same inputs.
const BUILDER_VERSION: u32 = 2;
/// Size of the disk in MiB. It is sparse.
const DISK_MIB: u64 = 1536;
/// Where the EFI system partition begins, and where the root, in MiB; the last MiB has the copy of the partition table.
const ESP_AT: u64 = 1;
const ROOT_AT: u64 = 16;
/// UUID of the root file system. The overlay's fstab contains it, too.
const ROOT_UUID: &str = "5c1f0000-0000-4000-8000-00000000c10d";

/// The image of a release: `disk.qcow2.xz`, of 1.5 GiB.
pub fn get(release: Release) -> Result<PathBuf> {
    let source = paths::crate_dir().join("guest/cloud");
    let mut inputs = Inputs::new(BUILDER_VERSION);
    inputs.add_tree(&source)?.add_file(&release.sources())?;
    let name = format!("cloud-{}", release.suite());
    let folder = cache::get_or_build(&name, &inputs, |out| build(release, &source, out))?;
    Ok(folder.join("disk.qcow2.xz"))
}

fn build(release: Release, source: &Path, out: &Path) -> Result<()> {
    let root = out.join("root");
    let mut packages = debian::packages(&source.join("packages"))?;
    packages.push(kernel(release, source)?);
    Root {
        release,
        variant: "minbase",
        packages: &packages,
        more_sources: None,
        overlay: Some(source.join("overlay")),
        customize: Some(source.join("customize.sh")),
    }
    .make(&root)?;
    let kernel = boot_file(&root, "vmlinuz-")?;
    let version = kernel
        .file_name()
        .and_then(|name| name.to_str()?.strip_prefix("vmlinuz-"))
        .context("the kernel's release")?;
    fs::write(root.join("boot/grub/grub.cfg"), grub_cfg(version))?;
    let disk = out.join("disk.raw");
    partition(&disk)?;
    let file = fs::File::options().write(true).open(&disk)?;
    file.write_all_at(&esp()?, ESP_AT << 20)?;
    let mut command = Command::new("mkfs.ext4");
    command
        .args(["-q", "-F", "-L", "cloudimg", "-U", ROOT_UUID])
        .args([
            "-E",
            &format!("offset={},lazy_itable_init=0,lazy_journal_init=0", ROOT_AT << 20),
            "-d",
        ])
        .arg(&root)
        .arg(&disk)
        .arg(format!("{}m", DISK_MIB - ROOT_AT - 1))
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    run::check(&mut command, Deadline::seconds(600))?;
    fs::remove_dir_all(&root).context("remove the root folder that the disk was made from")?;
    let qcow2 = out.join("disk.qcow2");
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-O", "qcow2"]).arg(&disk).arg(&qcow2);
    run::check(&mut command, Deadline::seconds(600))?;
    fs::remove_file(&disk)?;
    // As it is distributed, packed the fastest way.
    run::check(
        Command::new("xz").args(["-0", "-T0"]).arg(&qcow2),
        Deadline::seconds(600),
    )
    .map(drop)
}

/// The package of the kernel that is installed.
fn kernel(release: Release, source: &Path) -> Result<String> {
    let lines = fs::read_to_string(source.join("kernels")).context("read the kernels")?;
    let words = lines
        .lines()
        .find_map(|line| line.strip_prefix(release.suite())?.split_whitespace().next());
    words.map(str::to_owned).context("the kernel of the release")
}

fn partition(disk: &Path) -> Result<()> {
    fs::File::create(disk)?.set_len(DISK_MIB << 20)?;
    let sectors = |mib: u64| (mib << 20) / 512;
    let script = format!(
        "label: gpt\nstart={}, size={}, type=U\nstart={}, size={}, type=L\n",
        sectors(ESP_AT),
        sectors(ROOT_AT - ESP_AT),
        sectors(ROOT_AT),
        sectors(DISK_MIB - ROOT_AT - 1)
    );
    let table = disk.with_extension("sfdisk");
    fs::write(&table, script)?;
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"exec sfdisk -q "$1" <"$2""#, "sfdisk"])
        .args([disk, &table])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    run::check(&mut command, Deadline::seconds(60))?;
    fs::remove_file(table).context("remove the partition table's script")
}

/// The EFI system partition, with what Debian's GRUB has there: the way to its configuration.
fn esp() -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from((ROOT_AT - ESP_AT) << 20)?];
    let mut cursor = Cursor::new(&mut bytes);
    fatfs::format_volume(
        &mut cursor,
        FormatVolumeOptions::new().volume_label(*b"ESP        "),
    )?;
    let volume = FileSystem::new(&mut cursor, FsOptions::new())?;
    let folder = volume.root_dir().create_dir("EFI")?.create_dir("debian")?;
    let text = format!(
        "search.fs_uuid {ROOT_UUID} root\nset prefix=($root)'/boot/grub'\nconfigfile $prefix/grub.cfg\n"
    );
    folder.create_file("grub.cfg")?.write_all(text.as_bytes())?;
    drop(folder);
    volume.unmount()?;
    Ok(bytes)
}

/// As update-grub would write it in the guest, which it can't do on a build host.
fn grub_cfg(version: &str) -> String {
    let entry = |title: &str, id: &str| {
        format!(
            "menuentry '{title}' --class debian --class gnu-linux --class gnu --class os $menuentry_id_option '{id}' {{\n\
             \tload_video\n\tinsmod gzio\n\tif [ x$grub_platform = xxen ]; then insmod xzio; insmod lzopio; fi\n\
             \tinsmod part_gpt\n\tinsmod ext2\n\tsearch --no-floppy --fs-uuid --set=root {ROOT_UUID}\n\
             \techo\t'Loading Linux {version} ...'\n\
             \tlinux\t/boot/vmlinuz-{version} root=UUID={ROOT_UUID} ro console=ttyS0 quiet\n\
             \techo\t'Loading initial ramdisk ...'\n\tinitrd\t/boot/initrd.img-{version}\n}}\n"
        )
    };
    let simple = entry("Debian GNU/Linux", &format!("gnulinux-simple-{ROOT_UUID}"));
    let advanced = entry(
        &format!("Debian GNU/Linux, with Linux {version}"),
        &format!("gnulinux-{version}-advanced-{ROOT_UUID}"),
    );
    format!(
        "if [ -s $prefix/grubenv ]; then\n  set have_grubenv=true\n  load_env\nfi\n\
         if [ \"${{next_entry}}\" ] ; then\n   set default=\"${{next_entry}}\"\n   set next_entry=\n   save_env next_entry\n   \
         set boot_once=true\nelse\n   set default=\"0\"\nfi\n\
         if [ x\"${{feature_menuentry_id}}\" = xy ]; then\n  menuentry_id_option=\"--id\"\nelse\n  menuentry_id_option=\"\"\nfi\n\
         export menuentry_id_option\nset timeout=0\n{simple}\
         submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-{ROOT_UUID}' {{\n{advanced}}}\n"
    )
}
