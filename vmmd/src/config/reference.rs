//! Generated configuration reference of the book: the keys, types and comments of the sources, and
//! the defaults of an empty file.
//!
//! `UPDATE_REFERENCE=1 cargo nextest run -p vmmd reference` regenerates it.

use std::{collections::BTreeSet, fmt::Write as _, fs, path::Path};

use serde_json::Value;

use super::Config;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/configuration.md");
const PACKAGED: &str = include_str!("../../package/config.toml");
const SOURCES: [&str; 7] = [
    include_str!("../config.rs"),
    include_str!("clients.rs"),
    include_str!("../../host/src/ledger.rs"),
    include_str!("../../host/src/capacity/limits.rs"),
    include_str!("../../host/src/capacity/sizing.rs"),
    include_str!("../../host/src/roots.rs"),
    include_str!("../../images/src/rules.rs"),
];

/// Each table of the file: its key, its heading, and the type that has its keys.
const TABLES: [(&str, &str, &str); 16] = [
    ("", "Keys outside of tables", "Config"),
    ("tcp", "`[tcp]`", "Tcp"),
    ("limits", "`[limits]`", "Limits"),
    ("overcommit", "`[overcommit]`", "Overcommit"),
    ("reserved", "`[reserved]`", "Reserved"),
    ("pressure", "`[pressure]`", "Pressure"),
    ("sizing", "`[[sizing]]`, any number of times", "Policy"),
    ("firmware", "`[firmware]`", "Firmware"),
    ("vm_uids", "`[vm_uids]`", "UidRange"),
    ("restart", "`[restart]`", "Restart"),
    ("metrics", "`[metrics]`", "Metrics"),
    ("screen", "`[screen]`", "Screen"),
    ("roots", "`[roots]`", "Roots"),
    ("snapshots", "`[snapshots]`", "SnapshotLimits"),
    ("images", "`[images]`", "ImportRules"),
    ("pods", "`[pods]`", "Pods"),
];

const INTRODUCTION: &str = "# Configuration reference

All keys of `/etc/vmmd/config.toml`, made from the code: a test keeps this page as it is. Every key is optional unless this page says
otherwise; an unknown one is an error. `vmmd --check` reads the file and says what is wrong with it. `systemctl restart vmmd` takes
over a change; VMs continue to run. [Operating a node](operating.md#configuration) has the file as the package installs it.
";

/// These have no default, and the rest of their table makes no sense without them.
const REQUIRED: [&str; 3] = ["tcp.listen", "sizing.min_cores", "sizing.max_cores"];

struct Field {
    name: String,
    rust: String,
    text: String,
}

/// A struct of the sources: what its comment says, and its fields.
fn parsed(name: &str) -> (String, Vec<Field>) {
    let head = format!("pub struct {name} {{");
    let source = SOURCES.into_iter().find(|source| source.contains(&head)).unwrap();
    let (before, after) = source.split_once(&head).unwrap();
    let above = before.trim_end().rsplit("\n\n").next().unwrap();
    let mut fields = Vec::new();
    let mut text = String::new();
    for line in after.lines().map(str::trim).take_while(|line| *line != "}") {
        if let Some(comment) = line.strip_prefix("///") {
            text = format!("{text} {}", comment.trim());
        } else if let Some((name, rust)) = line.strip_prefix("pub ").and_then(|line| line.split_once(": ")) {
            fields.push(Field {
                name: name.to_owned(),
                rust: rust.trim_end_matches(',').to_owned(),
                text: std::mem::take(&mut text).trim().to_owned(),
            });
        }
    }
    let comments = above.lines().filter_map(|line| line.trim().strip_prefix("///"));
    let about: Vec<_> = comments.map(str::trim).collect();
    (about.join(" "), fields)
}

/// A type as people write it; `None` of a table.
fn of_file(rust: &str) -> Option<&'static str> {
    let rust = rust
        .strip_prefix("Option<")
        .and_then(|rust| rust.strip_suffix('>'))
        .unwrap_or(rust);
    Some(match rust {
        "PathBuf" => "path",
        "String" => "text",
        "SocketAddr" => "address and port",
        "Ratio" => "number, 0.001 to 1000",
        "Vec<u32>" => "list of whole numbers",
        "Vec<PathBuf>" => "list of paths",
        "Vec<Network>" => "list of networks",
        "Vec<String>" => "list of texts",
        "u8" | "u32" | "u64" | "usize" => "whole number",
        _ => return None,
    })
}

/// Values of an empty file, plus the tables that an empty file does not have.
fn defaults() -> Value {
    let text = "[tcp]\nlisten = '0.0.0.0:7443'\n[[sizing]]\nmin_cores = 1\nmax_cores = 254\n";
    let config = Config::parse(text, Path::new("test.toml")).unwrap();
    let mut value = serde_json::to_value(config).unwrap();
    value["sizing"] = value["sizing"][0].take();
    value
}

/// `table.key`, or `key` outside of tables.
fn full(table: &str, key: &str) -> String {
    if table.is_empty() {
        key.to_owned()
    } else {
        format!("{table}.{key}")
    }
}

/// Text of the comment without its default. Asserts that the default is the code's.
fn meaning(key: &str, field: &Field, default: &Value) -> String {
    let (text, said) = match field.text.split_once("Default ") {
        Some((text, said)) if !default.is_null() => (text, said),
        _ => return field.text.clone(),
    };
    let plain = |text: &str| text.replace(['`', ',', '"'], "");
    let value = plain(&default.to_string());
    let value = value.strip_suffix(".0").unwrap_or(&value);
    let said = plain(said);
    let word = said.split([' ', ':']).next().unwrap().trim_end_matches('.');
    let word = word.strip_suffix(".0").unwrap_or(word);
    assert_eq!(
        word, value,
        "the comment on {key} names another default than the code has"
    );
    let more = said.split_once(": ").map_or("", |(_, more)| more);
    format!("{} {}", text.trim(), upper(more)).trim().to_owned()
}

fn page() -> String {
    let defaults = defaults();
    let mut page = INTRODUCTION.to_owned();
    for (table, heading, name) in TABLES {
        let (about, fields) = parsed(name);
        writeln!(page, "\n## {heading}").unwrap();
        if !table.is_empty() {
            let about = about.strip_prefix(&format!("`{}`: ", heading.split('`').nth(1).unwrap()));
            writeln!(page, "\n{}", upper(about.unwrap_or(&parsed(name).0))).unwrap();
        }
        writeln!(page, "\n| key | type | default | meaning |\n|---|---|---|---|").unwrap();
        for field in &fields {
            let Some(kind) = of_file(&field.rust) else {
                continue;
            };
            let key = full(table, &field.name);
            let default = if table.is_empty() {
                &defaults[&field.name]
            } else {
                &defaults[table][&field.name]
            };
            let shown = match default {
                _ if REQUIRED.contains(&key.as_str()) => "must be given".to_owned(),
                Value::Null => String::new(),
                default => format!("`{default}`"),
            };
            let meaning = upper(&meaning(&key, field, default)).replace('|', "\\|");
            assert!(!meaning.is_empty(), "{key} has no comment");
            writeln!(page, "| `{}` | {kind} | {shown} | {meaning} |", field.name).unwrap();
        }
    }
    page
}

fn upper(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

#[test]
fn page_of_the_book_has_every_key_with_its_default() {
    let wanted = page();
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        fs::write(PAGE, &wanted).unwrap();
    }
    let found = fs::read_to_string(PAGE).unwrap_or_default();
    assert!(
        found == wanted,
        "docs/src/configuration.md is of other code: UPDATE_REFERENCE=1 cargo nextest run -p vmmd reference"
    );
}

#[test]
fn every_type_of_a_key_is_a_table_or_has_a_name() {
    for (_, _, name) in TABLES {
        for field in parsed(name).1 {
            let inner = field
                .rust
                .replace("Option<", "")
                .replace("Vec<", "")
                .replace("sizing::", "");
            let table = TABLES.iter().any(|table| table.2 == inner.trim_end_matches('>'));
            assert!(
                table || of_file(&field.rust).is_some(),
                "{}: {}",
                field.name,
                field.rust
            );
        }
    }
}

/// The file that the package installs, with all that is commented out in it put in.
#[test]
fn packaged_file_has_every_key_with_its_default() {
    let is_setting = |line: &&str| {
        line.starts_with('[') || line.split_once(" = ").is_some_and(|(key, _)| !key.contains(' '))
    };
    let lines = PACKAGED
        .lines()
        .map(|line| line.strip_prefix('#').unwrap_or(line));
    let text: Vec<_> = lines.filter(is_setting).collect();
    let text = text.join("\n");
    Config::parse(&text, Path::new("config.toml")).unwrap();
    let packaged: toml::Table = toml::from_str(&text).unwrap();
    let (defaults, mut missing) = (defaults(), BTreeSet::new());
    for (table, _, name) in TABLES {
        let there = match packaged.get(table) {
            Some(toml::Value::Array(tables)) => tables[0].as_table(),
            Some(there) => there.as_table(),
            None => Some(&packaged),
        };
        for field in parsed(name)
            .1
            .iter()
            .filter(|field| of_file(&field.rust).is_some())
        {
            let Some(value) = there.and_then(|there| there.get(&field.name)) else {
                missing.insert(full(table, &field.name));
                continue;
            };
            let default = if table.is_empty() {
                &defaults[&field.name]
            } else {
                &defaults[table][&field.name]
            };
            // A repeatable table and a key without a default have an example instead.
            if table != "sizing" && !default.is_null() {
                assert_eq!(
                    serde_json::to_value(value).unwrap(),
                    *default,
                    "{}",
                    full(table, &field.name)
                );
            }
        }
    }
    assert!(missing.is_empty(), "not in package/config.toml: {missing:?}");
}
