//! `netcheck serve` runs in a guest, `netcheck run` on the node. Packets of all sizes travel in
//! both directions, each with its number and a content derived from it. The receiver compares every
//! byte, and counts lost, doubled, reordered and damaged packets. `run` prints one line of JSON,
//! `{"udp": {"there": {…}, "back": {…}}, …}`, where "there" has its sent packets.
//!
//! `netcheck switch` makes the guest switch offloads and pairs of queues. `netcheck pin` adds
//! permanent neighbors to the machine. `netcheck lie` and `netcheck listen` test spoofed neighbors
//! and routers.

mod data;
mod exchange;
mod lies;
mod neighbors;
mod stream;
mod sys;

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _},
    net::{IpAddr, Ipv6Addr},
    process::ExitCode,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use clap::{Parser, Subcommand};

use data::{Counts, Sizes};
use exchange::{Job, Request, Way};

/// Sends packets of all sizes between two machines and compares them.
#[derive(Parser)]
#[command(name = "netcheck", version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Be the other end of `run` and `switch`, without end.
    Serve,
    /// Send packets to a server and receive as many, one kind after the other.
    Run {
        /// Where `netcheck serve` runs.
        server: IpAddr,
        /// The largest packet of the network, without the Ethernet header.
        #[arg(long, default_value_t = 1500)]
        mtu: usize,
        /// Streams of each direction at a time; of `large` there is one, since its datagrams are many packets.
        #[arg(long, default_value_t = 1)]
        flows: u32,
        /// `tcp`, `udp`, `trains`, `large` or `multicast`, with the number of packets of each direction: `udp:1000`. All kinds at once, until a
        /// line `stop` is read, with 0 packets; after any other line `going` is printed when packets have arrived in both directions since.
        #[arg(required = true)]
        kinds: Vec<Kind>,
    },
    /// Have a server switch a device of its machine.
    Switch {
        /// Where `netcheck serve` runs.
        server: IpAddr,
        /// The device there.
        device: String,
        /// Pairs of queues that it is to use.
        #[arg(long)]
        pairs: Option<u32>,
        /// Features by the names of `ethtool -k`: `tx-udp-segmentation=off`.
        features: Vec<String>,
    },
    /// Add a permanent neighbor entry.
    Pin {
        /// The device over which it is reached.
        device: String,
        /// Its MAC address: `52:54:00:12:34:56`.
        mac: Mac,
        /// Its addresses.
        #[arg(required = true)]
        addresses: Vec<IpAddr>,
    },
    /// Send spoofed frames about neighbors and routers, and at last a true one.
    Lie {
        /// Over this device.
        device: String,
        /// An address that this machine has.
        own: Ipv6Addr,
        /// One that it has not.
        of: Ipv6Addr,
    },
    /// Print received frames about neighbors and routers.
    Listen {
        /// On this device.
        device: String,
        /// Until somebody says to have this address.
        until: Ipv6Addr,
    },
}

/// A MAC address.
#[derive(Clone, Copy, Debug)]
struct Mac([u8; 6]);

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
        let bytes: Vec<u8> = bytes
            .collect::<Result<_, _>>()
            .map_err(|error| error.to_string())?;
        let bytes = bytes.try_into().map_err(|_| "six bytes are wanted")?;
        Ok(Self(bytes))
    }
}

/// Streams without a number of packets end.
static ENOUGH: AtomicBool = AtomicBool::new(false);

/// Packets of a kind.
#[derive(Clone, Debug)]
struct Kind {
    name: String,
    packets: u32,
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, packets) = text.split_once(':').ok_or("KIND:PACKETS is wanted")?;
        if !["tcp", "udp", "trains", "large", "multicast"].contains(&name) {
            return Err(format!("{name} is no kind"));
        }
        Ok(Self {
            name: name.to_owned(),
            packets: packets.parse().map_err(|error| format!("{packets}: {error}"))?,
        })
    }
}

impl Kind {
    fn job(&self, server: IpAddr, mtu: usize, flows: u32, there: bool) -> Job {
        // The headers of IP and UDP.
        let most = mtu - if server.is_ipv4() { 28 } else { 48 };
        let (way, max, trains, window) = match self.name.as_str() {
            "tcp" => (Way::Tcp, 65_000, false, stream::WINDOW),
            "large" => (Way::Udp, stream::LARGEST, false, stream::LARGE_WINDOW),
            "trains" => (Way::Udp, most, true, stream::WINDOW),
            "multicast" => (Way::Multicast, most, false, stream::WINDOW),
            _ => (Way::Udp, most, false, stream::WINDOW),
        };
        Job {
            way,
            there,
            packets: self.packets.div_ceil(flows),
            sizes: Sizes { max, trains },
            window,
        }
    }
}

fn main() -> ExitCode {
    match run(Arguments::parse().action) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("netcheck: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(action: Action) -> Result<()> {
    match action {
        Action::Serve => exchange::serve(),
        Action::Run {
            server,
            mtu,
            flows,
            kinds,
        } => compare(server, mtu, flows, &kinds),
        Action::Switch {
            server,
            device,
            pairs,
            features,
        } => {
            let features = features.iter().map(|feature| match feature.split_once('=') {
                Some((name, "on")) => Ok((name.to_owned(), true)),
                Some((name, "off")) => Ok((name.to_owned(), false)),
                _ => Err(anyhow!("{feature}: NAME=on or NAME=off is wanted")),
            });
            let features = features.collect::<Result<_>>()?;
            exchange::switch(
                server,
                &Request::Switch {
                    device,
                    features,
                    pairs,
                },
            )
        }
        Action::Pin {
            device,
            mac,
            addresses,
        } => addresses
            .into_iter()
            .try_for_each(|address| neighbors::pin(&device, address, mac.0)),
        Action::Lie { device, own, of } => lies::tell(&device, own, of),
        Action::Listen { device, until } => lies::listen(&device, until),
    }
}

/// Both directions at once, kind by kind; all kinds at once when their number of packets is open.
fn compare(server: IpAddr, mtu: usize, flows: u32, kinds: &[Kind]) -> Result<()> {
    let streams = |kinds: &[Kind]| {
        thread::scope(|scope| {
            let mut running = Vec::new();
            for kind in kinds {
                let flows = if kind.name == "large" { 1 } else { flows };
                for there in (0..flows).flat_map(|_| [true, false]) {
                    let job = kind.job(server, mtu, flows, there);
                    // A server that sends without limit over TCP would have no stop signal.
                    if there || job.packets > 0 || job.way != Way::Tcp {
                        running.push((
                            kind,
                            there,
                            scope.spawn(move || exchange::run(server, &job, &ENOUGH)),
                        ));
                    }
                }
            }
            let mut report: BTreeMap<String, BTreeMap<&str, Counts>> = BTreeMap::new();
            for (kind, there, running) in running {
                let counts = running.join().map_err(|_| anyhow!("a stream panicked"))?;
                let counts = counts.with_context(|| format!("{}, there: {there}", kind.name))?;
                let direction = if there { "there" } else { "back" };
                let of_kind = report.entry(kind.name.clone()).or_default();
                of_kind.entry(direction).or_default().add(&counts);
            }
            Ok::<_, anyhow::Error>(report)
        })
    };
    let report = if kinds.iter().all(|kind| kind.packets == 0) {
        thread::spawn(listen);
        streams(kinds)?
    } else {
        let mut report = BTreeMap::new();
        for kind in kinds {
            report.extend(streams(std::slice::from_ref(kind))?);
        }
        report
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Does what lines of the standard input say, see [`Action::Run`].
fn listen() {
    for line in io::stdin().lock().lines() {
        if !line.is_ok_and(|line| line != "stop") {
            break;
        }
        let begin = stream::progress();
        while !begin
            .iter()
            .zip(stream::progress())
            .all(|(begin, now)| now > begin + 500)
        {
            thread::sleep(Duration::from_millis(50));
        }
        println!("going");
    }
    ENOUGH.store(true, Ordering::Relaxed);
}
