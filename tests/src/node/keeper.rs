//! A new node in the place of one that the emulator lost.
//!
//! QEMU's multi-threaded TCG (before 8.1) can run an instruction that was patched while it was being translated: the
//! kernel then dies of an `int3` that it has already removed. And a processor that it lost otherwise (as its first was
//! before guests were kept off it, see `host::Accel::idle_cpus`) takes no interrupt, not even an NMI, and the others
//! wait for it. That is no fault of what is tested, and must not fail every test that comes after it. Whoever needs the node
//! asks its keeper, who boots another one, a few times at most.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use super::Node;
use super::machine::Machine;

/// The environment variable that names the keeper's socket.
pub const KEEPER_VARIABLE: &str = "VMMD_NODE_KEEPER";

/// How many nodes are replaced before it is said that something else is wrong.
pub const REPLACEMENTS: u32 = 3;

/// What the console of a node shows that died in one of these ways. The kernel panics by itself when a processor is stuck
/// (`softlockup_panic` on its command line).
const SIGNATURES: [&str; 2] = ["Oops: int3", "softlockup: hung tasks"];

/// Replaces one node. It ends with the process.
#[derive(Debug)]
pub struct Keeper {
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Keeper {
    /// Keeps the node in `dir`, which `boot` boots anew.
    pub fn start(dir: PathBuf, mut boot: impl FnMut() -> Result<Node> + Send + 'static) -> Result<Keeper> {
        let folder = tempfile::Builder::new().prefix("vmmd-keeper.").tempdir()?;
        let socket = folder.path().join("keeper.sock");
        let listener = UnixListener::bind(&socket).context("create the keeper's socket")?;
        // The nodes are tied to this thread, which lives as long as the process.
        thread::Builder::new().name("keeper".into()).spawn(move || {
            let mut replaced = 0;
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let answer = match replace(&dir, &mut replaced, &mut boot) {
                    Ok(()) => String::new(),
                    Err(error) => format!("{error:#}"),
                };
                // Who asked may have gone meanwhile.
                let _ = stream.write_all(answer.as_bytes());
            }
        })?;
        Ok(Keeper {
            socket,
            _folder: folder,
        })
    }

    /// Where it is asked: the value of [`KEEPER_VARIABLE`].
    pub fn socket(&self) -> &PathBuf {
        &self.socket
    }
}

/// What the emulator is known for, when the node with that console died of it.
pub fn signature(console: &Path) -> Option<&'static str> {
    let console = fs::read_to_string(console).unwrap_or_default();
    SIGNATURES
        .into_iter()
        .find(|signature| console.contains(signature))
}

fn replace(dir: &Path, replaced: &mut u32, boot: &mut impl FnMut() -> Result<Node>) -> Result<()> {
    let Some(failed) = Machine::failed(dir)? else {
        // Another one asked before.
        return Ok(());
    };
    let signature =
        signature(&failed.console_log()).context("it did not die of what the emulator is known for")?;
    ensure!(
        *replaced < REPLACEMENTS,
        "it was replaced {REPLACEMENTS} times already"
    );
    *replaced += 1;
    let kept = dir.join(format!("console.lost-{replaced}.log"));
    fs::rename(failed.console_log(), &kept)?;
    eprintln!(
        "node: the emulator lost the node ({signature}; {}): booting another one",
        kept.display()
    );
    boot().map(drop)
}

/// Asks the keeper for a node in the place of a failed one. Without a keeper it is false.
pub fn ask() -> Result<bool> {
    let Some(socket) = std::env::var_os(KEEPER_VARIABLE) else {
        return Ok(false);
    };
    let mut answer = String::new();
    UnixStream::connect(&socket)
        .and_then(|mut stream| stream.read_to_string(&mut answer))
        .context("ask the node's keeper")?;
    if !answer.is_empty() {
        bail!("the node is not replaced: {answer}");
    }
    Ok(true)
}
