//! The node below vmmd: system calls, processes, cgroups, capacity, the ledger of resources, allowed paths, threads for
//! blocking work, and the error type of all crates of the daemon.
//!
//! This crate never knows a VM's record, a store or a client. It may be called from any other crate of the daemon.
//!
//! A reader starts at [`failure`] (each fallible call returns a [`failure::Failure`] or an `io::Error`) and [`capacity`]
//! (what a VM takes and whether it fits).

pub mod capacity;
pub mod cgroup;
pub mod clock;
pub mod dirs;
pub mod failure;
pub mod fault;
pub mod finish;
pub mod folder_watch;
pub mod image_process;
pub mod ledger;
pub mod lock;
pub mod paced;
pub mod pool;
pub mod process;
pub mod roots;
pub mod socket;
pub mod sys;
pub mod text;
