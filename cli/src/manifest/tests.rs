use rstest::rstest;

use super::*;

const GOOD: &str = "\
# A small VM.
apiVersion: vmmd/v1
kind: Vm
metadata:
  name: web
  labels:
    tier: front
    revision: 12
    stable: true
spec:
  cpu:
    cores: 2
  memory:
    sizeBytes: 256Mi
    backing: private
  boot:
    linux:
      kernel: /boot/vmlinuz
      cmdline: console=ttyS0 root=/dev/vda
  disks:
  - name: root
    path: /srv/root.raw
    format: raw
  nics:
  - name: eth0
    bridge: br0
    mac: 52:54:00:12:34:56
";

fn good() -> v1::Vm {
    vm_of(GOOD)
}

fn vm_of(text: &str) -> v1::Vm {
    match parse(text, "vm.yaml").unwrap().remove(0).object {
        Object::Vm(vm) => *vm,
        other => panic!("{other:?}"),
    }
}

fn message(text: &str) -> String {
    parse(text, "vm.yaml").unwrap_err().to_string()
}

#[test]
fn a_manifest_becomes_the_message_it_describes() {
    let vm = good();
    let metadata = vm.metadata.unwrap();
    assert_eq!(metadata.name, "web");
    let labels = [("revision", "12"), ("stable", "true"), ("tier", "front")];
    assert_eq!(
        metadata.labels,
        labels.map(|(key, value)| (key.into(), value.into())).into()
    );
    let spec = vm.spec.unwrap();
    assert_eq!(spec.cpu.unwrap().cores, 2);
    assert_eq!(spec.memory.unwrap().size_bytes, 256 << 20);
    assert_eq!(spec.memory.unwrap().backing(), v1::MemoryBacking::Private);
    assert_eq!(spec.disks[0].format(), v1::DiskFormat::Raw);
    assert_eq!(spec.nics[0].mac, "52:54:00:12:34:56");
}

#[test]
fn canonical_json_is_a_manifest_too() {
    let json = emit::manifest(&good()).unwrap().to_string();
    assert_eq!(vm_of(&json), good());
}

#[test]
fn what_get_prints_as_yaml_can_be_applied_again() {
    let mut vm = good();
    let metadata = vm.metadata.as_mut().unwrap();
    metadata.uid = "7b5ba9f5-6ad1-4d56-8e35-6bd3ba9d1ef8".into();
    metadata.generation = 1;
    metadata.create_time = Some(vmmd_api::well_known::Timestamp {
        seconds: 1_700_000_000,
        nanos: 5,
    });
    metadata.labels.insert("empty".into(), String::new());
    metadata
        .labels
        .insert("odd".into(), "a: b # c \"d\" 'e' \u{1f600} %".into());
    vm.spec.as_mut().unwrap().boot = Some(v1::BootSpec {
        source: Some(v1::boot_spec::Source::Linux(v1::LinuxBoot {
            kernel: "/k".into(),
            cmdline: format!("a=\"b c\" {}", "long ".repeat(100)),
            ..v1::LinuxBoot::default()
        })),
    });
    vm.status = Some(v1::VmStatus {
        phase: v1::VmPhase::Running.into(),
        instance: Some(v1::InstanceStatus {
            pid: 7,
            guest_resets: 2,
            ..v1::InstanceStatus::default()
        }),
        conditions: vec![v1::Condition {
            r#type: "Ready".into(),
            ..v1::Condition::default()
        }],
        ..v1::VmStatus::default()
    });
    let yaml = emit::yaml(&emit::manifest(&vm).unwrap(), schema::VM).unwrap();
    assert!(yaml.contains("sizeBytes: 268435456"), "{yaml}");
    let read = vm_of(&yaml);
    strip(&mut vm);
    assert_eq!(read, vm, "{yaml}");
}

#[test]
fn yaml_is_written_in_the_order_of_the_api() {
    let yaml = emit::yaml(&emit::manifest(&good()).unwrap(), schema::VM).unwrap();
    insta::assert_snapshot!(yaml, @r#"
apiVersion: vmmd/v1
kind: Vm
metadata:
  name: web
  labels:
    revision: "12"
    stable: "true"
    tier: front
spec:
  cpu:
    cores: 2
  memory:
    sizeBytes: 268435456
    backing: MEMORY_BACKING_PRIVATE
  boot:
    linux:
      kernel: /boot/vmlinuz
      cmdline: console=ttyS0 root=/dev/vda
  disks:
  - name: root
    path: /srv/root.raw
    format: DISK_FORMAT_RAW
  nics:
  - name: eth0
    bridge: br0
    mac: "52:54:00:12:34:56"
"#);
}

#[test]
fn limits_of_disks_take_suffixes_and_short_names_too() {
    let text = GOOD.replace(
        "    format: raw",
        "    format: QCOW2
    cache: writeback
    onError: pause
    logicalBlockBytes: 4Ki
    queues: 4
    rateLimit:
      bytesPerSecond: 100Mi
      operationsPerSecond: 500
      burstBytes: 1.5Gi
      burst_operations: 50
  - {name: data, disk: data, rateGroup: shared}
  - {name: cd, path: /srv/a.iso, format: iso}
  rateGroups:
  - name: shared
    limit: {bytesPerSecond: 1G}",
    );
    let spec = vm_of(&text).spec.unwrap();
    let root = v1::DiskSpec {
        name: "root".into(),
        source: Some(v1::disk_spec::Source::Path("/srv/root.raw".into())),
        format: v1::DiskFormat::Qcow2.into(),
        cache: v1::DiskCache::Writeback.into(),
        on_error: v1::DiskErrorPolicy::Pause.into(),
        logical_block_bytes: 4096,
        queues: 4,
        rate_limit: Some(v1::RateLimit {
            bytes_per_second: 100 << 20,
            operations_per_second: 500,
            burst_bytes: 3 << 29,
            burst_operations: 50,
        }),
        ..v1::DiskSpec::default()
    };
    assert_eq!(spec.disks[0], root);
    assert_eq!(
        (spec.disks[1].disk(), spec.disks[1].rate_group.as_str()),
        ("data", "shared")
    );
    assert_eq!(spec.disks[2].format(), v1::DiskFormat::Iso);
    assert_eq!(spec.rate_groups[0].limit.unwrap().bytes_per_second, 1_000_000_000);
    let yaml = emit::yaml(&emit::manifest(&vm_of(&text)).unwrap(), schema::VM).unwrap();
    assert_eq!(vm_of(&yaml), vm_of(&text), "{yaml}");
}

const DISK: &str = "\
apiVersion: vmmd/v1
kind: Disk
metadata:
  name: data
  labels: {tier: gold}
spec:
  sizeBytes: 10Gi
  format: raw
  preallocation: full
";

#[test]
fn a_disk_is_a_manifest_too() {
    let documents = parse(&format!("{GOOD}---\n{DISK}"), "vm.yaml").unwrap();
    let request = v1::CreateDiskRequest {
        disk: Some(v1::Disk {
            metadata: Some(v1::ObjectMetadata {
                name: "data".into(),
                labels: [("tier".to_owned(), "gold".to_owned())].into(),
                ..Default::default()
            }),
            spec: Some(v1::VolumeSpec {
                size_bytes: 10 << 30,
                format: v1::DiskFormat::Raw.into(),
                preallocation: v1::DiskPreallocation::Full.into(),
                ..Default::default()
            }),
            status: None,
        }),
        ..Default::default()
    };
    assert_eq!(documents[1].object, Object::Disk(Box::new(request)));
    let titles: Vec<_> = documents.iter().map(Document::title).collect();
    assert_eq!(titles, ["vm/web", "disk/data"]);
}

const NETWORK: &str = "\
apiVersion: vmmd/v1
kind: Network
metadata: {name: lan}
spec:
  mode: routed
  ipv4Cidr: 10.80.0.0/24
  securityGroups:
  - name: web
    ingress: {allow: [{protocol: tcp, ports: [{first: 80}]}]}
";

#[test]
fn a_network_is_a_manifest_too() {
    let documents = parse(NETWORK, "lan.yaml").unwrap();
    assert_eq!(documents[0].title(), "network/lan");
    let Object::Network(network) = documents[0].object.clone() else {
        panic!("{documents:?}");
    };
    let spec = network.spec.clone().unwrap();
    assert_eq!(spec.mode(), v1::NetworkMode::Routed);
    assert_eq!(spec.security_groups[0].name, "web");
    // As `get network -o yaml` prints it, with the fields of the daemon.
    let mut there = (*network).clone();
    there.status = Some(v1::NetworkStatus::default());
    there.metadata.as_mut().unwrap().generation = 4;
    let yaml = emit::yaml(&emit::manifest(&there).unwrap(), schema::NETWORK).unwrap();
    let again = parse(&yaml, "again.yaml").unwrap();
    assert_eq!(again[0].object, Object::Network(network));

    let wrong = NETWORK.replace("10.80.0.0/24", "10.80.0.0/8");
    let range =
        "must be a private range of IPv4 addresses such as 10.80.0.0/24, with a prefix of 16 to 30 bits";
    assert_eq!(message(&wrong), format!("vm.yaml:6: spec.ipv4Cidr: {range}"));
}

/// Errors in a disk manifest also name the line.
#[rstest]
#[case::no_size(
    "  sizeBytes: 10Gi\n",
    "",
    "vm.yaml:6: spec.sizeBytes: must be a multiple of 512 from 512 to 70368744177664 (64 TiB), is 0"
)]
#[case::short_name(
    "sizeBytes",
    "size",
    "vm.yaml:7: spec.size: unknown field; did you mean `sizeBytes`?"
)]
#[case::not_in_the_api(
    "  format",
    "  name",
    "vm.yaml:8: spec.name: unknown field; known here: `format`, `sizeBytes`, `preallocation`, `rawFile`, `overlayOf`, `adopt`, `image`, `anyContent`"
)]
#[case::unknown_word(
    "full",
    "all",
    "vm.yaml:9: spec.preallocation: must be off, metadata or full, is \"all\""
)]
#[case::bad_name(
    "name: data",
    "name: Data",
    "vm.yaml:4: metadata.name: must be 1 to 63 lower-case letters, digits or '-', beginning and ending with a letter or digit, is \"Data\""
)]
#[case::two_sources(
    "format: raw",
    "rawFile: /a\n  overlayOf: b",
    "vm.yaml:9: spec.overlayOf: can't be together with `rawFile`: give one of them"
)]
#[case::two_kinds_of_mistakes(
    "name: data\n  labels: {tier: gold}\nspec:\n  sizeBytes",
    "name: Data\n  label: {tier: gold}\nspec:\n  sizeBytes",
    "vm.yaml has 2 problems\n  \
     vm.yaml:4: metadata.name: must be 1 to 63 lower-case letters, digits or '-', beginning and ending with a letter or digit, is \"Data\"\n  \
     vm.yaml:5: metadata.label: unknown field; did you mean `labels`?"
)]
#[case::iso(
    "format: raw",
    "format: iso",
    "vm.yaml:8: spec.format: must be DISK_FORMAT_RAW or DISK_FORMAT_QCOW2; an ISO image is attached to a VM by its path"
)]
fn a_mistake_in_a_disk_is_named_with_its_line(#[case] good: &str, #[case] bad: &str, #[case] expected: &str) {
    assert!(DISK.contains(good));
    assert_eq!(message(&DISK.replace(good, bad)), expected);
}

/// Manifests that users copy must be valid.
#[test]
fn the_manifests_of_the_package_and_of_the_book_are_right() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut count = 0;
    for entry in fs::read_dir(top.join("vmmd/package/examples")).unwrap() {
        let path = entry.unwrap().path();
        read(&path).unwrap_or_else(|failure| panic!("{failure}"));
        count += 1;
    }
    let mut pages = vec![top.join("README.md")];
    let book = fs::read_dir(top.join("docs/src")).unwrap();
    pages.extend(book.map(|entry| entry.unwrap().path()));
    // Those of kubernetes.md are for a cluster.
    for page in pages.iter().filter(|page| !page.ends_with("kubernetes.md")) {
        let text = fs::read_to_string(page).unwrap();
        let page = page.display().to_string();
        let blocks = text.split("```yaml\n").skip(1);
        for block in blocks.filter_map(|rest| rest.split("\n```").next()) {
            // Read by cloud-init in the guest; one of the package's files.
            if block.starts_with("#cloud-config") || block.starts_with("{{#include") {
                continue;
            }
            parse(&whole(block), &page).unwrap_or_else(|failure| panic!("{failure}"));
            count += 1;
        }
    }
    assert!(count >= 16, "{count}");
}

/// The manifest with a piece of a VM's spec, or the piece itself when it is a manifest.
fn whole(piece: &str) -> String {
    if piece.contains("apiVersion:") {
        return piece.to_owned();
    }
    let piece = piece.strip_prefix("spec:\n").unwrap_or(piece);
    let mut text = GOOD.split("  cpu:").next().unwrap().to_owned();
    let parts = [
        "  cpu: {cores: 2}\n",
        "  memory: {sizeBytes: 2Gi}\n",
        "  boot: {linux: {kernel: /boot/vmlinuz}}\n",
        "  cloudInit: {}\n",
    ];
    for part in parts {
        let (key, _) = part.split_once(':').unwrap();
        if !piece.lines().any(|line| line.starts_with(&format!("{key}:"))) {
            text += part;
        }
    }
    if piece.starts_with("    ") {
        text += "  shares:\n  - name: data\n    path: /srv/data\n";
    }
    text + piece + "\n"
}

#[test]
fn several_documents_are_read_and_empty_ones_left_out() {
    let second = GOOD.replace("name: web", "name: db");
    let documents = parse(&format!("---\n{GOOD}---\n---\n{second}...\n"), "vm.yaml").unwrap();
    let names: Vec<_> = documents.iter().map(Document::name).collect();
    assert_eq!(names, ["web", "db"]);
}

#[test]
fn anchors_and_aliases_stand_for_what_they_name() {
    let text = GOOD.replace(
        "kernel: /boot/vmlinuz",
        "kernel: &k /boot/vmlinuz\n      initrd: *k",
    );
    let spec = vm_of(&text).spec.unwrap();
    let Some(v1::boot_spec::Source::Linux(linux)) = spec.boot.unwrap().source else {
        panic!("no kernel")
    };
    assert_eq!(linux.initrd, "/boot/vmlinuz");
}

/// Common mistakes and their messages.
#[rstest]
#[case::unknown_field(
    "cores: 2",
    "core: 2",
    "vm.yaml:12: spec.cpu.core: unknown field; did you mean `cores` or `coreLimitPercent`?"
)]
#[case::kubernetes_habit(
    "  cpu:\n    cores: 2",
    "  cpus: 2",
    "vm.yaml:11: spec.cpus: unknown field; did you mean `cpu`?"
)]
#[case::short_name(
    "sizeBytes:",
    "size:",
    "vm.yaml:14: spec.memory.size: unknown field; did you mean `sizeBytes`?"
)]
#[case::nothing_like_it(
    "cores: 2",
    "frequency: 2",
    "vm.yaml:12: spec.cpu.frequency: unknown field; known here: `cores`, `coreFractionPercent`, `coreLimitPercent`, `hostCpus`, `model`, `features`, `hyperv`"
)]
#[case::no_cpus("cores: 2", "cores: 0", "vm.yaml:12: spec.cpu.cores: must be 1 to 254, is 0")]
#[case::many_cpus(
    "cores: 2",
    "cores: 10000",
    "vm.yaml:12: spec.cpu.cores: must be 1 to 254, is 10000"
)]
#[case::negative(
    "cores: 2",
    "cores: -1",
    "vm.yaml:12: spec.cpu.cores: must be 0 to 4294967295, is -1"
)]
#[case::a_word(
    "cores: 2",
    "cores: two",
    "vm.yaml:12: spec.cpu.cores: must be a whole number, is \"two\""
)]
#[case::wrong_unit(
    "256Mi",
    "256m",
    "vm.yaml:14: spec.memory.sizeBytes: must be a number of bytes such as 268435456, 256Mi, 5Gi or 1G, is \"256m\""
)]
#[case::little_memory(
    "256Mi",
    "1Mi",
    "vm.yaml:14: spec.memory.sizeBytes: must be 64 MiB to 4 TiB (67108864 to 4398046511104), is 1048576"
)]
#[case::unknown_enum(
    "format: raw",
    "format: qcow",
    "vm.yaml:23: spec.disks[0].format: must be raw, qcow2 or iso, is \"qcow\""
)]
#[case::yes(
    "format: raw",
    "format: raw\n    readOnly: yes",
    "vm.yaml:24: spec.disks[0].readOnly: must be true or false, is \"yes\""
)]
#[case::no_list(
    "  disks:\n  - name: root\n    path: /srv/root.raw\n    format: raw",
    "  disks: /srv/root.raw",
    "vm.yaml:20: spec.disks: must be a list (lines that begin with `- `), is a single value"
)]
#[case::no_mapping(
    "  cpu:\n    cores: 2",
    "  cpu: 2",
    "vm.yaml:11: spec.cpu: must be a mapping (`field: value`), is a single value"
)]
#[case::twice(
    "cores: 2",
    "cores: 2\n    cores: 3",
    "vm.yaml:13: spec.cpu.cores: given twice, first in line 12"
)]
#[case::rivals(
    "bridge: br0",
    "bridge: br0\n    tap: tap0",
    "vm.yaml:27: spec.nics[0].tap: can't be together with `bridge`: give one of them"
)]
#[case::relative(
    "/srv/root.raw",
    "root.raw",
    "vm.yaml:22: spec.disks[0].path: must be an absolute path on the node, is \"root.raw\""
)]
#[case::slash(
    "name: web",
    "name: a/b",
    "vm.yaml:5: metadata.name: must be 1 to 63 lower-case letters, digits or '-', beginning and ending with a \
     letter or digit, is \"a/b\""
)]
#[case::wrong_kind(
    "kind: Vm",
    "kind: Pod",
    "vm.yaml:3: kind: must be Vm, Disk or Network, is \"Pod\""
)]
#[case::wrong_version("vmmd/v1", "v1", "vm.yaml:2: apiVersion: must be vmmd/v1, is \"v1\"")]
#[case::no_kind(
    "kind: Vm\n",
    "",
    "vm.yaml:2: kind: missing: a manifest begins with `apiVersion: vmmd/v1` and `kind: Vm`, `kind: Disk` or `kind: Network`"
)]
fn a_mistake_is_named_with_its_line(#[case] good: &str, #[case] bad: &str, #[case] expected: &str) {
    assert!(GOOD.contains(good));
    assert_eq!(message(&GOOD.replace(good, bad)), expected);
}

#[test]
fn all_mistakes_of_a_file_are_reported_at_once() {
    let text = GOOD
        .replace("cores: 2", "core: 2")
        .replace("256Mi", "many")
        .replace("bridge:", "bridgr:");
    let expected = "vm.yaml has 3 problems
  vm.yaml:12: spec.cpu.core: unknown field; did you mean `cores` or `coreLimitPercent`?
  vm.yaml:14: spec.memory.sizeBytes: must be a number of bytes such as 268435456, 256Mi, 5Gi or 1G, is \"many\"
  vm.yaml:26: spec.nics[0].bridgr: unknown field; did you mean `bridge`?";
    assert_eq!(message(&text), expected);
}

/// Unknown fields, wrong values and names that are given twice.
#[test]
fn mistakes_of_all_kinds_are_reported_at_once() {
    let text = GOOD
        .replace("name: web", "name: Web_1")
        .replace("cores: 2", "cores: 0")
        .replace("256Mi", "many")
        .replace("kernel: /boot/vmlinuz", "kernel: boot/vmlinuz")
        .replace("format: raw", "format: vmdk")
        .replace(
            "mac: 52:54:00:12:34:56",
            "mac: nonsense\n  - name: eth0\n    bridge: br1",
        )
        .replace("cmdline: console", "cmdlin: console");
    let said = message(&text);
    for field in [
        "metadata.name",
        "spec.cpu.cores",
        "spec.memory.sizeBytes",
        "spec.boot.linux.kernel",
        "spec.disks[0].format",
        "spec.boot.linux.cmdlin",
        "spec.nics[0].mac",
        "spec.nics",
    ] {
        assert!(said.contains(&format!(": {field}: ")), "{field}: {said}");
    }
    assert!(said.starts_with("vm.yaml has 8 problems"), "{said}");
}

#[test]
fn text_that_is_no_yaml_is_refused_with_its_line() {
    assert!(message("a: [1, 2\nb: 3\n").starts_with("vm.yaml:"));
    assert_eq!(message(""), "vm.yaml has no VM, disk or network: it is empty");
    assert_eq!(
        message("hello"),
        "vm.yaml:1: must be a mapping (`field: value`), is a single value"
    );
}

#[test]
fn aliases_can_not_blow_up_a_file() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..9 {
        let before = level - 1;
        let items = format!("*a{before}, ").repeat(10);
        text.push_str(&format!("a{level}: &a{level} [{items}]\n"));
    }
    assert!(message(&text).contains("too large"), "{}", message(&text));
}

#[test]
fn deep_nesting_is_an_error() {
    assert!(parse(&"[".repeat(100_000), "vm.yaml").is_err());
    assert!(parse(&"- ".repeat(100_000), "vm.yaml").is_err());
}

#[test]
fn a_failure_of_the_daemon_is_shown_with_the_line_it_is_about() {
    let document = parse(GOOD, "vm.yaml").unwrap().remove(0);
    let failure = |field: &str| Failure {
        violations: vec![(field.into(), "no such file".into())],
        ..Failure::new(Code::Invalid, "invalid")
    };
    let shown = |field| document.locate(failure(field)).to_string();
    assert_eq!(
        shown("spec.disks[0].path"),
        "vm.yaml:22: spec.disks[0].path: no such file"
    );
    assert_eq!(
        shown("spec.disks[0].serial"),
        "vm.yaml:21: spec.disks[0].serial: no such file"
    );
    assert_eq!(shown("elsewhere"), "vm.yaml: elsewhere: no such file");
}

#[rstest]
#[case("0", 0)]
#[case("268435456", 256 << 20)]
#[case("256Mi", 256 << 20)]
#[case("256MiB", 256 << 20)]
#[case("5Gi", 5 << 30)]
#[case("1.5Gi", 3 << 29)]
#[case("1G", 1_000_000_000)]
#[case("1GB", 1_000_000_000)]
#[case("512 Mi", 512 << 20)]
#[case("2 GiB", 2 << 30)]
#[case("18446744073709551615", u64::MAX)]
fn a_quantity_is_read(#[case] text: &str, #[case] bytes: u64) {
    assert_eq!(quantity::bytes(text), Ok(bytes));
}

#[rstest]
#[case("")]
#[case("Mi")]
#[case("-1")]
#[case("1e9")]
#[case("1mi")]
#[case("1.5")]
#[case("1..5Gi")]
#[case("1.0000000001Gi")]
#[case("0x10")]
#[case("16777216Ti")]
#[case("18446744073709551616")]
fn what_is_no_quantity_is_refused(#[case] text: &str) {
    assert!(quantity::bytes(text).is_err());
}

#[rstest]
#[case(0, "0")]
#[case(1023, "1023")]
#[case(256 << 20, "256Mi")]
#[case(3 << 29, "1.5Gi")]
#[case((1 << 30) + 1, "1Gi")]
#[case(u64::MAX, "16777216Ti")]
fn a_quantity_is_shown_short(#[case] bytes: u64, #[case] text: &str) {
    assert_eq!(quantity::show(bytes), text);
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text: String) {
        let _ = parse(&text, "vm.yaml");
        let _ = quantity::bytes(&text);
    }

    #[test]
    fn no_change_of_a_manifest_makes_the_reader_panic(at in 0..GOOD.len() + DISK.len(), with in "[-:\\[\\]{}&*!|>'\"%@`#, \n0-9a-z]{0,6}") {
        let mut text = format!("{GOOD}---\n{DISK}");
        if text.is_char_boundary(at) {
            text.insert_str(at, &with);
        }
        let _ = parse(&text, "vm.yaml");
    }
}
