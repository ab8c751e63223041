//! The latency of a connection's first packets, by the number of Services.

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::random_range;
use testbed::netns::NetNs;

use super::figure::{By, Figure, Found, What};
use super::kpx::Probe;
use super::place::{Place, dial};
use super::rules::{command, feed, rules};
use super::{Keep, Options};
use crate::bench::pin;
use crate::control::cluster::{Cluster, NODE_IP, TARGET_PORT, is_udp, newcomer};
use crate::control::fixture::{Fixture, end, node};
use crate::kube_rules::{Proto, ServicePort};

/// The means that are compared with kpx.
const BESIDE: [By; 2] = [By::Nftables, By::IptablesLegacy];
/// Above so many Services all lead to the chains of one: a packet does not notice, and tools load them in seconds.
const WHOLE: u32 = 1_000;
/// The time in which connections are opened, and not measured: those of an agent's first seconds take longer. All means have it.
const WARM_UP: Duration = Duration::from_secs(5);

/// The handshakes through Services, and those without, which took turns.
struct Handshakes {
    through: Vec<Duration>,
    direct: Vec<Duration>,
}

pub(super) fn measure(options: &Options, keep: &mut impl Keep) -> Result<()> {
    of_kpx(options, keep)?;
    for by in BESIDE.into_iter().filter(|by| options.beside.contains(by)) {
        for &services in &options.first_services {
            keep.progress(&format!("first packets, {by}, {services} Services"));
            match of_rules(options, by, services) {
                Ok(handshakes) => tell(by, services, handshakes, keep)?,
                Err(error) => {
                    let found = Found::Failed(format!("{error:#}"));
                    keep.figure(Figure::new(by, (services, 1), What::FirstP50, found))?;
                }
            }
        }
    }
    Ok(())
}

/// Measures one agent whose cluster grows.
fn of_kpx(options: &Options, keep: &mut impl Keep) -> Result<()> {
    let mut sizes = options.first_services.iter().map(|services| Cluster { services: *services, endpoints: 1 });
    let Some(first) = sizes.next() else { return Ok(()) };
    let fixture = Fixture::new(&first)?;
    let place = Place::around(&fixture.netns, NODE_IP)?;
    let (mut agent, _) = fixture.start(&first, &[], Duration::ZERO)?;
    let mut before = first;
    for cluster in [first].into_iter().chain(sizes) {
        keep.progress(&format!("first packets, kpx, {} Services", cluster.services));
        for nth in before.services..cluster.services {
            fixture.server.apply_as_is(&cluster.service(nth))?;
            fixture.server.apply_as_is(&cluster.slice(nth, None))?;
        }
        fixture.grown(&mut agent, &cluster)?;
        tell(By::Kpx, cluster.services, handshakes(&place, &cluster, options.first_connections)?, keep)?;
        before = cluster;
    }
    end(agent)
}

fn of_rules(options: &Options, by: By, services: u32) -> Result<Handshakes> {
    let cluster = Cluster { services, endpoints: 1 };
    let node: NetNs = node()?;
    let place = Place::around(&node, NODE_IP)?;
    let ports = (0..services).map(|nth| {
        // What leads to the chains of another one has its protocol, and no chains for node ports.
        ServicePort { proto: Proto::Tcp, node_port: None, stand_in: services > WHOLE, ..cluster.port(nth, None) }
    });
    let rules = rules(ports, &Probe::after(services), newcomer(0));
    let text = if by == By::Nftables { rules.nftables() } else { rules.iptables() };
    feed(&node, command(by), &text, options.limit)?.context("the rules were not loaded in time")?;
    handshakes(&place, &cluster, options.first_connections)
}

/// Connects to Services at random, and in turn to endpoints at random, one after the other and on one CPU.
fn handshakes(place: &Place, cluster: &Cluster, count: u32) -> Result<Handshakes> {
    let work = || {
        pin()?;
        let mut found = Handshakes { through: Vec::new(), direct: Vec::new() };
        let any = || loop {
            let nth = random_range(0..cluster.services);
            if !is_udp(nth) {
                break nth;
            }
        };
        let warm = Instant::now() + WARM_UP;
        while Instant::now() < warm {
            dial(Cluster::frontend(any()))?;
            dial(SocketAddrV4::new(cluster.first_endpoint(any()), TARGET_PORT))?;
        }
        for _ in 0..count {
            found.through.push(dial(Cluster::frontend(any()))?.connected);
            let endpoint = SocketAddrV4::new(cluster.first_endpoint(any()), TARGET_PORT);
            found.direct.push(dial(endpoint)?.connected);
        }
        Ok(found)
    };
    place.client.run(work)
}

fn tell(by: By, services: u32, handshakes: Handshakes, keep: &mut impl Keep) -> Result<()> {
    let Handshakes { mut through, mut direct } = handshakes;
    ensure!(!through.is_empty(), "no connection was measured");
    through.sort_unstable();
    direct.sort_unstable();
    let at = |times: &[Duration], percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    let figures = [
        (What::FirstP50, at(&through, 50)),
        (What::FirstP99, at(&through, 99)),
        (What::FirstRatio, at(&through, 50) / at(&direct, 50)),
    ];
    figures.into_iter().try_for_each(|(what, value)| keep.figure(Figure::new(by, (services, 1), what, value.into())))
}
