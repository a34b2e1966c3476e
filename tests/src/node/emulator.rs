//! A copy of QEMU's module for TCG, without an assertion that fails when firmware runs in a guest of the node.
//!
//! A guest's write to CR8 may raise a virtual interrupt. QEMU then calls `tcg_handle_interrupt`
//! without its global lock, and this function asserts that the caller has the lock (`helper_write_crN`
//! of target/i386, seen in 7.2 and 10.0). OVMF writes CR8 at the end of each interrupt.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Debian's module.
const MODULE: &str = "/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so";

/// The assertion: `test al, al; jne +0x24; lea r8, [rip + …]`.
const ASSERTION: [u8; 7] = [0x84, 0xc0, 0x75, 0x24, 0x4c, 0x8d, 0x05];
/// Offset of the conditional jump in it.
const JUMP: usize = 2;
/// `jmp` with a displacement of 8 bits.
const ALWAYS: u8 = 0xeb;

/// Makes the copy in the node's folder, and returns the folder for QEMU's variable `QEMU_MODULE_DIR`.
/// Returns none when the module is absent, or has another form.
pub fn modules(dir: &Path) -> Result<Option<PathBuf>> {
    let Ok(original) = fs::read(MODULE) else {
        return Ok(None);
    };
    let Some(changed) = without_assertion(original) else {
        return Ok(None);
    };
    let folder = dir.join("modules");
    fs::create_dir_all(&folder)?;
    let name = Path::new(MODULE).file_name().context("a file name")?;
    fs::write(folder.join(name), changed).context("write a copy of QEMU's module")?;
    Ok(Some(folder))
}

/// The module's bytes with an unconditional jump over the assertion, if they have it exactly once.
fn without_assertion(mut module: Vec<u8>) -> Option<Vec<u8>> {
    let mut places = module
        .windows(ASSERTION.len())
        .enumerate()
        .filter(|(_, bytes)| *bytes == ASSERTION)
        .map(|(place, _)| place);
    let place = places.next()?;
    if places.next().is_some() {
        return None;
    }
    *module.get_mut(place.checked_add(JUMP)?)? = ALWAYS;
    Some(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_assertion_is_removed() {
        let with = |count: usize| [vec![7; 10], ASSERTION.repeat(count), vec![7]].concat();
        let changed = without_assertion(with(1)).expect("one assertion");
        assert_eq!(changed[10..17], [0x84, 0xc0, 0xeb, 0x24, 0x4c, 0x8d, 0x05]);
        assert_eq!(without_assertion(with(0)), None);
        assert_eq!(without_assertion(with(2)), None);
    }
}
