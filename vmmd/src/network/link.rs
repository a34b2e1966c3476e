//! Network interfaces by rtnetlink: one connection for the daemon's life, no process per call.

use std::io;

use rtnetlink::{
    Error, Handle, LinkUnspec,
    packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage},
};
use tokio_stream::StreamExt;

/// The node's network interfaces.
#[derive(Clone, Debug)]
pub struct Links {
    handle: Handle,
}

/// What is known of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// It is a bridge.
    pub is_bridge: bool,
    /// Largest packet without the Ethernet header, in bytes.
    pub mtu: u32,
}

impl Links {
    /// Connects to the kernel. To be called in a tokio runtime.
    pub fn connect() -> io::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        tokio::spawn(connection);
        Ok(Self { handle })
    }

    /// Looks for an interface by name.
    pub async fn find(&self, name: &str) -> io::Result<Option<Link>> {
        let answers = self.handle.link().get().match_name(name.to_owned()).execute();
        tokio::pin!(answers);
        match answers.next().await {
            Some(Ok(message)) => Ok(Some(describe(&message))),
            None => Ok(None),
            Some(Err(error)) => match into_io(error) {
                error if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
                error => Err(error),
            },
        }
    }

    /// Makes the interface `device` a port of `bridge`, with the bridge's MTU, and up.
    pub async fn join_bridge(
        &self,
        device: u32,
        bridge: &Link,
        address: [u8; 6],
        alias: String,
    ) -> io::Result<()> {
        let message = LinkUnspec::new_with_index(device)
            .address(address.to_vec())
            .mtu(bridge.mtu)
            .alias(alias)
            .controller(bridge.index)
            .up()
            .build();
        self.handle.link().set(message).execute().await.map_err(into_io)
    }
}

fn describe(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        is_bridge: false,
        mtu: 1500,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::LinkInfo(infos) => {
                link.is_bridge |= infos.contains(&LinkInfo::Kind(InfoKind::Bridge));
            }
            _ => {}
        }
    }
    link
}

fn into_io(error: Error) -> io::Error {
    match error {
        Error::NetlinkError(message) => message.to_io(),
        error => io::Error::other(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_loopback_interface_is_found_and_is_no_bridge() {
        let links = Links::connect().unwrap();
        let link = links.find("lo").await.unwrap().unwrap();
        assert!(!link.is_bridge && link.index > 0, "{link:?}");
        assert_eq!(links.find("nonexistent0").await.unwrap(), None);
    }
}
