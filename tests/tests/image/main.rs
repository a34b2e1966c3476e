//! Cloud images: the quick start's VM of one.

mod formats;

use std::{
    fs,
    path::Path,
    sync::{Arc, mpsc::Sender},
};

use rstest::rstest;
use sha2::{Digest as _, Sha256};
use vmmd_tests::{
    Case, Node,
    debian::Release,
    guest::cloud_image,
    node::{Forward, quote},
    wait::Deadline,
};

use vmmd_testing::http::{Server, held, part, start};

/// A whole Debian with cloud-init, which is some 30 programs in Python, boots in three to eight minutes in an emulated node.
const BOOT: u64 = 900;

/// The commands of the quick start's section about cloud images, with their documented output, and
/// its user data.
struct Page {
    commands: Vec<(String, String)>,
    user_data: String,
}

impl Page {
    fn read() -> Self {
        let text = include_str!("../../docs/src/quick-start.md");
        let (_, section) = text
            .split_once("\n## A VM of a cloud image\n")
            .expect("the section");
        let section = section
            .split_once("\n## ")
            .map_or(section, |(section, _)| section);
        let mut page = Self {
            commands: Vec::new(),
            user_data: String::new(),
        };
        let run = section
            .split("# vmmctl run ")
            .nth(1)
            .and_then(|rest| rest.split_once("vm/web"))
            .expect("the command");
        assert!(
            include_str!("../../docs/src/cloud-init.md").contains(run.0),
            "the page about cloud-init has the same command"
        );
        // Every second part is inside a fence.
        for block in section.split("```").skip(1).step_by(2) {
            let (kind, block) = block.split_once('\n').expect("the kind of the block");
            match kind {
                "console" => page.add_commands(&block.replace("\\\n", "")),
                "yaml" => page.user_data = block.to_owned(),
                other => panic!("a block of {other}"),
            }
        }
        page
    }

    fn add_commands(&mut self, block: &str) {
        for line in block.lines() {
            match (line.strip_prefix("# "), self.commands.last_mut()) {
                (Some(command), _) => self.commands.push((command.to_owned(), String::new())),
                (None, Some((_, printed))) => *printed += &format!("{line}\n"),
                (None, None) => panic!("no command before {line:?}"),
            }
        }
    }
}

/// A line with `…` instead of words that differ between VMs: MAC addresses and names of taps.
/// Leading dots of a waiting program are removed.
fn masked(line: &str) -> String {
    let words = line
        .trim_start_matches('.')
        .split(' ')
        .map(|word| match word.len() {
            17 if word.matches(':').count() == 5 => "…",
            14 if word.starts_with("vm") => "…",
            _ => word,
        });
    words.collect::<Vec<_>>().join(" ")
}

/// A web server with an image, for which a line breaks three times before the daemon is killed: each of four connections brings a fifth
/// of the file.
struct Mirror {
    server: Server,
    /// Closes the fourth connection.
    close: Sender<()>,
    fifth: usize,
    /// Source argument for `vmmctl image import`.
    source: String,
    _way: Forward,
}

impl Mirror {
    fn start(node: &Node, file: &Path) -> Self {
        let content = Arc::new(fs::read(file).expect("the image"));
        let sum: String = Sha256::digest(&*content)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let fifth = content.len() / 5;
        let cut = || part(&content, "debian", fifth);
        let (fourth, close) = held(cut());
        let server = Server::start(vec![
            cut(),
            cut(),
            cut(),
            fourth,
            part(&content, "debian", usize::MAX),
        ]);
        let (_, port) = server.address.rsplit_once(':').expect("a port");
        let way = node
            .bring_port(port.parse().expect("a port"))
            .expect("a way from the node");
        Self {
            source: format!("{}/debian.qcow2.xz --checksum sha256:{sum}", server.address),
            server,
            close,
            fifth,
            _way: way,
        }
    }

    /// Kills the daemon when the fourth connection has brought something, and closes that when there is another daemon.
    fn kill_the_daemon(&self, node: &Node) {
        let script = format!(
            "until [ \"$(stat -c %s /var/lib/vmmd/images/*.source 2>/dev/null || echo 0)\" -gt {} ]; do sleep 0.1; done; \
             pid=$(systemctl show -P MainPID vmmd); kill -9 $pid; \
             while [ \"$(systemctl show -P MainPID vmmd)\" = $pid ] || ! systemctl is-active -q vmmd; do sleep 0.1; done",
            3 * self.fifth
        );
        node.sh_within(&script, Deadline::seconds(300));
        self.close.send(()).expect("the server waits");
    }

    /// Each connection continued at the end of the previous one; the last one was for another
    /// daemon.
    fn assert_broken_and_gone_on_with(&self) {
        let requests = self.server.requests.lock().expect("requests");
        let starts: Vec<_> = requests.iter().map(|head| start(head)).collect();
        let [None, Some(second), Some(third), Some(fourth), Some(last)] = starts[..] else {
            panic!("{starts:?}");
        };
        assert_eq!(
            [second, third, fourth],
            [self.fifth, 2 * self.fifth, 3 * self.fifth]
        );
        assert!(last > fourth, "{starts:?}");
    }
}

#[rstest]
#[case::debian_12(Release::Bookworm)]
#[case::debian_13(Release::Trixie)]
fn quick_start_makes_a_web_server_of_a_cloud_image(#[case] release: Release) {
    let image = cloud_image(release).expect("the image");
    let case = Case::new("cloud");
    let node = case.node();
    let folder = case.folder();
    let page = Page::read();
    let key = node.sh("ssh-keygen -y -f ~/.ssh/id_ed25519 | tee ~/.ssh/id_ed25519.pub");
    // Another user, another key.
    let alice = node.sh(&format!(
        "ssh-keygen -q -t ed25519 -N '' -f {folder}/alice && cat {folder}/alice.pub"
    ));
    assert_ne!(alice, key);
    let (before, after) = page.user_data.split_once("[ssh-ed25519 ").expect("a key");
    let (_, after) = after.split_once(']').expect("the end of the key");
    node.sh(&format!(
        "cat >{folder}/web.yaml <<'END'\n{before}[{}]{after}END\n",
        alice.trim()
    ));

    let mirror = Mirror::start(node, &image);
    let within = |command: &str| node.sh_within(command, Deadline::seconds(BOOT));
    case.at_end(
        "vmmctl delete vm web --force --with-disks --yes; vmmctl network rm lan; vmmctl image rm debian13; rm -rf /srv/site",
    );
    let mut commands = page.commands.into_iter();
    let mut step = |last: &str| {
        for (command, printed) in commands.by_ref() {
            // Adapts the commands: there is no internet here, everything is emulated, and no user
            // can confirm.
            let typed: Vec<_> = command
                .split(' ')
                .map(|word| match word {
                    url if url.starts_with("https://") => mirror.source.clone(),
                    // Firmware is slow here.
                    "--wait" if command.starts_with("vmmctl run") => {
                        format!("--fast-boot --wait={BOOT}s")
                    }
                    "--with-disks" => "--with-disks --yes".into(),
                    // The unit is started before the program in it listens.
                    "curl" => "curl --retry 60 --retry-delay 3 --retry-connrefused".into(),
                    word => word.to_owned(),
                })
                .collect();
            let output = node.sh_within(
                &format!("cd {folder} && {}", typed.join(" ")),
                Deadline::seconds(BOOT + 60),
            );
            println!("{}\n{output}", typed.join(" "));
            let output: Vec<_> = output.lines().map(masked).collect();
            let printed: Vec<_> = printed.lines().map(masked).collect();
            assert!(
                output.ends_with(&printed),
                "{command} prints {output:?}, the page says {printed:?}"
            );
            if command.starts_with(last) {
                return typed.join(" ");
            }
        }
        panic!("the page has no command {last}");
    };
    std::thread::scope(|scope| {
        let killed = scope.spawn(|| mirror.kill_the_daemon(node));
        step("vmmctl image import");
        killed.join().expect("the daemon was killed");
    });
    mirror.assert_broken_and_gone_on_with();
    let curl = step("curl ");

    // Effect of the user data on the image's system.
    let ssh = |command: &str| {
        within(&format!(
            "ssh -o BatchMode=yes -i {folder}/alice alice@10.80.0.2 {}",
            quote(command)
        ))
    };
    assert_eq!(ssh("hostname; whoami; sudo whoami"), "web\nalice\nroot\n");
    let size = ssh("df --output=size -BG / | tail -n 1");
    assert_eq!(size.trim(), "20G", "the root file system has grown");
    let kernel = ssh("uname -r");
    assert!(
        kernel.starts_with("6.12.") && !kernel.contains("cloud"),
        "{kernel}"
    );
    let system = ssh(". /etc/os-release && echo $VERSION_CODENAME");
    assert_eq!(system.trim(), release.suite());
    ssh("echo of the guest | sudo tee /srv/site/note");
    assert_eq!(
        node.sh("cat /srv/site/note; stat -c %U /srv/site/note"),
        "of the guest\nnobody\n"
    );
    let vm = node.sh("vmmctl get vm web -o json");
    assert!(!vm.contains("NOPASSWD"), "the user data is shown: {vm}");
    // Through the daemon, too.
    assert_eq!(
        node.sh(&format!(
            "vmmctl ssh alice@web -- -i {folder}/alice 'echo kept | sudo tee /srv/kept'"
        )),
        "kept\n"
    );

    // The image contains the packages of another kernel. Their installation rewrites GRUB's
    // configuration.
    let state = "cat /etc/ssh/ssh_host_ed25519_key.pub /etc/fstab; ls /var/lib/cloud/instances; \
                 stat -c '%n %Y' /var/lib/cloud/instance/sem/*";
    let first = ssh(state);
    println!(
        "{}",
        ssh("sudo DEBIAN_FRONTEND=noninteractive dpkg -i /opt/kernel/*.deb 2>&1 && sync")
    );
    within("vmmctl stop web --grace 180s && vmmctl start web");
    within("until ssh -o BatchMode=yes debian@10.80.0.2 true; do sleep 2; done");
    let kernel = ssh("uname -r");
    assert!(kernel.ends_with("-cloud-amd64\n"), "{kernel}");
    assert!(ssh("cloud-init status --wait").contains("status: done"));
    assert_eq!(ssh(state), first);
    assert_eq!(ssh("cat /srv/kept /srv/site/note"), "kept\nof the guest\n");
    assert_eq!(node.sh(&curl), "hello\n");

    step("vmmctl delete vm web");
    let left = node.sh("vmmctl get vm; vmmctl get disk; vmmctl image ls");
    let names: Vec<_> = left.split_whitespace().collect();
    assert!(
        !names.contains(&"web") && !names.contains(&"web-root") && names.contains(&"debian13"),
        "{left}"
    );
}
