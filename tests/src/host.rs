//! Capabilities of the build host.

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
    /// Detects the accelerator of this machine. KVM requires a `/dev/kvm` on VT-x or SVM with
    /// nesting enabled. Another backend (some clouds have a paravirtual one) also provides a
    /// `/dev/kvm`, but runs no ordinary kernel.
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

    /// Number of the node's processors that stay idle, in addition to the working ones.
    ///
    /// One under TCG: the first processor, on which no guest may run. Every FXRSTOR and XRSTOR of
    /// any emulated processor clears IGNNE# of the *first* one (`cpu_clear_ignne` in QEMU's
    /// target/i386/tcg/sysemu/fpu_helper.c, seen in 7.2 and 10.0). The emulator reads, changes and
    /// writes that processor's `hflags2` from another thread, without a lock. If this coincides
    /// with a VMRUN or #VMEXIT on the first processor, the changes of VMRUN or #VMEXIT to `hflags2`
    /// are lost. There are three outcomes:
    ///
    /// - The guest continues without nested paging and triple-faults.
    /// - The guest continues without the global interrupt flag, and the processor hangs.
    /// - The host continues with nested paging. Its own state is saved as the guest's, which then
    ///   hangs with endless nested page faults.
    ///
    /// It took some minutes of typing at a console.
    pub fn idle_cpus(self) -> u32 {
        match self {
            Accel::Kvm => 0,
            Accel::Tcg => 1,
        }
    }

    /// Arguments for the node's kernel. Under TCG:
    ///
    /// - No program runs on the first processor unless the program requests it.
    /// - The kernel skips the check of the timer, which can time out on a busy host.
    /// - The kernel does not compare the time stamp counter with the HPET. Both derive from the
    ///   host's clock, but on a busy host the emulator may stop between the two reads. A kernel
    ///   with an unstable counter sets a guest's counter again each time that a vCPU gets a
    ///   processor (KVM's `tsc_catchup`), and the guest's kernel rightly complains.
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
    fn kvm_needs_flag_and_module_of_one_vendor_with_nesting() {
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
