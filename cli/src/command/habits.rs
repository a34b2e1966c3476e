//! Commands of other tools, and the commands of vmmctl for the same purpose.

use clap::{
    CommandFactory as _,
    builder::StyledStr,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};

use crate::args::Cli;
#[cfg(test)]
use crate::args::canonical;

/// Commands of docker, kubectl, virsh, multipass and lxc, with the command of vmmctl.
const VERBS: [(&[&str], &str); 23] = [
    (&["ps", "vms"], "vmmctl get vm"),
    (&["del", "remove", "undefine"], "vmmctl delete vm"),
    (&["destroy", "kill", "terminate"], "vmmctl stop --force"),
    (&["shutdown", "poweroff", "halt"], "vmmctl stop"),
    (&["reboot"], "vmmctl restart"),
    (&["suspend", "freeze"], "vmmctl pause"),
    (&["unpause", "unfreeze"], "vmmctl resume"),
    (
        &["show", "info", "inspect", "dominfo", "status"],
        "vmmctl describe vm",
    ),
    (&["launch", "boot"], "vmmctl run"),
    (&["define", "init", "new", "add"], "vmmctl create vm"),
    (&["enter"], "vmmctl shell"),
    (&["push", "transfer"], "vmmctl scp"),
    (&["pull", "import", "find"], "vmmctl create image"),
    (&["images"], "vmmctl get image"),
    (&["networks", "network", "net-list"], "vmmctl get network"),
    (&["nics", "nic"], "vmmctl get nic"),
    (&["shares", "share"], "vmmctl get share"),
    (&["resize"], "vmmctl update disk"),
    (&["snapshots"], "vmmctl get snapshot"),
    (&["disks", "disk", "volumes"], "vmmctl get disk"),
    (
        &["nodes", "nodeinfo", "cordon", "drain", "uncordon"],
        "vmmctl node",
    ),
    (&["scale", "setvcpus", "setmem"], "vmmctl update vm"),
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
        "the kinds of `vmmctl get` are vm, disk, image, network, snapshot, nic, share, operation, event, node and all",
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
        ErrorKind::MissingRequiredArgument => add_example(&mut error),
        // clap suggests to pass every unknown option as a name.
        ErrorKind::UnknownArgument => {
            if !wrong_arguments(&error).iter().any(|word| word.starts_with('-')) {
                add_example(&mut error);
                return error;
            }
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

/// The arguments that an error is about.
fn wrong_arguments(error: &Error) -> Vec<String> {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) => vec![word.clone()],
        Some(ContextValue::Strings(words)) => words.clone(),
        _ => Vec::new(),
    }
}

/// Adds an example of the command as a tip, one with the missing options if there is one.
fn add_example(error: &mut Error) {
    let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage) else {
        return;
    };
    let examples = examples(&usage.to_string());
    let missing = wrong_arguments(error);
    let has_all = |example: &&String| {
        let options = missing.iter().filter_map(|word| word.split([' ', '=']).next());
        options
            .filter(|word| word.starts_with('-'))
            .all(|option| example.contains(option))
    };
    if let Some(example) = examples.iter().find(has_all).or_else(|| examples.first()) {
        let tip = StyledStr::from(format!("for example `{example}`"));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
}

/// The examples in the help of the command whose usage this is: `Usage: vmmctl create snapshot …`.
fn examples(usage: &str) -> Vec<String> {
    let root = Cli::command();
    let mut command = &root;
    for word in usage
        .split_whitespace()
        .skip_while(|word| *word != "vmmctl")
        .skip(1)
    {
        match command.find_subcommand(word) {
            Some(found) => command = found,
            None => break,
        }
    }
    let help = command
        .get_after_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    let lines = help.lines().filter_map(|line| line.strip_prefix("  vmmctl "));
    // A line that continues is no whole command.
    let whole = lines.filter(|line| !line.ends_with('\\'));
    let without_comment = whole.filter_map(|line| line.split(" #").next());
    without_comment
        .map(|line| format!("vmmctl {}", line.trim_end()))
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    /// The error of a command line.
    fn said(words: &str) -> String {
        let words = ["vmmctl"].into_iter().chain(words.split(' '));
        improved(Cli::try_parse_from(canonical(words.map(Into::into))).unwrap_err()).to_string()
    }

    #[test]
    fn word_of_another_tool_names_the_command_here() {
        for (words, tip) in [
            ("launch debian13", "'run'"),
            ("info web", "'describe vm'"),
            ("show web", "'describe vm'"),
            ("dominfo web", "'describe vm'"),
            ("enter web", "'shell'"),
            ("push a web:b", "'scp'"),
            ("scale web", "'update vm'"),
            ("ps", "'get vm'"),
            ("images", "'get image'"),
            ("pull debian", "'create image'"),
            ("remove web", "'delete vm'"),
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
    fn command_without_an_argument_shows_an_example() {
        for (words, example) in [
            ("snapshot create web", "`vmmctl create snapshot web-1 --vm web`"),
            (
                "snapshot create web web-1",
                "`vmmctl create snapshot web-1 --vm web`",
            ),
            (
                "snapshot create --vm web",
                "`vmmctl create snapshot web-1 --vm web`",
            ),
            (
                "network create lan",
                "`vmmctl create network lan --cidr 10.80.0.0/24 --dns 10.0.0.53`",
            ),
            ("logs web --since 10m", "`vmmctl logs web --vmm --since 10m`"),
            ("clone web-1", "`vmmctl clone web-1 web-a web-b web-c`"),
            ("restore", "`vmmctl stop --force web && vmmctl restore web-1`"),
        ] {
            let said = said(words);
            assert!(
                said.contains(&format!("tip: for example {example}")),
                "{words}: {said}"
            );
        }
        // Commands without examples.
        let said = said("pause");
        assert!(!said.contains("for example"), "{said}");
    }

    #[test]
    fn usual_commands_exist() {
        for words in [
            "get images",
            "get networks",
            "get snapshots",
            "get nodes",
            "get events",
            "get all",
            "ls",
            "rm web",
            "get nics web",
            "get shares web",
            "describe image debian13",
            "describe networks lan",
            "create network lan --cidr 10.80.0.0/24",
            "create snapshot one --vm web",
            "create nic web bridge=br0",
            "update vm web --set spec.cpu.cores=2",
            "update network lan --dns node",
            "delete snapshot one two",
            "delete nic web eth1",
            "nic rm web eth1",
            "share delete web data",
            "network list",
            "network delete lan",
            "nic list web",
            "image ls",
            "image list",
            "image delete debian13",
            "snapshot list",
            "snapshot delete one",
            "logs web -n 5",
            "events --since 10m",
            "delete disk --all",
        ] {
            let words = ["vmmctl"].into_iter().chain(words.split(' '));
            Cli::try_parse_from(canonical(words.map(Into::into))).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    #[test]
    fn every_command_of_the_table_exists() {
        for (words, command) in VERBS {
            let verb = command.split(' ').nth(1).unwrap();
            let all = Cli::command();
            assert!(all.find_subcommand(verb).is_some(), "{command}");
            let taken = words.iter().find(|word| all.find_subcommand(word).is_some());
            assert_eq!(taken, None, "it is a command here");
        }
    }
}
