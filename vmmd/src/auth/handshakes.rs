//! Handshakes: connections whose clients are not authenticated yet. Their number is bounded. A
//! handshake above the limit ends the oldest one of the network that has the most of them. A client
//! that opens many and finishes none displaces only its own.

use std::{
    collections::VecDeque,
    net::{IpAddr, Ipv6Addr},
};

use tokio::task::AbortHandle;

/// The handshakes of one listener.
#[derive(Debug)]
pub struct Handshakes {
    most: usize,
    /// The oldest first.
    waiting: VecDeque<(Network, AbortHandle)>,
}

impl Handshakes {
    /// None yet, and later at most `most` at once.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            waiting: VecDeque::new(),
        }
    }

    /// Runs the `handshake` of a client at `address` in a task of its own. The handshake counts until the task ends; a later one may end
    /// the task.
    pub fn begin(&mut self, address: IpAddr, handshake: impl Future<Output = ()> + Send + 'static) {
        self.waiting.retain(|(_, task)| !task.is_finished());
        let network = network(address);
        if self.waiting.len() >= self.most {
            let waiting: Vec<_> = self.waiting.iter().map(|(network, _)| *network).collect();
            let gone = self.waiting.remove(gives_way(&waiting, network));
            gone.inspect(|(_, task)| task.abort());
        }
        let task = tokio::spawn(handshake);
        self.waiting.push_back((network, task.abort_handle()));
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

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::sync::oneshot::{self, error::TryRecvError};

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

    #[tokio::test]
    async fn one_too_many_ends_the_oldest_of_the_network_that_has_most() {
        let mut handshakes = Handshakes::new(3);
        let mut begin = |host| {
            let (alive, ended) = oneshot::channel::<()>();
            handshakes.begin(of(&[host])[0], async move {
                let _alive = alive;
                pending::<()>().await;
            });
            ended
        };
        let (mut honest, flood) = (begin(1), begin(9));
        let (mut second, mut third) = (begin(9), begin(9));
        assert!(flood.await.is_err());
        for alive in [&mut honest, &mut second, &mut third] {
            assert_eq!(alive.try_recv(), Err(TryRecvError::Empty));
        }
    }

    #[tokio::test]
    async fn what_has_ended_does_not_count() {
        let mut handshakes = Handshakes::new(3);
        for _ in 0..10 {
            let (end, ended) = oneshot::channel();
            handshakes.begin(of(&[1])[0], async move { end.send(()).unwrap() });
            ended.await.unwrap();
            assert_eq!(handshakes.waiting.len(), 1);
        }
    }
}
