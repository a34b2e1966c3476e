//! Limits, counters and errors of disks.

use tonic::{Code, Status};
use vmmd_api::v1::{self, AttachmentPhase, ConditionStatus, DiskCache, DiskSpec, RateLimit, VmPhase};

use crate::{
    attach::disk,
    console::Client,
    harness::{Daemon, assert_refused, assert_says, refusal, status},
    update::limit,
    verbs::condition,
};

/// Target of a limit change.
enum Target {
    Disk(&'static str),
    Group(&'static str),
}

impl Daemon {
    async fn limit(&self, vm: &str, target: Target, bytes_per_second: u64) -> Result<v1::Vm, Status> {
        let limit = Some(limit(bytes_per_second));
        match target {
            Target::Disk(name) => {
                let disk = DiskSpec {
                    name: name.into(),
                    rate_limit: limit,
                    ..Default::default()
                };
                let path = format!("spec.disks[{name}].rate_limit");
                self.change_fields(vm, &[&path], |spec| spec.disks.push(disk))
                    .await
            }
            Target::Group(name) => {
                let group = v1::RateGroup {
                    name: name.into(),
                    limit,
                };
                let path = format!("spec.rate_groups[{name}].limit");
                self.change_fields(vm, &[&path], |spec| spec.rate_groups.push(group))
                    .await
            }
        }
    }

    /// The mock reports the limit on bytes per second as `throttled`.
    async fn limits(&self, vm: &str) -> Vec<u64> {
        let stats = self.stats(vm).await.unwrap();
        stats.into_iter().map(|disk| disk.throttled).collect()
    }
}

fn of_disk() -> Target {
    Target::Disk("own")
}

fn of_group() -> Target {
    Target::Group("slow")
}

fn limited(daemon: &Daemon, options: &str) -> v1::Vm {
    let mut vm = daemon.manifest("web", options);
    let spec = vm.spec.as_mut().unwrap();
    spec.rate_groups = vec![v1::RateGroup {
        name: "slow".into(),
        limit: Some(limit(1 << 20)),
    }];
    let grouped = DiskSpec {
        rate_group: "slow".into(),
        ..disk(daemon, "grouped")
    };
    spec.disks = vec![disk(daemon, "own"), grouped];
    vm
}

fn stored(vm: &v1::Vm) -> (Option<RateLimit>, Option<RateLimit>) {
    let spec = vm.spec.as_ref().unwrap();
    (spec.disks[0].rate_limit, spec.rate_groups[0].limit)
}

#[tokio::test]
async fn a_limit_that_cannot_be_is_refused_and_changes_nothing() {
    let daemon = Daemon::start().await;
    daemon.create(limited(&daemon, "")).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    for (target, bytes, code, reason) in [
        (of_disk(), 1, Code::InvalidArgument, "INVALID_FIELDS"),
        (Target::Disk("none"), 5000, Code::NotFound, "DISK_NOT_FOUND"),
        (
            Target::Group("none"),
            5000,
            Code::NotFound,
            "RATE_GROUP_NOT_FOUND",
        ),
        (
            Target::Disk("grouped"),
            5000,
            Code::InvalidArgument,
            "INVALID_FIELDS",
        ),
    ] {
        let refused = daemon.limit("web", target, bytes).await.unwrap_err();
        assert_eq!(refusal(&refused), (code, reason.into()));
        assert_eq!(
            stored(&daemon.get("web").await.unwrap()),
            (None, Some(limit(1 << 20)))
        );
    }
}

#[tokio::test]
async fn limit_that_the_machine_refuses_waits_for_its_next_start() {
    let daemon = Daemon::start().await;
    daemon
        .create(limited(&daemon, "mock.limit=refuse"))
        .await
        .unwrap();
    daemon.start_vm("web").await.unwrap();
    for bytes in [5000, 6000] {
        let vm = daemon.limit("web", of_disk(), bytes).await.unwrap();
        assert_eq!(stored(&vm).0, Some(limit(bytes)));
        let waiting = &status(&vm).pending_changes[0];
        assert_eq!(waiting.path, "spec.disks[own].rateLimit");
        assert!(!waiting.message.is_empty(), "{waiting:?}");
    }
    assert_eq!(daemon.limits("web").await[0], 0, "of the machine");
    let vm = daemon.limit("web", of_group(), 7000).await.unwrap();
    assert_eq!(status(&vm).pending_changes.len(), 2, "{vm:?}");
}

#[tokio::test]
async fn counters_are_those_of_the_running_machine() {
    let daemon = Daemon::start().await;
    daemon.create(limited(&daemon, "")).await.unwrap();
    let refused = daemon.stats("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    daemon.start_vm("web").await.unwrap();
    let stats = daemon.stats("web").await.unwrap();
    assert_eq!((stats.len(), stats[0].capacity_bytes), (2, 4096));
    let read = stats[0].read.as_ref().unwrap();
    let latency = v1::LatencyHistogram {
        bounds_us: vec![1],
        counts: vec![0, 1],
    };
    assert_eq!(
        (read.requests, read.bytes, read.latency.clone()),
        (1, 512, Some(latency))
    );
    assert_eq!(read.total_time.unwrap().nanos, 1000);
    assert_eq!(
        refusal(&daemon.stats("none").await.unwrap_err()).1,
        "VM_NOT_FOUND"
    );
}

fn devices(status: &v1::VmStatus) -> &v1::Condition {
    condition(status, "BlockDevicesReady")
}

#[tokio::test]
async fn an_error_of_a_disk_is_seen_until_the_next_start() {
    let daemon = Daemon::start().await;
    let created = daemon.create(limited(&daemon, "")).await.unwrap();
    assert_eq!(devices(status(&created)).status(), ConditionStatus::Unknown);
    let vm = daemon.start_vm("web").await.unwrap();
    assert_eq!(devices(status(&vm)).status(), ConditionStatus::True);
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("fail own\nfail own\n").await;
    let told = daemon
        .wait("web", |status| devices(status).message.contains("(2 errors)"))
        .await;
    let condition = devices(&told);
    assert_eq!(
        (condition.status(), condition.reason.as_str()),
        (ConditionStatus::False, "DeviceError")
    );
    assert!(
        condition.message.starts_with("disk own: read from the image"),
        "{condition:?}"
    );
    assert_eq!(told.phase(), VmPhase::Running, "the VM lives on");
    daemon.kill_vm("web").await.unwrap();
    let vm = daemon.start_vm("web").await.unwrap();
    assert_eq!(devices(status(&vm)).status(), ConditionStatus::True);
}

#[tokio::test]
async fn vm_paused_by_a_disk_error_is_shown_and_can_be_resumed() {
    let mut daemon = Daemon::start().await;
    daemon.create(limited(&daemon, "")).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("stall own\n").await;
    let paused = daemon.wait_phase("web", VmPhase::Paused).await;
    assert_eq!(paused.reason, "DiskError");
    assert!(
        paused
            .message
            .contains("disk own: write to the image: No space left"),
        "{paused:?}"
    );
    assert_eq!(devices(&paused).status(), ConditionStatus::False);
    daemon.kill_and_restart().await;
    let vm = daemon.get("web").await.unwrap();
    assert_eq!(
        (status(&vm).phase(), status(&vm).reason.as_str()),
        (VmPhase::Paused, "DiskError")
    );
    let vm = daemon.resume("web").await.unwrap();
    assert_eq!(
        (status(&vm).phase(), status(&vm).message.as_str()),
        (VmPhase::Running, "")
    );
    assert_eq!(devices(status(&vm)).status(), ConditionStatus::True);
}

#[tokio::test]
async fn disk_error_during_a_resume_is_not_missed() {
    let daemon = Daemon::start().await;
    daemon
        .create(limited(&daemon, "mock.resume=fails"))
        .await
        .unwrap();
    daemon.start_vm("web").await.unwrap();
    let vm = daemon.pause("web").await.unwrap();
    assert_eq!(status(&vm).reason, "Paused");
    for _ in 0..10 {
        daemon.resume("web").await.unwrap();
        daemon.wait("web", |status| status.reason == "DiskError").await;
    }
}

#[tokio::test]
async fn direct_io_follows_the_cache_mode_of_the_disk() {
    let daemon = Daemon::start().await;
    let with = |cache: DiskCache| DiskSpec {
        cache: cache.into(),
        ..disk(&daemon, "data")
    };
    daemon.run("web", "").await;
    let direct = || {
        let target = daemon.path("data.raw");
        let vmm = daemon.vmm_processes()[0].as_raw_nonzero();
        let mut fds = std::fs::read_dir(format!("/proc/{vmm}/fd")).unwrap().flatten();
        let fd = fds.find(|fd| std::fs::read_link(fd.path()).is_ok_and(|link| link == target));
        let number = fd.unwrap().file_name().into_string().unwrap();
        let info = std::fs::read_to_string(format!("/proc/{vmm}/fdinfo/{number}")).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
        // O_DIRECT of x86-64, in octal as the kernel writes it.
        i64::from_str_radix(flags.trim(), 8).unwrap() & 0o40000 != 0
    };
    for (cache, expected) in [
        (DiskCache::None, true),
        (DiskCache::Unspecified, true),
        (DiskCache::Writeback, false),
    ] {
        let vm = daemon.attach("web", with(cache)).await.unwrap();
        assert_eq!(status(&vm).disks[0].phase(), AttachmentPhase::Attached);
        assert_eq!(direct(), expected, "{cache:?}");
        daemon.detach("web", "data", 5000, false).await.unwrap();
    }
}

/// A loop device over a file; `None` on a machine that cannot provide one, which fails the test in
/// continuous integration.
pub struct Loop(pub String);

impl Loop {
    pub fn over(file: &std::path::Path) -> Option<Self> {
        let output = std::process::Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .ok()?;
        let name = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        if output.status.success() && !name.is_empty() {
            return Some(Self(name));
        }
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(std::env::var_os("CI").is_none(), "no loop device here: {why}");
        eprintln!("not tested, no loop device here: {why}");
        None
    }

    fn take_new_size(&self) {
        let status = std::process::Command::new("losetup")
            .args(["--set-capacity", &self.0])
            .status();
        assert!(status.unwrap().success());
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup")
            .args(["--detach", &self.0])
            .status();
    }
}

#[tokio::test]
async fn block_device_has_one_writer_and_its_own_size() {
    let daemon = Daemon::start().await;
    let file = std::fs::File::create_new(daemon.path("device")).unwrap();
    file.set_len(1 << 20).unwrap();
    let Some(device) = Loop::over(&daemon.path("device")) else {
        return;
    };
    let disk = DiskSpec {
        source: Some(v1::disk_spec::Source::Path(device.0.clone())),
        ..disk(&daemon, "data")
    };
    for vm in ["web", "other"] {
        daemon.run(vm, "").await;
    }
    daemon.attach("web", disk.clone()).await.unwrap();
    daemon
        .wait("web", |status| status.disks[0].capacity_bytes == Some(1 << 20))
        .await;
    let refused = daemon.attach("other", disk).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
    assert_says(&refused, "VM \"web\"");
    let grow = async |size_bytes| {
        let request = v1::ResizeVmDiskRequest {
            vm: "web".into(),
            disk: "data".into(),
            size_bytes: Some(size_bytes),
            ..Default::default()
        };
        daemon.client().resize_vm_disk(request).await
    };
    let refused = grow(2 << 20).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_says(&refused, "block device of 1048576 bytes");
    file.set_len(3 << 20).unwrap();
    device.take_new_size();
    let vm = grow(0).await.unwrap().into_inner().vm.unwrap();
    assert_eq!(status(&vm).disks[0].capacity_bytes, Some(3 << 20));
    daemon.kill_vm("web").await.unwrap();
    grow(0).await.expect("a stopped VM's has the size that it has");
}

#[tokio::test]
async fn a_program_that_has_a_disk_is_named() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let disk = disk(&daemon, "data");
    let file = std::fs::File::options().write(true).open(disk.path()).unwrap();
    // A POSIX lock of this process.
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let refused = daemon.attach("web", disk).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
    let own = format!("(process {})", std::process::id());
    assert_says(&refused, &own);
}
