//! VMs in the node, as a client has them: made, started and watched with `vmmctl`, looked into over the console.

mod console;
mod report;

use anyhow::{Context, Result, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};

use crate::Case;
use crate::node::{Guests, Kernel};
use crate::run::Output;
use crate::storage::Disk;
use crate::wait::Deadline;

pub use console::Console;

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
    shared: bool,
    disks: Vec<Value>,
    nics: Vec<Value>,
    rate_groups: Vec<Value>,
    /// Other fields of the spec, by JSON pointer.
    more: Vec<(String, Value)>,
    balloon: Option<Value>,
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
            shared: false,
            disks: Vec::new(),
            nics: Vec::new(),
            rate_groups: Vec::new(),
            more: Vec::new(),
            balloon: None,
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
    pub fn shared_memory(mut self) -> Self {
        self.shared = true;
        self
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

    /// A limit that disks share by its name.
    pub fn rate_group(mut self, name: &str, limit: &Value) -> Self {
        self.rate_groups.push(json!({"name": name, "limit": limit}));
        self
    }

    /// A balloon that is not as the daemon would make it.
    pub fn balloon(mut self, balloon: &Value) -> Self {
        self.balloon = Some(balloon.clone());
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
        let backing = if self.shared {
            "MEMORY_BACKING_SHARED"
        } else {
            "MEMORY_BACKING_UNSPECIFIED"
        };
        let mut manifest = json!({
            "apiVersion": "vmmd/v1",
            "kind": "Vm",
            "metadata": {"name": name},
            "spec": {
                "cpu": {"cores": self.cores},
                "memory": {"sizeBytes": self.memory_mib << 20, "backing": backing},
                "boot": {"linux": linux},
                "disks": self.disks,
                "nics": self.nics,
                // The tests inspect the effects of a guest's own actions, so the daemon must not
                // react to them.
                "runPolicy": "RUN_POLICY_MANUAL",
            },
        });
        if !self.rate_groups.is_empty() {
            manifest["spec"]["rateGroups"] = json!(self.rate_groups);
        }
        for (pointer, value) in &self.more {
            let (around, name) = pointer.rsplit_once('/').unwrap_or(("", pointer));
            if let Some(around) = manifest["spec"].pointer_mut(around) {
                around[name] = value.clone();
            }
        }
        if let Some(balloon) = &self.balloon {
            manifest["spec"]["balloon"] = balloon.clone();
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
    pub fn create(case: &'case Case, suffix: &str, spec: &VmSpec) -> Result<Self> {
        Self::create_with(case, suffix, spec, "")
    }

    fn create_with(case: &'case Case, suffix: &str, spec: &VmSpec, options: &str) -> Result<Self> {
        let vm = Vm {
            case,
            name: format!("{}{suffix}", case.name()),
        };
        let manifest = spec.manifest(&vm.name);
        let create = format!("vmmctl create {options} -f - <<'MANIFEST'\n{manifest}\nMANIFEST\n");
        let output = case.node().ssh(&create)?;
        ensure!(
            output.success(),
            "create {}: {}{}",
            vm.name,
            output.stdout,
            output.stderr
        );
        Ok(vm)
    }

    /// Creates it and starts it.
    pub fn start(case: &'case Case, suffix: &str, spec: &VmSpec) -> Result<Self> {
        Self::create_with(case, suffix, spec, "--start")
    }

    /// Makes it be like this from now on, as far as it can be without a restart.
    pub fn apply(&self, spec: &VmSpec) -> Result<()> {
        let manifest = spec.manifest(&self.name).to_string();
        let apply = format!("vmmctl apply -f - <<'MANIFEST'\n{manifest}\nMANIFEST\n");
        self.case.node().sh(&apply).map(drop)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node that it is on.
    pub fn node(&self) -> &crate::Node {
        self.case.node()
    }

    /// Runs `vmmctl VERB NAME`, which must end with 0; `verb` may have options. Returns its output.
    pub fn ctl(&self, verb: &str) -> Result<String> {
        let output = self.try_ctl(verb)?;
        ensure!(
            output.success(),
            "vmmctl {verb} {}: {}{}",
            self.name,
            output.stdout,
            output.stderr
        );
        Ok(output.stdout)
    }

    /// `vmmctl VERB NAME`, however it ends.
    pub fn try_ctl(&self, verb: &str) -> Result<Output> {
        self.case.node().ssh(&format!("vmmctl {verb} {}", self.name))
    }

    /// `vmmctl VERB NAME MORE`, which must end with 0.
    pub fn ctl_with(&self, verb: &str, more: &str) -> Result<String> {
        let output = self.try_ctl_with(verb, more)?;
        ensure!(
            output.success(),
            "vmmctl {verb} {} {more}: {}{}",
            self.name,
            output.stdout,
            output.stderr
        );
        Ok(output.stdout)
    }

    /// `vmmctl VERB NAME MORE`, however it ends.
    pub fn try_ctl_with(&self, verb: &str, more: &str) -> Result<Output> {
        self.case
            .node()
            .ssh(&format!("vmmctl {verb} {} {more}", self.name))
    }

    /// The status of one of its disks.
    pub fn disk(&self, name: &str) -> Result<Value> {
        let vm = self.get()?;
        let disks = vm.pointer("/status/disks").and_then(Value::as_array);
        let mut disks = disks.into_iter().flatten();
        disks
            .find(|disk| disk["name"] == name)
            .cloned()
            .with_context(|| format!("no disk {name} in {vm}"))
    }

    /// Returns the statistics of one of its disks since the start of the run.
    pub fn disk_stats(&self, name: &str) -> Result<Value> {
        let stats: Value =
            serde_json::from_str(&self.ctl_with("stats", "-o json")?).context("read the counters")?;
        let mut disks = stats["disks"].as_array().into_iter().flatten();
        disks
            .find(|disk| disk["name"] == name)
            .cloned()
            .with_context(|| format!("no disk {name} in {stats}"))
    }

    /// The VM as the daemon has it, in canonical JSON.
    pub fn get(&self) -> Result<Value> {
        serde_json::from_str(&self.ctl("get vm -o json")?).context("read the VM")
    }

    /// One field of it, by its JSON pointer, as text; empty when it is not there.
    pub fn field(&self, pointer: &str) -> Result<String> {
        let vm = self.get()?;
        Ok(match vm.pointer(pointer) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        })
    }

    /// Its phase, as in "RUNNING".
    pub fn phase(&self) -> Result<String> {
        Ok(self
            .field("/status/phase")?
            .trim_start_matches("VM_PHASE_")
            .to_owned())
    }

    /// Waits until it is in a phase.
    pub fn wait_phase(&self, phase: &str, seconds: u64) -> Result<()> {
        let mut watch = self
            .case
            .node()
            .stream(&format!("exec vmmctl get vm {} -w -o json", self.name))?;
        watch
            .until(&format!("\"VM_PHASE_{phase}\""), Deadline::seconds(seconds))
            .map(drop)
    }

    /// Waits until a run has ended.
    pub fn wait_end(&self, seconds: u64) -> Result<()> {
        let mut watch = self
            .case
            .node()
            .stream(&format!("exec vmmctl get vm {} -w -o json", self.name))?;
        watch.until("\"lastExit\"", Deadline::seconds(seconds)).map(drop)
    }

    /// The pid of its `vmm` process in the node.
    pub fn pid(&self) -> Result<u32> {
        self.field("/status/instance/pid")?
            .parse()
            .with_context(|| format!("{} has no process", self.name))
    }

    /// Opens its console, with all that was printed before.
    pub fn console(&self) -> Result<Console> {
        Console::open(self.case, &format!("vmmctl console {}", self.name))
    }
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
