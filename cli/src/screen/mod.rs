//! The screen of a VM: `vnc`, `screenshot`, `send-key` and `type`. All of them are clients of the VM's RFB server, over the API's
//! stream.

mod keys;
mod password;
mod rfb;
mod viewer;

use std::{io::Write as _, path::Path, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use vmmd_spec::keyboard::Layout;

use self::{
    keys::Chord,
    rfb::{Picture, Rfb},
};
use crate::{
    args::verbs::{Screenshot, SendKey, Type},
    client::Client,
    failure::{Code, Failure, Result},
};

pub use self::viewer::run as vnc;

/// How long a key is held, and the least time between two: the guest keeps up with that.
const KEY_TIME: Duration = Duration::from_millis(10);

/// Keys that are sent before it is asked whether the guest has taken them. The i8042's keyboard keeps 128 bytes; a character takes 8 at most, with
/// AltGr.
const UNTAKEN: usize = 12;

/// Writes a picture of the screen to a PNG file, or to standard output for `-`.
pub async fn screenshot(client: &Client, args: &Screenshot) -> Result<()> {
    let picture = Rfb::open(client, &args.name, true).await?.picture().await?;
    let png = encode(&picture)?;
    let written = if args.file == Path::new("-") {
        std::io::stdout().write_all(&png)
    } else {
        std::fs::write(&args.file, &png)
    };
    written.map_err(|error| Failure::new(Code::Other, format!("writing {}: {error}", args.file.display())))
}

/// Presses keys, one chord after the other.
pub async fn send_key(client: &Client, args: &SendKey) -> Result<()> {
    let chords: Vec<Chord> = args
        .keys
        .iter()
        .map(|text| keys::chord(text))
        .collect::<Result<_>>()?;
    press(client, &args.name, &chords).await
}

/// Types a text that the VM's keyboard has all characters of.
pub async fn type_text(client: &Client, args: &Type) -> Result<()> {
    let chords: Vec<Chord> = args.text.chars().map(keys::of_character).collect::<Result<_>>()?;
    let spec = client.get(&args.name).await?.spec.unwrap_or_default();
    let layout = spec.display.unwrap_or_default().keyboard_layout;
    // Only the VM knows a layout of a later version. It leaves out characters without a key.
    if let Some(layout) = Layout::of_spec(layout) {
        keys::check(&args.name, layout, &args.text)?;
    }
    let enter = args.enter.then(|| keys::chord("enter")).transpose()?;
    let chords: Vec<Chord> = chords.into_iter().chain(enter).collect();
    press(client, &args.name, &chords).await
}

async fn press(client: &Client, name: &str, chords: &[Chord]) -> Result<()> {
    let mut rfb = Rfb::open(client, name, false).await?;
    let mut ticks = interval(KEY_TIME);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut untaken = 0;
    for chord in chords {
        untaken += chord.len();
        if untaken > UNTAKEN {
            rfb.keys_taken().await?;
            untaken = chord.len();
        }
        for key in chord {
            ticks.tick().await;
            rfb.key(*key, true).await?;
        }
        ticks.tick().await;
        for key in chord.iter().rev() {
            rfb.key(*key, false).await?;
        }
    }
    rfb.keys_taken().await
}

fn encode(picture: &Picture) -> Result<Vec<u8>> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, picture.width.into(), picture.height.into());
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let written = encoder
        .write_header()
        .and_then(|mut writer| writer.write_image_data(&picture.rgb));
    written.map_err(|error| Failure::new(Code::Other, format!("making the PNG: {error}")))?;
    Ok(file)
}
