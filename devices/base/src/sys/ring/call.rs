//! Operations of a ring.

use io_uring::{opcode, squeue, types};

use super::Iovecs;

/// The file's place among the registered ones.
const FILE: types::Fixed = types::Fixed(0);

/// Operation of the kernel on the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// preadv at this byte.
    Read(u64),
    /// pwritev2 at this byte.
    Write {
        /// In bytes.
        offset: u64,
        /// With RWF_DSYNC.
        stable: bool,
    },
    /// fdatasync.
    Sync,
    /// fallocate.
    Allocate {
        /// FALLOC_FL_*.
        mode: i32,
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u64,
    },
}

/// The operations of the entries that [`build`] makes.
pub(super) const OPCODES: [u8; 6] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];

/// The entry that makes a call on the file and `buffers`. It points to these.
pub(super) fn build(call: Call, buffers: &Iovecs) -> squeue::Entry {
    match call {
        Call::Read(offset) => match buffers.only() {
            Some((base, length)) => opcode::Read::new(FILE, base, length).offset(offset).build(),
            None => {
                let (entries, count) = buffers.window();
                opcode::Readv::new(FILE, entries, count).offset(offset).build()
            }
        },
        Call::Write { offset, stable } => {
            let flags = if stable { libc::RWF_DSYNC } else { 0 };
            match buffers.only() {
                Some((base, length)) => opcode::Write::new(FILE, base, length)
                    .offset(offset)
                    .rw_flags(flags)
                    .build(),
                None => {
                    let (entries, count) = buffers.window();
                    opcode::Writev::new(FILE, entries, count)
                        .offset(offset)
                        .rw_flags(flags)
                        .build()
                }
            }
        }
        Call::Sync if cfg!(feature = "mutation-flush") => {
            opcode::Read::new(FILE, std::ptr::null_mut(), 0).build()
        }
        Call::Sync => opcode::Fsync::new(FILE)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        Call::Allocate { mode, offset, length } => opcode::Fallocate::new(FILE, length)
            .offset(offset)
            .mode(mode)
            .build(),
    }
}
