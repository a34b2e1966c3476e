//! Arguments of the image commands.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use super::{Label, Selector, Timeout, age, image_name, size};

/// Verbs of `image`.
#[derive(Debug, Subcommand)]
pub enum Image {
    /// Create an image from a file of this machine
    Upload(Upload),
    /// Delete images that nothing uses
    Prune(Prune),
}

/// Checksum, size limit and labels of an image file.
#[derive(Debug, Args)]
pub struct Source {
    /// Checksum of the file: sha256: and 64 hexadecimal digits, sha512: and 128, or the digits alone
    #[arg(long, value_name = "DIGEST")]
    pub checksum: Option<String>,
    /// File with the checksum in a line with the name of the image file, such as SHA256SUMS or SHA512SUMS
    #[arg(long, value_name = "FILE", conflicts_with = "checksum", value_hint = clap::ValueHint::FilePath)]
    pub checksum_file: Option<PathBuf>,
    /// Maximum size of the file, and of the disk in it; 1Ti when not given
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_size: Option<u64>,
    /// Label
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
}

/// `create image`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl create image debian13 https://cloud.example.org/debian-13-generic-amd64.qcow2
  vmmctl create image debian13 http://mirror.lan/d13.qcow2.xz --checksum sha256:4f1c…
  vmmctl create image debian13 http://mirror.lan/d13.qcow2 --checksum-file SHA512SUMS
  vmmctl create image golden /srv/vm/golden.raw --label tier=web
  vmmctl create image debian13 oci://registry.example:5000/debian/trixie:cloud
  vmmctl create image debian13 oci://registry.example/debian@sha256:4f1c… --username ci --password-file token
  vmmctl create image debian13 oci-layout:/srv/images/debian:13 --platform linux/amd64")]
pub struct CreateImage {
    /// Name of the image
    #[arg(value_parser = image_name)]
    pub name: String,
    /// http://… or https://…; the absolute path of a file of the node; oci://HOST/REPOSITORY[:TAG][@DIGEST] of a registry;
    /// or oci-layout:PATH[:TAG|@DIGEST], a folder of the node with OCI images
    #[arg(value_name = "URL|PATH|OCI")]
    pub from: String,
    #[command(flatten)]
    pub oci: Oci,
    #[command(flatten)]
    pub source: Source,
    /// Do not wait for the end: print the operation
    #[arg(long)]
    pub no_wait: bool,
    /// Print no progress
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// Options for an OCI image.
#[derive(Debug, Args)]
pub struct Oci {
    /// Platform of an image for several platforms, such as linux/amd64; the platform of the node when not given
    #[arg(long, value_name = "OS/ARCHITECTURE")]
    pub platform: Option<String>,
    /// Use HTTP for the registry, which others on the network can read and change
    #[arg(long)]
    pub plain_http: bool,
    /// Name of a user of the registry
    #[arg(long, value_name = "NAME", requires = "password_file")]
    pub username: Option<String>,
    /// File with the password or token of the user in one line; - for standard input
    #[arg(long, value_name = "FILE", requires = "username", value_hint = clap::ValueHint::FilePath)]
    pub password_file: Option<PathBuf>,
}

/// `image upload`.
#[derive(Debug, Args)]
pub struct Upload {
    /// Name of the image
    #[arg(value_parser = image_name)]
    pub name: String,
    /// File to upload. vmmctl computes its checksum first: a repeated upload of the same file is no error
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub file: PathBuf,
    /// Maximum size of the disk in the file; 1Ti when not given
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_size: Option<u64>,
    /// Label
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    /// Print no progress
    #[arg(short, long)]
    pub quiet: bool,
}

/// `image prune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl image prune --older-than 720h --dry-run
  vmmctl image prune --free 20Gi")]
pub struct Prune {
    /// Only images that no disk was made from for this time
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub older_than: Option<Duration>,
    /// Only until this amount is free, least recently used images first
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub free: Option<u64>,
    /// Only images with this label.
    #[arg(short = 'l', long, value_delimiter = ',')]
    pub selector: Vec<Selector>,
    /// Print the images that would be deleted, and delete nothing
    #[arg(long)]
    pub dry_run: bool,
}
