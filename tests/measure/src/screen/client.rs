//! VNC client (RFC 6143) that requests updates and skips their pixels without decoding, so that the
//! client's cost does not hide the server's.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

/// Encodings (RFC 6143, 7.7, and rfbproto's registry).
pub const RAW: i32 = 0;
const COPY_RECT: i32 = 1;
/// The newer sibling of RRE.
pub const HEXTILE: i32 = 5;
/// zlib streams and palettes.
pub const TIGHT: i32 = 7;
/// Tiles of run lengths in one zlib stream.
pub const ZRLE: i32 = 16;
const DESKTOP_SIZE: i32 = -223;

/// Bytes of a pixel in the format that is asked for.
const PIXEL: usize = 4;
/// The same in Tight, which leaves the unused byte out.
const TIGHT_PIXEL: usize = 3;
/// 32 bits, 24 of them used, little-endian, true colour: red at bit 16, green at 8, blue at 0.
const FORMAT: [u8; 16] = [32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0];

/// A server that is not there by then never will be.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection that is past its greetings.
pub struct Client {
    server: BufReader<UnixStream>,
    size: (u16, u16),
    /// Bytes that the server has sent.
    received: u64,
}

impl Client {
    /// Connects without a password and asks for one encoding beside CopyRect, as viewers do.
    pub fn connect(socket: &Path, encoding: i32) -> Result<Self> {
        let began = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Err(_) if began.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(50)),
                stream => break stream.with_context(|| format!("connect to {}", socket.display()))?,
            }
        };
        let mut client = Self {
            server: BufReader::with_capacity(1 << 20, stream),
            size: (0, 0),
            received: 0,
        };
        client.greet().context("greet the server")?;
        let mut ask = vec![0, 0, 0, 0];
        ask.extend(FORMAT);
        let encodings = [encoding, COPY_RECT, DESKTOP_SIZE];
        ask.extend([2, 0, 0, 3]);
        ask.extend(encodings.iter().flat_map(|encoding| encoding.to_be_bytes()));
        client.say(&ask)?;
        Ok(client)
    }

    fn greet(&mut self) -> Result<()> {
        let version: [u8; 12] = self.take()?;
        ensure!(version.starts_with(b"RFB 003."), "it is no server of VNC");
        self.say(b"RFB 003.008\n")?;
        let [count] = self.take()?;
        self.skip(count.into())?;
        // No security; then the desktop is shared with others.
        self.say(&[1])?;
        let result: [u8; 4] = self.take()?;
        ensure!(result == [0; 4], "it wants a password");
        self.say(&[1])?;
        self.size = (self.u16()?, self.u16()?);
        self.skip(16)?;
        let name = self.u32()?;
        self.skip(u64::from(name))
    }

    /// Bytes that have come so far.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Requests an update of the changes, or of the whole screen.
    pub fn ask(&mut self, incremental: bool) -> Result<()> {
        let (width, height) = self.size;
        let mut ask = vec![3, u8::from(incremental), 0, 0, 0, 0];
        ask.extend(width.to_be_bytes());
        ask.extend(height.to_be_bytes());
        self.say(&ask)
    }

    /// A key goes down and up again, by its keysym.
    pub fn press(&mut self, keysym: u32) -> Result<()> {
        let mut keys = Vec::new();
        for down in [1, 0] {
            keys.extend([4, down, 0, 0]);
            keys.extend(keysym.to_be_bytes());
        }
        self.say(&keys)
    }

    /// Whether an update has come by then. It must have been asked for.
    pub fn update_within(&mut self, time: Duration) -> Result<bool> {
        let began = Instant::now();
        loop {
            let left = time.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            self.server.get_ref().set_read_timeout(Some(left))?;
            let ready = self.server.fill_buf().map(|bytes| !bytes.is_empty());
            // A message that has begun is read to its end.
            self.server.get_ref().set_read_timeout(Some(PATIENCE))?;
            match ready {
                Ok(true) => {}
                Ok(false) => bail!("the server has hung up"),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Ok(false);
                }
                Err(error) => return Err(error).context("wait for an update"),
            }
            if self.message()? {
                return Ok(true);
            }
        }
    }

    /// Reads a message (7.6); says whether it was an update.
    fn message(&mut self) -> Result<bool> {
        let [kind] = self.take()?;
        match kind {
            0 => {
                self.skip(1)?;
                for _ in 0..self.u16()? {
                    self.rectangle()?;
                }
                return Ok(true);
            }
            // A bell.
            2 => {}
            // Cut text.
            3 => {
                self.skip(3)?;
                let length = self.u32()?;
                self.skip(u64::from(length))?;
            }
            other => bail!("a message of kind {other}, which nobody asked for"),
        }
        Ok(false)
    }

    fn rectangle(&mut self) -> Result<()> {
        self.skip(4)?;
        let (wide, high) = (self.u16()?, self.u16()?);
        let (width, height) = (usize::from(wide), usize::from(high));
        let encoding = i32::from_be_bytes(self.take()?);
        match encoding {
            RAW => self.skip_pixels(width * height, PIXEL),
            COPY_RECT => self.skip(4),
            HEXTILE => self.hextile(width, height),
            TIGHT => self.tight(width, height),
            ZRLE => {
                let length = self.u32()?;
                self.skip(u64::from(length))
            }
            DESKTOP_SIZE => {
                self.size = (wide, high);
                Ok(())
            }
            other => bail!("a rectangle in encoding {other}, which nobody asked for"),
        }
    }

    /// RFC 6143, 7.7.4: tiles of 16 × 16.
    fn hextile(&mut self, width: usize, height: usize) -> Result<()> {
        for y in (0..height).step_by(16) {
            for x in (0..width).step_by(16) {
                let pixels = 16.min(width - x) * 16.min(height - y);
                let [mask] = self.take()?;
                if mask & 1 != 0 {
                    self.skip_pixels(pixels, PIXEL)?;
                    continue;
                }
                self.skip_pixels((mask & 6).count_ones() as usize, PIXEL)?;
                if mask & 8 != 0 {
                    let [count] = self.take()?;
                    let colour = if mask & 16 != 0 { PIXEL } else { 0 };
                    self.skip_pixels(count.into(), 2 + colour)?;
                }
            }
        }
        Ok(())
    }

    /// rfbproto, "Tight Encoding".
    fn tight(&mut self, width: usize, height: usize) -> Result<()> {
        let [control] = self.take()?;
        match control >> 4 {
            8 => return self.skip_pixels(1, TIGHT_PIXEL),
            0..8 => {}
            other => bail!("Tight with the kind {other}, which nobody asked for"),
        }
        let mut length = width * height * TIGHT_PIXEL;
        if control & 0x40 != 0 {
            let [filter] = self.take()?;
            match filter {
                // As it is, and as differences.
                0 | 2 => {}
                1 => {
                    let [last] = self.take()?;
                    let colours = usize::from(last) + 1;
                    self.skip_pixels(colours, TIGHT_PIXEL)?;
                    length = match colours {
                        2 => width.div_ceil(8) * height,
                        _ => width * height,
                    };
                }
                other => bail!("Tight with the filter {other}, which there is not"),
            }
        }
        // Less than 12 bytes are not compressed.
        if length >= 12 {
            length = 0;
            for shift in [0, 7, 14] {
                let [byte] = self.take()?;
                length |= usize::from(byte & 0x7f) << shift;
                if byte & 0x80 == 0 {
                    break;
                }
            }
        }
        self.skip_pixels(length, 1)
    }

    fn say(&mut self, bytes: &[u8]) -> Result<()> {
        self.server
            .get_mut()
            .write_all(bytes)
            .context("speak to the server")
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.server
            .read_exact(&mut bytes)
            .context("hear what the server says")?;
        self.received += N as u64;
        Ok(bytes)
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_be_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.take()?))
    }

    fn skip_pixels(&mut self, count: usize, bytes: usize) -> Result<()> {
        self.skip((count * bytes) as u64)
    }

    fn skip(&mut self, bytes: u64) -> Result<()> {
        let read = io::copy(&mut self.server.by_ref().take(bytes), &mut io::sink());
        ensure!(read.context("read an update")? == bytes, "the server has hung up");
        self.received += bytes;
        Ok(())
    }
}
