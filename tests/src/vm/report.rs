//! Report about a VM whose test failed.

use crate::Node;
use crate::node::guest_lost;

/// Prints to stderr each `vmm` thread's position in the kernel, KVM's counters of each VM, and the
/// exits of the guest vCPUs within a second. A vCPU that halts forever causes no exit.
const PLACES: &str = r#"for thread in $(pgrep -x vmm | sed 's,.*,/proc/&/task/*,'); do
    echo "$thread $(cat $thread/comm 2>/dev/null), $(sed -n 's/^State:[[:space:]]*//p' $thread/status 2>/dev/null), waits in" \
        "$(cat $thread/wchan 2>/dev/null):" $(head -n 6 $thread/stack 2>/dev/null) >&2
done
mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug
for vm in /sys/kernel/debug/kvm/*-*; do
    for counters in $vm $vm/vcpu*; do
        echo "$counters:" $(cd $counters 2>/dev/null && grep -s . * | grep -v ':0$') >&2
    done
done
cd /sys/kernel/tracing || exit
echo 1 > events/kvm/kvm_exit/enable
echo 1 > events/kvm/kvm_hypercall/enable
sleep 1
echo 0 > events/kvm/kvm_hypercall/enable
echo 0 > events/kvm/kvm_exit/enable
grep -v '^#' trace | sed -n 's/^ *\([^ ]*\) .*reason \([^ ]*\) rip \([^ ]*\) .*/\1 left for \2 at \3/p' | sort | uniq -c | sort -rn | head -n 30 >&2
grep -v '^#' trace | tail -n 40 >&2
echo > trace"#;

/// Makes the guest's kernel report the state of each processor and the waiting tasks, and prints
/// the end of its log. `$1` is the VM. The kernel uses an NMI, so processors with interrupts off
/// report, too. The SysRq keys enable all messages, then report processors, then tasks. The most
/// informative lines come first, because a long report is truncated.
const GUEST: &str = r"for key in 7 l w; do
    { sleep 1; printf $key; sleep 2; } | timeout 10 vmmctl console $1 --no-replay --send-break >/dev/null 2>&1
done
vmmctl logs $1 | tail -n 600 > /tmp/guest-says-$1
grep -E 'NMI backtrace|RIP:|EFLAGS|IRQ>|blocked for|task:|blk|bdev|_lock' /tmp/guest-says-$1 | head -n 80 >&2
echo 'All that it says:' >&2; tail -n 300 /tmp/guest-says-$1 >&2";

/// Prints three of KVM's counters of the VM `$1`, and again two seconds later.
const COUNTERS: &str = r#"mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug
cd /sys/kernel/debug/kvm/$(vmmctl get vm $1 -o json | sed -n 's/^ *"pid": "*\([0-9]*\).*/\1/p' | head -n 1)-* || exit
for time in first second; do
    [ $time = first ] || sleep 2
    echo $(cat exits irq_exits req_event)
done"#;

/// Fewer interrupts of the node in two seconds say nothing: its clock ticks 250 times a second on a processor that is not idle.
const INTERRUPTS: u64 = 50;

/// Whether the emulator has lost an interrupt that KVM has for a guest; `counters` is the output of
/// [`COUNTERS`].
///
/// KVM requests an exit as soon as the guest accepts interrupts again (V_IRQ; AMD64 Architecture
/// Programmer's Manual, volume 2, 15.21.4), and then delivers the interrupt. QEMU recorded this
/// request in `interrupt_request` of its processor, in `helper_vmrun`, without the lock that other
/// threads hold to set bits there (`svm_helper.c`; later versions change this word atomically).
/// Therefore one of the two bits may be lost.
///
/// Without its clock's interrupt the guest continues to run, and sets no other timer. Its
/// processors exit only for interrupts of the node, and KVM has no new interrupt for them. The
/// fault was seen once, directly after a guest had read its clock with interrupts off, and never
/// provoked.
///
/// A guest that waits forever takes its clock's interrupts, which cause additional exits, or halts.
/// Only a guest that loops with its interrupts off is mistaken for a deaf one. Such a guest loops
/// again when the test is repeated.
fn is_deaf(counters: &str) -> bool {
    let numbers: Vec<u64> = counters
        .split_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect();
    let [
        exits,
        interrupts,
        events,
        later_exits,
        later_interrupts,
        later_events,
    ] = numbers[..]
    else {
        return false;
    };
    let left = later_exits.saturating_sub(exits);
    left >= INTERRUPTS && left == later_interrupts.saturating_sub(interrupts) && later_events == events
}

/// Prints the state of a VM, the activity of all `vmm` processes of its node, and the guest's own
/// report. The only change is additional output of the guest. Errors are ignored.
pub(super) fn report(node: &Node, name: &str) {
    // Before it is sent anything: that has KVM look for interrupts again.
    let counters = node.ssh(&format!("set -- {name}; {COUNTERS}"));
    if counters.is_ok_and(|counters| is_deaf(&counters.stdout)) {
        eprintln!("{name}: the emulator seems to have lost an interrupt of this guest");
        guest_lost();
    }
    let _ = node
        .ssh(&format!(
            "vmmctl stats {name} >&2; ({PLACES}); (set -- {name}; {GUEST}); vmmctl describe vm {name} >&2; \
             top -H -b -n 2 -d 2 $(pgrep -x vmm | sed 's/^/-p/') >&2"
        ))
        .map(|output| eprint!("{}", output.stderr));
}

#[cfg(test)]
mod tests {
    use super::is_deaf;

    #[test]
    fn guest_without_interrupts_differs_from_a_waiting_one() {
        // The observed fault; the same with one more exit; a guest in a loop with clock interrupts;
        // a halted guest; a missing guest.
        for (counters, deaf) in [
            ("43010 39492 736\n43805 40287 736", true),
            ("43010 39492 736\n43806 40287 736", false),
            ("43010 39492 736\n44805 40287 1236", false),
            ("43010 39492 736\n43010 39492 736", false),
            ("43010 39492 736\n", false),
            ("", false),
        ] {
            assert_eq!(is_deaf(counters), deaf, "{counters}");
        }
    }
}
