//! `network`: networks of the node are made, shown and deleted.

use proto::v1;

use crate::{
    args::network::{CreateNetwork, Mode, Network},
    client::{Client, QUICK, WORK, call, empty_answer, send},
    failure::{Failure, Result},
    output,
};

/// What to do about a network that there is not.
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
        Network::Ls(args) => {
            let request = v1::ListNetworksRequest {};
            let answer = call(QUICK, client.networks.clone().list_networks(request)).await?;
            if args.json {
                let text = serde_json::to_string_pretty(&answer.networks).unwrap_or_default();
                return output::line(text);
            }
            output::print(&output::network::table(&answer.networks))
        }
        Network::Describe(args) => {
            let request = v1::GetNetworkRequest {
                name: args.name.clone(),
            };
            let answer = call(QUICK, client.networks.clone().get_network(request)).await;
            let network = answer.map_err(|failure| about(failure, &args.name))?.network;
            let network = network.ok_or_else(empty_answer)?;
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

fn request(args: &CreateNetwork) -> v1::CreateNetworkRequest {
    let mode = match args.mode {
        Mode::Nat => v1::NetworkMode::Nat,
        Mode::Isolated => v1::NetworkMode::Isolated,
        Mode::Routed => v1::NetworkMode::Routed,
    };
    v1::CreateNetworkRequest {
        network: Some(v1::Network {
            metadata: Some(v1::ObjectMetadata {
                name: args.name.clone(),
                ..v1::ObjectMetadata::default()
            }),
            spec: Some(v1::NetworkSpec {
                mode: mode.into(),
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
