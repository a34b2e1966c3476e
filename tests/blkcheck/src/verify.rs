//! Checking an image against a plan.

use std::collections::HashMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::plan::{self, MOST_THREADS, SECTOR};
use crate::write;

/// How many operations after the last ones that were seen as confirmed the threads together may have done: confirmations that were
/// on their way when the machine was killed, and operations not yet flushed.
const AHEAD: usize = 16_384;
/// How many wrong sectors are shown.
const SHOWN: usize = 8;

/// Permitted contents of the sectors.
struct Expected {
    /// Contents after the last confirmed operation, or from before the round.
    confirmed: Vec<u64>,
    /// Contents that unconfirmed operations may have left.
    possible: HashMap<u64, Vec<u64>>,
    /// Confirmed operations.
    operations: u64,
}

/// Reads the image and fails with the sectors that are not as they must be.
pub fn run(image: &Path, state: &Path, round: u32, confirmed: &[u64]) -> Result<()> {
    ensure!(
        (1..=MOST_THREADS).contains(&(confirmed.len() as u64)),
        "a count is needed for each thread"
    );
    let (mut file, sectors) = write::open(image, false)?;
    let expected = expected(read_state(state, sectors)?, round, confirmed, sectors);
    std::io::Seek::rewind(&mut file)?;
    let mut buffer = write::Aligned::new(256 * SECTOR);
    let (mut found, mut wrong, mut later) = (Vec::new(), Vec::new(), 0);
    while (found.len() as u64) < sectors {
        let left = usize::try_from(sectors)? - found.len();
        let bytes = buffer.part(left.min(256) * SECTOR);
        file.read_exact(bytes).context("read the image")?;
        for bytes in bytes.chunks_exact(SECTOR) {
            let sector = found.len() as u64;
            let id = plan::identify(bytes, sector);
            let wanted = expected.confirmed[found.len()];
            if id != Some(wanted) {
                let possible = expected.possible.get(&sector).map_or(&[][..], Vec::as_slice);
                match id {
                    Some(id) if possible.contains(&id) => later += 1,
                    _ => wrong.push((sector, wanted, id)),
                }
            }
            found.push(id.unwrap_or_default());
        }
    }
    if !wrong.is_empty() {
        report(&wrong, round, confirmed)?;
    }
    let bytes: Vec<u8> = found.iter().flat_map(|id| id.to_le_bytes()).collect();
    fs::write(state, bytes).context("write the state")?;
    println!(
        "BLKCHECK OK: {} confirmed operations are there; {later} sectors hold what was not confirmed",
        expected.operations
    );
    Ok(())
}

fn expected(before: Vec<u64>, round: u32, confirmed: &[u64], sectors: u64) -> Expected {
    let mut expected = Expected {
        confirmed: before,
        possible: HashMap::new(),
        operations: confirmed.iter().sum(),
    };
    let threads = confirmed.len() as u64;
    for (thread, &count) in (0..).zip(confirmed) {
        let mut operations = plan::operations(round, thread, threads, sectors);
        for operation in operations
            .by_ref()
            .take(usize::try_from(count).unwrap_or(usize::MAX))
        {
            for sector in operation.start..operation.start + operation.count {
                expected.confirmed[usize::try_from(sector).unwrap_or(usize::MAX)] = operation.content();
            }
        }
        for operation in operations.take(AHEAD / confirmed.len()) {
            for sector in operation.start..operation.start + operation.count {
                expected
                    .possible
                    .entry(sector)
                    .or_default()
                    .push(operation.content());
            }
        }
    }
    expected
}

fn read_state(state: &Path, sectors: u64) -> Result<Vec<u64>> {
    let bytes = match fs::read(state) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![0; usize::try_from(sectors)?]),
        bytes => bytes.context("read the state")?,
    };
    ensure!(
        bytes.len() as u64 == sectors * 8,
        "the state is of a disk of another size"
    );
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or_default();
    Ok(bytes.chunks_exact(8).map(word).collect())
}

fn report(wrong: &[(u64, u64, Option<u64>)], round: u32, confirmed: &[u64]) -> Result<()> {
    let name = |id: u64| match id {
        0 => "zeroes".to_owned(),
        id => format!(
            "round {} thread {} operation {}",
            id >> 40,
            id >> 32 & 0xff,
            id & 0xffff_ffff
        ),
    };
    let mut text = String::new();
    for (sector, wanted, found) in wrong.iter().take(SHOWN) {
        text += &format!("\n  sector {sector}: {} wanted, ", name(*wanted));
        text += &found.map_or("damaged content found".to_owned(), |id| {
            format!("{} found", name(id))
        });
    }
    bail!(
        "{} sectors are wrong after round {round} with {confirmed:?} confirmed:{text}",
        wrong.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    const BYTES: u64 = 8 << 20;

    /// An image after `operations` operations of each thread, and a state file that is not there yet.
    fn written(operations: u64) -> (std::path::PathBuf, std::path::PathBuf) {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let folder = std::env::temp_dir().join(format!(
            "blkcheck-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        fs::create_dir_all(&folder).expect("folder");
        let image = folder.join("image");
        fs::File::create(&image)
            .expect("image")
            .set_len(BYTES)
            .expect("size");
        crate::write::run(&image, 1, "c", 4, Some(operations)).expect("write");
        (image, folder.join("state"))
    }

    #[test]
    fn written_data_is_found_and_unconfirmed_data_is_allowed() {
        let (image, state) = written(40);
        run(&image, &state, 1, &[40; 4]).expect("all is there");
        fs::remove_file(&state).expect("state");
        run(&image, &state, 1, &[10, 20, 30, 40]).expect("more is there");
        // The next round starts from the saved contents.
        run(&image, &state, 2, &[0; 4]).expect("nothing changed");
        fs::remove_dir_all(image.parent().expect("folder")).expect("remove");
    }

    #[test]
    fn a_lost_write_and_a_damaged_sector_are_found() {
        let (image, state) = written(40);
        // The test needs the next operation that writes: a lost zeroing of zeroes has no effect.
        let next = plan::operations(1, 0, 4, BYTES / SECTOR as u64).enumerate();
        let writes = |operation: &plan::Operation| operation.kind == plan::Kind::Write;
        let next = next
            .skip(40)
            .find(|(_, operation)| writes(operation))
            .expect("endless")
            .0 as u64
            + 1;
        let error = run(&image, &state, 1, &[next, 40, 40, 40]).expect_err("one was never done");
        assert!(
            error
                .to_string()
                .contains(&format!("thread 0 operation {next} wanted")),
            "{error}"
        );
        let file = fs::File::options().write(true).open(&image).expect("open");
        file.write_all_at(&[1], BYTES - 1).expect("damage");
        let error = run(&image, &state, 1, &[40; 4]).expect_err("damage");
        assert!(
            error.to_string().contains("sector 16383: zeroes wanted, damaged"),
            "{error}"
        );
        fs::remove_dir_all(image.parent().expect("folder")).expect("remove");
    }
}
