//! Networks.

use tonic::{Code, Request, Response, Status};
use vmmd_api::v1::{self, WatchEventType, network_service_server::NetworkService};

use super::{Answer, Events, State, lock, refusal};

impl State {
    /// A network as the daemon has it.
    pub fn network(&self, name: &str) -> Option<v1::Network> {
        lock(&self.networks).get(name).cloned()
    }
}

fn metadata(network: &mut v1::Network) -> &mut v1::ObjectMetadata {
    network.metadata.get_or_insert_default()
}

#[tonic::async_trait]
impl NetworkService for State {
    async fn create_network(
        &self,
        request: Request<v1::CreateNetworkRequest>,
    ) -> Answer<v1::CreateNetworkResponse> {
        self.once(request.get_ref())?;
        let mut network = request.into_inner().network.unwrap();
        metadata(&mut network).uid = "5e0c3f56-0a3a-4c69-8f1d-0d8f6a3f5a10".into();
        metadata(&mut network).generation = 1;
        network.status = Some(v1::NetworkStatus {
            ready: true,
            bridge: "vmb5e0c3f560a".into(),
            gateway: "10.80.0.1".into(),
            available_addresses: 253,
            ..Default::default()
        });
        let name = metadata(&mut network).name.clone();
        lock(&self.networks).insert(name, network.clone());
        Ok(Response::new(v1::CreateNetworkResponse {
            network: Some(network),
        }))
    }

    async fn get_network(&self, request: Request<v1::GetNetworkRequest>) -> Answer<v1::GetNetworkResponse> {
        let name = request.into_inner().name;
        let network = self.network(&name);
        let message = || format!("there is no network \"{name}\" on this node");
        let network = network.ok_or_else(|| refusal(Code::NotFound, "NETWORK_NOT_FOUND", message()))?;
        Ok(Response::new(v1::GetNetworkResponse {
            network: Some(network),
        }))
    }

    /// One on a page.
    async fn list_networks(
        &self,
        request: Request<v1::ListNetworksRequest>,
    ) -> Answer<v1::ListNetworksResponse> {
        let request = request.into_inner();
        let selectors = request.filter.unwrap_or_default().labels;
        self.called(format!(
            "list networks {selectors:?} after {:?}",
            request.page_token
        ));
        let networks = lock(&self.networks);
        let mut rest = networks.iter().filter(|(name, _)| **name > request.page_token);
        let page: Vec<_> = rest
            .next()
            .map(|(_, network)| network.clone())
            .into_iter()
            .collect();
        let last = rest
            .next()
            .and(page.last())
            .and_then(|network| network.metadata.clone());
        Ok(Response::new(v1::ListNetworksResponse {
            networks: page,
            next_page_token: last.map(|last| last.name).unwrap_or_default(),
            ..Default::default()
        }))
    }

    type WatchNetworksStream = Events<v1::WatchNetworksResponse>;

    /// Sends the existing networks, then their deletion.
    async fn watch_networks(
        &self,
        request: Request<v1::WatchNetworksRequest>,
    ) -> Answer<Self::WatchNetworksStream> {
        self.called(format!("watch networks from {:?}", request.into_inner().cursor));
        let event = |kind: WatchEventType, network: Option<v1::Network>| {
            Ok(v1::WatchNetworksResponse {
                r#type: kind.into(),
                network,
                cursor: "c1".into(),
            })
        };
        let there: Vec<_> = lock(&self.networks).values().cloned().collect();
        let mut events: Vec<_> = there
            .iter()
            .map(|network| event(WatchEventType::Added, Some(network.clone())))
            .collect();
        events.push(event(WatchEventType::Synced, None));
        events.extend(
            there
                .into_iter()
                .map(|network| event(WatchEventType::Deleted, Some(network))),
        );
        events.push(Err(Status::permission_denied("that was all")));
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }

    async fn update_network(
        &self,
        request: Request<v1::UpdateNetworkRequest>,
    ) -> Answer<v1::UpdateNetworkResponse> {
        self.once(request.get_ref())?;
        let request = request.into_inner();
        let mut wanted = request.network.unwrap();
        let name = metadata(&mut wanted).name.clone();
        let paths = request.update_mask.unwrap().paths;
        self.called(format!("update {name}: {paths:?}, {:?}", request.preconditions));
        let mut networks = lock(&self.networks);
        let network = networks.get_mut(&name).unwrap();
        for path in paths {
            let (from, to) = (wanted.spec.clone().unwrap(), network.spec.as_mut().unwrap());
            match path.as_str() {
                "spec.mode" => to.mode = from.mode,
                "spec.dns_servers" => to.dns_servers = from.dns_servers,
                "spec.routes" => to.routes = from.routes,
                "spec.dhcp_options" => to.dhcp_options = from.dhcp_options,
                "spec.domain" => to.domain = from.domain,
                "spec.dns_records" => to.dns_records = from.dns_records,
                "spec.reservations" => to.reservations = from.reservations,
                "spec.security_groups" => to.security_groups = from.security_groups,
                "metadata.labels" => metadata(network).labels = metadata(&mut wanted).labels.clone(),
                other => panic!("{other} is not changed in these tests"),
            }
        }
        Ok(Response::new(v1::UpdateNetworkResponse {
            network: Some(network.clone()),
        }))
    }

    async fn delete_network(
        &self,
        request: Request<v1::DeleteNetworkRequest>,
    ) -> Answer<v1::DeleteNetworkResponse> {
        self.once(request.get_ref())?;
        lock(&self.networks).remove(&request.into_inner().name);
        Ok(Response::new(v1::DeleteNetworkResponse {}))
    }
}
