//! Imports of images beside `qemu-img convert`, and disks of one: a benchmark of the crate `vmmd`, which runs on this machine.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{
    fleet::Call,
    native, program,
    table::{Row, render},
};

#[derive(Deserialize)]
struct Report {
    mib: u32,
    imports: Vec<Import>,
    clones: Clones,
}

/// Of one file: the number of the turn, seconds, and seconds of CPU time.
#[derive(Deserialize)]
struct Import {
    file: String,
    file_bytes: f64,
    vmmd: Vec<(u32, f64, f64)>,
    qemu: Vec<(u32, f64, f64)>,
    qemu_durable: Vec<(u32, f64, f64)>,
}

#[derive(Deserialize)]
struct Clones {
    image_bytes: f64,
    overlays: u32,
    overlays_bytes: f64,
    copies: u32,
    copies_bytes: f64,
    ours: [Call; 2],
    theirs: [Call; 2],
}

/// Runs it, building it and the converter first, and renders.
pub fn run(runs: u32) -> Result<String> {
    let program = program("vmm-image", "vmm-image")?;
    let program = program.to_str().context("the target folder's name is no text")?;
    let report = native(
        "vmmd",
        "image",
        &["--", "--vmm-image", program, "--turns", &runs.to_string()],
    )?;
    Ok(render_all(&report))
}

fn render_all(report: &Report) -> String {
    let Report { mib, clones, .. } = report;
    let mut text = format!(
        "### Images\n\nA disk of {mib} MiB, every other 4 MiB of it data, in files of several formats on the machine that runs the node; each \
         becomes a raw image. vmmd's figures are those of the whole import of a file, from the call to its answer, with the SHA-256 of the \
         content and the image on stable storage; CPU time is the daemon's and its converter's. `qemu-img convert` makes no digest, and leaves the \
         image in the page cache; *durable* is `-t writeback`, which brings it to stable storage too. The \
         files are in the page cache. In turn; medians, and the median of each turn's ratio with the quartiles.\n\n"
    );
    let names = ["vmmd", "qemu-img", "durable"];
    let table = |value: &dyn Fn(&(u32, f64, f64)) -> f64| {
        let rows = report.imports.iter().map(|import| {
            let of = |turns: &[(u32, f64, f64)]| turns.iter().map(|turn| (turn.0, value(turn))).collect();
            let turns: [Vec<(u32, f64)>; 3] = [of(&import.vmmd), of(&import.qemu), of(&import.qemu_durable)];
            let name = format!(
                "{}, {:.0} MiB",
                import.file,
                import.file_bytes / f64::from(1 << 20)
            );
            Row::of_turns(name, &turns)
        });
        render(&names, &rows.collect::<Vec<_>>())
    };
    text += &format!(
        "Time in seconds:\n\n{}\nCPU time in seconds:\n\n{}\n",
        table(&|turn| turn.1),
        table(&|turn| turn.2)
    );
    let each = |bytes: f64, count: u32| bytes / f64::from(count.max(1)) / 1024.0;
    text += &format!(
        "Disks of that image, which takes {:.0} MiB. `qemu-img create` and `cp --reflink=auto` bring nothing to stable storage, and note nothing.\n\n\
         | disk | disks | p50, ms | p99, ms | the other's p50, ms | room for each, KiB |\n|---|---:|---:|---:|---:|---:|\n",
        clones.image_bytes / f64::from(1 << 20)
    );
    for (name, count, ours, theirs, bytes) in [
        (
            "overlay, beside `qemu-img create`",
            clones.overlays,
            &clones.ours[0],
            &clones.theirs[0],
            clones.overlays_bytes,
        ),
        (
            "copy, beside `cp`",
            clones.copies,
            &clones.ours[1],
            &clones.theirs[1],
            clones.copies_bytes,
        ),
    ] {
        text += &format!(
            "| {name} | {count} | {:.2} | {:.2} | {:.2} | {:.0} |\n",
            ours.p50_ms,
            ours.p99_ms,
            theirs.p50_ms,
            each(bytes, count)
        );
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imports_stand_beside_qemus_and_disks_with_their_room() {
        let line = r#"{"benchmark":"image","mib":2048,"imports":[{"file":"qcow2","file_bytes":1073741824,
            "vmmd":[[0,1.0,2.0],[1,3.0,2.0]],"qemu":[[0,2.0,1.0],[1,4.0,1.0]],"qemu_durable":[[0,4.0,1.0],[1,6.0,1.0]]}],
            "clones":{"image_bytes":1073741824,"before_bytes":1073800000,"overlays":50,"overlays_bytes":13107200,"copies":2,"copies_bytes":2147483648,
            "ours":[{"call":"overlay","count":50,"p50_ms":5,"p99_ms":9},{"call":"copy","count":2,"p50_ms":900,"p99_ms":1000}],
            "theirs":[{"call":"qemu-img create","count":50,"p50_ms":7,"p99_ms":9},{"call":"cp","count":2,"p50_ms":800,"p99_ms":900}]}}"#;
        let text = render_all(&serde_json::from_str(line).expect("figures"));
        for row in [
            "| qcow2, 1024 MiB | 2.00 | 3.00 | 5.00 | 0.62 (0.56–0.69) | 0.38 (0.31–0.44) |",
            "| qcow2, 1024 MiB | 2.00 | 1.00 | 1.00 | 2.00 (2.00–2.00) | 2.00 (2.00–2.00) |",
            "Disks of that image, which takes 1024 MiB.",
            "| overlay, beside `qemu-img create` | 50 | 5.00 | 9.00 | 7.00 | 256 |",
            "| copy, beside `cp` | 2 | 900.00 | 1000.00 | 800.00 | 1048576 |",
        ] {
            assert!(text.contains(row), "no {row:?} in {text}");
        }
    }
}
