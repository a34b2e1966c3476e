//! Devices and files that the node itself uses are refused as disks of a VM.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::mount::{MountFlags, UnmountFlags};
use tonic::{Code, Status};
use vmmd_api::v1;

use crate::{
    harness::{Daemon, assert_refused, assert_says},
    snapshots::disks_alone::of_disks,
    verbs::raw_file,
};

/// A file with an ext4 file system, a loop device above it, and a folder to mount that at. All of it goes when it is dropped.
struct Loop {
    file: PathBuf,
    device: String,
    folder: PathBuf,
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl Loop {
    fn new(folder: &Path) -> Self {
        let file = folder.join("image");
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let path = file.to_str().unwrap();
        run("mkfs.ext4", &["-q", path]);
        let device = run("losetup", &["--find", "--show", path]);
        let folder = folder.join("mounted");
        fs::create_dir(&folder).unwrap();
        Self { file, device, folder }
    }

    fn mount(&self) {
        rustix::mount::mount(&*self.device, &self.folder, "ext4", MountFlags::empty(), None).unwrap();
    }

    fn unmount(&self) {
        rustix::mount::unmount(&self.folder, UnmountFlags::empty()).unwrap();
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.folder, UnmountFlags::DETACH);
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}

impl Daemon {
    async fn with_disk(&self, name: &str, path: &Path, read_only: bool) -> Result<v1::Vm, Status> {
        let vm = self.manifest_with(name, "", |spec| {
            spec.disks.push(v1::DiskSpec {
                read_only,
                ..raw_file("root", path)
            });
        });
        self.create(vm).await?;
        self.start_vm(name).await
    }
}

#[tokio::test]
async fn mounted_device_and_its_file_are_no_writable_disks() {
    let daemon = Daemon::start().await;
    let device = Loop::new(daemon.folder.path());
    let path = PathBuf::from(&device.device);
    device.mount();
    let mounted = device.folder.display().to_string();
    for (name, disk) in [("device", &path), ("file", &device.file)] {
        let refused = daemon.with_disk(name, disk, false).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
        assert_says(&refused, &mounted);
        // A dry run says the same.
        let request = v1::CheckPlacementRequest {
            vm: Some(daemon.get(name).await.unwrap()),
        };
        let mut checked = request.clone();
        let vm = checked.vm.as_mut().unwrap();
        vm.status = None;
        let metadata = vm.metadata.as_mut().unwrap();
        (metadata.uid, metadata.generation, metadata.create_time) = (String::new(), 0, None);
        let answer = daemon.nodes().await.check_placement(checked).await.unwrap();
        let answer = answer.into_inner();
        assert!(
            answer
                .problems
                .iter()
                .any(|problem| problem.reason == "DISK_IN_USE"),
            "{answer:?}"
        );
    }
    // A file that the node writes to is refused for a snapshot.
    let snapshot = of_disks("one", "file", false);
    let refused = daemon.snapshots().await.create_snapshot(snapshot).await;
    let refused = refused.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
    assert_says(&refused, &mounted);
    device.unmount();
    // The loop device still uses the file. The device is free, and then belongs to the VM alone.
    assert!(daemon.start_vm("file").await.is_err());
    daemon.start_vm("device").await.unwrap();
    assert!(
        rustix::mount::mount(&*device.device, &device.folder, "ext4", MountFlags::empty(), None).is_err(),
        "the node can't mount what a VM writes to"
    );
    let refused = daemon.with_disk("second", &path, false).await.unwrap_err();
    assert_says(&refused, "VM \"device\"");
    daemon.kill_vm("device").await.unwrap();
    daemon.start_vm("second").await.unwrap();
    daemon.kill_vm("second").await.unwrap();
}
