//! What is known of a VM whose test failed.

use crate::Node;

/// Where in the kernel each thread of each `vmm` is, what KVM has counted for each VM, and what of the guest vCPUs have left for
/// in a second, on stderr. A vCPU that halts for ever is in none of the exits.
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

/// Has the guest's kernel say what each of its processors does (which takes an NMI, so that a processor says it too that has its
/// interrupts off) and which of its tasks wait, and prints the end of its log. `$1` is the VM. By the keys of SysRq: its messages are all printed, then
/// processors, then tasks. What tells most comes first: a long report is cut.
const GUEST: &str = r"for key in 7 l w; do
    { sleep 1; printf $key; sleep 2; } | timeout 10 vmmctl console $1 --no-replay --send-break >/dev/null 2>&1
done
vmmctl logs $1 | tail -n 600 > /tmp/guest-says-$1
grep -E 'NMI backtrace|RIP:|EFLAGS|IRQ>|blocked for|task:|blk|bdev|_lock' /tmp/guest-says-$1 | head -n 80 >&2
echo 'All that it says:' >&2; tail -n 300 /tmp/guest-says-$1 >&2";

/// Prints how a VM is, what all `vmm` processes of its node do, and what the guest says of itself. It changes nothing but what
/// the guest prints, and fails silently.
pub(super) fn report(node: &Node, name: &str) {
    let _ = node
        .ssh(&format!(
            "vmmctl stats {name} >&2; ({PLACES}); (set -- {name}; {GUEST}); vmmctl describe vm {name} >&2; \
             top -H -b -n 2 -d 2 $(pgrep -x vmm | sed 's/^/-p/') >&2"
        ))
        .map(|output| eprint!("{}", output.stderr));
}
