//! `network`: networks of the node are made, shown, changed and deleted.

use proto::{v1, well_known::FieldMask};

use super::watch;
use crate::{
    args::{
        Output, Selector,
        network::{CreateNetwork, ListNetworks, Mode, Network, UpdateNetwork},
        node::LabelChange,
    },
    client::{Client, QUICK, WORK, call, empty_answer, send},
    failure::{Code, Failure, Result},
    output,
};

/// Hint for an unknown network.
const LIST: &str = "`vmmctl network ls` lists the networks";

/// Does it.
pub async fn network(client: &Client, what: &Network) -> Result<()> {
    match what {
        Network::Create(args) => {
            let client = client.with_timeout(args.timeout.timeout);
            let request = request(args);
            let answer = send!(client.limit(WORK), client.networks, create_network, request).await?;
            let network = answer.network.ok_or_else(empty_answer)?;
            let status = network.status.unwrap_or_default();
            output::line(format!(
                "network/{} created, gateway {} on {}",
                args.name, status.gateway, status.bridge
            ))
        }
        Network::Ls(args) if args.watch => follow(client, args).await,
        Network::Ls(args) => {
            let networks = list(client, &args.selectors).await?;
            if args.json {
                return output::line(serde_json::to_string_pretty(&networks).unwrap_or_default());
            }
            output::print(&output::network::whole(&networks))
        }
        Network::Update(args) => update(&client.with_timeout(args.timeout.timeout), args).await,
        Network::Describe(args) => {
            let network = get(client, &args.name).await?;
            output::print(&output::network::describe(&network, jiff::Timestamp::now()))
        }
        Network::Rm(args) => {
            let client = client.with_timeout(args.timeout.timeout);
            let request = v1::DeleteNetworkRequest {
                name: args.name.clone(),
                ..Default::default()
            };
            let answer = send!(client.limit(WORK), client.networks, delete_network, request).await;
            answer.map_err(|failure| about(failure, &args.name))?;
            output::line(format!("network/{} deleted", args.name))
        }
    }
}

async fn get(client: &Client, name: &str) -> Result<v1::Network> {
    let request = v1::GetNetworkRequest {
        name: name.to_owned(),
    };
    let answer = call(QUICK, client.networks.clone().get_network(request)).await;
    let network = answer.map_err(|failure| about(failure, name))?.network;
    network.ok_or_else(empty_answer)
}

fn selected(selectors: &[Selector]) -> Option<v1::ObjectFilter> {
    Some(v1::ObjectFilter {
        labels: selectors.iter().map(ToString::to_string).collect(),
        names: Vec::new(),
    })
}

async fn list(client: &Client, selectors: &[Selector]) -> Result<Vec<v1::Network>> {
    let mut request = v1::ListNetworksRequest {
        filter: selected(selectors),
        ..Default::default()
    };
    let mut networks = Vec::new();
    loop {
        let page = call(QUICK, client.networks.clone().list_networks(request.clone())).await?;
        networks.extend(page.networks);
        if page.next_page_token.is_empty() {
            return Ok(networks);
        }
        request.page_token = page.next_page_token;
    }
}

async fn follow(client: &Client, args: &ListNetworks) -> Result<()> {
    let filter = selected(&args.selectors);
    let output = args.json.then_some(Output::Json);
    watch::watch(output.as_ref(), false, async |cursor| {
        let request = v1::WatchNetworksRequest {
            filter: filter.clone(),
            cursor,
        };
        client.networks.clone().watch_networks(request).await
    })
    .await
}

/// Labels that are not named stay: they are put together here, so the network must be the one that was looked at.
async fn update(client: &Client, args: &UpdateNetwork) -> Result<()> {
    let mut request = changes(args)?;
    if !args.labels.is_empty() {
        let there = get(client, &args.name).await?.metadata.unwrap_or_default();
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
    answer.map_err(|failure| about(failure, &args.name))?;
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
            metadata: Some(v1::ObjectMetadata {
                name: args.name.clone(),
                ..Default::default()
            }),
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
    let labels = args
        .labels
        .iter()
        .map(|label| (label.key.clone(), label.value.clone()));
    v1::CreateNetworkRequest {
        network: Some(v1::Network {
            metadata: Some(v1::ObjectMetadata {
                name: args.name.clone(),
                labels: labels.collect(),
                ..v1::ObjectMetadata::default()
            }),
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

fn about(failure: Failure, name: &str) -> Failure {
    match &*failure.reason {
        "NETWORK_NOT_FOUND" => failure.about("network", name).hint(LIST),
        _ => failure.about("network", name),
    }
}
