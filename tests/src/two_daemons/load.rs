//! Load of a Debian guest during moves, snapshots and copies: fio writes to a disk and reads all of
//! it back, and iperf sends from the node.

use crate::Case;
use crate::node::Kernel;
use crate::vm::Console;

/// Longest time that a round of fio takes, or that nothing is sent, in a slow node.
const SLOW: u64 = 180;

/// fio without end: each round writes 1 MiB in pieces of other sizes with other content, and reads them back. A piece of a round before is none
/// of this one. In the background, slowly enough for a guest that has more to do.
const FIO: &str = "{ (n=0; until [ -e /run/fio.end ]; do n=$((n+1)); \
     fio --name=verify --filename=/dev/vdb --direct=1 --ioengine=io_uring --iodepth=8 --size=1m --rate=512k --rw=randwrite \
         --bsrange=512-64k --randseed=$n --verify=crc32c --verify_fatal=1 --minimal >/run/fio.said 2>&1 || { touch /run/fio.failed; exit; }; \
     echo $n >/run/fio.new; mv /run/fio.new /run/fio.rounds; done; touch /run/fio.ended) >/dev/null 2>&1 & }";

/// Puts fio, which Debian's guest does not have, on its root disk while the guest does not run yet.
pub fn bring_fio(case: &Case, disk: &str) {
    let initrd = case.storage_initrd(Kernel::Cloud612);
    let folder = case.folder();
    case.node()
        .sh(&format!(
            "cd {folder} && busybox cpio -id -F {initrd} bin/fio 2>/dev/null && mkdir root && mount -o loop {disk} root && \
             cp bin/fio root/usr/local/bin/fio && umount root"
        ));
}

/// Keeps udev from looking at the disk at the end of each round, which costs more than the round.
const NO_UDEV: &str = "mkdir -p /run/udev/rules.d && echo 'KERNEL==\"vdb\", OPTIONS+=\"nowatch\"' >/run/udev/rules.d/99-fio.rules && \
     udevadm control --reload && udevadm trigger --settle --name-match=vdb";

/// fio's rounds in a guest.
pub struct Fio;

impl Fio {
    /// It begins.
    pub fn begin(console: &mut Console) -> Self {
        for command in [NO_UDEV, FIO] {
            console.run(command);
        }
        Self.goes_on(console);
        Self
    }

    /// Waits for the end of a round that ends after this; none has found anything wrong.
    pub fn goes_on(&self, console: &mut Console) {
        let rounds = "$(cat /run/fio.rounds 2>/dev/null || echo 0)";
        Self::until(
            &format!("[ {rounds} -gt $before ]"),
            &format!("before={rounds}"),
            console,
        );
    }

    /// Its last round ends.
    pub fn end(self, console: &mut Console) {
        Self::until("[ -e /run/fio.ended ]", "touch /run/fio.end", console);
    }

    /// Does something first, and waits for something else, or until a round finds that something is wrong.
    fn until(condition: &str, first: &str, console: &mut Console) {
        let command = format!(
            "{first}; until [ -e /run/fio.failed ] || {condition}; do sleep 0.2; done; \
             cat /run/fio.rounds; [ ! -e /run/fio.failed ] || {{ cat /run/fio.said; false; }}"
        );
        let rounds = console.run_within(&command, SLOW);
        println!("rounds of fio: {}", rounds.trim());
    }
}

/// iperf from the node to a guest, over one permanent connection. It sends a small amount ten times
/// per second. By default it would check its clock a thousand times per second.
pub struct Iperf<'case> {
    case: &'case Case,
    unit: String,
    /// Its output so far, one line per second.
    said: String,
}

impl<'case> Iperf<'case> {
    /// Begins to send to `guest`, at whose console this is.
    pub fn begin(case: &'case Case, console: &mut Console, guest: &str) -> Self {
        let listen = "iperf3 -s -D >/dev/null; until ss -lnt | grep -q :5201; do sleep 0.1; done";
        console.run(listen);
        let iperf = Self {
            case,
            unit: format!("{}-iperf", case.name()),
            said: format!("{}/iperf", case.folder()),
        };
        let Self { unit, said, .. } = &iperf;
        case.node()
            .sh(&format!(
                "systemd-run -q --collect --unit={unit} -p StandardOutput=file:{said} -p StandardError=file:{said} \
                     iperf3 -c {guest} -b 512K -l 4K --pacing-timer 100000 -t 86400 -i 1 -f k --forceflush"
            ));
        iperf.goes_on();
        iperf
    }

    /// Waits for three more seconds in which something was sent. It ends when its connection does.
    pub fn goes_on(&self) {
        let Self { unit, said, .. } = self;
        let more = format!("tail -n +$(($0+1)) {said} | grep Kbits/sec | grep -vc \" 0.00 Kbits/sec\"");
        let on = format!(
            "timeout {SLOW} sh -c 'until [ $({more}) -ge 3 ]; do systemctl is-active -q {unit} || exit; sleep 0.5; done' $(wc -l <{said}); \
             ended=$?; tail -n 3 {said}; exit $ended"
        );
        let last = self.case.node().sh(&on);
        println!("{last}");
    }
}

impl Drop for Iperf<'_> {
    fn drop(&mut self) {
        let _ = self.case.node().ssh(&format!("systemctl stop {}", self.unit));
    }
}
