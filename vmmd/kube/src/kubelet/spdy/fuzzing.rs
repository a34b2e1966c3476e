//! Entry of the fuzz target (`vmmd/kube/fuzz`): a function that gives any bytes to a session as a
//! client's, and panics at an event that the other code need not expect. The tests here run it over
//! the seeds and over generated input.

use std::collections::BTreeSet;

use super::{
    headers::{Headers, MAX_BLOCK, MAX_HEADERS},
    session::{Event, MAX_STREAMS, Session, Violation},
};

/// An event that does not depend on how the bytes were cut.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Opened(u32, Headers),
    Data(u32, Vec<u8>),
    Finished(u32),
    Reset(u32),
    Other(String),
}

/// The first byte says in what pieces the others come; the events must be the same as when they come at once.
pub fn spdy_session(data: &[u8]) {
    let Some((size, bytes)) = data.split_first() else {
        return;
    };
    let whole = events(bytes, usize::MAX);
    let pieces = events(bytes, usize::from(*size).max(1));
    assert_eq!(whole, pieces);
}

fn events(bytes: &[u8], size: usize) -> (Vec<Seen>, Option<Violation>) {
    let mut session = Session::new();
    let mut seen = Vec::new();
    let mut open = BTreeSet::new();
    let mut last = 0;
    for piece in bytes.chunks(size.min(bytes.len().max(1))) {
        let mut input = piece;
        loop {
            let event = match session.next(&mut input) {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(violation) => return (seen, Some(violation)),
            };
            note(event, &mut seen, &mut open, &mut last);
            assert!(session.open() <= MAX_STREAMS);
        }
        assert!(input.is_empty(), "all is read");
    }
    (seen, None)
}

fn note(event: Event<'_>, seen: &mut Vec<Seen>, open: &mut BTreeSet<u32>, last: &mut u32) {
    match event {
        Event::Opened { stream, headers } => {
            assert!(stream % 2 == 1 && stream > *last, "{stream} after {last}");
            let size = headers.iter().map(|(name, value)| name.len() + value.len());
            assert!(size.sum::<usize>() <= MAX_BLOCK && headers.len() <= MAX_HEADERS);
            *last = stream;
            open.insert(stream);
            seen.push(Seen::Opened(stream, headers));
        }
        Event::Data { stream, bytes } => {
            assert!(open.contains(&stream) && !bytes.is_empty());
            match seen.last_mut() {
                Some(Seen::Data(same, data)) if *same == stream => data.extend(bytes),
                _ => seen.push(Seen::Data(stream, bytes.to_vec())),
            }
        }
        Event::Finished { stream } => {
            assert!(open.remove(&stream), "{stream} was open");
            seen.push(Seen::Finished(stream));
        }
        Event::Reset { stream } => {
            assert!(stream <= *last);
            open.remove(&stream);
            seen.push(Seen::Reset(stream));
        }
        Event::Refuse { stream, .. } => assert!(!open.contains(&stream) || stream <= *last),
        Event::Ping { .. } | Event::GoAway => seen.push(Seen::Other(format!("{event:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use flate2::{Compress, Compression, FlushCompress};
    use proptest::prelude::*;

    use super::{super::testing::Client, *};

    /// What `kubectl attach -i` sends.
    fn attach() -> Vec<u8> {
        let mut client = Client::new();
        let mut bytes = Vec::new();
        for (stream, kind) in [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "stderr")] {
            bytes.extend(client.open(stream, &[("streamtype", kind)]));
        }
        bytes.extend(Client::data(3, false, b"uname -a\n"));
        bytes.extend(Client::control(6, 0, &[0, 0, 0, 1]));
        bytes.extend(Client::data(3, true, b""));
        bytes
    }

    /// Bytes of `kubectl port-forward` for two connections.
    fn port_forward() -> Vec<u8> {
        let mut client = Client::new();
        let mut bytes = Vec::new();
        for (stream, kind, request) in [
            (1, "error", "0"),
            (3, "data", "0"),
            (5, "error", "1"),
            (7, "data", "1"),
        ] {
            bytes.extend(client.open(
                stream,
                &[("port", "8080"), ("requestid", request), ("streamtype", kind)],
            ));
            if kind == "error" {
                bytes.extend(Client::data(stream, true, b""));
            }
        }
        bytes.extend(Client::data(3, true, b"GET / HTTP/1.0\r\n\r\n"));
        bytes.extend(Client::data(7, false, &[7; 1000]));
        bytes.extend(Client::control(3, 0, &[0, 0, 0, 7, 0, 0, 0, 5]));
        bytes.extend(Client::control(7, 0, &[0; 8]));
        bytes
    }

    /// All kinds of frames, and streams that are opened the wrong way.
    fn kinds() -> Vec<u8> {
        let mut client = Client::new();
        let mut bytes = Vec::new();
        bytes.extend(Client::control(4, 0, &[0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 9]));
        bytes.extend(Client::control(9, 0, &[0, 0, 0, 1, 0, 0, 1, 0]));
        bytes.extend(Client::control(200, 0, b"?"));
        bytes.extend(client.open(5, &[("streamtype", "data")]));
        bytes.extend(client.open(3, &[("streamtype", "late")]));
        bytes.extend(client.open(4, &[("streamtype", "even")]));
        bytes.extend(client.with_flags(1, 9, 1, &[("streamtype", "ended")]));
        bytes.extend(client.with_flags(1, 11, 2, &[("streamtype", "one way")]));
        bytes.extend(client.with_flags(8, 5, 1, &[("more", "headers")]));
        bytes.extend(Client::data(5, true, b"after its end"));
        bytes.extend(Client::data(99, true, b"of no stream"));
        bytes.extend(Client::control(6, 0, &[0, 0, 0, 2]));
        bytes
    }

    fn bomb() -> Vec<u8> {
        let mut compress = Compress::new(Compression::best(), true);
        compress
            .set_dictionary(&super::super::dictionary::dictionary())
            .unwrap();
        let mut block = Vec::with_capacity(1 << 16);
        compress
            .compress_vec(&vec![0; 1 << 20], &mut block, FlushCompress::Sync)
            .unwrap();
        let payload = [&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0][..], &block].concat();
        Client::control(1, 0, &payload)
    }

    fn streams() -> Vec<u8> {
        let mut client = Client::new();
        let opened = (0..300).flat_map(|number| client.open(2 * number + 1, &[]));
        opened.collect()
    }

    fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        let long = [&[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff][..], &[0; 64]].concat();
        let cut = attach();
        let all = [
            ("attach", attach()),
            ("port_forward", port_forward()),
            ("kinds", kinds()),
            ("bomb", bomb()),
            ("streams", streams()),
            ("too_long", long),
            ("other_version", vec![0x80, 2, 0, 1, 0, 0, 0, 0]),
            ("reply", Client::control(2, 0, &[0, 0, 0, 1])),
            ("ping_of_3_bytes", Client::control(6, 0, &[0, 0, 1])),
            ("cut", cut[..cut.len() / 2].to_vec()),
        ];
        let sized = all
            .into_iter()
            .map(|(name, bytes)| (name, [&[7][..], &bytes].concat()));
        sized.collect()
    }

    #[test]
    fn seeds_do_no_harm() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/spdy_session");
        for (name, data) in seeds() {
            let path = folder.join(name);
            if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&path, &data).unwrap();
            }
            assert_eq!(fs::read(&path).unwrap(), data, "{}", path.display());
        }
        for entry in fs::read_dir(&folder).unwrap() {
            spdy_session(&fs::read(entry.unwrap().path()).unwrap());
        }
    }

    #[test]
    fn a_client_s_frames_are_events() {
        let (seen, violation) = events(&attach(), 3);
        assert_eq!(violation, None);
        let opened = |stream, kind: &str| {
            let headers = Headers::from([("streamtype".to_owned(), kind.to_owned())]);
            Seen::Opened(stream, headers)
        };
        let wanted = [
            opened(1, "error"),
            opened(3, "stdin"),
            opened(5, "stdout"),
            opened(7, "stderr"),
            Seen::Data(3, b"uname -a\n".to_vec()),
            Seen::Other("Ping { id: 1 }".to_owned()),
            Seen::Finished(3),
        ];
        assert_eq!(seen, wanted);
    }

    #[test]
    fn what_breaks_the_rules_ends_the_session() {
        for (name, wanted) in [
            ("bomb", Violation::TooManyHeaders),
            ("too_long", Violation::TooLong(0xff_ffff)),
            ("other_version", Violation::Version(2)),
            ("reply", Violation::Reply),
            ("ping_of_3_bytes", Violation::Length(6)),
        ] {
            let seed = seeds().into_iter().find(|(seed, _)| *seed == name).unwrap().1;
            assert_eq!(events(&seed[1..], usize::MAX).1, Some(wanted), "{name}");
        }
    }

    #[test]
    fn streams_out_of_turn_and_of_no_use_are_not_opened() {
        let (seen, violation) = events(&kinds(), usize::MAX);
        assert_eq!(violation, None);
        let opened = seen.iter().filter_map(|seen| match seen {
            Seen::Opened(stream, _) => Some(*stream),
            _ => None,
        });
        assert_eq!(opened.collect::<Vec<_>>(), [5, 9]);
        let (seen, _) = events(&streams(), usize::MAX);
        assert_eq!(seen.len(), MAX_STREAMS, "and no more");
    }

    fn changed() -> impl Strategy<Value = Vec<u8>> {
        let seeds = seeds().into_iter().map(|(_, seed)| seed).collect::<Vec<_>>();
        let value = prop_oneof![any::<u8>(), Just(0), Just(0xff), Just(0x80)];
        let changes = proptest::collection::vec((any::<usize>(), value), 0..8);
        let cut = proptest::option::weighted(0.2, any::<usize>());
        (proptest::sample::select(seeds), changes, cut).prop_map(|(mut data, changes, cut)| {
            for (place, value) in changes {
                let place = place % data.len();
                data[place] = value;
            }
            data.truncate(cut.map_or(data.len(), |cut| cut % data.len()));
            data
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_changes_make_a_session_do_harm(data in changed()) {
            spdy_session(&data);
        }

        #[test]
        fn no_bytes_make_a_session_do_harm(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            spdy_session(&data);
        }
    }
}
