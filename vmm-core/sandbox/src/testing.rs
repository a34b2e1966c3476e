//! Checks for the tests of programs that have lists: an interpreter for their filters, the same filters by seccompiler, and calls
//! that no list may have.

use std::collections::BTreeMap;

use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W,
    SECCOMP_RET_KILL_PROCESS,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

use crate::{
    bpf::{ARCHITECTURE, program},
    lists::{Arguments, Entry},
};

/// Part of an entry: one call per value of the checked argument, or a single call without values.
#[derive(Clone, Copy, Debug)]
pub enum Item {
    /// The call.
    Call,
    /// The call with this value of the argument.
    Value(u64),
}

/// All parts of an entry.
#[must_use]
pub fn items(entry: &Entry) -> Vec<Item> {
    match entry.arguments {
        Arguments::Any | Arguments::Without(..) => vec![Item::Call],
        Arguments::OneOf(_, values) | Arguments::ToSelf(_, values) | Arguments::Low16(_, values) => {
            values.iter().copied().map(Item::Value).collect()
        }
    }
}

/// Which argument is checked.
#[must_use]
pub fn index(arguments: &Arguments) -> Option<u8> {
    match arguments {
        Arguments::Any => None,
        Arguments::OneOf(index, _)
        | Arguments::ToSelf(index, _)
        | Arguments::Low16(index, _)
        | Arguments::Without(index, _) => Some(*index),
    }
}

/// Asserts that no family of calls that take paths, make sockets, processes or namespaces, or reach into other processes has the call, and
/// that calls with many uses are allowed with checked arguments only.
pub fn assert_harmless(entry: &Entry) {
    const CHECKED: [&str; 9] = [
        "ioctl",
        "mmap",
        "mprotect",
        "prctl",
        "clone",
        "tgkill",
        "madvise",
        "fcntl",
        "io_uring_register",
    ];
    // Families of forbidden calls: calls that take paths, make sockets, processes or namespaces, or
    // reach into other processes.
    const FORBIDDEN: [&str; 42] = [
        "open",
        "creat",
        "lstat",
        "access",
        "faccess",
        "exec",
        "fork",
        "vfork",
        "socket",
        "connect",
        "bind",
        "listen",
        "ptrace",
        "process_",
        "pidfd_",
        "mount",
        "umount",
        "unshare",
        "setns",
        "bpf",
        "kill",
        "rt_sigqueueinfo",
        "rt_tgsigqueueinfo",
        "chdir",
        "chroot",
        "pivot_root",
        "rename",
        "link",
        "unlink",
        "symlink",
        "mkdir",
        "rmdir",
        "mknod",
        "chmod",
        "chown",
        "fchmod",
        "fchown",
        "newfstatat",
        "userfaultfd",
        "keyctl",
        "perf_event_open",
        "setuid",
    ];
    let name = entry.name();
    assert!(!FORBIDDEN.iter().any(|family| name.starts_with(family)), "{name}");
    assert!(
        !CHECKED.contains(&name) || entry.arguments != Arguments::Any,
        "{name}"
    );
}

/// Returns the result of a program, and the number of executed instructions.
///
/// # Panics
///
/// The program has an instruction that [`program`] does not use.
#[must_use]
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

/// Asserts that the program of `entries` answers as that of seccompiler does, in few steps, for values around those of all `asked`
/// entries.
pub fn assert_as_seccompiler(entries: &[&Entry], asked: &[&Entry], name: &str) {
    let trap: u32 = SeccompAction::Trap.into();
    let (ours, reference) = (program(entries, trap).unwrap(), reference(entries));
    // For a short list, the search adds as many jumps as it saves.
    assert!(ours.len() < reference.len().max(256), "{}", ours.len());
    for call in (0..600).chain([1 << 30, u32::MAX]) {
        let asked = asked.iter().filter(|entry| entry.call == i64::from(call));
        for (index, value) in asked.flat_map(|entry| around(&entry.arguments)).chain([(0, 0)]) {
            let mut arguments = [u64::from(std::process::id()), 0, 0, 0, 0, 0];
            arguments[index] = value;
            let (answer, steps) = run(&ours, ARCHITECTURE, call, arguments);
            let expected = run(&reference, ARCHITECTURE, call, arguments).0;
            assert_eq!(answer, expected, "{name} {call} {arguments:x?}");
            let listed = entries.iter().any(|entry| entry.call == i64::from(call));
            assert!(listed || steps < 24, "{name} {call}: {steps} steps");
        }
    }
    let (answer, _) = run(&ours, 0x4000_0003, 0, [0; 6]);
    assert_eq!(answer, SECCOMP_RET_KILL_PROCESS);
    assert_eq!(run(&reference, 0x4000_0003, 0, [0; 6]).0, answer);
}

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
                    SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value).unwrap()
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
