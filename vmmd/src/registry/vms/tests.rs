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
    let (publisher, state) = watch::channel(vm(name));
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
    let reservation = vms.reserve("a").await.unwrap();
    let (mut second, mut third) = (Box::pin(vms.reserve("a")), Box::pin(vms.reserve("a")));
    assert!(waits(&mut second).await && waits(&mut third).await);
    // The first made none.
    drop(reservation);
    let reservation = second.await.unwrap();
    assert!(waits(&mut third).await);
    let _publisher = add(&vms, "a");
    drop(reservation);
    assert!(third.await.is_none());
    assert!(vms.reserve("a").await.is_none());
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
