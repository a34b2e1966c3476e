//! Networks of the node are created and changed.

use vmmd_api::{
    v1::{self, dhcp_option::Value},
    well_known::FieldMask,
};

use crate::{
    args::network::{CreateNetwork, UpdateNetwork},
    client::{Client, Kind as _, WORK, about_network, empty_answer, send},
    failure::{Code, Failure, Result},
    output,
};

/// Creates a network.
pub async fn create(client: &Client, args: &CreateNetwork) -> Result<()> {
    report(&make(client, from_flags(args)?).await?)
}

/// Asks the daemon to create a network.
pub async fn make(client: &Client, network: v1::Network) -> Result<v1::Network> {
    let request = v1::CreateNetworkRequest {
        network: Some(network),
        ..Default::default()
    };
    let answer = send!(client.limit(WORK), client.networks, create_network, request).await?;
    answer.network.ok_or_else(empty_answer)
}

/// Prints that a network was created.
pub fn report(network: &v1::Network) -> Result<()> {
    let status = network.status.clone().unwrap_or_default();
    let gateways = [status.gateway, status.ipv6_gateway];
    output::line(format!(
        "network/{} created, gateway {} on {}",
        network.name(),
        output::network::both(gateways),
        status.bridge
    ))
}

/// Changes the fields of a network that `paths` name. With `seen`, only a network in that state is changed.
pub async fn change(
    client: &Client,
    wanted: v1::Network,
    paths: Vec<String>,
    seen: Option<v1::Preconditions>,
) -> Result<()> {
    let name = wanted.name().to_owned();
    let request = v1::UpdateNetworkRequest {
        network: Some(wanted),
        update_mask: Some(FieldMask { paths }),
        preconditions: seen,
        ..Default::default()
    };
    let answer = send!(client.limit(WORK), client.networks, update_network, request).await;
    answer.map(drop).map_err(|failure| about_network(failure, &name))
}

/// Changes a network. Other labels, reservations and security groups stay: the request has all of them, so it is valid for the present generation
/// only.
pub async fn update(client: &Client, args: &UpdateNetwork) -> Result<()> {
    let mut request = changes(args)?;
    if !args.labels.is_empty() || !args.reservations.is_empty() || !args.groups.is_empty() {
        let v1::Network { metadata, spec, .. } = client.object::<v1::Network>(&args.name).await?;
        let there = metadata.unwrap_or_default();
        let network = request.network.get_or_insert_default();
        let new = network.spec.get_or_insert_default();
        let spec = spec.unwrap_or_default();
        (new.reservations, new.security_groups) = (spec.reservations, spec.security_groups);
        for change in &args.groups {
            security_group(&mut new.security_groups, change)?;
        }
        for change in &args.reservations {
            reserve(&mut new.reservations, change)?;
        }
        let metadata = network.metadata.get_or_insert_default();
        metadata.labels = there.labels;
        for change in &args.labels {
            change.apply(&mut metadata.labels);
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
        spec.set_mode(mode);
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
    if !args.deny.is_empty() {
        spec.deny = servers(&args.deny, "none");
        paths.push("spec.deny");
    }
    if !args.routes.is_empty() {
        spec.routes = routes(&servers(&args.routes, "none"));
        paths.push("spec.routes");
    }
    if !args.dhcp_options.is_empty() {
        spec.dhcp_options = options(&servers(&args.dhcp_options, "none"))?;
        paths.push("spec.dhcp_options");
    }
    if !args.dhcp6_options.is_empty() {
        spec.dhcp6_options = options(&servers(&args.dhcp6_options, "none"))?;
        paths.push("spec.dhcp6_options");
    }
    if let Some(domain) = &args.domain {
        spec.domain = Some(domain)
            .filter(|domain| *domain != "none")
            .cloned()
            .unwrap_or_default();
        paths.push("spec.domain");
    }
    if !args.dns_records.is_empty() {
        spec.dns_records = records(&servers(&args.dns_records, "none"))?;
        paths.push("spec.dns_records");
    }
    if !args.reservations.is_empty() {
        paths.push("spec.reservations");
    }
    if !args.groups.is_empty() {
        paths.push("spec.security_groups");
    }
    if !args.labels.is_empty() {
        paths.push("metadata.labels");
    }
    if paths.is_empty() {
        let message = "no change is given: see `vmmctl update network --help`";
        return Err(Failure::new(Code::Usage, message));
    }
    Ok(v1::UpdateNetworkRequest {
        network: Some(v1::Network {
            metadata: super::metadata(&args.name, &[]),
            spec: Some(spec),
            status: None,
        }),
        update_mask: Some(FieldMask {
            paths: paths.into_iter().map(str::to_owned).collect(),
        }),
        ..Default::default()
    })
}

/// The texts of a list; none when it is the word `none` alone.
fn servers(given: &[String], none: &str) -> Vec<String> {
    match given {
        [only] if only == none => Vec::new(),
        given => given.to_vec(),
    }
}

/// Routes as `RANGE[=ADDRESS]`.
fn routes(texts: &[String]) -> Vec<v1::NetworkRoute> {
    let routes = texts.iter().map(|text| {
        let (to, via) = text.split_once('=').unwrap_or((text, ""));
        v1::NetworkRoute {
            to: to.to_owned(),
            via: via.to_owned(),
        }
    });
    routes.collect()
}

/// Options of DHCP as `NUMBER=TEXT` or `NUMBER=0xBYTES`.
fn options(texts: &[String]) -> Result<Vec<v1::DhcpOption>> {
    let option = |text: &String| {
        let parts = text.split_once('=');
        let option = parts.and_then(|(code, value)| {
            let value = match value.strip_prefix("0x") {
                Some(hex) => Value::Hex(hex.to_owned()),
                None => Value::Text(value.to_owned()),
            };
            Some(v1::DhcpOption {
                code: code.parse().ok()?,
                value: Some(value),
            })
        });
        let wrong = || format!("option of DHCP \"{text}\": must be NUMBER=TEXT, or NUMBER=0xBYTES");
        option.ok_or_else(|| Failure::new(Code::Usage, wrong()))
    };
    texts.iter().map(option).collect()
}

/// Records as `NAME=ADDRESS[,ADDRESS]`.
fn records(texts: &[String]) -> Result<Vec<v1::DnsRecord>> {
    let record = |text: &String| {
        let parts = text.split_once('=');
        let record = parts.map(|(name, addresses)| v1::DnsRecord {
            name: name.to_owned(),
            addresses: addresses.split(',').map(str::to_owned).collect(),
        });
        let wrong = || format!("record \"{text}\": must be NAME=ADDRESS[,ADDRESS]");
        record.ok_or_else(|| Failure::new(Code::Usage, wrong()))
    };
    texts.iter().map(record).collect()
}

/// Adds, replaces or removes a reservation: `NAME=ADDRESS[,MAC]`, `NAME=,MAC` or `NAME-`.
fn reserve(reservations: &mut Vec<v1::AddressReservation>, change: &str) -> Result<()> {
    let (name, value) = match (change.split_once('='), change.strip_suffix('-')) {
        (Some((name, value)), _) => (name, Some(value)),
        (None, Some(name)) => (name, None),
        (None, None) => {
            let message = format!("reservation \"{change}\": must be NAME=ADDRESS[,MAC]");
            return Err(Failure::new(Code::Usage, message));
        }
    };
    reservations.retain(|reservation| reservation.name != name);
    if let Some(value) = value {
        let (address, mac) = value.split_once(',').unwrap_or((value, ""));
        reservations.push(v1::AddressReservation {
            name: name.to_owned(),
            address: address.to_owned(),
            mac: mac.to_owned(),
        });
    }
    Ok(())
}

/// Adds, replaces or removes a security group: `NAME,in=RULE[+RULE],out=RULE[+RULE]`, or `NAME-`.
fn security_group(groups: &mut Vec<v1::SecurityGroup>, change: &str) -> Result<()> {
    let wrong = |why: &str| Failure::new(Code::Usage, format!("security group \"{change}\": {why}"));
    let (name, sides) = match (change.split_once(','), change.strip_suffix('-')) {
        (Some((name, sides)), _) => (name, Some(sides)),
        (None, Some(name)) => (name, None),
        (None, None) => return Err(wrong("must be NAME,in=RULE[+RULE],out=RULE[+RULE]")),
    };
    groups.retain(|group| group.name != name);
    let Some(sides) = sides else {
        return Ok(());
    };
    let mut group = v1::SecurityGroup {
        name: name.to_owned(),
        ..v1::SecurityGroup::default()
    };
    for side in sides.split(',') {
        let (direction, rules) = match side.split_once('=') {
            Some(("in", rules)) => (&mut group.ingress, rules),
            Some(("out", rules)) => (&mut group.egress, rules),
            _ => return Err(wrong("rules are in=RULE[+RULE] and out=RULE[+RULE]")),
        };
        let rules = rules.split('+').filter(|rule| *rule != "none").map(rule);
        let allow = rules.collect::<Option<_>>();
        let allow = allow.ok_or_else(|| {
            wrong("a rule is any, tcp, udp or icmp, with a port as in tcp:80 or udp:8000-8100, and with an address as in tcp@10.0.0.0/8")
        })?;
        *direction = Some(v1::NicRules { allow });
    }
    groups.push(group);
    Ok(())
}

/// A rule as `PROTOCOL[:PORT[-PORT]][@RANGE]`.
fn rule(text: &str) -> Option<v1::NicRule> {
    let (what, address) = text.split_once('@').unwrap_or((text, ""));
    let (protocol, ports) = what.split_once(':').unwrap_or((what, ""));
    let protocol = match protocol {
        "any" => v1::RuleProtocol::Unspecified,
        "tcp" => v1::RuleProtocol::Tcp,
        "udp" => v1::RuleProtocol::Udp,
        "icmp" => v1::RuleProtocol::Icmp,
        _ => return None,
    };
    let ports = match ports {
        "" => None,
        ports => {
            let (first, last) = ports.split_once('-').unwrap_or((ports, "0"));
            Some(v1::PortRange {
                first: first.parse().ok()?,
                last: last.parse().ok()?,
            })
        }
    };
    Some(v1::NicRule {
        addresses: Some(address)
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
            .into_iter()
            .collect(),
        protocol: protocol.into(),
        ports: ports.into_iter().collect(),
    })
}

fn from_flags(args: &CreateNetwork) -> Result<v1::Network> {
    let mut security_groups = Vec::new();
    for group in &args.groups {
        security_group(&mut security_groups, group)?;
    }
    let mut reservations = Vec::new();
    for reservation in &args.reservations {
        reserve(&mut reservations, reservation)?;
    }
    Ok(v1::Network {
        metadata: super::metadata(&args.name, &args.labels),
        spec: Some(v1::NetworkSpec {
            mode: args.mode.into(),
            ipv4_cidr: args.cidr.clone().unwrap_or_default(),
            ipv4_gateway: args.gateway.clone().unwrap_or_default(),
            dns_servers: args.dns.clone(),
            ntp_servers: args.ntp.clone(),
            mtu: args.mtu.unwrap_or_default(),
            ipv6_cidr: args.ipv6.clone().unwrap_or_default(),
            deny: args.deny.clone(),
            routes: routes(&args.routes),
            dhcp_options: options(&args.dhcp_options)?,
            dhcp6_options: options(&args.dhcp6_options)?,
            domain: args.domain.clone().unwrap_or_default(),
            dns_records: records(&args.dns_records)?,
            reservations,
            security_groups,
        }),
        status: None,
    })
}
