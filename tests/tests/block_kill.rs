//! A `vmm` that is killed at any moment loses no write that was confirmed.

use std::time::Duration;

use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::{Case, Node, confirmed, long};

/// Each kill is a round of four disks: raw and qcow2, with the host's cache and without it. The disks are used in turn by two VMs, with
/// one queue and with four. This many rounds, or `LONG` of them.
const SHORT: u32 = 2;
const LONG: u32 = 15;
/// The VM of a round, and the requests under way on each of its disks, in turn.
const ROUNDS: [(usize, usize); 4] = [(1, 32), (0, 4), (0, 32), (1, 4)];
const QUEUES: [u32; 2] = [1, 4];
/// After so many kills the disks are new, as a qcow2 is most fragile while its clusters are being allocated.
const KILLS_OF_A_DISK: u32 = 2;
/// The disks' size.
const DISK_MIB: u64 = 32;

/// A disk under test.
struct Subject<'case> {
    case: &'case Case,
    /// "raw-NONE": its format and its cache.
    name: String,
    format: Format,
    cache: &'static str,
    image: String,
    /// The same content as a raw image; that of a qcow2 is made by `qemu-img`.
    raw: String,
    state: String,
    device: &'static str,
}

impl<'case> Subject<'case> {
    fn new(case: &'case Case, format: Format, cache: &'static str, device: &'static str) -> Self {
        let name = format!("{format}-{cache}");
        let folder = case.folder();
        let image = format!("{folder}/{name}.{format}");
        Subject {
            case,
            raw: match format {
                Format::Raw => image.clone(),
                Format::Qcow2 => format!("{folder}/{name}.converted"),
            },
            image,
            state: format!("{folder}/{name}.state"),
            name,
            format,
            cache,
            device,
        }
    }

    fn node(&self) -> &Node {
        self.case.node()
    }

    /// Makes the image, or a new one that nothing was written to.
    fn make(&self) {
        let (image, state) = (&self.image, &self.state);
        self.node().sh(&format!("rm -f {image} {state}"));
        let made = self.case.image(&self.name, self.format, DISK_MIB);
        assert_eq!(made, *image);
    }

    fn disk(&self) -> Disk {
        Disk::new(&self.name.to_lowercase(), self.format, &self.image)
            .with("cache", format!("DISK_CACHE_{}", self.cache))
    }

    /// The command that writes to it in the guest.
    fn write(&self, round: u32, depth: usize) -> String {
        format!(
            "blkcheck write {} --round {round} --threads {depth} --prefix {} &",
            self.device, self.name
        )
    }

    /// Last confirmation of each thread in the guest's output.
    fn confirmed(&self, text: &str, depth: usize) -> Vec<u64> {
        confirmed::last(text, &self.name, depth)
    }

    /// Every confirmed operation is in the image, which is sound.
    fn verify(&self, blkcheck: &str, round: u32, confirmed: &[u64]) -> String {
        if self.format == Format::Qcow2 {
            let leaks = self
                .node()
                .check_qcow2(&self.image)
                .expect("the image is sound after the kill");
            eprintln!("round {round}, {}: {leaks} leaked clusters", self.name);
            self.node().sh(&format!(
                "qemu-img convert -f qcow2 -O raw {} {}",
                self.image, self.raw
            ));
        }
        let confirmed: Vec<String> = confirmed.iter().map(u64::to_string).collect();
        self.node().sh(&format!(
            "{blkcheck} verify {} --state {} --round {round} --confirmed {}",
            self.raw,
            self.state,
            confirmed.join(",")
        ))
    }
}

/// Lets the guest write until each disk has had something confirmed, and some time more.
fn write_until_killed(
    vm: &Vm<'_>,
    console: &mut Console,
    subjects: &[Subject<'_>],
    (round, depth): (u32, usize),
    more: Duration,
) -> String {
    for subject in subjects {
        console.type_line(&subject.write(round, depth));
    }
    let names: Vec<&str> = subjects.iter().map(|subject| subject.name.as_str()).collect();
    confirmed::wait(console, &names, depth).expect("confirmations");
    let seconds = more.as_secs_f64();
    let pid = vm.pid();
    vm.node().sh(&format!("sleep {seconds}; kill -9 {pid}"));
    // The stream ends with the run. Only operations in its output count as confirmed.
    console
        .try_until("never printed", 60)
        .expect_err("the console ends");
    console.text()
}

/// The guest sees what another reader of the images sees.
fn compare(console: &mut Console, subjects: &[Subject<'_>], blkcheck: &str) {
    for subject in subjects {
        let guest = console.run(&format!("blkcheck digest {}", subject.device));
        let node = subject.node().sh(&format!("{blkcheck} digest {}", subject.raw));
        assert_eq!(
            guest.trim(),
            node.trim(),
            "what the guest reads of {}",
            subject.name
        );
    }
}

fn spec(case: &Case, cores: u32, subjects: &[Subject<'_>]) -> VmSpec {
    let spec = case.storage_guest(Kernel::Cloud612).cores(cores);
    subjects
        .iter()
        .fold(spec, |spec, subject| spec.with_disk(subject.disk()))
}

#[test]
fn confirmed_writes_are_there_after_every_kill() {
    let case = Case::new("blk-kill");
    let blkcheck = case.blkcheck();
    let subjects = [
        Subject::new(&case, Format::Raw, "NONE", "/dev/vda"),
        Subject::new(&case, Format::Raw, "WRITEBACK", "/dev/vdb"),
        Subject::new(&case, Format::Qcow2, "NONE", "/dev/vdc"),
        Subject::new(&case, Format::Qcow2, "WRITEBACK", "/dev/vdd"),
    ];
    subjects.iter().for_each(Subject::make);
    // Any numbers will do; they differ from run to run.
    let seed = u64::from(std::process::id());
    // A disk has as many queues as its VM has cores.
    let vms = QUEUES.map(|cores| {
        let spec = spec(&case, cores, &subjects);
        Vm::create(&case, &format!("-{cores}"), &spec)
    });
    let kills = if long() { LONG } else { SHORT };
    for (round, (vm, depth)) in (1..=kills).zip(ROUNDS.into_iter().cycle()) {
        let vm = &vms[vm];
        vm.ctl("start");
        let mut console = vm.booted();
        if round == kills {
            compare(&mut console, &subjects, &blkcheck);
        }
        let more = Duration::from_millis((seed * 7919 + u64::from(round) * 617) % 2500);
        let text = write_until_killed(vm, &mut console, &subjects, (round, depth), more);
        vm.wait_phase("FAILED", 60);
        std::thread::scope(|scope| {
            for subject in &subjects {
                let confirmed = subject.confirmed(&text, depth);
                assert!(confirmed.iter().sum::<u64>() > 0, "nothing was confirmed: {text}");
                let blkcheck = &blkcheck;
                scope.spawn(move || {
                    let found = subject.verify(blkcheck, round, &confirmed);
                    eprintln!(
                        "round {round}, {}, killed {more:?} later: {}",
                        subject.name,
                        found.trim()
                    );
                });
            }
        });
        if round % KILLS_OF_A_DISK == 0 && round < kills {
            subjects.iter().for_each(Subject::make);
        }
    }
}
