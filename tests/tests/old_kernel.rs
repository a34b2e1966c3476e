//! Boot messages of the oldest guest kernel, compared with its messages under QEMU's q35 in the
//! same node. Lines that appear on only one side are listed here, each with its reason.

use std::collections::BTreeSet;

use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Vm, VmSpec, base64};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Guests};

const KERNEL: Kernel = Kernel::Cloud510;

/// Prints the kernel's log with the level of each line.
const SCRIPT: &str = "dmesg -r | sed 's/^/LOG /'";

/// A reason, and the beginnings of the lines that it explains.
type Explained = (&'static str, &'static [&'static str]);

/// Depends on how much time passes where, under each of them.
const TIME: Explained = (
    "time",
    &[
        "clocksource: Long readout",
        "clocksource: timekeeping watchdog",
        "sched_clock: Marking stable",
        "Unstable clock detected",
        "If you want to keep using the local clock",
        "\"trace_clock=local\"",
        "on the kernel command line",
        "hrtimer: interrupt took",
        "random: ",
        "perf: interrupt took too long",
        "rcu: INFO",
    ],
);

const OURS_ONLY: [Explained; 7] = [
    (
        "A Linux that is booted directly has no configuration ports, since ECAM takes half the exits. Before ACPI confirms where \
         ECAM is, this kernel believes that there is no PCI at all",
        &[
            "PCI: Fatal: No config space access function found",
            "PCI: not using MMCONFIG",
            "PCI: MMCONFIG ",
            "system #:#: [",
        ],
    ),
    (
        "ACPI is hardware-reduced: there is one state of sleep, and the power button is a device",
        &["ACPI: (supports ", "ACPI: Power Button", "input: Power Button"],
    ),
    (
        "tables of our own",
        &[
            "ACPI: APIC",
            "ACPI: DSDT",
            "ACPI: FACP",
            "ACPI: MCFG",
            "ACPI: RSDP",
            "ACPI: XSDT",
            "ACPI: SPCR",
            "ACPI: Reserving SPCR",
            "DMI: ",
            "SMBIOS ",
            "smpboot: CPU#: AMD",
        ],
    ),
    (
        "PCI devices are hot-plugged by ACPI, and there are no PCI Express links to manage",
        &[
            "acpiphp: Slot [",
            "ACPI FADT declares the system doesn't support PCIe ASPM",
            "acpi PNP#:#: _OSC",
            "ACPI: PCI Root Bridge",
            "pci_bus #:#: root bus resource [bus #]",
            "pci #:#:#.#: reg ",
            "virtio-pci #:#:#.#: enabling device",
        ],
    ),
    (
        "the ROM area is RAM that the guest may use, and cached as such",
        &["#-FFFFF write-back"],
    ),
    (
        "nothing is attached to the keyboard controller, so ACPI does not name it; the clock has no interrupt",
        &["i#: PNP: No PS/# controller found", "rtc_cmos #:#: no alarms"],
    ),
    ("there is no display", &["Console: colour dummy device"]),
];

const QEMU_ONLY: [Explained; 6] = [
    (
        "configuration ports, an ISA bridge and its quirks, I/O BARs",
        &[
            "PCI: Using configuration type",
            "PCI: MMCONFIG ",
            "system #:#: [",
            "pci #:#:#.#: quirk:",
            "pci #:#:#.#: reg ",
            "pci_bus #:#: resource # [io",
            "pci_bus #:#: root bus resource [",
            "ACPI: PCI Root Bridge",
            "acpi PNP#:#: _OSC",
        ],
    ),
    (
        "INTx by interrupt links, which devices with MSI-X do without",
        &[
            "ACPI: PCI Interrupt Link",
            "PCI Interrupt Link",
            "ACPI: INT_SRC_OVR",
            "ACPI: IRQ# used by override",
        ],
    ),
    (
        "fixed ACPI hardware: its timer, its events, HPET. The guest's clock is kvm-clock under both",
        &[
            "ACPI: PM-Timer",
            "ACPI: Enabled # GPEs",
            "ACPI: HPET",
            "hpet#:",
            "clocksource: hpet",
            "clocksource: acpi_pm",
            "..TIMER:",
            "ACPI: (supports ",
            "ACPI: Power Button",
            "input: Power Button",
        ],
    ),
    (
        "SeaBIOS and its tables",
        &[
            "ACPI: APIC",
            "ACPI: DSDT",
            "ACPI: FACP",
            "ACPI: FACS",
            "ACPI: MCFG",
            "ACPI: RSDP",
            "ACPI: RSDT",
            "ACPI: WAET",
            "ACPI: Reserving ",
            "DMI: ",
            "SMBIOS ",
            "#-FFFFF write-protect",
            "On node #, zone",
            "smpboot: CPU#: AMD",
        ],
    ),
    (
        "a keyboard and a mouse; an interrupt of the clock",
        &[
            "i#: PNP: PS/# Controller",
            "input: AT Translated Set # keyboard",
            "serio: i#",
            "rtc_cmos #:#: ",
        ],
    ),
    (
        "a display's text mode without a display",
        &["Console: colour *CGA"],
    ),
];

/// Lines that show what old kernels, unlike newer ones, only have when the machine is set up for it.
const WANTED: [&str; 7] = [
    "MTRR default type: write-back",
    "MTRR variable ranges enabled:",
    "# base # mask # uncachable",
    "x#/PAT: Configuration [#-#]: WB  WC  UC- UC  WB  WP  UC- WT",
    "rtc_cmos #:#: registered as rt#",
    "rtc_cmos #:#: setting system clock to #-#-#T#:#:# UTC (#)",
    "ACPI: Added _OSI(Processor Device)",
];

/// A line of the log: its level, and its text with `#` for each number.
type Line = (u8, String);

fn log(text: &str) -> BTreeSet<Line> {
    let raw = text
        .lines()
        .filter_map(|line| line.trim_end().strip_prefix("LOG <"));
    raw.filter_map(line).collect()
}

/// `6>[    0.000000] text`
fn line(raw: &str) -> Option<Line> {
    let (level, rest) = raw.split_once(">[")?;
    let (_time, text) = rest.split_once("] ")?;
    let text = text.split(" guest.run=").next()?;
    Some((level.parse().ok()?, without_numbers(text.trim())))
}

/// With `#` for each number, decimal or hexadecimal.
fn without_numbers(text: &str) -> String {
    let mut out = String::new();
    let mut word = String::new();
    for character in text.chars().chain(['\0']) {
        if character.is_ascii_hexdigit() || (character == 'x' && word.ends_with('0')) {
            word.push(character);
            continue;
        }
        if word.bytes().any(|byte| byte.is_ascii_digit()) {
            out.push('#');
        } else {
            out.push_str(&word);
        }
        word.clear();
        out.push(character);
    }
    out.trim_end_matches('\0').to_owned()
}

/// Those of `lines` that no reason explains.
fn unexplained<'line>(lines: impl Iterator<Item = &'line Line>, explained: &[Explained]) -> Vec<&'line Line> {
    let known = |text: &str| {
        let mut all = explained.iter().chain([&TIME]);
        all.any(|(_reason, beginnings)| beginnings.iter().any(|beginning| text.starts_with(beginning)))
    };
    lines.filter(|(_, text)| !known(text)).collect()
}

#[test]
fn numbers_are_taken_out_of_a_line_and_words_stay() {
    for (raw, expected) in [
        (
            "6>[    0.050060] BIOS-e820: [mem 0x0000-0x9fbff] usable",
            "BIOS-#: [mem #-#] usable",
        ),
        (
            "7>[    0.1] pci 0000:00:1f.2: added feed",
            "pci #:#:#.#: added feed",
        ),
        (
            "6>[    0.1] Kernel: a=1 guest.run=abc guest.after=x",
            "Kernel: a=#",
        ),
    ] {
        let (_, text) = line(raw).expect("a line");
        assert_eq!(text, expected);
    }
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn oldest_kernel_logs_the_same_as_under_q35() {
        let case = Case::new("old");
        let spec = VmSpec::new(Guests.vmlinuz(KERNEL), Some(Guests.initrd(KERNEL)))
            .cmdline(KERNEL.arguments())
            .script(SCRIPT);
        let vm = Vm::start(&case, "", &spec);
        let mut console = vm.console();
        let ours = log(&console.until("GUEST-RUN-EXIT 0", BOOT));
        drop((console, vm));

        let mut qemu = case
            .node()
            .stream(&format!(
                "timeout {BOOT} qemu-system-x86_64 -accel kvm -cpu host -M q35 -smp 1 -m 256 -nodefaults -no-user-config \
                 -display none -serial stdio -device virtio-rng-pci -device virtio-balloon-pci -kernel {} -initrd {} \
                 -append 'console=ttyS0 quiet panic=-1 sysrq_always_enabled {} guest.run={} guest.after=poweroff' \
                 2>&1; echo QEMU-EXIT $?",
                Guests.vmlinuz(KERNEL),
                Guests.initrd(KERNEL),
                KERNEL.arguments(),
                base64(SCRIPT.as_bytes())
            ));
        let text = qemu.until("GUEST-RUN-EXIT 0", Deadline::seconds(BOOT));
        let theirs = log(&text);
        qemu.until("QEMU-EXIT 0\n", Deadline::seconds(BOOT));

        assert!(ours.len() > 150 && theirs.len() > 150, "{ours:#?} {theirs:#?}");
        let only_ours = unexplained(ours.difference(&theirs), &OURS_ONLY);
        let only_theirs = unexplained(theirs.difference(&ours), &QEMU_ONLY);
        assert!(
            only_ours.is_empty() && only_theirs.is_empty(),
            "only under vmm: {only_ours:#?}\nonly under QEMU: {only_theirs:#?}"
        );
        for wanted in WANTED {
            assert!(ours.iter().any(|(_, text)| text == wanted), "{wanted}: {ours:#?}");
        }
    }
}
