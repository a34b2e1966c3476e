//! fio of Debian's source package as one static program. Debian's binary needs Ceph's and Gluster's libraries, 60 MB that
//! a busybox guest would have to hold in memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{self, Inputs};
use crate::wait::Deadline;
use crate::{debian, run};

/// The version in Debian 12. Raise it with Debian's.
const VERSION: &str = "3.33-3";

/// Configuration without engines whose libraries the guests lack. io_uring and the system calls
/// stay.
const CONFIGURE: &str = "./configure --build-static --disable-native --disable-numa --disable-rdma --disable-rados \
                         --disable-rbd --disable-http --disable-gfapi --disable-pmem --disable-libnfs --disable-xnvme \
                         --disable-lex --disable-shm";

/// The program, built when there is none yet.
pub fn get() -> Result<PathBuf> {
    let mut inputs = Inputs::new(1);
    inputs
        .add("version", VERSION.as_bytes())
        .add("configure", CONFIGURE.as_bytes())
        .add_file(&debian::sources())?;
    let dir = cache::get_or_build("guest-fio", &inputs, build)?;
    Ok(dir.join("fio"))
}

fn build(out: &Path) -> Result<()> {
    debian::source("fio", VERSION, out)?;
    let source = out.join("source");
    let script = format!(
        "mkdir source && tar -xf fio_*.orig.tar.* -C source --strip-components=1 && cd source && {CONFIGURE} && \
         make -j2 fio && strip fio"
    );
    run::check(
        Command::new("sh").args(["-c", &script]).current_dir(out),
        Deadline::seconds(600),
    )?;
    fs::rename(source.join("fio"), out.join("fio")).context("take the program")?;
    fs::remove_dir_all(&source).context("remove the source")
}
