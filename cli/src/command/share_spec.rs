//! Shares of a VM from the command line: the text of `share add`.

use vmmd_api::v1::{self, ShareCache};

use super::disk_spec::{number, usage};
use crate::failure::Result;

const KEYS: &str = "name=, tag=, ro, cache=, writeback, xattr, acl, uid-map=, gid-map=, open-files=, mount=";

/// A share from `PATH[,key=value…]`; without a name it is called as the directory.
pub fn from_text(text: &str) -> Result<v1::ShareSpec> {
    let mut parts = text.split(',');
    let path = parts.next().unwrap_or_default();
    let mut share = v1::ShareSpec {
        name: path
            .trim_end_matches('/')
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .to_owned(),
        path: path.to_owned(),
        ..v1::ShareSpec::default()
    };
    if !path.starts_with('/') {
        return Err(usage(format!(
            "{text}: begins with the absolute path of the directory on the node"
        )));
    }
    for part in parts {
        match set(&mut share, part) {
            Ok(true) => {}
            Ok(false) => return Err(usage(format!("{text}: \"{part}\" is none of {KEYS}"))),
            Err(problem) => return Err(usage(format!("{text}: {part}: {problem}"))),
        }
    }
    Ok(share)
}

/// Sets the field that the key of `part` names; whether there is one.
fn set(share: &mut v1::ShareSpec, part: &str) -> Result<bool, String> {
    match part.split_once('=') {
        None => match part {
            "ro" => share.read_only = true,
            "writeback" => share.writeback = true,
            "xattr" => share.xattr = true,
            "acl" => share.posix_acl = true,
            _ => return Ok(false),
        },
        Some(("name", value)) => value.clone_into(&mut share.name),
        Some(("tag", value)) => value.clone_into(&mut share.tag),
        Some(("cache", value)) => share.set_cache(match value {
            "auto" => ShareCache::Auto,
            "always" => ShareCache::Always,
            "never" => ShareCache::Never,
            _ => return Err("must be auto, always or never".to_owned()),
        }),
        Some(("uid-map", value)) => share.uid_map = ranges(value)?,
        Some(("gid-map", value)) => share.gid_map = ranges(value)?,
        Some(("mount", value)) => value.clone_into(&mut share.mount),
        Some(("open-files", value)) => share.max_open_files = number(value)?,
        Some(_) => return Ok(false),
    }
    Ok(true)
}

fn ranges(text: &str) -> Result<Vec<v1::IdRange>, String> {
    let range = |text: &str| {
        let mut numbers = text.split(':').map(number::<u32>);
        match (numbers.next(), numbers.next(), numbers.next(), numbers.next()) {
            (Some(guest), Some(node), Some(count), None) => Ok(v1::IdRange {
                guest: guest?,
                node: node?,
                count: count?,
            }),
            _ => Err("must be GUEST:NODE:COUNT, as in 0:100000:65536".to_owned()),
        }
    };
    text.split('+').map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_read_from_a_path_and_keys() {
        let plain = from_text("/srv/data/").unwrap();
        assert_eq!((plain.name.as_str(), plain.path.as_str()), ("data", "/srv/data/"));
        let text = "/srv/x,name=models,tag=m,ro,cache=always,writeback,xattr,acl,uid-map=0:1000:1+1:2000:10,gid-map=0:7:1,open-files=500,mount=/data";
        let share = from_text(text).unwrap();
        assert_eq!((share.name.as_str(), share.tag.as_str()), ("models", "m"));
        assert!(share.read_only && share.writeback && share.xattr && share.posix_acl);
        assert_eq!((share.cache(), share.max_open_files), (ShareCache::Always, 500));
        assert_eq!(share.mount, "/data");
        let ranges: Vec<_> = share
            .uid_map
            .iter()
            .map(|range| (range.guest, range.node, range.count))
            .collect();
        assert_eq!(ranges, [(0, 1000, 1), (1, 2000, 10)]);
        assert_eq!(share.gid_map.len(), 1);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (text, expected) in [
            ("srv", "absolute path"),
            ("/srv,speed=9", "speed=9"),
            ("/srv,fast", "fast"),
            ("/srv,cache=some", "auto, always or never"),
            ("/srv,uid-map=0:1", "GUEST:NODE:COUNT"),
            ("/srv,uid-map=0:1:x", "whole number"),
        ] {
            let message = from_text(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
