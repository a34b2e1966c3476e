//! Connections to the API server.

use std::{path::Path, time::Duration};

use anyhow::Context as _;
use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::metrics;

/// How long a call of the API server may take. A connection that leads nowhere is given up then.
const CALL: Duration = Duration::from_secs(20);

/// Connections to the API server.
#[derive(Clone)]
pub struct Clients {
    /// For calls.
    pub calls: Client,
    /// For watches, which are silent for long.
    pub watches: Client,
}

impl Clients {
    /// To the API server that `kubeconfig` names. Without a file, the environment of a pod names it, or the files of kubectl do.
    ///
    /// # Errors
    ///
    /// That no API server is named, or that the file is not usable.
    pub async fn new(kubeconfig: Option<&Path>) -> anyhow::Result<Self> {
        let config = match kubeconfig {
            Some(file) => {
                let kubeconfig = Kubeconfig::read_from(file)?;
                Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
            }
            None => Config::infer()
                .await
                .context("no API server: give --kubeconfig")?,
        };
        let watches = counted(config.clone())?;
        let mut quick = config;
        quick.connect_timeout = Some(CALL);
        quick.read_timeout = Some(CALL);
        quick.write_timeout = Some(CALL);
        Ok(Self {
            calls: counted(quick)?,
            watches,
        })
    }
}

fn counted(config: Config) -> anyhow::Result<Client> {
    let builder = ClientBuilder::try_from(config)?;
    Ok(builder.with_layer(&metrics::Count).build())
}
