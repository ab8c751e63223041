//! The kept samples and their times. Pure.
//!
//! A point has 60 bytes: the points of a Service take 5.4 kB, those of [`SERVICES`] 1.4 MB. Each UDP
//! port of a Service takes 1.1 kB more. The last sample takes about 320 bytes per Service that ever
//! had traffic, and 50 more per UDP port.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::rates::{Rates, per_second};
use crate::{
    HistoryView, PortCounts, PortSums, SeriesView, ServiceSeriesView, UdpPortView, quantile,
};
use jiff::Timestamp;
use proxy_common::addr::Proto;
use proxy_common::connect::Connects;
use proxy_core::input::ObjectName;
use proxy_core::udp::UdpOutcomes;

use super::{STEP, shared};

/// The number of points: 15 minutes of 10 s.
pub(super) const POINTS: usize = 90;
/// The maximum number of Services with points.
pub(super) const SERVICES: usize = 256;
/// The maximum number of UDP ports of a Service with their own points.
const UDP_PORTS: usize = 8;

/// The traffic of each Service that had any since the programs were loaded.
#[derive(Debug, Default)]
pub struct Traffic(BTreeMap<ObjectName, Sums>);

/// The traffic of a Service.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    counts: PortCounts,
    connects: Connects,
    /// The outcomes of UDP flows, ordered by port.
    udp: Box<[(u16, UdpOutcomes)]>,
}

/// The traffic between two samples, of a Service or of several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change {
    pub counts: PortCounts,
    pub connects: Connects,
    pub udp: UdpOutcomes,
    /// The number of connections and UDP flows that failed: flows without an answer fail at ports
    /// that expect answers.
    failed: u64,
}

impl Sums {
    /// Sums ports; `None` without ports.
    fn of<'a>(ports: impl Iterator<Item = &'a PortSums>) -> Option<Self> {
        let mut sums: Option<Self> = None;
        let mut udp = Vec::new();
        for port in ports {
            let sums = sums.get_or_insert_default();
            sums.counts.add(&port.counts);
            sums.connects += port.connects;
            if port.proto == Proto::UDP {
                udp.push((port.port, port.udp));
            }
        }
        udp.sort_unstable_by_key(|(port, _)| *port);
        sums.map(|sums| Self {
            udp: udp.into(),
            ..sums
        })
    }

    /// Returns the traffic since `before`.
    pub fn since(&self, before: &Self) -> Change {
        let connects = self.connects.since(&before.connects);
        let mut change = Change {
            counts: self.counts.since(&before.counts),
            connects,
            udp: UdpOutcomes::default(),
            failed: connects.failed(),
        };
        for (_, udp, expects_answers) in self.udp_since(before) {
            change.udp = change.udp.plus(udp);
            if expects_answers {
                change.failed = change.failed.saturating_add(udp.unanswered);
            }
        }
        change
    }

    /// Returns the outcomes since `before` of each UDP port, and whether the port expects answers.
    fn udp_since(&self, before: &Self) -> impl Iterator<Item = (u16, UdpOutcomes, bool)> {
        self.udp.iter().map(|(port, udp)| {
            let known = before.udp.binary_search_by_key(port, |(known, _)| *known);
            let before = known.map_or_else(|_| UdpOutcomes::default(), |at| before.udp[at].1);
            (*port, udp.since(before), udp.expect_answers(*port))
        })
    }
}

impl Change {
    pub fn add(&mut self, other: &Self) {
        self.counts.add(&other.counts);
        self.connects += other.connects;
        self.udp = self.udp.plus(other.udp);
        self.failed = self.failed.saturating_add(other.failed);
    }
}

/// Returns true if a port had no traffic.
fn is_idle(port: &PortSums) -> bool {
    let PortCounts {
        flows_opened,
        flows,
        packets,
        packets_returned,
        dropped,
        rejected,
        ..
    } = port.counts;
    flows_opened + flows + packets + packets_returned + dropped + rejected == 0
}

impl Traffic {
    /// Sums the ports of each Service, which are adjacent. Collected at once, the tree's nodes are
    /// full; one by one, they would be half empty.
    pub fn of(ports: &[PortSums]) -> Self {
        let services = ports.chunk_by(|a, b| a.service == b.service);
        let services = services.filter_map(|ports| {
            let sums = Sums::of(ports.iter().filter(|port| !is_idle(port)))?;
            Some((ports[0].service.clone(), sums))
        });
        Self(services.collect())
    }
}

/// The values of a step, as `f32` to save memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Point {
    opened: f32,
    packets: f32,
    bytes: f32,
    dropped: f32,
    rejected: f32,
    flows: f32,
    connects: f32,
    /// The median connect time in seconds; `None` if no connection was answered.
    p50: Option<f32>,
    p99: Option<f32>,
    failed: f32,
    retransmitted: f32,
    udp_answered: f32,
    udp_unanswered: f32,
}

/// The sizes in the module's comment.
const _: () = assert!(size_of::<(ObjectName, Sums)>() == 312);
const _: () = assert!(size_of::<Option<Point>>() == 60);

impl Point {
    /// Returns the point of the traffic of `secs` seconds.
    #[expect(clippy::cast_possible_truncation, reason = "a rate for a curve")]
    #[expect(clippy::cast_precision_loss, reason = "a number of flows for a curve")]
    fn of(change: &Change, secs: f64) -> Self {
        let rates = Rates::of_counts(&change.counts, secs);
        let connects = &change.connects;
        let rate = |count| per_second(count, secs) as f32;
        let quantile = |part| quantile(connects, part).map(|secs| secs as f32);
        Self {
            opened: rates.opened as f32,
            packets: rates.packets as f32,
            bytes: rates.bytes as f32,
            dropped: rates.dropped as f32,
            rejected: rates.rejected as f32,
            flows: rates.flows as f32,
            connects: rate(connects.answered()),
            p50: quantile(0.5),
            p99: quantile(0.99),
            failed: rate(change.failed),
            retransmitted: rate(connects.retransmitted),
            udp_answered: rate(change.udp.answered),
            udp_unanswered: rate(change.udp.unanswered),
        }
    }

    /// Returns a measure of how busy the Service is.
    fn activity(&self) -> f32 {
        self.packets + self.opened + self.dropped + self.rejected + self.failed
    }
}

/// The last points of a Service or of the total, newest last; `None` in a gap.
#[derive(Debug)]
struct Track<P = Point>(VecDeque<Option<P>>);

impl<P> Default for Track<P> {
    /// Reserves the exact capacity: a growing queue would reserve 128 points.
    fn default() -> Self {
        Self(VecDeque::with_capacity(POINTS))
    }
}

impl<P> Track<P> {
    fn push(&mut self, point: Option<P>) {
        if self.0.len() == POINTS {
            self.0.pop_front();
        }
        self.0.push_back(point);
    }
}

impl Track {
    fn activity(&self) -> f32 {
        self.0.iter().flatten().map(Point::activity).sum()
    }
}

/// The UDP flows per second of a port: answered, unanswered.
type UdpRates = [f32; 2];

/// The last points of a Service.
#[derive(Debug, Default)]
struct ServiceTrack {
    all: Track,
    /// The points of each UDP port, if the Service has several; one UDP port has those of the
    /// Service.
    udp: BTreeMap<u16, Track<UdpRates>>,
}

/// A step of a Service.
#[derive(Clone, Debug, Default)]
struct Step {
    all: Point,
    udp: BTreeMap<u16, UdpRates>,
}

impl Step {
    #[expect(clippy::cast_possible_truncation, reason = "a rate for a curve")]
    fn of(now: &Sums, before: &Sums, change: &Change, secs: f64) -> Self {
        let rate = |count| per_second(count, secs) as f32;
        let udp = now.udp_since(before);
        Self {
            all: Point::of(change, secs),
            udp: udp
                .map(|(port, udp, _)| (port, [rate(udp.answered), rate(udp.unanswered)]))
                .collect(),
        }
    }
}

impl ServiceTrack {
    fn push(&mut self, step: Option<Step>) {
        let Some(Step { all, mut udp }) = step else {
            self.all.push(None);
            self.udp.values_mut().for_each(|track| track.push(None));
            return;
        };
        self.all.push(Some(all));
        // An idle port keeps its points, unless other ports need the place.
        let new = udp.keys().filter(|port| !self.udp.contains_key(port));
        if self.udp.len() + new.count() > UDP_PORTS {
            self.udp.retain(|port, _| udp.contains_key(port));
        }
        if udp.len() <= UDP_PORTS {
            udp.keys().for_each(|port| {
                self.udp.entry(*port).or_default();
            });
        }
        for (port, track) in &mut self.udp {
            track.push(Some(udp.remove(port).unwrap_or_default()));
        }
    }

    fn udp_ports(&self) -> Vec<UdpPortView> {
        let views = self.udp.iter().map(|(port, Track(points))| {
            let known = points.iter().flatten();
            #[expect(clippy::cast_precision_loss, reason = "at most 90 points")]
            let number = known.clone().count().max(1) as f32;
            let mean = |part: usize| {
                let sum: f32 = known.clone().map(|rates| rates[part]).sum();
                rounded(sum / number, 1e6)
            };
            UdpPortView {
                port: *port,
                answered: mean(0),
                unanswered: mean(1),
            }
        });
        views.collect()
    }
}

/// The points of the last minutes.
#[derive(Debug, Default)]
pub struct Kept {
    /// The instant, the time and the traffic of the last sample.
    last: Option<(Instant, Timestamp, Traffic)>,
    total: Track,
    services: BTreeMap<ObjectName, ServiceTrack>,
    /// The Services with failures in the last step, including Services without points.
    failing: BTreeMap<ObjectName, Failures>,
    left_out: usize,
}

/// The failures of a Service in the last step, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Failures {
    /// The packets that were dropped or rejected.
    pub unserved: f64,
    /// The connections and UDP flows that backends refused or left unanswered.
    pub failed: f64,
}

impl Failures {
    fn of(point: &Point) -> Self {
        Self {
            unserved: rounded(point.dropped + point.rejected, 1e3),
            failed: rounded(point.failed, 1e3),
        }
    }

    fn sum(&self) -> f64 {
        self.unserved + self.failed
    }
}

/// Returns the Services with the most failures, at most [`SERVICES`].
fn failing(points: &BTreeMap<ObjectName, Step>) -> BTreeMap<ObjectName, Failures> {
    let failures = points
        .iter()
        .map(|(name, step)| (name, Failures::of(&step.all)));
    let mut failing: Vec<_> = failures
        .filter(|(_, failures)| failures.sum() > 0.0)
        .collect();
    failing.sort_by(|(_, a), (_, b)| b.sum().total_cmp(&a.sum()));
    shared(failing, SERVICES, |(name, _)| &name.namespace)
        .into_iter()
        .map(|(name, failures)| (name.clone(), failures))
        .collect()
}

impl Kept {
    pub fn last(&self) -> Option<&Traffic> {
        self.last.as_ref().map(|(_, _, traffic)| traffic)
    }

    /// Returns true if at least half a step has passed between the last sample and `at`.
    pub fn is_due(&self, at: Instant) -> bool {
        self.last
            .as_ref()
            .is_none_or(|(before, ..)| at.saturating_duration_since(*before) >= STEP / 2)
    }

    /// Adds a sample that is due. The first sample is only the base of the next.
    pub fn take(&mut self, at: Instant, time: Timestamp, now: Traffic) {
        let Some((before_at, _, before)) = &self.last else {
            self.last = Some((at, time, now));
            return;
        };
        let passed = at.saturating_duration_since(*before_at);
        let secs = passed.as_secs_f64();
        let (mut all, none) = (Change::default(), Sums::default());
        let mut points = BTreeMap::new();
        for (name, sums) in &now.0 {
            let before = before.0.get(name).unwrap_or(&none);
            let change = sums.since(before);
            all.add(&change);
            points.insert(name.clone(), Step::of(sums, before, &change, secs));
        }
        let total = Point::of(&all, secs);
        for _ in 1..steps(passed) {
            self.push(|_| None);
            self.total.push(None);
        }
        self.total.push(Some(total));
        self.failing = failing(&points);
        self.push(|name| Some(points.remove(name).unwrap_or_default()));
        points.retain(|_, step| step.all.activity() > 0.0);
        self.admit(points.into_iter().collect());
        self.services.retain(|_, track| track.all.activity() > 0.0);
        self.last = Some((at, time, now));
    }

    fn push(&mut self, mut step: impl FnMut(&ObjectName) -> Option<Step>) {
        for (name, track) in &mut self.services {
            track.push(step(name));
        }
    }

    /// Adds the busiest Services without points: into free space, then in place of less busy
    /// Services.
    fn admit(&mut self, mut points: Vec<(ObjectName, Step)>) {
        points.sort_by(|(_, a), (_, b)| b.all.activity().total_cmp(&a.all.activity()));
        let beyond = points.split_off(
            points
                .len()
                .min(SERVICES.saturating_sub(self.services.len())),
        );
        self.left_out = beyond.len();
        if !beyond.is_empty() {
            let mut kept: Vec<_> = self
                .services
                .iter()
                .map(|(name, track)| (track.all.activity(), name.clone()))
                .collect();
            kept.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            let pairs = beyond.into_iter().zip(kept);
            for (busier, (_, quieter)) in
                pairs.take_while(|((_, step), (activity, _))| step.all.activity() > *activity)
            {
                self.services.remove(&quieter);
                points.push(busier);
            }
        }
        for (name, point) in points {
            self.services.entry(name).or_default().push(Some(point));
        }
    }

    /// Returns the Services with failures in the last step.
    pub fn failing(&self) -> &BTreeMap<ObjectName, Failures> {
        &self.failing
    }

    /// Returns the history; with `only`, the history of the Service `NAMESPACE/NAME` alone.
    pub fn view(&self, only: Option<&str>) -> HistoryView {
        let points = self.total.0.len();
        let is_wanted = |name: &ObjectName| only.is_none_or(|only| only == name.to_string());
        let services = self.services.iter().filter(|(name, _)| is_wanted(name));
        HistoryView {
            step_secs: STEP.as_secs(),
            end: self
                .last
                .as_ref()
                .filter(|_| points > 0)
                .map(|(_, time, _)| *time),
            points,
            limit: SERVICES,
            left_out: self.left_out,
            total: series(&self.total, points),
            services: services
                .map(|(name, track)| ServiceSeriesView {
                    namespace: name.namespace.to_string(),
                    name: name.name.to_string(),
                    series: series(&track.all, points),
                    udp_ports: track.udp_ports(),
                })
                .collect(),
        }
    }
}

impl Traffic {
    pub fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.0.keys()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&ObjectName, &Sums)> {
        self.0.iter()
    }

    pub fn get(&self, name: &ObjectName) -> Option<&Sums> {
        self.0.get(name)
    }
}

/// Returns the number of steps between two samples.
fn steps(passed: Duration) -> usize {
    let steps = passed.as_secs_f64() / STEP.as_secs_f64();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "of at most the points, and not negative"
    )]
    let steps = steps.round().clamp(1.0, POINTS as f64) as usize;
    steps
}

/// Returns the arrays of a series, with gaps before the Service's first point.
fn series(track: &Track, points: usize) -> SeriesView {
    let gap = points.saturating_sub(track.0.len());
    let array = |value: fn(&Point) -> f32| {
        let known = track
            .0
            .iter()
            .map(|point| point.as_ref().map(|point| rounded(value(point), 1e3)));
        std::iter::repeat_n(None, gap)
            .chain(known)
            .collect::<Vec<_>>()
    };
    let quantile = |value: fn(&Point) -> Option<f32>| {
        let known = track.0.iter().map(|point| {
            point
                .as_ref()
                .and_then(value)
                .map(|secs| rounded(secs, 1e6))
        });
        std::iter::repeat_n(None, gap)
            .chain(known)
            .collect::<Vec<_>>()
    };
    SeriesView {
        opened: array(|point| point.opened),
        packets: array(|point| point.packets),
        bytes: array(|point| point.bytes),
        dropped: array(|point| point.dropped),
        rejected: array(|point| point.rejected),
        flows: array(|point| point.flows),
        connects: array(|point| point.connects),
        connect_p50: quantile(|point| point.p50),
        connect_p99: quantile(|point| point.p99),
        failed: array(|point| point.failed),
        retransmitted: array(|point| point.retransmitted),
        udp_answered: array(|point| point.udp_answered),
        udp_unanswered: array(|point| point.udp_unanswered),
    }
}

/// Rounds to a multiple of 1/`parts`.
fn rounded(value: f32, parts: f64) -> f64 {
    (f64::from(value) * parts).round() / parts
}

#[cfg(test)]
mod tests;
