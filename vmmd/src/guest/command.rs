//! A command in a Linux guest, with input and output of any length.
//!
//! The agent alone takes all input in one message, and keeps the output in its memory up to the end of
//! the command. So a shell of the guest gives the command three files without a name as its input,
//! output and error output, and waits for the word `start` in a fourth one. The daemon reaches the files
//! at `/proc/PID/fd`, and reads the output while the command runs. The space of the files is free when
//! the command has ended and the daemon has closed them, also after a crash of one of the two.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};
use vmmd_host::failure::Failure;

use super::{Agent, Ended, GuestFile};
use crate::{host::Host, registry::vms::Entry};

/// Script of the shell. It opens descriptor 9 last, so the other descriptors exist when that one exists. It waits for the word for
/// 10 minutes at most: 5 s in short steps, then in seconds.
const SCRIPT: &str = r#"d=$(umask 077; mktemp -d "${TMPDIR:-/tmp}/vmmd.XXXXXX") || exit 125
: >"$d/0" && exec <"$d/0" >"$d/1" 2>"$d/2" 9>"$d/9" || exit 125
rm -rf "$d"
n=0
until [ -s /proc/$$/fd/9 ]; do
    n=$((n + 1))
    [ $n -lt 650 ] || { echo 'the input of the command did not come within 10 minutes' >&2; exit 125; }
    if [ $n -lt 50 ]; then sleep 0.1; else sleep 1; fi
done
read -r word </proc/$$/fd/9
[ "$word" = start ] || exit 125
exec 9>&-
exec "$@""#;
/// Descriptor of the file with the word.
const WORD: u8 = 9;
/// Time limit for the files.
const READY: Duration = Duration::from_secs(30);
/// Time between two looks for the files.
const LOOK: Duration = Duration::from_millis(20);

/// A command whose process exists in a guest.
#[derive(Debug)]
pub struct Command {
    host: Arc<Host>,
    entry: Entry,
    pid: i64,
    word: GuestFile,
    stdin: GuestFile,
    stdout: GuestFile,
    stderr: GuestFile,
    ended: Option<Ended>,
}

impl Command {
    /// Makes the process. `None` when the guest has no shell or no `/proc`, or its agent opens no
    /// files: then the process ends without the command.
    pub async fn prepare(
        host: Arc<Host>,
        entry: Entry,
        command: &[String],
        env: &[String],
    ) -> Result<Option<Self>, Failure> {
        let shell = ["/bin/sh", "-c", SCRIPT, "sh"].map(str::to_owned);
        let words = [shell.as_slice(), command].concat();
        let Some(pid) = refused(Agent::of(&host, &entry)?.start(&words, env, &[]).await)? else {
            return Ok(None);
        };
        let open = async |descriptor: u8, write| {
            let path = format!("/proc/{pid}/fd/{descriptor}");
            refused(GuestFile::open(Arc::clone(&host), entry.clone(), &path, write).await)
        };
        let deadline = Instant::now() + READY;
        let word = loop {
            if let Some(word) = open(WORD, true).await? {
                break word;
            }
            let ended = refused(Agent::of(&host, &entry)?.ended(pid).await)?;
            if !matches!(ended, Some(None)) || Instant::now() > deadline {
                return Ok(None);
            }
            sleep(LOOK).await;
        };
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (open(0, true).await?, open(1, false).await?, open(2, false).await?)
        else {
            return Ok(None);
        };
        Ok(Some(Self {
            host,
            entry,
            pid,
            word,
            stdin,
            stdout,
            stderr,
            ended: None,
        }))
    }

    /// Adds to the input. Only before [`Command::start`].
    pub async fn write(&self, input: &[u8]) -> Result<(), Failure> {
        self.stdin.write(input).await
    }

    /// Starts the command.
    pub async fn start(&self) -> Result<(), Failure> {
        self.stdin.close().await?;
        self.say("start").await
    }

    /// Ends the process before [`Command::start`], or asks the command to end (SIGTERM). A failure is of
    /// no interest: the guest may have gone.
    pub async fn give_up(&self) {
        let _started_already = self.say("end").await;
        let kill = ["/bin/sh", "-c", "kill \"$1\"", "sh"].map(str::to_owned);
        let words = [kill.as_slice(), &[self.pid.to_string()]].concat();
        if self.ended.is_none()
            && let Ok(agent) = Agent::of(&self.host, &self.entry)
            && let Ok(None) = agent.ended(self.pid).await
        {
            let _ended_meanwhile = agent.start(&words, &[], &[]).await;
        }
        self.close().await;
    }

    /// Standard output and standard error since the last call, at most one piece of each. Both are
    /// empty when there is no more at present.
    pub async fn output(&mut self) -> Result<[Vec<u8>; 2], Failure> {
        // Asked first: the files then have all output of a command that has ended.
        if self.ended.is_none() {
            self.ended = Agent::of(&self.host, &self.entry)?.ended(self.pid).await?;
        }
        Ok([self.stdout.read().await?.0, self.stderr.read().await?.0])
    }

    /// How the command ended, once [`Command::output`] has seen its end. It may have more output.
    pub const fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }

    /// Closes the files.
    pub async fn close(&self) {
        let _guest_has_gone = self.stdout.close().await;
        let _guest_has_gone = self.stderr.close().await;
    }

    async fn say(&self, word: &str) -> Result<(), Failure> {
        self.word.write(format!("{word}\n").as_bytes()).await?;
        self.word.close().await
    }
}

/// The answer, or `None` when the agent refuses the question.
fn refused<T>(answer: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(failure) if matches!(failure.reason, "GUEST_AGENT_ERROR" | "GUEST_AGENT_UNSUPPORTED") => Ok(None),
        Err(failure) => Err(failure),
    }
}
