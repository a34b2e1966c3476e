//! The network between two daemons.

use std::sync::{Arc, Mutex};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
};

use crate::{harness::Daemon, pki};

/// The network between both daemons.
#[derive(Clone)]
pub struct Network {
    /// Where the source finds the target.
    pub address: String,
    to: Arc<Mutex<String>>,
    /// Otherwise all connections end, and no new one comes about.
    pub up: watch::Sender<bool>,
    /// Swallows all data; neither side sees an error.
    pub silent: watch::Sender<bool>,
    /// Connections that did not come about.
    pub refused: watch::Sender<u32>,
}

impl Network {
    /// Leads to a daemon.
    pub async fn to(daemon: &Daemon) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let network = Self {
            address: listener.local_addr().unwrap().to_string(),
            to: Arc::new(Mutex::new(pki::address(daemon))),
            up: watch::Sender::new(true),
            silent: watch::Sender::new(false),
            refused: watch::Sender::new(0),
        };
        let own = network.clone();
        tokio::spawn(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                tokio::spawn(own.clone().relay(near));
            }
        });
        network
    }

    async fn relay(self, mut near: TcpStream) {
        let to = self.to.lock().unwrap().clone();
        let (mut up, mut silent) = (self.up.subscribe(), self.silent.subscribe());
        if !*up.borrow() {
            self.refused.send_modify(|refused| *refused += 1);
            return;
        }
        let _ = silent.wait_for(|silent| !silent).await;
        let Ok(mut far) = TcpStream::connect(to).await else {
            self.refused.send_modify(|refused| *refused += 1);
            return;
        };
        let swallows = tokio::select! {
            _ = copy_bidirectional(&mut near, &mut far) => false,
            _ = up.wait_for(|up| !up) => false,
            _ = silent.wait_for(|silent| *silent) => true,
        };
        if swallows {
            let _ = silent.wait_for(|silent| !silent).await;
        }
    }

    /// The daemon listens elsewhere since its restart.
    pub fn leads_to(&self, daemon: &Daemon) {
        *self.to.lock().unwrap() = pki::address(daemon);
    }
}
