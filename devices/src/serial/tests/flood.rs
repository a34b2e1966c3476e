//! A guest that prints without end.

use std::{fs, io::Read, os::unix::net::UnixStream, thread, time::Instant};

use super::{
    super::{
        log::{DEFAULT_LIMIT, Log},
        server::COALESCE,
    },
    server::Rig,
    *,
};

/// The last that is printed; everything before is dots.
const END: &str = "the end";

/// Returns the number of dots that a reader received, and the number of bytes reported as lost.
/// Reads up to [`END`].
fn follow(mut client: UnixStream) -> (usize, usize) {
    let (mut chunk, mut dots, mut rest) = (vec![0; 64 << 10], 0, String::new());
    while !rest.ends_with(END) {
        let count = client.read(&mut chunk).unwrap();
        assert!(count > 0, "the connection ended after {dots} dots and {rest:?}");
        let others = chunk[..count].iter().filter(|byte| **byte != b'.');
        let before = rest.len();
        rest.extend(others.map(|byte| char::from(*byte)));
        dots += count - (rest.len() - before);
    }
    let lost = rest
        .split(" bytes of output lost]")
        .filter_map(|part| part.rsplit('[').next()?.parse::<usize>().ok())
        .sum();
    (dots, lost)
}

/// A guest that prints all the time wakes the thread, and readers, each four milliseconds and not with each byte: however fast they read.
#[test]
fn readers_that_keep_up_are_written_to_once_in_a_while() {
    let rig = Rig::with(Capacity::default(), None);
    let readers = (0..5).map(|_| {
        let (mut client, _) = rig.attach();
        thread::spawn(move || {
            let (mut chunk, mut reads, mut last) = (vec![0; 64 << 10], 0, 0);
            while last != b'\n' {
                let count = client.read(&mut chunk).unwrap();
                assert!(count > 0, "the connection ended after {reads} reads");
                last = chunk[count - 1];
                reads += 1;
            }
            reads
        })
    });
    let readers: Vec<_> = readers.collect();
    let began = Instant::now();
    let mut printed = 0_u64;
    while began.elapsed() < COALESCE * 50 {
        print(&rig.uart, b".");
        printed += 1;
    }
    print(&rig.uart, b"\n");
    let reads = readers.into_iter().map(|reader| reader.join().unwrap());
    let reads: Vec<u64> = reads.collect();
    // One write may arrive in two reads.
    let rounds = u64::try_from(began.elapsed().as_millis() / COALESCE.as_millis()).unwrap() + 2;
    let chunks = printed.div_ceil(16 << 10);
    let most = 2 * (rounds + chunks);
    assert!(
        reads.iter().all(|reads| *reads <= most),
        "{reads:?} of {most}, {printed} bytes"
    );
}

/// Memory of this process that is in no file, in bytes.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<usize>().unwrap() << 10
}

#[test]
fn a_flood_that_five_of_ten_readers_never_read_is_taken_whole_and_memory_and_log_are_bounded() {
    let long = std::env::var_os("VMMD_LONG").is_some();
    let flood = if long { 1 << 30 } else { 16 << 20 };
    let [current, older] = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
    let log = Log::new(
        current.reopen().unwrap(),
        Some(older.reopen().unwrap()),
        DEFAULT_LIMIT,
    );
    let rig = Rig::with(Capacity::default(), Some(log.unwrap()));
    let silent: Vec<_> = (0..5).map(|_| rig.attach().0).collect();
    let lively: Vec<_> = (0..5).map(|_| rig.attach().0).collect();
    let lively = lively
        .into_iter()
        .map(|client| thread::spawn(move || follow(client)));
    let lively: Vec<_> = lively.collect();
    let before = resident();
    let chunk = [b'.'; 4096];
    // The guest's writes wait for no reader: the end arrives although half of the readers take no
    // data.
    for _ in 0..flood / chunk.len() {
        print(&rig.uart, &chunk);
    }
    print(&rig.uart, END.as_bytes());
    for reader in lively {
        let (dots, lost) = reader.join().unwrap();
        assert_eq!(dots + lost, flood);
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 12 << 20, "{grown} bytes more");
    for client in silent {
        let (dots, lost) = follow(client);
        assert_eq!(dots + lost, flood);
        assert!(lost > flood / 2, "{lost}");
    }
    drop(rig);
    let lengths = [&current, &older].map(|file| file.path().metadata().unwrap().len());
    assert!(
        lengths[0] <= DEFAULT_LIMIT && lengths[1] == DEFAULT_LIMIT,
        "{lengths:?}"
    );
    let text = fs::read_to_string(current.path()).unwrap();
    assert!(text.ends_with(END), "the log has the end");
}
