//! The paths of the guest images in the node.

use crate::host::Accel;

/// Where the guest images are mounted in the node, read-only.
pub const GUESTS_DIR: &str = "/var/lib/guests";

/// A guest kernel: an unmodified Debian package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// `linux-image-6.12-cloud-amd64`: virtio-pci and ext4 built in.
    Cloud612,
    /// `linux-image-cloud-amd64` of Debian 12: Linux 6.1.
    Cloud61,
    /// `linux-image-amd64` of Debian 12: Linux 6.1 for all machines, with all of virtio as modules.
    Generic61,
    /// `linux-image-6.12-amd64`: Linux 6.12 for all machines.
    Generic612,
    /// The last kernel for clouds of Debian 11: Linux 5.10.
    Cloud510,
}

impl Kernel {
    /// All of them.
    pub const ALL: [Kernel; 5] = [
        Kernel::Cloud612,
        Kernel::Cloud61,
        Kernel::Generic61,
        Kernel::Generic612,
        Kernel::Cloud510,
    ];

    /// Its folder's name below the guest images.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Cloud612 => "linux-6.12-cloud",
            Kernel::Cloud61 => "linux-6.1-cloud",
            Kernel::Generic61 => "linux-6.1-generic",
            Kernel::Generic612 => "linux-6.12-generic",
            Kernel::Cloud510 => "linux-5.10-cloud",
        }
    }

    /// Arguments for the kernel in an emulated node.
    ///
    /// There, a guest's XSETBV does not change CPUID leaf 0xD, which continues to report the size
    /// of the state without AVX. Newer kernels warn and do not use XSAVE. 5.10 warns and uses
    /// XSAVE: its first process is lost at its first signal (under QEMU's q35 in the node, too).
    pub fn arguments(self) -> &'static str {
        match (self, Accel::detect()) {
            (Kernel::Cloud510, Accel::Tcg) => "noxsave",
            _ => "",
        }
    }
}

/// The guest images in the node.
#[derive(Clone, Copy, Debug)]
pub struct Guests;

impl Guests {
    /// The bzImage of a kernel.
    pub fn vmlinuz(&self, kernel: Kernel) -> String {
        format!("{GUESTS_DIR}/{}/vmlinuz", kernel.name())
    }

    /// The same kernel as an ELF file with a PVH note.
    pub fn vmlinux(&self, kernel: Kernel) -> String {
        format!("{GUESTS_DIR}/{}/vmlinux", kernel.name())
    }

    /// A kernel's busybox initramfs: prints `GUEST-READY` on ttyS0 and gives a shell there.
    pub fn initrd(&self, kernel: Kernel) -> String {
        format!("{GUESTS_DIR}/{}/initrd", kernel.name())
    }

    /// The raw root disk of a whole Debian with systemd and sshd. It is read-only: a VM gets a copy.
    pub fn debian_disk(&self) -> String {
        format!("{GUESTS_DIR}/debian/disk.raw")
    }

    /// The raw disk that firmware boots: Linux 6.12 with a busybox initramfs. It is read-only: a VM gets a copy.
    pub fn boot_disk(&self) -> String {
        format!("{GUESTS_DIR}/boot-disk.raw")
    }

    /// A file of a whole Debian with X, a window manager and a terminal: `disk.raw`, `vmlinuz` or `initrd`. Only `make nightly` has it.
    pub fn desktop(&self, file: &str) -> String {
        format!("{GUESTS_DIR}/desktop/{file}")
    }

    /// The kernel of that Debian.
    pub fn debian_vmlinuz(&self) -> String {
        format!("{GUESTS_DIR}/debian/vmlinuz")
    }

    /// The initrd of that Debian.
    pub fn debian_initrd(&self) -> String {
        format!("{GUESTS_DIR}/debian/initrd")
    }
}
