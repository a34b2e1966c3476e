//! The ELF kernel inside a bzImage (Linux: Documentation/arch/x86/boot.rst, `payload_offset` and `payload_length`).

use std::fs::{self, File};
use std::io::Cursor;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::run;
use crate::wait::Deadline;

/// Offset of the number of setup sectors in a bzImage.
const SETUP_SECTS: usize = 0x1f1;
/// Offset of the magic `HdrS`.
const HEADER_MAGIC: usize = 0x202;
/// Offset of the payload's place after the setup code.
const PAYLOAD_OFFSET: usize = 0x248;
/// Offset of the payload's length.
const PAYLOAD_LENGTH: usize = 0x24c;
/// Note type of a kernel's 32-bit PVH entry point, under the name `Xen`.
const XEN_ELFNOTE_PHYS32_ENTRY: u8 = 18;

/// Writes the ELF kernel of the bzImage `vmlinuz` to `vmlinux`. Fails when it has no PVH entry.
pub fn extract(vmlinuz: &Path, vmlinux: &Path) -> Result<()> {
    let image = fs::read(vmlinuz).with_context(|| format!("read {}", vmlinuz.display()))?;
    let payload = payload(&image).with_context(|| format!("find the kernel in {}", vmlinuz.display()))?;
    let program = match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "xz",
        [0x02, 0x21, 0x4c, 0x18, ..] => "lz4",
        [0x1f, 0x8b, ..] => "gzip",
        _ => bail!(
            "{} is compressed in a way that is not known here",
            vmlinuz.display()
        ),
    };
    // Decompressed to a file of its own: the tools write to a file much faster than through our pipes.
    let out = File::create(vmlinux)?;
    let script = format!("{program} -dcq > '{}'", vmlinux.display());
    let output = run::output_with_input(
        Command::new("sh").args(["-c", &script]),
        Some(Box::new(Cursor::new(payload.to_vec()))),
        Deadline::seconds(120),
    )?;
    drop(out);
    ensure!(output.success(), "{program}: {}", output.stderr.trim());
    let kernel = fs::read(vmlinux)?;
    ensure!(
        kernel.starts_with(b"\x7fELF"),
        "the payload of {} is no ELF file",
        vmlinuz.display()
    );
    ensure!(
        has_pvh_note(&kernel),
        "the kernel in {} has no PVH entry point",
        vmlinuz.display()
    );
    Ok(())
}

/// The compressed kernel without the four bytes of its uncompressed size that the build appends.
fn payload(image: &[u8]) -> Result<&[u8]> {
    ensure!(
        image.get(HEADER_MAGIC..HEADER_MAGIC + 4) == Some(b"HdrS"),
        "no bzImage"
    );
    let word = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("the header is cut off")?;
        Ok(usize::try_from(u32::from_le_bytes(bytes.try_into()?))?)
    };
    let setup = usize::from(*image.get(SETUP_SECTS).context("the header is cut off")?);
    let start = (if setup == 0 { 4 } else { setup } + 1) * 512 + word(PAYLOAD_OFFSET)?;
    let end = (start + word(PAYLOAD_LENGTH)?)
        .checked_sub(4)
        .context("an empty payload")?;
    image.get(start..end).context("the payload is cut off")
}

/// Whether the kernel has the note with its PVH entry: sizes of name and address, type, name (ELF: `Elf64_Nhdr`).
fn has_pvh_note(kernel: &[u8]) -> bool {
    let note = |address_size: u8| {
        let mut note = [0u8; 16];
        (note[0], note[4], note[8]) = (4, address_size, XEN_ELFNOTE_PHYS32_ENTRY);
        note[12..15].copy_from_slice(b"Xen");
        note
    };
    let (short, long) = (note(4), note(8));
    kernel
        .windows(16)
        .step_by(4)
        .any(|window| window == short || window == long)
}
