//! How answers are printed.

pub mod age;
pub mod clean;
pub mod describe;
pub mod disk;
pub mod event;
pub mod format;
pub mod guest;
pub mod image;
pub mod network;
pub mod node;
pub mod operation;
pub mod part;
pub mod snapshot;
pub mod stats;
pub mod table;
pub mod top;
pub mod value;
pub mod vm;

#[cfg(test)]
mod tests;

use std::io::{self, Write};

use serde_json::Value as Json;

use self::{
    format::{Document, Layout, Output},
    table::Table,
};
use crate::{
    client::Kind,
    failure::{Code, Failure, Result},
    manifest::emit,
};

/// An object of the node that is printed for people and for programs.
pub trait Show: Kind {
    /// Full name of its message.
    const SCHEMA: &'static str;
    /// Whether a description has the last events of the object.
    const HAS_EVENTS: bool = true;

    /// Columns of the table; `wide` has more.
    fn columns(wide: bool) -> Vec<&'static str>;
    /// A row of the table.
    fn row(&self, wide: bool, now: jiff::Timestamp) -> Vec<String>;
    /// Everything about the object as lines of `Key: value`.
    fn describe(&self, now: jiff::Timestamp) -> String;

    /// The object as JSON, in the form of a manifest if its kind has one.
    fn json(&self) -> Result<Json> {
        emit::json(self)
    }

    /// The object for programs.
    fn document(&self) -> Result<Document> {
        Ok(Document {
            title: format!("{}/{}", Self::WORD, self.name()),
            json: self.json()?,
            schema: Self::SCHEMA,
        })
    }
}

/// The table of a kind; `wide` has more columns.
pub fn table<K: Show>(wide: bool) -> Table {
    Table::new(K::columns(wide))
}

/// Prints objects as documents one after another.
pub fn print_documents<K: Show>(objects: &[&K], output: &Output, layout: Layout) -> Result<()> {
    let documents = objects.iter().map(|object| object.document());
    format::documents(&documents.collect::<Result<Vec<_>>>()?, output, layout)
}

/// Prints a text to standard output as it is.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| write_failed(&error))
}

/// Prints a line to standard output.
pub fn line(text: impl Into<String>) -> Result<()> {
    let mut text = text.into();
    text.push('\n');
    print(&text)
}

/// Prints lines below the line that they belong to.
pub fn indented(lines: &[String]) -> Result<()> {
    lines.iter().try_for_each(|each| line(format!("  {each}")))
}

/// A reader that has seen enough (`| head`) ends the program quietly; anything else is an error.
pub fn write_failed(error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    Failure::new(Code::Other, format!("cannot write to standard output: {error}"))
}
