use std::{
    fs,
    path::{Path, PathBuf},
};

use vmmd_api::v1;
use vmmd_host::ledger::UidRange;
use vmmd_spec::{
    Violations,
    cpu::{CpuShare, Processor},
    topology::Topology,
    vm::Backing,
};

use super::*;

struct Case {
    folder: tempfile::TempDir,
    spec: VmSpec,
    ledger: std::sync::Arc<Ledger>,
    disks: Disks,
    pods: Pods,
    roots: Roots,
}

fn case() -> Case {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("kernel"), [1; 4096]).unwrap();
    fs::write(path("disk"), [0; 1024]).unwrap();
    let spec = VmSpec {
        topology: Topology::for_cores(1).unwrap(),
        cpu: CpuShare::WHOLE,
        processor: Processor::default(),
        memory_bytes: 128 << 20,
        backing: Backing::Auto,
        host_cpus: None,
        memory: Default::default(),
        boot: Boot::Linux {
            kernel: path("kernel"),
            initrd: None,
            cmdline: String::new(),
        },
        disks: vec![disk(&path("disk"))],
        nics: Vec::new(),
        rate_groups: Vec::new(),
        run_policy: vmmd_spec::policy::RunPolicy::default(),
        on_crash: vmmd_spec::policy::OnCrash::default(),
        on_panic: vmmd_spec::policy::OnPanic::default(),
        clock: vmmd_spec::policy::ClockOnResume::default(),
        timezone: String::new(),
        smbios: vmmd_spec::smbios::Smbios::default(),
        balloon: None,
        display: None,
        virtio_console: false,
        guest_agent: false,
        tpm: false,
        vsock: None,
        watchdog: None,
        state_dir: None,
        shares: Vec::new(),
        cloud_init: None,
        pod: None,
        probes: vmmd_spec::probe::Probes::default(),
        access: Vec::new(),
        channels: Vec::new(),
    };
    Case {
        folder,
        spec,
        ledger: Ledger::new(UidRange::default()),
        disks: Disks::default(),
        pods: Pods::default(),
        roots: Roots::default(),
    }
}

fn disk(path: &Path) -> Disk {
    let wire = v1::DiskSpec {
        name: "root".into(),
        source: Some(v1::disk_spec::Source::Path(path.to_str().unwrap().into())),
        format: v1::DiskFormat::Raw.into(),
        ..Default::default()
    };
    Disk::new(&mut Violations::default(), "", &wire).unwrap()
}

impl Case {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn boot(&mut self, kernel: PathBuf, initrd: Option<PathBuf>) {
        self.spec.boot = Boot::Linux {
            kernel,
            initrd,
            cmdline: String::new(),
        };
    }

    fn open(&self) -> Result<Files, Failure> {
        self.open_with(Locks::Take)
    }

    fn open_with(&self, locks: Locks) -> Result<Files, Failure> {
        open(&self.spec, &self.sources(), &Known::new(), locks, || {
            unreachable!("there is no cloud-init")
        })
        .map(|(files, _)| files)
    }

    fn sources(&self) -> Sources<'_> {
        Sources {
            ledger: &self.ledger,
            disks: &self.disks,
            pods: &self.pods,
            folder: Folder::of(self.folder.path()),
            roots: &self.roots,
        }
    }

    fn refused(&self) -> (&'static str, String) {
        let failure = self.open().unwrap_err();
        (failure.reason, failure.message)
    }
}

#[test]
fn a_good_spec_is_opened() {
    let case = case();
    let files = case.open().unwrap();
    assert_eq!((files.disks.len(), files.initrd.is_some()), (1, false));
    assert_eq!(
        files.disks[0].ids,
        identify(&case.spec.disks, &case.sources())["root"]
    );
}

#[test]
fn each_wrong_kernel_and_initrd_has_its_own_words() {
    let mut case = case();
    fs::write(case.path("empty"), []).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        case.path("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    let kernel = case.path("kernel");
    for (path, reason, words) in [
        ("missing", "KERNEL_NOT_FOUND", "does not exist"),
        ("kernel/below", "KERNEL_NOT_FOUND", "does not exist"),
        ("", "KERNEL_UNUSABLE", "is a directory"),
        ("empty", "KERNEL_UNUSABLE", "is empty"),
        ("fifo", "KERNEL_UNUSABLE", "not a regular file"),
    ] {
        case.boot(case.path(path), None);
        let (found, message) = case.refused();
        assert!(
            found == reason && message.contains(words),
            "{path}: {found} {message}"
        );
    }
    case.boot(kernel, Some(case.path("missing")));
    assert_eq!(case.refused().0, "INITRD_NOT_FOUND");
}

#[test]
fn each_wrong_disk_has_its_own_words() {
    let mut case = case();
    fs::write(case.path("odd"), [0; 1000]).unwrap();
    fs::write(case.path("empty"), []).unwrap();
    for (path, reason, words) in [
        ("missing", "DISK_NOT_FOUND", "does not exist"),
        ("", "DISK_UNUSABLE", "is a directory"),
        ("odd", "DISK_SIZE_INVALID", "1000 bytes"),
        ("empty", "DISK_SIZE_INVALID", "0 bytes"),
    ] {
        case.spec.disks[0] = disk(&case.path(path));
        let (found, message) = case.refused();
        assert!(
            found == reason && message.contains(words),
            "{path}: {found} {message}"
        );
        assert!(
            message.starts_with("spec.disks[0].path: disk \"root\""),
            "{message}"
        );
    }
    case.spec.disks[0] = disk(Path::new("/dev/null"));
    assert!(
        case.refused()
            .1
            .contains("neither a regular file nor a block device")
    );
}

#[test]
fn a_disk_in_use_names_its_user_and_readers_share() {
    let mut case = case();
    let files = case.open().unwrap();
    assert!(case.refused().1.contains("in use by vmmd, for another operation"));
    let claim = case.ledger.claim("other").unwrap();
    claim.set_disks(files.disks[0].ids.clone());
    assert!(case.refused().1.contains("in use by VM \"other\""));
    drop(files);
    case.spec.disks[0].read_only = true;
    let _first = case.open().unwrap();
    let _second = case.open().unwrap();
    case.spec.disks[0].read_only = false;
    assert_eq!(case.refused().0, "DISK_IN_USE");
}

#[test]
fn a_missing_kvm_says_what_to_do() {
    let failure = open_kvm(Path::new("/nonexistent")).unwrap_err();
    assert!(
        failure.reason == "KVM_UNAVAILABLE" && failure.message.contains("kvm_amd"),
        "{failure}"
    );
}

#[test]
fn new_raw_disk_with_another_format_is_refused() {
    let mut case = case();
    let mut head = vec![0; 4096];
    head[..4].copy_from_slice(b"QFI\xfb");
    fs::write(case.path("disk"), &head).unwrap();
    let (reason, message) = case.refused();
    assert_eq!(reason, "IMAGE_FORMAT_MISMATCH");
    for word in ["spec.disks[0].path", "qcow2", "anyContent"] {
        assert!(message.contains(word), "{message}");
    }
    let problems = |had: &Known| look(&case.spec, &case.sources(), ("web", had), false);
    assert_eq!(problems(&Known::new())[0].reason, "IMAGE_FORMAT_MISMATCH");
    // The guest may have written it there.
    let known: Known = [(key(&case.path("disk")), Default::default())].into();
    assert_eq!(problems(&known), []);
    open(&case.spec, &case.sources(), &known, Locks::Take, || {
        unreachable!("there is no cloud-init")
    })
    .unwrap();
    case.spec.disks[0].any_content = true;
    case.open().unwrap();
}

#[test]
fn disk_locked_by_another_node_is_opened() {
    let mut case = case();
    let looked = |case: &Case| look(&case.spec, &case.sources(), ("web", &Known::new()), true);
    let refused = case.open_with(Locks::Elsewhere).unwrap_err();
    assert_eq!(
        refused.reason, "DISK_NOT_SHARED",
        "nobody has it: it is another file"
    );
    assert_eq!(looked(&case)[0].reason, "DISK_NOT_SHARED");
    let source = case.open().unwrap();
    let target = case.open_with(Locks::Elsewhere).unwrap();
    assert_eq!(looked(&case), []);
    drop(source);
    assert!(
        sys::lock_file(&target.disks[0].fd, LockKind::Exclusive).unwrap(),
        "for writing"
    );
    drop(target);
    // Readers share it, wherever they are.
    case.spec.disks[0].read_only = true;
    let _reader = case.open_with(Locks::Elsewhere).unwrap();
    let _other = case.open().unwrap();
}
