//! Guests, by their agents.

use vmmd_api::v1::VmPhase;

use crate::support::{Daemon, line};

fn daemon() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon
}

#[test]
fn guest_is_shown_for_people_and_for_programs() {
    let daemon = daemon();
    let (code, stdout, stderr) = line(&daemon, "get guest web");
    assert_eq!((code, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout, @r"
    OS:              Debian GNU/Linux 12 (bookworm)
    Kernel:          6.1.0-18-amd64 (x86_64)
    Host name:       web
    Time zone:       CET (UTC-01:30)
    Agent:           7.2.0
    Interfaces:
      NAME   MAC                 ADDRESSES
      eth0   52:54:00:00:00:01   10.0.0.5/24, fe80::1/64
    File systems:
      MOUNTED ON   DEVICE   TYPE   SIZE   USED
      /            vda1     ext4   4Gi    1Gi (25 %)
    Users:           ann
    Incomplete:      the guest has more interfaces, addresses, file systems or users
    ");
    let (code, stdout, _) = line(&daemon, "get guest vm/web -o jsonpath={.os.kernelRelease}");
    assert_eq!((code, stdout.as_str()), (0, "6.1.0-18-amd64\n"));
    assert_eq!(line(&daemon, "get guest nobody").0, 3);
}
