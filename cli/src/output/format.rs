//! Output for programs: `-o json`, `yaml`, `name`, `jsonpath=…`, `custom-columns=…`.

use std::str::FromStr;

use serde::Serialize;
use serde_json::Value as Json;
use serde_json_path::JsonPath;

use super::{line, print, table::Table};
use crate::{failure::Result, manifest::emit};

/// Forms of output.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// A table with more columns.
    Wide,
    /// Manifests that can be applied again.
    Yaml,
    /// Canonical JSON.
    Json,
    /// Kind and name: `vm/web`.
    Name,
    /// A line for each, made of its fields.
    JsonPath(Template),
    /// A table with these columns.
    Columns(Vec<Column>),
}

impl FromStr for Output {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=').unwrap_or((text, "")) {
            ("wide", "") => Ok(Self::Wide),
            ("yaml", "") => Ok(Self::Yaml),
            ("json", "") => Ok(Self::Json),
            ("name", "") => Ok(Self::Name),
            ("jsonpath", template) if !template.is_empty() => template.parse().map(Self::JsonPath),
            ("custom-columns", columns) if !columns.is_empty() => {
                let columns = columns.split(',').map(str::parse);
                columns.collect::<Result<_, _>>().map(Self::Columns)
            }
            _ => {
                Err("must be wide, yaml, json, name, jsonpath=TEMPLATE or custom-columns=NAME:PATH,…".into())
            }
        }
    }
}

/// Text with fields in braces: `{.metadata.name} is {.status.phase}`.
#[derive(Clone, Debug, PartialEq)]
pub struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Text(String),
    Field(JsonPath),
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            parts.push(Part::Text(before.to_owned()));
            let end = closing(after).ok_or("a { has no matching }")?;
            let (field, after) = after.split_at(end);
            parts.push(match field.trim() {
                quoted if quoted.starts_with('"') => {
                    let text = serde_json::from_str(quoted).map_err(|error| format!("{quoted}: {error}"))?;
                    Part::Text(text)
                }
                field => Part::Field(path(field)?),
            });
            rest = after.get(1..).unwrap_or_default();
        }
        parts.push(Part::Text(rest.to_owned()));
        Ok(Self(parts))
    }
}

/// Where the brace is that ends a field: not one in quotes.
fn closing(text: &str) -> Option<usize> {
    let mut quote = None;
    for (at, letter) in text.char_indices() {
        match (quote, letter) {
            (None, '}') => return Some(at),
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), letter) if open == letter => quote = None,
            _ => {}
        }
    }
    None
}

/// A path (RFC 9535), with or without the `$` at its beginning.
fn path(text: &str) -> Result<JsonPath, String> {
    // As kubectl has it, whose template is filled once with the list of all.
    let text = text
        .strip_prefix(".items[*]")
        .filter(|rest| !rest.is_empty())
        .unwrap_or(text);
    if text.starts_with(".items") {
        return Err(format!(
            "\"{text}\" is of a list: each object is a document of its own, as in .metadata.name; `-o json` prints the list"
        ));
    }
    let whole = if text.starts_with('$') {
        text.to_owned()
    } else if text.starts_with(['.', '[']) {
        format!("${text}")
    } else {
        return Err(format!("\"{text}\" must begin with a dot, as in .metadata.name"));
    };
    JsonPath::parse(&whole).map_err(|error| format!("\"{text}\" is not a JSON path: {error}"))
}

/// The values at a path as text.
fn values(path: &JsonPath, json: &Json, between: &str) -> String {
    let value = |json: &Json| match json {
        Json::String(text) => text.clone(),
        json => json.to_string(),
    };
    let found: Vec<_> = path.query(json).iter().map(|json| value(json)).collect();
    found.join(between)
}

impl Template {
    fn fill(&self, json: &Json) -> String {
        let part = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Field(path) => values(path, json, " "),
        };
        self.0.iter().map(part).collect()
    }
}

/// A column of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    name: String,
    path: JsonPath,
}

impl FromStr for Column {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some((name, of)) if !name.is_empty() => Ok(Self {
                name: name.to_owned(),
                path: path(of)?,
            }),
            _ => Err(format!("\"{text}\" must be NAME:PATH, as in PHASE:.status.phase")),
        }
    }
}

/// The table of these columns.
pub fn table(columns: &[Column]) -> Table {
    Table::new(columns.iter().map(|column| column.name.clone()).collect())
}

/// A row of [`table`].
pub fn row(columns: &[Column], json: &Json) -> Vec<String> {
    columns
        .iter()
        .map(|column| values(&column.path, json, ","))
        .collect()
}

/// A document to print.
#[derive(Debug)]
pub struct Document {
    /// `vm/web`.
    pub title: String,
    /// Content.
    pub json: Json,
    /// Full name of the message that it is, for the order of its fields.
    pub schema: &'static str,
}

/// Arrangement of several documents.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout {
    /// JSON of all as one list.
    pub list: bool,
    /// JSON of each on one line, and YAML always with a separator: more will follow.
    pub stream: bool,
    /// No line with the columns' names.
    pub no_headers: bool,
}

/// Prints documents, one after another.
pub fn documents(documents: &[Document], output: &Output, layout: Layout) -> Result<()> {
    if let Output::Columns(columns) = output {
        let rows: Vec<_> = documents
            .iter()
            .map(|document| row(columns, &document.json))
            .collect();
        return print(&table(columns).whole(&rows, !layout.no_headers));
    }
    if *output == Output::Json && layout.list {
        let list = documents.iter().map(|document| document.json.clone()).collect();
        return line(format!("{:#}", Json::Array(list)));
    }
    let separator = if documents.len() > 1 || layout.stream {
        "---\n"
    } else {
        ""
    };
    for Document { title, json, schema } in documents {
        match output {
            Output::Yaml => print(&format!("{separator}{}", emit::yaml(json, schema)?))?,
            Output::Json if layout.stream => line(json.to_string())?,
            Output::Json => line(format!("{json:#}"))?,
            Output::JsonPath(template) => line(template.fill(json))?,
            Output::Name | Output::Wide | Output::Columns(_) => line(title)?,
        }
    }
    Ok(())
}

/// Prints one message for programs.
pub fn one<T: Serialize>(title: String, message: &T, schema: &'static str, output: &Output) -> Result<()> {
    let json = emit::json(message)?;
    documents(&[Document { title, json, schema }], output, Layout::default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fill(template: &str, json: &Json) -> String {
        template.parse::<Template>().unwrap().fill(json)
    }

    #[test]
    fn template_is_filled_with_fields() {
        let vm = json!({
            "metadata": {"name": "web", "labels": {"example.com/a": "b"}},
            "spec": {"disks": [{"name": "root", "queues": 2}, {"name": "data"}]},
        });
        for (template, expected) in [
            ("{.metadata.name}", "web"),
            ("{.items[*].metadata.name}", "web"),
            ("{$.metadata.name}: {.spec.disks[0].queues}", "web: 2"),
            ("{.spec.disks[*].name}", "root data"),
            ("{..name}", "web root data"),
            ("{.spec.disks[?(@.name=='root')].queues}", "2"),
            ("{.metadata.labels['example.com/a']}", "b"),
            ("{.metadata.name}{\"\\t}\"}{.spec.none}|", "web\t}|"),
            ("{.spec.disks[1]}", "{\"name\":\"data\"}"),
            ("text alone", "text alone"),
        ] {
            assert_eq!(fill(template, &vm), expected, "{template}");
        }
        let output: Output = "custom-columns=NAME:.metadata.name,DISKS:.spec.disks[*].name,NONE:.a"
            .parse()
            .unwrap();
        let Output::Columns(columns) = output else {
            panic!("{output:?}")
        };
        assert_eq!(
            table(&columns).whole(&[row(&columns, &vm)], true),
            "NAME   DISKS       NONE\nweb    root,data   -\n"
        );
    }

    #[test]
    fn unknown_format_is_refused_with_the_known_ones() {
        for (wrong, words) in [
            ("", "must be wide"),
            ("xml", "must be wide"),
            ("jsonpath", "must be wide"),
            ("jsonpath={.a", "has no matching }"),
            ("jsonpath={a}", "must begin with a dot"),
            ("jsonpath={.items[0].metadata.name}", "is of a list"),
            ("jsonpath={range .items[*]}", "must begin with a dot"),
            ("jsonpath={.a[}", "is not a JSON path"),
            ("custom-columns=NAME", "must be NAME:PATH"),
            ("custom-columns=:.a", "must be NAME:PATH"),
        ] {
            let refused = wrong.parse::<Output>().unwrap_err();
            assert!(refused.contains(words), "{wrong}: {refused}");
        }
    }
}
