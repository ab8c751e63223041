//! Backends that do not answer: the node's new connections avoid them, and return later.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use proxy_view::ServiceView;
use testbed::agent::{Agent, DEADLINE, Service, kpx, wait_until};
use testbed::echo::{Dial, Fault, Protocol};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

mod errors;
mod late;
mod observed;
mod waves;

const PORT: u16 = 8080;
/// The agent needs the evidence of two pods; one pod alone cannot eject a backend.
const CLIENTS: [&str; 2] = ["p1a", "p1c"];
/// A firewall that silently drops packets for the backends' port.
const CUT: &str =
    "table inet cut { chain c { type filter hook input priority 0; tcp dport 8080 drop; }; }";
/// A firewall that refuses such packets, as a pod without a server does.
const REFUSE: &str = "table inet cut { chain c { type filter hook input priority 0; tcp dport 8080 reject with tcp reset; }; }";
const HEAL: &str = "delete table inet cut";

#[test]
fn connections_leave_backends_that_do_not_answer() -> Result<()> {
    let base = &ServedLab::with_manifests(Layout::Routed)?.serve(&["p1b", "p2a", "p2b"], PORT)?;
    [&web(), &single(), &observed()]
        .into_iter()
        .try_for_each(|service| base.put(service))?;
    let agent = base.kpx(&["--backend-health=on"])?;
    testbed::cases!(
        &Lab { base, agent: &agent };
        connections_leave_cut_off_backends_and_come_back,
        errors::connections_leave_backends_that_are_unreachable,
    )?;
    agent.stop()
}

fn web() -> Service {
    Service::new("web", 10, &["p1b", "p2a", "p2b"], PORT)
}

fn single() -> Service {
    Service::new("single", 11, &["p2a"], PORT)
}

fn observed() -> Service {
    Service::new("observed", 12, &["p1b", "p2a"], PORT)
        .annotation("kpx.dev/backend-health", "observe")
}

fn connections_leave_cut_off_backends_and_come_back(lab: &Lab) -> Result<()> {
    let Lab { base, agent } = lab;
    let web = web();
    let single = single();
    let observed = observed();

    // One backend of three is dead and costs one SYN.
    let times = lab.dial(&web, 24, Duration::from_secs(3))?;
    ensure!(
        times.iter().all(|time| *time < Duration::from_millis(900)),
        "all answer: {times:?}"
    );
    base.lab.host("p2a").ns.nft(CUT)?;
    let times = lab.dial(&web, 60, Duration::from_secs(3))?;
    let slow = times
        .iter()
        .filter(|time| **time > Duration::from_millis(900))
        .count();
    ensure!(
        slow > 0 && slow < times.len(),
        "some connections began with the dead one: {times:?}"
    );
    lab.until_ejected(&web, &["p2a"])?;
    let times = lab.dial(&web, 12, Duration::from_secs(3))?;
    ensure!(
        times.iter().all(|time| *time < Duration::from_millis(900)),
        "none goes there: {times:?}"
    );
    let view = lab.view("web")?;
    let states: Vec<_> = view.ports[0]
        .backends
        .iter()
        .map(|at| (at.silent, at.ejected && at.set_aside, at.in_cluster_set))
        .collect();
    ensure!(
        states
            .iter()
            .filter(|state| **state == (true, true, false))
            .count()
            == 2,
        "of both families: {states:?}"
    );

    // kpx never ejects the only backend of a Service, and only reports backends in mode observe.
    for service in [&single, &observed] {
        lab.is_silent(service, "p2a")?;
    }
    ensure!(
        lab.ejected(&single)?.is_empty() && lab.ejected(&observed)?.is_empty(),
        "{:?}",
        agent.typed_status()?
    );
    let wide = kpx(
        agent.ns(),
        &format!("status --run-dir {}", agent.run_dir().display()),
    )?;
    let text = String::from_utf8_lossy(&wide.stdout);
    ensure!(text.contains("Services without an answer, "), "{text}");

    // Most backends are silent, as when this node is cut off: kpx ejects none, and the live backend
    // serves.
    base.lab.host("p2b").ns.nft(CUT)?;
    wait_until(
        DEADLINE,
        "two of three are silent, and none is left out",
        || {
            let _some_fail = lab.dial(&web, 12, Duration::from_millis(2_500));
            let silent = agent.typed_status()?.silent_backends;
            let of_web = silent
                .iter()
                .filter(|silent| silent.service == "default/web");
            Ok(of_web.count() == 4 && lab.ejected(&web)?.is_empty())
        },
    )?;
    for host in ["p2a", "p2b"] {
        base.lab.host(host).ns.nft(HEAL)?;
    }
    // All three backends answer their next connections.
    wait_until(DEADLINE, "no backend of the Service is silent", || {
        lab.dial(&web, 6, Duration::from_secs(3))?;
        Ok(agent
            .typed_status()?
            .silent_backends
            .iter()
            .all(|silent| silent.service != "default/web"))
    })?;
    let times = lab.dial(&single, 2, Duration::from_secs(1))?;
    ensure!(times.len() == 4, "{times:?}");

    // A refusing backend costs some connections, and then no more.
    base.lab.host("p2b").ns.nft(REFUSE)?;
    wait_until(
        DEADLINE,
        "the refusing backend is left out in both families",
        || {
            let _some_fail = lab.dial(&web, 6, Duration::from_secs(3));
            Ok(lab.ejected(&web)?.len() == Family::ALL.len())
        },
    )?;
    lab.dial(&web, 12, Duration::from_secs(1))
        .context("none goes there")?;
    base.lab.host("p2b").ns.nft(HEAL)?;
    lab.comes_back(&web)
}

struct Lab<'a> {
    base: &'a ServedLab,
    agent: &'a Agent<'a>,
}

impl Lab<'_> {
    /// Opens this many connections of each family, by both clients and all at once. Returns their
    /// durations, or the first failure.
    fn dial(&self, service: &Service, count: usize, deadline: Duration) -> Result<Vec<Duration>> {
        let clients = (0..count).map(|nth| CLIENTS[nth % CLIENTS.len()]);
        let dials: Vec<_> = clients
            .flat_map(|client| Family::ALL.map(|family| (client, family)))
            .collect();
        let times: Vec<Result<Duration, Fault>> = thread::scope(|scope| {
            let dials = dials.into_iter().map(|(client, family)| {
                let dial = Dial::new(Protocol::Tcp, service.frontend(family)).deadline(deadline);
                let ns = &self.base.lab.host(client).ns;
                scope.spawn(move || {
                    let started = Instant::now();
                    dial.exchange(ns, &[1]).map(|_| started.elapsed())
                })
            });
            let dials: Vec<_> = dials.collect();
            dials
                .into_iter()
                .map(|dial| dial.join().expect("no dial panics"))
                .collect()
        });
        times
            .into_iter()
            .map(|time| time.map_err(|fault| anyhow::anyhow!("{}: {fault:?}", service.name)))
            .collect()
    }

    /// Returns the backends of a Service that get no new connections.
    fn ejected(&self, service: &Service) -> Result<Vec<String>> {
        let silent = self.agent.typed_status()?.silent_backends;
        let of = silent
            .into_iter()
            .filter(|silent| silent.is_ejected && silent.service == full_name(service));
        Ok(of.map(|silent| silent.backend.to_string()).collect())
    }

    /// Dials until these backends of a Service get no new connections, in both families.
    fn until_ejected(&self, service: &Service, hosts: &[&str]) -> Result<()> {
        let mut want: Vec<_> = hosts.iter().flat_map(|host| self.addresses(host)).collect();
        want.sort_unstable();
        wait_until(DEADLINE, "the backends are ejected", || {
            self.dial(service, 12, Duration::from_secs(3))?;
            let mut ejected = self.ejected(service)?;
            ejected.sort_unstable();
            Ok(ejected == want)
        })
        .with_context(|| {
            format!(
                "{:?}",
                self.agent
                    .typed_status()
                    .map(|status| status.silent_backends)
            )
        })
    }

    /// Dials until a backend of a Service counts as silent, in both families.
    fn is_silent(&self, service: &Service, host: &str) -> Result<()> {
        wait_until(DEADLINE, "the backend is silent", || {
            let _some_fail = self.dial(service, 12, Duration::from_millis(2_500));
            let silent = self.agent.typed_status()?.silent_backends;
            let is = |at: &String| {
                silent
                    .iter()
                    .any(|one| one.service == full_name(service) && one.backend.to_string() == *at)
            };
            Ok(self.addresses(host).iter().all(is))
        })
        .with_context(|| {
            format!(
                "{} {host}: {:?}",
                service.name,
                self.agent.typed_status().map(|it| it.silent_backends)
            )
        })
    }

    fn addresses(&self, host: &str) -> [String; 2] {
        let addrs = self.base.lab.host(host).addrs;
        Family::ALL.map(|family| std::net::SocketAddr::new(addrs.ip(family), PORT).to_string())
    }

    fn view(&self, name: &str) -> Result<ServiceView> {
        let output = kpx(
            self.agent.ns(),
            &format!(
                "services -A -o json --run-dir {}",
                self.agent.run_dir().display()
            ),
        )?;
        let views: Vec<ServiceView> =
            serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
        views
            .into_iter()
            .find(|view| view.name == name)
            .context("the Service")
    }
}

fn full_name(service: &Service) -> String {
    format!("default/{}", service.name)
}
