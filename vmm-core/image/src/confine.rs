//! The restrictions of this process. The process keeps its descriptors and may make threads. A conversion also has limits of memory,
//! time and files.

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::apply_filter;
use tracing::warn;
use vmm_sandbox::{
    bpf::{self, no_clone3},
    entry,
    landlock::{self, Level},
    lists::{Arguments::OneOf, EVERY, Entry, IMAGES, SPARSE, THREADS},
    process::{forbid_backtraces, lock_down},
};

/// Address space in bytes: dictionaries of decompressors, tables of images, and the program.
const MEMORY: u64 = 2 << 30;
/// Processor time in seconds.
const PROCESSOR_TIME: u64 = 4 * 3600;
/// Open descriptors.
const DESCRIPTORS: u64 = 32;
/// A file may be longer than the disk that it holds, by so many bytes: tables of a qcow2 image.
const BESIDES: u64 = 1 << 30;

/// A call outside the list fails with EPERM.
const OTHERWISE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned();

/// Sets the limits of a conversion. `longest` is how many bytes the disk may have.
fn limit(longest: u64) -> Result<()> {
    for (resource, most) in [
        (Resource::As, MEMORY),
        (Resource::Cpu, PROCESSOR_TIME),
        (Resource::Nofile, DESCRIPTORS),
        (Resource::Fsize, longest.saturating_add(BESIDES)),
    ] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit).with_context(|| format!("limiting {resource:?}"))?;
    }
    Ok(())
}

/// The same as [`close_in`], with the limits of a conversion. `longest` is how many bytes the disk may have.
pub fn close_in_converter(longest: u64) -> Result<()> {
    limit(longest)?;
    close_in()
}

/// Gives up all paths, and all system calls that images do not need. To be called when the images are locked, before the first byte is
/// read and before the first thread is made.
pub fn close_in() -> Result<()> {
    forbid_backtraces();
    lock_down()?;
    if landlock::enforce()? == Level::None {
        warn!(
            "the host's kernel has no Landlock: the user id and seccomp alone keep files from this process"
        );
    }
    apply_filter(&no_clone3()?).context("limiting clone3")?;
    apply_filter(&bpf::program(&entries(), OTHERWISE)?).context("limiting system calls")?;
    #[cfg(debug_assertions)]
    vmm_sandbox::attempt::run("image", |_, _| ());
    Ok(())
}

/// Converts images, and makes them.
static CONVERSION: &[Entry] = &[
    entry!(
        SYS_lseek,
        OneOf(2, &[libc::SEEK_SET as u64, libc::SEEK_CUR as u64])
    ),
    entry!(SYS_fsync),
    // How much room the file system has.
    entry!(SYS_fstatfs),
];

/// The lists of this process, in each of its threads.
fn lists() -> [&'static [Entry]; 5] {
    [EVERY, IMAGES, SPARSE, THREADS, CONVERSION]
}

/// The calls that this process may make.
fn entries() -> Vec<&'static Entry> {
    lists().into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use libc::SECCOMP_RET_ALLOW;
    use vmm_sandbox::testing::{Item, assert_as_seccompiler, assert_harmless, index, items, run};

    use super::*;

    #[test]
    fn program_allows_its_list_and_refuses_the_rest() {
        let entries = entries();
        let program = bpf::program(&entries, OTHERWISE).unwrap();
        let answer = |number, arguments| run(&program, bpf::ARCHITECTURE, number, arguments).0;
        for number in 0..500 {
            let mut listed = entries.iter().filter(|entry| entry.call == i64::from(number));
            let value = listed
                .next()
                .map(|entry| (index(&entry.arguments), items(entry)[0]));
            let mut arguments = [u64::from(std::process::id()), 0, 0, 0, 0, 0];
            if let Some((Some(index), Item::Value(value))) = value {
                arguments[usize::from(index)] = value;
            }
            let expected = if value.is_some() {
                SECCOMP_RET_ALLOW
            } else {
                OTHERWISE
            };
            assert_eq!(answer(number, arguments), expected, "{number} {arguments:x?}");
            if let Some((Some(index), _)) = value {
                arguments[usize::from(index)] = 0xdead_beef;
                assert_eq!(answer(number, arguments), OTHERWISE, "{number} {arguments:x?}");
            }
        }
        assert_as_seccompiler(&entries, &entries, "image");
    }

    #[test]
    fn no_call_opens_a_path_or_makes_a_process() {
        for entry in entries() {
            assert_harmless(entry);
        }
    }

    /// The calls beside those of all programs.
    #[test]
    fn documented_calls_are_these() {
        let page = include_str!("../../../docs/src/security.md").replace(",\n", ", ");
        let own = lists().into_iter().filter(|list| !std::ptr::eq(*list, EVERY));
        let mut names: Vec<&str> = own.flatten().map(Entry::name).collect();
        names.sort_unstable();
        names.dedup();
        let calls = format!("`{}`", names.join("`, `"));
        assert!(
            page.contains(&calls),
            "docs/src/security.md should have this:\n{calls}"
        );
    }
}
