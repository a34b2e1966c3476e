//! Shares of a VM from the command line: the value of `create share` and `--share`.

use vmmd_api::v1::{self, ShareCache};

use super::keys::{self, number};
use crate::{
    args::value::{Words, word},
    failure::Result,
};

const KEYS: &str = "name=, tag=, ro, cache=, writeback, xattr, acl, uid-map=, gid-map=, open-files=, mount=";

/// A share from `PATH[,key=value…]`; without a name it has the name of the directory.
pub fn from_text(text: &str) -> Result<v1::ShareSpec> {
    let (path, rest) = text.split_once(',').unwrap_or((text, ""));
    if !path.starts_with('/') {
        return Err(keys::usage(format!(
            "{text}: must begin with the absolute path of the directory on the node"
        )));
    }
    let name = path.trim_end_matches('/').rsplit('/').next();
    let mut share = v1::ShareSpec {
        name: name.unwrap_or_default().to_owned(),
        path: path.to_owned(),
        ..v1::ShareSpec::default()
    };
    if !rest.is_empty() {
        keys::each(path, rest, KEYS, |key, value| set(&mut share, key, value))?;
    }
    Ok(share)
}

/// Sets the field of a key; returns whether the key is known.
fn set(share: &mut v1::ShareSpec, key: &str, value: Option<&str>) -> Result<bool, String> {
    const CACHES: Words<ShareCache> = &[
        ("auto", ShareCache::Auto, ""),
        ("always", ShareCache::Always, ""),
        ("never", ShareCache::Never, ""),
    ];
    match (key, value) {
        ("ro", None) => share.read_only = true,
        ("writeback", None) => share.writeback = true,
        ("xattr", None) => share.xattr = true,
        ("acl", None) => share.posix_acl = true,
        ("name", Some(value)) => value.clone_into(&mut share.name),
        ("tag", Some(value)) => value.clone_into(&mut share.tag),
        ("cache", Some(value)) => share.set_cache(word(CACHES, value)?),
        ("uid-map", Some(value)) => share.uid_map = ranges(value)?,
        ("gid-map", Some(value)) => share.gid_map = ranges(value)?,
        ("mount", Some(value)) => value.clone_into(&mut share.mount),
        ("open-files", Some(value)) => share.max_open_files = number(value)?,
        _ => return Ok(false),
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
    fn share_is_read_from_a_path_and_keys() {
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
    fn wrong_key_or_value_is_named() {
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
