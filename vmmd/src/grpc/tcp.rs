//! Takes connections over TCP. Handshakes are bounded in number and time. One more than the most ends the oldest of the network
//! that has most of them, so that whoever begins many and finishes none keeps nobody out but himself.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::AbortHandle,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    auth::{Bucket, Caller, Places},
    config::Limits,
    context::Initiator,
    grpc::{ACCEPT_PAUSE, Connection},
    text,
    tls::{ALPN, Certificates, identify},
};

/// Lines a second about handshakes that fail: guests may reach the port.
const LINES_PER_SECOND: u32 = 5;

type Incoming = Connection<TlsStream<TcpStream>>;

/// The bound port.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    certificates: Arc<Certificates>,
}

/// What all handshakes share.
struct Gate {
    certificates: Arc<Certificates>,
    limits: Limits,
    places: Arc<Places>,
    lines: Bucket,
    sender: mpsc::Sender<io::Result<Incoming>>,
}

impl Listener {
    /// Binds `address`. New connections use the `certificates` of then.
    pub async fn bind(address: SocketAddr, certificates: Arc<Certificates>) -> io::Result<Self> {
        let tcp = TcpListener::bind(address).await?;
        Ok(Self { tcp, certificates })
    }

    /// What was bound.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Accepts connections for as long as the server takes them. No error of one ends the others.
    pub async fn accept(self, limits: Limits, sender: mpsc::Sender<io::Result<Incoming>>) {
        let gate = Arc::new(Gate {
            certificates: self.certificates,
            limits,
            places: Places::new(limits.connections, limits.connections_per_client),
            lines: Bucket::new(LINES_PER_SECOND),
            sender,
        });
        let mut handshakes: VecDeque<(Network, AbortHandle)> = VecDeque::new();
        loop {
            let (stream, address) = tokio::select! {
                accepted = self.tcp.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "accept a connection over TCP");
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
                () = gate.sender.closed() => return,
            };
            handshakes.retain(|(_, handshake)| !handshake.is_finished());
            let network = network(address.ip());
            if handshakes.len() >= limits.handshakes {
                let waiting: Vec<_> = handshakes.iter().map(|(network, _)| *network).collect();
                let gone = handshakes.remove(gives_way(&waiting, network));
                gone.inspect(|(_, handshake)| handshake.abort());
            }
            let gate = Arc::clone(&gate);
            let handshake = tokio::spawn(async move { gate.pass(stream, address).await });
            handshakes.push_back((network, handshake.abort_handle()));
        }
    }
}

/// Where a client is: an IPv4 address, or the first 64 bits of an IPv6 address, which is what one host has (RFC 6177).
type Network = IpAddr;

fn network(address: IpAddr) -> Network {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let network = u128::from(address) & !u128::from(u64::MAX);
            Ipv6Addr::from(network).into()
        }
        address @ IpAddr::V4(_) => address,
    }
}

/// Which of the handshakes that wait gives way to one from `new`: the oldest of the network that has most of them, with the new
/// one; where several have as many, the one whose first is oldest.
fn gives_way(waiting: &[Network], new: Network) -> usize {
    let count = |network: Network| {
        let waiting = waiting.iter().filter(|other| **other == network).count();
        waiting + usize::from(network == new)
    };
    let most = waiting.iter().map(|network| count(*network)).max();
    let found = waiting.iter().position(|network| Some(count(*network)) == most);
    found.unwrap_or(0)
}

impl Gate {
    async fn pass(&self, stream: TcpStream, address: SocketAddr) {
        match self.handshake(stream, address).await {
            Ok(connection) => {
                // Fails when the daemon ends.
                let _ = self.sender.send(Ok(connection)).await;
            }
            Err(refused) if self.lines.take() => {
                tracing::info!(target: "audit", peer = %address, "connection refused: {refused}");
            }
            Err(_) => {}
        }
    }

    async fn handshake(&self, stream: TcpStream, address: SocketAddr) -> Result<Incoming, String> {
        let config = self.certificates.current();
        let config = config.ok_or("there is no certificate for the server yet")?;
        let _ = stream.set_nodelay(true);
        let accepted = timeout(self.limits.handshake(), TlsAcceptor::from(config).accept(stream)).await;
        let stream = accepted
            .map_err(|_| "the TLS handshake took too long".to_owned())?
            .map_err(|error| text::brief_line(&error.to_string()))?;
        let (_, session) = stream.get_ref();
        if session.alpn_protocol() != Some(ALPN) {
            return Err("the client does not ask for HTTP/2".into());
        }
        let chain = session.peer_certificates().unwrap_or_default();
        let peer = self.certificates.admit(chain);
        let peer = peer.ok_or("the client's certificate was revoked meanwhile")?;
        let certificate = chain.first();
        let identity = certificate.and_then(identify);
        let (name, role) = identity.ok_or("the client has no certificate that can be read")?;
        let initiator = Initiator::Certificate(name);
        let place = self.places.take(&initiator);
        let place = place.map_err(|full| format!("{initiator}: {full}"))?;
        let caller = Caller {
            initiator,
            role,
            address: address.to_string(),
            bucket: Bucket::new(self.limits.calls_per_second),
        };
        let connection = Connection::new(stream, caller, place, self.limits.request());
        Ok(connection.until_gone(peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(hosts: &[u8]) -> Vec<Network> {
        hosts
            .iter()
            .map(|host| IpAddr::from([192, 0, 2, *host]))
            .collect()
    }

    #[test]
    fn who_has_most_handshakes_waiting_gives_way() {
        for (waiting, new, gone) in [
            // An honest one is older than all of a flood, and stays.
            (&[1, 9, 9, 9][..], 9, 1),
            (&[1, 9, 9, 9], 2, 1),
            (&[9, 1, 9, 2], 3, 0),
            // The new one counts: of equals its network gives way.
            (&[1, 2, 9], 9, 2),
            (&[1, 2, 3], 4, 0),
        ] {
            let new = of(&[new])[0];
            assert_eq!(gives_way(&of(waiting), new), gone, "{waiting:?} {new}");
        }
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let parse = |text: &str| network(text.parse().unwrap());
        assert_eq!(parse("2001:db8::1"), parse("2001:db8::ffff:1"));
        assert_ne!(parse("2001:db8::1"), parse("2001:db8:0:1::1"));
        assert_eq!(parse("::ffff:192.0.2.1"), parse("192.0.2.1"));
    }
}
