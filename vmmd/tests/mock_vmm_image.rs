//! A `vmm-image` for tests: writes no qcow2 image, only the magic and the size of its
//! header (qcow2 specification, "Header"), and from byte 4,096 on the creator: "net=… caps=…".
//!
//! An executable called `image-fails` has no space, one called `image-hangs` never ends.
#![allow(clippy::unwrap_used, reason = "a test's helper may fail loudly")]

use std::{
    env,
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    process, thread,
};

const MAGIC: [u8; 4] = *b"QFI\xfb";

fn main() {
    let value = |option: &str| {
        let found = env::args().skip_while(|argument| argument != option).nth(1);
        found.map(|text| text.parse::<u64>().unwrap())
    };
    let command = env::args().nth(1).unwrap();
    let program = env::current_exe().unwrap();
    if program.ends_with("image-hangs") {
        loop {
            thread::park();
        }
    }
    if command == "import" {
        import(value("--max-size").unwrap());
    }
    if command == "boot" {
        boot();
    }
    if command == "firmware" {
        firmware();
    }
    let image = File::from(owned(i32::try_from(value("--fd").unwrap()).unwrap()));
    let size = value("--size").unwrap();
    if program.ends_with("image-fails") {
        image.write_all_at(&[1; 4096], 0).unwrap();
        eprintln!("making the image: No space left on device");
        process::exit(1);
    }
    match command.as_str() {
        "create" => {
            image.write_all_at(&MAGIC, 0).unwrap();
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let field = |name: &str| {
                let line = status.lines().find(|line| line.starts_with(name)).unwrap();
                line.split_whitespace().nth(1).unwrap().to_owned()
            };
            let below = env::args().filter(|argument| argument == "--backing-fd").count();
            let network = fs::read_link("/proc/self/ns/net").unwrap();
            let words = format!(
                "net={} caps={} below={below}",
                network.display(),
                field("CapEff:")
            );
            image.write_all_at(words.as_bytes(), 4096).unwrap();
        }
        "resize" => {
            let mut present = [0; 8];
            image.read_exact_at(&mut present, 24).unwrap();
            if u64::from_be_bytes(present) > size {
                eprintln!(
                    "the image has {} bytes, {size} are less",
                    u64::from_be_bytes(present)
                );
                process::exit(1);
            }
        }
        other => panic!("{other}"),
    }
    image.write_all_at(&size.to_be_bytes(), 24).unwrap();
    println!("{{\"virtual_size\": {size}}}");
    process::exit(0);
}

/// A disk that begins with "boots:WORDS\n" has a kernel with that content, and the words as its command line.
fn boot() -> ! {
    let (disk, mut kernel) = (File::from(owned(3)), File::from(owned(4)));
    let mut head = [0; 512];
    disk.read_exact_at(&mut head, 0).unwrap();
    assert!(disk.write_at(&head, 0).is_err(), "it is not to be written to");
    let head = String::from_utf8_lossy(&head);
    let Some((words, _)) = head.strip_prefix("boots:").and_then(|rest| rest.split_once('\n')) else {
        eprintln!("vmm-image: no kernel was found on the disk: it has LVM");
        process::exit(1);
    };
    kernel.write_all(words.as_bytes()).unwrap();
    println!(
        "{{\"kernel\": \"/boot/vmlinuz\", \"initrd_bytes\": 0, \"cmdline\": \"{words}\", \"by\": \"a link\"}}"
    );
    process::exit(0);
}

/// A disk that begins with "uefi" or "bios" boots by that firmware; as a CD-ROM with "cd-" before it.
fn firmware() -> ! {
    let disk = File::from(owned(3));
    let mut head = [0; 7];
    disk.read_exact_at(&mut head, 0).unwrap();
    assert!(disk.write_at(&head, 0).is_err(), "it is not to be written to");
    let is_cdrom = env::args().any(|argument| argument == "--cdrom");
    let kind = match (is_cdrom, &head) {
        (false, [b'u', b'e', b'f', b'i', ..]) | (true, b"cd-uefi") => "uefi",
        (false, [b'b', b'i', b'o', b's', ..]) | (true, b"cd-bios") => "bios",
        _ => {
            eprintln!("vmm-image: it has no EFI system partition and no boot sector");
            process::exit(1);
        }
    };
    println!("{{\"firmware\": \"{kind}\"}}");
    process::exit(0);
}

/// Copies a file of any content. One with the header of a GPT at byte 4096 has blocks of that length. One that begins with "refuse:" is refused with the words behind that.
fn import(max_size: u64) -> ! {
    let (mut source, mut target) = (File::from(owned(3)), File::from(owned(4)));
    let mut content = Vec::new();
    source.read_to_end(&mut content).unwrap();
    if let Some(words) = content.strip_prefix(b"refuse:") {
        eprintln!("vmm-image: {}", String::from_utf8_lossy(words));
        process::exit(1);
    }
    assert!(content.len() as u64 <= max_size);
    println!("{{\"done\": 0, \"total\": {}}}", content.len());
    content.resize(content.len().next_multiple_of(512), 0);
    target.write_all(&content).unwrap();
    let is_long = content.get(4096..4104) == Some(b"EFI PART");
    println!(
        "{{\"format\": \"raw\", \"compression\": null, \"virtual_size\": {}, \"logical_block\": {}}}",
        content.len(),
        if is_long { 4096 } else { 512 }
    );
    process::exit(0);
}

#[allow(unsafe_code)]
fn owned(number: i32) -> OwnedFd {
    // SAFETY: the descriptor was passed to this process for this use, and each is taken once.
    unsafe { OwnedFd::from_raw_fd(number) }
}
