//! Snapshots: archives, and created snapshots.

use std::pin::Pin;

use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status, Streaming};
use vmmd_api::v1::{
    self, export_snapshot_response::Message as Exported, import_snapshot_request::Message as Imported,
    snapshot_service_server::SnapshotService,
};

use super::{Answer, State, lock, refusal};

/// A snapshot with an archive that cannot be read completely.
pub const DAMAGED: &str = "damaged";
/// A snapshot that is taken by a daemon that knows no kinds.
pub const OLD: &str = "old";
/// Bytes of an archive in a message.
const PIECE: usize = 1000;

impl State {
    /// Has a snapshot.
    pub fn put_snapshot(&self, name: &str, archive: &[u8]) {
        lock(&self.snapshots).insert(name.to_owned(), archive.to_vec());
    }

    /// The archive of a snapshot.
    pub fn snapshot(&self, name: &str) -> Option<Vec<u8>> {
        lock(&self.snapshots).get(name).cloned()
    }
}

fn snapshot(name: &str, size_bytes: u64) -> v1::Snapshot {
    v1::Snapshot {
        metadata: Some(v1::ObjectMetadata {
            name: name.to_owned(),
            ..Default::default()
        }),
        status: Some(v1::SnapshotStatus {
            size_bytes,
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[tonic::async_trait]
impl SnapshotService for State {
    async fn create_snapshot(
        &self,
        request: Request<v1::CreateSnapshotRequest>,
    ) -> Answer<v1::CreateSnapshotResponse> {
        let request = request.into_inner();
        self.once(&request)?;
        let mut taken = request.snapshot.unwrap_or_default();
        let wanted = v1::SnapshotConsistency::try_from(request.consistency).unwrap();
        let name = taken.metadata.clone().unwrap_or_default().name;
        let (consistency, consistency_message) = match name.as_str() {
            OLD => (0, String::new()),
            "unfrozen" => (
                v1::SnapshotConsistency::Crash.into(),
                "no agent answers".to_owned(),
            ),
            _ => (wanted.into(), String::new()),
        };
        taken.status = Some(v1::SnapshotStatus {
            consistency,
            consistency_message,
            allocated_bytes: 3 << 20,
            retention: request.retention,
            ..Default::default()
        });
        if let Some(spec) = taken.spec.as_mut().filter(|_| name == OLD) {
            spec.kind = v1::SnapshotKind::Unspecified.into();
        }
        lock(&self.taken).insert(name, taken.clone());
        Ok(Response::new(v1::CreateSnapshotResponse {
            snapshot: Some(taken),
        }))
    }

    async fn get_snapshot(
        &self,
        request: Request<v1::GetSnapshotRequest>,
    ) -> Answer<v1::GetSnapshotResponse> {
        let found = lock(&self.taken).get(&request.get_ref().name).cloned();
        let found = found.ok_or_else(|| Status::not_found("no test has taken it"))?;
        Ok(Response::new(v1::GetSnapshotResponse {
            snapshot: Some(found),
        }))
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Answer<v1::ListSnapshotsResponse> {
        // One a page.
        let after = request.into_inner().page_token;
        let taken = lock(&self.taken);
        let mut rest = taken.iter().filter(|(name, _)| **name > after);
        let page = rest
            .next()
            .map(|(name, snapshot)| (name.clone(), snapshot.clone()));
        let more = rest.next().is_some();
        let (last, snapshots) = page.into_iter().unzip::<_, _, Vec<_>, Vec<_>>();
        Ok(Response::new(v1::ListSnapshotsResponse {
            snapshots,
            next_page_token: last.into_iter().filter(|_| more).collect(),
        }))
    }

    async fn delete_snapshot(
        &self,
        _: Request<v1::DeleteSnapshotRequest>,
    ) -> Answer<v1::DeleteSnapshotResponse> {
        Err(Status::unimplemented("no test deletes one"))
    }

    type ExportSnapshotStream =
        Pin<Box<dyn Stream<Item = Result<v1::ExportSnapshotResponse, Status>> + Send>>;

    async fn export_snapshot(
        &self,
        request: Request<v1::ExportSnapshotRequest>,
    ) -> Answer<Self::ExportSnapshotStream> {
        let name = request.into_inner().name;
        let archive = self.snapshot(&name).ok_or_else(|| {
            let message = format!("there is no snapshot \"{name}\" on this node");
            refusal(Code::NotFound, "SNAPSHOT_NOT_FOUND", message)
        })?;
        let size_bytes = archive.len() as u64;
        let open = Exported::Open(v1::ExportSnapshotOpen {
            snapshot: Some(snapshot(&name, size_bytes)),
            size_bytes,
        });
        let data = archive.chunks(PIECE).map(|data| Exported::Data(data.to_vec()));
        let mut messages: Vec<_> = [open]
            .into_iter()
            .chain(data)
            .map(|message| {
                Ok(v1::ExportSnapshotResponse {
                    message: Some(message),
                })
            })
            .collect();
        if name == DAMAGED {
            messages.push(Err(refusal(
                Code::Internal,
                "INTERNAL",
                "read the snapshot: input/output error".to_owned(),
            )));
        }
        Ok(Response::new(Box::pin(tokio_stream::iter(messages))))
    }

    async fn import_snapshot(
        &self,
        request: Request<Streaming<v1::ImportSnapshotRequest>>,
    ) -> Answer<v1::ImportSnapshotResponse> {
        let mut stream = request.into_inner();
        let first = stream.message().await?.unwrap_or_default();
        let Some(Imported::Open(open)) = &first.message else {
            return Err(Status::invalid_argument("open must come first"));
        };
        let mut archive = Vec::new();
        while let Some(message) = stream.message().await? {
            match message.message {
                Some(Imported::Data(data)) => archive.extend(data),
                _ => return Err(Status::invalid_argument("data must follow")),
            }
        }
        self.once(&first)?;
        let name = match open.name.as_str() {
            "" => "own",
            name => name,
        };
        let size = archive.len() as u64;
        if open.size_bytes != 0 && open.size_bytes != size {
            return Err(Status::invalid_argument("the archive is not as long as was said"));
        }
        self.put_snapshot(name, &archive);
        Ok(Response::new(v1::ImportSnapshotResponse {
            snapshot: Some(snapshot(name, size)),
        }))
    }

    async fn restore_vm(&self, _: Request<v1::RestoreVmRequest>) -> Answer<v1::RestoreVmResponse> {
        Err(Status::unimplemented("no test restores one"))
    }
}
