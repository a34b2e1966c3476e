//! Many small files, and many renames at once.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Operation on the file of each number, and its name.
type Step<'a> = (&'static str, &'a (dyn Fn(u32) -> io::Result<()> + Sync));

/// Files of one byte: made, looked up, removed, or only one of these, by so many threads at once. Prints the microseconds of each.
pub fn small(folder: &Path, count: u32, only: Option<&str>, threads: u32) -> io::Result<()> {
    let name = |number: u32| folder.join(format!("{}/{number}", number % 100));
    for number in 0..100 {
        fs::create_dir_all(folder.join(format!("{number}")))?;
    }
    let look_up = |number| match fs::metadata(name(number))?.len() {
        1 => Ok(()),
        _ => Err(io::Error::other("a file has another length")),
    };
    let steps: [Step<'_>; 3] = [
        ("create", &|number| fs::write(name(number), [1])),
        ("stat", &look_up),
        ("unlink", &|number| fs::remove_file(name(number))),
    ];
    let mut said = Vec::new();
    for (what, action) in steps {
        if only.is_some_and(|only| only != what) {
            continue;
        }
        let began = Instant::now();
        let share = |first: u32| (first..count).step_by(threads as usize).try_for_each(action);
        thread::scope(|scope| {
            let shares: Vec<_> = (0..threads)
                .map(|first| scope.spawn(move || share(first)))
                .collect();
            let mut ends = shares.into_iter().map(|share| share.join());
            ends.try_for_each(|end| end.unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))))
        })?;
        said.push(format!("{what} {}", began.elapsed().as_micros()));
    }
    writeln!(io::stdout(), "{}", said.join(" "))
}

/// Four threads rename a file each between two names in two folders, and four look for them: each file is under exactly one of its names, and whole.
pub fn storm(folder: &Path, seconds: u64) -> io::Result<()> {
    for name in ["one", "two"] {
        fs::create_dir_all(folder.join(name))?;
    }
    let over = AtomicBool::new(false);
    let (renames, looks, lost) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let names = |thread: u32| {
        (
            folder.join(format!("one/{thread}")),
            folder.join(format!("two/{thread}")),
        )
    };
    for thread in 0..4 {
        fs::write(names(thread).0, format!("{thread}"))?;
    }
    thread::scope(|scope| {
        for thread in 0..4 {
            let (over, renames, looks, lost, (a, b)) = (&over, &renames, &looks, &lost, names(thread));
            let (from, to) = (a.clone(), b.clone());
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let done = fs::rename(&from, &to).and_then(|()| fs::rename(&to, &from));
                    match done {
                        Ok(()) => renames.fetch_add(2, Ordering::Relaxed),
                        Err(_) => lost.fetch_add(1, Ordering::Relaxed),
                    };
                }
            });
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    for path in [&a, &b] {
                        if let Ok(content) = fs::read_to_string(path)
                            && content != format!("{thread}")
                        {
                            lost.fetch_add(1, Ordering::Relaxed);
                        }
                        looks.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        thread::sleep(Duration::from_secs(seconds));
        over.store(true, Ordering::Relaxed);
    });
    let left: usize = ["one", "two"]
        .into_iter()
        .map(|name| fs::read_dir(folder.join(name)).map_or(0, Iterator::count))
        .sum();
    writeln!(
        io::stdout(),
        "renames {} looks {} lost {} left {left}",
        renames.load(Ordering::Relaxed),
        looks.load(Ordering::Relaxed),
        lost.load(Ordering::Relaxed)
    )
}
