//! Screen contents in a guest: a text console that scrolls, and a screen that changes completely.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// From one line to the next.
const LINE_EVERY: Duration = Duration::from_millis(50);
/// From one picture to the next.
const PICTURE_EVERY: Duration = Duration::from_millis(250);
/// Pictures that take turns.
const PICTURES: u32 = 4;

/// Endless screen content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum What {
    /// Lines on the text console.
    Text,
    /// Pictures that fill the screen.
    Pictures,
}

/// Shows it until the process is ended.
pub fn run(what: What) -> Result<()> {
    match what {
        What::Text => text(),
        What::Pictures => pictures(),
    }
}

/// Writes so many lines of 80 letters, each by one write, and waits until they are printed.
pub fn lines(device: &str, count: u32) -> Result<()> {
    let mut console = File::options()
        .write(true)
        .open(device)
        .with_context(|| format!("open {device}"))?;
    let line = format!("{:0>79}\n", 0);
    for _ in 0..count {
        console.write_all(line.as_bytes()).context("print a line")?;
    }
    rustix::termios::tcdrain(&console).context("wait for what is printed")
}

fn text() -> Result<()> {
    let mut console = File::options()
        .write(true)
        .open("/dev/tty1")
        .context("open the text console")?;
    // Without a cursor, which would blink.
    console.write_all(b"\x1b[?25l\x1b[2J")?;
    let mut random = Random(1);
    each(LINE_EVERY, |number| {
        let words: Vec<String> = (0..12).map(|_| format!("{:x}", random.next() >> 8)).collect();
        writeln!(console, "[{number:>9}] {}", words.join(" "))?;
        Ok(())
    })
}

fn pictures() -> Result<()> {
    let size =
        fs::read_to_string("/sys/class/graphics/fb0/virtual_size").context("look how large the screen is")?;
    let (width, height) = size.trim().split_once(',').context("a size")?;
    let (width, height): (u32, u32) = (width.parse()?, height.parse()?);
    let screen = File::options()
        .write(true)
        .open("/dev/fb0")
        .context("open the screen")?;
    let pictures: Vec<Vec<u8>> = (0..PICTURES)
        .map(|number| picture(width, height, number))
        .collect();
    ensure!(!pictures.is_empty(), "no picture");
    each(PICTURE_EVERY, |number| {
        let picture = pictures.get(number % pictures.len()).context("a picture")?;
        screen.write_all_at(picture, 0).context("draw")
    })
}

/// Does something again and again, at times that do not depend on how long it takes.
fn each(every: Duration, mut act: impl FnMut(usize) -> Result<()>) -> Result<()> {
    let mut next = Instant::now();
    for number in 0.. {
        act(number)?;
        next += every;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// The left half is like a photograph: all colours, no two neighbours alike. The right half is like windows: two colours in each field of 64 × 16, and
/// marks of the size of letters in it. Pixels are 32 bits, blue first.
fn picture(width: u32, height: u32, number: u32) -> Vec<u8> {
    let mut random = Random(u64::from(number) + 1);
    let mut picture = Vec::new();
    for y in 0..height {
        let row = Random(u64::from(number * 1000 + y / 16) + 7).next();
        for x in 0..width {
            let pixel = if x < width / 2 {
                let noise = random.next() & 7;
                let (red, green, blue) = (x + number * 31, y + number * 17, (x + y) / 2 + number * 7);
                [blue, green, red]
                    .map(|colour| u8::try_from((u64::from(colour / 4) + noise) & 0xff).unwrap_or(0))
            } else {
                let field = row ^ u64::from(x / 64).wrapping_mul(0x9e37_79b9);
                let is_mark = y % 16 > 3 && y % 16 < 12 && (field >> (x / 4 % 16)) & 1 == 1;
                if is_mark { [30, 30, 30] } else { [220, 225, 230] }
            };
            picture.extend(pixel);
            picture.push(0);
        }
    }
    picture
}

/// xorshift64: the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
