//! A built machine: its parts, and the order in which they stop, continue and reset.

use std::{
    fs::File,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use devices::display::server::Server;

use devices::{
    component::{Component, ComponentError},
    interrupt::IrqLine,
    legacy::pm::PowerButton,
    pci::{HotPlug, PciRoot},
    serial::{self, SerialPort},
    virtio::{
        balloon::{BalloonControl, PAGE},
        channels::OpenChannels,
        console::ConsoleControl,
        vsock::{Direction, VsockHost},
    },
    watchdog::WatchdogTimer,
};
use tracing::{error, warn};
use vmm_protocol::{
    state::{MachineHeader, PciDevice, SnapshotInfo},
    vmm::{self, DiskStatsReply, ErrorKind, ResizeConsole, request::Op},
};

use super::{boot::Entry, disks::Disks, image::Image, nics::Nics, shares::Shares, stats, throttle::Throttle};
use crate::{
    kvm::{AddressSpaces, GuestTime, IrqChipState, StatsReader, Vm},
    lifecycle::{self, Answer, Detached, Failure, Notice, Notifier, Progress, Reset, Token},
    memory::GuestRam,
    migration::Sender,
    snapshot::saving::{GoesOn, Purpose, Report, Saving},
    vcpu::Vcpus,
};

/// How long a pause waits for requests that are under way.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a try of a reset waits for a device that leaves: the driver serves its requests between two tries.
const RESET_WAIT: Duration = Duration::from_millis(250);

/// A virtio-console for others than the driver. The device itself is a component.
pub(super) struct VirtioConsole {
    pub(super) control: ConsoleControl,
    /// `None` if no client can connect.
    pub(super) server: Option<serial::Server>,
}

/// See the module. Fields are dropped in order: first the vCPUs, which use all else.
pub struct Machine {
    pub(super) vcpus: Vcpus,
    /// In the order of assembly. Excludes hot-plug devices, and the serial port, which ends
    /// separately.
    pub(super) components: Vec<Box<dyn Component>>,
    pub(super) balloon: Option<BalloonControl>,
    pub(super) disks: Disks,
    pub(super) serial: SerialPort,
    pub(super) console: Option<VirtioConsole>,
    /// The channels that programs of the guest have open, of a machine with channels.
    pub(super) channels: Option<Arc<OpenChannels>>,
    /// The host's side of the socket device, of a machine with one.
    pub(super) vsock: Option<Arc<VsockHost>>,
    /// The time of the watchdog, of a machine with one.
    pub(super) watchdog: Option<WatchdogTimer>,
    /// Shows the screen. The screen has no saved state: its clients reconnect.
    pub(super) screen: Option<Server>,
    pub(super) nics: Nics,
    pub(super) shares: Shares,
    /// PCI slots of those components that have one, by their names.
    pub(super) slots: Vec<(u8, String)>,
    pub(super) pci: Arc<PciRoot>,
    pub(super) hotplug: Arc<HotPlug>,
    pub(super) spaces: AddressSpaces,
    pub(super) power_button: Arc<PowerButton>,
    pub(super) image: Image,
    pub(super) ram: GuestRam,
    pub(super) vm: Arc<Vm>,
    pub(super) vm_stats: Option<StatsReader>,
    /// The interrupt controllers after power-on.
    pub(super) irqchip: IrqChipState,
    /// The guest's time at the pause.
    pub(super) paused_at: Option<GuestTime>,
    /// The images of disks that the guest can write to are not locked; the machine is paused.
    pub(super) unlocked: bool,
    /// kvmclock catches up with the real time after a pause.
    pub(super) sync_clock: bool,
    /// Configuration from the assembly, except for the devices.
    pub(super) header: MachineHeader,
    /// The snapshot that is being taken.
    pub(super) saving: Option<Saving>,
    /// Devices of the machine at the start of the snapshot.
    pub(super) saving_devices: Vec<PciDevice>,
    /// The vCPUs stand still for a part of the time, of a machine that runs.
    pub(super) throttle: Option<Throttle>,
    /// Notifies the guest of a change of its generation ID.
    pub(super) generation_line: Arc<dyn IrqLine>,
    pub(super) notifier: Notifier,
    /// The guest's kernel has panicked and was not reset since: the report of a vCPU sets this, before the driver reads its notice.
    pub(super) panicked: Arc<AtomicBool>,
}

impl Machine {
    /// Has the bootstrap processor begin there.
    pub(super) fn enter_at(&mut self, entry: Entry) -> Result<(), Failure> {
        Ok(self.vcpus.set_entry(move |special| entry.registers(special))?)
    }

    /// All that there are now, in the order in which they pause; the serial port is the last.
    pub(super) fn parts(&mut self) -> Vec<&mut dyn Component> {
        let mut parts: Vec<&mut dyn Component> = Vec::new();
        for component in &mut self.components {
            parts.push(component.as_mut());
        }
        parts.extend(self.shares.components());
        parts.extend(self.nics.components());
        parts.extend(self.disks.components());
        parts.push(&mut self.serial);
        parts
    }

    /// Gives the guest of a restored machine another generation id, before it continues. Machines with firmware have no generation id.
    pub(super) fn renew_generation(&mut self) -> Result<(), Failure> {
        if self.image.has_generation() {
            self.image.write_generation(self.ram.memory())?;
            self.generation_line.pulse();
        }
        Ok(())
    }

    /// Sends a non-maskable interrupt to the vCPUs that take one.
    fn inject_nmi(&mut self) -> Result<(), Failure> {
        self.vcpus.stop()?;
        let sent = self.vcpus.inject_nmi();
        if !self.throttle.as_ref().is_some_and(Throttle::stands) {
            self.vcpus.release()?;
        }
        Ok(sent?)
    }

    /// Opens a connection of the socket device.
    fn open_vsock(&self, open: vmm::OpenVsock, socket: OwnedFd) -> Result<(), Failure> {
        let Some(host) = &self.vsock else {
            let message = "the machine has no socket device";
            return Err(Failure::of(ErrorKind::NotFound, message));
        };
        let direction = match open.accept {
            true => Direction::Accept,
            false => Direction::Connect,
        };
        host.open(direction, open.port, socket)
            .map_err(|_| Failure::of(ErrorKind::Resources, "too many connections wait for the guest"))
    }

    /// Waits until nothing that is off the bus touches guest memory any more; gives what still does at `deadline`.
    fn wait_for_leaving(&mut self, deadline: Instant) -> Result<Option<String>, Failure> {
        if let Some(disk) = self.disks.wait_for_leaving(deadline)? {
            return Ok(Some(disk));
        }
        if let Some(nic) = self.nics.wait_for_leaving(deadline)? {
            return Ok(Some(nic));
        }
        self.shares.wait_for_leaving(deadline)
    }

    /// Notes a save that has begun. When it has not, kernels may serve NICs again.
    fn save_with(&mut self, begun: Result<Saving, Failure>) -> Result<(), Failure> {
        if begun.is_err() {
            // Waits for nothing.
            let _free = self.nics.keep_queues(false);
        }
        self.saving = Some(begun?);
        self.saving_devices = self.current_header().devices;
        Ok(())
    }

    /// The vCPUs run all the time again.
    fn unthrottle(&mut self) -> Result<(), Failure> {
        if self.throttle.take().is_some_and(|it| it.stands()) {
            self.vcpus.release()?;
        }
        Ok(())
    }

    fn set_balloon(&mut self, bytes: u64) -> Result<(), Failure> {
        let Some(balloon) = &self.balloon else {
            return Err(Failure::of(ErrorKind::NotFound, "the machine has no balloon"));
        };
        if bytes > self.ram.size() || !bytes.is_multiple_of(PAGE) {
            let message = "a balloon holds at most the machine's memory, and whole pages of 4 KiB";
            return Err(Failure::of(ErrorKind::Invalid, message));
        }
        balloon.set_target(bytes);
        Ok(())
    }

    fn resize_console(&mut self, size: ResizeConsole) -> Result<(), Failure> {
        let characters = |number| {
            u16::try_from(number).map_err(|_| {
                Failure::of(
                    ErrorKind::Invalid,
                    "a terminal has at most 65535 characters each way",
                )
            })
        };
        let (columns, rows) = (characters(size.columns)?, characters(size.rows)?);
        let console = self
            .console
            .as_ref()
            .ok_or_else(|| Failure::of(ErrorKind::NotFound, "the machine has no virtio-console"))?;
        console.control.resize(columns, rows);
        Ok(())
    }

    fn pause_components(&mut self, deadline: Instant) -> Result<(), Failure> {
        if let Some(which) = self.wait_for_leaving(deadline)? {
            return Err(Failure::of(
                ErrorKind::Internal,
                format!("requests of {which}, which is being taken away, did not end"),
            ));
        }
        let mut parts = self.parts();
        for index in 0..parts.len() {
            let Some((component, before)) = parts.get_mut(..=index).and_then(<[_]>::split_last_mut) else {
                break;
            };
            if let Err(error) = component.pause(deadline) {
                let message = format!("pausing {}: {}", component.name(), lifecycle::with_causes(&error));
                // A part that failed to pause continues on its own; the parts paused before it need
                // a resume.
                for component in before.iter_mut().rev() {
                    if let Err(error) = component.resume() {
                        error!(part = component.name(), %error, "resuming after a failed pause");
                    }
                }
                return Err(Failure::of(ErrorKind::Internal, message));
            }
        }
        Ok(())
    }

    fn resume_components(&mut self) -> Result<(), Failure> {
        for component in self.parts().into_iter().rev() {
            component.resume().map_err(|error| {
                Failure::of(
                    ErrorKind::Internal,
                    format!(
                        "resuming {}: {}",
                        component.name(),
                        lifecycle::with_causes(&error)
                    ),
                )
            })?;
        }
        Ok(())
    }
}

/// A part of a request.
fn given<T>(part: Option<T>, which: &str) -> Result<T, Failure> {
    part.ok_or_else(|| Failure::of(ErrorKind::Invalid, format!("the request names no {which}")))
}

impl lifecycle::Machine for Machine {
    fn pause(&mut self) -> Result<(), Failure> {
        self.throttle = None;
        self.vcpus.stop()?;
        let time = self.vcpus.time().map_err(Failure::from);
        let paused = time.and_then(|time| {
            self.pause_components(Instant::now() + PAUSE_TIMEOUT)?;
            Ok(time)
        });
        match paused {
            Ok(time) => {
                self.paused_at = Some(time);
                Ok(())
            }
            Err(failure) => {
                self.vcpus.release()?;
                Err(failure)
            }
        }
    }

    fn resume(&mut self) -> Result<(), Failure> {
        if self.unlocked {
            self.disks.lock()?;
            self.unlocked = false;
        }
        if let Some(then) = self.paused_at {
            if self.sync_clock {
                self.vm.set_clock_caught_up(then.clock)?;
            } else {
                self.vm.set_clock(then.clock)?;
            }
            // A failure is only logged. A guest detects counters that ran on, but a guest that does
            // not resume is lost.
            if let Err(error) = self.vcpus.go_on_from(then) {
                warn!(
                    error = lifecycle::with_causes(&error),
                    "setting the counters back"
                );
            }
        }
        self.resume_components()?;
        self.paused_at = None;
        // One that has asked for a reset must not run on behind it.
        Ok(self.vcpus.release()?)
    }

    fn reset(&mut self) -> Result<Reset, Failure> {
        self.throttle = None;
        self.vcpus.stop()?;
        // The new guest finds the current slots. The requested ejects complete here: the old guest
        // does not need the devices, and the callers still wait.
        for slot in self.hotplug.reset() {
            self.pci.remove(slot, &self.spaces.mmio);
        }
        self.hotplug.power_on(|slot| self.pci.is_taken(slot));
        if let Some(which) = self.wait_for_leaving(Instant::now() + RESET_WAIT)? {
            return Ok(Reset::Waits(which));
        }
        for component in self.parts() {
            match component.reset() {
                Ok(()) => {}
                Err(ComponentError::DrainTimeout) => return Ok(Reset::Waits(component.name().to_owned())),
                Err(error) => {
                    let (name, causes) = (component.name(), lifecycle::with_causes(&error));
                    return Err(Failure::of(
                        ErrorKind::Internal,
                        format!("resetting {name}: {causes}"),
                    ));
                }
            }
        }
        self.pci.reset(&self.spaces.mmio);
        self.irqchip.restore(&self.vm)?;
        self.power_button.refresh();
        self.vcpus.reset()?;
        self.ram.clear()?;
        self.panicked.store(false, Ordering::Relaxed);
        let entry = self.image.load(&self.ram)?;
        self.enter_at(entry)?;
        Ok(Reset::Done)
    }

    fn start(&mut self) -> Result<(), Failure> {
        Ok(self.vcpus.run()?)
    }

    fn operate(&mut self, token: Token, op: Op, fds: Vec<OwnedFd>) -> Result<Progress, Failure> {
        match op {
            Op::PowerButton(_) => self.power_button.press(),
            Op::AttachDisk(attach) => {
                self.disks.attach(token, &given(attach.disk, "disk")?, fds)?;
                return Ok(Progress::Pending);
            }
            Op::ChangeMedium(change) => {
                let disk = given(change.disk, "disk")?;
                self.disks.change_medium(token, &disk, change.force, fds)?;
                return Ok(Progress::Pending);
            }
            Op::DetachDisk(detach) => return self.disks.detach(token, &detach.name, detach.force),
            Op::ResizeDisk(resize) => {
                let capacity = (resize.capacity_bytes != 0).then_some(resize.capacity_bytes);
                self.disks.resize(&resize.name, capacity)?;
            }
            Op::SetRateLimit(set) => {
                let target = given(set.target, "disk or group")?;
                let limit = (&given(set.limit, "limit")?).into();
                self.disks.set_rate_limit(&target, limit)?;
            }
            Op::UnlockDisks(_) => {
                // When one can't, the next resume takes the others' locks again.
                self.unlocked = true;
                self.disks.unlock()?;
            }
            Op::AttachNic(attach) => self.nics.attach(&given(attach.nic, "NIC")?, fds)?,
            Op::DetachNic(detach) => return self.nics.detach(token, &detach.name, detach.force),
            Op::UpdateNic(update) => self.nics.update(&update)?,
            Op::AttachShare(attach) => {
                if self.saving.is_some() {
                    // No dirty log would contain the writes of the share's process to memory.
                    return Err(Failure::of(
                        ErrorKind::State,
                        "a snapshot is being taken, or the machine is sent",
                    ));
                }
                self.shares.attach(&given(attach.share, "share")?, fds)?;
            }
            Op::DetachShare(detach) => return self.shares.detach(token, &detach.name, detach.force),
            Op::SetShareBackend(set) => {
                let socket = given(lifecycle::descriptor(fds, set.fd), "socket")?;
                self.shares.set_backend(&set.name, socket)?;
            }
            Op::SetBalloon(set) => self.set_balloon(set.target_bytes)?,
            Op::InjectNmi(_) => self.inject_nmi()?,
            Op::SendBreak(_) => self.serial.send_break(),
            Op::ResizeConsole(size) => self.resize_console(size)?,
            Op::OpenVsock(open) => {
                let socket = given(lifecycle::descriptor(fds, open.socket_fd), "socket")?;
                self.open_vsock(open, socket)?;
            }
            Op::GetDiskStats(_) => {
                let disks = self.disks.stats();
                return Ok(Progress::Answered(Answer::DiskStats(DiskStatsReply { disks })));
            }
            Op::GetMachineStats(_) => {
                return Ok(Progress::Answered(Answer::MachineStats(stats::of(self))));
            }
            Op::Hello(_)
            | Op::GetStatus(_)
            | Op::Boot(_)
            | Op::Pause(_)
            | Op::Resume(_)
            | Op::ResetMachine(_)
            | Op::Stop(_)
            | Op::Save(_)
            | Op::Release(_)
            | Op::Send(_) => {
                return Err(Failure::of(ErrorKind::Internal, "not an operation on a device"));
            }
        }
        Ok(Progress::Done)
    }

    fn collect_detached(&mut self) -> Vec<Detached> {
        let mut gone = self.disks.collect_detached();
        gone.extend(self.nics.collect_detached());
        gone.extend(self.shares.collect_detached());
        gone
    }

    fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)> {
        let mut answers = self.disks.collect_answers();
        answers.extend(self.nics.collect_answers());
        answers.extend(self.shares.collect_answers());
        answers
    }

    fn open_channels(&self) -> Vec<String> {
        self.channels
            .as_ref()
            .map(|open| open.names())
            .unwrap_or_default()
    }

    fn next_deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.disks.next_deadline(),
            self.nics.next_deadline(),
            self.shares.next_deadline(),
            self.throttle.as_ref().map(Throttle::due),
            self.watchdog.as_ref().and_then(WatchdogTimer::due),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn may_have_panicked(&mut self, printed: u64) -> Result<bool, Failure> {
        if self.serial.printed() != printed {
            return Ok(false);
        }
        self.vcpus.stop()?;
        let lives = self.vcpus.lives();
        if !self.throttle.as_ref().is_some_and(Throttle::stands) {
            self.vcpus.release()?;
        }
        Ok(!lives?)
    }

    fn holds_requests(&self) -> bool {
        self.disks.holds_requests()
    }

    fn commit_disks(&mut self) -> Result<(), Failure> {
        self.disks.commit()
    }

    fn begin_snapshot(&mut self, file: File, runs: bool) -> Result<(), Failure> {
        if runs {
            self.shares.write_unseen()?;
        }
        self.nics.keep_queues(runs)?;
        let notifier = self.notifier.clone();
        let tell = move |event| notifier.notify(Notice::Snapshot(event));
        let begun = Saving::begin(&self.vm, self.ram.memory(), file, runs, tell);
        self.save_with(begun)
    }

    fn begin_migration(&mut self, socket: File, purpose: Purpose, send: &vmm::Send) -> Result<(), Failure> {
        self.shares.write_unseen()?;
        let disks = self.disks.mirror(&send.disks)?;
        let boot = send.boot_files.then(|| self.image.boot_files()).transpose()?;
        self.nics.keep_queues(true)?;
        let notifier = self.notifier.clone();
        let tell = move |event| notifier.notify(Notice::Snapshot(event));
        let mut sender = Sender::new(socket, self.ram.memory(), disks);
        if send.header_first {
            sender = sender.with_header(self.current_header());
        }
        if let Some(boot) = boot {
            sender = sender.with_boot(boot);
        }
        let sink = Box::new(sender);
        let begun = Saving::into_sink(&self.vm, self.ram.memory(), sink, (purpose, true), tell);
        self.save_with(begun)
    }

    fn throttle(&mut self, percent: u8) -> Result<(), Failure> {
        match &mut self.throttle {
            Some(throttle) if percent > 0 => throttle.set(percent),
            Some(_) => self.unthrottle()?,
            None => self.throttle = Throttle::new(percent, Instant::now()),
        }
        Ok(())
    }

    fn keep_time(&mut self) -> Result<(), Failure> {
        let expires = |timer: &WatchdogTimer| timer.expires(Instant::now());
        if self.watchdog.as_ref().is_some_and(expires) {
            self.notifier.notify(Notice::WatchdogExpired);
        }
        match self.throttle.as_mut().and_then(|it| it.turn(Instant::now())) {
            Some(true) => Ok(self.vcpus.stop()?),
            Some(false) => Ok(self.vcpus.release()?),
            None => Ok(()),
        }
    }

    fn complete_snapshot(&mut self, description: Vec<u8>, panicked: bool) -> Result<GoesOn, Failure> {
        self.panicked.fetch_or(panicked, Ordering::Relaxed);
        let machine = self.save()?;
        if self.current_header().devices != self.saving_devices {
            return Err(Failure::of(
                ErrorKind::State,
                "the guest has ejected a device meanwhile: try again",
            ));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let info = SnapshotInfo {
            build: env!("CARGO_PKG_VERSION").to_owned(),
            time_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            platform: self.header.platform.clone(),
            description,
        };
        self.saving
            .as_mut()
            .ok_or_else(no_snapshot)?
            .complete(info, machine)
    }

    fn end_snapshot(&mut self) -> Result<Report, Failure> {
        let ended = self.saving.take().ok_or_else(no_snapshot)?.end();
        self.unthrottle()?;
        self.nics.keep_queues(false)?;
        ended
    }

    fn give_up_snapshot(&mut self) {
        if let Some(saving) = &mut self.saving {
            saving.give_up();
        }
        // One whose vCPUs are gone ends for that reason.
        let _gone = self.unthrottle();
        // Waits for nothing.
        let _free = self.nics.keep_queues(false);
    }

    fn halt(&mut self) {
        self.saving = None;
        self.throttle = None;
        if let Err(error) = self.vcpus.stop() {
            error!(error = lifecycle::with_causes(&error), "stopping the vCPUs");
        }
        let deadline = Instant::now() + PAUSE_TIMEOUT;
        let rest = if self.paused_at.is_none() {
            self.pause_components(deadline)
        } else {
            self.wait_for_leaving(deadline).map(drop)
        };
        if let Err(failure) = rest {
            warn!(error = failure.message, "devices did not come to rest at the end");
        }
        if let Some(screen) = &mut self.screen
            && !screen.stop()
        {
            error!("the screen's thread had failed");
        }
        if let Some(server) = self.console.as_mut().and_then(|console| console.server.as_mut())
            && !server.stop()
        {
            error!("the virtio-console's thread had failed");
        }
        self.serial.finish();
    }
}

fn no_snapshot() -> Failure {
    Failure::of(ErrorKind::Internal, "no snapshot is being taken")
}
