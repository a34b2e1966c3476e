//! Leave to destroy data, asked for where somebody can be asked.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use crate::{
    args::Yes,
    failure::{Code, Failure, Result},
    output,
};

/// Asks for confirmation of the action that `text` describes; an error without confirmation.
pub fn ask(yes: Yes, text: &str) -> Result<()> {
    if yes.yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::new(Code::Usage, text).hint("say that you mean it with --yes"));
    }
    let mut stderr = io::stderr().lock();
    let asked = write!(stderr, "{text}: go on? [y/N] ").and_then(|()| stderr.flush());
    asked.map_err(|error| output::write_failed(&error))?;
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| Failure::new(Code::Other, format!("can't read the answer: {error}")))?;
    if ["y", "yes"].contains(&answer.trim().to_lowercase().as_str()) {
        Ok(())
    } else {
        Err(Failure::new(Code::Cancelled, "nothing was deleted"))
    }
}
