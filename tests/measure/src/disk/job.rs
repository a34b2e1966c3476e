//! The fio jobs.

/// A job that runs until it is ended.
pub struct Job {
    /// Name in the tables.
    pub name: &'static str,
    options: &'static str,
    block_kib: u64,
}

/// All of them.
pub const JOBS: [Job; 7] = [
    Job {
        name: "randread-qd1",
        options: "--rw=randread",
        block_kib: 4,
    },
    Job {
        name: "randwrite-qd1",
        options: "--rw=randwrite",
        block_kib: 4,
    },
    Job {
        name: "randread-qd32",
        options: "--rw=randread --iodepth=32",
        block_kib: 4,
    },
    Job {
        name: "randwrite-qd32",
        options: "--rw=randwrite --iodepth=32",
        block_kib: 4,
    },
    Job {
        name: "read-128k",
        options: "--rw=read --iodepth=4",
        block_kib: 128,
    },
    Job {
        name: "write-128k",
        options: "--rw=write --iodepth=4",
        block_kib: 128,
    },
    Job {
        name: "write-fsync",
        options: "--rw=randwrite --fsync=1",
        block_kib: 4,
    },
];

impl Job {
    /// Shell command for the guest; its output is in /tmp/fio.
    pub fn command(&self) -> String {
        format!(
            "fio --name=j --filename=/dev/vda --direct=1 --ioengine=io_uring --bs={}k --size=100% --time_based --runtime=1d \
             --randrepeat=1 --norandommap {} >/tmp/fio 2>&1",
            self.block_kib, self.options,
        )
    }

    /// How many requests have read and written that many bytes.
    pub fn requests(&self, bytes: u64) -> u64 {
        bytes.checked_div(self.block_kib * 1024).unwrap_or(0)
    }
}
