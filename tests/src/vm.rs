//! VMs in the node, as a client has them: made, started and watched with `vmmctl`, looked into over the console.

mod console;
mod disk;
mod report;

use anyhow::Context as _;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};

use crate::node::{Guests, Kernel, Stream};
use crate::run::Output;
use crate::wait::Deadline;
use crate::{Case, must};

pub use console::Console;
pub use disk::{Disk, Format};

/// How long a guest may take to come up in a slow node.
pub const BOOT: u64 = 150;

/// Specification of a VM.
#[derive(Clone, Debug)]
pub struct VmSpec {
    kernel: String,
    initrd: Option<String>,
    cmdline: String,
    cores: u32,
    memory_mib: u64,
    /// The kind of firmware that boots a disk, in place of the kernel.
    firmware: Option<&'static str>,
    disks: Vec<Value>,
    nics: Vec<Value>,
    /// Other fields of the spec, by JSON pointer.
    more: Vec<(String, Value)>,
}

/// Arguments that save time in an emulated guest. Its kernel does not test its ciphers or load its
/// built-in keys, which takes about an eighth of the time until `init`. It does not randomize the
/// addresses of programs, because an emulator translates a program again for each address.
/// `tests/boot.rs` starts kernels without these arguments.
const QUICK: &str = "norandmaps cryptomgr.notests \
    initcall_blacklist=init_encrypted,jent_mod_init,crypto_kdf108_init,load_system_certificate_list,sed_opal_init";

impl VmSpec {
    /// A kernel image and an initial RAM disk in the node; 1 vCPU, 256 MiB, no disk, no NIC.
    pub fn new(kernel: impl Into<String>, initrd: Option<String>) -> Self {
        VmSpec {
            kernel: kernel.into(),
            initrd,
            cmdline: "console=ttyS0 quiet panic=-1 sysrq_always_enabled".into(),
            cores: 1,
            memory_mib: 256,
            firmware: None,
            disks: Vec::new(),
            nics: Vec::new(),
            more: Vec::new(),
        }
    }

    /// Firmware of this kind ("UEFI" or "BIOS"); 1 vCPU, 256 MiB, no disk yet, no NIC.
    pub fn firmware(kind: &'static str) -> Self {
        VmSpec {
            firmware: Some(kind),
            ..Self::new("", None)
        }
    }

    /// A kernel with its busybox initramfs, see [`Self::quick`].
    pub fn busybox(kernel: Kernel) -> Self {
        Self::quick(kernel, Guests.initrd(kernel))
    }

    /// A kernel with an initramfs, for tests that are not about booting: it comes as an ELF file, so that the guest need not
    /// unpack it, and leaves out what no test needs.
    pub fn quick(kernel: Kernel, initrd: String) -> Self {
        Self::new(Guests.vmlinux(kernel), Some(initrd)).cmdline(QUICK)
    }

    /// Adds to the kernel's command line.
    pub fn cmdline(mut self, more: &str) -> Self {
        self.cmdline = format!("{} {more}", self.cmdline);
        self
    }

    /// Runs a shell script in a busybox guest once it is up; see its `init`.
    pub fn script(self, script: &str) -> Self {
        let encoded = base64(script.as_bytes());
        self.cmdline(&format!("guest.run={encoded}"))
    }

    /// Number of vCPUs.
    pub fn cores(mut self, cores: u32) -> Self {
        self.cores = cores;
        self
    }

    /// Guest RAM.
    pub fn memory_mib(mut self, memory_mib: u64) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Guest RAM that other processes can map.
    pub fn shared_memory(self) -> Self {
        self.set("/memory/backing", json!("MEMORY_BACKING_SHARED"))
    }

    /// Sets any other field of `spec`, by its JSON pointer in the spec: "/cpu/hostCpus". The
    /// enclosing object must exist.
    pub fn set(mut self, pointer: &str, value: Value) -> Self {
        self.more.push((pointer.to_owned(), value));
        self
    }

    /// A disk with all that can be said of one.
    pub fn with_disk(mut self, disk: Disk) -> Self {
        self.disks.push(disk.into());
        self
    }

    /// A raw disk.
    pub fn disk(mut self, name: &str, path: &str, read_only: bool) -> Self {
        self.disks
            .push(json!({"name": name, "path": path, "format": "DISK_FORMAT_RAW", "readOnly": read_only}));
        self
    }

    /// A NIC on a bridge.
    pub fn nic(mut self, name: &str, bridge: &str) -> Self {
        self.nics.push(json!({"name": name, "bridge": bridge}));
        self
    }

    /// The manifest.
    pub fn manifest(&self, name: &str) -> Value {
        let mut linux = json!({"kernel": self.kernel, "cmdline": self.cmdline});
        if let Some(initrd) = &self.initrd {
            linux["initrd"] = json!(initrd);
        }
        let boot = match self.firmware {
            Some(kind) => json!({"firmware": {"type": format!("FIRMWARE_TYPE_{kind}")}}),
            None => json!({"linux": linux}),
        };
        let mut manifest = json!({
            "apiVersion": "vmmd/v1",
            "kind": "Vm",
            "metadata": {"name": name},
            "spec": {
                "cpu": {"cores": self.cores},
                "memory": {"sizeBytes": self.memory_mib << 20},
                "boot": boot,
                "disks": self.disks,
                "nics": self.nics,
                // The tests inspect the effects of a guest's own actions, so the daemon must not
                // react to them.
                "runPolicy": "RUN_POLICY_MANUAL",
            },
        });
        for (pointer, value) in &self.more {
            let (around, name) = pointer.rsplit_once('/').unwrap_or(("", pointer));
            if let Some(around) = manifest["spec"].pointer_mut(around) {
                around[name] = value.clone();
            }
        }
        manifest
    }
}

/// A VM in the node; deleted by force when dropped.
pub struct Vm<'case> {
    case: &'case Case,
    name: String,
}

impl<'case> Vm<'case> {
    /// Creates it, under the case's name with `suffix`.
    #[track_caller]
    pub fn create(case: &'case Case, suffix: &str, spec: &VmSpec) -> Self {
        Self::create_with(case, suffix, spec, "")
    }

    #[track_caller]
    fn create_with(case: &'case Case, suffix: &str, spec: &VmSpec, options: &str) -> Self {
        let vm = Vm {
            case,
            name: format!("{}{suffix}", case.name()),
        };
        let manifest = spec.manifest(&vm.name);
        case.node().sh(&format!(
            "vmmctl create {options} -f - <<'MANIFEST'\n{manifest}\nMANIFEST\n"
        ));
        vm
    }

    /// Creates it and starts it.
    #[track_caller]
    pub fn start(case: &'case Case, suffix: &str, spec: &VmSpec) -> Self {
        Self::create_with(case, suffix, spec, "--start")
    }

    /// Creates it, starts it, and waits until its busybox guest has booted.
    #[track_caller]
    pub fn boot(case: &'case Case, suffix: &str, spec: &VmSpec) -> (Self, Console) {
        let vm = Self::start(case, suffix, spec);
        let console = vm.booted();
        (vm, console)
    }

    /// Makes it be like this from now on, as far as it can be without a restart.
    #[track_caller]
    pub fn apply(&self, spec: &VmSpec) {
        let manifest = spec.manifest(&self.name);
        self.node()
            .sh(&format!("vmmctl apply -f - <<'MANIFEST'\n{manifest}\nMANIFEST\n"));
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node that it is on.
    pub fn node(&self) -> &'case crate::Node {
        self.case.node()
    }

    /// Runs `vmmctl VERB NAME`, which must end with 0; `verb` may have options. Returns its output.
    #[track_caller]
    pub fn ctl(&self, verb: &str) -> String {
        self.node().sh(&format!("vmmctl {verb} {}", self.name))
    }

    /// `vmmctl VERB NAME`, however it ends.
    #[track_caller]
    pub fn try_ctl(&self, verb: &str) -> Output {
        self.try_ctl_with(verb, "")
    }

    /// `vmmctl VERB NAME MORE`, which must end with 0.
    #[track_caller]
    pub fn ctl_with(&self, verb: &str, more: &str) -> String {
        self.node().sh(&format!("vmmctl {verb} {} {more}", self.name))
    }

    /// `vmmctl VERB NAME MORE`, however it ends.
    #[track_caller]
    pub fn try_ctl_with(&self, verb: &str, more: &str) -> Output {
        must(self.node().ssh(&format!("vmmctl {verb} {} {more}", self.name)))
    }

    /// The status of one of its disks, if it has that disk.
    #[track_caller]
    pub fn find_disk(&self, name: &str) -> Option<Value> {
        named(&self.get()["status"]["disks"], name)
    }

    /// The status of one of its disks.
    #[track_caller]
    pub fn disk(&self, name: &str) -> Value {
        must(self.find_disk(name).with_context(|| format!("no disk {name}")))
    }

    /// Its statistics since the start of the run.
    #[track_caller]
    pub fn stats(&self) -> Value {
        must(serde_json::from_str(&self.ctl_with("stats", "-o json")).context("read the counters"))
    }

    /// Returns the statistics of one of its disks since the start of the run.
    #[track_caller]
    pub fn disk_stats(&self, name: &str) -> Value {
        let stats = self.stats();
        must(named(&stats["disks"], name).with_context(|| format!("no disk {name} in {stats}")))
    }

    /// The VM as the daemon has it, in canonical JSON.
    #[track_caller]
    pub fn get(&self) -> Value {
        must(serde_json::from_str(&self.ctl("get vm -o json")).context("read the VM"))
    }

    /// One field of it, by its JSON pointer, as text; empty when it is not there.
    #[track_caller]
    pub fn field(&self, pointer: &str) -> String {
        match self.get().pointer(pointer) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        }
    }

    /// Its phase, as in "RUNNING".
    #[track_caller]
    pub fn phase(&self) -> String {
        let phase = self.field("/status/phase");
        phase.trim_start_matches("VM_PHASE_").to_owned()
    }

    /// Why its last run ended, as in "STOPPED".
    #[track_caller]
    pub fn exit_reason(&self) -> String {
        let reason = self.field("/status/lastExit/reason");
        reason.trim_start_matches("EXIT_REASON_").to_owned()
    }

    /// Follows the VM in JSON, from now on.
    #[track_caller]
    pub fn watch(&self) -> Stream {
        self.node()
            .stream(&format!("exec vmmctl get vm {} -w -o json", self.name))
    }

    /// Waits until it is in a phase.
    #[track_caller]
    pub fn wait_phase(&self, phase: &str, seconds: u64) {
        self.watch()
            .until(&format!("\"VM_PHASE_{phase}\""), Deadline::seconds(seconds));
    }

    /// Waits until a run has ended.
    #[track_caller]
    pub fn wait_end(&self, seconds: u64) {
        self.watch().until("\"lastExit\"", Deadline::seconds(seconds));
    }

    /// The pid of its `vmm` process in the node.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        let pid = self.field("/status/instance/pid").parse();
        must(pid.with_context(|| format!("{} has no process", self.name)))
    }

    /// Fails unless it runs in the process `pid`.
    #[track_caller]
    pub fn still_runs(&self, pid: u32) {
        assert_eq!((self.phase().as_str(), self.pid()), ("RUNNING", pid));
    }

    /// Opens its console, with all that was printed before.
    #[track_caller]
    pub fn console(&self) -> Console {
        Console::open(self.case, &format!("vmmctl console {}", self.name))
    }

    /// Opens its console, and waits until its busybox guest has booted.
    #[track_caller]
    pub fn booted(&self) -> Console {
        let mut console = self.console();
        console.booted();
        console
    }
}

/// The element of a list that has this name.
fn named(list: &Value, name: &str) -> Option<Value> {
    let mut elements = list.as_array().into_iter().flatten();
    elements.find(|element| element["name"] == name).cloned()
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The report needs the VM. The case reports everything else.
            report::report(self.case.node(), &self.name);
        }
        // The test of leftovers reports a failure.
        let _ = self
            .case
            .node()
            .ssh(&format!("vmmctl delete --force --ignore-not-found {}", self.name));
    }
}

/// Base64 (RFC 4648, 4), for scripts on a kernel's command line.
pub fn base64(bytes: &[u8]) -> String {
    BASE64_STANDARD.encode(bytes)
}
