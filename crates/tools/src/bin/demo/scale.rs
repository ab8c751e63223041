//! Scales a Service while clients dial it: the answering backends follow, and no connection fails.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use testbed::agent::{Cluster, Service, wait_until};
use testbed::echo::{Dial, Protocol, pattern};
use testbed::lab::{Family, Host, Lab};

const STEPS: [&[&str]; 6] = [
    &["p1b"],
    &["p1b", "p2a"],
    &["p1b", "p1c", "p2a", "p2b"],
    &["p2a", "p2b"],
    &["p1c"],
    &["p1b", "p2a"],
];

/// The clients: host, protocol, family.
const CLIENTS: [(&str, Protocol, Family); 4] = [
    ("p1a", Protocol::Tcp, Family::V4),
    ("p1a", Protocol::Udp, Family::V6),
    ("n1", Protocol::Tcp, Family::V6),
    ("n2", Protocol::Udp, Family::V4),
];

const FIRST_UDP_PORT: u16 = 10_000;
/// A change is complete after this many answers in a row of the right backends, over all clients.
const SETTLED: usize = 1000;
/// Time limit for clients to follow a change.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Score {
    requests: BTreeMap<(String, Protocol), usize>,
    failures: Vec<String>,
    /// The backends that answered since the last change, in order.
    recent: Vec<(String, Protocol)>,
}

impl Score {
    /// Returns the number of answers of other backends since the last change.
    fn of_others(&self, backends: &[&str]) -> usize {
        self.recent
            .iter()
            .filter(|(name, _)| !backends.contains(&name.as_str()))
            .count()
    }

    /// Returns the last answers, if there are enough.
    fn last(&self) -> Option<&[(String, Protocol)]> {
        Some(&self.recent[self.recent.len().checked_sub(SETTLED)?..])
    }
}

/// Prints the events and returns the number of failures.
pub(crate) fn up_and_down(lab: &Lab, cluster: &Cluster, service: &Service) -> Result<usize> {
    let score = Mutex::new(Score::default());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for (host, protocol, family) in CLIENTS {
            let score = &score;
            let stop = &stop;
            let dial = Dial::new(protocol, service.frontend(family));
            scope.spawn(move || dial_until(lab.host(host), dial, score, stop));
        }
        let result = STEPS
            .iter()
            .try_for_each(|backends| step(lab, cluster, service, backends, &score));
        stop.store(true, Ordering::Relaxed);
        result
    })?;
    let score = score.into_inner().expect("no client panics");
    println!("\n{}", table(lab, &score));
    println!(
        "{} requests, {} failed\n",
        score.requests.values().sum::<usize>(),
        score.failures.len()
    );
    score
        .failures
        .iter()
        .take(5)
        .for_each(|failure| println!("  {failure}"));
    Ok(score.failures.len())
}

fn dial_until(host: &Host, dial: Dial, score: &Mutex<Score>, stop: &AtomicBool) {
    // For kpx, a UDP socket with a recently used port continues that port's flow, with its backend.
    let mut udp_ports = (FIRST_UDP_PORT..=u16::MAX).cycle();
    while !stop.load(Ordering::Relaxed) {
        let source_port = if dial.protocol == Protocol::Udp {
            udp_ports.next().unwrap_or(0)
        } else {
            0
        };
        let result = dial
            .source_port(source_port)
            .exchange(&host.ns, &pattern(1000));
        let mut score = score.lock().expect("no client panics");
        match result {
            Ok(answer) => {
                *score
                    .requests
                    .entry((answer.backend.clone(), dial.protocol))
                    .or_default() += 1;
                score.recent.push((answer.backend, dial.protocol));
            }
            Err(fault) => score.failures.push(format!(
                "{} dials {} over {}: {fault}",
                host.name, dial.to, dial.protocol
            )),
        }
    }
}

/// Changes the Service's backends and waits until all of them, and no others, answer.
fn step(
    lab: &Lab,
    cluster: &Cluster,
    service: &Service,
    backends: &[&str],
    score: &Mutex<Score>,
) -> Result<()> {
    let started = Instant::now();
    let hosts: Vec<_> = backends.iter().map(|name| lab.host(name).name).collect();
    let scaled = service.clone().backends(&hosts);
    score.lock().expect("no client panics").recent.clear();
    for object in scaled.objects(lab) {
        cluster.put(&object)?;
    }
    let what = format!("only {} answer", backends.join(", "));
    let waited = wait_until(DEADLINE, &what, || {
        let score = score.lock().expect("no client panics");
        let Some(last) = score.last() else {
            return Ok(false);
        };
        let only = last
            .iter()
            .all(|(name, _)| backends.contains(&name.as_str()));
        Ok(only
            && backends
                .iter()
                .all(|backend| last.iter().any(|(name, _)| name == backend)))
    });
    let score = score.lock().expect("no client panics");
    waited.with_context(|| {
        let mut answers: BTreeMap<_, usize> = BTreeMap::new();
        score
            .last()
            .unwrap_or(&score.recent)
            .iter()
            .for_each(|answer| *answers.entry(answer).or_default() += 1);
        format!(
            "the last answers came from {answers:?}; {} failed",
            score.failures.len()
        )
    })?;
    let old = score.of_others(backends);
    println!(
        "    {:20} followed after {old:3} old answers, watched for {:.1} s",
        backends.join(", "),
        started.elapsed().as_secs_f32()
    );
    Ok(())
}

fn table(lab: &Lab, score: &Score) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header([
        "backend",
        "on",
        "TCP requests",
        "UDP requests",
    ]);
    for pod in lab.nodes().into_iter().flat_map(|node| &node.pods) {
        let counts = Protocol::COMMON.map(|protocol| {
            score
                .requests
                .get(&(pod.name.to_owned(), protocol))
                .copied()
        });
        if counts.iter().any(Option::is_some) {
            let node = lab.node_of(pod).map_or("", |node| node.host.name);
            let [tcp, udp] = counts.map(|count| count.unwrap_or_default().to_string());
            table.add_row([pod.name.to_owned(), node.to_owned(), tcp, udp]);
        }
    }
    table
}
