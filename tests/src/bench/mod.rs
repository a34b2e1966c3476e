//! Benchmarks: the same guest under our `vmm` and under QEMU in the same node, in turn, as ratios; and what needs no guest,
//! on this machine. They print tables and never fail because of a figure.

mod daemon;
mod disk;
mod ends;
mod fleet;
mod fs;
mod image;
mod memory;
mod migrate;
mod net;
mod networks;
mod rings;
mod screen;
mod start;
mod table;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, de::DeserializeOwned};

use crate::initramfs::Extra;
use crate::node::Kernel;
use crate::wait::Deadline;
use crate::{Node, paths, programs, run};

/// The benchmarks that can be run alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Start to init, and StartVm. In the node.
    Start,
    /// Guest RAM by its backing, and other memory of a `vmm`. In the node, and a part on this
    /// machine.
    Memory,
    /// Requests to a disk. In the node.
    Disk,
    /// Operations on a share. In the node.
    Fs,
    /// Live migration and snapshots. In the node.
    Migrate,
    /// Packets. In the node.
    Net,
    /// A screen that somebody looks at. In the node.
    Screen,
    /// Delay of reports about the end of a run. In the node.
    Ends,
    /// A disk's rings without a guest. On this machine.
    Rings,
    /// The daemon with many VMs, and with many networks. On this machine.
    Daemon,
    /// Imports of images, and disks of one. On this machine.
    Image,
}

impl Part {
    /// Runs it and returns its report in Markdown.
    pub fn run(self, runs: u32) -> Result<String> {
        match self {
            Part::Start => Ok(start::run(&Node::get()?, runs)? + &daemon::run(runs)?),
            Part::Memory => memory::run(&Node::get()?, runs),
            Part::Disk => disk::run(&Node::get()?, runs),
            Part::Fs => fs::run(&Node::get()?, runs),
            Part::Migrate => migrate::run(runs),
            Part::Net => net::run(&Node::get()?, runs),
            Part::Screen => screen::run(&Node::get()?, runs),
            Part::Ends => ends::run(runs),
            Part::Rings => rings::run(),
            Part::Daemon => Ok(fleet::run()? + &networks::run()?),
            Part::Image => image::run(runs),
        }
    }

    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Writes a part's report into `page` between the marks that are there for it.
pub fn publish(part: Part, report: &str, page: &Path) -> Result<()> {
    let text = std::fs::read_to_string(page).with_context(|| format!("read {}", page.display()))?;
    let text = published(part, report, &text).with_context(|| {
        let name = part.name();
        format!("{} has no marks for the report of {name}", page.display())
    })?;
    std::fs::write(page, text).context("write the report")
}

fn published(part: Part, report: &str, page: &str) -> Option<String> {
    let begin = format!("<!-- {}: begin -->\n", part.name());
    let end = format!("<!-- {}: end -->\n", part.name());
    let (head, rest) = page.split_once(&begin)?;
    let (_, tail) = rest.split_once(&end)?;
    Some(format!("{head}{begin}{report}{end}{tail}"))
}

/// Output of `measure` for a subject in a turn.
#[derive(Deserialize)]
struct Line<C> {
    vmm: String,
    /// Counts turns in all boots.
    run: u32,
    #[serde(default = "Vec::new")]
    result: Vec<C>,
    /// The job in which the guest did nothing any more.
    stood_still: Option<String>,
}

/// The cost of one of the jobs of `measure`.
trait Cost {
    fn job(&self) -> &str;
}

/// A figure of a job in each turn of the subject `vmm`, with the number of the turn. Costs without that figure are left out.
fn turns<C: Cost>(
    lines: &[Line<C>],
    vmm: &str,
    job: &str,
    figure: impl Fn(&C) -> Option<f64>,
) -> Vec<(u32, f64)> {
    let lines = lines.iter().filter(|line| line.vmm == vmm);
    let costs = lines.flat_map(|line| line.result.iter().map(move |cost| (line.run, cost)));
    costs
        .filter(|(_, cost)| cost.job() == job)
        .filter_map(|(run, cost)| Some((run, figure(cost)?)))
        .collect()
}

/// Arguments of `measure` for our `vmm` and a guest with a kernel. The guest's initramfs, which `initrd` builds with an extra file, has
/// `measure` itself.
fn with_measure(
    node: &Node,
    kernel: Kernel,
    initrd: impl Fn(Kernel, &[Extra]) -> Result<PathBuf>,
) -> Result<String> {
    let measure = programs::build_static("vmmd-measure", "measure")?;
    let initrd = initrd(kernel, &[Extra::new(measure, "bin/measure")])?;
    node.copy_in(&initrd, "/root/measure.initrd")?;
    Ok(format!(
        "--kernel {} --initrd /root/measure.initrd --vmm /usr/lib/vmmd/vmm",
        node.guests().vmlinuz(kernel)
    ))
}

/// Runs `measure` in the node, and reads the JSON objects that it prints, one a line.
fn measured<T: DeserializeOwned>(node: &Node, arguments: &str, deadline: Deadline) -> Result<Vec<T>> {
    let measure = programs::build_static("vmmd-measure", "measure")?;
    node.copy_in(&measure, "/root/measure")?;
    let output = node.ssh_within(&format!("/root/measure {arguments}"), deadline)?;
    ensure!(
        output.success(),
        "measure in the node: {}{}",
        output.stdout,
        output.stderr
    );
    let lines = output.stdout.lines().map(serde_json::from_str);
    lines
        .collect::<Result<_, _>>()
        .context("read what measure printed")
}

/// Runs a benchmark of one of our crates on this machine, building it first, and returns the figures that it prints.
fn native<T: DeserializeOwned>(package: &str, name: &str, arguments: &[&str]) -> Result<T> {
    let bench = ["bench", "-q", "--locked", "-p", package, "--bench", name];
    let text = cargo(&[&bench, arguments].concat(), Deadline::seconds(1800))?;
    let line = text.lines().find(|line| line.contains(&format!("\"{name}\"")));
    let line = line.context("the benchmark printed no figures")?;
    serde_json::from_str(line).context("read the benchmark's figures")
}

/// Builds a program of another package than that of the benchmark, with optimization, and returns its path. Cargo builds the programs of
/// a benchmark's own package only.
fn program(package: &str, name: &str) -> Result<PathBuf> {
    let build = [
        "build",
        "-q",
        "--release",
        "--locked",
        "-p",
        package,
        "--bin",
        name,
    ];
    cargo(&build, Deadline::seconds(1800)).with_context(|| format!("build {name}"))?;
    let path = paths::target_dir().join("release").join(name);
    path.canonicalize()
        .with_context(|| format!("find {}", path.display()))
}

/// Runs cargo with these arguments and returns its output.
fn cargo(arguments: &[&str], deadline: Deadline) -> Result<String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(arguments)
        // The daemon's log level in production.
        .env("RUST_LOG", "info")
        .current_dir(paths::workspace_dir());
    run::check(&mut command, deadline)
}

/// The page of the docs that holds the report.
pub fn page() -> PathBuf {
    paths::workspace_dir().join("docs/src/benchmarks.md")
}

/// Returns the median; for an even number of values, the mean of the two middle ones; for no
/// values, 0.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    quantile(&values, 0.5)
}

/// Returns the quantile `part` (0 to 1), interpolated between two values. Returns 0 for no values.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a place in a list"
)]
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = part * sorted.len().saturating_sub(1) as f64;
    let below = place as usize;
    let at = |index: usize| sorted.get(index).copied().unwrap_or(0.0);
    let above = at((below + 1).min(sorted.len().saturating_sub(1)));
    at(below) + (above - at(below)) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::{Part, median, published, quantile};

    #[test]
    fn the_median_is_the_value_in_the_middle() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!((median([4.0, 1.0, 3.0, 2.0]) - 2.5).abs() < f64::EPSILON);
        assert!(median([]).abs() < f64::EPSILON);
    }

    #[test]
    fn a_quarter_lies_below_the_first_quartile() {
        for (part, value) in [
            (0.0, 1.0),
            (0.25, 2.0),
            (0.5, 3.0),
            (0.75, 4.0),
            (1.0, 5.0),
            (0.6, 3.4),
        ] {
            let found = quantile(&[5.0, 1.0, 4.0, 2.0, 3.0], part);
            assert!((found - value).abs() < 1e-9, "{part}: {found}");
        }
        assert!((quantile(&[7.0], 0.25) - 7.0).abs() < f64::EPSILON);
    }

    #[test]
    fn a_report_replaces_the_one_of_the_same_part_only() {
        let page = "a\n<!-- start: begin -->\nold\n<!-- start: end -->\nb\n<!-- daemon: begin -->\n<!-- daemon: end -->\n";
        let once = published(Part::Start, "new\n", page).expect("marks");
        assert_eq!(
            published(Part::Daemon, "too\n", &once).expect("marks"),
            "a\n<!-- start: begin -->\nnew\n<!-- start: end -->\nb\n<!-- daemon: begin -->\ntoo\n<!-- daemon: end -->\n"
        );
        assert_eq!(published(Part::Disk, "x", page), None);
    }

    #[test]
    fn the_page_has_marks_for_each_part() {
        use clap::ValueEnum;
        let page = std::fs::read_to_string(super::page()).expect("the page");
        for part in Part::value_variants() {
            assert!(published(*part, "", &page).is_some(), "{part:?}");
        }
    }
}
