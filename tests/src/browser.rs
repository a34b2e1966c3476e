//! A browser that a test drives: Debian's Chromium without a screen, by the DevTools protocol over a pipe.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::run;
use crate::wait::{Deadline, Follow, Process, tail};

/// Gives a program the pipes where `--remote-debugging-pipe` expects them.
const WITH_PIPES: &str = "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null";

/// Chromium's options. The browser makes no connections on its own. Each address except 127.0.0.1
/// is behind a proxy that does not exist. The sandbox does not work for root, but tests open only
/// their own pages.
const OPTIONS: [&str; 13] = [
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--disable-features=MediaRouter,OptimizationHints,Translate",
    "--proxy-server=127.0.0.1:9",
    "--force-color-profile=srgb",
];

/// How long an answer of the browser may take.
const PATIENCE: u64 = 60;

/// Part of a page in pixels.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    /// From the page's left edge.
    pub left: usize,
    /// From the page's upper edge.
    pub top: usize,
    /// Its width.
    pub width: usize,
    /// Its height.
    pub height: usize,
}

/// A running browser with one page. It ends when it is dropped, and with the process that started it.
pub struct Browser {
    child: Child,
    /// Commands. Messages end with a zero byte, in both directions.
    input: ChildStdin,
    /// Responses and events.
    output: Follow<ChildStdout>,
    /// Identifies the page.
    session: Option<String>,
    calls: u64,
    /// Whether the page has loaded since the last call of [`Self::open`] or [`Self::reload`].
    loaded: bool,
    home: TempDir,
}

impl Browser {
    /// Starts it with an empty page of `width` by `height` pixels. It trusts the servers that `authority`, a certificate in PEM, vouches for.
    pub fn start((width, height): (usize, usize), authority: Option<&Path>) -> Result<Self> {
        let home = tempfile::tempdir().context("create a folder for the browser")?;
        if let Some(authority) = authority {
            trust(home.path(), authority)?;
        }
        let mut child = Command::new("sh")
            .args(["-c", WITH_PIPES, "sh", "chromium"])
            .args(OPTIONS)
            .arg(format!(
                "--user-data-dir={}",
                home.path().join("profile").display()
            ))
            .env("HOME", home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(home.path().join("log"))?)
            .spawn()
            .context("start chromium")?;
        let input = child.stdin.take().context("the browser's input")?;
        let output = Follow::new(child.stdout.take().context("the browser's output")?);
        let mut browser = Browser {
            child,
            input,
            output,
            session: None,
            calls: 0,
            loaded: false,
            home,
        };
        let page = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": page["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", attach)?;
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        browser.call("Page.enable", json!({}))?;
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        browser.call("Emulation.setDeviceMetricsOverride", size)?;
        Ok(browser)
    }

    /// Opens an address and waits until the page has loaded.
    pub fn open(&mut self, address: &str) -> Result<()> {
        self.loaded = false;
        let opened = self.call("Page.navigate", json!({ "url": address }))?;
        if let Some(error) = opened["errorText"].as_str() {
            bail!("open {address}: {error}");
        }
        self.until_loaded()
    }

    /// Loads the page once more.
    pub fn reload(&mut self) -> Result<()> {
        self.loaded = false;
        self.call("Page.reload", json!({}))?;
        self.until_loaded()
    }

    fn until_loaded(&mut self) -> Result<()> {
        let deadline = Deadline::seconds(PATIENCE);
        while !self.loaded {
            self.receive(deadline)?;
        }
        Ok(())
    }

    /// The value of an expression of JavaScript in the page.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let parameters = json!({ "expression": expression, "returnByValue": true });
        let mut answer = self.call("Runtime.evaluate", parameters)?;
        ensure!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        Ok(answer["result"]["value"].take())
    }

    /// The page's text, as somebody reads it.
    pub fn text(&mut self) -> Result<String> {
        let text = self.evaluate("document.body.innerText")?;
        text.as_str().map(str::to_owned).context("the page's text")
    }

    /// Takes a screenshot of a part of the page, as a PNG.
    pub fn screenshot(&mut self, area: Area) -> Result<Vec<u8>> {
        let clip = json!({
            "x": area.left, "y": area.top, "width": area.width, "height": area.height, "scale": 1
        });
        let answer = self.call("Page.captureScreenshot", json!({ "format": "png", "clip": clip }))?;
        let data = answer["data"].as_str().context("a picture")?;
        BASE64_STANDARD.decode(data).context("decode the picture")
    }

    /// Types on a US keyboard.
    pub fn type_text(&mut self, text: &str) -> Result<()> {
        for character in text.chars() {
            let (code, shift) = key(character).with_context(|| format!("no key has {character:?}"))?;
            if shift {
                self.send_key("rawKeyDown", "ShiftLeft", "Shift")?;
            }
            self.press(&code, &character.to_string())?;
            if shift {
                self.send_key("keyUp", "ShiftLeft", "Shift")?;
            }
        }
        Ok(())
    }

    /// Presses a key and releases it: its place on the keyboard and its meaning (UI Events, KeyboardEvent: `code` and `key`).
    pub fn press(&mut self, code: &str, key: &str) -> Result<()> {
        self.send_key("rawKeyDown", code, key)?;
        self.send_key("keyUp", code, key)
    }

    fn send_key(&mut self, kind: &str, code: &str, key: &str) -> Result<()> {
        // 1 is the left one of two such keys.
        let location = u32::from(code == "ShiftLeft");
        let event = json!({ "type": kind, "code": code, "key": key, "location": location });
        self.call("Input.dispatchKeyEvent", event).map(drop)
    }

    fn call(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.calls += 1;
        let mut message = json!({ "id": self.calls, "method": method });
        message["params"] = parameters;
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let sent = self.input.write_all(format!("{message}\0").as_bytes());
        sent.with_context(|| self.complaints())?;
        let deadline = Deadline::seconds(PATIENCE);
        loop {
            let mut answer = self.receive(deadline).with_context(|| method.to_owned())?;
            if answer["id"] == self.calls {
                ensure!(answer.get("error").is_none(), "{method}: {answer}");
                return Ok(answer["result"].take());
            }
        }
    }

    /// The next response or event.
    fn receive(&mut self, deadline: Deadline) -> Result<Value> {
        let message = self.output.until("\0", deadline);
        let message = message.with_context(|| self.complaints())?;
        let message: Value = serde_json::from_str(message.trim_end_matches('\0'))?;
        self.loaded |= message["method"] == "Page.loadEventFired";
        Ok(message)
    }

    /// Returns an error message with the browser's standard error.
    fn complaints(&self) -> String {
        let log = fs::read_to_string(self.home.path().join("log")).unwrap_or_default();
        format!("chromium does not answer; it said:\n{}", tail(&log, 20))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // A regular exit also ends the browser's other processes.
        let _ = self.call("Browser.close", json!({}));
        let process = Process::open(self.child.id());
        if let Ok(Some(process)) = process
            && !matches!(process.wait_exit(Deadline::seconds(10)), Ok(true))
        {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// Makes a browser with this home trust an authority: Chromium reads NSS's database there.
fn trust(home: &Path, authority: &Path) -> Result<()> {
    let folder = home.join(".pki/nssdb");
    fs::create_dir_all(&folder)?;
    let database = format!("sql:{}", folder.display());
    let deadline = Deadline::seconds(PATIENCE);
    let create = ["-N", "--empty-password", "-d", &database];
    run::check(Command::new("certutil").args(create), deadline)?;
    let mut add = Command::new("certutil");
    add.args(["-A", "-d", &database, "-n", "tests", "-t", "C,,", "-i"]);
    run::check(add.arg(authority), deadline).map(drop)
}

/// The key that has a character on a US keyboard, and whether Shift is held for it.
fn key(character: char) -> Option<(String, bool)> {
    const OTHERS: [(&str, &str); 22] = [
        ("Digit1", "1!"),
        ("Digit2", "2@"),
        ("Digit3", "3#"),
        ("Digit4", "4$"),
        ("Digit5", "5%"),
        ("Digit6", "6^"),
        ("Digit7", "7&"),
        ("Digit8", "8*"),
        ("Digit9", "9("),
        ("Digit0", "0)"),
        ("Space", " "),
        ("Minus", "-_"),
        ("Equal", "=+"),
        ("BracketLeft", "[{"),
        ("BracketRight", "]}"),
        ("Backslash", "\\|"),
        ("Semicolon", ";:"),
        ("Quote", "'\""),
        ("Backquote", "`~"),
        ("Comma", ",<"),
        ("Period", ".>"),
        ("Slash", "/?"),
    ];
    if character.is_ascii_alphabetic() {
        let code = format!("Key{}", character.to_ascii_uppercase());
        return Some((code, character.is_ascii_uppercase()));
    }
    OTHERS.iter().find_map(|(code, characters)| {
        let place = characters.find(character)?;
        Some(((*code).to_owned(), place == 1))
    })
}

#[cfg(test)]
mod tests {
    use super::key;

    #[test]
    fn each_character_of_ascii_has_a_key() {
        let missing: Vec<char> = (' '..='~')
            .filter(|character| key(*character).is_none())
            .collect();
        assert_eq!(missing, []);
        assert_eq!(key('('), Some(("Digit9".to_owned(), true)));
        assert_eq!(key('a'), Some(("KeyA".to_owned(), false)));
    }
}
