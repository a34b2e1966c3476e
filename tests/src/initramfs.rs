//! An initramfs made of a static busybox, the modules that are wanted of one kernel, and scripts.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::BufWriter;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cpio::{Archive, Entry};
use crate::run;
use crate::wait::Deadline;

/// Commands of busybox that have a name of their own in the guest. `busybox NAME` runs every other one.
const COMMANDS: &str = "[ ash awk base64 basename blkdiscard blockdev cat chmod chown chroot cmp cp cttyhack cut date dd \
    devmem df dirname dmesg du echo env expr false find free grep gunzip gzip halt head hexdump hostname id ifconfig \
    insmod ip kill killall ln ls lsmod md5sum mkdir mke2fs mknod mktemp modprobe more mount mv nc nproc od ping ping6 \
    poweroff printf ps pwd readlink reboot rm rmdir rmmod route sed seq setsid sh sha256sum sleep sort stat stty switch_root sync \
    sysctl tail tar taskset tee test time timeout top touch tr true tty udhcpc umount uname uniq uptime usleep vi wc \
    wget which xargs yes";

/// A file to put into an initramfs, with mode 0755.
#[derive(Clone, Debug)]
pub struct Extra {
    /// The file on the build host.
    pub from: PathBuf,
    /// Its path in the initramfs, without a leading slash; its folder is made.
    pub to: String,
}

impl Extra {
    /// The file `from`, to become `to`.
    pub fn new(from: impl Into<PathBuf>, to: impl Into<String>) -> Extra {
        Extra {
            from: from.into(),
            to: to.into(),
        }
    }
}

/// Content of an initramfs.
pub struct Initramfs<'a> {
    /// A folder with `bin/busybox` and the kernel's `lib/modules/<version>`, with `modules.dep`.
    pub root: &'a Path,
    /// The kernel's release.
    pub version: &'a str,
    /// Modules listed for `/init` in `/lib/modules/order`, one path per line, each after its
    /// dependencies. Modules that are built into the kernel are omitted.
    pub modules: &'a [&'a str],
    /// Files: `init` at least.
    pub files: &'a [Extra],
}

impl Initramfs<'_> {
    /// Writes it. It is not compressed: it is small, and a guest's time to unpack it would be measured with the rest.
    pub fn write(&self, to: &Path) -> Result<()> {
        let mut archive = Archive::new(BufWriter::new(File::create(to)?));
        self.entries(&mut |path, entry| Ok(archive.add(path, entry)?))?;
        archive
            .finish()
            .with_context(|| format!("write {}", to.display()))?;
        Ok(())
    }

    /// Writes its entries into the folder `root`, which exists: the root of a disk instead of an archive.
    pub fn write_into(&self, root: &Path) -> Result<()> {
        self.entries(&mut |path, entry| {
            let to = root.join(path);
            match entry {
                Entry::Folder => fs::create_dir_all(&to),
                Entry::Link(target) => symlink(target, &to),
                Entry::File(mode, content) => fs::write(&to, content)
                    .and_then(|()| fs::set_permissions(&to, fs::Permissions::from_mode(mode))),
                // devtmpfs has them.
                Entry::Character(..) => Ok(()),
            }
            .with_context(|| format!("write {}", to.display()))
        })
    }

    /// Passes each entry to `add`, a folder before its content.
    fn entries(&self, add: &mut Add<'_>) -> Result<()> {
        let modules = self.modules()?;
        let mut folders = BTreeSet::new();
        for folder in [
            "bin",
            "dev",
            "lib/modules",
            "mnt",
            "proc",
            "root",
            "run",
            "sys",
            "tmp",
        ] {
            add_folders(add, &mut folders, folder)?;
        }
        add("dev/console", Entry::Character(5, 1))?;
        let busybox = self.root.join("bin/busybox");
        let program = fs::read(&busybox).with_context(|| format!("read {}", busybox.display()))?;
        add("bin/busybox", Entry::File(0o755, &program))?;
        for command in COMMANDS.split_ascii_whitespace() {
            add(&format!("bin/{command}"), Entry::Link("busybox"))?;
        }
        add("sbin", Entry::Link("bin"))?;
        let mut order = String::new();
        for (number, module) in modules.iter().enumerate() {
            let name = format!("lib/modules/{number:02}-{}.ko", module.name);
            order.push_str(&format!("/{name}\n"));
            add(&name, Entry::File(0o644, &module.content))?;
        }
        add("lib/modules/order", Entry::File(0o644, order.as_bytes()))?;
        for extra in self.files {
            if let Some((folder, _)) = extra.to.rsplit_once('/') {
                add_folders(add, &mut folders, folder)?;
            }
            let content = fs::read(&extra.from).with_context(|| format!("read {}", extra.from.display()))?;
            add(&extra.to, Entry::File(0o755, &content))?;
        }
        Ok(())
    }

    /// The modules of this kernel in an order in which they can be inserted one by one.
    fn modules(&self) -> Result<Vec<Module>> {
        let base = self.root.join("lib/modules").join(self.version);
        let list = base.join("modules.dep");
        let dependencies = fs::read_to_string(&list).with_context(|| format!("read {}", list.display()))?;
        insertion_order(&dependencies, self.modules)
            .into_iter()
            .map(|path| Module::read(&base, path))
            .collect()
    }
}

/// Receives an entry with its path, without a leading slash.
type Add<'a> = dyn FnMut(&str, Entry<'_>) -> Result<()> + 'a;

struct Module {
    name: String,
    content: Vec<u8>,
}

impl Module {
    fn read(base: &Path, path: &str) -> Result<Module> {
        let file = base.join(path);
        let content = if path.ends_with(".xz") {
            let unpacked = tempfile::NamedTempFile::new()?;
            let script = format!("xz -dc '{}' > '{}'", file.display(), unpacked.path().display());
            run::check(Command::new("sh").args(["-c", &script]), Deadline::seconds(60))?;
            fs::read(unpacked.path())?
        } else {
            fs::read(&file).with_context(|| format!("read {}", file.display()))?
        };
        Ok(Module {
            name: module_name(path).to_owned(),
            content,
        })
    }
}

/// `kernel/drivers/block/virtio_blk.ko.xz` is the module `virtio_blk`.
fn module_name(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file)
}

/// Returns the paths of `wanted` and of their dependencies, dependencies first. `dependencies` is
/// the text of `modules.dep`: on a line `path: dependency …`, each module precedes its own
/// dependencies. A module that is not in the list is built into the kernel or does not exist.
fn insertion_order<'a>(dependencies: &'a str, wanted: &[&str]) -> Vec<&'a str> {
    let mut order: Vec<&str> = Vec::new();
    for name in wanted {
        let line = dependencies.lines().find_map(|line| {
            let (path, needs) = line.split_once(':')?;
            (module_name(path) == *name).then_some((path, needs))
        });
        let Some((path, needs)) = line else { continue };
        for module in needs.split_ascii_whitespace().rev().chain([path]) {
            if !order.contains(&module) {
                order.push(module);
            }
        }
    }
    order
}

fn add_folders(add: &mut Add<'_>, made: &mut BTreeSet<String>, path: &str) -> Result<()> {
    for (at, _) in path.match_indices('/').chain([(path.len(), "")]) {
        let folder = path.get(..at).unwrap_or(path);
        if made.insert(folder.to_owned()) {
            add(folder, Entry::Folder)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need_and_only_once() {
        let dependencies = "kernel/net/failover.ko.xz:\n\
            kernel/drivers/net/net_failover.ko.xz: kernel/net/failover.ko.xz\n\
            kernel/drivers/net/virtio_net.ko.xz: kernel/drivers/net/net_failover.ko.xz kernel/net/failover.ko.xz\n\
            kernel/drivers/block/virtio_blk.ko.xz:\n";
        assert_eq!(
            insertion_order(
                dependencies,
                &["virtio_net", "absent", "virtio_blk", "virtio_net"]
            ),
            [
                "kernel/net/failover.ko.xz",
                "kernel/drivers/net/net_failover.ko.xz",
                "kernel/drivers/net/virtio_net.ko.xz",
                "kernel/drivers/block/virtio_blk.ko.xz"
            ]
        );
    }

    #[test]
    fn tree_has_the_entries_of_the_archive() {
        let packages = tempfile::tempdir().expect("folder");
        let modules = packages.path().join("lib/modules/6.12");
        for (folder, file, content) in [
            (packages.path().join("bin"), "busybox", "program"),
            (modules.clone(), "modules.dep", "a.ko:\n"),
            (modules, "a.ko", "module"),
        ] {
            fs::create_dir_all(&folder).expect("folder");
            fs::write(folder.join(file), content).expect("file");
        }
        let root = tempfile::tempdir().expect("folder");
        Initramfs {
            root: packages.path(),
            version: "6.12",
            modules: &["a"],
            files: &[Extra::new(packages.path().join("bin/busybox"), "usr/bin/init")],
        }
        .write_into(root.path())
        .expect("write");
        let read = |path: &str| fs::read_to_string(root.path().join(path)).expect(path);
        assert_eq!(read("bin/sh"), "program");
        assert_eq!(read("lib/modules/order"), "/lib/modules/00-a.ko\n");
        assert_eq!(read("lib/modules/00-a.ko"), "module");
        let mode = fs::metadata(root.path().join("usr/bin/init"))
            .expect("init")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o755);
    }
}
