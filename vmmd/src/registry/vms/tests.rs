use vmmd_objects::feed::Position;

use super::*;

fn vm(name: &str) -> Arc<v1::Vm> {
    let metadata = ObjectMetadata {
        name: name.to_owned(),
        ..Default::default()
    };
    Arc::new(v1::Vm {
        metadata: Some(metadata),
        ..Default::default()
    })
}

fn add(vms: &Vms, name: &str) -> watch::Sender<Arc<v1::Vm>> {
    add_as(vms, name, vm(name))
}

fn add_as(vms: &Vms, name: &str, state: Arc<v1::Vm>) -> watch::Sender<Arc<v1::Vm>> {
    let (publisher, state) = watch::channel(state);
    let entry = Entry {
        uid: Uuid::new_v4(),
        mailbox: Mailbox::new().0,
        state,
    };
    vms.insert(name, entry, vms.now());
    publisher
}

async fn waits(future: &mut (impl Future + Unpin)) -> bool {
    tokio::select! {
        biased;
        _ = future => false,
        () = std::future::ready(()) => true,
    }
}

#[tokio::test]
async fn a_name_is_given_once() {
    let vms = Vms::default();
    let reservation = vms.reserve("a", None).await.unwrap();
    let (mut second, mut third) = (Box::pin(vms.reserve("a", None)), Box::pin(vms.reserve("a", None)));
    assert!(waits(&mut second).await && waits(&mut third).await);
    // The first made none.
    drop(reservation);
    let reservation = second.await.unwrap();
    assert!(waits(&mut third).await);
    let _publisher = add(&vms, "a");
    drop(reservation);
    assert_eq!(third.await.unwrap_err().reason, "VM_EXISTS");
    assert_eq!(vms.reserve("a", None).await.unwrap_err().reason, "VM_EXISTS");
}

fn of_pod(name: &str, pod: &str) -> Arc<v1::Vm> {
    let pod = v1::PodSpec { uid: pod.to_owned() };
    Arc::new(v1::Vm {
        spec: Some(v1::VmSpec {
            pod: Some(pod),
            ..Default::default()
        }),
        ..vm(name).as_ref().clone()
    })
}

#[tokio::test]
async fn pod_has_one_vm_and_none_after_that_has_moved() {
    let vms = Vms::default();
    let pod = PodUid::new("pod-1").unwrap();
    let reservation = vms.reserve("a", Some(&pod)).await.unwrap();
    let mut second = Box::pin(vms.reserve("b", Some(&pod)));
    assert!(waits(&mut second).await);
    let _publisher = add_as(&vms, "a", of_pod("a", "pod-1"));
    drop(reservation);
    assert_eq!(second.await.unwrap_err().reason, "POD_HAS_VM");
    let entry = vms.of_pod("pod-1").unwrap();
    assert!(vms.check_pod("pod-1").is_err() && vms.check_pod("pod-2").is_ok());
    // The actor is replaced, and the VM is deleted.
    let _publisher = add_as(&vms, "a", of_pod("a", "pod-1"));
    assert_ne!(vms.of_pod("pod-1").unwrap().uid, entry.uid);
    vms.drop_out("a");
    assert!(vms.of_pod("pod-1").is_none() && !vms.moved_from("pod-1"));
    drop(vms.reserve("a", Some(&pod)).await.unwrap());
    let _publisher = add_as(&vms, "a", of_pod("a", "pod-1"));
    let handover = HandoverRecord {
        peer: "node-2:7443".to_owned(),
        ..handover::record(handover::Handover::Source(vm_lifecycle::handover::Source::Gone(
            1,
        )))
    };
    let metadata = vm("a").metadata.clone().unwrap();
    let tombstone = vms.begin_delete(metadata, Some(&handover));
    vms.remove("a", tombstone);
    assert!(vms.moved_from("pod-1") && !vms.moved_from("pod-2"));
    let refused = vms.reserve("b", Some(&pod)).await;
    assert_eq!(refused.unwrap_err().reason, "POD_MIGRATED");
}

#[test]
fn a_replaced_actor_keeps_the_place_of_the_creation() {
    let vms = Vms::default();
    let _publisher = add(&vms, "a");
    let made = |vms: &Vms| vms.registry.see("a").unwrap().record.made;
    let first = made(&vms);
    assert_eq!(first.0, 1);
    let publisher = add(&vms, "a");
    assert_eq!(made(&vms), first);
    assert_eq!(vms.failed("a"), 1);
    vms.publish(&publisher, &vm("a"));
    let entry = vms.get("a").unwrap();
    assert!(vms.find(entry.uid).is_some());
    vms.drop_out("a");
    assert!(vms.get("a").is_none() && vms.find(entry.uid).is_none() && vms.list().is_empty());
    let deletions = vms.registry.lock().feed().deletions_since(Position::default());
    assert_eq!(deletions.unwrap().len(), 1);
}
