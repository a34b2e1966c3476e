//! Copies a raw file without its holes: as a reflink where the file system can, else extent by extent. Blocking.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, FileTypeExt},
};

use rustix::{
    fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek},
    io::Errno,
};

use vmmd_objects::operation::Control;

/// Copied between two looks at whether it is still wanted, in bytes.
const STEP: u64 = 8 << 20;
/// Unit in which zeroes are left out where the source has no holes, in bytes.
const BLOCK: usize = 64 << 10;

/// Copies the first `size` bytes of `from` into the empty file `to`, which has that length then. `reflink` allows the
/// two to share their blocks until one of them is written to.
pub fn copy(from: &File, to: &File, size: u64, reflink: bool, control: &Control) -> io::Result<()> {
    if reflink && ioctl_ficlone(to, from).is_ok() {
        return to.set_len(size);
    }
    to.set_len(size)?;
    let sparse = !from.metadata()?.file_type().is_block_device();
    let mut position = 0;
    while position < size {
        let (start, end) = if sparse {
            match extent(from, position, size)? {
                Some(extent) => extent,
                None => return Ok(()),
            }
        } else {
            (position, size)
        };
        copy_extent(from, to, (start, end), size, control)?;
        position = end;
    }
    Ok(())
}

/// The next data at or after `position`; `None` when only holes follow.
pub fn extent(file: &File, position: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match seek(file, SeekFrom::Data(position)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // A file system without holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((position, size))),
        Err(errno) => return Err(errno.into()),
    };
    if start >= size {
        return Ok(None);
    }
    let end = seek(file, SeekFrom::Hole(start))?.min(size);
    Ok(Some((start, end.max(start.saturating_add(1)))))
}

fn copy_extent(
    from: &File,
    to: &File,
    (start, end): (u64, u64),
    size: u64,
    control: &Control,
) -> io::Result<()> {
    let mut position = start;
    let mut in_kernel = true;
    let mut buffer = Vec::new();
    while position < end {
        control.wanted()?;
        control.progress(position, size);
        let wanted = STEP.min(end - position);
        let copied = if in_kernel {
            let (mut source, mut target) = (position, position);
            let length = usize::try_from(wanted).unwrap_or(BLOCK);
            match copy_file_range(from, Some(&mut source), to, Some(&mut target), length) {
                Ok(copied) => copied as u64,
                Err(Errno::INTR) => continue,
                // Block devices, and pairs of file systems that the kernel can't copy between.
                Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::BADF) => {
                    in_kernel = false;
                    continue;
                }
                Err(errno) => return Err(errno.into()),
            }
        } else {
            buffer.resize(BLOCK, 0);
            copy_block(from, to, position, wanted, &mut buffer)?
        };
        if copied == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file has become shorter while it was copied",
            ));
        }
        position += copied;
    }
    Ok(())
}

fn copy_block(from: &File, to: &File, position: u64, wanted: u64, buffer: &mut [u8]) -> io::Result<u64> {
    let length = usize::try_from(wanted).unwrap_or(BLOCK).min(buffer.len());
    let buffer = buffer.get_mut(..length).unwrap_or_default();
    let count = from.read_at(buffer, position)?;
    let read = buffer.get(..count).unwrap_or_default();
    if read.iter().any(|byte| *byte != 0) {
        to.write_all_at(read, position)?;
    }
    Ok(count as u64)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn file() -> File {
        tempfile::tempfile().unwrap()
    }

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn data_and_holes_arrive_as_they_were() {
        for reflink in [false, true] {
            let (from, to) = (file(), file());
            from.set_len(64 << 20).unwrap();
            from.write_all_at(&[7; 5000], 1 << 20).unwrap();
            from.write_all_at(&[9; 4096], (64 << 20) - 4096).unwrap();
            copy(&from, &to, 64 << 20, reflink, &Control::default()).unwrap();
            assert_eq!(content(&from), content(&to));
            assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20, "holes are kept");
        }
    }

    #[test]
    fn a_file_of_holes_only_and_one_that_is_all_data_are_copied() {
        for data in [false, true] {
            let (from, to) = (file(), file());
            from.set_len(1 << 20).unwrap();
            if data {
                from.write_all_at(&vec![3; 1 << 20], 0).unwrap();
            }
            copy(&from, &to, 1 << 20, false, &Control::default()).unwrap();
            assert_eq!(content(&from), content(&to));
        }
    }

    #[test]
    fn blocks_of_zeroes_are_left_out_where_the_kernel_does_not_copy() {
        let (from, to) = (file(), file());
        from.write_all_at(&vec![0; 1 << 20], 0).unwrap();
        from.write_all_at(&[1], 300_000).unwrap();
        to.set_len(1 << 20).unwrap();
        let mut position = 0;
        let mut buffer = vec![0; BLOCK];
        while position < 1 << 20 {
            position += copy_block(&from, &to, position, (1 << 20) - position, &mut buffer).unwrap();
        }
        assert_eq!(content(&from), content(&to));
        assert!(to.metadata().unwrap().blocks() * 512 <= BLOCK as u64);
    }

    #[test]
    fn a_copy_that_is_not_wanted_any_more_ends() {
        let (from, to) = (file(), file());
        from.write_all_at(&[1; 4096], 0).unwrap();
        let control = Control::default();
        control.cancel().cancel();
        let error = copy(&from, &to, 4096, false, &control).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn a_source_that_becomes_shorter_is_an_error() {
        let (from, to) = (file(), file());
        from.write_all_at(&[1; 4096], 0).unwrap();
        let result = copy_extent(&from, &to, (0, 8192), 8192, &Control::default());
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
