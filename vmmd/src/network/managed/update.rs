//! Changes fields of a network that a client may change.

use proto::{
    model::{
        Violations,
        metadata::Metadata,
        network::{NetworkMode, NetworkSpec},
    },
    v1,
};
use uuid::Uuid;

use super::{
    Networks, Ports,
    describe::{not_found, tell},
};
use crate::{
    context::Context,
    failure::Failure,
    request::preconditions,
    store::{LeaseRecord, NetworkRecord},
    text,
};

/// What may be in a mask.
const FIELDS: [&str; 6] = [LABELS, ANNOTATIONS, OWNER, MODE, DNS, NTP];
const LABELS: &str = "metadata.labels";
const ANNOTATIONS: &str = "metadata.annotations";
const OWNER: &str = "metadata.owner";
const MODE: &str = "spec.mode";
const DNS: &str = "spec.dns_servers";
const NTP: &str = "spec.ntp_servers";

impl Networks {
    /// Changes a network; returns when the node is so.
    pub async fn update(
        &self,
        host: Ports<'_>,
        request: &v1::UpdateNetworkRequest,
        context: &Context,
    ) -> Result<v1::Network, Failure> {
        let (metadata, spec, mask) = parse(request)?;
        let name = metadata.name.as_str();
        let mut turn = self.turn.lock().await;
        let before = self.find(name)?;
        expected(&before, context)?;
        // A VM that was deleted lately may have its address still.
        let now = self.release(host).into_iter().find(|now| now.uid == before.uid);
        let before = now.unwrap_or(before);
        let mut record = before.clone();
        for field in mask {
            let new = record.spec.get_or_insert_default();
            match field {
                LABELS => record.labels.clone_from(&metadata.labels),
                ANNOTATIONS => record.annotations.clone_from(&metadata.annotations),
                OWNER => record.owner.clone_from(&metadata.owner),
                MODE => new.mode = spec.mode,
                DNS => new.dns_servers.clone_from(&spec.dns_servers),
                NTP => new.ntp_servers.clone_from(&spec.ntp_servers),
                _ => {}
            }
        }
        let valid = valid(&record)?;
        if valid.mode != NetworkMode::Nat
            && let Some(lease) = record.leases.iter().find(|lease| publishes(lease))
        {
            let message = format!(
                "network \"{name}\" publishes ports of NIC \"{}\" of VM \"{}\", which only the mode NAT has: take them from the NIC \
                 first",
                lease.nic, lease.vm_name
            );
            return Err(Failure::precondition("PORTS_PUBLISHED", message));
        }
        if record == before {
            return self.get(name);
        }
        record.generation = record.generation.max(1) + 1;
        // With an id, a retry after the end of the daemon is known to have begun.
        host.requests.note(context, &mut record.begun);
        self.write(host, &record).await?;
        self.apply(host, &mut turn, Some(&record.uid)).await;
        drop(turn);
        let message = format!("the network has generation {} now", record.generation);
        tell(host, &record, "NetworkChanged", &message);
        match self.problem(&record.uid) {
            Some(problem) => Err(problem),
            None => self.get(name),
        }
    }
}

fn publishes(lease: &LeaseRecord) -> bool {
    lease.released_ms == 0 && !lease.ports.is_empty()
}

/// Checks the preconditions of a request. The generation is not compared again for a request that was begun already: the
/// request may have changed it itself.
fn expected(record: &NetworkRecord, context: &Context) -> Result<(), Failure> {
    let begun = !context.request_id.is_empty() && record.begun.iter().any(|mark| mark.key() == context.key());
    let present = v1::Preconditions {
        uid: Uuid::from_slice(&record.uid).unwrap_or_default().to_string(),
        generation: (!begun).then_some(record.generation.max(1)),
    };
    preconditions::check("network", &record.name, &context.preconditions, &present)
}

/// The changed spec, which must be valid as a whole.
fn valid(record: &NetworkRecord) -> Result<NetworkSpec, Failure> {
    let mut found = Violations::default();
    let spec = NetworkSpec::new(
        &mut found,
        "network.spec",
        &record.spec.clone().unwrap_or_default(),
    );
    match spec {
        Some(spec) => Ok(found.or(spec)?),
        None if found.0.is_empty() => Err(not_found(&record.name)),
        None => Err(found.into()),
    }
}

/// What is to be changed, with the fields of the mask.
fn parse(
    request: &v1::UpdateNetworkRequest,
) -> Result<(Metadata, v1::NetworkSpec, Vec<&'static str>), Failure> {
    let mut found = Violations::default();
    let network = request.network.clone().unwrap_or_default();
    let paths = request.update_mask.clone().unwrap_or_default().paths;
    let mut mask = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        match FIELDS.iter().find(|field| *field == path) {
            Some(field) => mask.push(*field),
            None => {
                let problem = format_args!(
                    "\"{}\" can't be changed: give some of {}",
                    text::brief(path),
                    FIELDS.join(", ")
                );
                found.add(format_args!("updateMask.paths[{index}]"), problem);
            }
        }
    }
    if paths.is_empty() {
        let problem = format_args!("must have at least one of {}", FIELDS.join(", "));
        found.add("updateMask", problem);
    }
    // Fields beside the mask mean nothing, and are not looked at.
    let given = network.metadata.unwrap_or_default();
    let mut metadata = v1::ObjectMetadata {
        name: given.name,
        ..Default::default()
    };
    for field in &mask {
        match *field {
            LABELS => metadata.labels.clone_from(&given.labels),
            ANNOTATIONS => metadata.annotations.clone_from(&given.annotations),
            OWNER => metadata.owner.clone_from(&given.owner),
            _ => {}
        }
    }
    let metadata = Metadata::new(&mut found, "network.metadata", &metadata);
    match metadata {
        Some(metadata) => Ok(found.or((metadata, network.spec.unwrap_or_default(), mask))?),
        None => Err(found.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_changed_is_refused_by_field() {
        let network = v1::Network {
            metadata: Some(v1::ObjectMetadata {
                name: "lan".into(),
                labels: [("=".to_owned(), String::new())].into(),
                owner: "me".into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        for (paths, field) in [
            (&[][..], "updateMask"),
            (&[OWNER, "spec.ipv4_cidr"], "updateMask.paths[1]"),
            (&["spec"], "updateMask.paths[0]"),
            (&[LABELS], "network.metadata.labels[\"=\"]"),
        ] {
            let request = v1::UpdateNetworkRequest {
                network: Some(network.clone()),
                update_mask: Some(proto::well_known::FieldMask {
                    paths: paths.iter().map(|path| (*path).to_owned()).collect(),
                }),
                ..Default::default()
            };
            let failure = parse(&request).unwrap_err();
            let fields: Vec<_> = failure.violations.0.iter().map(|wrong| &wrong.field).collect();
            assert_eq!(fields, [field]);
        }
    }
}
