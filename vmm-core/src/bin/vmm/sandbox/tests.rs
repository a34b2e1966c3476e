//! Checks of the lists against recorded calls, of the programs against the lists, and of the
//! documentation against both.

use caps::{CapSet, Capability};
use libc::{SECCOMP_RET_ALLOW, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use vmm_base::thread::ThreadKind;
use vmm_sandbox::{
    bpf::{self, ARCHITECTURE, no_clone3},
    lists::{Arguments, EVERY, Entry},
    testing::{Item, assert_as_seccompiler, assert_harmless, index, items, run},
};

use super::{drop_bounding_set, lists::of, seccomp::entries};

/// Calls that threads made while the tests ran.
const USED: &str = include_str!("../../../../../tests/seccomp/used.txt");

/// A line of the file: the kind of thread, the call, and the argument that filters check.
struct Used {
    kind: &'static str,
    call: &'static str,
    argument: Option<u64>,
}

fn used() -> Vec<Used> {
    let lines = USED.lines().filter(|line| !line.starts_with('#'));
    let used: Vec<Used> = lines
        .map(|line| {
            let mut fields = line.split(' ');
            Used {
                kind: fields.next().unwrap(),
                call: fields.next().unwrap(),
                argument: fields.next().map(|value| {
                    let digits = value.strip_prefix("0x").unwrap();
                    u64::from_str_radix(digits, 16).unwrap()
                }),
            }
        })
        .collect();
    assert!(used.len() > 200);
    used
}

fn covers(entry: &Entry, item: Item, used: &Used) -> bool {
    if entry.name() != used.call {
        return false;
    }
    let value = used.argument.unwrap_or_default();
    match (&entry.arguments, item) {
        (Arguments::Any, _) => true,
        (Arguments::Without(_, bits), _) => value & bits == 0,
        (Arguments::OneOf(..) | Arguments::ToSelf(..), Item::Value(allowed)) => value == allowed,
        (Arguments::Low16(..), Item::Value(allowed)) => value & 0xffff == allowed,
        (_, Item::Call) => false,
    }
}

fn all() -> impl Iterator<Item = (ThreadKind, &'static [Entry], &'static Entry, Item)> {
    ThreadKind::ALL.into_iter().flat_map(|kind| {
        let lists = of(kind).into_iter();
        lists.flat_map(move |list| {
            let of_list = list.iter();
            of_list.flat_map(move |entry| {
                items(entry)
                    .into_iter()
                    .map(move |item| (kind, list, entry, item))
            })
        })
    })
}

/// This kind of thread, and the kinds that create it. The thread has the filters of all of them.
fn line(kind: ThreadKind) -> &'static [ThreadKind] {
    match kind {
        ThreadKind::Main => &[ThreadKind::Main],
        ThreadKind::Control => &[ThreadKind::Main, ThreadKind::Control],
        ThreadKind::Vcpu => &[ThreadKind::Main, ThreadKind::Vcpu],
        ThreadKind::Worker => &[ThreadKind::Main, ThreadKind::Worker],
        ThreadKind::Delegate => &[ThreadKind::Main, ThreadKind::Delegate],
        ThreadKind::Vhost => &[ThreadKind::Main, ThreadKind::Vhost],
        ThreadKind::Storage => &[ThreadKind::Main, ThreadKind::Worker, ThreadKind::Storage],
        ThreadKind::Serial => &[ThreadKind::Main, ThreadKind::Serial],
        ThreadKind::Screen => &[ThreadKind::Main, ThreadKind::Screen],
        ThreadKind::Helper => &[ThreadKind::Main, ThreadKind::Helper],
        ThreadKind::Snapshot => &[ThreadKind::Main, ThreadKind::Snapshot],
    }
}

/// As root, in a thread of its own that the filter ends with.
#[test]
fn bounding_set_that_can_not_be_dropped_is_left() {
    let thread = std::thread::spawn(|| {
        assert!(caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).unwrap());
        let drops = libc::PR_CAPBSET_DROP.cast_unsigned().into();
        let drops = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, drops).unwrap();
        let rules = [(libc::SYS_prctl, vec![SeccompRule::new(vec![drops]).unwrap()])];
        let denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
        let filter = SeccompFilter::new(
            rules.into(),
            SeccompAction::Allow,
            denied,
            seccompiler::TargetArch::x86_64,
        );
        let filter: BpfProgram = filter.unwrap().try_into().unwrap();
        seccompiler::apply_filter(&filter).unwrap();
        assert!(caps::drop(None, CapSet::Bounding, Capability::CAP_CHOWN).is_err());
        drop_bounding_set().unwrap();
    });
    thread.join().unwrap();
}

#[test]
fn what_was_used_is_allowed() {
    let allows = |kind: ThreadKind, used: &Used| {
        let entries = entries(kind).into_iter();
        let mut items = entries.flat_map(|entry| items(entry).into_iter().map(move |item| (entry, item)));
        items.any(|(entry, item)| covers(entry, item, used))
    };
    let lacking: Vec<String> = used()
        .iter()
        .filter(|used| {
            let kind = ThreadKind::ALL.into_iter().find(|kind| kind.name() == used.kind);
            !line(kind.unwrap()).iter().all(|kind| allows(*kind, used))
        })
        .map(|used| format!("{} {} {:x?}", used.kind, used.call, used.argument))
        .collect();
    assert!(lacking.is_empty(), "{lacking:#?}");
}

/// By one of the kinds that have the list.
#[test]
fn what_is_allowed_was_used_or_has_a_reason() {
    let used = used();
    let uses = |kind: ThreadKind, entry, item| {
        used.iter()
            .any(|used| used.kind == kind.name() && covers(entry, item, used))
    };
    let has = |kind, list| of(kind).into_iter().any(|of_kind| std::ptr::eq(of_kind, list));
    let unused: Vec<String> = all()
        .filter(|(_, _, entry, _)| entry.unseen.is_none())
        .filter(|(_, list, entry, item)| {
            let mut kinds = ThreadKind::ALL.into_iter().filter(|kind| has(*kind, *list));
            !kinds.any(|kind| uses(kind, entry, *item))
        })
        .map(|(kind, _, entry, item)| format!("{kind} {} {item:x?}", entry.name()))
        .collect();
    assert!(unused.is_empty(), "{unused:#?}");

    let stale: Vec<String> = all()
        .filter(|(kind, _, entry, item)| entry.unseen.is_some() && uses(*kind, entry, *item))
        .map(|(kind, _, entry, item)| format!("{kind} {} {item:x?}", entry.name()))
        .collect();
    assert!(
        stale.is_empty(),
        "these were used, and need no other reason: {stale:#?}"
    );
}

#[test]
fn lists_have_no_call_that_opens_a_path() {
    for (_, _, entry, _) in all() {
        assert_harmless(entry);
    }
}

#[test]
fn program_of_each_kind_answers_as_that_of_seccompiler() {
    let all: Vec<_> = ThreadKind::ALL.into_iter().flat_map(of).flatten().collect();
    for kind in ThreadKind::ALL {
        assert_as_seccompiler(&entries(kind), &all, kind.name());
    }
}

/// The programs that a call of such a thread goes through.
fn programs(kind: ThreadKind) -> Vec<BpfProgram> {
    let compiled = |kind: &ThreadKind| bpf::program(&entries(*kind), libc::SECCOMP_RET_TRAP).unwrap();
    let mut programs = vec![no_clone3().unwrap()];
    programs.extend(line(kind).iter().map(compiled));
    programs
}

/// A call as filters see it.
#[derive(Clone, Copy, Debug)]
struct Call {
    number: u32,
    architecture: u32,
    arguments: [u64; 6],
}

impl Call {
    fn new(number: c_long, arguments: [u64; 6]) -> Self {
        Self {
            number: number.try_into().unwrap(),
            architecture: ARCHITECTURE,
            arguments,
        }
    }

    /// Returns the result of the program, and the number of executed instructions.
    fn through(&self, program: &BpfProgram) -> (u32, usize) {
        run(program, self.architecture, self.number, self.arguments)
    }
}

/// The kernel takes the strictest result of all.
fn allowed(programs: &[BpfProgram], call: &Call) -> bool {
    programs
        .iter()
        .all(|program| call.through(program).0 == SECCOMP_RET_ALLOW)
}

fn allows(arguments: &Arguments, value: u64) -> bool {
    let value = value & u64::from(u32::MAX);
    match arguments {
        Arguments::Any => true,
        Arguments::OneOf(_, values) | Arguments::ToSelf(_, values) => values
            .iter()
            .any(|allowed| allowed & u64::from(u32::MAX) == value),
        Arguments::Low16(_, values) => values.contains(&(value & 0xffff)),
        Arguments::Without(_, bits) => value & bits == 0,
    }
}

#[test]
fn the_programs_allow_what_the_lists_say_and_nothing_else() {
    const LAST: c_long = 500;
    const ELSEWHERE: u64 = 0xdead_beef_0bad_f00d;
    let values = || {
        let listed = all().filter_map(|(_, _, _, item)| match item {
            Item::Value(value) => Some(value),
            Item::Call => None,
        });
        listed
            .chain(0..64)
            .chain([u64::from(u32::MAX), 0xffff_0000_0000, libc::TIOCSTI])
    };
    for kind in ThreadKind::ALL {
        let programs = programs(kind);
        for number in (0..LAST).filter(|number| *number != libc::SYS_clone3) {
            let listed = entries(kind);
            let listed: Vec<_> = listed.iter().filter(|entry| entry.call == number).collect();
            let checked = listed.iter().find_map(|entry| index(&entry.arguments));
            let Some(index) = checked else {
                let call = Call::new(number, [ELSEWHERE; 6]);
                assert_eq!(allowed(&programs, &call), !listed.is_empty(), "{kind} {call:?}");
                continue;
            };
            for value in values() {
                let mut arguments = [ELSEWHERE; 6];
                arguments[usize::from(index)] = value;
                let to_self = listed
                    .iter()
                    .all(|entry| matches!(entry.arguments, Arguments::ToSelf(..)));
                if to_self {
                    let call = Call::new(number, arguments);
                    assert!(!allowed(&programs, &call), "{kind} {call:?}");
                    arguments[0] = std::process::id().into();
                }
                let call = Call::new(number, arguments);
                let expected = listed.iter().any(|entry| allows(&entry.arguments, value));
                assert_eq!(allowed(&programs, &call), expected, "{kind} {call:?}");
            }
        }
        // getpid of other ABIs: i386, and x32 with its bit in the number.
        let mut foreign = Call::new(libc::SYS_getpid, [0; 6]);
        assert!(allowed(&programs, &foreign));
        foreign.number |= 0x4000_0000;
        assert!(!allowed(&programs, &foreign));
        let i386 = Call {
            architecture: 0x4000_0003,
            ..Call::new(20, [0; 6])
        };
        assert!(!allowed(&programs, &i386));
    }
}

#[test]
fn clone3_is_said_to_be_missing() {
    let call = Call::new(libc::SYS_clone3, [0; 6]);
    let result = call.through(&no_clone3().unwrap()).0;
    // SECCOMP_RET_ERRNO with the number.
    assert_eq!(result, 0x0005_0000 | libc::ENOSYS.unsigned_abs());
}

/// Table of the calls of each kind beyond those of all threads, in the form of the documentation.
fn table() -> String {
    let kinds = ThreadKind::ALL;
    let mut table = String::from("| call |");
    for kind in kinds {
        table += &format!(" {kind} |");
    }
    table += &format!("\n|---|{}\n", "---|".repeat(kinds.len()));
    let own = |kind| {
        let lists = of(kind).into_iter();
        lists.filter(|list| !std::ptr::eq(*list, EVERY)).flatten()
    };
    let mut names: Vec<&str> = kinds.into_iter().flat_map(own).map(Entry::name).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        table += &format!("| `{name}` |");
        for kind in kinds {
            let entries: Vec<_> = own(kind).filter(|entry| entry.name() == name).collect();
            let cell = match entries.first().map(|entry| &entry.arguments) {
                None => String::new(),
                Some(Arguments::Any) => "yes".to_owned(),
                Some(_) => entries.iter().flat_map(|entry| items(entry)).count().to_string(),
            };
            table += &format!(" {cell} |");
        }
        table += "\n";
    }
    table
}

/// The calls of all threads, in the form of the documentation.
fn every() -> String {
    let mut names: Vec<&str> = EVERY.iter().map(Entry::name).collect();
    names.sort_unstable();
    names.dedup();
    format!("`{}`", names.join("`, `"))
}

/// Table of the size of each program, and of the instructions that the most frequent call of each
/// kind executes. Only calls for which the kernel runs the filter count: since 5.11, the kernel
/// skips the filter if the arguments make no difference.
fn costs() -> String {
    let own = u64::from(std::process::id());
    let often: [(ThreadKind, &str, c_long, [u64; 6]); 8] = [
        (
            ThreadKind::Main,
            "`tgkill`",
            libc::SYS_tgkill,
            [own, 0, 34, 0, 0, 0],
        ),
        (
            ThreadKind::Control,
            "`madvise`",
            libc::SYS_madvise,
            [0, 0, 4, 0, 0, 0],
        ),
        (
            ThreadKind::Vcpu,
            "`ioctl` (KVM_RUN)",
            libc::SYS_ioctl,
            [0, 0xae80, 0, 0, 0, 0],
        ),
        (
            ThreadKind::Worker,
            "`ioctl` (KVM_SIGNAL_MSI)",
            libc::SYS_ioctl,
            [0, 0x4020_aea5, 0, 0, 0, 0],
        ),
        (
            ThreadKind::Storage,
            "`madvise`",
            libc::SYS_madvise,
            [0, 0, 4, 0, 0, 0],
        ),
        (
            ThreadKind::Serial,
            "`madvise`",
            libc::SYS_madvise,
            [0, 0, 4, 0, 0, 0],
        ),
        (
            ThreadKind::Helper,
            "`madvise`",
            libc::SYS_madvise,
            [0, 0, 23, 0, 0, 0],
        ),
        (
            ThreadKind::Snapshot,
            "`ioctl` (KVM_CLEAR_DIRTY_LOG)",
            libc::SYS_ioctl,
            [0, 0xc018_aec0, 0, 0, 0, 0],
        ),
    ];
    let mut table = String::from(
        "| thread | instructions of its own program | call | instructions that it runs |\n|---|---|---|---|\n",
    );
    for (kind, name, number, arguments) in often {
        let programs = programs(kind);
        let call = Call::new(number, arguments);
        assert!(allowed(&programs, &call), "{kind} {name}");
        let own = programs.last().unwrap().len();
        let runs: usize = programs.iter().map(|program| call.through(program).1).sum();
        table += &format!("| {kind} | {own} | {name} | {runs} |\n");
    }
    table
}

#[test]
fn the_documented_tables_are_these() {
    let page = include_str!("../../../../../docs/src/security.md");
    // Lines of the page are wrapped.
    let page = &page.replace(",\n", ", ");
    let missing: Vec<String> = [every(), table(), costs()]
        .into_iter()
        .filter(|part| !page.contains(part))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/src/security.md should have this:\n{}",
        missing.join("\n")
    );
}
