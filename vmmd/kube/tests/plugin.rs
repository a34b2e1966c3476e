//! The device plugin of the agent, with a kubelet's registration socket.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use hyper_util::rt::TokioIo;
use tokio::{
    net::{UnixListener, UnixStream},
    runtime::Runtime,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, codegen::http::Uri, transport::Endpoint};

use self::proto::{
    AllocateRequest, ContainerAllocateRequest, Device, Empty, RegisterRequest,
    device_plugin_client::DevicePluginClient,
    registration_server::{Registration, RegistrationServer},
};
use crate::mock::{Cluster, vmmd::lock, wait};

#[allow(clippy::all, clippy::pedantic)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.rs"));
}

/// The kubelet's socket, and the requests to it.
struct Registry {
    folder: PathBuf,
    requests: Arc<Mutex<Vec<RegisterRequest>>>,
    runtime: Runtime,
}

struct Socket(Arc<Mutex<Vec<RegisterRequest>>>);

#[tonic::async_trait]
impl Registration for Socket {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        lock(&self.0).push(request.into_inner());
        Ok(Response::new(Empty {}))
    }
}

impl Registry {
    /// As a kubelet that starts: deletes the sockets of all plugins.
    fn start(folder: &Path) -> Self {
        for entry in std::fs::read_dir(folder).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let requests = Arc::<Mutex<_>>::default();
        let guard = runtime.enter();
        let listener = UnixListener::bind(folder.join("kubelet.sock")).unwrap();
        drop(guard);
        let server = tonic::transport::Server::builder()
            .add_service(RegistrationServer::new(Socket(requests.clone())))
            .serve_with_incoming(UnixListenerStream::new(listener));
        runtime.spawn(server);
        Self {
            folder: folder.to_owned(),
            requests,
            runtime,
        }
    }

    /// Resources and sockets that were registered.
    fn registered(&self) -> Vec<(String, String)> {
        let requests = lock(&self.requests);
        let all = requests
            .iter()
            .map(|one| (one.resource_name.clone(), one.endpoint.clone()));
        all.collect()
    }

    fn client(&self, resource: &str) -> DevicePluginClient<tonic::transport::Channel> {
        let known = self.registered();
        let (_, endpoint) = known.iter().find(|(name, _)| name == resource).unwrap();
        let path = self.folder.join(endpoint);
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
        });
        let _guard = self.runtime.enter();
        DevicePluginClient::new(Endpoint::from_static("http://plugin").connect_with_connector_lazy(connector))
    }

    /// Reads lists of devices until one is as wanted.
    fn until(&self, resource: &str, wanted: impl Fn(&[Device]) -> bool) {
        let mut client = self.client(resource);
        self.runtime.block_on(async {
            let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
            let read = async {
                while let Some(list) = lists.message().await.unwrap() {
                    if wanted(&list.devices) {
                        return;
                    }
                }
                panic!("the list has ended");
            };
            tokio::time::timeout(std::time::Duration::from_secs(60), read)
                .await
                .expect("the devices as wanted");
        });
    }
}

fn all_are(health: &'static str) -> impl Fn(&[Device]) -> bool {
    move |devices| devices.len() == 3 && devices.iter().all(|one| one.health == health)
}

#[test]
fn kubelet_gets_places_that_lead_to_vmmd() {
    let cluster = Cluster::start(1);
    let kubelet = Registry::start(&cluster.vmmds[0].plugins());
    let _agent = cluster.agent(0);
    wait("all resources", || kubelet.registered().len() == 4);
    assert!(lock(&kubelet.requests).iter().all(|one| one.version == "v1beta1"));
    kubelet.until("vmmd.dev/vm", all_are("Healthy"));
    kubelet.until("vmmd.dev/cpu-x86-64-v3", all_are("Healthy"));
    kubelet.until("vmmd.dev/cpu-x86-64-v4", <[_]>::is_empty);
    let mut client = kubelet.client("vmmd.dev/vm");
    let request = AllocateRequest {
        container_requests: vec![ContainerAllocateRequest {
            devices_i_ds: vec!["0".to_owned()],
        }],
    };
    let answer = kubelet
        .runtime
        .block_on(client.allocate(request.clone()))
        .unwrap()
        .into_inner();
    let mount = &answer.container_responses[0].mounts[0];
    assert_eq!(
        (&*mount.container_path, &*mount.host_path, mount.read_only),
        ("/run/vmmd-pod", "/run/vmmd/pod", true)
    );
    let mut client = kubelet.client("vmmd.dev/cpu-x86-64-v2");
    let answer = kubelet
        .runtime
        .block_on(client.allocate(request))
        .unwrap()
        .into_inner();
    assert!(answer.container_responses[0].mounts.is_empty());
}

#[test]
fn places_are_unhealthy_without_vmmd_or_kvm() {
    let mut cluster = Cluster::start(1);
    *lock(&cluster.vmmds[0].state.no_kvm) = true;
    let kubelet = Registry::start(&cluster.vmmds[0].plugins());
    let _agent = cluster.agent(0);
    wait("all resources", || kubelet.registered().len() == 4);
    kubelet.until("vmmd.dev/vm", all_are("Unhealthy"));
    *lock(&cluster.vmmds[0].state.no_kvm) = false;
    cluster.vmmds[0].stop();
    cluster.vmmds[0].resume();
    kubelet.until("vmmd.dev/vm", all_are("Healthy"));
    cluster.vmmds[0].stop();
    kubelet.until("vmmd.dev/vm", all_are("Unhealthy"));
    *lock(&cluster.vmmds[0].state.cordoned) = true;
    cluster.vmmds[0].resume();
    kubelet.until("vmmd.dev/vm", all_are("Unhealthy"));
}

#[test]
fn resources_are_registered_again_with_a_new_kubelet() {
    let cluster = Cluster::start(1);
    let folder = cluster.vmmds[0].plugins();
    // The agent starts before the kubelet.
    let _agent = cluster.agent(0);
    wait("the sockets", || folder.join("vmmd.dev-vm.sock").exists());
    for _ in 0..2 {
        let kubelet = Registry::start(&folder);
        // Some may have been registered with the kubelet before, and then all come again.
        wait("all resources", || {
            let registered = kubelet.registered();
            let names: BTreeSet<_> = registered.iter().map(|(name, _)| name).collect();
            names.len() == 4
        });
        wait("the socket", || folder.join("vmmd.dev-vm.sock").exists());
        kubelet.until("vmmd.dev/vm", all_are("Healthy"));
        kubelet.runtime.shutdown_background();
    }
}
