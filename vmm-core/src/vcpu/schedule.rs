//! What the scheduler has given to a thread, and kept from it (/proc/PID/task/TID/schedstat; the kernel's
//! Documentation/scheduler/sched-stats.rst).

use std::{fs::File, io, os::unix::fs::FileExt};

/// Since the thread began, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// Processor time, in the guest and in the host.
    pub running_ns: u64,
    /// Time for which it could have run and the host ran something else.
    pub waiting_ns: u64,
}

/// The figures of one thread, for others to read.
#[derive(Debug)]
pub struct Schedule(File);

impl Schedule {
    /// Of the thread that calls this.
    pub fn of_this_thread() -> io::Result<Self> {
        File::open("/proc/thread-self/schedstat").map(Self)
    }

    /// As they are now.
    pub fn read(&self) -> io::Result<ThreadTimes> {
        // Three numbers of at most 20 digits.
        let mut buffer = [0; 80];
        let length = self.0.read_at(&mut buffer, 0)?;
        let text = buffer.get(..length).unwrap_or_default();
        parse(&String::from_utf8_lossy(text)).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

fn parse(text: &str) -> Option<ThreadTimes> {
    let mut numbers = text.split_ascii_whitespace().map(|number| number.parse().ok());
    Some(ThreadTimes {
        running_ns: numbers.next()??,
        waiting_ns: numbers.next()??,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_two_numbers_are_running_and_waiting() {
        let times = |running_ns, waiting_ns| {
            Some(ThreadTimes {
                running_ns,
                waiting_ns,
            })
        };
        assert_eq!(parse("123 45 6\n"), times(123, 45));
        assert_eq!((parse(""), parse("1"), parse("a b c")), (None, None, None));
    }

    #[test]
    fn another_thread_sees_what_a_thread_has_used() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let schedule = Schedule::of_this_thread().unwrap();
            let before = schedule.read().unwrap();
            let mut sum = 0_u64;
            while schedule.read().unwrap().running_ns < before.running_ns + 1_000_000 {
                sum = std::hint::black_box(sum.wrapping_add(1));
            }
            sender.send(schedule).unwrap();
            let _ = ended.recv();
        });
        let schedule = receiver.recv().unwrap();
        assert!(schedule.read().unwrap().running_ns >= 1_000_000);
        drop(end);
        thread.join().unwrap();
    }
}
