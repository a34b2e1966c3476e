//! One cloud image in all formats.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use vmmd_tests::{
    debian::Release,
    demo::ready::{self, Readiness},
    guest::cloud_image,
    run,
    wait::{Deadline, Process},
};

/// A daemon of this build on this machine: images need no KVM.
struct Here {
    folder: tempfile::TempDir,
    programs: PathBuf,
    daemon: Child,
}

impl Here {
    fn start() -> Self {
        let test = std::env::current_exe().expect("this program");
        let programs = test
            .ancestors()
            .nth(2)
            .expect("the programs beside it")
            .to_owned();
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().display();
        let config = folder.path().join("config.toml");
        let text = format!(
            "state_dir = '{root}/state'\nrun_dir = '{root}/run'\nlog_dir = '{root}/log'\nsocket_group = '0'\n\
             kvm_device = '/dev/null'\nvmm = '{}'\n[vm_uids]\nfirst = 1700000000\ncount = 100\n",
            programs.join("vmm").display()
        );
        fs::write(&config, text).expect("its configuration");
        let readiness = Readiness::new(folder.path()).expect("a socket");
        let log = fs::File::create(folder.path().join("vmmd.log")).expect("a log");
        let daemon = Command::new("unshare")
            .arg("--net")
            .arg(programs.join("vmmd"))
            .arg("--config")
            .arg(config)
            .env(ready::VARIABLE, &readiness.path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("start vmmd");
        let here = Self {
            folder,
            programs,
            daemon,
        };
        let process = Process::open(here.daemon.id())
            .expect("look for vmmd")
            .expect("vmmd");
        if let Err(error) = readiness.wait(&process, Deadline::seconds(60)) {
            let log = fs::read_to_string(here.folder.path().join("vmmd.log"));
            panic!("vmmd does not serve: {error:#}\n{}", log.unwrap_or_default());
        }
        here
    }

    /// Imports a file, and returns the size and digest of the disk in it.
    fn import(&self, name: &str, file: &Path) -> String {
        let mut import = Command::new(self.programs.join("vmmctl"));
        import
            .arg("--socket")
            .arg(self.folder.path().join("run/vmmd.sock"))
            .args(["image", "import", "--quiet", name])
            .arg(file);
        let said = run::check(&mut import, Deadline::seconds(600)).expect("the import");
        print!("{said}");
        let (_, found) = said.split_once(" imported, ").expect("size and digest");
        found.trim().to_owned()
    }

    /// The files that images are kept in.
    fn stored(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.folder.path().join("state/images")).expect("images");
        files.map(|file| file.expect("a file").path()).collect()
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[test]
fn cloud_image_has_one_content_in_all_formats() {
    let image = cloud_image(Release::Bookworm).expect("the image");
    let daemon = Here::start();
    let folder = tempfile::tempdir().expect("a folder");
    let found = daemon.import("qcow2-xz", &image);
    let (size, digest) = found.split_once(", ").expect("size and digest");
    assert_eq!(size, "1.5Gi");
    assert!(digest.starts_with("blocks-sha256:"), "{found}");
    let kept = daemon.stored();
    assert_eq!(kept.len(), 1);

    let sh = |script: &str, file: &Path| {
        let mut command = Command::new("sh");
        command
            .args(["-ec", script, "sh"])
            .arg(file)
            .current_dir(folder.path());
        run::check(&mut command, Deadline::seconds(600)).expect("another format");
    };
    sh("xz -dc \"$1\" >disk", &image);
    let convert = "qemu-img convert -f qcow2 disk -O";
    for (name, commands) in [
        ("vmdk", format!("{convert} vmdk \"$1\"")),
        (
            "vmdk-stream",
            format!("{convert} vmdk -o subformat=streamOptimized \"$1\""),
        ),
        ("vhd", format!("{convert} vpc -o force_size=on \"$1\"")),
        ("vhdx", format!("{convert} vhdx \"$1\"")),
        ("vdi", format!("{convert} vdi \"$1\"")),
        (
            "raw-gz",
            format!("{convert} raw raw; gzip -1 <raw >\"$1\"; rm raw"),
        ),
    ] {
        let file = folder.path().join(name);
        sh(&commands, &file);
        assert_eq!(daemon.import(name, &file), found, "{name}");
        assert_eq!(daemon.stored(), kept, "{name}");
        fs::remove_file(file).expect("remove it");
    }
    // A VHD of an old kind says its size in cylinders, heads and sectors: it is a disk larger by some KiB, with zeroes at its end.
    let file = folder.path().join("vhd-geometry");
    sh(&format!("{convert} vpc \"$1\""), &file);
    let rounded = daemon.import("vhd-geometry", &file);
    assert!(!rounded.ends_with(digest), "{rounded}");
}
