//! A terminal on an X server in a whole Debian, which fills the screen and scrolls.

use anyhow::{Context, Result};

use super::{Cost, ENCODINGS, Guest};
use crate::{
    run::Running,
    vmm::{Subject, socket},
};

/// A terminal of 1920 × 1080 with its output: 20 lines per second, of unique words.
const TERMINAL: &str = "xterm -fn 9x15 -geometry 211x70+0+0 -e perl -e '$|=1; srand 1; while (1) { \
    printf \"[%9d] %s\\n\", $n++, join \" \", map { sprintf \"%06x\", rand 1 << 24 } 1 .. 12; select undef, undef, undef, 0.05 }'";

/// Boots all guests, and shows the terminal on each in turn. Passes each cost to `each`.
pub fn run(subjects: &[&Subject], turns: u32, each: impl Fn(&str, u32, &Cost)) -> Result<()> {
    let mut guests = Vec::new();
    for subject in subjects {
        let running = Running::new(subject)?;
        guests.push(Guest { subject, running });
    }
    for guest in &mut guests {
        begin(guest).with_context(|| format!("{}: the desktop", guest.subject.name))?;
    }
    for turn in 0..turns {
        // None is always the one that comes after the same other.
        guests.rotate_left(1);
        for guest in &mut guests {
            let name = guest.subject.name;
            for encoding in ENCODINGS {
                let cost = guest.shows("terminal", TERMINAL, encoding);
                each(name, turn, &cost.with_context(|| name.to_owned())?);
            }
        }
    }
    Ok(())
}

/// Waits until the desktop has its own terminal, on a screen of the wanted size.
fn begin(guest: &mut Guest<'_>) -> Result<()> {
    guest.running.prompt("root@desktop")?;
    guest.order("export DISPLAY=:0; until xdotool search --onlyvisible --class xterm; do sleep 1; done >/dev/null 2>&1")?;
    guest.order("until [ \"$(xdotool getdisplaygeometry)\" = '1920 1080' ]; do sleep 1; done")?;
    // Without the pointer, which would lie over the text.
    guest.order("xdotool mousemove 1919 1079")?;
    let mut client = super::Client::connect(&socket(guest.subject.name), super::ZRLE)?;
    client.ask(false)?;
    client.update_within(super::SETTLE)?;
    guest.running.part()
}
