//! Benchmarks: the same guest under our `vmm` and under QEMU in the same node, in turn, as ratios. They print a table
//! and never fail because of a figure.

mod daemon;
mod disk;
mod rings;
mod start;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::Node;

/// The benchmarks that can be run alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Start to init, and StartVm.
    Start,
    /// Requests to a disk.
    Disk,
    /// A disk's rings without a guest.
    Rings,
}

/// Runs every benchmark, or only one, and returns the report in Markdown.
pub fn run(node: &Node, runs: u32, only: Option<Part>) -> Result<String> {
    let wanted = |part: Part| only.is_none_or(|only| only == part);
    let mut report = String::new();
    if wanted(Part::Start) {
        report += &start::run(node, runs)?;
        report += &daemon::run(runs)?;
    }
    if wanted(Part::Disk) {
        report += &disk::run(node, runs)?;
    }
    if wanted(Part::Rings) {
        report += &rings::run()?;
    }
    Ok(report)
}

/// Writes `report` into the docs between the marks that are there for it.
pub fn publish(report: &str, page: &Path) -> Result<()> {
    const BEGIN: &str = "<!-- bench: begin -->\n";
    const END: &str = "<!-- bench: end -->\n";
    let text = std::fs::read_to_string(page).with_context(|| format!("read {}", page.display()))?;
    let parts = text
        .split_once(BEGIN)
        .and_then(|(head, rest)| Some((head, rest.split_once(END)?.1)));
    let (head, tail) = parts.with_context(|| format!("{} has no marks for the report", page.display()))?;
    std::fs::write(page, format!("{head}{BEGIN}{report}{END}{tail}")).context("write the report")
}

/// The page of the docs that holds the report.
pub fn page() -> PathBuf {
    crate::paths::workspace_dir().join("docs/src/benchmarks.md")
}

/// The median; of an even number the lower of the two in the middle. 0 of nothing.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values
        .get(values.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_value_in_the_middle() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!((median([4.0, 1.0, 3.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!(median([]).abs() < f64::EPSILON);
    }
}
