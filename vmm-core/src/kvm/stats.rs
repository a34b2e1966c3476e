//! KVM's own statistics: exits by kind per vCPU, page faults per VM (`KVM_GET_STATS_FD`).

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::FileExt,
    },
    sync::OnceLock,
};

use kvm_bindings::{
    KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_INSTANT, KVM_STATS_TYPE_MASK, KVM_STATS_TYPE_PEAK, KVMIO,
};
use vmm_sys_util::{ioctl::ioctl, ioctl_io_nr};

ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);

/// One figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The kernel's name: "exits", "io_exits", "pages_2m".
    pub name: String,
    /// Since the VM's start, or now, by kind of figure.
    pub value: u64,
    /// It counts from the VM's start on.
    pub cumulative: bool,
}

/// Reads statistics from any thread, without disturbing the guest. The first read queries the names
/// of the statistics.
#[derive(Debug)]
pub struct StatsReader {
    file: File,
    fields: OnceLock<Vec<Field>>,
}

#[derive(Debug, PartialEq, Eq)]
struct Field {
    name: String,
    /// In the file.
    offset: u64,
    cumulative: bool,
}

/// The kernel names statistics with at most 47 characters and has about 60 of them; what claims more is not a
/// statistics file.
const NAME_MAX: usize = 256;
const FIELDS_MAX: usize = 4096;
const HEADER: usize = 24;
const DESCRIPTOR: usize = 16;

impl StatsReader {
    /// Opens the statistics of a VM or vCPU; `None` on kernels older than 5.14.
    pub(super) fn open(fd: &impl AsRawFd) -> Option<Self> {
        // SAFETY: the ioctl takes no argument.
        let file = unsafe { ioctl(fd, KVM_GET_STATS_FD()) };
        if file < 0 {
            return None;
        }
        // SAFETY: a new fd without another owner.
        let file = unsafe { File::from_raw_fd(file) };
        Some(Self {
            file,
            fields: OnceLock::new(),
        })
    }

    /// All single figures (histograms are left out).
    pub fn read(&self) -> io::Result<Vec<Stat>> {
        let fields = match self.fields.get() {
            Some(fields) => fields,
            None => {
                let fields = describe(&self.file)?;
                self.fields.get_or_init(|| fields)
            }
        };
        let Some(end) = fields.iter().map(|field| field.offset.saturating_add(8)).max() else {
            return Ok(Vec::new());
        };
        let start = fields.iter().map(|field| field.offset).min().unwrap_or(0);
        let mut data = vec![0; usize::try_from(end.saturating_sub(start)).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut data, start)?;
        let value = |field: &Field| {
            let at = usize::try_from(field.offset.checked_sub(start)?).ok()?;
            Some(Stat {
                name: field.name.clone(),
                value: u64::from_ne_bytes(*data.get(at..)?.first_chunk()?),
                cumulative: field.cumulative,
            })
        };
        Ok(fields.iter().filter_map(value).collect())
    }
}

/// Reads header and descriptors (`struct kvm_stats_header`, `struct kvm_stats_desc`).
fn describe(file: &impl FileExt) -> io::Result<Vec<Field>> {
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "malformed KVM statistics");
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)?;
    let word = |index: usize| field_u32(&header, index.saturating_mul(4)).ok_or_else(malformed);
    let size = |value: u32| usize::try_from(value).map_err(|_| malformed());
    let (name_size, count) = (size(word(1)?)?, size(word(2)?)?);
    let (descriptors, data) = (word(4)?, word(5)?);
    if name_size > NAME_MAX || count > FIELDS_MAX {
        return Err(malformed());
    }
    let stride = DESCRIPTOR.saturating_add(name_size);
    let mut bytes = vec![0; stride.saturating_mul(count)];
    file.read_exact_at(&mut bytes, descriptors.into())?;
    let mut fields = Vec::with_capacity(count);
    for descriptor in bytes.chunks_exact(stride) {
        let flags = field_u32(descriptor, 0).ok_or_else(malformed)?;
        let values = field_u32(descriptor, 4).ok_or_else(malformed)? >> 16;
        let offset = field_u32(descriptor, 8).ok_or_else(malformed)?;
        let single = matches!(
            flags & KVM_STATS_TYPE_MASK,
            KVM_STATS_TYPE_CUMULATIVE | KVM_STATS_TYPE_INSTANT | KVM_STATS_TYPE_PEAK
        );
        if !single || values != 1 {
            continue;
        }
        let name = descriptor.get(DESCRIPTOR..).unwrap_or_default();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        fields.push(Field {
            name: String::from_utf8_lossy(name).into_owned(),
            offset: u64::from(data).saturating_add(offset.into()),
            cumulative: flags & KVM_STATS_TYPE_MASK == KVM_STATS_TYPE_CUMULATIVE,
        });
    }
    Ok(fields)
}

fn field_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}
