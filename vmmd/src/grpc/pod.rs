//! `vmmd.v1.PodService`.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use vmmd_api::v1::{self, pod_service_server::PodService, watch_pods_response::Change};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

use crate::{
    host::Host,
    registry::pods::{Pod, Report},
};

/// Changes ready for a watcher that reads slowly.
const READY: usize = 4;
/// Longest reason of a report in bytes.
const MAX_REASON: usize = 64;
/// Longest message of a report in bytes.
const MAX_MESSAGE: usize = 1024;

/// The service.
#[derive(Debug)]
pub struct Pods {
    host: Arc<Host>,
}

impl Pods {
    /// Over the pods of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }

    fn find(&self, uid: &str) -> Result<Arc<Pod>, Failure> {
        self.host.pods.get(uid).ok_or_else(|| {
            let message = format!(
                "no launcher of a pod {} is connected to this node",
                text::brief(uid)
            );
            Failure::new(Kind::NotFound, "POD_NOT_FOUND", message)
        })
    }
}

type Sender = mpsc::Sender<Result<v1::WatchPodsResponse, Status>>;

#[tonic::async_trait]
impl PodService for Pods {
    type WatchPodsStream = ReceiverStream<Result<v1::WatchPodsResponse, Status>>;

    async fn watch_pods(
        &self,
        _: Request<v1::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let (sender, receiver) = mpsc::channel(READY);
        let host = Arc::clone(&self.host);
        tokio::spawn(async move {
            tokio::select! {
                _gone = watch(&host, &sender) => {}
                () = sender.closed() => {}
                () = host.stopping.cancelled() => {
                    let _gone = sender.send(Err(Failure::stopping().into())).await;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn get_pod(
        &self,
        request: Request<v1::GetPodRequest>,
    ) -> Result<Response<v1::GetPodResponse>, Status> {
        let pod = self.find(&request.get_ref().uid)?;
        let files = pod.files.content().iter().map(|(path, content)| v1::PodFile {
            path: path.clone(),
            content: content.clone(),
        });
        let described = v1::Pod {
            files: files.collect(),
            ..pod.describe()
        };
        Ok(Response::new(v1::GetPodResponse { pod: Some(described) }))
    }

    async fn report_pod(
        &self,
        request: Request<v1::ReportPodRequest>,
    ) -> Result<Response<v1::ReportPodResponse>, Status> {
        let request = request.into_inner();
        let pod = self.find(&request.uid)?;
        let refused = match request.report() {
            v1::PodReport::Waiting => false,
            v1::PodReport::Refused => true,
            v1::PodReport::Unspecified => {
                return Err(
                    Failure::field("report", "must be POD_REPORT_WAITING or POD_REPORT_REFUSED").into(),
                );
            }
        };
        let v1::ReportPodRequest { reason, message, .. } = request;
        let is_word = reason.starts_with(|first: char| first.is_ascii_uppercase())
            && reason.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !is_word || reason.len() > MAX_REASON {
            let wanted = format!("must be one CamelCase word of at most {MAX_REASON} characters");
            return Err(Failure::field("reason", wanted).into());
        }
        if message.len() > MAX_MESSAGE {
            let wanted = format!("must be at most {MAX_MESSAGE} bytes");
            return Err(Failure::field("message", wanted).into());
        }
        self.host.vms.check_pod(pod.uid.as_str())?;
        pod.report.send_replace(Some(Report {
            refused,
            reason,
            message,
        }));
        Ok(Response::new(v1::ReportPodResponse {}))
    }
}

/// Sends all pods, then each change. Changes while the watcher does not read become one. Returns when the watcher has gone.
async fn watch(
    host: &Host,
    sender: &Sender,
) -> Result<(), mpsc::error::SendError<Result<v1::WatchPodsResponse, Status>>> {
    let send = async |change| {
        let response = v1::WatchPodsResponse { change: Some(change) };
        sender.send(Ok(response)).await
    };
    let mut news = host.pods.news();
    news.mark_unchanged();
    let all = host.pods.list();
    let mut known = numbers(&all);
    let pods = all.iter().map(|pod| pod.describe()).collect();
    send(Change::All(v1::PodSet { pods })).await?;
    while news.changed().await.is_ok() {
        let all = host.pods.list();
        let present = numbers(&all);
        for uid in known.keys().filter(|uid| !present.contains_key(*uid)) {
            send(Change::Disconnected(uid.clone())).await?;
        }
        for pod in all {
            if known.get(pod.uid.as_str()) != Some(&pod.number) {
                send(Change::Connected(pod.describe())).await?;
            }
        }
        known = present;
    }
    Ok(())
}

/// Numbers of the pods' connections, by uid.
fn numbers(pods: &[Arc<Pod>]) -> BTreeMap<String, u64> {
    pods.iter()
        .map(|pod| (pod.uid.as_str().to_owned(), pod.number))
        .collect()
}
