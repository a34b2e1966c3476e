//! Cloud images: the import from a server that breaks connections, disks of one image, and the quick start's VM of one.

use vmmd_tests::Case;
use vmmd_tests::node::quote;
use vmmd_tests::wait::Deadline;

/// A whole Debian with cloud-init, which is some 30 programs in Python, boots in three to eight minutes in an emulated node.
const BOOT: u64 = 900;
/// Decompressing and converting the image where each instruction is emulated.
const IMPORT: u64 = 420;

/// What is left of the import is removed when it ends.
struct Place<'case> {
    case: &'case Case,
    image: String,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let image = &self.image;
        let _ = self.case.node().ssh(&format!(
            "vmmctl image rm {image}; kill $(cat /run/{image}.pid); rm -f /run/{image}.pid"
        ));
    }
}

/// A server of one file, in bash: it answers ranges, breaks the first three connections after a fifth of the file, and says
/// nothing more in the fourth after another one.
fn serve(case: &Case, image: &str, file: &str) -> String {
    let folder = case.folder().expect("a folder");
    let script = format!(
        r#"#!/bin/bash
from=0
read -r _
while IFS= read -r line && line=${{line%$'\r'}} && [ -n "$line" ]; do
    case ${{line,,}} in range:*) from=${{line#*=}}; from=${{from%%-*}};; esac
done
size=$(stat -c %s {file})
echo "$from" >>{folder}/requests
number=$(wc -l <{folder}/requests)
if [ "$from" -gt 0 ]; then
    printf 'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-%d/%d\r\n' "$from" $((size - 1)) "$size"
else
    printf 'HTTP/1.1 200 OK\r\n'
fi
printf 'ETag: "debian"\r\nAccept-Ranges: bytes\r\nContent-Length: %d\r\nConnection: close\r\n\r\n' $((size - from))
if [ "$number" -le 4 ]; then
    tail -c +$((from + 1)) {file} | head -c $((size / 5))
    [ "$number" -lt 4 ] || sleep 600
else
    tail -c +$((from + 1)) {file}
fi
"#
    );
    case.node()
        .sh(&format!(
            "cat >{folder}/serve <<'END'\n{script}END\nchmod +x {folder}/serve; : >{folder}/requests\n\
             socat TCP-LISTEN:8017,bind=127.0.0.1,reuseaddr,fork EXEC:{folder}/serve </dev/null >/dev/null 2>&1 & \
             echo $! >/run/{image}.pid"
        ))
        .expect("a server");
    format!("{folder}/requests")
}

#[test]
fn an_image_is_imported_over_a_bad_line_and_a_killed_daemon() {
    let case = Case::new("image").expect("node");
    let name = case.name().to_owned();
    let place = Place {
        case: &case,
        image: name.clone(),
    };
    let node = case.node();
    let file = node.guests().cloud_image();
    let requests = serve(&case, &name, &file);
    let checksum = node
        .sh(&format!("sha256sum {file} | cut -d' ' -f1"))
        .expect("a checksum");
    node.sh(&format!(
        "vmmctl image import {name} http://127.0.0.1:8017/debian.qcow2.gz --checksum sha256:{} --no-wait",
        checksum.trim()
    ))
    .expect("begin to import");

    // Three connections broke, and the fourth one hangs with four fifths of the file; seven tenths are on the disk.
    node.sh_within(
        &format!(
            "until [ $(wc -l <{requests}) = 4 ] && \
             [ $(stat -c %s /var/lib/vmmd/images/*.source) -gt $(($(stat -c %s {file}) * 7 / 10)) ]; do sleep 0.2; done"
        ),
        Deadline::seconds(120),
    )
    .expect("four connections");
    node.sh(
        "pid=$(systemctl show -P MainPID vmmd); kill -9 $pid; \
         while [ \"$(systemctl show -P MainPID vmmd)\" = $pid ] || ! systemctl is-active -q vmmd; do sleep 0.1; done",
    )
    .expect("kill the daemon");
    let mut watch = node
        .stream(&format!("exec vmmctl image ls {name} -w -o json"))
        .expect("watch");
    watch
        .until("IMAGE_PHASE_READY", Deadline::seconds(IMPORT))
        .expect("the image");
    drop(watch);
    let from = node.sh(&format!("cat {requests}")).expect("the requests");
    let from: Vec<u64> = from.lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!((from.len(), from[0]), (5, 0), "{from:?}");
    assert!(
        from.is_sorted_by(|a, b| a < b),
        "each goes on where the one before broke: {from:?}"
    );
    let image = node
        .sh(&format!("vmmctl image ls {name} -o json"))
        .expect("the image");
    assert!(image.contains("1610612736"), "its disk has 1.5 GiB: {image}");
    drop(place);
}

/// The commands of the quick start's section about cloud images, with what it says that they print; and the user data in it.
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

/// A line with `…` in the place of what is another one for each VM: MAC addresses and names of taps.
fn masked(line: &str) -> String {
    let words = line.split(' ').map(|word| match word.len() {
        17 if word.matches(':').count() == 5 => "…",
        14 if word.starts_with("vm") => "…",
        _ => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// What the page makes is removed when the test ends, also in the middle of it.
struct Made<'case>(&'case Case);

impl Drop for Made<'_> {
    fn drop(&mut self) {
        let _ = self.0.node().ssh(
            "vmmctl delete vm web --force --with-disks --yes; vmmctl network rm lan; vmmctl image rm debian13; rm -rf /srv/site",
        );
    }
}

#[test]
fn the_quick_start_makes_a_web_server_of_a_cloud_image_and_its_second_boot_is_no_first_one() {
    let case = Case::new("cloud").expect("node");
    let node = case.node();
    let folder = case.folder().expect("a folder");
    let page = Page::read();
    let key = node
        .sh("ssh-keygen -y -f ~/.ssh/id_ed25519 | tee ~/.ssh/id_ed25519.pub")
        .expect("a key");
    // Another user, another key.
    let alice = node
        .sh(&format!(
            "ssh-keygen -q -t ed25519 -N '' -f {folder}/alice && cat {folder}/alice.pub"
        ))
        .expect("alice's key");
    assert_ne!(alice, key);
    let (before, after) = page.user_data.split_once("[ssh-ed25519 ").expect("a key");
    let (_, after) = after.split_once(']').expect("the end of the key");
    node.sh(&format!(
        "cat >{folder}/web.yaml <<'END'\n{before}[{}]{after}END\n",
        alice.trim()
    ))
    .expect("user data");

    let within = |command: &str| node.sh_within(command, Deadline::seconds(BOOT));
    let made = Made(&case);
    let mut commands = page.commands.into_iter();
    let mut step = |last: &str| {
        for (command, printed) in commands.by_ref() {
            // There is no internet here, everything is emulated, and nobody to be asked.
            let typed: Vec<_> = command
                .split(' ')
                .map(|word| match word {
                    url if url.starts_with("https://") => node.guests().cloud_image(),
                    "--wait" if command.starts_with("vmmctl run") => format!("--wait={BOOT}s"),
                    "--with-disks" => "--with-disks --yes".into(),
                    // The unit is started before the program in it listens.
                    "curl" => "curl --retry 60 --retry-delay 3 --retry-connrefused".into(),
                    word => word.to_owned(),
                })
                .collect();
            let output = node
                .sh_within(
                    &format!("cd {folder} && {}", typed.join(" ")),
                    Deadline::seconds(BOOT + 60),
                )
                .expect("a command of the page");
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
    let curl = step("curl ");

    // What the user data says, and the image's system makes of it.
    let ssh = |command: &str| {
        within(&format!(
            "ssh -o BatchMode=yes -i {folder}/alice alice@10.80.0.2 {}",
            quote(command)
        ))
        .expect("ssh to the guest")
    };
    assert_eq!(ssh("hostname; whoami; sudo whoami"), "web\nalice\nroot\n");
    let size = ssh("df --output=size -BG / | tail -n 1");
    assert_eq!(size.trim(), "20G", "the root file system has grown");
    let kernel = ssh("uname -r");
    assert!(kernel.starts_with("6.12."), "{kernel}");
    ssh("echo of the guest | sudo tee /srv/site/note");
    assert_eq!(
        node.sh("cat /srv/site/note; stat -c %U /srv/site/note")
            .expect("the note"),
        "of the guest\nnobody\n"
    );
    let vm = node.sh("vmmctl get vm web -o json").expect("the VM");
    assert!(!vm.contains("NOPASSWD"), "the user data is shown: {vm}");
    // Through the daemon, too.
    assert_eq!(
        node.sh(&format!(
            "vmmctl ssh alice@web -- -i {folder}/alice 'echo kept | sudo tee /srv/kept'"
        ))
        .expect("vmmctl ssh"),
        "kept\n"
    );

    // What boots next time is what GRUB's configuration has by then, as after the installation of a kernel.
    let state = "cat /etc/ssh/ssh_host_ed25519_key.pub /etc/fstab; ls /var/lib/cloud/instances";
    let first = ssh(state);
    ssh(
        "sudo sh -c 'cd /boot && mv vmlinuz-* vmlinuz-renewed && mv initrd.img-* initrd.img-renewed && \
         sed -i \"s/vmlinuz-[^ ]*/vmlinuz-renewed/; s/initrd.img-.*/initrd.img-renewed/; s/ttyS0 quiet/& renewed=1/\" grub/grub.cfg && sync'",
    );
    within("vmmctl stop web --grace 180s && vmmctl start web").expect("stop and start");
    within("until ssh -o BatchMode=yes debian@10.80.0.2 true; do sleep 2; done").expect("the guest is back");
    assert!(ssh("cat /proc/cmdline").contains("ttyS0 quiet renewed=1"));
    assert!(ssh("cloud-init status --wait").contains("status: done"));
    assert_eq!(ssh(state), first);
    assert_eq!(ssh("cat /srv/kept /srv/site/note"), "kept\nof the guest\n");
    assert_eq!(node.sh(&curl).expect("the site after the second boot"), "hello\n");

    step("vmmctl delete vm web");
    let left = node
        .sh("vmmctl get vm; vmmctl get disk; vmmctl image ls")
        .expect("what is left");
    let names: Vec<_> = left.split_whitespace().collect();
    assert!(
        !names.contains(&"web") && !names.contains(&"web-root") && names.contains(&"debian13"),
        "{left}"
    );
    drop(made);
}

#[test]
fn fifty_disks_of_an_image_take_the_room_of_their_tables() {
    /// Data of the image in MiB; the rest of its 2 GiB is zeroes.
    const DATA: u64 = 64;
    let case = Case::new("clones").expect("node");
    let node = case.node();
    let name = case.name();
    let folder = case.folder().expect("a folder");
    node.sh(&format!(
        "truncate -s 2G {folder}/disk.raw && dd if=/dev/urandom of={folder}/disk.raw bs=1M count={DATA} conv=notrunc status=none && \
         vmmctl image import {name} {folder}/disk.raw"
    ))
    .expect("an image");
    let room = || -> u64 {
        let used = node.sh("sync; du -sk /var/lib/vmmd | cut -f1").expect("room");
        used.trim().parse().expect("KiB")
    };
    let before = room();
    let took = node
        .sh(&format!(
            "began=$(date +%s%N); for n in $(seq 50); do vmmctl create disk {name}-$n --from-image {name} --clone overlay --size 8Gi >/dev/null || exit; done; \
             echo $((($(date +%s%N) - began) / 1000000))"
        ))
        .expect("fifty disks");
    let grown = room() - before;
    println!("50 overlays of 8 GiB: {grown} KiB more, {} ms", took.trim());
    assert!(
        grown < 50 * 512,
        "{grown} KiB for 50 disks of an image of {DATA} MiB"
    );
    node.sh(&format!(
        "for n in $(seq 50); do vmmctl delete disk {name}-$n --yes >/dev/null || exit; done; vmmctl image rm {name}"
    ))
    .expect("delete them");
}
