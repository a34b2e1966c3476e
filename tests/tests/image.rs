//! A cloud image, from a server that breaks connections to a VM that greets its user; alone in the node, since it ends the daemon.

use serde_json::Value;
use vmmd_tests::Case;
use vmmd_tests::wait::Deadline;

/// A whole Debian boots in a minute in an emulated node, and its cloud-init takes another one.
const BOOT: u64 = 420;
/// Decompressing and converting the image where each instruction is emulated.
const IMPORT: u64 = 420;

/// What is left of a test is removed when it ends.
struct Place<'case> {
    case: &'case Case,
    image: String,
    vm: String,
    network: String,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Self {
            case,
            image,
            vm,
            network,
        } = &*self;
        let _ = case.node().ssh(&format!(
            "vmmctl delete vm {vm} --force --with-disks --yes; vmmctl network rm {network}; vmmctl image rm {image}; \
             ip link del cloud-out; \
             kill $(cat /run/{image}.pid); rm -f /run/{image}.pid"
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
fn a_cloud_image_is_imported_over_a_bad_line_and_a_killed_daemon_and_greets_its_user() {
    let case = Case::new("image").expect("node");
    let name = case.name().to_owned();
    let place = Place {
        case: &case,
        image: name.clone(),
        vm: name.clone(),
        network: "cloud".into(),
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

    // One command makes a VM of it.
    // An address of the node that is not one of a network (RFC 5737).
    node.sh("ip link add cloud-out type dummy && ip addr add 198.51.100.9/32 dev cloud-out && ip link set cloud-out up")
        .expect("an address");
    node.sh("vmmctl network create cloud --cidr 10.83.0.0/24")
        .expect("a network");
    let key = node.sh("ssh-keygen -y -f /root/.ssh/id_ed25519").expect("a key");
    node.sh(&format!(
        "cat >/run/{name}.yaml <<'END'\n#cloud-config\nusers:\n- name: alice\n  shell: /bin/bash\n  \
         sudo: ALL=(ALL) NOPASSWD:ALL\n  ssh_authorized_keys: ['{}']\nruncmd:\n- echo first >>/srv/boots\nEND\n",
        key.trim()
    ))
    .expect("user data");
    let run = node
        .sh_within(
            &format!(
                "vmmctl run {name} --name {name} --cpus 2 --memory 768Mi --disk-size 4Gi --network cloud --publish 2217:22 \
                 --user-data /run/{name}.yaml --cmdline 'systemd.show_status=0' --wait={BOOT}s"
            ),
            Deadline::seconds(BOOT + 60),
        )
        .expect("run the image");
    assert!(run.contains("answers on port 22"), "{run}");
    let vm: Value = serde_json::from_str(&node.sh(&format!("vmmctl get vm {name} -o json")).expect("the VM"))
        .expect("JSON");
    assert!(
        !vm.to_string().contains("NOPASSWD"),
        "the user data is shown: {vm}"
    );
    let address = vm["status"]["nics"][0]["addresses"][0]
        .as_str()
        .expect("an address")
        .to_owned();
    let ssh = |command: &str| {
        node.sh_within(
            &format!("ssh alice@{address} '{command}'"),
            Deadline::seconds(BOOT),
        )
        .expect("ssh to the guest")
    };
    // The user comes before the end of cloud-init; the SSH server before the user.
    node.sh_within(
        &format!("until ssh -o BatchMode=yes alice@{address} true; do sleep 2; done"),
        Deadline::seconds(BOOT),
    )
    .expect("the user of the user data");
    assert!(ssh("cloud-init status --wait").contains("status: done"));
    assert_eq!(ssh("hostname").trim(), name);
    let kernel = ssh("uname -r");
    assert!(kernel.starts_with("6.12."), "{kernel}");
    let size: u64 = ssh("df --output=size -B1 / | tail -n 1")
        .trim()
        .parse()
        .expect("bytes");
    assert!(size > 7 << 29, "the root file system has grown: {size} of 4 GiB");
    assert_eq!(ssh("cat /srv/boots"), "first\n");
    let published = node
        .sh("ssh -p 2217 -o BatchMode=yes alice@198.51.100.9 hostname")
        .expect("the published port");
    assert_eq!(published.trim(), name);

    // vmmctl reaches the user too, through the daemon.
    let through = node
        .sh(&format!(
            "vmmctl ssh alice@{name} -- 'echo kept | sudo tee /srv/kept && sync'"
        ))
        .expect("vmmctl ssh");
    assert_eq!(through, "kept\n");

    // What GRUB is told in the guest is booted next time, and that is no first boot.
    ssh("sudo sed -i \"s/console=ttyS0 quiet/& renewed=1/\" /boot/grub/grub.cfg && sync");
    node.sh_within(
        &format!("vmmctl stop {name} --grace 120s && vmmctl start {name}"),
        Deadline::seconds(300),
    )
    .expect("stop and start");
    node.sh_within(
        &format!("until ssh -o BatchMode=yes alice@{address} true; do sleep 2; done"),
        Deadline::seconds(BOOT),
    )
    .expect("the guest is back");
    let cmdline = ssh("cat /proc/cmdline");
    assert!(cmdline.contains("renewed=1"), "{cmdline}");
    assert!(ssh("cloud-init status --wait").contains("status: done"));
    assert_eq!(ssh("cat /srv/kept /srv/boots"), "kept\nfirst\n");
    drop(place);
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
