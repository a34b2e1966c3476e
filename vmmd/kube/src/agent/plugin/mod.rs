//! The device plugin: offers places for VMs to the kubelet of the node, so that the scheduler places
//! launcher pods on nodes with a vmmd.
//!
//! A container with a place gets the directory of vmmd's socket for launchers. Places of a vmmd that
//! does not answer, is cordoned or has no KVM are unhealthy. Each resource has a socket of its own
//! in the kubelet's directory. A kubelet that starts deletes all sockets there: they are made again,
//! and the resources are registered again.

mod described;
mod directory;
mod serve;

use std::{io, path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, sync::watch, task::JoinSet};
use tonic::{codegen::http::Uri, transport::Endpoint};
use vmmd_api::v1::{self, ConditionStatus};

use self::{
    described::{Described, describe},
    directory::Directory,
    proto::{RegisterRequest, registration_client::RegistrationClient},
};
use crate::{
    daemon::{Daemon, within},
    launcher::{CPU_RESOURCE, VM_RESOURCE},
};

/// The kubelet's API.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.rs"));
}

/// Version of the kubelet's API.
const VERSION: &str = "v1beta1";
/// Name of the kubelet's socket.
const KUBELET: &str = "kubelet.sock";
/// Models of processors that a pod can ask for.
const MODELS: [&str; 3] = ["x86-64-v2", "x86-64-v3", "x86-64-v4"];
/// Wait before a kubelet that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(2);
/// How long an answer of the kubelet may take.
const ANSWER: Duration = Duration::from_secs(10);

/// Settings of the device plugin.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The kubelet's directory for device plugins.
    pub directory: PathBuf,
    /// Directory of vmmd's socket for launchers, on the host.
    pub pods: String,
    /// Number of places for VMs.
    pub max_vms: u32,
}

/// Ability of the node to run VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Health {
    /// The node takes VMs.
    healthy: bool,
    /// Models of processors that it supports.
    models: Vec<String>,
}

impl Health {
    fn of(described: &Described) -> Self {
        let Described::As(node) = described else {
            return Self::default();
        };
        let cordoned = node.spec.as_ref().is_some_and(|spec| spec.cordoned);
        let status = node.status.clone().unwrap_or_default();
        let is_false =
            |one: &v1::Condition| one.r#type == "KvmAvailable" && one.status() == ConditionStatus::False;
        Self {
            healthy: !cordoned && !status.conditions.iter().any(is_false),
            models: status.cpu_models,
        }
    }
}

/// A resource of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Resource {
    /// Its name.
    name: String,
    /// The model of a processor; `None`: places for VMs.
    model: Option<&'static str>,
}

impl Resource {
    fn all() -> Vec<Self> {
        let vm = Self {
            name: VM_RESOURCE.to_owned(),
            model: None,
        };
        let models = MODELS.into_iter().map(|model| Self {
            name: format!("{CPU_RESOURCE}{model}"),
            model: Some(model),
        });
        std::iter::once(vm).chain(models).collect()
    }

    /// Name of its socket.
    fn socket(&self) -> String {
        format!("{}.sock", self.name.replace('/', "-"))
    }

    fn devices(&self, max_vms: u32, health: &Health) -> Vec<proto::Device> {
        let has = |model: &str| health.models.iter().any(|one| one == model);
        if self.model.is_some_and(|model| !has(model)) {
            return Vec::new();
        }
        let state = if health.healthy { "Healthy" } else { "Unhealthy" };
        let devices = (0..max_vms).map(|index| proto::Device {
            id: index.to_string(),
            health: state.to_owned(),
        });
        devices.collect()
    }
}

/// Offers the node. Never returns.
pub async fn run(daemon: Daemon, settings: Settings) {
    let (send, described) = watch::channel(Described::NotYet);
    let mut parts = JoinSet::new();
    parts.spawn(describe(daemon, send));
    let mut last = String::new();
    loop {
        let error = match offer(&settings, &described).await {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        };
        // A node may have no kubelet for long.
        if !error.is_empty() && error != last {
            tracing::warn!("device plugin in {}: {error}", settings.directory.display());
        }
        last = error;
        tokio::time::sleep(RETRY).await;
    }
}

/// Offers all resources until the kubelet starts again.
async fn offer(settings: &Settings, described: &watch::Receiver<Described>) -> io::Result<()> {
    let directory = Directory::watch(&settings.directory)?;
    let mut servers = JoinSet::new();
    let mut sockets = Vec::new();
    for resource in Resource::all() {
        let path = settings.directory.join(resource.socket());
        let listener = directory::listen(&path)?;
        servers.spawn(serve::run(
            listener,
            resource,
            settings.clone(),
            described.clone(),
        ));
        sockets.push(path);
    }
    let kubelet = settings.directory.join(KUBELET);
    sockets.push(kubelet.clone());
    // Sockets with these names may be replaced at any time from here on.
    let known = directory::identities(&sockets);
    for resource in Resource::all() {
        register(kubelet.clone(), &resource)
            .await
            .map_err(io::Error::other)?;
    }
    tracing::info!("the kubelet has {VM_RESOURCE}");
    while directory::identities(&sockets) == known {
        tokio::select! {
            changed = directory.changed() => changed?,
            Some(ended) = servers.join_next() => {
                return Err(io::Error::other(format!("a server has ended: {ended:?}")));
            }
        }
    }
    Ok(())
}

async fn register(kubelet: PathBuf, resource: &Resource) -> Result<(), String> {
    let connector = tower::service_fn(move |_: Uri| {
        let kubelet = kubelet.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(kubelet).await?)) }
    });
    // The address is not used: the connector knows where to go.
    let endpoint = Endpoint::from_static("http://kubelet").connect_timeout(ANSWER);
    let channel = endpoint.connect_with_connector_lazy(connector);
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: resource.socket(),
        resource_name: resource.name.clone(),
        options: None,
    };
    let answer = within(ANSWER, RegistrationClient::new(channel).register(request)).await;
    answer
        .map(drop)
        .map_err(|status| format!("register {}: {}", resource.name, status.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(change: impl FnOnce(&mut v1::Node)) -> Described {
        let mut node = v1::Node::default();
        node.spec.get_or_insert_default();
        let status = node.status.get_or_insert_default();
        status.cpu_models = vec!["host".to_owned(), "x86-64-v2".to_owned()];
        change(&mut node);
        Described::As(Box::new(node))
    }

    #[test]
    fn places_are_healthy_on_a_node_that_takes_vms() {
        let kvm = |status: ConditionStatus| {
            node(|node| {
                node.status.as_mut().unwrap().conditions = vec![v1::Condition {
                    r#type: "KvmAvailable".to_owned(),
                    status: status.into(),
                    ..v1::Condition::default()
                }];
            })
        };
        let table = [
            (Described::NotYet, false),
            (Described::Away, false),
            (node(|_| {}), true),
            (kvm(ConditionStatus::True), true),
            (kvm(ConditionStatus::False), false),
            (node(|node| node.spec.as_mut().unwrap().cordoned = true), false),
        ];
        for (index, (described, healthy)) in table.into_iter().enumerate() {
            assert_eq!(Health::of(&described).healthy, healthy, "{index}");
        }
    }

    #[test]
    fn resources_are_places_and_the_models_of_the_node() {
        let health = Health::of(&node(|_| {}));
        let counts = Resource::all()
            .into_iter()
            .map(|resource| (resource.devices(3, &health).len(), resource.name));
        let counts: Vec<_> = counts.collect();
        let wanted = [
            (3, "vmmd.dev/vm"),
            (3, "vmmd.dev/cpu-x86-64-v2"),
            (0, "vmmd.dev/cpu-x86-64-v3"),
            (0, "vmmd.dev/cpu-x86-64-v4"),
        ];
        assert_eq!(counts, wanted.map(|(count, name)| (count, name.to_owned())));
    }
}
