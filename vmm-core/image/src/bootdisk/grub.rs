//! Boot entries of a grub.cfg. The GRUB language is not executed. Commands are read in the order of
//! the text, regardless of their conditions, which is right for the output of grub-mkconfig(8) and
//! of the distributions' own generators.

mod parser;

use std::collections::{BTreeMap, BTreeSet};

use parser::{Node, Piece, Word, parse};

use super::files::LONGEST_PATH;

/// Deepest nesting of menus and functions.
const DEEPEST: usize = 16;
/// Most entries and menus that are looked at.
const MOST_ITEMS: usize = 256;
/// Most variables, and the longest name and value of one, in bytes; a command line is at most as
/// long (`MAX_CMDLINE`). Each entry has a copy of the variables that are set at its position.
const MOST_VARIABLES: usize = 256;
const LONGEST_VALUE: usize = 2048;
/// Longest text that a command may become, in bytes.
pub const LONGEST_COMMAND: usize = 16 << 10;

/// Variable of the environment block: the entry to boot once (grub-reboot(8)).
pub const NEXT: &str = "next_entry";
/// The same of GRUB 1.98 and 1.99: the saved entry is for one start, and this one for those after it.
pub const PREVIOUS: &str = "prev_saved_entry";

/// Variable of Ubuntu's entries. It is for the boot screen alone, and a function sets it.
const HARMLESS: &str = "vt_handoff";

/// Variables.
pub type Variables = BTreeMap<String, String>;

/// Variables to which configurations may give a value that is not known here.
#[derive(Debug, Default)]
pub struct Unknown {
    names: BTreeSet<String>,
    /// A configuration loads variables from a file.
    any: bool,
}

impl Unknown {
    /// Adds those of a configuration.
    pub fn add(&mut self, text: &str) {
        self.add_nodes(&parse(text));
    }

    fn add_nodes(&mut self, nodes: &[Node]) {
        for node in nodes {
            let mut words = node.words.iter();
            let first = words.next();
            let assignment = match first.and_then(|word| text_of(word)) {
                Some("load_env") => {
                    let is_option = |text: &&str| text.starts_with("-f") || text.starts_with("--file");
                    let names_file = words
                        .clone()
                        .filter_map(|word| text_of(word))
                        .any(|text| is_option(&text));
                    // The environment block is read.
                    let is_block = words.any(
                        |word| matches!(word.last(), Some(Piece::Text(text)) if text.ends_with("grubenv")),
                    );
                    self.any |= names_file && !is_block;
                    None
                }
                Some("set") => words.next(),
                _ => first,
            };
            let name = assignment.and_then(|word| assigned(word));
            self.names
                .extend(name.filter(|name| *name != HARMLESS).map(str::to_owned));
            self.add_nodes(node.block.as_deref().unwrap_or_default());
        }
    }

    /// The first of these variables, which have no value here, that may have a value.
    pub fn first<'a>(&self, undefined: &'a [String]) -> Option<&'a str> {
        let is_unknown = |name: &&String| {
            let name = name.as_str();
            name != HARMLESS && (self.any || self.names.contains(name))
        };
        undefined.iter().find(is_unknown).map(String::as_str)
    }
}

/// The text at the start of a word.
fn text_of(word: &Word) -> Option<&str> {
    match word.first() {
        Some(Piece::Text(text)) => Some(text),
        _ => None,
    }
}

/// The variable that `name=value` sets, if the value is not empty.
fn assigned(word: &Word) -> Option<&str> {
    let (name, value) = text_of(word)?.split_once('=')?;
    (!value.is_empty() || word.len() > 1).then_some(name)
}

/// Where an entry's files are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Root {
    /// On the file system with the configuration.
    #[default]
    Here,
    /// On that with this UUID.
    Uuid(String),
    /// On that with this label.
    Label(String),
    /// On that which has this file.
    File(String),
    /// On the partition with this number.
    Partition(u32),
}

/// Something that can be booted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Title in the menu.
    pub title: String,
    /// Alternative name of the entry.
    pub id: String,
    /// Where its files are.
    pub root: Root,
    /// Path of the kernel.
    pub kernel: String,
    /// Paths of the initial RAM disks.
    pub initrds: Vec<String>,
    /// Command line.
    pub cmdline: String,
    /// Variables in the commands for kernel and initial RAM disks that have no value here.
    pub undefined: Vec<String>,
}

/// An entry of the menu, or a menu below it.
#[derive(Debug)]
struct Item {
    title: String,
    id: String,
    is_menu: bool,
    inner: Vec<Node>,
    variables: Variables,
    root: Root,
}

/// An entry that GRUB boots at the next start alone. GRUB notes that by a write to the environment block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Once {
    /// The variable of the environment block that has the note.
    pub variable: &'static str,
    /// The entry's number, title or ID.
    pub entry: String,
}

/// The menu of a configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct Menu {
    /// The default entry first, then the others from the top.
    pub entries: Vec<Entry>,
    /// The entry that GRUB boots instead of the default entry, at the next start alone.
    pub once: Option<Once>,
}

/// Reads the menu of a configuration. `variables` are the variables of the environment block.
pub fn menu(text: &str, variables: &Variables) -> Menu {
    let mut later = variables.clone();
    let once = take_once(&mut later);
    let (entries, _) = sorted(text, &later, None);
    let once = once.filter(|once| {
        let default = (once.variable == NEXT).then_some(once.entry.as_str());
        let (now, is_kernel) = sorted(text, variables, default);
        let boots = |entries: &[Entry]| {
            let first = entries.first().cloned();
            first.map(|first| (first.root, first.kernel, first.initrds, first.cmdline))
        };
        !is_kernel || boots(&now) != boots(&entries)
    });
    Menu { entries, once }
}

/// Changes the variables as GRUB does at the next start (the commands are in 00_header of grub-mkconfig); returns the entry of that start
/// alone.
pub fn take_once(variables: &mut Variables) -> Option<Once> {
    let mut take = |name| variables.remove(name).filter(|value| !value.is_empty());
    let (next, previous) = (take(NEXT), take(PREVIOUS));
    let saved = previous.and_then(|previous| variables.insert("saved_entry".to_owned(), previous));
    let once = |variable, entry| Once { variable, entry };
    next.map(|entry| once(NEXT, entry))
        .or_else(|| saved.map(|entry| once(PREVIOUS, entry)))
}

/// The entries with the default entry first, and whether that one boots a kernel. `default` replaces the configuration's default entry.
fn sorted(text: &str, variables: &Variables, default: Option<&str>) -> (Vec<Entry>, bool) {
    let nodes = parse(text);
    let mut state = State {
        variables: variables.clone(),
        root: Root::Here,
    };
    let mut left = MOST_ITEMS;
    let items = items(nodes, &mut state, &mut left);
    let own = state.variables.get("default").map_or("", String::as_str);
    let chosen = choose(&items, default.unwrap_or(own));
    let mut found = Vec::new();
    flatten(items, &mut found, 0, &mut left);
    let found: Vec<_> = found.iter().filter_map(entry).collect();
    let first = chosen.and_then(|(title, id)| {
        found
            .iter()
            .position(|entry| entry.title == title && entry.id == id)
    });
    let mut sorted = found;
    if let Some(chosen) = first {
        let chosen = sorted.remove(chosen);
        sorted.insert(0, chosen);
    }
    (sorted, first.is_some())
}

/// The variables of an environment block (grub-editenv(1)).
pub fn environment(text: &str) -> Variables {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once('='));
    let mut variables = Variables::new();
    for (name, value) in pairs {
        set(&mut variables, name, value);
    }
    variables
}

/// Sets a variable, unless there are too many or it is too long.
fn set(variables: &mut Variables, name: &str, value: &str) {
    let is_short = name.len() <= LONGEST_VALUE && value.len() <= LONGEST_VALUE;
    if is_short && (variables.len() < MOST_VARIABLES || variables.contains_key(name)) {
        variables.insert(name.to_owned(), value.to_owned());
    }
}

struct State {
    variables: Variables,
    root: Root,
}

/// Goes through the commands outside of entries; gives the menu, of which no more than `left` items.
fn items(nodes: Vec<Node>, state: &mut State, left: &mut usize) -> Vec<Item> {
    let mut found = Vec::new();
    for node in nodes {
        let words = expand(&node.words, &state.variables);
        let (Some(command), block) = (words.first(), node.block) else {
            continue;
        };
        let is_menu = command == "submenu";
        match block {
            Some(inner) if is_menu || command == "menuentry" => {
                let Some(fewer) = left.checked_sub(1) else {
                    break;
                };
                *left = fewer;
                found.push(Item {
                    title: words.get(1).cloned().unwrap_or_default(),
                    id: id(&node.words, &words),
                    is_menu,
                    inner,
                    variables: state.variables.clone(),
                    root: state.root.clone(),
                });
            }
            // A function, or a group of commands, whose effect depends on the caller.
            Some(_) => {}
            None => run(&words, state),
        }
    }
    found
}

/// The word behind `--id`, which grub-mkconfig hides in a variable.
fn id(written: &[Word], words: &[String]) -> String {
    let at = written.iter().zip(words).position(|(word, text)| {
        let hidden = matches!(word.as_slice(), [Piece::Variable(name)] if name == "menuentry_id_option");
        hidden || text == "--id"
    });
    let next = at.and_then(|at| words.get(at.saturating_add(1)));
    next.cloned().unwrap_or_default()
}

/// Records the variable or the root that a command sets.
fn run(words: &[String], state: &mut State) {
    let Some((command, arguments)) = words.split_first() else {
        return;
    };
    let assignment = match command.as_str() {
        "set" => arguments.first(),
        "search" | "search.fs_uuid" | "search.fs_label" | "search.file" => {
            if let Some(root) = search(command, arguments) {
                state.root = root;
            }
            return;
        }
        _ => Some(command),
    };
    let Some((name, value)) = assignment.and_then(|text| text.split_once('=')) else {
        return;
    };
    let is_name = |text: &str| {
        !text.is_empty()
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    // With a condition, one branch often sets the variable that the other branch clears.
    if is_name(name) && !value.is_empty() {
        if let ("root", Some(number)) = (name, partition(value)) {
            state.root = Root::Partition(number);
        }
        set(&mut state.variables, name, value);
    }
}

/// `hd0,gpt2` or `hd0,msdos1`: 2 or 1.
fn partition(device: &str) -> Option<u32> {
    let (_, part) = device.split_once(',')?;
    let digits = part.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    digits.parse().ok()
}

/// Which file system a search finds.
fn search(command: &str, arguments: &[String]) -> Option<Root> {
    let has = |short: &str, long: &str| arguments.iter().any(|word| word == short || word == long);
    let sets_other = arguments
        .iter()
        .any(|word| word.strip_prefix("--set=").is_some_and(|name| name != "root"));
    let plain: Vec<_> = arguments.iter().filter(|word| !word.starts_with('-')).collect();
    // `search.fs_uuid UUID root hints`, `search --fs-uuid --set=root UUID`, `search --set root --fs-uuid UUID`.
    let name = match command {
        "search" => plain.last(),
        _ => plain.first(),
    }?
    .to_string();
    if sets_other {
        return None;
    }
    match command {
        "search.fs_uuid" => Some(Root::Uuid(name)),
        "search.fs_label" => Some(Root::Label(name)),
        "search.file" => Some(Root::File(name)),
        _ if has("-u", "--fs-uuid") => Some(Root::Uuid(name)),
        _ if has("-l", "--label") => Some(Root::Label(name)),
        _ if has("-f", "--file") => Some(Root::File(name)),
        _ => None,
    }
}

/// Title and ID of the default entry, which `default` gives as a number, a title or an ID. Parent
/// menus precede the entry, separated by `>`.
fn choose(items: &[Item], default: &str) -> Option<(String, String)> {
    let (first, rest) = default.split_once('>').unwrap_or((default, ""));
    let first = first.trim();
    let by_number = first.parse::<usize>().ok().and_then(|number| items.get(number));
    let by_name = || items.iter().find(|item| item.id == first || item.title == first);
    let item = by_number.or_else(by_name).or_else(|| items.first())?;
    if !item.is_menu {
        return Some((item.title.clone(), item.id.clone()));
    }
    let mut left = MOST_ITEMS;
    choose(&inner(item, &mut left), rest)
}

fn inner(item: &Item, left: &mut usize) -> Vec<Item> {
    let mut state = State {
        variables: item.variables.clone(),
        root: item.root.clone(),
    };
    items(clone(&item.inner), &mut state, left)
}

fn clone(nodes: &[Node]) -> Vec<Node> {
    let piece = |piece: &Piece| match piece {
        Piece::Text(text) => Piece::Text(text.clone()),
        Piece::Variable(name) => Piece::Variable(name.clone()),
    };
    nodes
        .iter()
        .map(|node| Node {
            words: node
                .words
                .iter()
                .map(|word| word.iter().map(piece).collect())
                .collect(),
            block: node.block.as_deref().map(clone),
        })
        .collect()
}

/// The entries of all menus, from the top.
fn flatten(items: Vec<Item>, found: &mut Vec<Item>, depth: usize, left: &mut usize) {
    for item in items {
        if item.is_menu && depth < DEEPEST {
            flatten(inner(&item, left), found, depth.saturating_add(1), left);
        } else if !item.is_menu {
            found.push(item);
        }
    }
}

/// The kernel that an entry boots; `None` if the entry boots no kernel.
fn entry(item: &Item) -> Option<Entry> {
    let mut state = State {
        variables: item.variables.clone(),
        root: item.root.clone(),
    };
    let mut found: Option<Entry> = None;
    for node in &item.inner {
        let words = expand(&node.words, &state.variables);
        let undefined = || {
            let pieces = node.words.iter().flatten();
            let names = pieces.filter_map(|piece| match piece {
                Piece::Variable(name) if !state.variables.contains_key(name) => Some(name.clone()),
                _ => None,
            });
            names.take(MOST_VARIABLES).collect::<Vec<_>>()
        };
        let words: Vec<&String> = words.iter().filter(|word| !word.is_empty()).collect();
        match words.split_first() {
            Some((command, arguments)) if matches!(command.as_str(), "linux" | "linuxefi" | "linux16") => {
                // If conditions select between several kernels, one with an initial RAM disk takes
                // precedence.
                let Some((kernel, cmdline)) = arguments.split_first() else {
                    continue;
                };
                if found.as_ref().is_some_and(|found| !found.initrds.is_empty()) {
                    continue;
                }
                let cmdline: Vec<_> = cmdline.iter().map(|word| quoted(word)).collect();
                found = Some(Entry {
                    title: item.title.clone(),
                    id: item.id.clone(),
                    root: Root::Here,
                    kernel: without_device(kernel),
                    initrds: Vec::new(),
                    cmdline: cmdline.join(" "),
                    undefined: undefined(),
                });
            }
            Some((command, arguments)) if matches!(command.as_str(), "initrd" | "initrdefi" | "initrd16") => {
                if let Some(found) = found.as_mut().filter(|found| found.initrds.is_empty()) {
                    found.initrds = arguments.iter().map(|path| without_device(path)).collect();
                    found.undefined.extend(undefined());
                }
            }
            Some(_) => {
                let words: Vec<String> = words.into_iter().cloned().collect();
                run(&words, &mut state);
            }
            None => {}
        }
    }
    let found = found.filter(|found| found.kernel.len() <= LONGEST_PATH);
    found.map(|found| Entry {
        root: state.root,
        ..found
    })
}

/// An argument as GRUB writes it to the command line: in quotes if it has a space.
fn quoted(word: &str) -> String {
    let mut text = String::with_capacity(word.len());
    for letter in word.chars() {
        if matches!(letter, '\\' | '\'' | '"') {
            text.push('\\');
        }
        text.push(letter);
    }
    match word.contains(' ') {
        true => format!("\"{text}\""),
        false => text,
    }
}

/// `(hd0,gpt1)/boot/vmlinuz`: the path in it.
fn without_device(path: &str) -> String {
    match path.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
        Some((_, path)) => path.to_owned(),
        None => path.to_owned(),
    }
}

/// The words of a command with expanded variables; empty if they become too long.
fn expand(words: &[Word], variables: &Variables) -> Vec<String> {
    let mut length: usize = 0;
    let mut found = Vec::with_capacity(words.len());
    for word in words {
        let mut text = String::new();
        for piece in word {
            let more = match piece {
                Piece::Text(more) => more,
                Piece::Variable(name) => variables.get(name).map_or("", String::as_str),
            };
            length = length.saturating_add(more.len());
            if length > LONGEST_COMMAND {
                return Vec::new();
            }
            text.push_str(more);
        }
        found.push(text);
    }
    found
}

#[cfg(test)]
pub mod tests;
