//! Two namespaces: a greedy namespace takes all resources that it can get, and another namespace
//! works normally.

mod greedy;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use self::greedy::Greedy;
use super::memory::Memory;
use super::report::{Report, milliseconds};
use testbed::agent::{SERVICE_PORT, Service, wait_until};
use testbed::echo::{Dial, Protocol, pattern};
use testbed::http::{self, HEALTH};
use testbed::lab::{EXTERNAL, Family, Host, Layout};
use testbed::served_lab::ServedLab;

/// Time limit for a new Service to be programmed.
const IN_FORCE: Duration = Duration::from_secs(1);
/// The end of the wait for it.
const DEADLINE: Duration = Duration::from_secs(60);
/// Time limit for an attempt to connect. The next attempt follows.
const ATTEMPT: Duration = Duration::from_millis(30);
/// Time between two requests of the health check.
const LOOK: Duration = Duration::from_millis(50);
const PORT: u16 = 8080;
const BACKEND: &str = "p2a";
/// The host number of the other namespace's first Service in the service network.
const FIRST: u8 = 100;

/// The objects of the greedy namespace.
#[derive(Clone, Copy, Debug)]
pub struct Greed {
    pub services: u32,
    /// The ports of all Services.
    pub ports: u32,
    /// The endpoints of all Services, half in each family. Each endpoint serves all ports of its
    /// Service.
    pub endpoints: u32,
    /// The changes of its objects per second, in the second half of the time.
    pub changes: u32,
}

/// The sizes of the maps.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub name: &'static str,
    /// The flags of kpx.
    pub flags: &'static [&'static str],
}

impl Room {
    /// The sizes of a node with 4 GiB of memory.
    pub const OF_4_GIB: Self = Self {
        name: "4 GiB",
        flags: &[
            "--service-table-size",
            "65536",
            "--endpoint-table-size",
            "262144",
            "--flow-table-size",
            "131072",
        ],
    };
    /// The sizes by this machine's memory.
    pub const OF_THIS_MACHINE: Self = Self {
        name: "this machine",
        flags: &[],
    };
}

/// Creates the greedy objects; then the other namespace creates `rounds` Services while the greedy
/// namespace is idle, and as many while it changes its objects continuously.
pub fn tenants(rounds: u32, greed: Greed, rooms: &[Room]) -> Result<Report> {
    let Greed {
        services,
        ports,
        endpoints,
        changes,
    } = greed;
    let what = format!(
        "a namespace with {services} Services, {ports} ports and {endpoints} endpoints, with {changes} changes a second; beside it a new Service, \
         {rounds} times each"
    );
    let mut report = Report::of("tenants", what, &[]);
    let columns = [
        "ROOM",
        "GREEDY",
        "CHANGES/S",
        "SERVED",
        "MEDIAN",
        "MAX",
        "HEALTHZ 200",
        "OTHERS",
        "SLOWEST",
    ];
    let mut lines = Vec::new();
    for room in rooms {
        let served = ServedLab::with_api_server(Layout::Routed)?.serve(&[BACKEND], PORT)?;
        let kpx = served.kpx(room.flags)?;
        let mut greedy = Greedy::create(greed, &served.cluster)?;
        for is_still in [true, false] {
            let seen = seen(
                &served,
                &mut greedy,
                rounds,
                if is_still { 0 } else { changes },
            )?;
            lines.push(seen.line(room, if is_still { "still" } else { "changing" }));
            seen.judge(
                &mut report,
                &format!(
                    "{}, {}",
                    room.name,
                    if is_still { "still" } else { "changing" }
                ),
            );
        }
        let status = kpx.typed_status()?;
        let left_out = status
            .skipped
            .iter()
            .filter(|skipped| skipped.contains("share of this node's room"))
            .count();
        report.note(format!(
            "{}: {left_out} shares exceeded, {}",
            room.name,
            Memory::of(kpx.pid())?
        ));
        let others: Vec<_> = status
            .problems
            .iter()
            .map(|problem| format!("{}: {}", problem.what, problem.why))
            .collect();
        report.promise(others.is_empty(), format!("{}: {others:?}", room.name));
        kpx.stop()?;
    }
    report.table(&columns, lines);
    Ok(report)
}

/// The observations while the greedy namespace is idle, or changes its objects.
struct Seen {
    /// The times from the creation of a Service until it is programmed; the worst first.
    times: Vec<Duration>,
    /// The number of Services by the path that worked last.
    last: BTreeMap<String, u32>,
    changes_a_second: f64,
    health: Health,
}

#[derive(Default)]
struct Health {
    good: u32,
    /// The other answers, as text.
    others: BTreeMap<String, u32>,
    slowest: Duration,
}

fn seen(served: &ServedLab, greedy: &mut Greedy, rounds: u32, rate: u32) -> Result<Seen> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let health = scope.spawn(|| Health::watch(&served.lab.n1.host, &stop));
        let changing = scope.spawn(|| change(served, greedy, rate, &stop));
        let shop = (0..rounds)
            .map(|round| round_of_shop(served, round))
            .collect::<Result<Vec<_>>>();
        stop.store(true, Ordering::Relaxed);
        let health = health
            .join()
            .map_err(|_| anyhow!("the watch of the health check panicked"))?;
        let changes_a_second = changing
            .join()
            .map_err(|_| anyhow!("the greedy namespace panicked"))??;
        let mut seen = Seen {
            times: Vec::new(),
            last: BTreeMap::new(),
            changes_a_second,
            health,
        };
        for (time, way) in shop? {
            seen.times.push(time);
            *seen.last.entry(way).or_default() += 1;
        }
        seen.times.sort_unstable();
        Ok(seen)
    })
}

/// Creates a Service with one backend, and waits until it works for a pod and for the host. Returns
/// the time, and the path that worked last.
fn round_of_shop(served: &ServedLab, round: u32) -> Result<(Duration, String)> {
    let nth = FIRST + u8::try_from(round % 100)?;
    let external = EXTERNAL.host(nth);
    let service = Service::new("web", nth, &[BACKEND], PORT)
        .in_namespace("shop")
        .external_ips(external);
    let lab = &served.lab;
    let pod = lab.host("p1a");
    let host = &lab.n1.host;
    let ways = Family::ALL.into_iter().flat_map(|family| {
        let [cluster_ip, external] = [service.cluster_ip(), external]
            .map(|addrs| SocketAddr::new(addrs.ip(family), SERVICE_PORT));
        [
            ("pod to ClusterIP", pod, cluster_ip),
            ("host to ClusterIP", host, cluster_ip),
            ("host to ExternalIP", host, external),
        ]
    });
    let created = Instant::now();
    served.put(&service)?;
    let mut took = Duration::ZERO;
    let mut last = String::new();
    for (name, from, to) in ways {
        let mut attempts = 0;
        wait_until(DEADLINE, &format!("{name} {to} is answered"), || {
            attempts += 1;
            Ok(is_answered(from, to))
        })?;
        // A path that works at the first attempt may have worked for long.
        if attempts > 1 || last.is_empty() {
            (took, last) = (
                created.elapsed(),
                format!("{name}, {}", Family::of(to.ip())),
            );
        }
    }
    service
        .objects(lab)
        .iter()
        .try_for_each(|object| served.cluster.delete(object))?;
    Ok((took, last))
}

fn is_answered(from: &Host, to: SocketAddr) -> bool {
    let answer = Dial::new(Protocol::Tcp, to)
        .deadline(ATTEMPT)
        .exchange(&from.ns, &pattern(10));
    answer.is_ok_and(|answer| answer.backend == BACKEND)
}

/// Changes objects of the greedy namespace at a rate until stopped. Returns the achieved rate.
fn change(served: &ServedLab, greedy: &mut Greedy, rate: u32, stop: &AtomicBool) -> Result<f64> {
    let started = Instant::now();
    let before = greedy.changes();
    while rate > 0 && !stop.load(Ordering::Relaxed) {
        greedy.change(&served.cluster)?;
        let due = started + Duration::from_secs(1) * (greedy.changes() - before) / rate;
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(f64::from(greedy.changes() - before) / started.elapsed().as_secs_f64())
}

impl Health {
    /// Requests the node's health until stopped.
    fn watch(node: &Host, stop: &AtomicBool) -> Self {
        let mut health = Self::default();
        while !stop.load(Ordering::Relaxed) {
            let asked = Instant::now();
            match http::ask(&node.ns, HEALTH, "GET", "/healthz").context("ask for the health") {
                Ok(answer) if answer.code == 200 => health.good += 1,
                Ok(answer) => *health.others.entry(answer.code.to_string()).or_default() += 1,
                Err(error) => *health.others.entry(format!("{error:#}")).or_default() += 1,
            }
            health.slowest = health.slowest.max(asked.elapsed());
            thread::sleep(LOOK);
        }
        health
    }
}

impl Seen {
    fn line(&self, room: &Room, greedy: &str) -> Vec<String> {
        let others: u32 = self.health.others.values().sum();
        vec![
            room.name.to_owned(),
            greedy.to_owned(),
            format!("{:.1}", self.changes_a_second),
            self.times.len().to_string(),
            milliseconds(self.times[self.times.len() / 2]),
            milliseconds(self.times[self.times.len() - 1]),
            self.health.good.to_string(),
            others.to_string(),
            milliseconds(self.health.slowest),
        ]
    }

    fn judge(&self, report: &mut Report, when: &str) {
        let late = self.times.iter().filter(|time| **time > IN_FORCE).count();
        report.in_time(
            late == 0,
            format!(
                "{when}: {late} of {} Services later than {IN_FORCE:?}",
                self.times.len()
            ),
        );
        let Health { good, others, .. } = &self.health;
        report.promise(
            others.is_empty() && *good > 0,
            format!("{when}: the health was {others:?}"),
        );
        let last: Vec<_> = self
            .last
            .iter()
            .map(|(way, times)| format!("{way} ({times})"))
            .collect();
        report.note(format!("{when}, in force last: {}", last.join(", ")));
    }
}
