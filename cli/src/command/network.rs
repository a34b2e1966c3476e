//! `network`: networks of the node are made, shown, changed and deleted.

use vmmd_api::{v1, well_known::FieldMask};

use crate::{
    args::{
        network::{CreateNetwork, Mode, UpdateNetwork},
        node::LabelChange,
    },
    client::{Client, WORK, about_network, empty_answer, send},
    failure::{Code, Failure, Result},
    output,
};

/// `network create`.
pub async fn create(client: &Client, args: &CreateNetwork) -> Result<()> {
    let client = client.with_timeout(args.timeout.timeout);
    let answer = send!(client.limit(WORK), client.networks, create_network, request(args)).await?;
    let network = answer.network.ok_or_else(empty_answer)?;
    let status = network.status.unwrap_or_default();
    output::line(format!(
        "network/{} created, gateway {} on {}",
        args.name, status.gateway, status.bridge
    ))
}

/// Labels that are not named stay: they are put together here, so the network must be the one that was looked at.
pub async fn update(client: &Client, args: &UpdateNetwork) -> Result<()> {
    let client = &client.with_timeout(args.timeout.timeout);
    let mut request = changes(args)?;
    if !args.labels.is_empty() {
        let there = client
            .object::<v1::Network>(&args.name)
            .await?
            .metadata
            .unwrap_or_default();
        let network = request.network.get_or_insert_default();
        let metadata = network.metadata.get_or_insert_default();
        metadata.labels = there.labels;
        for change in &args.labels {
            match change {
                LabelChange::Set(key, value) => drop(metadata.labels.insert(key.clone(), value.clone())),
                LabelChange::Remove(key) => drop(metadata.labels.remove(key)),
            }
        }
        request.preconditions = Some(v1::Preconditions {
            uid: there.uid,
            generation: Some(there.generation),
        });
    }
    let answer = send!(client.limit(WORK), client.networks, update_network, request).await;
    answer.map_err(|failure| about_network(failure, &args.name))?;
    output::line(format!("network/{} updated", args.name))
}

/// Returns the request for the flags, without labels.
fn changes(args: &UpdateNetwork) -> Result<v1::UpdateNetworkRequest> {
    let (mut spec, mut paths) = (v1::NetworkSpec::default(), Vec::new());
    if let Some(mode) = args.mode {
        spec.set_mode(mode.into());
        paths.push("spec.mode");
    }
    if !args.dns.is_empty() {
        spec.dns_servers = servers(&args.dns, "node");
        paths.push("spec.dns_servers");
    }
    if !args.ntp.is_empty() {
        spec.ntp_servers = servers(&args.ntp, "none");
        paths.push("spec.ntp_servers");
    }
    if !args.labels.is_empty() {
        paths.push("metadata.labels");
    }
    if paths.is_empty() {
        let message = "say what to change: --mode, --dns, --ntp or -l";
        return Err(Failure::new(Code::Usage, message));
    }
    Ok(v1::UpdateNetworkRequest {
        network: Some(v1::Network {
            metadata: super::metadata::named(&args.name),
            spec: Some(spec),
            status: None,
        }),
        update_mask: Some(FieldMask {
            paths: paths.into_iter().map(str::to_owned).collect(),
        }),
        ..Default::default()
    })
}

fn servers(given: &[String], nobody: &str) -> Vec<String> {
    match given {
        [only] if only == nobody => Vec::new(),
        given => given.to_vec(),
    }
}

impl From<Mode> for v1::NetworkMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Nat => Self::Nat,
            Mode::Isolated => Self::Isolated,
            Mode::Routed => Self::Routed,
        }
    }
}

fn request(args: &CreateNetwork) -> v1::CreateNetworkRequest {
    v1::CreateNetworkRequest {
        network: Some(v1::Network {
            metadata: super::metadata::labelled(&args.name, &args.labels),
            spec: Some(v1::NetworkSpec {
                mode: v1::NetworkMode::from(args.mode).into(),
                ipv4_cidr: args.cidr.clone(),
                ipv4_gateway: args.gateway.clone().unwrap_or_default(),
                dns_servers: args.dns.clone(),
                ntp_servers: args.ntp.clone(),
                mtu: args.mtu.unwrap_or_default(),
                ipv6_cidr: args.ipv6.clone().unwrap_or_default(),
            }),
            status: None,
        }),
        ..Default::default()
    }
}
