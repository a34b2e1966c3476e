//! What the import of an image costs, beside `qemu-img convert` of the same file, and what a disk of it costs. The daemon and its converter
//! are the ones that are packaged.
//!
//! `RUST_LOG=info cargo bench -p vmmd --bench image -- --vmm-image PATH [--mib N] [--turns N]` prints one JSON object on stdout. Needs root, as the
//! daemon does, and qemu-utils.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a benchmark may fail loudly, and its counts are far below 2^52"
)]

#[allow(dead_code, reason = "the other benchmarks use more of it")]
mod measure;

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use clap::Parser;
use measure::{Calls, children, processor_time};
use serde_json::json;
use vmmd_api::v1::{
    self, disk_service_client::DiskServiceClient, image_service_client::ImageServiceClient,
    image_spec::Source, volume_spec::Source as DiskSource,
};
use vmmd_testing::harness::{Daemon, connect, room};

/// Data and holes of the disk take turns in pieces of so many bytes.
const PIECE: usize = 4 << 20;
/// Disks that are overlays of the image.
const OVERLAYS: usize = 50;
/// Disks that are copies of it.
const COPIES: usize = 3;

#[derive(Parser)]
struct Arguments {
    /// The program that converts.
    #[arg(long)]
    vmm_image: PathBuf,
    /// Size of the disk in MiB, of which half is data.
    #[arg(long, default_value_t = 2048)]
    mib: usize,
    /// How often each import is made.
    #[arg(long, default_value_t = 5)]
    turns: u32,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Who makes a raw image of a file.
#[derive(Clone, Copy)]
enum By {
    Vmmd,
    /// `qemu-img convert`, which leaves the image in the page cache.
    Qemu,
    /// The same, and the image is on stable storage, as vmmd has it.
    QemuDurable,
}

const ALL: [By; 3] = [By::Vmmd, By::Qemu, By::QemuDurable];

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let Arguments {
        vmm_image,
        mib,
        turns,
        ..
    } = Arguments::parse();
    let daemon = Daemon::configured(&format!("vmm_image = {vmm_image:?}\n")).await;
    let files = files(&daemon, mib);
    let mut imports = Vec::new();
    let mut digest = String::new();
    for (name, file, format) in &files {
        let mut figures = ALL.map(|_| Vec::new());
        for turn in 0..turns {
            for place in 0..ALL.len() {
                let number = (place + turn as usize) % ALL.len();
                // What the one before has left to be written is not this one's.
                rustix::fs::sync();
                let pid = daemon.pid().as_raw_nonzero().get();
                let (began, before) = (Instant::now(), (processor_time(pid), children(own())));
                match ALL[number] {
                    By::Vmmd => {
                        let found = import(&daemon, "bench", file).await;
                        assert!(digest.is_empty() || digest == found, "{name}: another content");
                        digest = found;
                    }
                    By::Qemu => convert(file, format, "unsafe", &daemon.path("converted")),
                    By::QemuDurable => convert(file, format, "writeback", &daemon.path("converted")),
                }
                let seconds = began.elapsed().as_secs_f64();
                let ticks = processor_time(pid) - before.0 + children(own()) - before.1;
                figures[number].push(json!([turn, seconds, ticks as f64 / 100.0]));
                match ALL[number] {
                    By::Vmmd => remove(&daemon, "bench").await,
                    _ => fs::remove_file(daemon.path("converted")).unwrap(),
                }
            }
        }
        let [vmmd, qemu, durable] = figures;
        imports.push(json!({
            "file": name,
            "file_bytes": fs::metadata(file).unwrap().len(),
            "vmmd": vmmd,
            "qemu": qemu,
            "qemu_durable": durable,
        }));
    }
    let clones = clones(&daemon, &files[0].1).await;
    let report = json!({"benchmark": "image", "mib": mib, "imports": imports, "clones": clones});
    println!("{report}");
}

fn own() -> i32 {
    std::process::id().cast_signed()
}

fn run(command: &mut Command) {
    let status = command.status();
    assert!(status.unwrap().success(), "{command:?}");
}

/// The same disk in files of several formats: what they are called, where they are, and their formats as qemu-img calls them.
fn files(daemon: &Daemon, mib: usize) -> Vec<(&'static str, PathBuf, &'static str)> {
    let path = |name: &str| daemon.path(name);
    let raw = path("disk.raw");
    let mut file = File::create(&raw).unwrap();
    file.set_len((mib as u64) << 20).unwrap();
    let mut word = 1_u64;
    let mut piece = vec![0; PIECE];
    for number in (0..mib << 20).step_by(2 * PIECE) {
        // Half of each line can't be compressed, the rest is the same in each.
        for line in piece.chunks_mut(64) {
            line.fill(b'x');
            for bytes in line[..32].chunks_mut(8) {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                bytes.copy_from_slice(&word.to_le_bytes());
            }
        }
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(number as u64)).unwrap();
        file.write_all(&piece).unwrap();
    }
    let (qcow2, compressed) = (path("disk.qcow2"), path("compressed.qcow2"));
    let convert = |options: &[&str], to: &Path| {
        let mut command = Command::new("qemu-img");
        run(command
            .args(["convert", "-f", "raw"])
            .args(options)
            .arg(&raw)
            .arg(to));
    };
    convert(&["-O", "qcow2"], &qcow2);
    convert(&["-c", "-O", "qcow2"], &compressed);
    let streamed = path("disk.vmdk");
    convert(&["-O", "vmdk", "-o", "subformat=streamOptimized"], &streamed);
    vec![
        ("raw", raw, "raw"),
        ("qcow2", qcow2, "qcow2"),
        ("qcow2 with compressed clusters", compressed, "qcow2"),
        ("vmdk as in an OVA archive", streamed, "vmdk"),
    ]
}

fn convert(file: &Path, format: &str, cache: &str, to: &Path) {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", format, "-O", "raw", "-t", cache]);
    run(command.arg(file).arg(to));
}

fn named(name: &str) -> Option<v1::ObjectMetadata> {
    Some(v1::ObjectMetadata {
        name: name.into(),
        ..Default::default()
    })
}

/// Returns the digest of its content.
async fn import(daemon: &Daemon, name: &str, file: &Path) -> String {
    let image = v1::Image {
        metadata: named(name),
        spec: Some(v1::ImageSpec {
            source: Some(Source::Path(file.display().to_string())),
            ..Default::default()
        }),
        status: None,
    };
    let request = v1::ImportImageRequest {
        image: Some(image),
        ..Default::default()
    };
    let mut client = ImageServiceClient::new(connect(daemon.folder.path()).await);
    let made = client.import_image(request).await.unwrap().into_inner();
    made.image.unwrap().status.unwrap().digest
}

async fn remove(daemon: &Daemon, name: &str) {
    let request = v1::DeleteImageRequest {
        name: name.into(),
        ..Default::default()
    };
    let mut client = ImageServiceClient::new(connect(daemon.folder.path()).await);
    client.delete_image(request).await.unwrap();
}

/// Disks of the image: overlays beside those of `qemu-img create`, and copies beside those of `cp`.
async fn clones(daemon: &Daemon, file: &Path) -> serde_json::Value {
    import(daemon, "base", file).await;
    let images = daemon.path("state/images");
    let base = fs::read_dir(&images).unwrap().next().unwrap().unwrap().path();
    let (image, before) = (room(&images), room(&daemon.path("state")));
    let mut client = DiskServiceClient::new(connect(daemon.folder.path()).await);
    let mut rooms = Vec::new();
    let (mut ours, mut theirs) = (
        [Calls::new("overlay"), Calls::new("copy")],
        [Calls::new("qemu-img create"), Calls::new("cp")],
    );
    for (kind, (clone, count)) in [(v1::DiskClone::Overlay, OVERLAYS), (v1::DiskClone::Copy, COPIES)]
        .into_iter()
        .enumerate()
    {
        let had = room(&daemon.path("state"));
        for number in 0..count {
            let disk = v1::Disk {
                metadata: named(&format!("disk-{kind}-{number}")),
                spec: Some(v1::VolumeSpec {
                    source: Some(DiskSource::Image(v1::ImageClone {
                        name: "base".into(),
                        clone: clone.into(),
                    })),
                    ..Default::default()
                }),
                status: None,
            };
            let request = v1::CreateDiskRequest {
                disk: Some(disk),
                ..Default::default()
            };
            rustix::fs::sync();
            ours[kind].time(client.create_disk(request)).await.unwrap();
            let other = daemon.path("clone");
            let mut command = match kind {
                0 => Command::new("qemu-img"),
                _ => Command::new("cp"),
            };
            match kind {
                0 => command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]),
                _ => command.args(["--reflink=auto", "--sparse=always"]),
            };
            command.arg(&base).arg(&other);
            rustix::fs::sync();
            theirs[kind].time(async { run(&mut command) }).await;
            fs::remove_file(other).unwrap();
        }
        rooms.push(room(&daemon.path("state")) - had);
    }
    json!({
        "image_bytes": image,
        "before_bytes": before,
        "overlays": OVERLAYS,
        "overlays_bytes": rooms[0],
        "copies": COPIES,
        "copies_bytes": rooms[1],
        "ours": ours.map(Calls::figures),
        "theirs": theirs.map(Calls::figures),
    })
}
