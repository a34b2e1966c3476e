use super::*;

fn network(mode: NetworkMode) -> Network {
    Network {
        bridge: "vmb0123456789".into(),
        mac: "02:01:23:45:67:89".parse().unwrap(),
        mode,
        net6: None,
        gateway: Some([10, 80, 0, 1].into()),
        deny: Vec::new(),
        groups: BTreeMap::new(),
    }
}

fn port(address6: Option<Ipv6Addr>) -> Port {
    Port {
        tap: "vm0123456789n0".into(),
        mac: "52:54:00:00:00:01".parse().unwrap(),
        address: Some([10, 80, 0, 2].into()),
        address6,
        published: vec![PublishedPort {
            protocol: Protocol::Tcp,
            node_port: 8080,
            guest_port: 80,
            address: None,
        }],
        firewall: Firewall::default(),
        subnets: Vec::new(),
        floating: Vec::new(),
        groups: Vec::new(),
        metadata: false,
    }
}

/// As in nft's `add element`, with the name of the set in front.
fn lines(elements: &[Element]) -> Vec<String> {
    let lines = elements
        .iter()
        .map(|element| format!("{} {element}", element.set.1));
    lines.collect()
}

fn has(elements: &[Element], line: &str) -> bool {
    lines(elements).iter().any(|element| element == line)
}

#[test]
fn nic_with_nat_has_its_addresses_and_its_ports() {
    let elements = network(NetworkMode::Nat).elements_of(&port(None));
    assert_eq!(
        lines(&elements),
        [
            r#"taps "vm0123456789n0""#,
            r#"macs "vm0123456789n0" . 52:54:00:00:00:01"#,
            r#"owned4 "vm0123456789n0" . 52:54:00:00:00:01 . 10.80.0.2"#,
            r#"inside4 10.80.0.2 . "vmb0123456789""#,
            "nat4 10.80.0.2",
            "published4 6 . 8080 : 10.80.0.2 . 80",
            "target4 6 . 10.80.0.2 . 80",
        ]
    );
}

#[test]
fn port_of_an_address_of_the_node_is_of_its_family() {
    let net: Ipv6Net = "fd00:80::/64".parse().unwrap();
    let address6 = net.of("52:54:00:00:00:01".parse().unwrap());
    let mut port = port(Some(address6));
    port.published[0].address = Some("192.0.2.1".parse().unwrap());
    let elements = network(NetworkMode::Nat).elements_of(&port);
    assert!(has(&elements, "bound4 192.0.2.1 . 6 . 8080 : 10.80.0.2 . 80"));
    assert!(has(&elements, "target4 6 . 10.80.0.2 . 80"));
    let translated = elements.iter().filter(|element| element.set.0 == Family::Inet);
    let names: Vec<_> = translated.map(|element| element.set.1).collect();
    let expected = ["inside4", "nat4", "bound4", "target4", "inside6", "nat6"];
    assert_eq!(names, expected);
}

#[test]
fn floating_addresses_lead_to_the_address_of_their_family() {
    let net: Ipv6Net = "fd00:80::/64".parse().unwrap();
    let mut port = port(Some(net.of("52:54:00:00:00:01".parse().unwrap())));
    port.published.clear();
    port.floating = ["192.0.2.7", "192.0.2.8", "2001:db8::7"]
        .map(|text| text.parse().unwrap())
        .to_vec();
    let of = |mode| {
        let elements = lines(&network(mode).elements_of(&port));
        let floats = elements
            .into_iter()
            .filter(|line| line.starts_with("float") || line.starts_with("sender"));
        floats.collect::<Vec<_>>()
    };
    assert_eq!(
        of(NetworkMode::Nat),
        [
            "floating4 192.0.2.7 : 10.80.0.2",
            "floated4 192.0.2.7 . 10.80.0.2",
            "sender4 10.80.0.2 : 192.0.2.7",
            "floating4 192.0.2.8 : 10.80.0.2",
            "floated4 192.0.2.8 . 10.80.0.2",
            "floating6 2001:db8::7 : fd00:80::5054:ff:fe00:1",
            "floated6 2001:db8::7 . fd00:80::5054:ff:fe00:1",
            "sender6 fd00:80::5054:ff:fe00:1 : 2001:db8::7",
        ]
    );
    assert_eq!(of(NetworkMode::Routed), Vec::<String>::new());
}

#[test]
fn denied_ranges_are_elements_of_the_network() {
    let network = Network {
        deny: ["192.0.2.0/24", "2001:db8::/32"]
            .map(|text| text.parse().unwrap())
            .to_vec(),
        ..network(NetworkMode::Nat)
    };
    let elements = network.elements();
    assert!(has(&elements, r#"deny4 "vmb0123456789" . 192.0.2.0/24"#));
    assert!(has(&elements, r#"deny6 "vmb0123456789" . 2001:db8::/32"#));
}

#[test]
fn subnets_behind_a_guest_are_its_own_and_those_of_its_bridge() {
    let port = Port {
        subnets: ["10.90.0.0/24", "fd00:90::/64"]
            .map(|text| text.parse().unwrap())
            .to_vec(),
        ..port(None)
    };
    let elements = network(NetworkMode::Nat).elements_of(&port);
    for line in [
        r#"routed4 "vm0123456789n0" . 52:54:00:00:00:01 . 10.90.0.0/24"#,
        r#"routed6 "vm0123456789n0" . 52:54:00:00:00:01 . fd00:90::/64"#,
        r#"behind4 10.90.0.0/24 . "vmb0123456789""#,
        r#"behind6 fd00:90::/64 . "vmb0123456789""#,
    ] {
        assert!(has(&elements, line), "{line}: {:?}", lines(&elements));
    }
    let translated = r#"translated "vmb0123456789""#;
    assert!(has(&network(NetworkMode::Nat).elements(), translated));
    assert!(!has(&network(NetworkMode::Routed).elements(), translated));
}

#[test]
fn nic_with_the_metadata_service_is_an_element_by_its_address() {
    let net: Ipv6Net = "fd00:80::/64".parse().unwrap();
    let port = Port {
        metadata: true,
        ..port(Some(net.of("52:54:00:00:00:01".parse().unwrap())))
    };
    for mode in [NetworkMode::Nat, NetworkMode::Isolated, NetworkMode::Routed] {
        let network = network(mode);
        assert!(has(
            &network.elements(),
            r#"metadata "vmb0123456789" : 10.80.0.1 . 254"#
        ));
        let elements = network.elements_of(&port);
        let of = |element: &&Element| element.set.1 == "metadata4";
        let found: Vec<_> = elements.iter().filter(of).cloned().collect();
        assert_eq!(lines(&found), [r#"metadata4 10.80.0.2 . "vmb0123456789""#]);
    }
}

#[test]
fn nic_without_nat_is_not_translated() {
    for mode in [NetworkMode::Isolated, NetworkMode::Routed] {
        let elements = network(mode).elements_of(&port(None));
        let names: Vec<_> = elements.iter().map(|element| element.set.1).collect();
        assert_eq!(names, ["taps", "macs", "owned4", "inside4"]);
    }
}

#[test]
fn nic_with_ipv6_owns_the_addresses_that_it_makes() {
    let net: Ipv6Net = "fd00:80::/64".parse().unwrap();
    let port = port(Some(net.of("52:54:00:00:00:01".parse().unwrap())));
    let elements = network(NetworkMode::Nat).elements_of(&port);
    for line in [
        r#"with6 "vm0123456789n0""#,
        r#"owned6 "vm0123456789n0" . 52:54:00:00:00:01 . fd00:80::5054:ff:fe00:1"#,
        r#"owned6 "vm0123456789n0" . 52:54:00:00:00:01 . fe80::5054:ff:fe00:1"#,
        r#"target6 "vm0123456789n0" . 52:54:00:00:00:01 . 0xfe80000000000000505400fffe000001"#,
        "published6 6 . 8080 : fd00:80::5054:ff:fe00:1 . 80",
        "target6 6 . fd00:80::5054:ff:fe00:1 . 80",
    ] {
        assert!(has(&elements, line), "{line}: {:?}", lines(&elements));
    }
}

#[test]
fn network_without_ipv4_has_no_elements_of_it() {
    let net: Ipv6Net = "fd00:80::/64".parse().unwrap();
    let network = Network {
        net6: Some(net),
        gateway: None,
        ..network(NetworkMode::Nat)
    };
    let port = Port {
        address: None,
        ..port(Some(net.of("52:54:00:00:00:01".parse().unwrap())))
    };
    let elements = [network.elements(), network.elements_of(&port)].concat();
    let names: Vec<_> = elements.iter().map(|element| element.set.1).collect();
    assert!(!names.iter().any(|name| name.ends_with('4')), "{names:?}");
    assert!(has(&elements, "gateways6 fd00:80::1"));
    assert!(names.contains(&"published6") && names.contains(&"owned6"));
}

#[test]
fn the_mode_of_a_network_is_the_verdict_on_its_packets() {
    for (mode, from, to, closed) in [
        (NetworkMode::Nat, false, "goto to-nat", true),
        (NetworkMode::Isolated, true, "drop", true),
        (NetworkMode::Routed, false, "goto to-routed", false),
    ] {
        let elements = network(mode).elements();
        assert!(has(&elements, &format!(r#"to "vmb0123456789" : {to}"#)));
        assert_eq!(has(&elements, r#"from "vmb0123456789" : drop"#), from);
        assert_eq!(has(&elements, r#"closed "vmb0123456789""#), closed);
    }
}

#[test]
fn rules_are_the_same_however_many_networks_and_nics_there_are() {
    let numbered = |number: usize| {
        let mut network = network([NetworkMode::Nat, NetworkMode::Isolated, NetworkMode::Routed][number % 3]);
        network.bridge = format!("vmb{number}");
        let mut port = port(None);
        port.tap = format!("vm0123456789n{number}");
        [network.elements(), network.elements_of(&port)].concat()
    };
    let rules = |count: usize| {
        let text = whole(&(0..count).flat_map(numbered).collect(), &Chains::new());
        let (rules, elements) = text.split_once("add element").unwrap();
        (rules.to_owned(), elements.matches("add element").count())
    };
    assert_eq!(rules(3), rules(30));
}

#[test]
fn bridges_track_no_connections_without_a_firewall() {
    let text = whole(&BTreeSet::new(), &Chains::new());
    let (_, bridge) = text.split_once("table bridge vmmd {").unwrap();
    assert!(!bridge.contains("ct state"), "{bridge}");
    let chains = Chains::from([(("egress", "egress-a".to_owned()), "\t\tdrop\n".to_owned())]);
    assert!(whole(&BTreeSet::new(), &chains).contains("iifname vmap @egress"));
}
