//! Arguments of the image commands.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use vmmd_api::v1;

use super::{Delete, Label, Names, Selector, Timeout, WatchedList, age, image_name, size};

/// `image`.
#[derive(Debug, Subcommand)]
pub enum Image {
    /// Make an image of a file of the web or of the node, or of an OCI image.
    Import(Import),
    /// Make an image of a file that you have.
    Upload(Upload),
    /// List images.
    #[command(visible_aliases = ["list", "get"])]
    Ls(WatchedList<v1::Image>),
    /// Show everything about images.
    Describe(Names<v1::Image>),
    /// Delete images.
    #[command(visible_alias = "delete")]
    Rm(Delete<v1::Image>),
    /// Delete the images that nothing uses.
    Prune(Prune),
}

/// Checksum, size limit and labels of an image file.
#[derive(Debug, Args)]
pub struct Source {
    /// Checksum of the file: sha256: and 64 hexadecimal digits, sha512: and 128, or the digits alone.
    #[arg(long, value_name = "DIGEST")]
    pub checksum: Option<String>,
    /// File with the checksum in the line that has the file's name, such as SHA256SUMS or SHA512SUMS.
    #[arg(long, value_name = "FILE", conflicts_with = "checksum", value_hint = clap::ValueHint::FilePath)]
    pub checksum_file: Option<PathBuf>,
    /// Most bytes of the file, and of the disk in it; 1Ti when not given.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_size: Option<u64>,
    /// Label.
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
}

/// `image import`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl image import debian13 https://cloud.example.org/debian-13-generic-amd64.qcow2
  vmmctl image import debian13 http://mirror.lan/d13.qcow2.xz --checksum sha256:4f1c…
  vmmctl image import debian13 http://mirror.lan/d13.qcow2 --checksum-file SHA512SUMS
  vmmctl image import golden /srv/vm/golden.raw --label tier=web
  vmmctl image import debian13 oci://registry.example:5000/debian/trixie:cloud
  vmmctl image import debian13 oci://registry.example/debian@sha256:4f1c… --username ci --password-file token
  vmmctl image import debian13 oci-layout:/srv/images/debian:13 --platform linux/amd64")]
pub struct Import {
    /// Name of the image.
    #[arg(value_parser = image_name)]
    pub name: String,
    /// http://… or https://…; the absolute path of a file of the node; oci://HOST/REPOSITORY[:TAG][@DIGEST] of a registry;
    /// or oci-layout:PATH[:TAG|@DIGEST], a folder of the node with OCI images.
    #[arg(value_name = "URL|PATH|OCI")]
    pub from: String,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub oci: Oci,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub source: Source,
    /// Do not wait until it is made: print the operation.
    #[arg(long)]
    pub no_wait: bool,
    /// Print nothing of the progress.
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// Options for an OCI image.
#[derive(Debug, Args)]
pub struct Oci {
    /// Which image of those for several platforms: linux/amd64, say. That of the node when not given.
    #[arg(long, value_name = "OS/ARCHITECTURE")]
    pub platform: Option<String>,
    /// Speak to the registry by HTTP, which anybody on the way can read and change.
    #[arg(long)]
    pub plain_http: bool,
    /// Name of a user of the registry.
    #[arg(long, value_name = "NAME", requires = "password_file")]
    pub username: Option<String>,
    /// File with that user's password or token in one line; - for standard input.
    #[arg(long, value_name = "FILE", requires = "username", value_hint = clap::ValueHint::FilePath)]
    pub password_file: Option<PathBuf>,
}

/// `image upload`.
#[derive(Debug, Args)]
pub struct Upload {
    /// Name of the image.
    #[arg(value_parser = image_name)]
    pub name: String,
    /// The file; its checksum is found out first, so that the same upload again is no error.
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub file: PathBuf,
    /// Most bytes of the disk in it; 1Ti when not given.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_size: Option<u64>,
    /// Label.
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    /// Print nothing of the progress.
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
    /// Only those of which no disk was made for so long.
    #[arg(long, value_name = "DURATION", value_parser = age)]
    pub older_than: Option<Duration>,
    /// Only until so much is free, those first that were not used for longest.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub free: Option<u64>,
    /// Only images with this label.
    #[arg(
        short = 'l',
        long = "selector",
        value_name = "SELECTOR",
        value_delimiter = ','
    )]
    pub selectors: Vec<Selector>,
    /// Delete nothing, say what would go.
    #[arg(long)]
    pub dry_run: bool,
}
