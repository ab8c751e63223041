//! Backends that are late, that come and go, or are cut off with all other backends: only their own
//! connections suffer.

use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, Service, idle, wait_until};
use testbed::lab::{Family, Layout, TunnelKind};
use testbed::served_lab::ServedLab;

use super::late::Late;
use super::{CLIENTS, CUT, HEAL, Lab, PORT, REFUSE};

/// Longer than a connection takes, and shorter than a client's first retransmission timeout.
const PROMPT: Duration = Duration::from_millis(700);

/// The reported changes of one backend during the test: two, and two more after a back-off of five
/// seconds.
const TOLD: usize = 4;

#[test]
fn late_flapping_and_cut_off_backends_take_no_others_down() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve(&["p1b", "p2a", "p2b"], PORT)?;
    let web = Service::new("web", 10, &["p1b", "p2a", "p2b"], PORT);
    let far = Service::new("far", 11, &["p2a", "p2b"], PORT);
    let single = Service::new("single", 12, &["p2a"], PORT);
    let calm = Service::new("calm", 13, &["p1b", "p2b"], PORT);
    [&web, &far, &single, &calm]
        .into_iter()
        .try_for_each(|service| base.put(service))?;
    let agent = base.kpx(&["--backend-health=on"])?;
    let lab = Lab {
        base: &base,
        agent: &agent,
    };

    // Late within the client's timer of one second: the backend serves, and goes unreported.
    let late = Late::start(base.lab.host("p2b"), Duration::from_millis(600))?;
    for _ in 0..2 {
        let times = lab.connect(&web, 24)?;
        let late = times
            .iter()
            .filter(|time| **time >= Duration::from_millis(600))
            .count();
        ensure!(late > 0 && late < times.len(), "{times:?}");
        ensure!(
            times.iter().all(|time| *time < Duration::from_millis(990)),
            "no SYN came again: {times:?}"
        );
    }
    let silent = agent.typed_status()?.silent_backends;
    ensure!(silent.is_empty(), "{silent:?}");
    late.stop()?;

    // Later than that: clients leave the backend, the node ejects it, and the other backends serve.
    let late = Late::start(base.lab.host("p2b"), Duration::from_millis(1_400))?;
    wait_until(DEADLINE, "the late backend is ejected", || {
        let times = lab.connect(&web, 24)?;
        ensure!(
            times
                .iter()
                .all(|time| *time < Duration::from_millis(2_600)),
            "{times:?}"
        );
        let mut ejected = lab.ejected(&web)?;
        ejected.sort_unstable();
        Ok(ejected == lab.addresses("p2b"))
    })?;
    let times = lab.connect(&web, 24)?;
    ensure!(
        times.iter().all(|time| *time < PROMPT),
        "the others serve: {times:?}"
    );
    late.stop()?;

    // The node is cut off from all other nodes. Where these have more than half of a Service's
    // backends, kpx ejects none.
    let n1 = &base.lab.n1.host.ns;
    n1.nft(
        "table inet cut { chain c { type filter hook forward priority 0; oifname \"eth0\" tcp dport 8080 drop; }; }",
    )?;
    wait_until(DEADLINE, "all that are elsewhere are silent", || {
        let _fails = lab.dial(&far, 12, Duration::from_millis(2_500));
        let silent = agent.typed_status()?.silent_backends;
        Ok(silent
            .iter()
            .filter(|silent| silent.service == "default/far")
            .count()
            == 4)
    })?;
    ensure!(lab.ejected(&far)?.is_empty(), "{:?}", lab.ejected(&far)?);
    // Two of three are silent, so all three get connections, at random.
    wait_until(DEADLINE, "the node's own pod serves on", || {
        Ok(lab.dial(&web, 1, PROMPT).is_ok())
    })?;
    let waits = thread::scope(|scope| {
        let waits = scope.spawn(|| lab.dial(&far, 2, Duration::from_secs(20)));
        idle(Duration::from_millis(1_500))?;
        n1.nft(HEAL)?;
        waits.join().expect("no dial panics")
    })?;
    // The clients repeat their SYNs after 1, 3 and 7 s.
    ensure!(
        waits.iter().all(|time| *time < Duration::from_secs(4)),
        "with the next SYN: {waits:?}"
    );
    let times = lab.dial(&far, 6, Duration::from_secs(3))?;
    ensure!(
        times.iter().all(|time| *time < PROMPT),
        "new ones at once: {times:?}"
    );

    lab.is_told_rarely(&single, &calm)?;
    lab.comes_back(&web)?;
    agent.stop()
}

#[test]
fn waiting_connections_leave_silent_backends_by_tunnels_and_bridges() -> Result<()> {
    for layout in [Layout::Vxlan, Layout::Tunnel(TunnelKind::Tun)] {
        let base = ServedLab::with_manifests(layout)?.serve(&["p1b", "p2a"], PORT)?;
        let web = Service::new("web", 10, &["p1b", "p2a"], PORT)
            .annotation("kpx.dev/lb-algorithm", "round-robin");
        base.put(&web)?;
        let agent = base.kpx(&["--backend-health=on"])?;
        let lab = Lab {
            base: &base,
            agent: &agent,
        };
        let times = lab.dial(&web, 4, Duration::from_secs(3))?;
        ensure!(
            times.iter().all(|time| *time < PROMPT),
            "{layout:?}: {times:?}"
        );
        base.lab.host("p2a").ns.nft(CUT)?;
        let times = lab
            .dial(&web, 4, Duration::from_secs(3))
            .with_context(|| format!("{layout:?}"))?;
        let moved = times
            .iter()
            .filter(|time| **time > Duration::from_millis(900))
            .count();
        ensure!(
            moved == 4,
            "half of either family, with the second SYN, in {layout:?}: {times:?}"
        );
        ensure!(
            times
                .iter()
                .all(|time| *time < Duration::from_millis(1_900)),
            "{layout:?}: {times:?}"
        );
        agent.stop()?;
    }
    Ok(())
}

impl Lab<'_> {
    /// Connects this many times in each family, by both clients and all at once. Returns the
    /// durations.
    fn connect(&self, service: &Service, count: usize) -> Result<Vec<Duration>> {
        let clients = (0..count).map(|nth| CLIENTS[nth % CLIENTS.len()]);
        let dials = clients.flat_map(|client| Family::ALL.map(|family| (client, family)));
        let times: Vec<_> = thread::scope(|scope| {
            let dials = dials.map(|(client, family)| {
                let ns = &self.base.lab.host(client).ns;
                let to = service.frontend(family);
                scope.spawn(move || {
                    ns.run(|| {
                        let started = Instant::now();
                        TcpStream::connect_timeout(&to, Duration::from_secs(3))
                            .map(|_| started.elapsed())
                    })
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
            .map(|time| time.with_context(|| service.name))
            .collect()
    }

    /// Returns the silent backends of a Service, ejected or not.
    fn silent(&self, service: &Service) -> Result<Vec<String>> {
        let silent = self.agent.typed_status()?.silent_backends.into_iter();
        let of = silent.filter(|silent| silent.service == super::full_name(service));
        Ok(of.map(|silent| silent.backend.to_string()).collect())
    }

    /// Dials until no backend of a Service is silent.
    pub(super) fn comes_back(&self, service: &Service) -> Result<()> {
        wait_until(DEADLINE, "all backends of the Service answer", || {
            self.dial(service, 6, Duration::from_secs(3))?;
            Ok(self.silent(service)?.is_empty())
        })
    }

    /// Makes the backend of a Service come and go as fast as possible. The log has few lines about
    /// it, like the Events, and a Service with other backends serves all the time.
    fn is_told_rarely(&self, service: &Service, calm: &Service) -> Result<()> {
        let others_serve = || -> Result<()> {
            let times = self
                .dial(calm, 6, Duration::from_secs(3))
                .context("a Service without the backend")?;
            ensure!(
                times.iter().all(|time| *time < PROMPT),
                "the others serve: {times:?}"
            );
            Ok(())
        };
        for _ in 0..6 {
            self.base.lab.host("p2a").ns.nft(REFUSE)?;
            wait_until(DEADLINE, "the backend is silent", || {
                let _fails = self.dial(service, 4, Duration::from_secs(1));
                others_serve()?;
                Ok(self.silent(service)?.len() == 2)
            })?;
            self.base.lab.host("p2a").ns.nft(HEAL)?;
            wait_until(DEADLINE, "the backend answers", || {
                self.dial(service, 2, Duration::from_secs(1))?;
                others_serve()?;
                Ok(self.silent(service)?.is_empty())
            })?;
        }
        let log = self.agent.log();
        let reported = log
            .lines()
            .filter(|line| line.contains("backends") && line.contains(&super::full_name(service)))
            .count();
        ensure!(
            (2..=2 * TOLD).contains(&reported),
            "{reported} lines of two families\n{log}"
        );
        Ok(())
    }
}
