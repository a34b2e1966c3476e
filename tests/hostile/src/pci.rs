//! PCI functions through sysfs: config space, BARs, and the parts of a modern virtio device (virtio 1.3, 4.1.4).

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::PathBuf,
};

use crate::sys::Mapping;

/// Where something of a virtio device is: in which BAR, at which offset, how long.
#[derive(Clone, Copy, Debug, Default)]
pub struct Area {
    pub bar: usize,
    pub offset: usize,
    pub length: usize,
}

/// One PCI function.
pub struct Function {
    pub name: String,
    path: PathBuf,
    config: File,
}

/// The function's virtio structures.
#[derive(Clone, Copy, Debug, Default)]
pub struct Virtio {
    /// virtio device type: 1 net, 2 block, 4 entropy.
    pub kind: u16,
    pub common: Area,
    pub notify: Area,
    pub notify_multiplier: usize,
}

/// Configuration space of all functions, as the MCFG table says where it is (PCI Firmware 3.2, 4.1.2).
///
/// sysfs has 256 bytes only of a function without a PCI Express capability. The guest's kernel must have been started with
/// `iomem=relaxed`.
pub struct Ecam {
    memory: File,
    base: u64,
    buses: usize,
}

/// Bytes of a function's configuration space.
const SPACE: usize = 4096;

impl Ecam {
    /// Finds it.
    pub fn open() -> io::Result<Self> {
        let table = fs::read("/sys/firmware/acpi/tables/MCFG")?;
        let entry = table
            .get(44..)
            .and_then(|entries| entries.first_chunk::<16>())
            .ok_or_else(|| io::Error::other("an MCFG table without an entry"))?;
        let (base, buses) = entry.split_at(8);
        let base = base.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let (first, last) = match buses {
            [_, _, first, last, ..] => (usize::from(*first), usize::from(*last)),
            _ => (0, 0),
        };
        let memory = OpenOptions::new().read(true).write(true).open("/dev/mem")?;
        Ok(Self {
            memory,
            base,
            buses: last + 1 - first,
        })
    }

    /// How many functions there can be.
    pub fn functions(&self) -> usize {
        self.buses * 256
    }

    /// The space of the function with that number: bus, device and function in one.
    pub fn function(&self, number: usize) -> io::Result<Mapping> {
        Mapping::of_place(&self.memory, self.base + number as u64 * SPACE as u64, SPACE)
    }
}

/// All functions of the machine, without host bridges where `virtio_only`.
pub fn functions(virtio_only: bool) -> io::Result<Vec<Function>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/bus/pci/devices")? {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let config = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path.join("config"))?;
        let function = Function { name, path, config };
        if !virtio_only || function.read(0, 2)? == 0x1af4 {
            found.push(function);
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

impl Function {
    /// Its bus, device and function number in one, from a name such as `0000:00:1f.2`.
    pub fn number(&self) -> io::Result<usize> {
        let hex = |text: Option<&str>| usize::from_str_radix(text.unwrap_or_default(), 16).ok();
        let mut parts = self.name.split([':', '.']).skip(1);
        let parts = [(); 3].map(|()| hex(parts.next()));
        match parts {
            [Some(bus), Some(device), Some(function)] => Ok(bus << 8 | device << 3 | function),
            _ => Err(io::Error::other(format!("{} is no function's name", self.name))),
        }
    }

    /// Reads 1 to 4 bytes of config space.
    pub fn read(&self, offset: u64, width: usize) -> io::Result<u32> {
        let mut bytes = [0; 4];
        let wanted = bytes.get_mut(..width).ok_or(io::ErrorKind::InvalidInput)?;
        self.config.read_exact_at(wanted, offset)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Writes 1 to 4 bytes of config space.
    pub fn write(&self, offset: u64, width: usize, value: u32) -> io::Result<()> {
        let bytes = value.to_le_bytes();
        self.config
            .write_all_at(bytes.get(..width).ok_or(io::ErrorKind::InvalidInput)?, offset)
    }

    /// The first 256 bytes of config space, for [`restore`](Self::restore).
    pub fn save(&self) -> io::Result<[u8; 256]> {
        let mut saved = [0; 256];
        self.config.read_exact_at(&mut saved, 0)?;
        Ok(saved)
    }

    /// Puts config space back: BARs and lines first, then the command register, then capabilities' controls.
    pub fn restore(&self, saved: &[u8; 256]) -> io::Result<()> {
        let offsets = (0x0c..0x40).step_by(4).chain([4]);
        self.put_back(saved, offsets.chain((0x40..0x100).step_by(4)))
    }

    /// Puts the BARs and the command register back, with an eighth of the exits: the function is where it was.
    pub fn restore_bars(&self, saved: &[u8; 256]) -> io::Result<()> {
        self.put_back(saved, (0x10..0x28).step_by(4).chain([0x30, 4]))
    }

    fn put_back(&self, saved: &[u8; 256], offsets: impl Iterator<Item = usize>) -> io::Result<()> {
        for offset in offsets {
            let Some(dword) = saved.get(offset..offset + 4) else {
                continue;
            };
            self.config.write_all_at(dword, offset as u64)?;
        }
        Ok(())
    }

    /// Turns memory decoding and bus mastering on (PCI 3.0, 6.2.2).
    pub fn enable(&self) -> io::Result<()> {
        self.write(4, 2, self.read(4, 2)? | 0x6)
    }

    /// The memory BARs that sysfs knows, with their numbers.
    pub fn bars(&self) -> io::Result<Vec<(usize, Mapping)>> {
        let mut bars = Vec::new();
        for index in 0..6 {
            let path = self.path.join(format!("resource{index}"));
            let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else {
                continue;
            };
            let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
            if length > 0 {
                bars.push((index, Mapping::of_file(&file, length)?));
            }
        }
        Ok(bars)
    }

    /// Reads the vendor-specific capabilities that say where the virtio structures are (virtio 1.3, 4.1.4).
    pub fn virtio(&self) -> io::Result<Virtio> {
        let mut virtio = Virtio {
            kind: u16::try_from(self.read(2, 2)?).unwrap_or(0).wrapping_sub(0x1040),
            ..Virtio::default()
        };
        let mut at = u64::from(self.read(0x34, 1)?);
        for _ in 0..48 {
            if at == 0 {
                break;
            }
            if self.read(at, 1)? == 0x09 {
                let area = Area {
                    bar: self.read(at + 4, 1)? as usize,
                    offset: self.read(at + 8, 4)? as usize,
                    length: self.read(at + 12, 4)? as usize,
                };
                match self.read(at + 3, 1)? {
                    1 => virtio.common = area,
                    2 => {
                        virtio.notify = area;
                        virtio.notify_multiplier = self.read(at + 16, 4)? as usize;
                    }
                    _ => {}
                }
            }
            at = u64::from(self.read(at + 1, 1)?);
        }
        if virtio.common.length == 0 || virtio.notify.length == 0 {
            return Err(io::Error::other("no virtio capabilities"));
        }
        Ok(virtio)
    }
}
