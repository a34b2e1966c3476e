//! Position at which a stream of output resumes after a lost connection.

/// As many bytes of the end are kept, to be found again.
const KEPT: usize = 4096;

/// End of the shown output.
#[derive(Debug, Default)]
pub struct Seen {
    tail: Vec<u8>,
}

impl Seen {
    /// Records shown output.
    pub fn note(&mut self, bytes: &[u8]) {
        let bytes = bytes.get(bytes.len().saturating_sub(KEPT)..).unwrap_or_default();
        self.tail.extend_from_slice(bytes);
        let surplus = self.tail.len().saturating_sub(KEPT);
        drop(self.tail.drain(..surplus));
    }

    /// Returns the part of a replay that was not shown yet. This part begins after the last place
    /// that contains the end of the shown output, or overlaps with it. Without such a place, as
    /// after a lot of output or in another run, returns the whole replay.
    pub fn unseen<'a>(&self, replay: &'a [u8]) -> &'a [u8] {
        if self.tail.is_empty() {
            return replay;
        }
        let found = replay
            .windows(self.tail.len())
            .rposition(|window| window == self.tail);
        let from = match found {
            Some(at) => at + self.tail.len(),
            None => self.overlap(replay),
        };
        replay.get(from..).unwrap_or_default()
    }

    /// Number of bytes at the beginning of a replay that are also the end of the shown output.
    fn overlap(&self, replay: &[u8]) -> usize {
        let longest = self.tail.len().min(replay.len());
        (1..=longest)
            .rev()
            .find(|length| self.tail.ends_with(replay.get(..*length).unwrap_or_default()))
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_goes_on_where_the_output_ended() {
        for (shown, replay, unseen) in [
            (&["one\n", "two\n"][..], "one\ntwo\nthree\n", "three\n"),
            (&["one\ntwo\n"], "one\ntwo\n", ""),
            // The replay does not begin as early.
            (&["one\ntwo\n"], "two\nthree\n", "three\n"),
            (&[], "all\n", "all\n"),
            (&["one\n"], "another run\n", "another run\n"),
            // With several places, the last one counts.
            (&["# "], "# a\n# b\n# c", "c"),
        ] {
            let mut seen = Seen::default();
            shown.iter().for_each(|part| seen.note(part.as_bytes()));
            assert_eq!(
                seen.unseen(replay.as_bytes()),
                unseen.as_bytes(),
                "{shown:?} {replay:?}"
            );
        }
        let mut seen = Seen::default();
        let long: Vec<u8> = (0_u32..20_000).flat_map(u32::to_le_bytes).collect();
        seen.note(&long);
        assert_eq!(seen.tail.len(), KEPT);
        assert_eq!(seen.unseen(&[&long[60_000..], b"new"].concat()), b"new");
    }
}
