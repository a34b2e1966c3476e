//! Arguments of the verbs for objects of every kind: `get`, `describe`, `delete`.

use std::marker::PhantomData;

use clap::Args;

use super::{FORMAT, HELP, Output, Selector, Timeout, value::named};
use crate::{
    client::{Kind, Watched},
    complete,
};

/// Reads the name of an object: `NAME` or `KIND/NAME`.
fn name<K: Kind>(text: &str) -> Result<String, String> {
    named(text, K::WORD, K::ONE)
}

/// Options of a list.
#[derive(Debug, Default, Args)]
pub struct List<K: Kind> {
    /// Only these; all when none is named.
    #[arg(value_parser = name::<K>, add = complete::names::<K>())]
    pub names: Vec<String>,
    /// How to print them.
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
    /// Only objects with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all hold.
    #[arg(
        short = 'l',
        long = "selector",
        value_name = "SELECTOR",
        value_delimiter = ','
    )]
    pub selectors: Vec<Selector>,
    /// Leave out the line with the columns' names.
    #[arg(long)]
    pub no_headers: bool,
    #[arg(skip)]
    #[allow(missing_docs)]
    pub kind: PhantomData<K>,
}

/// Options of a list that can be watched.
#[derive(Debug, Default, Args)]
pub struct WatchedList<K: Watched> {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub list: List<K>,
    /// Keep printing changes as they happen
    #[arg(short, long)]
    pub watch: bool,
}

/// Names of objects.
#[derive(Debug, Default, Args)]
pub struct Names<K: Kind> {
    /// Names, as NAME or KIND/NAME.
    #[arg(required = true, value_name = "NAME", value_parser = name::<K>, add = complete::names::<K>())]
    pub names: Vec<String>,
    #[arg(skip)]
    #[allow(missing_docs)]
    pub kind: PhantomData<K>,
}

/// Objects to delete.
#[derive(Debug, Default, Args)]
pub struct Delete<K: Kind> {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub names: Names<K>,
    /// Do not fail for objects that are not there.
    #[arg(long)]
    pub ignore_not_found: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}
