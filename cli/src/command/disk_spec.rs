//! Disks of a VM from the command line: `attach`'s options, and the texts of `create --disk` and `--rate-group`.

use vmmd_api::v1::{self, disk_spec::Source};
use vmmd_spec::{Violations, disk::Disk, name::Name};

use super::keys::{self, bytes, number, usage};
use crate::{
    args::{
        disk::{Attach, BUSES, CACHES, ERROR_POLICIES, IMAGE_FORMATS, Limits},
        value::word,
    },
    failure::{Failure, Result},
};

/// Keys of `--disk` besides a path.
const KEYS: &str = "name=, path=, beneath=, disk=, format=, any-content, serial=, readonly, bus=, cdrom, cache=, queues=, block-size=, on-error=, boot-order=, \
                    bps=, iops=, burst=, burst-ops=, rate-group=";

impl Limits {
    /// Whether no limit is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The fields of the given limits, and the bursts of a limit that is removed.
    pub fn named(&self) -> Vec<&'static str> {
        let fields = [
            ("bytes_per_second", self.bps.is_some()),
            ("operations_per_second", self.iops.is_some()),
            ("burst_bytes", self.burst.is_some() || self.bps == Some(0)),
            (
                "burst_operations",
                self.burst_ops.is_some() || self.iops == Some(0),
            ),
        ];
        fields
            .into_iter()
            .filter(|(_, named)| *named)
            .map(|(field, _)| field)
            .collect()
    }

    /// `limit` with the given fields changed.
    pub fn over(&self, limit: v1::RateLimit) -> v1::RateLimit {
        // A burst has no meaning without its limit, and is removed with it.
        let burst = |now: u64, limit: Option<u64>| if limit == Some(0) { 0 } else { now };
        v1::RateLimit {
            bytes_per_second: self.bps.unwrap_or(limit.bytes_per_second),
            operations_per_second: self.iops.unwrap_or(limit.operations_per_second),
            burst_bytes: self.burst.unwrap_or_else(|| burst(limit.burst_bytes, self.bps)),
            burst_operations: self
                .burst_ops
                .unwrap_or_else(|| burst(limit.burst_operations, self.iops)),
        }
    }

    /// Sets the limit of a key; returns whether the key is known.
    fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        match key {
            "bps" => self.bps = Some(bytes(value)?),
            "iops" => self.iops = Some(number(value)?),
            "burst" => self.burst = Some(bytes(value)?),
            "burst-ops" => self.burst_ops = Some(number(value)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn limit(&self) -> Option<v1::RateLimit> {
        (!self.is_empty()).then(|| self.over(v1::RateLimit::default()))
    }
}

/// The disk that `attach` describes.
pub fn from_flags(args: &Attach) -> Result<v1::DiskSpec> {
    let path = args.path.clone().unwrap_or_default();
    let disk = args.disk.clone().unwrap_or_default();
    let name = match (&args.name, disk.as_str()) {
        (Some(name), _) => name.clone(),
        (None, "") => name_of(&path)?,
        (None, disk) => disk.to_owned(),
    };
    if !path.is_empty() && !path.starts_with('/') {
        let message = format!("--path must be an absolute path on the node, is \"{path}\"");
        return Err(usage(message));
    }
    let block = args.block_size.unwrap_or_default();
    let disk = v1::DiskSpec {
        name,
        source: match path.is_empty() {
            true => Some(Source::Disk(disk)),
            false => Some(Source::Path(path)),
        },
        format: args.format.unwrap_or_default().into(),
        read_only: args.read_only,
        serial: args.serial.clone().unwrap_or_default(),
        cache: args.cache.unwrap_or_default().into(),
        queues: args.queues.unwrap_or_default(),
        logical_block_bytes: u32::try_from(block)
            .map_err(|_| usage(format!("--block-size must be 512 or 4096, is {block}")))?,
        on_error: args.on_error.unwrap_or_default().into(),
        rate_limit: args.limits.limit(),
        rate_group: args.rate_group.clone().unwrap_or_default(),
        any_content: args.any_content,
        beneath: String::new(),
        bus: args.bus.unwrap_or_default().into(),
        cdrom: args.cdrom,
        boot_order: args.boot_order.unwrap_or_default(),
    };
    let mut found = Violations::default();
    Disk::new(&mut found, "disk", &disk);
    valid(found, "the disk is not valid")?;
    Ok(disk)
}

/// Fails if there are violations, which it reports with the options instead of the fields that they set.
pub fn valid(found: Violations, message: &str) -> Result<()> {
    if found.0.is_empty() {
        return Ok(());
    }
    Err(in_options(Failure::invalid(message, found)))
}

/// Replaces the field names of a request in a failure by the options that set them.
pub fn in_options(mut failure: Failure) -> Failure {
    const OPTIONS: [(&str, &str); 24] = [
        ("bootOrder", "--boot-order"),
        ("name", "NAME"),
        ("path", "--path"),
        ("disk", "--disk"),
        ("format", "--format"),
        ("serial", "--serial"),
        ("bus", "--bus"),
        ("cdrom", "--cdrom"),
        ("readOnly", "--read-only"),
        ("cache", "--cache"),
        ("queues", "--queues"),
        ("logicalBlockBytes", "--block-size"),
        ("onError", "--on-error"),
        ("bytesPerSecond", "--bps"),
        ("operationsPerSecond", "--iops"),
        ("burstBytes", "--burst"),
        ("burstOperations", "--burst-ops"),
        ("rateGroup", "--rate-group"),
        ("sizeBytes", "--size"),
        ("rawFile", "--from-file"),
        ("overlayOf", "--overlay-of"),
        ("adopt", "--adopt"),
        ("anyContent", "--any-content"),
        ("preallocation", "--preallocation"),
    ];
    for (field, text) in &mut failure.violations {
        for (name, option) in OPTIONS {
            *text = text.replace(&format!("`{name}`"), option);
        }
        let last = field.rsplit('.').next().unwrap_or_default();
        if let Some((_, option)) = OPTIONS.iter().find(|(name, _)| *name == last) {
            (*option).clone_into(field);
        }
    }
    failure
}

/// Returns the name of a file's disk in a VM: the file name without folder and extension.
fn name_of(path: &str) -> Result<String> {
    let stem = std::path::Path::new(path)
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or_default();
    match Name::try_from(stem) {
        Ok(_) => Ok(stem.to_owned()),
        Err(error) => Err(usage(format!(
            "the name of the file is not a valid name of a disk (it {error}): set the name with --name"
        ))),
    }
}

/// The disk number `index` of a VM from `PATH` or `key=value,…`.
pub fn from_text(index: usize, text: &str) -> Result<v1::DiskSpec> {
    let numbered = if index == 0 {
        "root".to_owned()
    } else {
        format!("disk{index}")
    };
    let mut disk = v1::DiskSpec::default();
    if text.starts_with('/') {
        disk.source = Some(Source::Path(text.to_owned()));
    } else {
        let mut limits = Limits::default();
        keys::each("--disk", text, KEYS, |key, value| {
            match (key, value) {
                ("readonly" | "read-only", None) => disk.read_only = true,
                ("any-content", None) => disk.any_content = true,
                ("cdrom", None) => disk.cdrom = true,
                (_, None) => return Ok(false),
                (key, Some(value)) => return Ok(limits.take(key, value)? || set(&mut disk, key, value)?),
            }
            Ok(true)
        })?;
        disk.rate_limit = limits.limit();
    }
    if disk.source.is_some() && disk.disk().is_empty() && disk.format == 0 {
        disk.format = v1::DiskFormat::Raw.into();
    }
    if disk.name.is_empty() {
        disk.name = match disk.disk() {
            "" => numbered,
            named => named.to_owned(),
        };
    }
    Ok(disk)
}

/// The CD-ROM drive number `index` of a VM, from the path of an ISO image or the name of a disk.
pub fn cdrom(index: usize, medium: &str) -> v1::DiskSpec {
    let (source, format) = self::medium(medium);
    v1::DiskSpec {
        name: if index == 0 {
            "cdrom".to_owned()
        } else {
            format!("cdrom{index}")
        },
        source,
        format: format.into(),
        bus: v1::DiskBus::Sata.into(),
        cdrom: true,
        ..v1::DiskSpec::default()
    }
}

/// A medium: the path of an ISO image, or the name of a disk.
pub fn medium(medium: &str) -> (Option<Source>, v1::DiskFormat) {
    match medium.starts_with('/') {
        true => (Some(Source::Path(medium.to_owned())), v1::DiskFormat::Iso),
        false => (Some(Source::Disk(medium.to_owned())), v1::DiskFormat::Unspecified),
    }
}

/// Sets the field of a key; returns whether the key is known.
fn set(disk: &mut v1::DiskSpec, key: &str, value: &str) -> Result<bool, String> {
    match key {
        "name" => value.clone_into(&mut disk.name),
        "path" | "disk" if disk.source.is_some() => return Err("give either path= or disk=, not both".into()),
        "path" => disk.source = Some(Source::Path(value.to_owned())),
        "disk" => disk.source = Some(Source::Disk(value.to_owned())),
        "beneath" => value.clone_into(&mut disk.beneath),
        "serial" => value.clone_into(&mut disk.serial),
        "bus" => disk.bus = word(BUSES, value)?.into(),
        "format" => disk.format = word(IMAGE_FORMATS, value)?.into(),
        "cache" => disk.cache = word(CACHES, value)?.into(),
        "on-error" => disk.on_error = word(ERROR_POLICIES, value)?.into(),
        "queues" => disk.queues = number(value)?,
        "boot-order" => disk.boot_order = number(value)?,
        "block-size" => {
            disk.logical_block_bytes = u32::try_from(bytes(value)?).map_err(|_| "must be 512 or 4096")?;
        }
        "rate-group" => value.clone_into(&mut disk.rate_group),
        _ => return Ok(false),
    }
    Ok(true)
}

/// A rate group from `name=…,bps=…`.
pub fn rate_group(text: &str) -> Result<v1::RateGroup> {
    let mut name = String::new();
    let mut limits = Limits::default();
    let known = "name=, bps=, iops=, burst=, burst-ops=";
    keys::each("--rate-group", text, known, |key, value| match (key, value) {
        ("name", Some(value)) => {
            value.clone_into(&mut name);
            Ok(true)
        }
        (key, Some(value)) => limits.take(key, value),
        (_, None) => Ok(false),
    })?;
    if name.is_empty() {
        return Err(usage(format!("--rate-group {text}: name= is required")));
    }
    Ok(v1::RateGroup {
        name,
        limit: limits.limit(),
    })
}
