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
use seccompiler::{BpfProgram, sock_filter};

use super::lists::{Arguments, Entry};

/// Linux's `AUDIT_ARCH_X86_64` (linux/audit.h).
pub const ARCHITECTURE: u32 = 0xc000_003e;

/// The program that allows what `entries` allow and returns `otherwise` for all else. The program kills the process at a call by
/// another architecture's numbers.
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
pub(super) mod tests {
    use devices::thread::ThreadKind;
    use seccompiler::{
        SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
        TargetArch,
    };

    use super::{
        super::{lists::of, seccomp::entries},
        *,
    };

    /// The same by seccompiler.
    fn reference(entries: &[&Entry]) -> BpfProgram {
        let condition = |index, operator, value| {
            let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value).unwrap();
            SeccompRule::new(vec![condition]).unwrap()
        };
        let rules_of = |arguments: &Arguments| -> Vec<SeccompRule> {
            match arguments {
                Arguments::Any => Vec::new(),
                Arguments::OneOf(index, values) => {
                    let values = values.iter();
                    values
                        .map(|value| condition(*index, SeccompCmpOp::Eq, *value))
                        .collect()
                }
                Arguments::ToSelf(index, values) => {
                    let own = std::process::id().into();
                    let is = |index, value| {
                        SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
                            .unwrap()
                    };
                    let rule = |value: &u64| SeccompRule::new(vec![is(0, own), is(*index, *value)]).unwrap();
                    values.iter().map(rule).collect()
                }
                Arguments::Low16(index, values) => {
                    let values = values.iter();
                    let rule = |value: &u64| condition(*index, SeccompCmpOp::MaskedEq(0xffff), *value);
                    values.map(rule).collect()
                }
                Arguments::Without(index, bits) => vec![condition(*index, SeccompCmpOp::MaskedEq(*bits), 0)],
            }
        };
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        for entry in entries.iter().filter(|entry| entry.arguments != Arguments::Any) {
            rules
                .entry(entry.call)
                .or_default()
                .extend(rules_of(&entry.arguments));
        }
        // A call without rules is allowed with any arguments.
        for entry in entries.iter().filter(|entry| entry.arguments == Arguments::Any) {
            rules.insert(entry.call, Vec::new());
        }
        let filter = SeccompFilter::new(
            rules,
            SeccompAction::Trap,
            SeccompAction::Allow,
            TargetArch::x86_64,
        );
        filter.unwrap().try_into().unwrap()
    }

    /// Returns the result of a program, and the number of executed instructions.
    pub fn run(program: &[sock_filter], architecture: u32, call: u32, arguments: [u64; 6]) -> (u32, usize) {
        let mut data = [call.to_le_bytes(), architecture.to_le_bytes(), [0; 4], [0; 4]].concat();
        data.extend(arguments.iter().flat_map(|argument| argument.to_le_bytes()));
        let (mut accumulator, mut next, mut steps) = (0_u32, 0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[next];
            (next, steps) = (next + 1, steps + 1);
            let holds = match u32::from(code) {
                code if code == BPF_LD | BPF_W | BPF_ABS => {
                    accumulator = u32::from_le_bytes(data[k as usize..][..4].try_into().unwrap());
                    continue;
                }
                code if code == BPF_ALU | BPF_AND | BPF_K => {
                    accumulator &= k;
                    continue;
                }
                code if code == BPF_RET | BPF_K => return (k, steps),
                code if code == BPF_JMP | BPF_JA => {
                    next += k as usize;
                    continue;
                }
                code if code == BPF_JMP | BPF_JEQ | BPF_K => accumulator == k,
                code if code == BPF_JMP | BPF_JGE | BPF_K => accumulator >= k,
                code if code == BPF_JMP | BPF_JSET | BPF_K => accumulator & k != 0,
                code => panic!("instruction {code:#x}"),
            };
            next += usize::from(if holds { jt } else { jf });
        }
    }

    /// Values of an argument on both sides of the values in a list.
    fn around(arguments: &Arguments) -> Vec<(usize, u64)> {
        let (index, values) = match arguments {
            Arguments::Any => return vec![(0, 0)],
            Arguments::OneOf(index, values)
            | Arguments::ToSelf(index, values)
            | Arguments::Low16(index, values) => (*index, values.to_vec()),
            Arguments::Without(index, bits) => (*index, vec![*bits]),
        };
        let near = |value: u64| {
            let far = [value | 1 << 16, value | 1 << 32, value << 1, u64::MAX, 0];
            [value, value ^ 1, value.wrapping_add(1)].into_iter().chain(far)
        };
        let near = values.into_iter().flat_map(near);
        near.map(|value| (usize::from(index), value)).collect()
    }

    #[test]
    fn every_kinds_program_answers_as_seccompilers_does_in_few_steps() {
        let trap: u32 = SeccompAction::Trap.into();
        for kind in ThreadKind::ALL {
            let entries = entries(kind);
            let (ours, reference) = (program(&entries, trap).unwrap(), reference(&entries));
            // For a short list, the search adds as many jumps as it saves.
            assert!(ours.len() < reference.len().max(256), "{}", ours.len());
            let all: Vec<_> = ThreadKind::ALL.into_iter().flat_map(of).flatten().collect();
            for call in (0..600).chain([1 << 30, u32::MAX]) {
                let asked = all.iter().filter(|entry| entry.call == i64::from(call));
                for (index, value) in asked.flat_map(|entry| around(&entry.arguments)).chain([(0, 0)]) {
                    let mut arguments = [u64::from(std::process::id()), 0, 0, 0, 0, 0];
                    arguments[index] = value;
                    let (answer, steps) = run(&ours, ARCHITECTURE, call, arguments);
                    let expected = run(&reference, ARCHITECTURE, call, arguments).0;
                    assert_eq!(answer, expected, "{kind} {call} {arguments:x?}");
                    let listed = entries.iter().any(|entry| entry.call == i64::from(call));
                    assert!(listed || steps < 24, "{kind} {call}: {steps} steps");
                }
            }
            let (answer, _) = run(&ours, 0x4000_0003, 0, [0; 6]);
            assert_eq!(answer, SECCOMP_RET_KILL_PROCESS);
            assert_eq!(run(&reference, 0x4000_0003, 0, [0; 6]).0, answer);
        }
    }

    #[test]
    fn a_program_without_calls_allows_none() {
        let program = program(&[], 7).unwrap();
        assert_eq!(run(&program, ARCHITECTURE, 0, [0; 6]).0, 7);
    }
}
