//! A guest moves between two daemons of one node, each with a root of its own, and notices nothing but a moment.

use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Console, VmSpec};

/// How long the guest's shell may take to answer, in a slow node.
const PATIENCE: u64 = 60;
/// Longest time between two looks at its clock that the guest may see, in hundredths of a second.
const LONGEST_GAP: u64 = 300;

/// A daemon beside the node's own.
struct Daemon<'a> {
    case: &'a Case,
    unit: String,
    folder: String,
    port: u32,
}

impl<'a> Daemon<'a> {
    /// Daemons with certificates of one CA; `number` keeps them apart.
    fn start(case: &'a Case, number: u32) -> Self {
        let folder = format!("{}/{number}", case.folder().expect("folder"));
        let tls = format!("{}/tls", case.folder().expect("folder"));
        let unit = format!("{}-{number}", case.name());
        let port = 7600 + number;
        let first = 1_800_000_000 + number * 1000;
        let config = format!(
            "state_dir = '{folder}/state'\nrun_dir = '{folder}/run'\nlog_dir = '{folder}/log'\n\
             [vm_uids]\nfirst = {first}\ncount = 100\n\
             [tcp]\nlisten = '127.0.0.1:{port}'\ncertificate = '{tls}/server.crt'\nkey = '{tls}/server.key'\n\
             client_ca = '{tls}/ca.crt'\npeer_certificate = '{tls}/node.crt'\npeer_key = '{tls}/node.key'\n"
        );
        case.node()
            .sh(&format!(
                "mkdir -p {folder}/state {folder}/run {folder}/log && cat >{folder}/vmmd.toml <<'CONFIG'\n{config}CONFIG\n\
                 systemd-run -q --collect --unit={unit} -p Type=notify -p Delegate=yes -p KillMode=process \
                     /usr/lib/vmmd/vmmd --config {folder}/vmmd.toml"
            ))
            .expect("a daemon");
        Self {
            case,
            unit,
            folder,
            port,
        }
    }

    fn ctl(&self, command: &str) -> String {
        let command = format!("vmmctl --socket {}/run/vmmd.sock {command}", self.folder);
        self.case.node().sh(&command).expect("vmmctl")
    }

    fn console(&self, vm: &str) -> Console {
        let command = format!("vmmctl --socket {}/run/vmmd.sock console {vm}", self.folder);
        Console::open(self.case, &command).expect("console")
    }

    fn vms(&self) -> String {
        self.ctl("get vm -o name")
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let Self { unit, folder, .. } = self;
        // What a failed test leaves is reported by the test of leftovers.
        let _ = self.case.node().ssh(&format!(
            "vmmctl --socket {folder}/run/vmmd.sock delete --force --yes --all; systemctl stop {unit}"
        ));
    }
}

/// Looks at its clock without end, and writes down how often, and the longest time between two looks in hundredths of a second.
const WATCHER: &str = "{ (n=0; last=0; max=0; while :; do \
     read now rest </proc/uptime; now=${now%.*}${now#*.}; gap=$((now-last)); \
     [ $last -gt 0 ] && [ $gap -gt $max ] && max=$gap; last=$now; n=$((n+1)); \
     echo $n $max >/run/seen.new; mv /run/seen.new /run/seen; usleep 20000; done) >/dev/null 2>&1 & }";

/// What the watcher has written down.
fn seen(console: &mut Console) -> (u64, u64) {
    let text = console.run("cat /run/seen", PATIENCE).expect("read");
    let mut numbers = text
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|word| word.parse().ok());
    let (count, gap) = (numbers.next(), numbers.next());
    count.zip(gap).unwrap_or_else(|| panic!("{text:?}"))
}

#[test]
fn a_guest_moves_to_another_daemon_and_back_twice_and_its_clock_goes_on() {
    let case = Case::new("migration").expect("node");
    let tls = format!("{}/tls", case.folder().expect("folder"));
    case.node()
        .sh(&format!(
            "/usr/lib/vmmd/vmmd init-certs --dir {tls} --server-name 127.0.0.1 --client node=peer >/dev/null"
        ))
        .expect("certificates");
    let daemons = [Daemon::start(&case, 1), Daemon::start(&case, 2)];
    let name = case.name();
    let manifest = VmSpec::busybox(Kernel::Cloud612).manifest(name);
    daemons[0].ctl(&format!(
        "create -f - --start <<'MANIFEST'\n{manifest}\nMANIFEST\n"
    ));
    let mut console = daemons[0].console(name);
    console.until("GUEST-READY", BOOT).expect("boot");
    console.run(WATCHER, PATIENCE).expect("watch");
    console
        .run("until [ -s /run/seen ]; do usleep 50000; done", PATIENCE)
        .expect("watch");
    console
        .run(
            "head -c 8388608 /dev/urandom >/run/data; md5sum /run/data >/run/sum",
            PATIENCE,
        )
        .expect("fill memory");
    let (mut before, _) = seen(&mut console);
    for turn in 0..4 {
        drop(console);
        let (from, to) = (&daemons[turn % 2], &daemons[(turn + 1) % 2]);
        let told = from.ctl(&format!(
            "migrate {name} --to 127.0.0.1:{} --downtime-limit 2s 2>&1",
            to.port
        ));
        println!("{told}");
        assert!(!from.vms().contains(name), "it is not there any more");
        assert!(to.vms().contains(name));
        console = to.console(name);
        let (now, gap) = seen(&mut console);
        println!("turn {turn}: {now} looks at the clock, the longest gap is {gap}0 ms");
        assert!(now >= before, "{now} is before {before}");
        assert!(gap < LONGEST_GAP, "the guest's clock made a step of {gap}0 ms");
        let on = format!("until [ $(cut -d ' ' -f 1 /run/seen) -gt {now} ]; do usleep 50000; done");
        console.run(&on, PATIENCE).expect("it does not stand still");
        console
            .run("md5sum -c /run/sum >/dev/null", PATIENCE)
            .expect("memory is what it was");
        before = now;
    }
    let complaints = "! dmesg | grep -iE 'lockup|stall|unstable|BUG:|WARNING:|hung'";
    console
        .run(complaints, PATIENCE)
        .expect("the guest has no complaint");
}
