use std::sync::atomic::Ordering;

use rfb::{Frame, Rect};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::display::server::Resizer as _;
use crate::{
    component::Component as _,
    display::{VideoMemory as _, boot::tests::Memory},
    virtio::testing::{Area, Buffer, Driver, Rig, suite::DeviceUnderTest},
};

const CONTROL: u16 = 0;
const CURSOR: u16 = 1;
/// Where the pictures of the driver are in its memory.
const PICTURES: u64 = 40 << 20;

const OK: u32 = 0x1100;
const OUT_OF_MEMORY: u32 = 0x1201;
const SCANOUT_ID: u32 = 0x1202;
const RESOURCE_ID: u32 = 0x1203;
const UNSPECIFIED: u32 = 0x1200;
const PARAMETER: u32 = 0x1205;

const B8G8R8X8: u32 = 2;
const B8G8R8A8: u32 = 1;

fn size(width: u32, height: u32) -> Size {
    Size::new(width, height).unwrap()
}

/// A request with these fields behind its header.
fn request(kind: u32, fields: &[u32]) -> Vec<u8> {
    let header = [kind, 0, 0, 0, 0, 0];
    header
        .iter()
        .chain(fields)
        .flat_map(|field| field.to_le_bytes())
        .collect()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().unwrap())
}

/// Sends a command; gives the response's type.
fn command(driver: &mut Driver, kind: u32, fields: &[u32]) -> u32 {
    let buffers = [Buffer::Readable(request(kind, fields)), Buffer::Writable(1128)];
    let (_, response) = driver.request(CONTROL, &buffers);
    word(&response, 0)
}

fn create(driver: &mut Driver, id: u32, format: u32, width: u32, height: u32) -> u32 {
    command(driver, 0x101, &[id, format, width, height])
}

fn attach(driver: &mut Driver, id: u32, address: u64, length: u32) -> u32 {
    let address = [address as u32, (address >> 32) as u32];
    command(driver, 0x106, &[id, 1, address[0], address[1], length, 0])
}

fn transfer(driver: &mut Driver, id: u32, rect: [u32; 4], offset: u64) -> u32 {
    let [x, y, width, height] = rect;
    command(
        driver,
        0x105,
        &[x, y, width, height, offset as u32, (offset >> 32) as u32, id, 0],
    )
}

fn set_scanout(driver: &mut Driver, id: u32, rect: [u32; 4]) -> u32 {
    let [x, y, width, height] = rect;
    command(driver, 0x103, &[x, y, width, height, 0, id])
}

fn flush(driver: &mut Driver, id: u32, rect: [u32; 4]) -> u32 {
    let [x, y, width, height] = rect;
    command(driver, 0x104, &[x, y, width, height, id, 0])
}

/// Writes a picture to the driver's memory.
fn paint(driver: &Driver, address: u64, pixels: impl Iterator<Item = u32>) {
    let bytes: Vec<u8> = pixels.flat_map(u32::to_le_bytes).collect();
    driver
        .rig
        .memory
        .write_slice(&bytes, GuestAddress(address))
        .unwrap();
}

struct GpuTest {
    framebuffer: Arc<Framebuffer>,
}

impl DeviceUnderTest for GpuTest {
    const FEATURES: u64 = 1 << F_EDID;
    const EAGER_QUEUES: &'static [u16] = &[CONTROL, CURSOR];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let framebuffer = Arc::new(Framebuffer::default());
        let memory = Memory::new(size(800, 600));
        let boot = BootScreen::new(Arc::clone(&framebuffer), size(800, 600), memory);
        let device = Gpu::new(Arc::clone(&framebuffer), size(800, 600)).with_boot_screen(Arc::new(boot));
        (Self { framebuffer }, Box::new(device))
    }

    fn probe(&mut self, driver: &mut Driver) {
        // It may be there from the last time.
        command(driver, 0x102, &[7, 0]);
        assert_eq!(create(driver, 7, B8G8R8X8, 40, 30), OK);
        assert_eq!(attach(driver, 7, PICTURES, 40 * 30 * 4), OK);
        paint(driver, PICTURES, 0xff00_0000..0xff00_0000 + 40 * 30);
        assert_eq!(transfer(driver, 7, [0, 0, 40, 30], 0), OK);
        assert_eq!(set_scanout(driver, 7, [0, 0, 40, 30]), OK);
        assert_eq!(flush(driver, 7, [0, 0, 40, 30]), OK);
        let frame = self.framebuffer.snapshot();
        assert_eq!(frame.size(), size(40, 30));
        assert!(frame.pixels().iter().copied().eq(0..40 * 30));
        let (_, response) = driver.request(CURSOR, &[Buffer::Readable(request(0x300, &[0; 8]))]);
        assert!(response.is_empty());
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (
            CONTROL,
            vec![Buffer::Readable(request(0x100, &[])), Buffer::Writable(408)],
        )
    }
}

crate::virtio_device_tests!(GpuTest);
crate::virtio_saved_device_tests!(GpuTest, "virtio-gpu");

fn running() -> (Arc<Framebuffer>, GpuControl, Driver) {
    let framebuffer = Arc::new(Framebuffer::default());
    let device = Gpu::new(Arc::clone(&framebuffer), size(800, 600));
    let control = device.control();
    let mut driver = Driver::new(Rig::new(Box::new(device)));
    driver.start(1 << F_EDID);
    (framebuffer, control, driver)
}

#[test]
fn only_what_was_transferred_and_flushed_is_seen_where_the_scan_out_says() {
    let (framebuffer, _, mut driver) = running();
    assert_eq!(create(&mut driver, 1, B8G8R8X8, 100, 80), OK);
    assert_eq!(attach(&mut driver, 1, PICTURES, 100 * 80 * 4), OK);
    // The screen shows the part of 50 × 40 from 20, 10 on.
    assert_eq!(set_scanout(&mut driver, 1, [20, 10, 50, 40]), OK);
    assert_eq!(framebuffer.size(), size(50, 40));
    paint(&driver, PICTURES, 1..=100 * 80);
    assert_eq!(transfer(&mut driver, 1, [30, 20, 10, 5], (20 * 100 + 30) * 4), OK);
    assert_eq!(framebuffer.snapshot(), Frame::black(size(50, 40)));
    assert_eq!(flush(&mut driver, 1, [0, 0, 100, 80]), OK);
    let frame = framebuffer.snapshot();
    for y in 0..40_u32 {
        for x in 0..50_u32 {
            let seen = frame.pixels()[(y * 50 + x) as usize];
            let transferred = (10..20).contains(&x) && (10..15).contains(&y);
            let expected = if transferred {
                (y + 10) * 100 + x + 20 + 1
            } else {
                0
            };
            assert_eq!(seen, expected, "{x}, {y}");
        }
    }
}

#[test]
fn pages_are_flipped_and_a_flush_of_one_that_is_not_seen_changes_nothing() {
    let (framebuffer, _, mut driver) = running();
    let all = [0, 0, 16, 16];
    for (id, place) in [(1, PICTURES), (2, PICTURES + 0x1000)] {
        assert_eq!(create(&mut driver, id, B8G8R8X8, 16, 16), OK);
        assert_eq!(attach(&mut driver, id, place, 1024), OK);
        paint(&driver, place, std::iter::repeat_n(id * 0x11, 256));
        assert_eq!(transfer(&mut driver, id, all, 0), OK);
    }
    let shown = |framebuffer: &Framebuffer| framebuffer.snapshot().pixels()[0];
    assert_eq!(set_scanout(&mut driver, 1, all), OK);
    assert_eq!(shown(&framebuffer), 0x11);
    assert_eq!(flush(&mut driver, 2, all), OK);
    assert_eq!(shown(&framebuffer), 0x11);
    assert_eq!(set_scanout(&mut driver, 2, all), OK);
    assert_eq!(shown(&framebuffer), 0x22);
    // Without a scan-out, and without the picture that is scanned out, the screen is black.
    assert_eq!(set_scanout(&mut driver, 0, [0; 4]), OK);
    assert_eq!(shown(&framebuffer), 0);
    assert_eq!(set_scanout(&mut driver, 1, all), OK);
    assert_eq!(command(&mut driver, 0x102, &[1, 0]), OK);
    assert_eq!(shown(&framebuffer), 0);
}

#[test]
fn a_guest_that_asks_for_too_much_is_refused_and_gets_room_back_when_it_gives_some() {
    let (_, _, mut driver) = running();
    let mut made = 0;
    while create(&mut driver, made + 1, B8G8R8X8, 2048, 2048) == OK {
        made += 1;
        assert!(made < 100);
    }
    assert_eq!(made, 8);
    assert_eq!(create(&mut driver, 100, B8G8R8X8, 2048, 2048), OUT_OF_MEMORY);
    assert_eq!(command(&mut driver, 0x102, &[3, 0]), OK);
    assert_eq!(create(&mut driver, 100, B8G8R8X8, 2048, 2048), OK);
    for id in 1..=8 {
        command(&mut driver, 0x102, &[id, 0]);
    }
    command(&mut driver, 0x102, &[100, 0]);
    for id in 1..=1024 {
        assert_eq!(create(&mut driver, id, B8G8R8X8, 1, 1), OK);
    }
    assert_eq!(create(&mut driver, 2000, B8G8R8X8, 1, 1), OUT_OF_MEMORY);
}

#[test]
fn pictures_without_memory_have_a_limit_that_a_driver_sees() {
    let (_, _, mut driver) = running();
    for id in 1..=3 {
        assert_eq!(create(&mut driver, id, B8G8R8X8, 2048, 2048), OK);
        assert_eq!(attach(&mut driver, id, PICTURES, 4), OK);
        assert_eq!(transfer(&mut driver, id, [0, 0, 1, 1], 0), OK);
    }
    assert_eq!(command(&mut driver, 0x107, &[1, 0]), OK);
    assert_eq!(command(&mut driver, 0x107, &[1, 0]), UNSPECIFIED);
    assert_eq!(command(&mut driver, 0x107, &[2, 0]), OK);
    // Each has 16 MiB.
    assert_eq!(command(&mut driver, 0x107, &[3, 0]), OUT_OF_MEMORY);
    assert_eq!(transfer(&mut driver, 3, [0, 0, 1, 1], 0), OK, "its memory stays");
    assert_eq!(command(&mut driver, 0x102, &[1, 0]), OK);
    assert_eq!(command(&mut driver, 0x107, &[3, 0]), OK);
}

#[test]
fn commands_that_make_no_sense_get_the_errors_of_the_specification() {
    let (_, _, mut driver) = running();
    let driver = &mut driver;
    assert_eq!(create(driver, 1, B8G8R8X8, 64, 64), OK);
    for (expected, kind, fields) in [
        (RESOURCE_ID, 0x101, &[0, 2, 4, 4][..]),
        (RESOURCE_ID, 0x101, &[1, 2, 4, 4]),
        (PARAMETER, 0x101, &[2, 5, 4, 4]),
        (PARAMETER, 0x101, &[2, 2, 0, 4]),
        (PARAMETER, 0x101, &[2, 2, 4, u32::MAX]),
        (PARAMETER, 0x101, &[2, 2, 8192, 8192]),
        (UNSPECIFIED, 0x101, &[2, 2]),
        (RESOURCE_ID, 0x102, &[9, 0]),
        (SCANOUT_ID, 0x103, &[0, 0, 64, 64, 1, 1]),
        (RESOURCE_ID, 0x103, &[0, 0, 64, 64, 0, 9]),
        (PARAMETER, 0x103, &[0, 0, 65, 64, 0, 1]),
        (PARAMETER, 0x103, &[u32::MAX, 0, 2, 2, 0, 1]),
        (PARAMETER, 0x103, &[0, 0, 0, 0, 0, 1]),
        (RESOURCE_ID, 0x104, &[0, 0, 4, 4, 9, 0]),
        (PARAMETER, 0x104, &[60, 60, 5, 4, 1, 0]),
        (PARAMETER, 0x105, &[0, 0, 4, 4, 0, 0, 1, 0]),
        (UNSPECIFIED, 0x106, &[1, 20000, 0, 0, 0, 0]),
        (UNSPECIFIED, 0x106, &[1, 2, 0, 0, 0, 0]),
        (RESOURCE_ID, 0x106, &[9, 0]),
        (UNSPECIFIED, 0x107, &[1, 0]),
        (UNSPECIFIED, 0x108, &[0, 0]),
        (SCANOUT_ID, 0x10a, &[1, 0]),
        (RESOURCE_ID, 0x300, &[0, 0, 0, 0, 9, 0, 0, 0]),
        (SCANOUT_ID, 0x300, &[3, 0, 0, 0, 1, 0, 0, 0]),
        (UNSPECIFIED, 0xffff_ffff, &[]),
    ] {
        assert_eq!(command(driver, kind, fields), expected, "{kind:#x} {fields:?}");
    }
    // Memory that ends too early, or is none.
    assert_eq!(attach(driver, 1, PICTURES, 64 * 64 * 4 - 1), OK);
    assert_eq!(attach(driver, 1, PICTURES, 64 * 64 * 4), UNSPECIFIED);
    assert_eq!(transfer(driver, 1, [0, 0, 64, 64], 0), PARAMETER);
    assert_eq!(transfer(driver, 1, [0, 0, 64, 63], u64::MAX), PARAMETER);
    assert_eq!(transfer(driver, 1, [0, 0, 64, 63], 0), OK);
    assert_eq!(command(driver, 0x107, &[1, 0]), OK);
    assert_eq!(attach(driver, 1, 0xfff0_0000_0000, 64 * 64 * 4), OK);
    assert_eq!(transfer(driver, 1, [0, 0, 64, 64], 0), PARAMETER);
}

#[test]
fn a_fence_comes_back_with_its_id() {
    let (_, _, mut driver) = running();
    let mut fenced = request(0x100, &[]);
    fenced[4] = 1;
    fenced[8..16].copy_from_slice(&0x1122_3344_5566_7788_u64.to_le_bytes());
    let (_, response) = driver.request(CONTROL, &[Buffer::Readable(fenced), Buffer::Writable(408)]);
    assert_eq!(response.len(), 408);
    assert_eq!((word(&response, 0), word(&response, 1)), (0x1101, 1));
    assert_eq!(
        (word(&response, 2), word(&response, 3)),
        (0x5566_7788, 0x1122_3344)
    );
}

#[test]
fn a_size_that_somebody_asks_for_reaches_the_driver() {
    let (_, control, mut driver) = running();
    let mode = |driver: &mut Driver| {
        let buffers = [Buffer::Readable(request(0x100, &[])), Buffer::Writable(408)];
        let (_, response) = driver.request(CONTROL, &buffers);
        (word(&response, 8), word(&response, 9), word(&response, 10))
    };
    assert_eq!(mode(&mut driver), (800, 600, 1));
    assert_eq!(driver.rig.read(Area::Device, 0, 4), 0);
    assert!(control.request_size(size(1920, 1080)));
    assert!(!control.request_size(size(8192, 16)), "no EDID can say that");
    assert_eq!(driver.rig.read(Area::Device, 0, 4), 1);
    assert!(
        driver
            .rig
            .msi
            .wait_until(|| driver.rig.read(Area::Isr, 0, 1) & 2 != 0)
    );
    driver.rig.write(Area::Device, 4, 4, 1);
    assert_eq!(driver.rig.read(Area::Device, 0, 4), 0);
    assert_eq!(mode(&mut driver), (1920, 1080, 1));
    let buffers = [Buffer::Readable(request(0x10a, &[0, 0])), Buffer::Writable(1056)];
    let (_, response) = driver.request(CONTROL, &buffers);
    assert_eq!(
        (response.len(), word(&response, 0), word(&response, 6)),
        (1056, 0x1104, 128)
    );
    assert_eq!(response[32..32 + 128], edid::block(size(1920, 1080)));
    // After the reset, no driver can follow the request.
    driver.rig.reset_device();
    assert!(!control.request_size(size(640, 480)));
}

#[test]
fn the_cursor_is_what_the_driver_says_it_is() {
    let (framebuffer, _, mut driver) = running();
    let mut reader = framebuffer.reader(Arc::new(EventFd::new(0).unwrap())).unwrap();
    let mut frame = Frame::black(size(1, 1));
    reader.read(&mut frame);
    assert_eq!(create(&mut driver, 5, B8G8R8A8, 64, 64), OK);
    assert_eq!(attach(&mut driver, 5, PICTURES, 64 * 64 * 4), OK);
    paint(&driver, PICTURES, 0..64 * 64);
    assert_eq!(transfer(&mut driver, 5, [0, 0, 64, 64], 0), OK);
    let update = request(0x300, &[0, 100, 100, 0, 5, 3, 99, 0]);
    driver.request(CURSOR, &[Buffer::Readable(update)]);
    let cursor = reader.read(&mut frame).cursor.unwrap();
    assert_eq!((cursor.width, cursor.height, cursor.hotspot), (64, 64, (3, 63)));
    assert!(cursor.pixels.iter().copied().eq(0..64 * 64));
    let hide = request(0x300, &[0, 100, 100, 0, 0, 0, 0, 0]);
    driver.request(CURSOR, &[Buffer::Readable(hide)]);
    assert_eq!(*reader.read(&mut frame).cursor.unwrap(), rfb::Cursor::default());
}

#[test]
fn a_restored_device_shows_the_picture_and_the_cursor() {
    let (framebuffer, _, mut driver) = running();
    for (id, side) in [(1, 50), (2, 32)] {
        assert_eq!(create(&mut driver, id, B8G8R8A8, side, side), OK);
        assert_eq!(attach(&mut driver, id, PICTURES, side * side * 4), OK);
        paint(&driver, PICTURES, id..id + side * side);
        assert_eq!(transfer(&mut driver, id, [0, 0, side, side], 0), OK);
    }
    // The picture's resource has no memory behind it any more. The cursor's resource still has
    // memory.
    assert_eq!(command(&mut driver, 0x107, &[1, 0]), OK);
    assert_eq!(set_scanout(&mut driver, 1, [5, 5, 40, 40]), OK);
    driver.request(
        CURSOR,
        &[Buffer::Readable(request(0x300, &[0, 0, 0, 0, 2, 1, 1, 0]))],
    );
    let before = framebuffer.snapshot();
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let framebuffer = Arc::new(Framebuffer::default());
    let device = Gpu::new(Arc::clone(&framebuffer), size(800, 600));
    driver.rig = driver.rig.restored(Box::new(device), &section).unwrap();
    assert_eq!(framebuffer.snapshot(), before);
    let mut reader = framebuffer.reader(Arc::new(EventFd::new(0).unwrap())).unwrap();
    let cursor = reader.read(&mut Frame::black(size(1, 1))).cursor.unwrap();
    assert!(cursor.pixels.iter().copied().eq(2..2 + 32 * 32));
    driver.rig.device.resume().unwrap();
    assert_eq!(flush(&mut driver, 1, [0, 0, 50, 50]), OK);
    assert_eq!(framebuffer.snapshot(), before);
    assert_eq!(
        driver.rig.device.counters().guest_faults.load(Ordering::Relaxed),
        0
    );
}

#[test]
fn a_reset_makes_the_screen_black_and_gives_its_first_size_back() {
    let (framebuffer, _, mut driver) = running();
    assert_eq!(create(&mut driver, 1, B8G8R8X8, 64, 64), OK);
    assert_eq!(set_scanout(&mut driver, 1, [0, 0, 64, 64]), OK);
    framebuffer.write(Rect::new(0, 0, 64, 64), |_, row| row.fill(5));
    driver.rig.reset_device();
    assert_eq!(framebuffer.snapshot(), Frame::black(size(800, 600)));
}

#[test]
fn a_guest_without_a_driver_has_a_screen_behind_a_bar_and_the_driver_takes_it_over() {
    let size = size(64, 48);
    let (memory, framebuffer) = (Memory::new(size), Arc::new(Framebuffer::new(size)));
    let boot = BootScreen::new(Arc::clone(&framebuffer), size, Arc::clone(&memory) as _);
    let boot = Arc::new(boot);
    let gpu = Gpu::new(Arc::clone(&framebuffer), size).with_boot_screen(Arc::clone(&boot));
    let mut driver = Driver::new(Rig::new(Box::new(gpu)));
    driver.start(1 << F_EDID);
    // PCI 3.0, appendix D: a VGA-compatible controller, which kernels take for the screen.
    let config = |at| {
        crate::pci::root::lock(&driver.rig.device.function())
            .config()
            .read_u32(at)
    };
    assert_eq!(config(8) >> 8, 0x03_0000);
    assert_eq!(config(0x18) & 0xf, 0b100, "BAR 2 has 64 bits");
    let first = |framebuffer: &Framebuffer| framebuffer.snapshot().pixels()[0];
    memory.write(0, &[3, 2, 1, 0]);
    boot.poll();
    assert_eq!(first(&framebuffer), 0x01_0203);

    assert_eq!(create(&mut driver, 7, B8G8R8X8, 64, 48), OK);
    assert_eq!(
        boot.poll(),
        Some(false),
        "a driver that shows nothing takes nothing"
    );
    assert_eq!(set_scanout(&mut driver, 7, [0, 0, 64, 48]), OK);
    memory.write(0, &[9; 4]);
    assert_eq!((boot.poll(), first(&framebuffer)), (None, 0));
    // The driver switches the screen off. The boot screen must not reappear.
    assert_eq!(set_scanout(&mut driver, 0, [0; 4]), OK);
    assert_eq!(boot.poll(), None);

    driver.rig.reset_device();
    assert_eq!(boot.poll(), Some(true));
    assert_eq!(first(&framebuffer), 0x09_0909);
}

#[test]
fn a_restored_adapter_shows_what_was_drawn_without_a_driver_and_refuses_more_than_it_has_room_for() {
    let size = size(64, 48);
    let build = || {
        let (memory, framebuffer) = (Memory::new(size), Arc::new(Framebuffer::new(size)));
        let boot = BootScreen::new(Arc::clone(&framebuffer), size, Arc::clone(&memory) as _);
        let boot = Arc::new(boot);
        let gpu = Gpu::new(Arc::clone(&framebuffer), size).with_boot_screen(Arc::clone(&boot));
        (memory, framebuffer, boot, gpu)
    };
    let (memory, _, _, gpu) = build();
    memory.write(4 * 65, &[3, 2, 1, 0]);
    let section = gpu.save().unwrap();
    let (_, framebuffer, boot, mut gpu) = build();
    gpu.restore(&section).unwrap();
    boot.poll();
    assert_eq!(framebuffer.snapshot().pixels()[65], 0x01_0203);

    let saved = |boot_pixels| message::VirtioGpu {
        preferred_width: 64,
        preferred_height: 48,
        events: 0,
        boot_pixels,
    };
    let long = Section::new("gpu", &saved(vec![1; 64 * 48 * 4 + 1]));
    assert!(
        gpu.restore(&long)
            .unwrap_err()
            .to_string()
            .contains("boot_pixels")
    );
    let (_, _, _, gpu) = build();
    let mut without = Gpu { boot: None, ..gpu };
    let some = Section::new("gpu", &saved(vec![1; 4]));
    assert!(without.restore(&some).is_err());
}
