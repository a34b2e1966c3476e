//! `measure tick`, in a guest: sends a datagram every few milliseconds, and rewrites memory meanwhile if it is asked to. `measure hear`, beside
//! it: when each came. So it is the world around the guest that sees how long the guest stands still, by a clock that does not.

use std::{
    io::Write as _,
    net::UdpSocket,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};

/// Sends a counter to `to` every `every`, without end. A datagram that fails to send is skipped.
pub fn send(to: &str, every: Duration, rewrite_mib: usize) -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0").context("make a socket")?;
    socket.connect(to).with_context(|| format!("talk to {to}"))?;
    if rewrite_mib > 0 {
        thread::spawn(move || rewrite(rewrite_mib << 20));
    }
    for count in 0_u64.. {
        let _lost = socket.send(&count.to_le_bytes());
        thread::sleep(every);
    }
    Ok(())
}

/// Writes each word of so many bytes again and again, always another one.
fn rewrite(bytes: usize) {
    let mut memory = vec![0_u64; bytes / size_of::<u64>()];
    for turn in 1_u64.. {
        for (place, word) in (0_u64..).zip(&mut memory) {
            *word = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ place;
        }
        std::hint::black_box(&mut memory);
    }
}

/// Prints when each datagram came, in tenths of a millisecond of real time, a line each, without end.
pub fn hear(port: u16) -> Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", port)).context("make a socket")?;
    let mut out = std::io::stdout().lock();
    let mut datagram = [0; 64];
    loop {
        socket.recv(&mut datagram).context("receive")?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        writeln!(out, "{}", now.as_micros() / 100).and_then(|()| out.flush())?;
    }
}
