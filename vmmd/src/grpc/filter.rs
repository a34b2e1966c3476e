//! Which VMs or other objects a list or a watch is about.

use std::collections::BTreeSet;

use prost::Message;
use sha2::{Digest, Sha256};
use vmmd_api::v1::{ObjectFilter, ObjectMetadata, Vm, VmFilter, VmPhase};
use vmmd_host::failure::Failure;
use vmmd_spec::Violations;

/// A filter. All that it says must hold.
#[derive(Clone, Debug)]
pub struct Filter {
    /// Kind of the objects; empty for VMs.
    kind: &'static str,
    labels: BTreeSet<Selector>,
    /// Any when empty.
    phases: BTreeSet<i32>,
    /// Any when there is none.
    names: Option<BTreeSet<String>>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Selector {
    Has(String),
    Is(String, String),
    IsNot(String, String),
}

impl Filter {
    /// Of a request; with `only`, if that is not empty, the VM of this name alone.
    pub fn new(filter: Option<&VmFilter>, only: &str) -> Result<Self, Failure> {
        let mut found = Violations::default();
        let given = filter.cloned().unwrap_or_default();
        let mut labels = BTreeSet::new();
        for (index, text) in given.labels.iter().enumerate() {
            match selector(text) {
                Some(selector) => drop(labels.insert(selector)),
                None => found.add(
                    format!("filter.labels[{index}]"),
                    "must be \"key\", \"key=value\" or \"key!=value\"",
                ),
            }
        }
        for (index, phase) in given.phases.iter().enumerate() {
            if VmPhase::try_from(*phase).unwrap_or_default() == VmPhase::Unspecified {
                found.add(format!("filter.phases[{index}]"), "is no phase of a VM");
            }
        }
        let named: BTreeSet<_> = given.names.into_iter().collect();
        let names = match (named.is_empty(), only.is_empty()) {
            (true, true) => None,
            (false, true) => Some(named),
            (true, false) => Some([only.to_owned()].into()),
            (false, false) => Some(named.into_iter().filter(|name| name == only).collect()),
        };
        Ok(found.or(Self {
            kind: "",
            labels,
            phases: given.phases.into_iter().collect(),
            names,
        })?)
    }

    /// Filter of a request about objects of a kind other than VMs.
    pub fn of_objects(kind: &'static str, filter: Option<&ObjectFilter>) -> Result<Self, Failure> {
        let given = filter.cloned().unwrap_or_default();
        let filter = VmFilter {
            labels: given.labels,
            names: given.names,
            ..VmFilter::default()
        };
        let filter = Self::new(Some(&filter), "")?;
        Ok(Self { kind, ..filter })
    }

    /// Whether a VM is one of them.
    pub fn matches(&self, vm: &Vm) -> bool {
        let phase = vm.status.as_ref().map_or(0, |status| status.phase);
        (self.phases.is_empty() || self.phases.contains(&phase)) && self.matches_object(vm.metadata.as_ref())
    }

    /// Whether an object with this metadata matches, in any phase.
    pub fn matches_object(&self, metadata: Option<&ObjectMetadata>) -> bool {
        let label = |key: &str| metadata.and_then(|metadata| metadata.labels.get(key));
        self.may_match_object(metadata)
            && self.labels.iter().all(|selector| match selector {
                Selector::Has(key) => label(key).is_some(),
                Selector::Is(key, value) => label(key) == Some(value),
                Selector::IsNot(key, value) => label(key) != Some(value),
            })
    }

    /// Whether an object with this metadata may have been one of them at some time: its name never changes, all else does.
    pub fn may_match_object(&self, metadata: Option<&ObjectMetadata>) -> bool {
        let name = metadata.map_or("", |metadata| &metadata.name);
        self.names.as_ref().is_none_or(|names| names.contains(name))
    }

    /// The same for filters of one kind of objects that say the same.
    pub fn hash(&self) -> u64 {
        let labels = self.labels.iter().map(|selector| match selector {
            Selector::Has(key) => key.clone(),
            Selector::Is(key, value) => format!("{key}={value}"),
            Selector::IsNot(key, value) => format!("{key}!={value}"),
        });
        let canonical = VmFilter {
            labels: labels.collect(),
            phases: self.phases.iter().copied().collect(),
            names: self.names.iter().flatten().cloned().collect(),
        };
        let nobody = self.names.as_ref().is_some_and(BTreeSet::is_empty);
        let digest = Sha256::new_with_prefix([u8::from(nobody)])
            .chain_update(canonical.encode_to_vec())
            .chain_update(self.kind)
            .finalize();
        let first = digest.first_chunk::<8>().copied();
        u64::from_be_bytes(first.unwrap_or_default())
    }
}

fn selector(text: &str) -> Option<Selector> {
    let selector = match (text.split_once("!="), text.split_once('=')) {
        (Some((key, value)), _) if !key.contains('=') => Selector::IsNot(key.to_owned(), value.to_owned()),
        (_, Some((key, value))) => Selector::Is(key.to_owned(), value.to_owned()),
        (_, None) => Selector::Has(text.to_owned()),
    };
    let (Selector::Has(key) | Selector::Is(key, _) | Selector::IsNot(key, _)) = &selector;
    (!key.is_empty()).then_some(selector)
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1::{ObjectMetadata, VmStatus};

    use super::*;

    fn filter(labels: &[&str], phases: &[VmPhase], names: &[&str], only: &str) -> Filter {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let filter = VmFilter {
            labels: owned(labels),
            phases: phases.iter().map(|phase| (*phase).into()).collect(),
            names: owned(names),
        };
        Filter::new(Some(&filter), only).unwrap()
    }

    #[test]
    fn all_that_a_filter_says_must_hold() {
        let metadata = ObjectMetadata {
            name: "a".into(),
            labels: [("app".into(), "web".into()), ("odd".into(), "x!=y".into())].into(),
            ..Default::default()
        };
        let status = VmStatus {
            phase: VmPhase::Running.into(),
            ..Default::default()
        };
        let vm = Vm {
            metadata: Some(metadata),
            status: Some(status),
            ..Default::default()
        };
        use VmPhase::{Paused, Running};
        for (expected, labels, phases, names, only) in [
            (true, &[][..], &[][..], &[][..], ""),
            (true, &["app"], &[Paused, Running], &["b", "a"], "a"),
            (true, &["app=web", "app!=db", "tier!=x", "odd=x!=y"], &[], &[], ""),
            (false, &["app=web", "tier"], &[], &[], ""),
            (false, &["app="], &[], &[], ""),
            (false, &["app!=web"], &[], &[], ""),
            (false, &[], &[Paused], &[], ""),
            (false, &[], &[], &["b"], ""),
            (false, &[], &[], &[], "b"),
            (false, &[], &[], &["a"], "b"),
        ] {
            let filter = filter(labels, phases, names, only);
            assert_eq!(filter.matches(&vm), expected, "{filter:?}");
        }
    }

    #[test]
    fn what_is_wrong_in_a_filter_is_named() {
        let wrong = VmFilter {
            labels: vec!["a".into(), "=b".into(), String::new()],
            phases: vec![3, 0, 99],
            names: Vec::new(),
        };
        let failure = Filter::new(Some(&wrong), "").unwrap_err();
        let fields: Vec<_> = failure
            .violations
            .0
            .iter()
            .map(|wrong| wrong.field.as_str())
            .collect();
        let expected = [
            "filter.labels[1]",
            "filter.labels[2]",
            "filter.phases[1]",
            "filter.phases[2]",
        ];
        assert_eq!(fields, expected);
    }

    #[test]
    fn filters_have_the_same_hash_when_they_say_the_same() {
        let hash = |names: &[&str], only| filter(&["x", "y=1"], &[VmPhase::Running], names, only).hash();
        assert_eq!(hash(&["a", "b"], ""), hash(&["b", "a", "a"], ""));
        assert_eq!(hash(&["a"], ""), hash(&[], "a"));
        assert_ne!(hash(&["a"], ""), hash(&["b"], ""));
        assert_ne!(hash(&["a"], "b"), hash(&[], ""));
        assert_ne!(
            filter(&["x"], &[], &[], "").hash(),
            filter(&[], &[], &["x"], "").hash()
        );
    }
}
