//! Processor that a guest sees.

use std::fmt;

use vmmd_api::v1;

use super::features::{self, PLATFORM};
use crate::Violations;

/// A processor that guests can see.
///
/// `x86-64-v2` to `x86-64-v4` are the levels of the x86-64 psABI (chapter 3.1.1), with the features for kernels that
/// each processor of the level has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Model {
    /// All features of the node that guests can have.
    #[default]
    Host,
    /// Processors since 2009 (Nehalem, Bulldozer).
    V2,
    /// Processors since 2013 (Haswell) and 2015 (Excavator), with AVX2.
    V3,
    /// Processors since 2017 (Skylake-SP) and 2022 (Zen 4), with AVX-512.
    V4,
}

/// Features that each guest has.
const BASE: &[&str] = &[
    "apic", "clflush", "cmov", "cx8", "de", "fpu", "fxsr", "lm", "mca", "mce", "mmx", "msr", "mtrr", "nx",
    "pae", "pat", "pge", "pse", "pse36", "sep", "sse", "sse2", "syscall", "tsc",
];
const V2: &[&str] = &["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"];
const V3: &[&str] = &[
    "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "fsgsbase", "movbe", "smep", "xsave",
];
const V4: &[&str] = &[
    "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "invpcid", "pcid", "pdpe1gb", "smap",
];

impl Model {
    /// All of them, the least first after the host's own.
    pub const ALL: [Self; 4] = [Self::Host, Self::V2, Self::V3, Self::V4];

    /// Name in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::V2 => "x86-64-v2",
            Self::V3 => "x86-64-v3",
            Self::V4 => "x86-64-v4",
        }
    }

    /// The model with this name; the host's own without a name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "" => Some(Self::Host),
            name => Self::ALL.into_iter().find(|model| model.name() == name),
        }
    }

    /// Features of a guest with this model, sorted. Empty for [`Host`](Self::Host): the guest has the features of the node.
    pub fn features(self) -> Vec<&'static str> {
        let parts: &[&[&str]] = match self {
            Self::Host => &[],
            Self::V2 => &[BASE, V2],
            Self::V3 => &[BASE, V2, V3],
            Self::V4 => &[BASE, V2, V3, V4],
        };
        let mut all: Vec<_> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        all.sort_unstable();
        all
    }

    /// Models that a node supports whose guests can have these features.
    pub fn supported(offered: &[impl AsRef<str>]) -> Vec<Self> {
        let has = |name: &&str| offered.iter().any(|other| other.as_ref() == *name);
        let supported = |model: &Self| model.features().iter().all(has);
        Self::ALL.into_iter().filter(supported).collect()
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Processor of a VM: a model, with features that differ from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    /// The model.
    pub model: Model,
    /// Features in addition to the model's, sorted.
    pub add: Vec<&'static str>,
    /// Features of the model that the guest does not have, sorted.
    pub remove: Vec<&'static str>,
    /// The guest has Hyper-V's interface, too.
    pub hyperv: bool,
}

impl Processor {
    /// Reads `spec.cpu` and records violations.
    pub fn new(found: &mut Violations, cpu: &v1::CpuSpec) -> Self {
        let model = Model::named(&cpu.model).unwrap_or_else(|| {
            let names = Model::ALL.map(Model::name).join(", ");
            found.add(
                "spec.cpu.model",
                format_args!("must be one of {names}, is {:?}", cpu.model),
            );
            Model::Host
        });
        let features = cpu.features.clone().unwrap_or_default();
        let mut read = |field: &str, names: &[String]| {
            let mut known = Vec::new();
            for name in names {
                match features::find(name) {
                    Some(feature) if PLATFORM.contains(&feature.name) => {
                        let problem = format_args!("\"{name}\" comes with the machine: leave it out");
                        found.add(field, problem);
                    }
                    Some(feature) => known.push(feature.name),
                    None => {
                        let problem = format_args!(
                            "\"{name}\" is no feature that a guest can have: see `guestCpuFeatures` of the node's status"
                        );
                        found.add(field, problem);
                    }
                }
            }
            known.sort_unstable();
            known.dedup();
            known
        };
        let add = read("spec.cpu.features.add", &features.add);
        let remove = read("spec.cpu.features.remove", &features.remove);
        let processor = Self {
            model,
            add,
            remove,
            hyperv: cpu.hyperv,
        };
        processor.check(found);
        processor
    }

    fn check(&self, found: &mut Violations) {
        if let Some(name) = self.add.iter().find(|name| self.remove.contains(name)) {
            let problem = format_args!("\"{name}\" is removed, too: leave it out of one of the lists");
            found.add("spec.cpu.features.add", problem);
        }
        if let Some(name) = self.remove.iter().find(|name| BASE.contains(name)) {
            let problem = format_args!("\"{name}\": each guest has it");
            found.add("spec.cpu.features.remove", problem);
        }
        let has = self.features();
        let lacks = |needed: &&str| match self.model {
            Model::Host => self.remove.contains(needed),
            _ => !has.contains(needed),
        };
        for name in &self.add {
            if let Some(needed) = features::needed_by(name).filter(lacks) {
                let problem = format_args!("\"{name}\" needs \"{needed}\": add it, too");
                found.add("spec.cpu.features.add", problem);
            }
        }
    }

    /// Features that the node has to have for it, sorted. All features of the guest, except with [`Model::Host`].
    pub fn features(&self) -> Vec<&'static str> {
        let model = self.model.features().into_iter();
        let kept = model.filter(|name| !features::needs_any(name, &self.remove));
        let mut all: Vec<_> = kept.chain(self.add.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// The largest model that all nodes support, with the further features that they have in common. `None` without a node,
/// and for nodes that have no model in common.
pub fn baseline(nodes: &[Vec<String>]) -> Option<(Model, Vec<String>)> {
    let (first, others) = nodes.split_first()?;
    let in_all = |name: &&String| others.iter().all(|node| node.contains(name));
    let common: Vec<_> = first.iter().filter(in_all).cloned().collect();
    let model = Model::supported(&common).into_iter().max()?;
    if model == Model::Host {
        return None;
    }
    let of_model = model.features();
    let mut further: Vec<_> = common
        .into_iter()
        .filter(|name| {
            !of_model.contains(&name.as_str())
                && !PLATFORM.contains(&name.as_str())
                && features::find(name).is_some_and(|feature| feature.place.0 != features::KVM_FEATURES)
        })
        .collect();
    further.sort_unstable();
    // A feature without the one that it needs is of no use.
    let known = further.clone();
    further.retain(|name| {
        features::needed_by(name)
            .is_none_or(|needed| of_model.contains(&needed) || known.iter().any(|it| it == needed))
    });
    Some((model, further))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rstest::rstest;

    use super::*;

    fn processor(model: &str, add: &[&str], remove: &[&str]) -> Result<Processor, String> {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        let cpu = v1::CpuSpec {
            model: model.to_owned(),
            features: Some(v1::CpuFeatures {
                add: names(add),
                remove: names(remove),
            }),
            ..v1::CpuSpec::default()
        };
        let mut found = Violations::default();
        let processor = Processor::new(&mut found, &cpu);
        match found.0.is_empty() {
            true => Ok(processor),
            false => Err(found.to_string()),
        }
    }

    #[test]
    fn each_feature_has_one_name_and_one_place() {
        let all: Vec<_> = features::all().collect();
        let names: BTreeSet<_> = all.iter().map(|feature| feature.name).collect();
        let places: BTreeSet<_> = all.iter().map(|feature| (feature.place, feature.mask)).collect();
        assert_eq!((names.len(), places.len()), (all.len(), all.len()));
        assert!(PLATFORM.iter().all(|name| names.contains(name)));
    }

    #[test]
    fn models_name_known_features_and_contain_the_lesser_ones() {
        let mut before = Vec::new();
        for model in Model::ALL {
            let features = model.features();
            assert!(
                features.iter().all(|name| features::find(name).is_some()),
                "{model}"
            );
            assert!(before.iter().all(|name| features.contains(name)), "{model}");
            let needs = |name: &&str| features::needed_by(name);
            assert!(
                features
                    .iter()
                    .filter_map(needs)
                    .all(|name| features.contains(&name)),
                "{model}"
            );
            before = features;
        }
        assert_eq!(Model::named(""), Some(Model::Host));
        assert_eq!(Model::named("x86-64-v1"), None);
    }

    #[test]
    fn removed_feature_takes_those_that_need_it() {
        let without = processor("x86-64-v4", &[], &["avx"]).unwrap().features();
        assert!(
            !without
                .iter()
                .any(|name| name.starts_with("avx") || *name == "fma")
        );
        assert!(without.contains(&"xsave") && without.contains(&"bmi2"));
        let with = processor("x86-64-v2", &["aes", "avx", "xsave"], &[])
            .unwrap()
            .features();
        assert!(with.contains(&"aes") && with.contains(&"avx"));
        assert_eq!(
            processor("host", &["avx2"], &["rtm"]).unwrap().features(),
            ["avx2"]
        );
    }

    #[rstest]
    #[case::model("x86-64-v5", &[], &[], "must be one of host, x86-64-v2, x86-64-v3, x86-64-v4, is \"x86-64-v5\"")]
    #[case::name("host", &["avx9"], &[], "\"avx9\" is no feature that a guest can have")]
    #[case::vmx("host", &["vmx"], &[], "no feature that a guest can have")]
    #[case::platform("host", &[], &["x2apic"], "comes with the machine")]
    #[case::both("host", &["aes"], &["aes"], "is removed, too")]
    #[case::base("x86-64-v3", &[], &["nx"], "each guest has it")]
    #[case::needs("x86-64-v2", &["avx2"], &[], "\"avx2\" needs \"avx\"")]
    #[case::host_needs("host", &["avx2"], &["avx"], "\"avx2\" needs \"avx\"")]
    fn wrong_processor_is_refused(
        #[case] model: &str,
        #[case] add: &[&str],
        #[case] remove: &[&str],
        #[case] says: &str,
    ) {
        let error = processor(model, add, remove).unwrap_err();
        assert!(error.contains(says), "{error}");
    }

    #[test]
    fn baseline_is_the_largest_common_model_and_more() {
        let node = |model: Model, more: &[&str]| -> Vec<String> {
            let names = model.features().into_iter().chain(more.iter().copied());
            names.map(str::to_owned).collect()
        };
        let one = node(Model::V4, &["aes", "spec_ctrl", "x2apic", "kvmclock", "vaes"]);
        let other = node(
            Model::V3,
            &["aes", "spec_ctrl", "smap", "x2apic", "kvmclock", "avx_vnni"],
        );
        let add = ["aes", "smap", "spec_ctrl"].map(str::to_owned).to_vec();
        assert_eq!(baseline(&[one.clone(), other]), Some((Model::V3, add)));
        let least = node(Model::V2, &["avx2"]);
        assert_eq!(baseline(&[one.clone(), least]), Some((Model::V2, Vec::new())));
        assert_eq!(baseline(&[one, vec!["fpu".to_owned()]]), None);
        assert_eq!(baseline(&[]), None);
    }
}
