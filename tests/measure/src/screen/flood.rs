//! A guest that floods a console: losses with readers attached, some of which never read.

use std::{
    collections::BTreeMap,
    io::Read,
    net::Shutdown,
    os::unix::net::UnixStream,
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::{Context, Result, ensure};

use super::{Cost, Guest};
use crate::{disk::counters::Counters, run, vmm::hvc};

/// Lines of a flood, each of 80 letters: Linux gives hvc0 16 bytes at a time, so this is some seconds of an emulated node.
const LINES: u32 = 32 << 10;
/// Readers that read, and as many that never do.
const READERS: usize = 5;

/// Readers that run until they are detached.
struct Readers {
    silent: Vec<UnixStream>,
    lively: Vec<(UnixStream, JoinHandle<u64>)>,
}

impl Readers {
    fn attach() -> Result<Self> {
        let connect = || UnixStream::connect(hvc()).context("attach to the virtio-console");
        let silent = (0..READERS).map(|_| connect()).collect::<Result<_>>()?;
        let lively = (0..READERS).map(|_| {
            let client = connect()?;
            let mut reads = client.try_clone().context("a second descriptor")?;
            let thread = thread::spawn(move || {
                // Clients have a processor of their own, as they are elsewhere as a rule.
                run::place_elsewhere().ok();
                let (mut chunk, mut bytes) = (vec![0; 64 << 10], 0_u64);
                while let Ok(count @ 1..) = reads.read(&mut chunk) {
                    bytes = bytes.saturating_add(u64::try_from(count).unwrap_or(0));
                }
                bytes
            });
            Ok((client, thread))
        });
        Ok(Self {
            silent,
            lively: lively.collect::<Result<_>>()?,
        })
    }

    /// Detaches them. Fails if an active reader got fewer than `least` bytes.
    fn end(self, least: u64) -> Result<()> {
        drop(self.silent);
        for (client, thread) in self.lively {
            client.shutdown(Shutdown::Both).context("detach")?;
            let bytes = thread.join().ok().context("a reader panicked")?;
            ensure!(
                bytes >= least,
                "a reader got {bytes} bytes of the {least} and more that were printed"
            );
        }
        Ok(())
    }
}

impl Guest<'_> {
    /// Runs one flood without readers and one with readers; the order alternates from turn to turn.
    pub(super) fn floods(&mut self, turn: u32) -> Result<[Cost; 2]> {
        let first = !turn.is_multiple_of(2);
        Ok([self.flood(first)?, self.flood(!first)?])
    }

    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn flood(&mut self, readers: bool) -> Result<Cost> {
        let attached = readers.then(Readers::attach).transpose()?;
        let (before, begin) = (Counters::read(self.running.pid())?, Instant::now());
        self.order(&format!("measure lines /dev/hvc0 {LINES}"))?;
        let us = begin.elapsed().as_secs_f64() * 1e6;
        let cost = Counters::read(self.running.pid())?.since(&before);
        let bytes = u64::from(LINES) * 80;
        if let Some(attached) = attached {
            // A slow reader receives a notice in place of lost bytes.
            attached.end(bytes / 2)?;
        }
        let (kib, exits) = (bytes >> 10, cost.kvm.get("exits").copied().unwrap_or(0));
        Ok(Cost {
            job: if readers {
                "flood, readers"
            } else {
                "flood, nobody"
            }
            .into(),
            figures: BTreeMap::from([
                ("us_per_kib", us / kib as f64),
                ("exits_per_kib", exits as f64 / kib as f64),
                ("host_cpu_us_per_kib", cost.cpu_us / kib as f64),
            ]),
        })
    }
}
