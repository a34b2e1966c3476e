//! Heartbeats of guests: each guest sends a line to the node twice a second, with its name, the id
//! of its boot and its uptime. Two concurrent runs of a VM show up as a line that comes too late.

use std::collections::BTreeMap;

/// The script of a guest that sends lines to a port.
pub fn script(name: &str, address: &str, port: u16) -> String {
    format!(
        "boot=$(cat /proc/sys/kernel/random/boot_id)\n\
         while :; do\n\
             while sleep 0.5; do read -r up idle </proc/uptime; echo {name} $boot $up; done | nc {address} {port}\n\
             sleep 1\n\
         done\n"
    )
}

/// A guest that was heard.
#[derive(Debug, Default)]
struct Guest {
    boots: Vec<String>,
    /// In hundredths of a second.
    uptime: u64,
    /// Something was heard of it since [`Beats::forget`].
    heard: bool,
}

/// All guests that were heard, by name.
#[derive(Debug, Default)]
pub struct Beats {
    guests: BTreeMap<String, Guest>,
}

impl Beats {
    /// A line, in the order in which they come.
    ///
    /// # Errors
    ///
    /// That two runs were there at the same time.
    pub fn hear(&mut self, line: &str) -> Result<(), String> {
        let words: Vec<_> = line.split(' ').collect();
        let [name, boot, uptime] = words.as_slice() else {
            return Err(format!("{line:?} is no guest's"));
        };
        let uptime = uptime.replace('.', "").parse();
        let uptime: u64 = uptime.map_err(|error| format!("{line:?}: {error}"))?;
        let guest = self.guests.entry((*name).to_owned()).or_default();
        match guest.boots.iter().position(|known| known == boot) {
            None => guest.boots.push((*boot).to_owned()),
            Some(place) if place + 1 < guest.boots.len() => {
                return Err(format!("{line:?} comes after a later boot: {guest:?}"));
            }
            Some(_) if uptime <= guest.uptime => {
                return Err(format!("{line:?} comes a second time: {guest:?}"));
            }
            Some(_) => {}
        }
        guest.uptime = uptime;
        guest.heard = true;
        Ok(())
    }

    /// From now on, no guest was heard.
    pub fn forget(&mut self) {
        for guest in self.guests.values_mut() {
            guest.heard = false;
        }
    }

    /// Guests of these of which nothing was heard.
    pub fn silent<'a>(&self, names: &'a [String]) -> Vec<&'a str> {
        let heard = |name: &str| self.guests.get(name).is_some_and(|guest| guest.heard);
        let names = names.iter().map(String::as_str);
        names.filter(|name| !heard(name)).collect()
    }

    /// How often a guest has booted.
    pub fn boots(&self, name: &str) -> usize {
        self.guests.get(name).map_or(0, |guest| guest.boots.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(lines: &[&str]) -> Result<Beats, String> {
        let mut beats = Beats::default();
        lines.iter().try_for_each(|line| beats.hear(line)).map(|()| beats)
    }

    #[test]
    fn boots_one_after_another_are_counted_for_each_guest() {
        let mut beats = heard(&["a 1 5.00", "b 7 9.00", "a 1 5.52", "a 2 4.10", "b 7 10.00"]).unwrap();
        assert_eq!((beats.boots("a"), beats.boots("b"), beats.boots("c")), (2, 1, 0));
        beats.forget();
        beats.hear("b 7 10.50").unwrap();
        assert_eq!(beats.silent(&["a".into(), "b".into(), "c".into()]), ["a", "c"]);
    }

    #[test]
    fn two_runs_at_a_time_are_noticed() {
        let boots = heard(&["a 1 5.00", "a 2 4.10", "a 1 5.52"]).unwrap_err();
        assert!(boots.contains("after a later boot"), "{boots}");
        let copies = heard(&["a 1 5.00", "a 1 5.52", "a 1 5.52"]).unwrap_err();
        assert!(copies.contains("a second time"), "{copies}");
    }
}
