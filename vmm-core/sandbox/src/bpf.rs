//! Lists of system calls as classic BPF programs (linux/filter.h, seccomp(2)).
//!
//! When a filter is installed, the kernel interprets it once for each number that a system call can have, to learn which are
//! always allowed. So a call is found by bisection here, in as many steps as its number takes. seccompiler compares one number
//! after the other; the test holds both programs to the same answers.

use std::{collections::BTreeMap, mem::offset_of};

use anyhow::{Context, Result};
use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W,
    SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, seccomp_data,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, sock_filter};

use crate::lists::{Arguments, Entry};

/// Linux's `AUDIT_ARCH_X86_64` (linux/audit.h).
pub const ARCHITECTURE: u32 = 0xc000_003e;

/// The program that allows what `entries` allow and returns `otherwise` for all else. The program kills the process at a call by
/// another architecture's numbers.
///
/// # Errors
///
/// An entry has a negative number or more than 255 values.
pub fn program(entries: &[&Entry], otherwise: u32) -> Result<BpfProgram> {
    let mut calls: BTreeMap<u32, Vec<&Arguments>> = BTreeMap::new();
    for entry in entries {
        let call = u32::try_from(entry.call).context("the number of a system call")?;
        calls.entry(call).or_default().push(&entry.arguments);
    }
    let calls: Vec<_> = calls.into_iter().collect();
    let mut program = vec![
        load(offset_of!(seccomp_data, arch)),
        compare(BPF_JEQ, ARCHITECTURE, 1, 0),
        give(SECCOMP_RET_KILL_PROCESS),
        load(offset_of!(seccomp_data, nr)),
    ];
    search(&mut program, &calls, otherwise)?;
    program.shrink_to_fit();
    Ok(program)
}

/// Makes clone3(2) fail with ENOSYS; glibc then calls clone(2). A filter cannot see the flags of clone3(2), which are in memory.
///
/// # Errors
///
/// The architecture is not x86-64.
pub fn no_clone3() -> Result<BpfProgram> {
    let filter = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        TargetArch::x86_64,
    )?;
    Ok(filter.try_into()?)
}

/// Finds the call whose number was loaded, and checks it.
fn search(program: &mut BpfProgram, calls: &[(u32, Vec<&Arguments>)], otherwise: u32) -> Result<()> {
    match calls {
        [] => program.push(give(otherwise)),
        [(call, rules)] => {
            program.extend([compare(BPF_JEQ, *call, 1, 0), give(otherwise)]);
            check(program, rules, otherwise)?;
        }
        calls => {
            let (lower, upper) = calls.split_at(calls.len() / 2);
            // A comparison can't jump far.
            program.push(compare(BPF_JGE, upper[0].0, 0, 1));
            let far = program.len();
            program.push(jump(0));
            search(program, lower, otherwise)?;
            program[far] = jump(program.len() - far - 1);
            search(program, upper, otherwise)?;
        }
    }
    Ok(())
}

/// Allows the call when one of the rules does.
fn check(program: &mut BpfProgram, rules: &[&Arguments], otherwise: u32) -> Result<()> {
    if rules.iter().any(|rule| **rule == Arguments::Any) {
        program.push(give(SECCOMP_RET_ALLOW));
        return Ok(());
    }
    for rule in rules {
        match rule {
            Arguments::Any => {}
            Arguments::OneOf(index, values) => {
                program.push(argument(*index));
                one_of(program, values)?;
            }
            Arguments::ToSelf(index, values) => {
                program.push(argument(0));
                program.push(compare(BPF_JEQ, std::process::id(), 1, 0));
                // Over the load, the values and the two instructions behind them.
                program.push(jump(values.len() + 3));
                program.push(argument(*index));
                one_of(program, values)?;
            }
            Arguments::Low16(index, values) => {
                program.push(argument(*index));
                program.push(instruction(BPF_ALU | BPF_AND | BPF_K, 0, 0, 0xffff));
                one_of(program, values)?;
            }
            Arguments::Without(index, bits) => {
                program.push(argument(*index));
                program.push(compare(BPF_JSET, low(*bits), 1, 0));
                program.push(give(SECCOMP_RET_ALLOW));
            }
        }
    }
    program.push(give(otherwise));
    Ok(())
}

/// Allows the call if the loaded value is one of `values`; otherwise continues after this sequence.
fn one_of(program: &mut BpfProgram, values: &[u64]) -> Result<()> {
    for (index, value) in values.iter().enumerate() {
        // Over the other values and the jump behind them.
        let far = u8::try_from(values.len() - index).context("a list of more than 255 values")?;
        program.push(compare(BPF_JEQ, low(*value), far, 0));
    }
    program.extend([jump(1), give(SECCOMP_RET_ALLOW)]);
    Ok(())
}

#[allow(clippy::cast_possible_truncation, reason = "lists are of the lower 32 bits")]
fn low(value: u64) -> u32 {
    value as u32
}

fn argument(index: u8) -> sock_filter {
    // The lower half comes first.
    load(offset_of!(seccomp_data, args) + 8 * usize::from(index))
}

#[allow(clippy::cast_possible_truncation, reason = "an offset in 64 bytes")]
fn load(offset: usize) -> sock_filter {
    instruction(BPF_LD | BPF_W | BPF_ABS, 0, 0, offset as u32)
}

fn compare(how: u32, value: u32, then: u8, otherwise: u8) -> sock_filter {
    instruction(BPF_JMP | how | BPF_K, then, otherwise, value)
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "programs have at most 4096 instructions"
)]
fn jump(instructions: usize) -> sock_filter {
    instruction(BPF_JMP | BPF_JA, 0, 0, instructions as u32)
}

fn give(action: u32) -> sock_filter {
    instruction(BPF_RET | BPF_K, 0, 0, action)
}

#[allow(clippy::cast_possible_truncation, reason = "codes have a byte")]
fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    let code = code as u16;
    sock_filter { code, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        lists::{EVERY, IMAGES, SPARSE, THREADS},
        testing::{assert_as_seccompiler, run},
    };

    #[test]
    fn shared_lists_answer_as_those_of_seccompiler() {
        let entries: Vec<_> = [EVERY, IMAGES, SPARSE, THREADS].into_iter().flatten().collect();
        assert_as_seccompiler(&entries, &entries, "shared");
    }

    #[test]
    fn program_without_calls_allows_none() {
        let program = program(&[], 7).unwrap();
        assert_eq!(run(&program, ARCHITECTURE, 0, [0; 6]).0, 7);
    }
}
