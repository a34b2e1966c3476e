//! Creation of qcow2 images, and changes of images that are not in use.

use std::{fs::File, io, sync::Arc};

use imago::{
    DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder, Mapping,
    format::PreallocateMode, qcow2::Qcow2,
};

use super::{header::MAX_SIZE, layer::Layer, medium::Medium};
use crate::SECTOR;

/// How much of a new image's space is taken at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preallocation {
    /// Only the space that the format requires.
    Off,
    /// All tables; data takes no space on the host yet.
    Metadata,
    /// All of it.
    Full,
}

/// Properties of a new image.
#[derive(Debug, Clone, Copy)]
pub struct CreateOptions {
    /// Size of the disk in bytes, a multiple of [`SECTOR`].
    pub size: u64,
    /// In bytes; a power of two from 512 to 2 MiB.
    pub cluster_size: u32,
    /// Not for overlays.
    pub preallocation: Preallocation,
    /// It lies above another image, of this format.
    pub backing: Option<&'static str>,
}

/// The size of clusters that suits most: QEMU's default.
pub const CLUSTER_SIZE: u32 = 64 << 10;

/// Name of the backing file in an overlay's header. vmmd knows the backing file, and no program may
/// open it by this name.
const BACKING_NAME: &str = "given by vmmd";

/// Makes `file`, which is empty, an image; on return it is on stable storage.
pub fn create(file: File, options: CreateOptions) -> io::Result<()> {
    let invalid = |reason: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, reason.to_owned()));
    if options.size == 0 || !options.size.is_multiple_of(SECTOR) {
        return invalid("the size of a disk is a multiple of 512 bytes, and not 0");
    }
    if options.size > MAX_SIZE {
        return invalid("a qcow2 disk has at most 64 TiB");
    }
    if options.backing.is_some() && options.preallocation != Preallocation::Off {
        return invalid("an overlay can't be preallocated");
    }
    if file.metadata()?.len() != 0 {
        return invalid("the file is not empty");
    }
    let file = Arc::new(file);
    let medium = Arc::clone(&file) as Arc<dyn Medium>;
    create_on(&medium, options, |length| file.set_len(length))?;
    file.sync_all()
}

/// Makes an empty `medium` an image; `extend` is to make it longer.
pub(super) fn create_on(
    medium: &Arc<dyn Medium>,
    options: CreateOptions,
    extend: impl FnOnce(u64) -> io::Result<()>,
) -> io::Result<()> {
    let mode = match options.preallocation {
        Preallocation::Off => PreallocateMode::None,
        Preallocation::Metadata => PreallocateMode::FormatAllocate,
        Preallocation::Full => PreallocateMode::FullAllocate,
    };
    let mut builder = Qcow2::<Layer>::create_builder(Layer::direct(Arc::clone(medium)))
        .size(options.size)
        .preallocate(mode)
        .cluster_size(usize::try_from(options.cluster_size).unwrap_or(0));
    if let Some(format) = options.backing {
        builder = builder.backing(BACKING_NAME.to_owned(), format.to_owned());
    }
    let image = builder.create_open(DenyImplicitOpenGate::default(), |image| {
        Ok(Qcow2::<Layer>::builder(image).backing(None).write(true))
    })?;
    let image = FormatAccess::new(image);
    image.flush()?;
    if options.preallocation == Preallocation::Metadata {
        // The clusters of data are holes, in the file or behind its end, where they must not stay.
        let end = end_of_data(&image, options.size)?;
        if end > medium.size()? {
            extend(end)?;
        }
    }
    Ok(())
}

fn end_of_data(image: &FormatAccess<Layer>, size: u64) -> io::Result<u64> {
    let (mut offset, mut end) = (0, 0_u64);
    while offset < size {
        let (mapping, length) = image.get_mapping(offset, size.saturating_sub(offset))?;
        if let Mapping::Raw { offset: at, .. } = mapping {
            end = end.max(at.saturating_add(length));
        }
        if length == 0 {
            break;
        }
        offset = offset.saturating_add(length);
    }
    Ok(end)
}
