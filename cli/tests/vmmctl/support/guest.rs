//! Guests with an agent.

use vmmd_api::v1;

/// What the agent of each guest says.
pub fn info() -> v1::GuestInfo {
    v1::GuestInfo {
        agent_version: "7.2.0".into(),
        os: Some(v1::GuestOs {
            pretty_name: "Debian GNU/Linux 12 (bookworm)".into(),
            kernel_release: "6.1.0-18-amd64".into(),
            machine: "x86_64".into(),
            ..Default::default()
        }),
        host_name: "web".into(),
        time_zone: "CET".into(),
        utc_offset_seconds: -5400,
        interfaces: vec![v1::GuestInterface {
            name: "eth0".into(),
            mac: "52:54:00:00:00:01".into(),
            addresses: vec!["10.0.0.5/24".into(), "fe80::1/64".into()],
        }],
        file_systems: vec![v1::GuestFileSystem {
            name: "vda1".into(),
            mount_point: "/".into(),
            r#type: "ext4".into(),
            total_bytes: Some(4 << 30),
            used_bytes: Some(1 << 30),
        }],
        users: vec![v1::GuestUser {
            name: "ann".into(),
            login_time: None,
        }],
        incomplete: true,
        ..Default::default()
    }
}
