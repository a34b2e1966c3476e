//! Commands that messages, help and the book advise: each must exist.

use std::{collections::BTreeSet, fs, path::Path};

use clap::CommandFactory as _;

use crate::{
    args::{Cli, canonical},
    manifest::schema,
};

/// All files below a folder whose names end so.
fn files(folder: &Path, ending: &str, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, ending, found);
        } else if path.to_str().unwrap().ends_with(ending) {
            found.push((path.display().to_string(), fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Returns the commands in a source file's strings: text in backquotes that starts with `vmmctl`.
fn advised(source: &str) -> Vec<String> {
    // A string may continue on the next line.
    let mut text = String::new();
    let mut goes_on = false;
    for line in source.lines() {
        let line = if goes_on { line.trim_start() } else { line };
        let begun = line.strip_suffix('\\');
        goes_on = begun.is_some();
        text += begun.unwrap_or(line);
        if !goes_on {
            text.push('\n');
        }
    }
    let parts = text.split('`').skip(1);
    let commands = parts.filter(|part| part.starts_with("vmmctl ") && !part.contains('\n'));
    commands.map(str::to_owned).collect()
}

/// The commands in the blocks of a page, or in the examples of a help text.
fn typed(text: &str) -> Vec<String> {
    let mut inside = text.contains("Examples:");
    let (mut commands, mut open) = (Vec::new(), String::new());
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("```") {
            inside = !inside;
        } else if let Some(begun) = line.strip_suffix('\\').filter(|_| inside) {
            open += begun;
        } else if inside {
            commands.extend(in_line(&(std::mem::take(&mut open) + line)));
        }
    }
    commands
}

/// The commands of vmmctl in a line of a shell: behind a prompt, another command, or a program that runs them.
fn in_line(line: &str) -> Vec<String> {
    let begins = line.match_indices("vmmctl ").filter(|(at, _)| {
        let before = line[..*at].trim_end();
        let ends = ["#", "$", "|", "&&", "ssh other"];
        before.is_empty() || ends.iter().any(|end| before.ends_with(end)) || before.contains("# timeout ")
    });
    begins.map(|(at, _)| line[at..].to_owned()).collect()
}

/// Splits a command into words as a shell does, up to the first shell operator or comment.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in command.chars() {
        match (quote, letter) {
            (None, ' ') => words.extend(word.take()),
            (None, '#' | '<' | '>' | '|' | ';' | '&') if word.is_none() => break,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (Some(open), letter) if open == letter => quote = None,
            (_, letter) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// Replaces the placeholders of a message.
fn filled(command: &str) -> String {
    let mut text = String::new();
    let mut rest = command;
    while let Some((before, after)) = rest.split_once('{') {
        text += before;
        let end = after.find('}');
        match end.filter(|end| {
            after[..*end]
                .chars()
                .all(|letter| letter.is_alphanumeric() || "_.".contains(letter))
        }) {
            Some(end) => {
                text += "x";
                rest = &after[end + 1..];
            }
            None => {
                text.push('{');
                rest = after;
            }
        }
    }
    text + rest
}

/// Whether a command is whole, or names a verb or an option, as in "`vmmctl resume` tries again".
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Whole,
    Named,
}

fn problem(command: &str, form: Form) -> Option<String> {
    let command = filled(command);
    // Where a choice is shown, or something is left out.
    let is_choice =
        command.contains(['|', '…', '[']) && !command.contains("--set") && !command.contains("-o ");
    if form == Form::Named && is_choice {
        return None;
    }
    match Cli::command().try_get_matches_from(canonical(words(&command).into_iter().map(Into::into))) {
        Ok(_) => None,
        Err(error) if !error.use_stderr() => None,
        Err(error)
            if form == Form::Named && error.kind() == clap::error::ErrorKind::MissingRequiredArgument =>
        {
            None
        }
        Err(error) if form == Form::Named && error.to_string().contains("but none was supplied") => None,
        Err(error) => Some(format!(
            "`{command}`: {}",
            error.to_string().lines().next().unwrap_or_default()
        )),
    }
}

#[test]
fn advised_commands_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut sources = Vec::new();
    for folder in ["cli/src", "vmmd/src"] {
        files(&root.join(folder), ".rs", &mut sources);
    }
    let mut pages = Vec::new();
    files(&root.join("docs/src"), ".md", &mut pages);
    let readme = root.join("README.md");
    pages.push(("README.md".into(), fs::read_to_string(readme).unwrap()));

    let of_sources = sources.iter().filter(|(file, _)| !file.ends_with("hints.rs"));
    let named = |text: &str| advised(text).into_iter().map(|each| (Form::Named, each));
    let whole = |text: &str| typed(text).into_iter().map(|each| (Form::Whole, each));
    let of_sources = of_sources.flat_map(|(file, text)| named(text).map(move |each| (file, each)));
    let of_pages = pages.iter().flat_map(|(file, text)| {
        let all = whole(text).chain(named(text));
        all.map(move |each| (file, each))
    });
    let mut help = Vec::new();
    all_help(&mut Cli::command(), &mut help);
    let of_help = help
        .iter()
        .flat_map(|(verb, text)| whole(text).map(move |each| (verb, each)));

    let found: Vec<_> = of_sources.chain(of_pages).chain(of_help).collect();
    for form in [Form::Whole, Form::Named] {
        let count = found.iter().filter(|(_, (of, _))| *of == form).count();
        assert!(count > 100, "only {count} commands were found");
    }
    let wrong = found
        .into_iter()
        .filter_map(|(place, (form, command))| Some(format!("{place}: {}", problem(&command, form)?)));
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The text after the help of each verb.
fn all_help(command: &mut clap::Command, found: &mut Vec<(String, String)>) {
    if let Some(text) = command.get_after_help() {
        found.push((command.get_name().to_owned(), text.to_string()));
    }
    command
        .get_subcommands_mut()
        .for_each(|verb| all_help(verb, found));
}

#[test]
fn command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn missing_command_is_found() {
    for wrong in ["vmmctl operations", "vmmctl start x --fast"] {
        assert!(problem(wrong, Form::Named).is_some(), "{wrong}");
    }
    assert!(problem("vmmctl stop {name} --grace 5s  # politely", Form::Named).is_none());
    assert!(problem("vmmctl snapshot create", Form::Named).is_none());
    assert!(problem("vmmctl snapshot create one", Form::Whole).is_some());
    let page = "vmmctl no\n```console\n# vmmctl a \\\n  b\nvmmctl c | vmmctl d\nx/vmmctl e\n```\nvmmctl no\n";
    assert_eq!(typed(page), ["vmmctl a b", "vmmctl c | vmmctl d", "vmmctl d"]);
    assert_eq!(
        advised("a(\"see `vmmctl get vm` \\\n   and `vmmctl \\\n  node`\")"),
        ["vmmctl get vm", "vmmctl node"]
    );
}

/// Adds the names of all fields of a message and of the messages in it, as a manifest has them.
fn fields_of(message: &str, found: &mut BTreeSet<String>) {
    for field in &schema::message(message).expect("a message").fields {
        if found.insert(field.json_name.to_owned())
            && let schema::Kind::Message(name) = &field.kind
            && schema::message(name).is_some()
        {
            fields_of(name, found);
        }
    }
}

#[test]
fn manifest_fields_are_in_the_book() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = fs::read_to_string(root.join("docs/src/manifest.md")).unwrap();
    let mut fields = BTreeSet::new();
    fields_of(".vmmd.v1.VmSpec", &mut fields);
    assert!(fields.len() > 40, "{fields:?}");
    let missing = fields.iter().filter(|field| {
        let named = [
            format!("`{field}`"),
            format!(".{field}`"),
            format!(".{field}[]`"),
            format!(".{field}."),
        ];
        !named.iter().any(|name| page.contains(name))
    });
    assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
}

/// Collects the paths of all visible commands, such as `node cordon`.
fn commands(of: &clap::Command, below: &[String], found: &mut Vec<Vec<String>>) {
    for command in of.get_subcommands().filter(|command| !command.is_hide_set()) {
        let path = [below, &[command.get_name().to_owned()]].concat();
        if command.get_name() != "help" {
            commands(command, &path, found);
            found.push(path);
        }
    }
}

#[test]
fn commands_are_in_the_table_of_the_book() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = fs::read_to_string(root.join("docs/src/vmmctl.md")).unwrap();
    let (_, table) = page.split_once("| command | does |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    // The words of each row's first cell, in which a choice is written with `\|`.
    let cells: Vec<String> = rows
        .map(|row| {
            row.replace("\\|", " ")
                .split('|')
                .nth(1)
                .unwrap_or_default()
                .to_owned()
        })
        .collect();
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
    let rows: Vec<Vec<&str>> = cells
        .iter()
        .map(|cell| cell.split(|letter| !is_part(letter)).collect())
        .collect();
    let mut found = Vec::new();
    commands(&Cli::command(), &[], &mut found);
    assert!(found.len() > 40, "{found:?}");
    found.retain(|path| {
        let in_row = |row: &Vec<&str>| path.iter().all(|word| row.contains(&word.as_str()));
        !rows.iter().any(in_row)
    });
    assert_eq!(found, Vec::<Vec<String>>::new());
}
