//! Keeper of the test node: boots the node while other tests already run, and replaces a node that
//! the emulator lost.
//!
//! QEMU's multi-threaded TCG (before 8.1) can run an instruction that was patched during its
//! translation. The kernel then dies of an `int3` that it has already removed. The emulator can
//! also lose a processor in another way, as it lost the first one while guests ran on it (see
//! `host::Accel::idle_cpus`). Such a processor takes no interrupt, not even an NMI, and the others
//! wait for it. These are no faults of the tested programs and must not fail every later test. A
//! test that needs the node asks its keeper, which boots a replacement, at most a few times.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, ensure};

use super::Node;
use super::machine::Machine;

/// The environment variable that names the keeper's socket.
pub const KEEPER_VARIABLE: &str = "VMMD_NODE_KEEPER";

/// How many nodes are replaced before it is said that something else is wrong.
pub const REPLACEMENTS: u32 = 3;

/// Messages on the console of a node that died in one of these ways. The kernel panics when a
/// processor is stuck (`softlockup_panic` on its command line).
const SIGNATURES: [&str; 2] = ["Oops: int3", "softlockup: hung tasks"];

/// Boots a node, and replaces it. It ends with the process.
#[derive(Debug)]
pub struct Keeper {
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Keeper {
    /// Boots the node in `dir` with `boot` in parallel to the caller, and keeps it. Requests are
    /// answered when the node is up or has failed.
    pub fn start(dir: PathBuf, mut boot: impl FnMut() -> Result<Node> + Send + 'static) -> Result<Keeper> {
        let folder = tempfile::Builder::new().prefix("vmmd-keeper.").tempdir()?;
        let socket = folder.path().join("keeper.sock");
        let listener = UnixListener::bind(&socket).context("create the keeper's socket")?;
        // The nodes are tied to this thread, which lives as long as the process.
        thread::Builder::new().name("keeper".into()).spawn(move || {
            let failed = boot()
                .err()
                .map(|error| format!("the node did not come up: {error:#}"));
            let mut replaced = 0;
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let answer = match &failed {
                    Some(why) => why.clone(),
                    None => match replace(&dir, &mut replaced, &mut boot) {
                        Ok(()) => String::new(),
                        Err(error) => format!("the node is not replaced: {error:#}"),
                    },
                };
                // The requester may have ended meanwhile.
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

    /// Waits until the node is up.
    ///
    /// # Errors
    ///
    /// When it did not come up, or has ended for a reason of its own.
    pub fn wait(&self) -> Result<()> {
        ask_at(&self.socket)
    }
}

/// Returns the known fault of the emulator, if the node with this console died of one.
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

/// Waits for the node that the keeper boots, and requests a replacement if the node failed. Returns
/// false without a keeper.
pub fn ask() -> Result<bool> {
    let Some(socket) = std::env::var_os(KEEPER_VARIABLE) else {
        return Ok(false);
    };
    ask_at(Path::new(&socket)).map(|()| true)
}

fn ask_at(socket: &Path) -> Result<()> {
    let mut answer = String::new();
    UnixStream::connect(socket)
        .and_then(|mut stream| stream.read_to_string(&mut answer))
        .context("ask the node's keeper")?;
    ensure!(answer.is_empty(), "{answer}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn who_asks_while_the_node_boots_waits_for_it() {
        let folder = tempfile::tempdir().expect("folder");
        let (end, ends) = mpsc::channel::<()>();
        let ended = AtomicBool::new(false);
        let keeper = Keeper::start(folder.path().to_owned(), move || {
            ends.recv().expect("the test goes on");
            anyhow::bail!("no such node")
        })
        .expect("keeper");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| (keeper.wait(), ended.load(Ordering::SeqCst)));
            ended.store(true, Ordering::SeqCst);
            end.send(()).expect("the boot ends");
            let (answer, ended) = waiting.join().expect("no panic");
            assert!(ended, "the answer came before the boot had ended");
            let error = answer.expect_err("the boot failed");
            assert_eq!(error.to_string(), "the node did not come up: no such node");
        });
        assert!(keeper.wait().is_err(), "whoever asks later is told the same");
    }
}
