//! Short and earlier forms of commands. The parser knows one form, `VERB KIND NAME`.

use std::ffi::OsString;

use clap::CommandFactory as _;

use super::Cli;
use crate::contexts::OPTIONS;

/// Verbs that are for VMs when no kind follows.
const OF_VMS: [&str; 7] = ["get", "describe", "create", "update", "edit", "delete", "migrate"];

/// Returns the words of a command line in the form that the parser knows: `get web` becomes `get vm web`, `image ls` becomes
/// `get image`.
pub fn canonical(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<_> = words.into_iter().collect();
    let Some(first) = next_word(&words, 1) else {
        return words;
    };
    let text = |at: Option<usize>| at.and_then(|at| words.get(at)).and_then(|word| word.to_str());
    let second = next_word(&words, first + 1);
    let (verb, next) = (
        text(Some(first)).unwrap_or_default(),
        text(second).unwrap_or_default(),
    );
    let (new, replaces_both) = match (verb, next) {
        ("patch", _) => ("update vm", false),
        ("events", _) => ("get event", false),
        ("resize", "disk") => ("update disk", true),
        ("node", "label") => ("update node", true),
        ("node", "" | "-o" | "--output") => ("get node", false),
        ("node", option) if option.starts_with("-o") || option.starts_with("--output=") => {
            ("get node", false)
        }
        ("image", "import") => ("create image", true),
        ("media", "insert") => ("insert", true),
        ("media", "eject") => ("eject", true),
        ("image", verb) => (
            of_kind(verb, ["get image", "", "", "describe image", "delete image"]),
            true,
        ),
        ("network", verb) => {
            let forms = [
                "get network",
                "create network",
                "update network",
                "describe network",
                "delete network",
            ];
            (of_kind(verb, forms), true)
        }
        ("snapshot", verb) => {
            let forms = [
                "get snapshot",
                "create snapshot",
                "",
                "describe snapshot",
                "delete snapshot",
            ];
            (of_kind(verb, forms), true)
        }
        ("nic", verb) => (
            of_kind(verb, ["get nic", "create nic", "update nic", "", "delete nic"]),
            true,
        ),
        ("share", verb) => (
            of_kind(verb, ["get share", "create share", "", "", "delete share"]),
            true,
        ),
        _ => {
            if !has_kind(verb, next) {
                words.insert(first + 1, "vm".into());
            }
            return words;
        }
    };
    if !new.is_empty() {
        if let Some(second) = second.filter(|_| replaces_both) {
            words.remove(second);
        }
        words.splice(first..=first, new.split(' ').map(OsString::from));
    }
    words
}

/// The form for a verb after its kind; the forms are those to list, create, update, describe and delete.
fn of_kind(verb: &str, [list, create, update, describe, delete]: [&'static str; 5]) -> &'static str {
    match verb {
        "ls" | "list" | "get" => list,
        "create" | "add" | "attach" => create,
        "update" => update,
        "describe" => describe,
        "rm" | "delete" | "detach" => delete,
        _ => "",
    }
}

/// Whether a verb needs no kind, or `next` is one or asks for help.
fn has_kind(verb: &str, next: &str) -> bool {
    let root = Cli::command();
    let Some(verb) = root.find_subcommand(verb) else {
        return true;
    };
    let is_help = ["-h", "--help", "help"].contains(&next);
    !OF_VMS.contains(&verb.get_name()) || is_help || verb.find_subcommand(next).is_some()
}

/// The position of the first word from `at` on that does not select the daemon.
fn next_word(words: &[OsString], mut at: usize) -> Option<usize> {
    while let Some(word) = words.get(at) {
        let word = word.to_string_lossy();
        match word.split_once('=') {
            None if OPTIONS.contains(&&*word) => at += 2,
            Some((option, _)) if OPTIONS.contains(&option) => at += 1,
            _ => return Some(at),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("get", "get vm")]
    #[case("ls web -o wide", "ls vm web -o wide")]
    #[case("delete -f a.yaml", "delete vm -f a.yaml")]
    #[case("get --socket /s disks", "get --socket /s disks")]
    #[case("--context=a get --socket /s web", "--context=a get vm --socket /s web")]
    #[case("get --help", "get --help")]
    #[case("help get", "help get")]
    #[case("migrate web --to a:1", "migrate vm web --to a:1")]
    #[case("migrate cancel web", "migrate cancel web")]
    #[case("patch disk --set a=1", "update vm disk --set a=1")]
    #[case("resize disk data --size 1Gi", "update disk data --size 1Gi")]
    #[case("--key k network --ca c ls -w", "--key k get network --ca c -w")]
    #[case("network rm a b", "delete network a b")]
    #[case("image import a /a", "create image a /a")]
    #[case("image upload a /a", "image upload a /a")]
    #[case("snapshot import a", "snapshot import a")]
    #[case("nic attach web bridge=a", "create nic web bridge=a")]
    #[case("share rm web data", "delete share web data")]
    #[case("share describe web", "share describe web")]
    #[case("node", "get node")]
    #[case("node -ojson", "get node -ojson")]
    #[case("node drain", "node drain")]
    #[case("node --help", "node --help")]
    #[case("node label a=b", "update node a=b")]
    #[case("events -w", "get event -w")]
    #[case("start web", "start web")]
    #[case("nonsense", "nonsense")]
    fn earlier_form_becomes_verb_and_kind(#[case] given: &str, #[case] expected: &str) {
        let words = |text: &str| -> Vec<OsString> {
            ["vmmctl"]
                .into_iter()
                .chain(text.split(' '))
                .map(OsString::from)
                .collect()
        };
        assert_eq!(canonical(words(given)), words(expected));
    }
}
