//! The program `vmmd`.

fn main() -> anyhow::Result<()> {
    vmmd::program::main()
}
