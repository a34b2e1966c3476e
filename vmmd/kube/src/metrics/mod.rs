//! Metrics for Prometheus, on a listener of their own (`--metrics`). They are listed in
//! docs/src/metrics.md, and a test checks the list.

mod listener;
mod process;
mod requests;

use std::{
    collections::BTreeMap,
    sync::{LazyLock, Mutex, PoisonError},
};

use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

pub use self::{listener::serve, requests::Count};

type Labels = Vec<(&'static str, String)>;
/// How many VMs are in each phase.
pub type Phases = BTreeMap<String, i64>;
type Source = Box<dyn Fn() -> Phases + Send>;

/// Counters for the lifetime of the process.
static FIGURES: LazyLock<Figures> = LazyLock::new(Figures::default);

#[derive(Default)]
struct Figures {
    requests: Family<Labels, Counter>,
    reconciles: Family<Labels, Counter>,
    leader: Mutex<Option<bool>>,
    vms: Mutex<Option<Source>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request to the API server was answered, with this code; `None` when it was not.
fn answered(method: &str, resource: &str, code: Option<u16>) {
    let code = code.map_or_else(|| "none".to_owned(), |code| code.to_string());
    let labels = vec![
        ("method", method.to_owned()),
        ("resource", resource.to_owned()),
        ("code", code),
    ];
    FIGURES.requests.get_or_create(&labels).inc();
}

/// A step for an object was done, or failed.
pub fn reconciled(well: bool) {
    let result = if well { "ok" } else { "error" };
    let labels = vec![("result", result.to_owned())];
    FIGURES.reconciles.get_or_create(&labels).inc();
}

/// Whether this process is the controller that works.
pub fn leads(leads: bool) {
    *lock(&FIGURES.leader) = Some(leads);
}

/// Where a scrape has the VMs from.
pub fn vms(phases: impl Fn() -> Phases + Send + 'static) {
    *lock(&FIGURES.vms) = Some(Box::new(phases));
}

/// Counts each phase.
pub fn count(phases: impl Iterator<Item = String>) -> Phases {
    let mut counts = Phases::new();
    for phase in phases {
        *counts.entry(phase).or_default() += 1;
    }
    counts
}

/// All figures as they are now, in the text format (OpenMetrics 1.0).
fn gather() -> String {
    let mut registry = Registry::default();
    let figures = &*FIGURES;
    let build = Family::<Labels, Gauge>::default();
    build
        .get_or_create(&vec![("version", env!("CARGO_PKG_VERSION").to_owned())])
        .set(1);
    registry.register("vmmd_kube_build_info", "The program's version; always 1", build);
    registry.register(
        "vmmd_kube_api_requests",
        "Requests to the API server that were answered, by its code; none when it did not answer",
        figures.requests.clone(),
    );
    registry.register(
        "vmmd_kube_reconciles",
        "Steps that were done for an object, by how they ended",
        figures.reconciles.clone(),
    );
    if let Some(leads) = *lock(&figures.leader) {
        let leader = Gauge::<i64>::default();
        leader.set(leads.into());
        registry.register(
            "vmmd_kube_leader",
            "Whether this controller is the one that works",
            leader,
        );
    }
    if let Some(source) = &*lock(&figures.vms) {
        let vms = Family::<Labels, Gauge>::default();
        for (phase, count) in source() {
            vms.get_or_create(&vec![("phase", phase)]).set(count);
        }
        registry.register("vmmd_kube_vms", "VMs by their phase", vms);
    }
    process::register(&mut registry);
    let mut text = String::new();
    // Writing to a String can't fail.
    let _ = text::encode(&mut text, &registry);
    text
}

/// With the unit's name behind the family's.
fn register_with(registry: &mut Registry, name: &str, help: &str, unit: Unit, value: f64) {
    let gauge = Gauge::<f64, std::sync::atomic::AtomicU64>::default();
    gauge.set(value);
    registry.register_with_unit(name, help, unit, gauge);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_told_as_openmetrics_and_documented() {
        answered("get", "pods", Some(200));
        answered("get", "pods", None);
        reconciled(true);
        leads(true);
        vms(|| count(["Running", "Running", "Failed"].map(str::to_owned).into_iter()));
        let text = gather();
        for line in [
            r#"vmmd_kube_api_requests_total{method="get",resource="pods",code="200"} "#,
            r#"vmmd_kube_api_requests_total{method="get",resource="pods",code="none"} "#,
            r#"vmmd_kube_reconciles_total{result="ok"} "#,
            "vmmd_kube_leader 1",
            r#"vmmd_kube_vms{phase="Running"} 2"#,
            r#"vmmd_kube_vms{phase="Failed"} 1"#,
            "process_resident_memory_bytes ",
            "process_cpu_seconds_total ",
        ] {
            assert!(text.contains(line), "no {line:?} in {text}");
        }
        assert!(text.ends_with("# EOF\n"), "{text}");
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/metrics.md");
        let page = std::fs::read_to_string(page).unwrap();
        let series = text.lines().filter(|line| !line.starts_with('#'));
        for name in series.filter_map(|line| line.split([' ', '{']).next()) {
            assert!(page.contains(&format!("`{name}`")), "{name} is not documented");
        }
    }
}
