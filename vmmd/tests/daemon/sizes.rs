//! The largest requests that the API's fields allow.

use tonic::Code;
use vmmd_api::v1::{self, peer_service_client::PeerServiceClient};

use crate::{
    harness::{Daemon, connect, refusal},
    update::masked,
};

/// Longest field of cloud-init data, in bytes.
const DATA: usize = 128 << 10;
/// The same of annotations together.
const ANNOTATIONS: usize = 64 << 10;

/// A YAML document of this many bytes.
fn data(head: &str) -> String {
    format!("{head}{}", "#".repeat(DATA - head.len()))
}

fn annotations() -> std::collections::BTreeMap<String, String> {
    [("a".to_owned(), "x".repeat(ANNOTATIONS - 1))].into()
}

fn init(spec: &mut v1::VmSpec) -> &mut v1::CloudInit {
    spec.cloud_init.get_or_insert_default()
}

#[tokio::test]
async fn vm_grown_by_three_updates_is_updated_as_get_shows_it() {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("a", "");
    init(vm.spec.as_mut().unwrap()).hostname = "a".into();
    vm.metadata.as_mut().unwrap().annotations = annotations();
    daemon.create(vm).await.unwrap();
    for update in [
        masked("a", &["spec.cloud_init.user_data"], |spec| {
            init(spec).user_data = data("#cloud-config\n");
        }),
        masked("a", &["spec.cloud_init.network_config"], |spec| {
            init(spec).network_config = data("version: 2\n");
        }),
        masked("a", &["spec.cloud_init.vendor_data"], |spec| {
            init(spec).vendor_data = data("#cloud-config\n");
        }),
    ] {
        daemon.client().update_vm(update).await.unwrap();
    }
    let mut shown = daemon.get("a").await.unwrap();
    shown.status = None;
    daemon.replace(shown.clone()).await.unwrap();
    // With the user data, as a manifest has it.
    init(shown.spec.as_mut().unwrap()).user_data_digest.clear();
    init(shown.spec.as_mut().unwrap()).user_data = data("#cloud-config\n");
    daemon.replace(shown).await.unwrap();
}

#[tokio::test]
async fn offer_with_most_annotations_of_64_disks_is_read() {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("a", "");
    vm.metadata.as_mut().unwrap().annotations = annotations();
    let disks = (0..64).map(|number| v1::PeerDisk {
        name: format!("d{number}"),
        annotations: annotations(),
        ..Default::default()
    });
    let offer = v1::OfferVmRequest {
        // An unknown protocol version: the refusal shows that the offer was read.
        protocol: 1_000_000,
        vm: Some(vm),
        disks: disks.collect(),
        ..Default::default()
    };
    let mut peers = PeerServiceClient::new(connect(daemon.folder.path()).await);
    let refused = peers.offer_vm(offer).await.unwrap_err();
    assert_ne!(refused.code(), Code::OutOfRange, "{refused:?}");
    assert!(!refusal(&refused).1.is_empty(), "{refused:?}");
}
