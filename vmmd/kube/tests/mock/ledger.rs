//! Machines that run on all nodes of a test: one machine must never run twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use super::{
    trap::Trap,
    vmmd::{State, lock},
};

/// It is what all mocks of a test share.
#[derive(Clone, Default)]
pub struct Ledger {
    runs: Arc<Mutex<Runs>>,
    pub trap: Trap,
}

#[derive(Default)]
struct Runs {
    running: BTreeMap<String, BTreeSet<String>>,
    /// Machine and epoch of each start.
    starts: Vec<(String, i64)>,
    twice: Vec<String>,
    /// Machine and the two nodes of each move.
    moves: Vec<(String, String, String)>,
    /// By where they are reached.
    nodes: BTreeMap<String, State>,
}

impl Ledger {
    pub fn start(&self, machine: &str, epoch: i64, node: &str) {
        lock(&self.runs).starts.push((machine.to_owned(), epoch));
        self.runs(machine, node);
    }

    pub fn moved(&self, machine: &str, from: &str, to: &str) {
        let words = [machine, from, to].map(str::to_owned);
        lock(&self.runs).moves.push(words.into());
        self.runs(machine, to);
    }

    fn runs(&self, machine: &str, node: &str) {
        let mut runs = lock(&self.runs);
        let nodes = runs.running.entry(machine.to_owned()).or_default();
        nodes.insert(node.to_owned());
        if nodes.len() > 1 {
            let text = format!("{machine} runs on {nodes:?}");
            runs.twice.push(text);
        }
    }

    /// A vmmd is reached there.
    pub fn add_node(&self, address: &str, state: &State) {
        lock(&self.runs).nodes.insert(address.to_owned(), state.clone());
    }

    /// The vmmd that is reached there.
    pub fn node(&self, address: &str) -> Option<State> {
        lock(&self.runs).nodes.get(address).cloned()
    }

    /// The nodes of each move.
    pub fn moves(&self) -> Vec<(String, String)> {
        let runs = lock(&self.runs);
        let moves = runs.moves.iter();
        moves.map(|(_, from, to)| (from.clone(), to.clone())).collect()
    }

    pub fn end(&self, machine: &str, node: &str) {
        lock(&self.runs)
            .running
            .entry(machine.to_owned())
            .or_default()
            .remove(node);
    }

    /// Machines that ran on two nodes at once.
    pub fn twice(&self) -> Vec<String> {
        lock(&self.runs).twice.clone()
    }

    /// Epochs of all starts, in their order.
    pub fn epochs(&self) -> Vec<i64> {
        lock(&self.runs).starts.iter().map(|(_, epoch)| *epoch).collect()
    }
}
