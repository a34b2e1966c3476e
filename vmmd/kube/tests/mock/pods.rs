//! Launchers that are connected to a mock of vmmd.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use tokio::sync::broadcast;
use tokio_stream::{StreamExt as _, wrappers::BroadcastStream};
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use vmmd_api::v1::{self, PodReport, pod_service_server::PodService, watch_pods_response::Change};

use super::vmmd::{Answer, Events, State, lock};

/// A report to a launcher: its kind, its reason and its message.
pub type Report = (PodReport, String, String);

#[derive(Clone)]
pub struct Pods {
    kept: Arc<Mutex<BTreeMap<String, Launcher>>>,
    changes: broadcast::Sender<Change>,
}

struct Launcher {
    pod: v1::Pod,
    reports: Vec<Report>,
}

impl Default for Pods {
    fn default() -> Self {
        Self {
            kept: Arc::default(),
            changes: broadcast::channel(1024).0,
        }
    }
}

impl Pods {
    /// A launcher connects.
    pub fn connect(&self, pod: v1::Pod) {
        let mut kept = lock(&self.kept);
        let launcher = Launcher {
            pod: pod.clone(),
            reports: Vec::new(),
        };
        kept.insert(pod.uid.clone(), launcher);
        let _ = self.changes.send(Change::Connected(bare(pod)));
    }

    pub fn is_connected(&self, uid: &str) -> bool {
        lock(&self.kept).contains_key(uid)
    }

    /// The last report to the launcher of this pod.
    pub fn report(&self, uid: &str) -> Option<Report> {
        lock(&self.kept).get(uid)?.reports.last().cloned()
    }

    /// All reports to the launcher of this pod.
    pub fn reports(&self, uid: &str) -> Vec<Report> {
        let kept = lock(&self.kept);
        kept.get(uid)
            .map(|launcher| launcher.reports.clone())
            .unwrap_or_default()
    }

    /// The launcher dies, or ends.
    pub fn disconnect(&self, uid: &str) {
        if lock(&self.kept).remove(uid).is_some() {
            let _ = self.changes.send(Change::Disconnected(uid.to_owned()));
        }
    }
}

/// Without the files.
fn bare(mut pod: v1::Pod) -> v1::Pod {
    pod.files.clear();
    pod
}

/// Refusal of a VM whose pod has no launcher.
pub fn not_connected() -> Status {
    let details = ErrorDetails::with_error_info("POD_NOT_CONNECTED", "vmmd", []);
    Status::with_error_details(Code::Unavailable, "the launcher is not connected", details)
}

#[tonic::async_trait]
impl PodService for State {
    type WatchPodsStream = Events<v1::WatchPodsResponse>;

    async fn watch_pods(&self, _: Request<v1::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        let kept = lock(&self.pods.kept);
        let changes = BroadcastStream::new(self.pods.changes.subscribe());
        let pods = kept.values().map(|launcher| bare(launcher.pod.clone())).collect();
        let first = tokio_stream::iter([Change::All(v1::PodSet { pods })]);
        let all = first.chain(changes.filter_map(Result::ok));
        let all = all.map(|change| Ok(v1::WatchPodsResponse { change: Some(change) }));
        Ok(Response::new(Box::pin(all)))
    }

    async fn get_pod(&self, request: Request<v1::GetPodRequest>) -> Answer<v1::GetPodResponse> {
        let kept = lock(&self.pods.kept);
        let found = kept
            .get(&request.get_ref().uid)
            .map(|launcher| launcher.pod.clone());
        let pod = found.ok_or_else(|| Status::not_found("there is none"))?;
        Ok(Response::new(v1::GetPodResponse { pod: Some(pod) }))
    }

    async fn report_pod(&self, request: Request<v1::ReportPodRequest>) -> Answer<v1::ReportPodResponse> {
        let request = request.into_inner();
        self.called(format!(
            "report {} {}",
            request.report().as_str_name(),
            request.reason
        ));
        let mut kept = lock(&self.pods.kept);
        let launcher = kept
            .get_mut(&request.uid)
            .ok_or_else(|| Status::not_found("there is none"))?;
        assert!(request.message.len() <= 1024 && request.reason.len() <= 64);
        launcher
            .reports
            .push((request.report(), request.reason, request.message));
        Ok(Response::new(v1::ReportPodResponse {}))
    }
}
