//! The program `vmm-image`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    vmm_image::main()
}
