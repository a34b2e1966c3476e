//! What is known of a VM whose test failed.

use crate::Node;

/// Where in the kernel each thread of each `vmm` is, and where in the guest vCPUs have been in a second, on stderr.
const PLACES: &str = r#"for thread in $(pgrep -x vmm | sed 's,.*,/proc/&/task/*,'); do
    echo "$thread $(cat $thread/comm 2>/dev/null):" $(head -n 6 $thread/stack 2>/dev/null) >&2
done
cd /sys/kernel/tracing || exit
echo 1 > events/kvm/kvm_exit/enable
sleep 1
echo 0 > events/kvm/kvm_exit/enable
grep -v '^#' trace | tail -n 40 >&2
echo > trace"#;

/// Prints how a VM is, and what all `vmm` processes of its node do. It changes nothing, and fails silently.
pub(super) fn report(node: &Node, name: &str) {
    let _ = node
        .ssh(&format!(
            "vmmctl describe vm {name} >&2; vmmctl stats {name} >&2; \
             top -H -b -n 2 -d 2 $(pgrep -x vmm | sed 's/^/-p/') >&2; {PLACES}"
        ))
        .map(|output| eprint!("{}", output.stderr));
}
