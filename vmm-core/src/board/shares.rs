//! The shares of a machine: directories of the node that other processes serve. They come and go while it lives.

use std::{
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    sync::Arc,
};

use devices::{pci::HotPlug, virtio::fs::FsControl};
use vmm_protocol::{
    machine,
    vmm::{self, ErrorKind, ShareStats},
};

use super::{
    assemble::{Fds, Sockets, share},
    plugs::{Plugged, Plugs},
};
use crate::lifecycle::{Failure, Pluggable};

/// See the module.
pub(super) struct Shares {
    plugs: Plugs<FsControl>,
    /// The machine's memory can be mapped by other processes.
    has_shared_memory: bool,
}

impl Deref for Shares {
    type Target = Plugs<FsControl>;

    fn deref(&self) -> &Plugs<FsControl> {
        &self.plugs
    }
}

impl DerefMut for Shares {
    fn deref_mut(&mut self) -> &mut Plugs<FsControl> {
        &mut self.plugs
    }
}

impl Shares {
    /// Shares of a machine that notifies its guest of changes through `hotplug`.
    pub fn new(sockets: Sockets, hotplug: Arc<HotPlug>, has_shared_memory: bool) -> Self {
        Self {
            plugs: Plugs::new(Pluggable::Share, sockets, hotplug),
            has_shared_memory,
        }
    }

    /// Adds a share that exists when the machine is switched on.
    pub fn fit(&mut self, spec: &machine::Share, fds: &mut Fds) -> Result<(), Failure> {
        let share = share::plug(&self.plugs.sockets, spec, fds)?;
        self.plugs.fit(share);
        Ok(())
    }

    /// Plugs in a share, and notifies the guest.
    pub fn attach(&mut self, wire: &vmm::Share, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        let spec = machine::Share::new(wire, fds.len())?;
        if !self.has_shared_memory {
            return Err(Failure::of(
                ErrorKind::State,
                "the machine's memory is private, and what serves a share has to map it",
            ));
        }
        self.plugs.check_free(&spec.name, spec.slot)?;
        let share = share::plug(&self.plugs.sockets, &spec, &mut Fds::new(fds))?;
        self.plugs.attach(share);
        Ok(())
    }

    /// Connects the share `name` to another process, behind this connected socket, after the old
    /// process has ended.
    pub fn set_backend(&mut self, name: &str, socket: OwnedFd) -> Result<(), Failure> {
        let share = self.plugs.get(name)?;
        share
            .control
            .set_backend(socket)
            .map_err(|error| Failure::of(ErrorKind::Internal, format!("share {name}: {error}")))
    }

    /// Returns an error if the machine has shares. The dirty log misses another process's writes to
    /// the machine's memory, so the memory cannot be saved while the guest runs.
    pub fn write_unseen(&self) -> Result<(), Failure> {
        if self.plugs.is_empty() {
            return Ok(());
        }
        let message = "the machine has shares, whose processes write to its memory unseen: it is saved while it is \
                       paused, or detach them first";
        Err(Failure::of(ErrorKind::State, message))
    }

    /// Statistics of the fitted shares.
    pub fn stats(&self) -> Vec<ShareStats> {
        let name = |share: &Plugged<FsControl>| ShareStats {
            name: share.name.clone(),
        };
        self.plugs.iter().map(name).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        os::unix::net::UnixStream,
        sync::mpsc::{Receiver, channel},
        time::{Duration, Instant},
    };

    use vm_memory::GuestAddress;
    use vmm_base::GuestMemory;

    use super::*;
    use crate::{
        board::silent::Silent,
        lifecycle::{Detached, Input, Notice, Notifier, Progress, Token},
    };

    const PATIENCE: Duration = Duration::from_secs(20);

    struct Rig {
        shares: Shares,
        hotplug: Arc<HotPlug>,
        notices: Receiver<Input>,
    }

    impl Rig {
        fn new(has_shared_memory: bool) -> Self {
            let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
            let (sender, notices) = channel();
            let silent = Arc::new(Silent);
            let sockets = Sockets::of(memory, silent.clone(), silent.clone(), Notifier::new(sender));
            let hotplug = HotPlug::new(silent);
            Self {
                shares: Shares::new(sockets, Arc::clone(&hotplug), has_shared_memory),
                hotplug,
                notices,
            }
        }

        /// Gives the other end of the share's connection.
        fn attach(&mut self, name: &str, pci_slot: u32) -> Result<UnixStream, ErrorKind> {
            let (front, back) = UnixStream::pair().unwrap();
            let wire = vmm::Share {
                name: name.into(),
                tag: "tag".into(),
                pci_slot,
                fd: 0,
            };
            let attached = self.shares.attach(&wire, vec![front.into()]);
            attached.map(|()| back).map_err(|failure| failure.kind)
        }

        fn names(&self) -> Vec<String> {
            self.shares.stats().into_iter().map(|share| share.name).collect()
        }

        /// Waits until what leaves is gone.
        fn gone(&mut self) -> Vec<Detached> {
            let notice = self.notices.recv_timeout(PATIENCE).unwrap();
            assert!(matches!(notice, Input::Notice(Notice::Unplugged)), "{notice:?}");
            self.shares.collect_detached()
        }
    }

    fn token(request: u64) -> Token {
        Token {
            connection: 1,
            request,
        }
    }

    #[test]
    fn detached_share_closes_its_connection_and_can_return() {
        let mut rig = Rig::new(true);
        for forced in [false, true] {
            rig.shares.write_unseen().unwrap();
            let mut process = rig.attach("data", 40).unwrap();
            for (name, slot) in [("data", 41), ("other", 40)] {
                assert_eq!(rig.attach(name, slot).unwrap_err(), ErrorKind::State, "{name}");
            }
            assert_eq!(rig.names(), ["data"]);
            assert!(!rig.hotplug.is_requested(40) && rig.shares.write_unseen().is_err());
            let asked = rig.shares.detach(token(1), "data", forced).unwrap();
            if forced {
                assert_eq!(asked, Progress::Pending);
            } else {
                assert_eq!(asked, Progress::Done);
                assert!(rig.hotplug.is_requested(40));
                // The guest ejects it.
                let sockets = &rig.shares.sockets;
                sockets.pci.remove(40, &sockets.mmio);
                let waits = rig.shares.wait_for_leaving(Instant::now() + PATIENCE);
                assert_eq!(waits, Ok(None));
            }
            let name = "data".to_owned();
            let what = Pluggable::Share;
            assert_eq!(rig.gone(), [Detached { what, name, forced }]);
            assert_eq!(rig.shares.collect_answers().len(), usize::from(forced));
            assert_eq!(process.read(&mut [0]).unwrap(), 0);
            assert!(rig.names().is_empty());
        }
        let none = rig.shares.detach(token(2), "data", true).unwrap_err();
        assert_eq!(none.kind, ErrorKind::NotFound);
    }

    #[test]
    fn a_machine_with_private_memory_takes_no_share() {
        let mut rig = Rig::new(false);
        assert_eq!(rig.attach("data", 40).unwrap_err(), ErrorKind::State);
        assert!(!rig.shares.sockets.pci.is_taken(40));
    }

    #[test]
    fn another_process_is_for_a_share_that_is_there() {
        let mut rig = Rig::new(true);
        let _process = rig.attach("data", 40).unwrap();
        let socket = || UnixStream::pair().unwrap().0.into();
        rig.shares.set_backend("data", socket()).unwrap();
        let none = rig.shares.set_backend("none", socket()).unwrap_err();
        assert_eq!(none.kind, ErrorKind::NotFound);
    }
}
