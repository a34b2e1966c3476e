//! Programs of Debian's packages in a network namespace.
//!
//! The packages are unpacked in `target/packages` (`.ci/setup`), and not installed. The programs have their own mount namespace,
//! where the packages are over `/usr` and `/etc`, and their own process namespace, which ends them. So no service and no file of the
//! machine is changed.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use super::guest::Program;
use crate::namespace::Namespace;

/// Prepares the namespaces, and waits. The folder of the packages is in `$1`. Ended programs leave no zombies, which others wait for.
const INIT: &str = r#"
set -e
mount -t overlay none -o "lowerdir=$1/usr:/usr" /usr
mount -t tmpfs none /run
mkdir /run/upper /run/work /run/lock
mount -t overlay none -o "lowerdir=$1/etc:/etc,upperdir=/run/upper,workdir=/run/work" /etc
mount -t tmpfs none /var/lib
mkdir /var/lib/dhcp /var/lib/dhcpcd
# Programs do not wait for udev where sysfs is read-only.
mount -o remount,ro /sys
hostname guest
rm -f /etc/resolv.conf
echo 'hosts: files dns' >/etc/nsswitch.conf
echo 0123456789abcdef0123456789abcdef >/etc/machine-id
for user in dhcpcd messagebus systemd-network systemd-resolve; do
    getent passwd $user >/dev/null || echo "$user:x:900:900::/:/usr/sbin/nologin" >>/etc/passwd
    getent group $user >/dev/null || echo "$user:x:900:" >>/etc/group
done
exec python3 -c '
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()'
"#;

/// A script that starts a bus for services and their commands. No service is started by the bus, and everything is allowed.
pub const BUS: &str = r#"
mkdir -p /run/dbus
cat >/run/dbus/system.conf <<'END'
<busconfig>
  <type>system</type>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <policy context="default">
    <allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/>
  </policy>
</busconfig>
END
dbus-daemon --config-file=/run/dbus/system.conf --fork --nopidfile >/run/dbus/log 2>&1
"#;

/// They end when it is dropped.
pub struct Packages {
    _init: Program,
    /// Process id of the first process of the namespaces.
    pid: String,
}

impl Packages {
    /// In a network namespace, and in other namespaces of their own.
    pub fn of(namespace: &Namespace) -> Self {
        let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let packages = folders
            .find_map(|folder| folder.join("target/packages/files").canonicalize().ok())
            .expect("target/packages/files is missing: .ci/setup unpacks Debian's packages there");
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &namespace.0, "unshare", "--pid", "--uts"])
            .args(["--fork", "--kill-child", "--mount-proc", "sh", "-c", INIT, "sh"])
            .arg(packages);
        let init = Program::start(&mut command);
        let parent = init.process.id();
        let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
        Self {
            _init: init,
            pid: children.trim().to_owned(),
        }
    }

    /// Runs a shell script with them. Its services must not keep the output open.
    pub fn try_run(&self, script: &str) -> Output {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.pid, "--mount", "--net", "--pid", "--uts"])
            .args(["sh", "-ec", script]);
        command.output().unwrap()
    }

    /// The same, and the output of a script that succeeds.
    pub fn run(&self, script: &str) -> String {
        let output = self.try_run(script);
        assert!(output.status.success(), "{script}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}
