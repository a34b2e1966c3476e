//! A loss of power under the node's file system, while a guest writes.
//!
//! The images are on ext4 on dm-log-writes, which writes down what became durable in which order. A moment is marked in that log
//! after confirmations of the guest were seen. Afterwards the disk is made as a loss of power at that moment leaves it, with some of
//! the writes that were not flushed; it is mounted, and everything that had been confirmed is looked for.

use crate::node::Kernel;
use crate::storage::{Disk, Format};
use crate::vm::Vm;
use crate::{Case, Node, confirmed};

/// Moments at which the power is lost, in one run of the guest.
const MOMENTS: u32 = 4;
/// Requests that the guest has under way on each disk.
const DEPTH: usize = 32;
const DISK_MIB: u64 = 16;
/// Size of the file system with the images, in sectors.
const SECTORS: u64 = 256 << 11;

/// ext4 on dm-log-writes on loop devices, mounted at `folder`; unmounted and removed when dropped.
///
/// A loop device between the two allows only one flush at a time. dm-log-writes collects the writes
/// that a flush covers at its start, and logs them at its end. With two concurrent flushes, the
/// later one's writes could precede the earlier one's in the log.
struct Logged<'case> {
    node: &'case Node,
    name: String,
    base: String,
    folder: String,
}

impl<'case> Logged<'case> {
    /// `options` are those of the mount.
    fn new(case: &'case Case, options: &str) -> Self {
        let base = case.folder();
        let logged = Logged {
            node: case.node(),
            name: case.name().to_owned(),
            folder: format!("{base}/logged"),
            base,
        };
        logged.sh(&format!(
            "modprobe dm-log-writes && cd {base} && mkdir logged after && truncate -s {bytes} disk && truncate -s 8G log && \
             echo \"0 {SECTORS} log-writes $(losetup -f --show disk) $(losetup -f --show log)\" | dmsetup create {name} && \
             top=$(losetup --direct-io=on -f --show /dev/mapper/{name}) && mkfs.ext4 -q $top && mount -o {options} $top logged",
            base = logged.base,
            name = logged.name,
            bytes = SECTORS * 512,
        ));
        logged
    }

    #[track_caller]
    fn sh(&self, script: &str) -> String {
        self.node.sh(script)
    }

    /// Writes a mark into the log. All writes confirmed so far are durable at the mark.
    fn mark(&self, moment: u32) {
        self.sh(&format!("dmsetup message {} 0 mark moment-{moment}.", self.name));
    }

    /// Ends the writes. Checks that the log contains all of them in order.
    fn end(&self, blkcheck: &str) {
        self.sh(&format!(
            "cd {base} && umount logged && losetup -d $(losetup -j /dev/mapper/{name} -O NAME -n) && udevadm settle && \
             dmsetup remove --retry {name} && truncate -s {bytes} whole && \
             {blkcheck} replay $(losetup -j log -O NAME -n) --onto whole && cmp whole disk && rm whole",
            base = self.base,
            name = self.name,
            bytes = SECTORS * 512,
        ));
    }

    /// Mounts at `after` the disk as a loss of power at `moment` leaves it. Returns the reason if
    /// it contains no valid file system.
    fn lose_power(&self, blkcheck: &str, moment: u32) -> Result<(), String> {
        let seed = u64::from(std::process::id()) << 8 | u64::from(moment);
        let found = self.sh(&format!(
            "cd {} && rm -f then && truncate -s {} then && {blkcheck} replay $(losetup -j log -O NAME -n) --onto then \
             --mark moment-{moment}. --seed {seed}",
            self.base,
            SECTORS * 512,
        ));
        eprintln!("moment {moment}: {}", found.trim());
        let mounted = self
            .node
            .try_sh(&format!("cd {} && mount -o loop then after", self.base));
        mounted
            .map(drop)
            .map_err(|error| format!("moment {moment}: {error:#}"))
    }

    /// Returns the errors of the images after a loss of power at `moment`. `text` is the guest's
    /// output until then.
    fn after_a_loss(&self, blkcheck: &str, moment: u32, text: &str) -> Vec<String> {
        if let Err(error) = self.lose_power(blkcheck, moment) {
            return vec![error];
        }
        let after = format!("{}/after", self.base);
        let look = |subject: Subject| {
            let confirmed = subject.confirmed(text);
            assert!(confirmed.iter().sum::<u64>() > 0, "nothing was confirmed: {text}");
            match subject.verify(self.node, &after, blkcheck, &confirmed) {
                Ok(found) => {
                    eprintln!("moment {moment}, {}: {}", subject.name(), found.trim());
                    None
                }
                Err(error) => Some(format!("moment {moment}, {}: {error}", subject.name())),
            }
        };
        let wrong = std::thread::scope(|scope| {
            let looks = SUBJECTS.map(|subject| scope.spawn(move || look(subject)));
            looks
                .into_iter()
                .filter_map(|look| look.join().expect("the images can be looked at"))
                .collect()
        });
        self.sh(&format!("umount {after}"));
        wrong
    }
}

impl Drop for Logged<'_> {
    fn drop(&mut self) {
        let _ = self.node.ssh(&format!(
            "cd {base}; umount after; umount -l logged; losetup -d $(losetup -j /dev/mapper/{name} -O NAME -n); dmsetup remove --force {name}; \
             losetup -d $(losetup -j disk -O NAME -n) $(losetup -j log -O NAME -n)",
            base = self.base,
            name = self.name,
        ));
    }
}

/// A disk of the guest: its format, its cache, its device.
#[derive(Clone, Copy)]
struct Subject(Format, &'static str, &'static str);

const SUBJECTS: [Subject; 4] = [
    Subject(Format::Raw, "NONE", "/dev/vda"),
    Subject(Format::Raw, "WRITEBACK", "/dev/vdb"),
    Subject(Format::Qcow2, "NONE", "/dev/vdc"),
    Subject(Format::Qcow2, "WRITEBACK", "/dev/vdd"),
];

impl Subject {
    fn name(self) -> String {
        format!("{}-{}", self.0, self.1)
    }

    fn image(self, folder: &str) -> String {
        format!("{folder}/{}", self.name())
    }

    /// Returns each thread's last confirmation in the guest's output.
    fn confirmed(self, text: &str) -> Vec<u64> {
        confirmed::last(text, &self.name(), DEPTH)
    }

    /// Checks that the image in `folder` contains all confirmed operations. Returns a description
    /// of an error.
    fn verify(self, node: &Node, folder: &str, blkcheck: &str, confirmed: &[u64]) -> Result<String, String> {
        let image = self.image(folder);
        let raw = if self.0 == Format::Qcow2 {
            node.check_qcow2(&image).map_err(|error| format!("{error:#}"))?;
            let convert = format!("qemu-img convert -f qcow2 -O raw {image} {image}.raw");
            node.try_sh(&convert).map_err(|error| format!("{error:#}"))?;
            format!("{image}.raw")
        } else {
            image
        };
        let confirmed: Vec<String> = confirmed.iter().map(u64::to_string).collect();
        let verify = format!(
            "{blkcheck} verify {raw} --state {raw}.state --round 1 --confirmed {}",
            confirmed.join(",")
        );
        node.try_sh(&verify).map_err(|error| format!("{error:#}"))
    }
}

/// Simulates losses of power while a guest writes. The guest has four disks (raw and qcow2, with
/// and without the host's cache), each with as many queues as `cores`. `mount` contains options for
/// the file system of the images. Returns the errors of the first moment that has any.
///
/// # Panics
///
/// Panics if the node or the guest misbehaves.
pub fn lose(case: &Case, cores: u32, mount: &str) -> Vec<String> {
    let (node, blkcheck) = (case.node(), case.blkcheck());
    let logged = Logged::new(case, mount);
    let mut spec = case.storage_guest(Kernel::Cloud612).cores(cores);
    for subject in SUBJECTS {
        let image = subject.image(&logged.folder);
        node.sh(&format!(
            "qemu-img create -q -f {} {image} {DISK_MIB}M && sync -f {image}",
            subject.0
        ));
        let disk = Disk::new(&subject.name().to_lowercase(), subject.0, &image);
        spec = spec.with_disk(disk.with("cache", format!("DISK_CACHE_{}", subject.1)));
    }
    let (vm, mut console) = Vm::boot(case, "", &spec);
    for subject in SUBJECTS {
        let write = format!(
            "blkcheck write {} --round 1 --threads {DEPTH} --prefix {} &",
            subject.2,
            subject.name()
        );
        console.type_line(&write);
    }
    let mut seen = Vec::new();
    for moment in 1..=MOMENTS {
        let names = SUBJECTS.map(Subject::name);
        confirmed::wait(&mut console, &names.each_ref().map(String::as_str), DEPTH).expect("confirmations");
        seen.push((moment, console.text()));
        logged.mark(moment);
    }
    let pid = vm.pid();
    node.sh(&format!("kill -9 {pid}"));
    vm.wait_phase("FAILED", 60);
    vm.ctl("delete");
    logged.end(&blkcheck);

    for (moment, text) in seen {
        let wrong = logged.after_a_loss(&blkcheck, moment, &text);
        if !wrong.is_empty() {
            return wrong;
        }
    }
    Vec::new()
}
