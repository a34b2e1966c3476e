//! Other firewalls of the node: ufw, firewalld, and the rules of Docker. A network names the commands that let its guests pass, and
//! after these commands the guests have addresses, names and the outside.

use super::{
    guest::{mirror, seen_by, world},
    packages::{BUS, Packages},
    *,
};

/// The commands that the messages of a network name, without repetitions.
fn commands(message: &str) -> Vec<String> {
    let parts = message.split('(').skip(1).filter_map(|rest| rest.split_once(')'));
    let mut all = Vec::new();
    for command in parts.flat_map(|(commands, _)| commands.split("; ")) {
        if !all.iter().any(|known| known == command) {
            all.push(command.to_owned());
        }
    }
    all
}

/// A firewall that `script` starts drops the packets of guests, until exactly these commands are run. Its rules, and those of networks,
/// survive `reload`.
async fn firewall_opens(script: &str, expected: &[&str], reload: &str) {
    let namespace = Namespace::new();
    let world = world(&namespace);
    let packages = Packages::of(&namespace);
    packages.run(script);
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon.make_network_as("lan", dual_stack()).await.unwrap();
    let message = made.status.unwrap().message;
    assert_eq!(commands(&message), expected, "{message}");
    let published = NicSpec {
        published_ports: vec![PublishedPort {
            protocol: v1::PortProtocol::Udp.into(),
            node_port: 7100,
            guest_port: 7100,
            ..Default::default()
        }],
        ..nic("lan")
    };
    daemon.start_in("web", published).await.unwrap();
    let mac = status(&daemon.get("web").await.unwrap()).nics[0].mac.clone();
    let guest = Guest::in_place_of(&namespace, &daemon, "web").await;
    let _mirrors = [
        mirror(&world, &["198.51.100.2"]),
        mirror(&guest.namespace, &["10.80.0.2"]),
    ];
    assert_eq!(seen_by(&guest.namespace, "10.80.0.2", "198.51.100.2"), "none");
    packages.run(&expected.join("\n"));
    for reload in ["true", reload] {
        packages.run(reload);
        let address = Some((Ipv4Addr::new(10, 80, 0, 2), Ipv4Addr::new(10, 80, 0, 1)));
        assert_eq!(guest.dhcp(&mac), address, "{reload}");
        assert_eq!(guest.resolve("10.80.0.1", "web.lan.internal"), "0 10.80.0.2");
        let seen = seen_by(&guest.namespace, "10.80.0.2", "198.51.100.2");
        assert_eq!(seen, "198.51.100.1", "{reload}");
        assert_eq!(seen_by(&world, "198.51.100.2", "198.51.100.1"), "198.51.100.2");
    }
    daemon.kill_and_restart().await;
    within(async || {
        let state = daemon.network("lan").await.unwrap().status.unwrap();
        (state.ready && state.message.is_empty()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn guests_pass_ufw_by_the_rules_of_the_message() {
    // As the package is configured at its installation.
    let script = "cp /usr/share/ufw/ufw.conf /usr/share/ufw/iptables/*.rules /etc/ufw
        ufw --force enable";
    let expected = [
        "ufw allow in on vmb+",
        "ufw route allow in on vmb+",
        "ufw route allow out on vmb+",
    ];
    firewall_opens(script, &expected, "ufw reload").await;
}

#[tokio::test]
async fn guests_pass_firewalld_by_the_zone_of_the_message() {
    let script = format!(
        "{BUS}
        mkdir -p /run/firewalld
        firewalld --nofork --nopid >/run/firewalld.log 2>&1 &
        until firewall-cmd --state; do sleep 0.1; done"
    );
    let expected = [
        "firewall-cmd --permanent --zone=trusted --add-interface=vmb+",
        "firewall-cmd --reload",
    ];
    firewall_opens(&script, &expected, "firewall-cmd --reload").await;
}

#[tokio::test]
async fn guests_pass_docker_by_the_rules_of_the_message() {
    // The rules of dockerd 20.10 for its default network.
    let script = "
        ip link add docker0 type bridge
        ip addr add 172.17.0.1/16 dev docker0
        ip link set docker0 up
        for chain in DOCKER DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2 DOCKER-USER; do iptables -N $chain; done
        iptables -t nat -N DOCKER
        iptables -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
        iptables -t nat -A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
        iptables -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
        iptables -t nat -A DOCKER -i docker0 -j RETURN
        iptables -P FORWARD DROP
        iptables -A FORWARD -j DOCKER-USER
        iptables -A FORWARD -j DOCKER-ISOLATION-STAGE-1
        iptables -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
        iptables -A FORWARD -o docker0 -j DOCKER
        iptables -A FORWARD -i docker0 ! -o docker0 -j ACCEPT
        iptables -A FORWARD -i docker0 -o docker0 -j ACCEPT
        iptables -A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
        iptables -A DOCKER-ISOLATION-STAGE-1 -j RETURN
        iptables -A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
        iptables -A DOCKER-ISOLATION-STAGE-2 -j RETURN
        iptables -A DOCKER-USER -j RETURN";
    let expected = [
        "iptables -I DOCKER-USER -i vmb+ -j ACCEPT",
        "iptables -I DOCKER-USER -o vmb+ -j ACCEPT",
    ];
    // A restart of dockerd moves its chain to the front.
    let reload = "iptables -D FORWARD -j DOCKER-USER; iptables -I FORWARD -j DOCKER-USER";
    firewall_opens(script, &expected, reload).await;
}
