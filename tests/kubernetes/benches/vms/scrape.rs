//! Metrics of agents and controller.

use std::{collections::BTreeMap, fs, time::Duration};

use reqwest::Client;
use vmmd_kubernetes_tests::program::Program;

/// Figures of one process, or the sum of several.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub processes: usize,
    pub rss_bytes: f64,
    pub pss_bytes: f64,
    pub cpu_seconds: f64,
    /// Requests to the API server, by method and resource.
    pub requests: BTreeMap<String, f64>,
}

/// The figures at one moment.
#[derive(Debug)]
pub struct Scrape {
    pub controller: Figures,
    pub agents: Figures,
}

/// Source of the metrics.
pub struct Scraper {
    client: Client,
    controller: usize,
    nodes: usize,
}

impl Scraper {
    /// The controller's port, after which come those of the agents.
    pub fn new(controller: usize, nodes: usize) -> Self {
        let client = Client::builder().no_proxy().timeout(Duration::from_secs(10));
        Self {
            client: client.build().unwrap(),
            controller,
            nodes,
        }
    }

    /// Asks all.
    pub async fn scrape(&self, controller: &mut Program, agents: &mut [Program]) -> Scrape {
        let mut sum = Figures::default();
        assert_eq!(agents.len(), self.nodes);
        for (port, agent) in (self.controller + 1..).zip(agents) {
            self.add(&mut sum, port, agent).await;
        }
        let mut one = Figures::default();
        self.add(&mut one, self.controller, controller).await;
        Scrape {
            controller: one,
            agents: sum,
        }
    }

    async fn add(&self, sum: &mut Figures, port: usize, program: &mut Program) {
        let pid = program
            .pid()
            .unwrap_or_else(|| panic!("{} has ended", program.name));
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", pid.as_raw_nonzero())).unwrap();
        let pss = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
        let pss: f64 = pss.split_whitespace().next().unwrap().parse().unwrap();
        sum.pss_bytes += pss * 1024.0;
        sum.processes += 1;
        let url = format!("http://127.0.0.1:{port}/metrics");
        let text = self.client.get(url).send().await.unwrap().text().await.unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let value: f64 = value.parse().unwrap();
            let label = |name: &str| {
                let (_, rest) = series.split_once(&format!("{name}=\"")).unwrap();
                rest.split('"').next().unwrap()
            };
            match series.split('{').next().unwrap() {
                "process_resident_memory_bytes" => sum.rss_bytes += value,
                "process_cpu_seconds_total" => sum.cpu_seconds += value,
                "vmmd_kube_api_requests_total" => {
                    let what = format!("{} {}", label("method"), label("resource"));
                    *sum.requests.entry(what).or_default() += value;
                }
                _ => {}
            }
        }
    }
}

impl Figures {
    /// Returns the counts of requests since an earlier scrape, without zeroes.
    pub fn requests_since(&self, before: &Self) -> BTreeMap<String, f64> {
        let more = self.requests.iter().map(|(what, count)| {
            let before = before.requests.get(what).copied().unwrap_or_default();
            (what.clone(), count - before)
        });
        more.filter(|(_, count)| *count > 0.0).collect()
    }
}
