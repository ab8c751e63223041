//! The latency of a connection's first packets, by the number of Services.

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::random_range;
use testbed::cgroup::Visited;
use testbed::netns::NetNs;

use super::figure::{By, Figure, Found, What};
use super::kpx::Probe;
use super::place::{Place, dial};
use super::rules::{command, feed, rules};
use super::{Keep, Options};
use crate::bench::{Order, pin};
use crate::control::cluster::{Cluster, NODE_IP, TARGET_PORT, is_udp, newcomer};
use crate::control::fixture::{Fixture, end, node};
use crate::kube_rules::{Proto, ServicePort};

/// The variants compared with kpx.
const BESIDE: [By; 2] = [By::Nftables, By::IptablesLegacy];
/// Above this number of Services all share one Service's chains, because tools take minutes to load
/// all chains.
const WHOLE: u32 = 1_000;
/// The connections per turn of a cluster size.
const BATCH: usize = 50;

/// The handshakes through Services, and those without, in turns.
#[derive(Default)]
struct Handshakes {
    through: Vec<Duration>,
    direct: Vec<Duration>,
}

/// A node and its cluster.
struct Site<'a> {
    place: Place<'a>,
    cluster: Cluster,
    /// The cgroup of the clients' sockets, on a node with an agent: agents of other nodes do not
    /// translate them.
    cgroup: Option<Visited>,
}

pub(super) fn measure(options: &Options, keep: &mut impl Keep) -> Result<()> {
    of_kpx(options, keep)?;
    BESIDE
        .into_iter()
        .filter(|by| options.beside.contains(by))
        .try_for_each(|by| of_rules(options, by, keep))
}

fn of_kpx(options: &Options, keep: &mut impl Keep) -> Result<()> {
    let cluster = |services: &u32| Cluster {
        services: *services,
        endpoints: 1,
    };
    let clusters: Vec<_> = options.first_services.iter().map(cluster).collect();
    let fixtures = clusters
        .iter()
        .map(Fixture::new)
        .collect::<Result<Vec<_>>>()?;
    let mut sites = Vec::new();
    let mut agents = Vec::new();
    for (fixture, cluster) in fixtures.iter().zip(clusters) {
        keep.progress(&format!(
            "first packets, kpx, {} Services",
            cluster.services
        ));
        let cgroup = Visited::make()?;
        let flags = [
            "--cgroup-root".to_owned(),
            cgroup.path().display().to_string(),
        ];
        sites.push(Site {
            place: Place::around(&fixture.netns, NODE_IP)?,
            cluster,
            cgroup: Some(cgroup),
        });
        agents.push(fixture.start(&cluster, &flags, options.calm)?.0);
    }
    compare(options, By::Kpx, &sites, keep)?;
    agents.into_iter().try_for_each(end)
}

fn of_rules(options: &Options, by: By, keep: &mut impl Keep) -> Result<()> {
    let nodes = options
        .first_services
        .iter()
        .map(|_| node())
        .collect::<Result<Vec<_>>>()?;
    let mut sites = Vec::new();
    for (node, &services) in nodes.iter().zip(&options.first_services) {
        keep.progress(&format!("first packets, {by}, {services} Services"));
        match loaded(options, by, node, services) {
            Ok(site) => sites.push(site),
            Err(error) => fail(by, services, &error, keep)?,
        }
    }
    compare(options, by, &sites, keep)
}

/// Loads the rules of a number of Services.
fn loaded<'a>(options: &Options, by: By, node: &'a NetNs, services: u32) -> Result<Site<'a>> {
    let cluster = Cluster {
        services,
        endpoints: 1,
    };
    let place = Place::around(node, NODE_IP)?;
    let ports = (0..services).map(|nth| {
        // A port that shares another port's chains needs its protocol, and has no node-port chains.
        ServicePort {
            proto: Proto::Tcp,
            node_port: None,
            stand_in: services > WHOLE,
            ..cluster.port(nth, None)
        }
    });
    let rules = rules(ports, &Probe::after(services), newcomer(0));
    let text = if by == By::Nftables {
        rules.nftables()
    } else {
        rules.iptables()
    };
    feed(node, command(by), &text, options.limit)?.context("the rules were not loaded in time")?;
    Ok(Site {
        place,
        cluster,
        cgroup: None,
    })
}

/// Measures all sizes in turn: the machine's speed varies from minute to minute.
fn compare(options: &Options, by: By, sites: &[Site<'_>], keep: &mut impl Keep) -> Result<()> {
    let mut all: Vec<_> = sites
        .iter()
        .map(|site| {
            (
                site,
                site.warm_up(options.warm_up)
                    .map(|()| Handshakes::default()),
            )
        })
        .collect();
    let places: Vec<_> = (0..all.len()).collect();
    let mut order = Order::new(1);
    for begin in (0..options.first_connections).step_by(BATCH) {
        let count = (options.first_connections - begin).min(BATCH as u32);
        for nth in order.shuffled(&places) {
            let (site, found) = &mut all[*nth];
            if let Ok(handshakes) = found
                && let Err(error) = site.handshakes(count, handshakes)
            {
                *found = Err(error);
            }
        }
    }
    for (site, found) in all {
        match found {
            Ok(found) => report(by, site.cluster.services, found, keep)?,
            Err(error) => fail(by, site.cluster.services, &error, keep)?,
        }
    }
    Ok(())
}

fn fail(by: By, services: u32, error: &anyhow::Error, keep: &mut impl Keep) -> Result<()> {
    keep.figure(Figure::new(
        by,
        (services, 1),
        What::FirstP50,
        Found::Failed(format!("{error:#}")),
    ))
}

impl Site<'_> {
    fn warm_up(&self, time: Duration) -> Result<()> {
        let warm = Instant::now() + time;
        while Instant::now() < warm {
            self.handshakes(BATCH as u32, &mut Handshakes::default())?;
        }
        Ok(())
    }

    /// Connects to random Services and random endpoints in turn, sequentially and on one CPU.
    fn handshakes(&self, count: u32, found: &mut Handshakes) -> Result<()> {
        let any = || loop {
            let nth = random_range(0..self.cluster.services);
            if !is_udp(nth) {
                break nth;
            }
        };
        let dials = || {
            pin()?;
            for _ in 0..count {
                found
                    .through
                    .push(dial(Cluster::frontend(any()))?.connected);
                let endpoint = SocketAddrV4::new(self.cluster.first_endpoint(any()), TARGET_PORT);
                found.direct.push(dial(endpoint)?.connected);
            }
            Ok(())
        };
        let run = || self.place.client.run(dials);
        match &self.cgroup {
            Some(cgroup) => cgroup.visit(run)?,
            None => run(),
        }
    }
}

fn report(by: By, services: u32, handshakes: Handshakes, keep: &mut impl Keep) -> Result<()> {
    let Handshakes {
        mut through,
        mut direct,
    } = handshakes;
    ensure!(!through.is_empty(), "no connection was measured");
    through.sort_unstable();
    direct.sort_unstable();
    let at = |times: &[Duration], percent: usize| {
        times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6
    };
    let figures = [
        (What::FirstP50, at(&through, 50)),
        (What::FirstP99, at(&through, 99)),
        (What::FirstRatio, at(&through, 50) / at(&direct, 50)),
        (What::FirstRatioP99, at(&through, 99) / at(&direct, 99)),
    ];
    figures.into_iter().try_for_each(|(what, value)| {
        keep.figure(Figure::new(by, (services, 1), what, value.into()))
    })
}
