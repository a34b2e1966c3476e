//! Families of series, collected in any order and then written one family after the other.

use std::{collections::BTreeMap, fmt};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::{Registry, Unit},
};

/// A series' labels.
type Labels = Vec<(String, String)>;

/// See the module.
#[derive(Debug, Default)]
pub struct Families(BTreeMap<&'static str, Family>);

#[derive(Debug)]
struct Family {
    help: &'static str,
    kind: MetricType,
    series: BTreeMap<Labels, Value>,
}

#[derive(Debug)]
enum Value {
    Counter(f64),
    Gauge(f64),
    Histogram(Histogram),
}

/// Counts by upper bound.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Sum of all observed values.
    pub sum: f64,
    /// Upper bounds, growing, the last one infinite, each with how many were not above it and above the one before.
    pub buckets: Vec<(f64, u64)>,
}

impl Families {
    /// Something that only grows; `name` without the ending `_total`.
    pub fn counter(&mut self, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: u64) {
        self.counter_f64(name, help, labels, as_f64(value));
    }

    /// The same in parts, as seconds.
    pub fn counter_f64(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: f64,
    ) {
        self.put(name, help, MetricType::Counter, labels, Value::Counter(value));
    }

    /// Something as it is now.
    pub fn gauge(&mut self, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: f64) {
        self.put(name, help, MetricType::Gauge, labels, Value::Gauge(value));
    }

    /// Adds to what such a series has by now.
    pub fn gauge_add(&mut self, name: &'static str, help: &'static str, labels: &[(&str, &str)], more: f64) {
        let now = self
            .0
            .get(name)
            .and_then(|family| family.series.get(&owned(labels)));
        let now = if let Some(Value::Gauge(now)) = now {
            *now
        } else {
            0.0
        };
        self.gauge(name, help, labels, now + more);
    }

    /// A distribution.
    pub fn histogram(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: Histogram,
    ) {
        self.put(name, help, MetricType::Histogram, labels, Value::Histogram(value));
    }

    fn put(
        &mut self,
        name: &'static str,
        help: &'static str,
        kind: MetricType,
        labels: &[(&str, &str)],
        value: Value,
    ) {
        let family = self.0.entry(name).or_insert_with(|| Family {
            help,
            kind,
            series: BTreeMap::new(),
        });
        family.series.insert(owned(labels), value);
    }

    /// The text format.
    pub fn text(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing to a String can't fail.
        let _ = text::encode(&mut text, &registry);
        text
    }
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, family) in &self.0 {
            // The encoder puts the unit's name behind the family's.
            let (name, unit) = match name.strip_suffix("_bytes") {
                Some(name) => (name, Some(Unit::Bytes)),
                None => match name.strip_suffix("_seconds") {
                    Some(name) => (name, Some(Unit::Seconds)),
                    None => (*name, None),
                },
            };
            let mut metric = encoder.encode_descriptor(name, family.help, unit.as_ref(), family.kind)?;
            for (labels, value) in &family.series {
                if labels.is_empty() {
                    write(&mut metric, value)?;
                } else {
                    write(&mut metric.encode_family(labels)?, value)?;
                }
            }
        }
        Ok(())
    }
}

fn write(metric: &mut MetricEncoder<'_>, value: &Value) -> fmt::Result {
    match value {
        Value::Counter(value) => metric.encode_counter::<NoLabelSet, _, u64>(value, None),
        Value::Gauge(value) => metric.encode_gauge(value),
        Value::Histogram(Histogram { sum, buckets }) => {
            let count = buckets.iter().map(|(_, count)| count).sum();
            metric.encode_histogram::<NoLabelSet>(*sum, count, buckets, None)
        }
    }
}

fn owned(labels: &[(&str, &str)]) -> Labels {
    let owned = labels
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    owned.collect()
}

/// As near as can be: a counter above 2^53 loses its last digits.
#[allow(
    clippy::cast_precision_loss,
    reason = "figures of the text format are such numbers"
)]
pub fn as_f64(value: u64) -> f64 {
    value as f64
}
