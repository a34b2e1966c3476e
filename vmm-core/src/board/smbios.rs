//! SMBIOS: manufacturer, serial number and UUID of the guest's system (DSP0134, version 3.7).

use std::ops::Range;

use vmmd_spec::smbios::{OemString, Smbios};

use crate::memory::layout::{self, Map};

/// Properties that the tables describe.
#[derive(Clone, Copy, Debug)]
pub struct System<'a> {
    /// In RFC 9562 byte order.
    pub uuid: [u8; 16],
    /// The system's serial number.
    pub serial: &'a str,
    /// Other texts; empty ones are the default.
    pub texts: &'a Smbios,
    /// Processor sockets.
    pub sockets: u32,
    /// In each of them; one thread each.
    pub cores_per_socket: u32,
    /// RAM in bytes.
    pub ram: u64,
    /// Where the RAM is.
    pub map: Map,
}

const MANUFACTURER: &str = "vmmd";
const PRODUCT: &str = "vmmd";
const FAMILY: &str = "Virtual Machine";
const VERSION: &str = "platform v1";
const ENTRY_LENGTH: usize = 24;
/// Structures begin at the next paragraph behind the entry point.
const TABLE_OFFSET: usize = 32;
/// A handle that stands for "no such structure".
const NO_HANDLE: u16 = 0xffff;
/// "Error information not provided".
const NO_ERROR_HANDLE: u16 = 0xfffe;
const MEMORY_ARRAY: u16 = 0x1000;

/// Form of an entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryPoint {
    /// The 32-bit entry point (5.2.1).
    Narrow,
    /// The 64-bit entry point (5.2.2).
    Wide,
}

/// The entry point and the table, for firmware that gives the table an address and sums up the entry point.
pub fn parts(system: &System<'_>, form: EntryPoint) -> (Vec<u8>, Vec<u8>) {
    let table = table(system);
    let entry = match form {
        EntryPoint::Narrow => narrow_entry_point(&table),
        EntryPoint::Wide => entry_point(table.bytes.len()),
    };
    (entry, table.bytes)
}

/// The entry point and, behind it, the table: to be written at [`layout::SMBIOS`]'s start.
pub fn build(system: &System<'_>) -> Vec<u8> {
    let mut table = table(system).bytes;
    let mut bytes = entry_point(table.len());
    bytes.resize(TABLE_OFFSET, 0);
    bytes.append(&mut table);
    bytes
}

fn table(system: &System<'_>) -> Table {
    let mut table = Table::default();
    bios(&mut table);
    this_system(&mut table, system);
    chassis(&mut table, system);
    for socket in 0..system.sockets {
        processor(&mut table, socket, system.cores_per_socket);
    }
    memory(&mut table, system);
    oem_strings(&mut table, system);
    // Type 32, system boot information: no errors.
    table.add(32, 0x2000, &[0; 7], &[]);
    table.add(127, 0x7f00, &[], &[]);
    table
}

/// 5.2.1: the 32-bit entry point, without checksums and the address of the table.
fn narrow_entry_point(table: &Table) -> Vec<u8> {
    const LENGTH: u8 = 31;
    let wire = |number: usize| u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes();
    let mut entry = b"_SM_".to_vec();
    // Checksum, length, version 3.7.
    entry.extend([0, LENGTH, 3, 7]);
    entry.extend(wire(table.longest));
    // Entry point revision 0, formatted area.
    entry.extend([0; 6]);
    entry.extend(b"_DMI_\0");
    entry.extend(wire(table.bytes.len()));
    entry.extend([0; 4]);
    entry.extend(wire(table.count));
    // The version as binary-coded decimals.
    entry.push(0x37);
    entry
}

/// 5.2.2: the 64-bit entry point.
fn entry_point(table_length: usize) -> Vec<u8> {
    const LENGTH: u8 = 24;
    let address = layout::SMBIOS.start.saturating_add(TABLE_OFFSET as u64);
    let mut entry = Vec::with_capacity(ENTRY_LENGTH);
    entry.extend(b"_SM3_");
    // Checksum, length, version 3.7.0, entry point revision 1, reserved.
    entry.extend([0, LENGTH, 3, 7, 0, 1, 0]);
    entry.extend(u32::try_from(table_length).unwrap_or(u32::MAX).to_le_bytes());
    entry.extend(address.to_le_bytes());
    let sum = entry.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(checksum) = entry.get_mut(5) {
        *checksum = sum.wrapping_neg();
    }
    entry
}

/// Structures one behind the other.
#[derive(Default)]
struct Table {
    bytes: Vec<u8>,
    /// Number of structures.
    count: usize,
    /// Length of the longest structure in bytes, with its strings.
    longest: usize,
}

impl Table {
    /// A structure of this type: header, formatted part, strings (6.1).
    fn add(&mut self, kind: u8, handle: u16, formatted: &[u8], strings: &[&str]) {
        const HEADER: usize = 4;
        let start = self.bytes.len();
        let length = u8::try_from(formatted.len().saturating_add(HEADER)).unwrap_or(u8::MAX);
        self.bytes.extend([kind, length]);
        self.bytes.extend(handle.to_le_bytes());
        self.bytes.extend(formatted);
        for string in strings {
            // An empty string would end the list; a NUL would cut it.
            let text: Vec<u8> = string.bytes().filter(|byte| *byte != 0).collect();
            self.bytes
                .extend(if text.is_empty() { b" ".to_vec() } else { text });
            self.bytes.push(0);
        }
        if strings.is_empty() {
            self.bytes.push(0);
        }
        self.bytes.push(0);
        self.count = self.count.saturating_add(1);
        self.longest = self.longest.max(self.bytes.len().saturating_sub(start));
    }
}

/// 7.1: type 0.
fn bios(table: &mut Table) {
    /// "BIOS characteristics are not supported."
    const CHARACTERISTICS: u64 = 1 << 3;
    /// "The SMBIOS table describes a virtual machine."
    const VIRTUAL_MACHINE: u8 = 1 << 4;
    let mut body = vec![1, 2];
    body.extend(0_u16.to_le_bytes());
    body.extend([3, 0]);
    body.extend(CHARACTERISTICS.to_le_bytes());
    // Releases of BIOS (1.0) and embedded controller (none), size of the ROM (0).
    body.extend([0, VIRTUAL_MACHINE, 1, 0, 0xff, 0xff, 0, 0]);
    table.add(0, 0, &body, &[MANUFACTURER, VERSION, "01/01/2026"]);
}

/// 7.2: type 1.
fn this_system(table: &mut Table, system: &System<'_>) {
    /// Power switch.
    const WAKE_UP: u8 = 6;
    let texts = system.texts;
    let mut strings = vec![
        or(&texts.manufacturer, MANUFACTURER),
        or(&texts.product, PRODUCT),
        or(&texts.version, VERSION),
        system.serial,
        or(&texts.family, FAMILY),
    ];
    let sku = further(&mut strings, &texts.sku);
    let mut body = vec![1, 2, 3, 4];
    body.extend(wire_uuid(system.uuid));
    body.extend([WAKE_UP, sku, 5]);
    table.add(1, 0x100, &body, &strings);
}

fn or<'a>(text: &'a str, default: &'a str) -> &'a str {
    if text.is_empty() { default } else { text }
}

/// Adds an optional string; returns its number, 0 when there is none (6.1.3).
fn further<'a>(strings: &mut Vec<&'a str>, text: &'a str) -> u8 {
    if text.is_empty() {
        return 0;
    }
    strings.push(text);
    u8::try_from(strings.len()).unwrap_or(0)
}

/// 7.2.1: the first three fields are little-endian.
fn wire_uuid(uuid: [u8; 16]) -> [u8; 16] {
    let [a, b, c, d, e, f, g, h, rest @ ..] = uuid;
    let [i, j, k, l, m, n, o, p] = rest;
    [d, c, b, a, f, e, h, g, i, j, k, l, m, n, o, p]
}

/// 7.4: type 3.
fn chassis(table: &mut Table, system: &System<'_>) {
    /// "Other", and for states "safe", for security "unknown".
    const OTHER: u8 = 1;
    const SAFE: u8 = 3;
    const UNKNOWN: u8 = 2;
    let mut strings = vec![MANUFACTURER, VERSION, system.serial];
    let asset_tag = further(&mut strings, &system.texts.asset_tag);
    let mut body = vec![1, OTHER, 2, 3, asset_tag, SAFE, SAFE, SAFE, UNKNOWN];
    // OEM-defined; height, power cords, contained elements and their length; no SKU number.
    body.extend([0; 4]);
    body.extend([0, 0, 0, 0, 0]);
    table.add(3, 0x300, &body, &strings);
}

/// 7.12: type 11, which a machine without such strings lacks.
fn oem_strings(table: &mut Table, system: &System<'_>) {
    let strings: Vec<_> = system.texts.oem_strings.iter().map(OemString::as_str).collect();
    if let Ok(count @ 1..) = u8::try_from(strings.len()) {
        table.add(11, 0xb00, &[count], &strings);
    }
}

/// 7.5: type 4.
fn processor(table: &mut Table, socket: u32, cores: u32) {
    const CENTRAL: u8 = 3;
    const OTHER: u8 = 1;
    /// Populated and enabled.
    const STATUS: u8 = 0x41;
    /// 64-bit capable, and multi-core.
    const CHARACTERISTICS: u16 = 1 << 2 | 1 << 3;
    let count = u8::try_from(cores).unwrap_or(u8::MAX);
    let wide = u16::try_from(cores).unwrap_or(u16::MAX);
    let mut body = vec![1, CENTRAL, OTHER, 2];
    // Processor ID (CPUID has it), version, voltage, clocks: not given.
    body.extend([0; 8]);
    body.extend([3, 0]);
    body.extend([0; 6]);
    body.extend([STATUS, OTHER]);
    for _cache in 0..3 {
        body.extend(NO_HANDLE.to_le_bytes());
    }
    // Serial number, asset tag, part number: none.
    body.extend([0, 0, 0, count, count, count]);
    body.extend(CHARACTERISTICS.to_le_bytes());
    body.extend(u16::from(OTHER).to_le_bytes());
    for _count in 0..3 {
        body.extend(wide.to_le_bytes());
    }
    let handle = 0x400_u16.saturating_add(u16::try_from(socket).unwrap_or(0));
    table.add(
        4,
        handle,
        &body,
        &[&format!("CPU {socket}"), MANUFACTURER, VERSION],
    );
}

/// 7.17, 7.18, 7.20: an array with one device, and where its parts are mapped.
fn memory(table: &mut Table, system: &System<'_>) {
    let ram = system.ram;
    const OTHER: u8 = 1;
    const SYSTEM_MEMORY: u8 = 3;
    const NO_CORRECTION: u8 = 3;
    const DIMM: u8 = 9;
    const TYPE_RAM: u8 = 7;
    const DETAIL_OTHER: u16 = 1 << 1;
    /// "Look at the extended field."
    const EXTENDED_SIZE: u16 = 0x7fff;
    const EXTENDED: u32 = u32::MAX;
    const EXTENDED_CAPACITY: u32 = 0x8000_0000;

    let mut body = vec![OTHER, SYSTEM_MEMORY, NO_CORRECTION];
    body.extend(EXTENDED_CAPACITY.to_le_bytes());
    body.extend(NO_ERROR_HANDLE.to_le_bytes());
    body.extend(1_u16.to_le_bytes());
    body.extend(ram.to_le_bytes());
    table.add(16, MEMORY_ARRAY, &body, &[]);

    let mebibytes = ram / layout::MIB;
    let mut body = MEMORY_ARRAY.to_le_bytes().to_vec();
    body.extend(NO_ERROR_HANDLE.to_le_bytes());
    // Total and data width: unknown.
    body.extend([0xff; 4]);
    let size = u16::try_from(mebibytes).ok().filter(|size| *size < EXTENDED_SIZE);
    body.extend(size.unwrap_or(EXTENDED_SIZE).to_le_bytes());
    body.extend([DIMM, 0, 1, 0, TYPE_RAM]);
    body.extend(DETAIL_OTHER.to_le_bytes());
    // Speed unknown; manufacturer; no serial number, asset tag, part number; rank unknown.
    body.extend([0, 0, 2, 0, 0, 0, 0]);
    let extended = if size.is_some() {
        0
    } else {
        u32::try_from(mebibytes).unwrap_or(u32::MAX)
    };
    body.extend(extended.to_le_bytes());
    // Configured speed and voltages: unknown.
    body.extend([0; 8]);
    table.add(17, 0x1100, &body, &["DIMM 0", MANUFACTURER]);

    let (low, high) = system.map.ram_ranges(ram);
    for (Range { start, end }, handle) in [low, high].into_iter().zip(0x1300..) {
        let Some(last) = end.checked_sub(1).filter(|last| *last >= start) else {
            continue;
        };
        let mut body = EXTENDED.to_le_bytes().to_vec();
        body.extend(EXTENDED.to_le_bytes());
        body.extend(MEMORY_ARRAY.to_le_bytes());
        // Devices that form a row.
        body.push(1);
        body.extend(start.to_le_bytes());
        body.extend(last.to_le_bytes());
        table.add(19, handle, &body, &[]);
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation
)]
mod tests {
    use vmmd_spec::smbios::{self, MAX_OEM_BYTES, MAX_OEM_STRINGS};

    use super::*;

    const SYSTEM: System<'static> = System {
        uuid: [
            0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff,
        ],
        serial: "web-1",
        texts: &Smbios {
            uuid: None,
            serial: String::new(),
            manufacturer: String::new(),
            product: String::new(),
            version: String::new(),
            sku: String::new(),
            family: String::new(),
            asset_tag: String::new(),
            oem_strings: Vec::new(),
        },
        sockets: 2,
        cores_per_socket: 12,
        ram: 5 * layout::GIB,
        map: Map::Direct,
    };

    /// Reads structures back: type, formatted part with header, strings.
    fn structures(mut table: &[u8]) -> Vec<(u8, Vec<u8>, Vec<String>)> {
        let mut found = Vec::new();
        while !table.is_empty() {
            let (formatted, rest) = table.split_at(table[1].into());
            let end = rest.windows(2).position(|pair| pair == [0, 0]).unwrap();
            let strings = rest[..end]
                .split(|byte| *byte == 0)
                .filter(|string| !string.is_empty());
            let strings = strings
                .map(|string| String::from_utf8(string.to_vec()).unwrap())
                .collect();
            found.push((formatted[0], formatted.to_vec(), strings));
            table = &rest[end + 2..];
        }
        found
    }

    fn of_kind(system: &System<'_>, kind: u8) -> Vec<(Vec<u8>, Vec<String>)> {
        let bytes = build(system);
        let all = structures(&bytes[TABLE_OFFSET..]);
        all.into_iter()
            .filter(|(found, ..)| *found == kind)
            .map(|(_, bytes, strings)| (bytes, strings))
            .collect()
    }

    #[test]
    fn texts_of_the_user_replace_the_defaults() {
        let texts = Smbios {
            manufacturer: "Example".into(),
            sku: "APP-3".into(),
            asset_tag: "rack-7".into(),
            ..Smbios::default()
        };
        let system = System {
            texts: &texts,
            ..SYSTEM
        };
        let found = structures(&parts(&system, EntryPoint::Wide).1);
        let of = |kind: u8| found.iter().find(|(found, ..)| *found == kind).unwrap();
        let (_, formatted, strings) = of(1);
        assert_eq!(
            *strings,
            ["Example", PRODUCT, VERSION, "web-1", FAMILY, "APP-3"].map(str::to_owned)
        );
        // SKU number and family (7.2).
        assert_eq!(formatted[0x19..0x1b], [6, 5]);
        let (_, formatted, strings) = of(3);
        assert_eq!((formatted[8], strings[3].as_str()), (4, "rack-7"));
        // Without them there is no string.
        let found = structures(&parts(&SYSTEM, EntryPoint::Wide).1);
        let of = |kind: u8| found.iter().find(|(found, ..)| *found == kind).unwrap();
        assert_eq!((of(1).1[0x19], of(3).1[8]), (0, 0));
    }

    #[test]
    fn oem_strings_are_in_the_table_as_they_are() {
        assert!(of_kind(&SYSTEM, 11).is_empty());
        let text = "io.systemd.credential:a=one\ntwo";
        let texts = Smbios {
            oem_strings: vec![OemString::new(text.into()).unwrap()],
            ..Smbios::default()
        };
        let system = System {
            texts: &texts,
            ..SYSTEM
        };
        let (formatted, strings) = of_kind(&system, 11).remove(0);
        assert_eq!(formatted, [11, 5, 0, 0xb, 1]);
        assert_eq!(strings, [text]);
    }

    #[test]
    fn tables_with_oem_strings_of_all_sizes_fit() {
        for length in [1, 2, 255, 256, 4_000, MAX_OEM_BYTES - 1] {
            let count = MAX_OEM_STRINGS.min(MAX_OEM_BYTES / (length + 1));
            let texts = Smbios {
                oem_strings: vec![OemString::new("x".repeat(length)).unwrap(); count],
                ..Smbios::default()
            };
            assert!(smbios::fit(&texts.oem_strings));
            let system = System {
                texts: &texts,
                sockets: 8,
                cores_per_socket: 31,
                ram: layout::RAM_MAX,
                ..SYSTEM
            };
            assert!(build(&system).len() as u64 <= layout::SMBIOS.end - layout::SMBIOS.start);
            let (entry, table) = parts(&system, EntryPoint::Narrow);
            let longest = u16::from_le_bytes(*entry[8..].first_chunk().unwrap());
            let found = structures(&table);
            let (_, formatted, strings) = found.iter().find(|(kind, ..)| *kind == 11).unwrap();
            assert_eq!((usize::from(formatted[4]), strings.len()), (count, count));
            assert!(strings.iter().all(|text| text.len() == length));
            assert!(usize::from(longest) >= formatted.len() + count * (length + 1));
            assert_eq!(found.last().unwrap().0, 127);
        }
    }

    #[test]
    fn the_entry_point_adds_up_to_zero_and_names_the_whole_table() {
        let bytes = build(&SYSTEM);
        let entry = &bytes[..ENTRY_LENGTH];
        assert_eq!(&entry[..5], b"_SM3_");
        assert_eq!(entry.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!(
            u32::from_le_bytes(*entry[12..].first_chunk().unwrap()) as usize,
            bytes.len() - TABLE_OFFSET
        );
        assert_eq!(u64::from_le_bytes(*entry[16..].first_chunk().unwrap()), 0xf_0020);
        assert!(bytes.len() as u64 <= layout::SMBIOS.end - layout::SMBIOS.start);
    }

    #[test]
    fn narrow_entry_point_describes_the_table() {
        let (entry, table) = parts(&SYSTEM, EntryPoint::Narrow);
        assert_eq!(entry.len(), 31);
        assert_eq!(&entry[..8], b"_SM_\0\x1f\x03\x07");
        assert_eq!(&entry[16..22], b"_DMI_\0");
        let number = |at: usize| usize::from(u16::from_le_bytes(*entry[at..].first_chunk().unwrap()));
        assert_eq!(number(0x16), table.len());
        assert_eq!(number(0x1c), structures(&table).len());
        assert!((0x30..table.len()).contains(&number(8)));
    }

    #[test]
    fn structures_have_the_length_of_their_version_and_own_handles() {
        let bytes = build(&SYSTEM);
        let all = structures(&bytes[TABLE_OFFSET..]);
        let lengths: Vec<_> = all.iter().map(|(kind, bytes, _)| (*kind, bytes.len())).collect();
        assert_eq!(
            lengths,
            [
                (0, 0x1a),
                (1, 0x1b),
                (3, 0x16),
                (4, 0x30),
                (4, 0x30),
                (16, 0x17),
                (17, 0x28),
                (19, 0x1f),
                (19, 0x1f),
                (32, 0x0b),
                (127, 4)
            ]
        );
        let handles: std::collections::HashSet<_> =
            all.iter().map(|(_, bytes, _)| [bytes[2], bytes[3]]).collect();
        assert_eq!(handles.len(), all.len());
    }

    #[test]
    fn the_uuid_is_little_endian_in_its_first_three_fields() {
        let (bytes, strings) = of_kind(&SYSTEM, 1).remove(0);
        assert_eq!(
            bytes[8..18],
            [0x33, 0x22, 0x11, 0x00, 0x55, 0x44, 0x77, 0x66, 0x88, 0x99]
        );
        assert_eq!(strings[usize::from(bytes[7]) - 1], "web-1");
        assert_eq!(strings[0], "vmmd");
    }

    #[test]
    fn memory_is_told_whatever_its_size() {
        let size = |ram| {
            let (bytes, _) = of_kind(&System { ram, ..SYSTEM }, 17).remove(0);
            let short = u16::from_le_bytes([bytes[0xc], bytes[0xd]]);
            (short, u32::from_le_bytes(*bytes[0x1c..].first_chunk().unwrap()))
        };
        assert_eq!(size(256 * layout::MIB), (256, 0));
        assert_eq!(size(32_767 * layout::MIB), (0x7fff, 32_767));
        assert_eq!(size(64 * layout::GIB), (0x7fff, 65_536));
        assert_eq!(size(layout::RAM_MAX), (0x7fff, 4_194_304));
        assert_eq!(
            of_kind(
                &System {
                    ram: layout::GIB,
                    ..SYSTEM
                },
                19
            )
            .len(),
            1
        );
        let high = of_kind(&SYSTEM, 19).remove(1).0;
        assert_eq!(
            u64::from_le_bytes(*high[0xf..].first_chunk().unwrap()),
            4 * layout::GIB
        );
        assert_eq!(
            u64::from_le_bytes(*high[0x17..].first_chunk().unwrap()),
            6 * layout::GIB - 1
        );
    }

    #[test]
    fn the_largest_machine_is_told_without_an_overflow_and_fits() {
        let ram = layout::RAM_MAX;
        for (sockets, cores_per_socket) in [(8, 31), (2, 127), (1, 253)] {
            let system = System {
                sockets,
                cores_per_socket,
                ram,
                ..SYSTEM
            };
            assert!(build(&system).len() as u64 <= layout::SMBIOS.end - layout::SMBIOS.start);
            let processors = of_kind(&system, 4);
            assert_eq!(processors.len() as u32, sockets);
            for (bytes, _) in processors {
                let count = cores_per_socket.to_le_bytes();
                // Core, enabled and thread count in a byte each, and in two (7.5, offsets 0x23 and 0x2a).
                assert_eq!(bytes[0x23..0x26], [count[0]; 3]);
                assert_eq!(bytes[0x2a..0x30], [count[0], count[1]].repeat(3));
            }
            let (array, _) = of_kind(&system, 16).remove(0);
            assert_eq!(array[0x7..0xb], [0, 0, 0, 0x80], "see the extended capacity");
            assert_eq!(u64::from_le_bytes(*array[0xf..].first_chunk().unwrap()), ram);
            let high = of_kind(&system, 19).remove(1).0;
            assert_eq!(high[4..12], [0xff; 8], "see the extended addresses");
            let end = u64::from_le_bytes(*high[0x17..].first_chunk().unwrap());
            assert_eq!(end, layout::GIB + ram - 1);
        }
    }

    #[test]
    fn a_name_can_not_break_the_table() {
        let system = System { serial: "", ..SYSTEM };
        let empty = of_kind(&system, 1).remove(0).1;
        assert_eq!(empty.len(), 5);
        let hostile = System {
            serial: "a\0\0b",
            ..SYSTEM
        };
        assert_eq!(of_kind(&hostile, 1).remove(0).1[3], "ab");
    }
}
