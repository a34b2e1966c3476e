use std::collections::BTreeMap;

use vmmd_spec::topology::Topology;

use super::*;
use crate::{board::cpuid::apic_id, memory::layout};

const BASE: u64 = 0xe0000;

fn platform(cpus: u32) -> Platform {
    Platform {
        apic_ids: (0..cpus).collect(),
        local_apic: 0xfee0_0000,
        io_apic: 0xfec0_0000,
        ecam: 0xe800_0000..=0xe82f_ffff,
        mmio32: 0xc000_0000..=0xe7ff_ffff,
        mmio64: [
            vec![0x01_0000_0000..=0x2f_ffff_ffff, 0x40_0000_0000..=0xff_ffff_ffff],
            vec![0x30_0000_0000..=0x37_ffff_ffff],
            vec![0x38_0000_0000..=0x3f_ffff_ffff],
        ],
        com1: (0x3f8, 4),
        keyboard: None,
        power_port: 0x600,
        reset_value: 1,
        power_button_port: 0x604,
        power_button_gsi: 17,
        rtc_port: 0x70,
        pvpanic_port: 0x505,
        hotplug_port: 0xae00,
        hotplug_gsi: 16,
        generation_id: Some(0xe_f000),
        generation_gsi: 18,
        tpm: None,
        fw_cfg: None,
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn table_at(tables: &Tables, address: u64) -> &[u8] {
    let bytes = &tables.bytes[usize::try_from(address - BASE).unwrap()..];
    &bytes[..u32_at(bytes, 4) as usize]
}

/// All tables that a guest finds from the RSDP on, by signature, with their checksums checked.
fn walk(tables: &Tables) -> BTreeMap<String, Vec<u8>> {
    let rsdp = &tables.bytes[..36];
    assert_eq!(
        (&rsdp[..8], sum(&rsdp[..20]), sum(rsdp)),
        (&b"RSD PTR "[..], 0, 0)
    );
    let xsdt = table_at(tables, u64_at(rsdp, 24));
    let mut addresses: Vec<u64> = xsdt[36..].chunks_exact(8).map(|entry| u64_at(entry, 0)).collect();
    addresses.push(u64_at(rsdp, 24));
    let mut found = BTreeMap::new();
    while let Some(address) = addresses.pop() {
        assert_eq!(address % 16, 0);
        let table = table_at(tables, address);
        assert_eq!(sum(table), 0, "checksum");
        let signature = String::from_utf8(table[..4].to_vec()).unwrap();
        if signature == "FACP" {
            addresses.push(u64_at(table, 140));
        }
        assert!(found.insert(signature, table.to_vec()).is_none());
    }
    found
}

#[test]
fn tables_are_reached_from_the_rsdp_with_right_checksums() {
    let tables = walk(&build(&platform(4), BASE));
    assert_eq!(
        tables.keys().map(String::as_str).collect::<Vec<_>>(),
        ["APIC", "DSDT", "FACP", "MCFG", "SPCR", "XSDT"],
    );
}

#[test]
fn tables_that_firmware_moves_have_right_checksums_afterwards() {
    const MOVED: u64 = 0x7f00_0000;
    let mut tables = build(&platform(2), 0);
    for at in &tables.pointers {
        let address = u64_at(&tables.bytes, *at) + MOVED;
        tables.bytes[*at..*at + 8].copy_from_slice(&address.to_le_bytes());
    }
    for Checksum { range, at } in &tables.checksums {
        tables.bytes[*at] = 0;
        tables.bytes[*at] = sum(&tables.bytes[range.clone()]).wrapping_neg();
    }
    assert_eq!(tables, build(&platform(2), MOVED));
}

#[test]
fn the_fadt_is_hardware_reduced_and_names_the_power_register() {
    let fadt = &walk(&build(&platform(1), BASE))["FACP"];
    assert_eq!(fadt.len(), 276);
    let flags = u32_at(fadt, 112);
    assert_ne!(flags & 1 << 20, 0, "HW_REDUCED_ACPI");
    assert_ne!(flags & 1 << 10, 0, "RESET_REG_SUP");
    // Reset, sleep control and sleep status register: system I/O, 8 bits wide, byte access.
    for offset in [116, 244, 256] {
        assert_eq!(fadt[offset..offset + 4], [1, 8, 0, 1]);
        assert_eq!(u64_at(fadt, offset + 4), 0x600);
    }
    assert_eq!(fadt[128], 1, "reset value");
    assert_eq!(fadt[108], 0x32, "the century's register in the clock");
    assert_eq!(u32_at(fadt, 109) & 1 << 5, 0, "CMOS_RTC_NOT_PRESENT");
    assert_eq!(
        u32_at(fadt, 76),
        0,
        "no PM timer: a guest with kvmclock would only measure it"
    );
}

#[test]
fn the_madt_lists_each_cpu_once_with_its_apic_id() {
    let mut platform = platform(300);
    platform.apic_ids[2] = 40;
    let madt = &walk(&build(&platform, BASE))["APIC"];
    let mut entries = &madt[44..];
    let (mut ids, mut io_apics) = (Vec::new(), 0);
    while let [kind, length, ..] = *entries {
        let (entry, rest) = entries.split_at(usize::from(length));
        match kind {
            0 => ids.push((u32::from(entry[2]), u32::from(entry[3]), u32_at(entry, 4))),
            9 => ids.push((u32_at(entry, 12), u32_at(entry, 4), u32_at(entry, 8))),
            1 => io_apics += 1,
            4 => assert_eq!(entry[2..], [0xff, 0, 0, 1]),
            other => panic!("unknown entry {other}"),
        }
        entries = rest;
    }
    let expected: Vec<_> = (0..300)
        .map(|uid| (uid, if uid == 2 { 40 } else { uid }, 1))
        .collect();
    assert_eq!((ids, io_apics), (expected, 1));
}

#[test]
fn tables_of_the_largest_machine_fit_with_old_local_apics() {
    for cores in [1, 2, 16, 17, 64, 248, 254] {
        let topology = Topology::for_cores(cores).unwrap();
        let platform = Platform {
            apic_ids: (0..cores).map(|vcpu| apic_id(topology, vcpu)).collect(),
            ..platform(1)
        };
        let tables = build(&platform, BASE);
        assert!(tables.bytes.len() as u64 <= layout::ACPI.end - layout::ACPI.start);
        let madt = &walk(&tables)["APIC"];
        let mut entries = &madt[44..];
        let mut ids = Vec::new();
        while let [kind, length, ..] = *entries {
            let (entry, rest) = entries.split_at(usize::from(length));
            assert_ne!(kind, 9, "an x2APIC");
            if kind == 0 {
                ids.push(u32::from(entry[3]));
            }
            entries = rest;
        }
        assert_eq!(ids, platform.apic_ids);
    }
}

#[test]
fn the_mcfg_covers_the_bus_that_is_always_there() {
    let mcfg = &walk(&build(&platform(1), BASE))["MCFG"];
    assert_eq!(u64_at(mcfg, 44), 0xe800_0000);
    assert_eq!(mcfg[52..56], [0, 0, 0, 0], "segment 0, bus 0");
}

#[test]
fn the_spcr_describes_com1() {
    let spcr = &walk(&build(&platform(1), BASE))["SPCR"];
    assert_eq!(spcr.len(), 80);
    assert_eq!(u64_at(spcr, 44), 0x3f8);
    assert_eq!((spcr[52], u32_at(spcr, 54), spcr[58]), (2, 4, 7));
}

#[test]
fn the_dsdt_has_every_device_and_the_sleep_state() {
    let dsdt = &walk(&build(&platform(1), BASE))["DSDT"];
    let has = |needle: &[u8]| dsdt.windows(needle.len()).any(|window| window == needle);
    for name in [
        "_S5_", "PCI0", "PCI1", "PCI2", "MBRD", "COM1", "PWRB", "GED0", "_EVT", "RTC0", "PEVT", "QEMU0001",
        "ACPI0013",
    ] {
        assert!(has(name.as_bytes()), "{name}");
    }
}

/// The bytes between the end of a name that is declared as a device and the next device.
fn device<'a>(dsdt: &'a [u8], name: &str) -> &'a [u8] {
    // DeviceOp, one or two bytes of length, the name (ACPI 6.5, 20.2.5.2).
    let start = (0..dsdt.len() - 8)
        .find(|at| {
            let rest = &dsdt[*at..];
            rest.starts_with(&[0x5b, 0x82])
                && (rest[3..7] == *name.as_bytes() || rest[4..8] == *name.as_bytes())
        })
        .unwrap_or_else(|| panic!("no device {name}"));
    let length = match dsdt[start + 2] {
        short @ 0..0x40 => usize::from(short),
        long => usize::from(long & 0xf) | usize::from(dsdt[start + 3]) << 4,
    };
    &dsdt[start..start + 2 + length]
}

fn has(bytes: &[u8], needle: &[u8]) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle)
}

/// The scope of a host bridge in which its slots are.
fn slots_of(dsdt: &[u8], bus: u32) -> &[u8] {
    // ScopeOp, two bytes of length, the name (ACPI 6.5, 20.2.5.1).
    let name = format!("PCI{bus}");
    let start = (0..dsdt.len() - 8)
        .find(|at| dsdt[*at] == 0x10 && dsdt[*at + 3..*at + 7] == *name.as_bytes())
        .unwrap_or_else(|| panic!("no scope {name}"));
    assert_eq!(dsdt[start + 1] >> 6, 1, "one more byte of length");
    let length = usize::from(dsdt[start + 1] & 0xf) | usize::from(dsdt[start + 2]) << 4;
    &dsdt[start..start + 1 + length]
}

#[test]
fn slots_have_address_number_and_eject_method() {
    let dsdt = &walk(&build(&platform(1), BASE))["DSDT"];
    for (bus, slot) in (0_u32..3).flat_map(|bus| (1_u32..32).map(move |slot| (bus, slot))) {
        let device = device(slots_of(dsdt, bus), &format!("S{slot:02}_"));
        let mut address = b"_ADR\x0c".to_vec();
        address.extend((slot << 16).to_le_bytes());
        assert!(has(device, &address), "_ADR of {slot}");
        let number: &[u8] = match u8::try_from(bus * 32 + slot).unwrap() {
            1 => b"_SUN\x01",
            other => &[b"_SUN".as_slice(), &[0x0a, other]].concat(),
        };
        assert!(has(device, number), "_SUN of {slot}");
        // Store(1 << slot, EJCT) in _EJ0 with one argument.
        let at = device.windows(4).position(|window| window == b"_EJ0").unwrap();
        let body = &device[at + 4..];
        assert_eq!(body[..2], [1, 0x70]);
        let mask: &[u8] = match slot {
            1..=7 => &[0x0a, 1 << slot],
            8..=15 => &[&[0x0b][..], &(1_u16 << slot).to_le_bytes()].concat(),
            _ => &[&[0x0c][..], &(1_u32 << slot).to_le_bytes()].concat(),
        };
        assert_eq!(&body[2..], [mask, b"EJCT"].concat(), "_EJ0 of {slot}");
    }
    assert!(!has(dsdt, b"S00_") && !has(dsdt, b"S32_"));
}

#[test]
fn slot_events_have_their_own_device_and_reach_each_slot() {
    let dsdt = &walk(&build(&platform(1), BASE))["DSDT"];
    let events = device(dsdt, "GED1");
    // Extended interrupt: consumer, level, active high, exclusive; one, GSI 16 (ACPI 6.5, 6.4.3.6).
    assert!(has(events, &[0x89, 6, 0, 1, 1, 16, 0, 0, 0]));
    assert!(has(
        events,
        b"\\\x2f\x03_SB_PCI0PCNT\\\x2f\x03_SB_PCI1PCNT\\\x2f\x03_SB_PCI2PCNT"
    ));
    for bus in 0..3_u8 {
        let slots = slots_of(dsdt, bus.into());
        // SystemIO region of 12 bytes, three fields of 32 bits with dword access, not locked, written as zeroes.
        let region = [&b"\x5b\x80HPRG\x01\x0b"[..], &[12 * bus, 0xae, 0x0a, 0x0c]].concat();
        assert!(has(slots, &region), "the registers of bus {bus}");
        assert!(has(slots, b"HPRG\x43CHK_\x20ASK_\x20EJCT\x20"));
        assert!(has(slots, b"DVNTCHK_\x01DVNTASK_\x0a\x03"));
        for slot in 1..32 {
            // Notify(Snn_, Arg1).
            let call = [b"\x86".as_slice(), format!("S{slot:02}_").as_bytes(), b"\x69"].concat();
            assert!(has(slots, &call), "{slot}");
        }
    }
    // The ports are reserved.
    assert!(has(dsdt, &[0x47, 1, 0x00, 0xae, 0x00, 0xae, 1, 40]));
}

#[test]
fn further_host_bridges_appear_with_their_register_bit() {
    let dsdt = &walk(&build(&platform(1), BASE))["DSDT"];
    for bus in 0..3_u8 {
        let slots = slots_of(dsdt, bus.into());
        // A SystemIO region of 4 bytes with a field of 32 bits, dword access, not locked, written as zeroes.
        assert_eq!(has(slots, b"\x5b\x80HPBR\x01\x0b\x24\xae\x0a\x04"), bus != 0);
        // _STA: If (BUSP & 1 << bus) { Return (0xf) } Return (0)
        let body = [&b"\x7bBUSP\x0a"[..], &[1 << bus, 0], &b"\xa4\x0a\x0f\xa4\x00"[..]].concat();
        assert_eq!((has(slots, b"_STA"), has(slots, &body)), (bus != 0, bus != 0));
        // DVNT: If (Arg0 & 1) { Notify (PCIn, 0) }
        let notify = [b"\x7b\x68\x01\x00\x86PCI", format!("{bus}").as_bytes(), b"\x00"].concat();
        assert_eq!(has(slots, &notify), bus != 0, "bus {bus}");
        assert_eq!(has(slots, b"\x7b\x68\x01\x00"), bus != 0);
    }
}

#[test]
fn power_button_event_clears_the_status_before_it_notifies() {
    let dsdt = &walk(&build(&platform(1), BASE))["DSDT"];
    let events = device(dsdt, "GED0");
    assert!(has(events, &[0x89, 6, 0, 1, 1, 17, 0, 0, 0]));
    // A region of one byte of system I/O at 0x604 with a field of eight bits: byte access, not locked.
    assert!(has(events, b"\x5b\x80PBRG\x01\x0b\x04\x06\x01"));
    assert!(has(events, b"PBRG\x41PBST\x08"));
    // If (PBST & 1) { PBST = 1; Notify (\_SB.PWRB, 0x80) }
    assert!(has(events, b"\x7bPBST\x01\x00"));
    assert!(has(events, b"\x70\x01PBST\x86\x5c\x2e_SB_PWRB\x0a\x80"));
    // The port is reserved.
    assert!(has(dsdt, &[0x47, 1, 0x04, 0x06, 0x04, 0x06, 1, 1]));
}

#[test]
fn buses_have_host_bridges_with_number_and_window() {
    let dsdt = &walk(&build(&platform(1), BASE))["DSDT"];
    for (bus, windows) in (0_u8..).zip(&platform(1).mmio64) {
        let bridge = device(dsdt, &format!("PCI{bus}"));
        assert!(has(bridge, &bus_numbers(bus)), "bus numbers of {bus}");
        // QWord memory: producer, not cacheable, read and write; its least and its greatest address.
        for window in windows {
            let addresses = [window.start().to_le_bytes(), window.end().to_le_bytes()].concat();
            assert!(has(bridge, &addresses), "window of {bus}");
        }
        assert_eq!(
            has(bridge, &0xc000_0000_u32.to_le_bytes()),
            bus == 0,
            "32-bit BARs of {bus}"
        );
        let number: &[u8] = match bus {
            0 => b"_BBN\x00",
            1 => b"_BBN\x01",
            _ => b"_BBN\x0a\x02",
        };
        assert!(has(bridge, number), "_BBN of {bus}");
        // Where bus 0 of the segment is.
        let ecam = [b"_CBA\x0c".as_slice(), &0xe800_0000_u32.to_le_bytes()].concat();
        assert_eq!((has(bridge, b"_CBA"), has(bridge, &ecam)), (bus != 0, bus != 0));
    }
}

/// Granularity, least, greatest, translation and length of a word address space (ACPI 6.5, 6.4.3.5.3).
fn bus_numbers(bus: u8) -> [u8; 10] {
    [0, 0, bus, 0, bus, 0, 0, 0, 1, 0]
}

#[test]
fn the_tables_are_a_function_of_the_platform_alone() {
    assert_eq!(build(&platform(4), BASE), build(&platform(4), BASE));
    assert_ne!(build(&platform(4), BASE), build(&platform(5), BASE));
}

#[test]
fn a_keyboard_controller_is_there_when_a_keyboard_is() {
    let without = build(&platform(1), BASE);
    let with = build(
        &Platform {
            keyboard: Some((0x60, 0x64, 1)),
            ..platform(1)
        },
        BASE,
    );
    let has = |tables: &Tables, what: &[u8]| tables.bytes.windows(what.len()).any(|window| window == what);
    // IAPC_BOOT_ARCH is at offset 109 of the FADT (ACPI 6.5, 5.2.9), bit 1 is the 8042.
    let arch = |tables: &Tables| {
        let at = tables
            .bytes
            .windows(4)
            .position(|window| window == b"FACP")
            .unwrap();
        tables.bytes[at + 109] & 2
    };
    assert_eq!((has(&without, b"KBD0"), arch(&without)), (false, 0));
    assert_eq!((has(&with, b"KBD0"), arch(&with)), (true, 2));
}

#[test]
fn tpm_has_its_table_and_device_where_there_is_one() {
    let with = |log_bytes| Platform {
        tpm: Some(Tpm { log_bytes }),
        ..platform(1)
    };
    let tables = walk(&build(&with(0), BASE));
    let table = &tables["TPM2"];
    // Revision 4; class 0; the control area; start method 7.
    assert_eq!(
        (table.len(), table[8], table[36..40].to_vec()),
        (76, 4, vec![0; 4])
    );
    assert_eq!((u64_at(table, 40), u32_at(table, 48)), (0xfed4_0040, 7));
    assert_eq!(table[52..], [0; 24]);
    let device = device(&tables["DSDT"], "TPM_");
    assert!(has(device, b"MSFT0101"));
    // Memory32Fixed, writable (ACPI 6.5, 6.4.3.4).
    assert!(has(device, &[0x86, 9, 0, 1, 0, 0, 0xd4, 0xfe, 0, 0x10, 0, 0]));
    let without = walk(&build(&platform(1), BASE));
    assert!(!without.contains_key("TPM2") && !has(&without["DSDT"], b"TPM_"));
    // The rest is as without a TPM.
    for (name, table) in without
        .iter()
        .filter(|(name, _)| !["XSDT", "DSDT", "FACP"].contains(&name.as_str()))
    {
        assert_eq!(table, &tables[name]);
    }
    assert!(build(&with(0), BASE).tpm_log.is_none());
}

#[test]
fn fw_cfg_has_its_device_where_a_system_reads_it() {
    let of = |fw_cfg| {
        let platform = Platform {
            fw_cfg,
            ..platform(1)
        };
        walk(&build(&platform, BASE))["DSDT"].clone()
    };
    let with = of(Some((0x510, 12)));
    let device = device(&with, "FWCF");
    // The driver of Linux is loaded by this id; ports 0x510 to 0x51b (ACPI 6.5, 6.4.2.5).
    assert!(has(device, b"QEMU0002") && has(device, &[0x47, 1, 0x10, 5, 0x10, 5, 1, 12]));
    assert!(!has(&of(None), b"FWCF"));
}

#[test]
fn log_of_a_bios_gets_its_address_before_the_checksum() {
    let platform = Platform {
        tpm: Some(Tpm { log_bytes: 0x1_0000 }),
        ..platform(1)
    };
    let mut tables = build(&platform, 0);
    let at = tables.tpm_log.unwrap();
    assert_eq!(
        (u32_at(&tables.bytes, at - 4), u64_at(&tables.bytes, at)),
        (0x1_0000, 0)
    );
    assert_eq!(tables.bytes[at - 68..at - 64], *b"TPM2");
    tables.bytes[at..at + 8].copy_from_slice(&0x7fff_0000_u64.to_le_bytes());
    let Checksum { range, at: sum_at } = tables.checksums[0].clone();
    assert_eq!(range, at - 68..at + 8);
    tables.bytes[sum_at] = 0;
    tables.bytes[sum_at] = sum(&tables.bytes[range.clone()]).wrapping_neg();
    assert_eq!(sum(&tables.bytes[range]), 0);
}
