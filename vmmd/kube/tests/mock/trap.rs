//! Lets a test act at one of the calls with a change: each step of a program can be its last one.

use std::sync::{Arc, Mutex};

use super::vmmd::lock;

/// Outcome of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is carried out and answered.
    Pass,
    /// It is not carried out, and clients try it again by themselves.
    Refuse,
    /// It is not carried out, and the client gets an error.
    Fail,
    /// It is carried out, and the answer is lost.
    Lose,
}

type Act = Box<dyn FnOnce(&str) -> Verdict + Send>;

/// Trap of the API server and of all vmmds of a test.
#[derive(Clone, Default)]
pub struct Trap(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    armed: bool,
    calls: Vec<String>,
    /// At the call with this number, from 0.
    act: Option<(usize, Act)>,
    /// Calls that fail once.
    failing: Vec<String>,
}

impl Trap {
    /// Counts from here on, and acts at that call.
    pub fn arm(&self, at: usize, act: impl FnOnce(&str) -> Verdict + Send + 'static) {
        let mut inner = lock(&self.0);
        inner.armed = true;
        inner.act = Some((at, Box::new(act)));
    }

    /// The next one of these calls fails.
    pub fn fail(&self, call: &str) {
        lock(&self.0).failing.push(call.to_owned());
    }

    /// Whether each call that was to fail has come.
    pub fn has_failed(&self) -> bool {
        lock(&self.0).failing.is_empty()
    }

    /// All calls that were counted.
    pub fn calls(&self) -> Vec<String> {
        lock(&self.0).calls.clone()
    }

    /// A call comes.
    pub fn pass(&self, call: &str) -> Verdict {
        let mut inner = lock(&self.0);
        if let Some(index) = inner.failing.iter().position(|failing| failing == call) {
            inner.failing.remove(index);
            return Verdict::Fail;
        }
        if !inner.armed {
            return Verdict::Pass;
        }
        inner.calls.push(call.to_owned());
        let now = inner.calls.len() - 1;
        match inner.act.take() {
            Some((at, act)) if at == now => act(call),
            other => {
                inner.act = other;
                Verdict::Pass
            }
        }
    }
}
