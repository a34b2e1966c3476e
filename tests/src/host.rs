//! What the build host can do.

use std::fs::{self, OpenOptions};
use std::path::Path;

/// How QEMU runs the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// Hardware virtualization, with nesting for the guests in the node.
    Kvm,
    /// Emulation, with AMD SVM emulated for the guests in the node.
    Tcg,
}

impl Accel {
    /// What this machine has: KVM only when `/dev/kvm` is VT-x or SVM with nesting on. Another backend (some clouds
    /// have a paravirtual one) shows a `/dev/kvm` as well, but runs no ordinary kernel.
    pub fn detect() -> Accel {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let nested = |module: &str| {
            fs::read_to_string(format!("/sys/module/{module}/parameters/nested")).unwrap_or_default()
        };
        let usable = supports_nesting(&cpuinfo, &nested("kvm_intel"), &nested("kvm_amd"))
            && OpenOptions::new()
                .read(true)
                .write(true)
                .open(Path::new("/dev/kvm"))
                .is_ok();
        if usable { Accel::Kvm } else { Accel::Tcg }
    }

    /// Whether this machine runs guests by hardware virtualization itself, nesting aside.
    pub fn hardware() -> bool {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let module = |name: &str| Path::new("/sys/module").join(name).is_dir();
        let has = (has_flag(&cpuinfo, "vmx") && module("kvm_intel"))
            || (has_flag(&cpuinfo, "svm") && module("kvm_amd"));
        has && OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
    }

    /// QEMU's arguments for it.
    ///
    /// Emulated, some features make everything slower: with ERMS kernels copy and clear memory with byte-wise string
    /// instructions, which are carried out a byte at a time; with LA57 each walk of page tables has a level more, and of
    /// nested ones eleven (35 accesses for 24); SMAP, protection keys and MPX end a translated block wherever they are used.
    pub fn qemu_args(self) -> [&'static str; 4] {
        match self {
            Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accel::Tcg => [
                "-accel",
                "tcg,thread=multi",
                "-cpu",
                "max,+svm,-la57,-erms,-smap,-pku,-mpx",
            ],
        }
    }

    /// How many processors the node has beside those that do its work.
    ///
    /// One under TCG, its first, on which no guest may run. Every FXRSTOR and XRSTOR of any emulated processor clears
    /// IGNNE# of the *first* one (`cpu_clear_ignne` in QEMU's target/i386/tcg/sysemu/fpu_helper.c, seen in 7.2 and 10.0):
    /// it reads, changes and writes that one's `hflags2` from another thread, without a lock. When that comes in the middle of
    /// a VMRUN or #VMEXIT there, its changes to `hflags2` are lost: the guest goes on without nested paging (and
    /// triple-faults) or without the global interrupt flag (and the processor hangs), or the host with nested paging (and its
    /// own state is saved as the guest's, which then hangs with endless nested page faults). It took some minutes of typing at a
    /// console.
    pub fn idle_cpus(self) -> u32 {
        match self {
            Accel::Kvm => 0,
            Accel::Tcg => 1,
        }
    }

    /// What the node's kernel is told about it: that no program runs on its first processor unless it asks for that, that the timer works,
    /// which it does not find out in time where the host has other work, and that it need not compare the time stamp counter with the HPET. Both are the
    /// host's clock, but where the host has other work the emulator may be stopped between a read of the one and of the other. A kernel that has taken the
    /// counter for unstable sets that of a guest anew each time that a vCPU gets a processor (KVM's `tsc_catchup`), and the guest's kernel rightly complains.
    pub fn kernel_arguments(self) -> &'static str {
        match self {
            Accel::Kvm => "",
            Accel::Tcg => "isolcpus=0 no_timer_check tsc=nowatchdog",
        }
    }
}

fn supports_nesting(cpuinfo: &str, kvm_intel_nested: &str, kvm_amd_nested: &str) -> bool {
    let on = |parameter: &str| matches!(parameter.trim(), "Y" | "1");
    (has_flag(cpuinfo, "vmx") && on(kvm_intel_nested)) || (has_flag(cpuinfo, "svm") && on(kvm_amd_nested))
}

fn has_flag(cpuinfo: &str, wanted: &str) -> bool {
    cpuinfo
        .lines()
        .filter_map(|line| line.strip_prefix("flags"))
        .any(|flags| flags.split_ascii_whitespace().any(|flag| flag == wanted))
}

#[cfg(test)]
mod tests {
    use super::supports_nesting;

    #[test]
    fn kvm_needs_the_flag_and_the_module_of_the_same_vendor_with_nesting() {
        let table = [
            ("flags\t\t: fpu vmx sse", "Y\n", "", true),
            ("flags\t\t: fpu vmx sse", "N\n", "", false),
            ("flags\t\t: fpu svm", "", "1\n", true),
            ("flags\t\t: fpu svm", "Y", "", false),
            ("flags\t\t: fpu sse", "Y", "1", false),
            ("model name : vmx svm", "Y", "1", false),
        ];
        for (cpuinfo, intel, amd, expected) in table {
            assert_eq!(
                supports_nesting(cpuinfo, intel, amd),
                expected,
                "{cpuinfo:?} {intel:?} {amd:?}"
            );
        }
    }
}
