//! Commands of other tools, and the commands of vmmctl for the same purpose.

use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

/// Commands of docker, kubectl, virsh, multipass and lxc, with the command of vmmctl.
const VERBS: [(&[&str], &str); 20] = [
    (&["ls", "ps", "vms"], "vmmctl get"),
    (&["rm", "del", "remove", "undefine"], "vmmctl delete"),
    (&["destroy", "kill", "terminate"], "vmmctl stop --force"),
    (&["shutdown", "poweroff", "halt"], "vmmctl stop"),
    (&["reboot"], "vmmctl restart"),
    (&["suspend", "freeze"], "vmmctl pause"),
    (&["unpause", "unfreeze"], "vmmctl resume"),
    (
        &["show", "info", "inspect", "dominfo", "status"],
        "vmmctl describe",
    ),
    (&["launch", "boot"], "vmmctl run"),
    (&["define", "init", "new", "add"], "vmmctl create"),
    (&["exec", "shell", "enter"], "vmmctl ssh"),
    (&["cp", "push", "transfer"], "vmmctl scp"),
    (&["pull", "import", "find"], "vmmctl image import"),
    (&["images"], "vmmctl image ls"),
    (&["networks", "net-list"], "vmmctl network ls"),
    (&["snapshots"], "vmmctl snapshot ls"),
    (&["disks", "volumes"], "vmmctl get disk"),
    (
        &["nodes", "nodeinfo", "cordon", "drain", "uncordon"],
        "vmmctl node",
    ),
    (&["scale", "setvcpus", "setmem"], "vmmctl patch"),
    (&["log", "attach-console", "connect"], "vmmctl console"),
];

/// Kinds of objects of other tools.
const KINDS: [&str; 8] = [
    "pods",
    "vmis",
    "domains",
    "machines",
    "instances",
    "containers",
    "servers",
    "services",
];

/// The hint for a kind of objects of another tool.
pub fn kind(word: &str) -> Option<&'static str> {
    KINDS.contains(&word).then_some(
        "`vmmctl get` lists VMs; the other kinds are disk, image, network, snapshot, operation, event, node and all",
    )
}

/// Longest distance between a typed command and a tip.
const NEAR: usize = 2;

/// The command of vmmctl for a command of another tool.
pub fn here(word: &str) -> Option<&'static str> {
    let known = VERBS.iter().find(|(words, _)| words.contains(&word));
    known.map(|(_, command)| *command)
}

/// Replaces the tips of an error of the command line: clap suggests every word of similar letters.
pub fn improved(mut error: Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand).cloned() else {
                return error;
            };
            let near = |tip: &String| strsim::damerau_levenshtein(tip, &word) <= NEAR;
            let tips = match (here(&word), error.remove(ContextKind::SuggestedSubcommand)) {
                (Some(command), _) => vec![command.trim_start_matches("vmmctl ").to_owned()],
                (None, Some(ContextValue::Strings(tips))) => tips.into_iter().filter(near).collect(),
                (None, Some(ContextValue::String(tip))) => Some(tip).filter(near).into_iter().collect(),
                _ => Vec::new(),
            };
            if !tips.is_empty() {
                error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(tips));
            }
        }
        // clap suggests to pass every unknown option as a name.
        ErrorKind::UnknownArgument => {
            if let Some(ContextValue::StyledStrs(tips)) = error.remove(ContextKind::Suggested) {
                let helps = |tip: &clap::builder::StyledStr| !tip.to_string().contains("as a value");
                let tips: Vec<_> = tips.into_iter().filter(helps).collect();
                if !tips.is_empty() {
                    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
                }
            }
        }
        _ => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Cli;

    /// The error of a command line.
    fn said(words: &str) -> String {
        let words = ["vmmctl"].into_iter().chain(words.split(' '));
        improved(Cli::try_parse_from(words).unwrap_err()).to_string()
    }

    #[test]
    fn word_of_another_tool_names_the_command_here() {
        for (words, tip) in [
            ("launch debian13", "'run'"),
            ("info web", "'describe'"),
            ("rm web", "'delete'"),
            ("exec web", "'ssh'"),
            ("destroy web", "'stop --force'"),
            ("sotp web", "'stop'"),
        ] {
            let said = said(words);
            assert!(
                said.contains("unrecognized subcommand") && said.contains(tip),
                "{said}"
            );
        }
        assert!(!said("dominate web").contains("tip"), "{}", said("dominate web"));
    }

    #[test]
    fn unknown_option_is_not_taken_for_a_value() {
        for words in ["stop web --dry-run", "run debian13 --dry-run"] {
            let said = said(words);
            assert!(!said.contains("as a value"), "{said}");
        }
        assert!(said("run debian13 --mem 1Gi").contains("--memory"));
    }

    #[test]
    fn every_command_of_the_table_exists() {
        use clap::CommandFactory as _;
        for (words, command) in VERBS {
            let verb = command.split(' ').nth(1).unwrap();
            let all = Cli::command();
            assert!(all.find_subcommand(verb).is_some(), "{command}");
            let taken = words.iter().find(|word| all.find_subcommand(word).is_some());
            assert_eq!(taken, None, "it is a command here");
        }
    }
}
