//! kpx in a large cluster: its start, its changes, and its restart under load.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::agent::Agent;
use testbed::http::scrape;
use testbed::netns::NetNs;

use super::Options;
use super::figure::{Found, What};
use super::load::{Dialers, Dials, Streams, Waits};
use super::place::{Place, STREAM_PORT, dial};
use crate::control::cluster::{Cluster, NODE_IP, is_udp, newcomer};
use crate::control::events::{self, Changes};
use crate::control::fixture::{Fixture, end};
use crate::control::process::Process;

/// The number of changes with a measured first packet.
const FOLLOWED: u32 = 40;
/// The number of open connections of the idle measurement.
const HELD: usize = 1_000;
/// Time limit for a packet that follows a change.
pub(super) const FOLLOWS: Duration = Duration::from_secs(60);

pub(super) fn measure(
    options: &Options,
    cluster: &Cluster,
    put: &mut impl FnMut(What, Found),
) -> Result<()> {
    let fixture = Fixture::new(cluster)?;
    let place = Place::around(&fixture.netns, NODE_IP)?;

    let streams = Streams::start(&place, past(cluster))?;
    let (agent, start) = fixture.start(cluster, &[], options.calm)?;
    waits(streams, [What::StartWait, What::StartWaitBeside], put)?;
    put(What::Lists, start.lists_ms.into());
    put(What::Programmed, start.programmed_ms.into());
    put(What::StartCpu, start.cpu_ms.into());
    put(What::StartBytes, Found::mebibytes(start.bytes_sent));
    put(What::Resident, Found::mebibytes(start.memory.resident));
    put(What::PeakResident, Found::mebibytes(start.memory.peak));
    put(What::KernelMemory, Found::mebibytes(fixture.map_memory()?));

    let probe = Probe::add(&fixture, cluster.services)?;
    probe.wait(&place)?;
    put(
        What::IdleCpu,
        idle(Process(agent.pid()), &place, &probe, options)?,
    );
    let streams = Streams::start(&place, probe.stream())?;
    let at = |rate| {
        events::measure(&fixture, &agent, cluster, rate, options.duration)
            .with_context(|| format!("{rate} changes/s"))
    };
    let at_100 = at(100)?;
    let at_1000 = at(1_000)?;
    waits(streams, [What::ChangeWait, What::ChangeWaitBeside], put)?;
    changes(&at_100, &at_1000, put);
    let (mean, p99) = sli(&fixture.netns)?;
    put(What::SliMean, (mean * 1e3).into());
    put(What::SliP99, (p99 * 1e3).into());
    follow(&probe, &fixture, &place, put)?;
    restart(&fixture, &place, cluster, agent, &probe, options, put)
}

/// Returns an endpoint's address for streams without a Service.
pub(super) fn past(cluster: &Cluster) -> SocketAddrV4 {
    SocketAddrV4::new(cluster.first_endpoint(0), STREAM_PORT)
}

pub(super) fn waits(
    streams: Streams,
    [through, beside]: [What; 2],
    put: &mut impl FnMut(What, Found),
) -> Result<()> {
    let Waits {
        through: of_node,
        beside: of_machine,
    } = streams.finish()?;
    put(through, of_node.into());
    put(beside, of_machine.into());
    Ok(())
}

/// Returns an idle proxy's share of a core, with quiet connections.
pub(super) fn idle(
    proxy: Process,
    place: &Place,
    probe: &Probe,
    options: &Options,
) -> Result<Found> {
    let _held = place.hold(probe.stream(), HELD)?;
    Ok(Found::Value(proxy.share(options.duration * 3)?))
}

fn follow(
    probe: &Probe,
    fixture: &Fixture,
    place: &Place,
    put: &mut impl FnMut(What, Found),
) -> Result<()> {
    let follow = |nth| probe.follow(fixture, place, nth, false, FOLLOWS);
    put_followed((0..FOLLOWED).map(follow).collect::<Result<_>>()?, put);
    Ok(())
}

/// Records the median and the maximum of the times to a first packet.
pub(super) fn put_followed(mut times: Vec<Duration>, put: &mut impl FnMut(What, Found)) {
    times.sort_unstable();
    put(What::FirstFollowsP50, times[times.len() / 2].into());
    put(What::FirstFollowsMax, times[times.len() - 1].into());
}

fn changes(at_100: &Changes, at_1000: &Changes, put: &mut impl FnMut(What, Found)) {
    put(What::Change100P50, at_100.p50_ms.into());
    put(What::Change100P99, at_100.p99_ms.into());
    put(What::Change1000P50, at_1000.p50_ms.into());
    put(What::Change1000P99, at_1000.p99_ms.into());
    put(What::Change1000Cpu, at_1000.cpu_us_per_change.into());
    put(What::ChangeBytes, at_1000.bytes_per_change.into());
}

/// Returns the mean of `network_programming_duration_seconds`, and the upper bound of the bucket
/// with its 99th percentile.
fn sli(node: &NetNs) -> Result<(f64, f64)> {
    const NAME: &str = "kubeproxy_network_programming_duration_seconds";
    let metrics = scrape(node)?;
    let samples = &metrics
        .get(NAME)
        .with_context(|| format!("no {NAME}"))?
        .samples;
    let of_v4 = || {
        samples.iter().filter(|sample| {
            sample
                .labels
                .get("ip_family")
                .is_some_and(|family| family == "IPv4")
        })
    };
    let named = |suffix: &str| {
        of_v4()
            .find(|sample| sample.name == format!("{NAME}{suffix}"))
            .map(|sample| sample.value)
    };
    let count = named("_count").context("no count")?;
    ensure!(count > 0.0, "no change was counted");
    let is_enough = |sample: &&testbed::exposition::Sample| {
        sample.name.ends_with("_bucket") && sample.value >= count * 0.99
    };
    let bound = of_v4()
        .filter(is_enough)
        .filter_map(|sample| sample.labels.get("le")?.parse::<f64>().ok());
    Ok((
        named("_sum").context("no sum")? / count,
        bound.fold(f64::INFINITY, f64::min),
    ))
}

/// A Service with one changing endpoint, and a Service for streams.
pub(super) struct Probe {
    nth: u32,
    one: Cluster,
}

impl Probe {
    /// Numbers the two Services after all others.
    pub(super) fn after(services: u32) -> Self {
        // The probe uses TCP, and so does the next Service.
        let nth = services.next_multiple_of(10);
        Self {
            nth,
            one: Cluster {
                services: nth + 2,
                endpoints: 1,
            },
        }
    }

    pub(super) fn add(fixture: &Fixture, services: u32) -> Result<Self> {
        let probe = Self::after(services);
        let [mut service, mut slice] = [
            probe.one.service(probe.nth + 1),
            probe.one.slice(probe.nth + 1, Some(newcomer(1))),
        ];
        service["spec"]["ports"][0]["targetPort"] = json!(STREAM_PORT);
        slice["ports"][0]["port"] = json!(STREAM_PORT);
        let objects = [
            probe.one.service(probe.nth),
            probe.one.slice(probe.nth, Some(newcomer(0))),
            service,
            slice,
        ];
        objects
            .iter()
            .try_for_each(|object| fixture.server.apply_as_is(object))?;
        Ok(probe)
    }

    /// Returns the first Service's endpoint as an Endpoints object, for proxies without
    /// EndpointSlices v1.
    pub(super) fn endpoints_object(&self, addr: Ipv4Addr) -> Value {
        self.one.endpoints_object(self.nth, Some(addr))
    }

    pub(super) fn frontend(&self) -> SocketAddrV4 {
        Cluster::frontend(self.nth)
    }

    pub(super) fn stream(&self) -> SocketAddrV4 {
        Cluster::frontend(self.nth + 1)
    }

    /// Returns the ports of both Services, the first with that endpoint.
    pub(super) fn ports(&self, addr: Ipv4Addr) -> [crate::kube_rules::ServicePort; 2] {
        let [first, mut second] = [
            self.one.port(self.nth, Some(addr)),
            self.one.port(self.nth + 1, Some(newcomer(1))),
        ];
        second
            .endpoints
            .iter_mut()
            .for_each(|endpoint| endpoint.set_port(STREAM_PORT));
        [first, second]
    }

    /// Waits until both Services are served.
    pub(super) fn wait(&self, place: &Place) -> Result<()> {
        let is_served = || {
            let served = dial(self.frontend()).is_ok()
                && std::net::TcpStream::connect(self.stream()).is_ok();
            Ok(served)
        };
        testbed::agent::wait_until(FOLLOWS, "the probes are served", || {
            place.client.run(is_served)
        })
    }

    /// Changes the first Service's endpoint at the API server, for old proxies in its Endpoints
    /// object. Returns the time to the first packet that follows.
    pub(super) fn follow(
        &self,
        fixture: &Fixture,
        place: &Place,
        nth: u32,
        is_old: bool,
        within: Duration,
    ) -> Result<Duration> {
        let addr = newcomer(100 + nth);
        let object = if is_old {
            self.endpoints_object(addr)
        } else {
            let mut slice = self.one.slice(self.nth, Some(addr));
            events::trigger(&mut slice);
            slice
        };
        self.first_packet(place, addr, within, || fixture.server.apply_as_is(&object))
    }

    /// Dials continuously, makes the change, and returns the time from its beginning to the first
    /// connection that its endpoint answers. Fails after `within`.
    pub(super) fn first_packet(
        &self,
        place: &Place,
        addr: Ipv4Addr,
        within: Duration,
        change: impl FnOnce() -> Result<()>,
    ) -> Result<Duration> {
        let stop = AtomicBool::new(false);
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let stop = &stop;
            let dials = move || {
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    if dial(self.frontend()).is_ok_and(|dialled| dialled.by == addr) {
                        let _ = sender.send(began); // The receiver may have given up.
                        return;
                    }
                }
            };
            scope.spawn(move || place.client.run(dials));
            let changed = Instant::now();
            let first = change().and_then(|()| {
                receiver
                    .recv_timeout(within)
                    .context("no packet followed a change")
            });
            stop.store(true, Ordering::Relaxed);
            Ok(first?.saturating_duration_since(changed))
        })
    }
}

/// Kills the agent and starts a new agent, while pods open connections.
fn restart(
    fixture: &Fixture,
    place: &Place,
    cluster: &Cluster,
    mut agent: Agent<'_>,
    probe: &Probe,
    options: &Options,
    put: &mut impl FnMut(What, Found),
) -> Result<()> {
    let served = (0..cluster.services).filter(|nth| !is_udp(*nth));
    let targets: Vec<_> = served.map(Cluster::frontend).collect();
    let streams = Streams::start(place, probe.stream())?;
    let dialers = Dialers::start(&place.client, &targets, options.per_second)?;
    thread::sleep(options.calm);
    agent.kill()?;
    let began = Instant::now();
    let agent = fixture.start_again()?;
    let took = began.elapsed();
    thread::sleep(options.calm);
    let mut dials = dialers.finish()?;
    if let Err(error) = waits(streams, [What::RestartWait, What::RestartWaitBeside], put) {
        dials.failed += 1;
        dials
            .why
            .get_or_insert_with(|| format!("an open connection: {error:#}"));
    }
    put(What::Restart, took.into());
    became(&dials, put);
    end(agent)
}

/// Records the connections' results: the number of losses, and the first loss' reason as a failure.
fn became(dials: &Dials, put: &mut impl FnMut(What, Found)) {
    let all = dials.opened + dials.failed;
    put(What::RestartDialled, (all as f64).into());
    put(What::RestartLost, (dials.failed as f64).into());
    if let Some(why) = &dials.why {
        put(
            What::RestartLostWhy,
            Found::Failed(format!(
                "{} of {all} connections lost, the first: {why}",
                dials.failed
            )),
        );
    }
    put(What::RestartLongest, dials.longest.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_connections_are_counted_with_the_first_reason() {
        let put_of = |dials: &Dials| {
            let mut all = Vec::new();
            became(dials, &mut |what, found| all.push((what, found)));
            all
        };
        let lost = Dials {
            opened: 997,
            failed: 3,
            why: Some("no answer".to_owned()),
            ..Dials::default()
        };
        let expected = [
            (What::RestartDialled, Found::Value(1_000.0)),
            (What::RestartLost, Found::Value(3.0)),
            (
                What::RestartLostWhy,
                Found::Failed("3 of 1000 connections lost, the first: no answer".to_owned()),
            ),
            (What::RestartLongest, Found::Value(0.0)),
        ];
        assert_eq!(put_of(&lost), expected);
        let none = put_of(&Dials {
            opened: 1_000,
            ..Dials::default()
        });
        assert!(
            none.contains(&(What::RestartLost, Found::Value(0.0))),
            "{none:?}"
        );
        assert!(
            none.iter()
                .all(|(_, found)| matches!(found, Found::Value(_))),
            "{none:?}"
        );
    }
}
