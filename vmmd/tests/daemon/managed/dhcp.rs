//! Declined addresses, and what guests receive by DHCP.

use vmmd_api::v1::{
    DhcpOption, ListEventsRequest, NetworkRoute, NetworkSpec, dhcp_option::Value,
    event_service_client::EventServiceClient,
};

use super::*;

impl Guest {
    /// Declines an address (RFC 2131, 3.1.5).
    fn decline(&self, mac: &str, address: &str) {
        let program = r#"
import socket, struct, sys
mac = bytes.fromhex(sys.argv[1].replace(':', ''))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
s.setsockopt(socket.SOL_SOCKET, 25, b'eth0')
s.bind(('', 68))
head = struct.pack('!BBBBIHH4s4s4s4s16s64s128s4s', 1, 1, 6, 0, 8, 0, 0, b'', b'', b'', b'', mac, b'', b'', bytes([99, 130, 83, 99]))
s.sendto(head + bytes([53, 1, 4, 50, 4]) + socket.inet_aton(sys.argv[2]) + bytes([255]), ('255.255.255.255', 67))
"#;
        let output = self
            .namespace
            .python(program)
            .args([mac, address])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// A client without an address in place of a VM that does not run, and its MAC address.
async fn client(namespace: &Namespace, daemon: &mut Daemon, vm: &str) -> (Guest, String) {
    daemon.start_in(vm, nic("lan")).await.unwrap();
    let running = daemon.get(vm).await.unwrap();
    let nic = status(&running).nics[0].clone();
    daemon.kill_vm(vm).await.unwrap();
    let bridge = daemon.network("lan").await.unwrap().status.unwrap().bridge;
    (Guest::on(namespace, &nic.tap, &bridge, &nic.mac), nic.mac)
}

async fn addresses(daemon: &Daemon, vm: &str) -> Vec<String> {
    status(&daemon.get(vm).await.unwrap()).nics[0].addresses.clone()
}

#[tokio::test]
async fn declined_address_is_replaced_and_reported() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let (a, mac_of_a) = client(&namespace, &mut daemon, "a").await;
    let (b, mac_of_b) = client(&namespace, &mut daemon, "b").await;
    let gateway = Ipv4Addr::new(10, 80, 0, 1);
    let offered = |last| Some((Ipv4Addr::new(10, 80, 0, last), gateway));
    assert_eq!(a.dhcp(&mac_of_a), offered(2));
    // A declined address of another NIC changes nothing.
    a.decline(&mac_of_a, "10.80.0.3");
    a.decline(&mac_of_a, "10.80.0.2");
    within(async || (addresses(&daemon, "a").await == ["10.80.0.4"]).then_some(())).await;
    assert_eq!(addresses(&daemon, "b").await, ["10.80.0.3"]);
    assert_eq!(a.dhcp(&mac_of_a), offered(4));

    let network = daemon.network("lan").await.unwrap().status.unwrap();
    assert!(network.ready);
    let named = "NIC \"eth0\" of VM \"a\" declined 10.80.0.2";
    assert!(network.message.contains(named), "{}", network.message);
    let declined: Vec<_> = network
        .leases
        .iter()
        .filter(|lease| lease.declined_time.is_some())
        .map(|lease| lease.address.as_str())
        .collect();
    assert_eq!(declined, ["10.80.0.2"]);
    let mut client = EventServiceClient::new(connect(daemon.folder.path()).await);
    let events = client.list_events(ListEventsRequest::default()).await.unwrap();
    let mut events = events.into_inner().events.into_iter();
    assert!(events.any(|event| event.reason == "AddressDeclined" && event.message.contains(named)));
    // No other NIC gets the address.
    assert_eq!(daemon.start_in("c", nic("lan")).await.unwrap(), ["10.80.0.5"]);

    // A report waits for the next daemon.
    daemon.kill();
    b.decline(&mac_of_b, "10.80.0.3");
    daemon.relaunch().await;
    within(async || (addresses(&daemon, "b").await == ["10.80.0.6"]).then_some(())).await;
    assert_eq!(b.dhcp(&mac_of_b), offered(6));
}

#[tokio::test]
async fn guest_receives_routes_and_options_of_its_network() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let spec = NetworkSpec {
        routes: vec![NetworkRoute {
            to: "10.90.0.0/16".into(),
            via: "10.80.0.9".into(),
        }],
        dhcp_options: vec![DhcpOption {
            code: 66,
            value: Some(Value::Text("tftp.example".into())),
        }],
        ..dual_stack()
    };
    daemon.make_network_as("lan", spec).await.unwrap();
    let (guest, mac) = client(&namespace, &mut daemon, "a").await;
    let options = guest.dhcp_options(&mac);
    assert_eq!(options[&66], b"tftp.example");
    assert_eq!(options[&121], [16, 10, 90, 10, 80, 0, 9, 0, 10, 80, 0, 1]);

    // A change reaches clients without a restart of anything.
    let spec = NetworkSpec {
        dhcp_options: vec![DhcpOption {
            code: 150,
            value: Some(Value::Hex("c0000207".into())),
        }],
        ..Default::default()
    };
    let request = changes::change(&["spec.dhcp_options", "spec.routes"], spec);
    daemon.update_network(request).await.unwrap();
    let options = guest.dhcp_options(&mac);
    assert_eq!(options[&150], [192, 0, 2, 7]);
    assert!(!options.contains_key(&66) && !options.contains_key(&121));
}
