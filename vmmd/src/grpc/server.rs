//! The server behind the listeners.

use std::{io, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
    time::sleep,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::Server};
use tonic_health::pb::health_server::HealthServer;
use vmmd_api::v1::{
    disk_service_server::DiskServiceServer, event_service_server::EventServiceServer,
    image_service_server::ImageServiceServer, migration_service_server::MigrationServiceServer,
    network_service_server::NetworkServiceServer, node_service_server::NodeServiceServer,
    operation_service_server::OperationServiceServer, peer_service_server::PeerServiceServer,
    pod_service_server::PodServiceServer, snapshot_service_server::SnapshotServiceServer,
    vm_service_server::VmServiceServer,
};

use super::{
    connection::Connection,
    disk::Disks,
    event::EventLog,
    health::Healths,
    image::Images,
    migration::Migrations,
    network::Networks,
    node::Nodes,
    operation::Operations,
    pod::Pods,
    snapshot::Snapshots,
    socket::{Socket, accept},
    vm::Vms,
};
use crate::{
    auth::{Audit, Bounds, Guard, MAX_OFFER, Places, Turns},
    host::Host,
    metrics::Counted,
};

/// Most calls at once on one connection, streams included. `limits.streams_per_client` counts streams of answers alone; this bounds calls
/// whose request is not whole or whose answer is not read.
const MAX_STREAMS: u32 = 512;
/// Answers of one client to calls that read, being made or sent. An answer has some 3 MiB at most; a client that does not read them has
/// the rest of its calls wait.
const READS: usize = 32;
/// The same for calls that read and wait for files or for the process of a VM.
const LOOKS: usize = 16;
/// Largest headers of a call in bytes.
const MAX_HEADERS: u32 = 16 << 10;
/// Largest frame that a client may send in bytes: the least that HTTP/2 allows as a limit (RFC 9113, 6.5.2).
const MAX_FRAME: u32 = 16 << 10;
/// Flow-control window of a call: unread bytes that a client may send.
const STREAM_WINDOW: u32 = 256 << 10;
/// The same of all calls of a connection.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Calls that a client has taken back before we have begun with them (CVE-2023-44487); more end the connection.
const MAX_PENDING_RESETS: usize = 20;
/// Calls that we have ended because of the client's mistakes; more end the connection.
const MAX_ERROR_RESETS: usize = 256;
/// Over TCP, silence of a client after which it receives a ping.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// How long it may take to answer that.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long open streams may take to end when the daemon ends.
const SHUTDOWN: Duration = Duration::from_millis(500);

/// A function, since rustc 1.95 with optimization miscompiles a closure that takes a builder: two calls with equal constants share one
/// builder, and the first call frees it (rust-lang/rust#155241).
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(vmmd_api::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

/// All services. The guard knows the largest message of each method.
fn routes(host: &Arc<Host>) -> anyhow::Result<Routes> {
    let health = HealthServer::new(Healths::new(host.store.clone()));
    let host = || Arc::clone(host);
    Ok(Routes::new(health)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .add_service(VmServiceServer::new(Vms::new(host())).max_decoding_message_size(MAX_OFFER))
        .add_service(DiskServiceServer::new(Disks::new(host())).max_decoding_message_size(MAX_OFFER))
        .add_service(NetworkServiceServer::new(Networks::new(host())).max_decoding_message_size(MAX_OFFER))
        .add_service(ImageServiceServer::new(Images::new(host())).max_decoding_message_size(MAX_OFFER))
        .add_service(
            OperationServiceServer::new(Operations::new(host())).max_decoding_message_size(MAX_OFFER),
        )
        .add_service(EventServiceServer::new(EventLog::new(host())).max_decoding_message_size(MAX_OFFER))
        .add_service(SnapshotServiceServer::new(Snapshots::new(host())).max_decoding_message_size(MAX_OFFER))
        .add_service(
            MigrationServiceServer::new(Migrations::new(host())).max_decoding_message_size(MAX_OFFER),
        )
        .add_service(PeerServiceServer::new(Migrations::new(host())).max_decoding_message_size(MAX_OFFER))
        .add_service(PodServiceServer::new(Pods::new(host())).max_decoding_message_size(MAX_OFFER))
        .add_service(NodeServiceServer::new(Nodes::new(host())).max_decoding_message_size(MAX_OFFER)))
}

/// Serves the API until the daemon ends.
pub async fn serve(
    host: Arc<Host>,
    socket: Socket,
    tcp: Option<super::Listener>,
    audit: Arc<Audit>,
) -> anyhow::Result<()> {
    let limits = host.config.limits;
    let routes = routes(&host)?;
    let guard = Guard::new(
        audit,
        host.events.clone(),
        Bounds {
            request: limits.request(),
            streams: Places::new(limits.streams, limits.streams_per_client),
            reads: Turns::new(READS),
            looks: Turns::new(LOOKS),
        },
    );
    let (sender, local) = mpsc::channel(1);
    let accepting = tokio::spawn(accept(socket, limits, sender));
    let (sender, remote) = mpsc::channel(1);
    let tcp = tcp.map(|tcp| tokio::spawn(tcp.accept(limits, sender)));
    let stopping = &host.stopping;
    // A local client cannot vanish, and may be suspended (^Z) for a long time.
    let local = serve_on(&routes, &guard, None, local, stopping);
    let bounds = Some((KEEPALIVE, limits.connection()));
    let remote = serve_on(&routes, &guard, bounds, remote, stopping);
    // Without TCP the stream of its connections ends at once.
    let result = tokio::try_join!(local, remote);
    accepting.abort();
    if let Some(tcp) = tcp {
        tcp.abort();
    }
    result?;
    Ok(())
}

async fn serve_on<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    routes: &Routes,
    guard: &Guard,
    remote: Option<(Duration, Duration)>,
    incoming: mpsc::Receiver<io::Result<Connection<S>>>,
    stopping: &CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let mut server = Server::builder();
    if let Some((_, age)) = remote {
        server = server.max_connection_age(age).max_connection_age_grace(age / 10);
    }
    let serving = server
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_header_list_size(MAX_HEADERS)
        .max_frame_size(MAX_FRAME)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
        .http2_max_local_error_reset_streams(Some(MAX_ERROR_RESETS))
        .http2_keepalive_interval(remote.map(|(keepalive, _)| keepalive))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .layer(tower::layer::layer_fn(Counted::new))
        .layer(guard.clone())
        .add_routes(routes.clone())
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), stopping.clone().cancelled_owned());
    tokio::select! {
        result = serving => result,
        () = async { stopping.cancelled().await; sleep(SHUTDOWN).await } => Ok(()),
    }
}
