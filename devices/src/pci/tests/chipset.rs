//! Functions of the chipset Q35, as OVMF programs them.

use super::*;

const BASE: u64 = 0xb000_0000;

fn q35() -> Machine {
    Machine::over(PciRoot::with_chipset(windows(), Chipset::Q35))
}

#[test]
fn q35_bridges_have_their_ids_and_hold_their_registers() {
    let machine = q35();
    assert_eq!(machine.config(0, 0), 0x29c0_8086);
    assert_eq!(machine.config(0x1f, 0), 0x2918_8086);
    assert_eq!(machine.config(0x1f, 8) >> 16, 0x0601);
    for (register, written, read) in [
        (0x40, 0x600, 0x601),
        (0x44, u32::MAX, 0xff),
        (0x60, 0x0b0b_0a0a, 0x0b0b_0a0a),
        (0xf0, 0xfed1_c001, 0xfed1_c001),
    ] {
        assert_eq!(machine.set_config(0x1f, register, written), Effect::None);
        assert_eq!(machine.config(0x1f, register), read, "{register:#x}");
    }
    assert!(machine.root.is_taken(0x1f));
}

#[test]
fn q35_window_is_where_pciexbar_places_it() {
    let machine = q35();
    assert_eq!(machine.read(BASE, 4), 0xffff_ffff);
    assert_eq!(machine.set_config(0, 0x64, 0), Effect::None);
    assert_eq!(machine.set_config(0, 0x60, BASE as u32 | 1), Effect::Remap);
    assert_eq!(machine.read(BASE, 4), 0x29c0_8086);
    assert_eq!(machine.read(BASE + (0x1f << 15), 4), 0x2918_8086);
    assert_eq!(machine.read(BASE + (255 << 20), 4), 0xffff_ffff);
    assert_eq!(machine.set_config(0, 0x60, 0x9000_0001), Effect::Remap);
    assert_eq!(machine.read(BASE, 4), 0xffff_ffff);
    assert_eq!(machine.read(0x9000_0000, 4), 0x29c0_8086);
    machine.root.reset(&machine.mmio);
    assert_eq!(machine.read(0x9000_0000, 4), 0xffff_ffff);
}

#[test]
fn q35_window_never_covers_another_device() {
    let machine = q35();
    // The address is in the same 256 MiB, since PCIEXBAR has no lower bits.
    assert_eq!(machine.set_config(0, 0x60, FOREIGN as u32 | 1), Effect::Remap);
    assert_eq!(machine.read(FOREIGN, 1), 0xee);
}

#[test]
fn the_reset_control_register_resets_the_machine() {
    let machine = q35();
    assert_eq!(machine.pio.write(0xcf9, &[2]), Effect::None);
    assert_eq!(machine.pio.write(0xcf9, &[6]), Effect::Reset);
}

#[test]
fn q35_has_a_sata_controller_beside_the_lpc_bridge() {
    const BAR: u64 = 0x1000;
    let sata = |root: &Arc<PciRoot>| {
        let card = Card::shared(7, &[(5, BarKind::Memory32, BAR)]);
        root.add_sata(card.clone()).map(|()| card)
    };
    assert!(sata(&PciRoot::new(windows())).is_err());
    let machine = q35();
    // Function 2 of device 0x1f.
    let place = ECAM + (0x1f << 15) + (2 << 12);
    assert_eq!(machine.read(place, 4), 0xffff_ffff);
    assert_eq!(machine.config(0x1f, 0x0c) & 1 << 23, 0);
    let card = sata(&machine.root).unwrap();
    assert!(sata(&machine.root).is_err());
    assert_eq!(machine.read(place, 4), 0x0007_1234);
    let _none = machine.pio.write(FIRST_PORT, &0x8000_fa00_u32.to_le_bytes());
    let mut id = [0; 4];
    machine.pio.read(FIRST_PORT + 4, &mut id);
    assert_eq!(u32::from_le_bytes(id), 0x0007_1234);
    // The device has several functions, also after a reset.
    machine.root.reset(&machine.mmio);
    assert_eq!(machine.config(0x1f, 0x0c) & 1 << 23, 1 << 23);
    let effect = machine.mmio.write(place + 4, &[2, 0]);
    assert_eq!(effect, Effect::Remap);
    machine.root.remap(&machine.mmio);
    let address = lock(&card).bars[5].unwrap();
    assert!(LOW.contains(&address));
    assert_eq!(machine.read(address, 1), 7);
    assert!(!machine.root.remove(root::SATA_SLOT, &machine.mmio));
}
