use std::collections::BTreeMap;

use super::*;

const BASE: u64 = 0xe0000;

fn platform(cpus: u32) -> Platform {
    Platform {
        apic_ids: (0..cpus).collect(),
        local_apic: 0xfee0_0000,
        io_apic: 0xfec0_0000,
        ecam: 0xe800_0000..=0xe80f_ffff,
        mmio32: 0xc000_0000..=0xe7ff_ffff,
        mmio64: 0x2_0000_0000..=0x3f_ffff_ffff,
        com1: (0x3f8, 4),
        power_port: 0x600,
        reset_value: 1,
        power_button_gsi: 5,
        pvpanic_port: 0x505,
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
fn every_table_is_reached_from_the_rsdp_and_has_a_right_checksum() {
    let tables = walk(&build(&platform(4), BASE));
    assert_eq!(
        tables.keys().map(String::as_str).collect::<Vec<_>>(),
        ["APIC", "DSDT", "FACP", "MCFG", "SPCR", "XSDT"],
    );
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
fn the_mcfg_covers_bus_0_only() {
    let mcfg = &walk(&build(&platform(1), BASE))["MCFG"];
    assert_eq!(u64_at(mcfg, 44), 0xe800_0000);
    assert_eq!(mcfg[52..56], [0, 0, 0, 0], "segment 0, buses 0 to 0");
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
        "_S5_", "PCI0", "MBRD", "COM1", "PWRB", "GED0", "_EVT", "PEVT", "QEMU0001", "ACPI0013",
    ] {
        assert!(has(name.as_bytes()), "{name}");
    }
}

#[test]
fn the_tables_are_a_function_of_the_platform_alone() {
    assert_eq!(build(&platform(4), BASE), build(&platform(4), BASE));
    assert_ne!(build(&platform(4), BASE), build(&platform(5), BASE));
}
