//! Non-maskable interrupts by request.

use super::*;

/// Sets up a handler for vector 2 that counts at 0x202000, writes `lint1` to that register of the local APIC, and signals the test
/// again and again with interrupts off. The handler signals port 0x82.
fn guest(lint1: u32) -> Vec<u8> {
    let handler = u32::try_from(CODE + 0x80).unwrap();
    let mut guest = code(&[
        // The gate at 0x200000 + 8 * 2.
        &[0xc7, 0x05, 0x10, 0x00, 0x20, 0x00],
        &(0x0010_0000 | handler & 0xffff).to_le_bytes(),
        &[0xc7, 0x05, 0x14, 0x00, 0x20, 0x00],
        &(handler & 0xffff_0000 | 0x8e00).to_le_bytes(),
        &[0xc7, 0x05, 0x00, 0x10, 0x20, 0x00, 0xff, 0x07, 0x00, 0x00],
        &[0xc7, 0x05, 0x02, 0x10, 0x20, 0x00, 0x00, 0x00, 0x20, 0x00],
        &[0x0f, 0x01, 0x1d, 0x00, 0x10, 0x20, 0x00], // lidt [0x201000]
        &[0xbc, 0x00, 0x00, 0x30, 0x00],             // mov esp, 0x300000
        &[0xc7, 0x05, 0xf0, 0x00, 0xe0, 0xfe, 0xff, 0x01, 0x00, 0x00], // APIC on
        &[0xc7, 0x05, 0x60, 0x03, 0xe0, 0xfe],
        &lint1.to_le_bytes(),
        &[0xe6, 0x81], // again: out 0x81, al
        &[0xeb, 0xfc], // jmp again
    ]);
    assert!(guest.len() <= 0x80);
    guest.resize(0x80, 0x90);
    guest.extend(code(&[
        &[0xff, 0x05, 0x00, 0x20, 0x20, 0x00], // inc dword [0x202000]
        &[0xe6, 0x82],                         // out 0x82, al
        &SPIN,
    ]));
    guest
}

#[test]
fn nmi_reaches_a_vcpu_with_interrupts_off() {
    let mut rig = rig(1, &guest(0x400));
    let ready = rig.probe(&rig.spaces.pio, 0x81, 1, Effect::None);
    let handled = rig.probe(&rig.spaces.pio, 0x82, 1, Effect::None);
    rig.vcpus.run().unwrap();
    ready.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(rig.vcpus.inject_nmi(), Err(VcpuError::Running)));
    rig.vcpus.stop().unwrap();
    rig.vcpus.inject_nmi().unwrap();
    rig.vcpus.release().unwrap();
    handled.recv_timeout(PATIENCE).unwrap();
    rig.vcpus.stop().unwrap();
    assert_eq!(rig.word(0x20_2000), 1);
}

#[test]
fn vcpu_with_a_masked_input_gets_no_nmi() {
    for lint1 in [0x1_0400, 0x700] {
        let mut rig = rig(2, &guest(lint1));
        let ready = rig.probe(&rig.spaces.pio, 0x81, 1, Effect::None);
        rig.vcpus.run().unwrap();
        ready.recv_timeout(PATIENCE).unwrap();
        rig.vcpus.stop().unwrap();
        // The second one waits for its INIT.
        rig.vcpus.inject_nmi().unwrap();
        while ready.try_recv().is_ok() {}
        rig.vcpus.release().unwrap();
        for _ in 0..3 {
            ready.recv_timeout(PATIENCE).unwrap();
        }
        rig.vcpus.stop().unwrap();
        assert_eq!(rig.word(0x20_2000), 0, "{lint1:#x}");
    }
}
