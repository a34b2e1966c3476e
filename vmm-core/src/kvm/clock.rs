//! Processor time of a vCPU's thread, the guest's included.

/// Bits of the ID of a thread's processor-time clock (the kernel's linux/posix-timers_types.h): a
/// single thread (CPUCLOCK_PERTHREAD_MASK), and the scheduler's count (CPUCLOCK_SCHED).
const OF_THREAD: libc::clockid_t = 4 | 2;

/// The clock of one thread of this process, for others to read.
#[derive(Clone, Copy, Debug)]
pub struct ThreadClock {
    thread: libc::pid_t,
}

impl ThreadClock {
    /// The clock of the calling thread.
    pub fn of_this_thread() -> Self {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        Self { thread }
    }

    /// The thread's id.
    pub fn thread(&self) -> u32 {
        self.thread.unsigned_abs()
    }

    /// Nanoseconds so far; 0 when the thread has ended.
    pub fn read(&self) -> u64 {
        // MAKE_THREAD_CPUCLOCK of the same header.
        let clock = (!self.thread) << 3 | OF_THREAD;
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: writes one timespec through the pointer; a clock that is not there gives an error.
        if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
            return 0;
        }
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or(0);
        seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_thread_sees_what_a_thread_has_used() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let clock = ThreadClock::of_this_thread();
            let before = clock.read();
            let mut sum = 0_u64;
            while clock.read() < before + 1_000_000 {
                sum = std::hint::black_box(sum.wrapping_add(1));
            }
            sender.send(clock).unwrap();
            let _ = ended.recv();
        });
        let clock = receiver.recv().unwrap();
        assert!(clock.read() >= 1_000_000);
        assert_ne!(clock.thread(), ThreadClock::of_this_thread().thread());
        drop(end);
        thread.join().unwrap();
        assert_eq!(clock.read(), 0);
    }
}
