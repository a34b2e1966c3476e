//! The program `vmm`: one virtual machine.

mod control;
mod exit_code;
mod exit_record;

fn main() {}
