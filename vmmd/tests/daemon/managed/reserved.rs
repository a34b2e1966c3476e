//! Reserved addresses, and names that belong to a network.

use vmmd_api::v1::{AddressReservation, DnsRecord, NetworkSpec};

use super::*;

fn reservations(all: &[(&str, &str, &str)]) -> NetworkSpec {
    let reservations = all.iter().map(|(name, address, mac)| AddressReservation {
        name: (*name).into(),
        address: (*address).into(),
        mac: (*mac).into(),
    });
    NetworkSpec {
        ipv4_cidr: "10.80.0.0/24".into(),
        reservations: reservations.collect(),
        ..NetworkSpec::default()
    }
}

/// A NIC with an address, and with a MAC address unless it is empty.
fn with(address: &str, mac: &str) -> NicSpec {
    NicSpec {
        address: address.into(),
        mac: mac.into(),
        ..nic("lan")
    }
}

#[tokio::test]
async fn reserved_address_outlives_its_vm_and_is_given_by_name() {
    const MAC: &str = "52:54:00:12:34:56";
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let first = reservations(&[("web", "10.80.0.2", ""), ("db", "10.80.0.3", MAC)]);
    daemon.make_network_as("lan", first).await.unwrap();
    // No NIC gets a reserved address on its own, except one with its MAC address.
    assert_eq!(daemon.start_in("a", nic("lan")).await.unwrap(), ["10.80.0.4"]);
    assert_eq!(daemon.start_in("b", with("", MAC)).await.unwrap(), ["10.80.0.3"]);
    assert_eq!(
        daemon.start_in("c", with("web", "")).await.unwrap(),
        ["10.80.0.2"]
    );
    let status = daemon.network("lan").await.unwrap().status.unwrap();
    let names: Vec<_> = status
        .leases
        .iter()
        .map(|lease| lease.reservation.as_str())
        .collect();
    assert_eq!((names, status.available_addresses), (vec!["web", "db", ""], 250));

    for (vm, nic, reason) in [
        ("d", with("web", ""), "ADDRESS_IN_USE"),
        ("e", with("10.80.0.3", ""), "ADDRESS_RESERVED"),
        // It gets the MAC address of the reservation.
        ("h", with("db", ""), "ADDRESS_IN_USE"),
        ("f", with("none", ""), "RESERVATION_NOT_FOUND"),
    ] {
        let refused = daemon.start_in(vm, nic).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, reason);
    }
    daemon.delete("h", true).await.unwrap();
    // A named reservation stays; the one of a MAC address may go.
    let other = reservations(&[("web", "10.80.0.9", "")]);
    let request = changes::change(&["spec.reservations"], other);
    let refused = daemon.update_network(request).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "RESERVATION_IN_USE");
    assert_says(&refused, "reservation \"web\"");
    let fewer = reservations(&[("web", "10.80.0.2", "")]);
    let request = changes::change(&["spec.reservations"], fewer);
    daemon.update_network(request).await.unwrap();

    daemon.delete("c", true).await.unwrap();
    daemon.kill_and_restart().await;
    assert_eq!(daemon.start_in("g", nic("lan")).await.unwrap(), ["10.80.0.5"]);
}

#[tokio::test]
async fn reserved_ipv6_address_outlives_its_vm() {
    const MAC: &str = "52:54:00:12:34:56";
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let spec = NetworkSpec {
        ipv4_cidr: String::new(),
        ipv6_cidr: "fd00:80::/64".into(),
        ..reservations(&[("web", "", MAC)])
    };
    daemon.make_network_as("lan", spec).await.unwrap();
    for vm in ["a", "b"] {
        let addresses = daemon.start_in(vm, with("web", "")).await.unwrap();
        assert_eq!(addresses, ["fd00:80::5054:ff:fe12:3456"]);
        let leases = daemon.network("lan").await.unwrap().status.unwrap().leases;
        let lease = leases.iter().find(|lease| lease.vm == vm).unwrap();
        assert_eq!((lease.reservation.as_str(), lease.mac.as_str()), ("web", MAC));
        daemon.delete(vm, true).await.unwrap();
    }
    let refused = daemon.start_in("c", with("web", "52:54:00:00:00:01")).await;
    let refused = refused.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "ADDRESS_RESERVED");
    assert_says(&refused, MAC);
}

#[tokio::test]
async fn address_of_a_deleted_vm_is_free_when_configured() {
    for (config, expected) in [
        ("", "10.80.0.3"),
        ("address_retention_seconds = 0\n", "10.80.0.2"),
    ] {
        let namespace = Namespace::new();
        let mut daemon = Daemon::in_network_with(&namespace.0, config).await;
        let made = daemon.make_network("lan", "10.80.0.0/24", NetworkMode::Nat).await;
        made.unwrap();
        assert_eq!(daemon.start_in("a", nic("lan")).await.unwrap(), ["10.80.0.2"]);
        daemon.delete("a", true).await.unwrap();
        assert_eq!(daemon.start_in("b", nic("lan")).await.unwrap(), [expected]);
    }
}

#[tokio::test]
async fn guest_finds_records_of_its_network_while_it_runs() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    daemon.start_in("a", nic("lan")).await.unwrap();
    let guest = Guest::in_place_of(&namespace, &daemon, "a").await;
    let asked = |name| guest.resolve("10.80.0.1", name);
    assert_eq!(asked("db.lan.internal"), "3 -");
    let record = |name: &str, address: &str| DnsRecord {
        name: name.into(),
        addresses: vec![address.into()],
    };
    let spec = NetworkSpec {
        domain: "lab.example".into(),
        dns_records: vec![
            record("db", "10.80.0.9"),
            record("registry.example.com", "192.0.2.7"),
        ],
        ..NetworkSpec::default()
    };
    let request = changes::change(&["spec.domain", "spec.dns_records"], spec);
    daemon.update_network(request).await.unwrap();
    for (name, expected) in [
        ("db.lab.example", "0 10.80.0.9"),
        ("registry.example.com", "0 192.0.2.7"),
        ("a.lab.example", "0 10.80.0.2"),
        ("a.lan.internal", "0 10.80.0.2"),
        ("none.lab.example", "3 -"),
    ] {
        assert_eq!(asked(name), expected, "{name}");
    }
}
