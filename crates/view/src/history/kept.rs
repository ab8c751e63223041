//! The kept samples and their times. Pure.
//!
//! A point has 60 bytes: the points of a Service take 5.4 kB, those of [`SERVICES`] 1.4 MB. The
//! last sample takes about 350 bytes per Service that ever had traffic.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::rates::{Rates, per_second};
use crate::{HistoryView, PortCounts, PortSums, SeriesView, ServiceSeriesView, quantile};
use jiff::Timestamp;
use proxy_common::addr::Proto;
use proxy_common::connect::Connects;
use proxy_core::input::ObjectName;
use proxy_datapath::Datagrams;

use super::{STEP, shared};

/// The number of points: 15 minutes of 10 s.
pub(super) const POINTS: usize = 90;
/// The maximum number of Services with points.
pub(super) const SERVICES: usize = 256;
/// The port of DNS.
const DNS: u16 = 53;

/// The traffic of each Service that had any since the programs were loaded.
#[derive(Debug, Default)]
pub struct Traffic(BTreeMap<ObjectName, Sums>);

#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    pub counts: PortCounts,
    pub connects: Connects,
    pub datagrams: Datagrams,
    /// True if UDP clients expect answers: a backend has answered one, or the port is that of DNS.
    /// Syslog and the like are rightly unanswered.
    expects_answers: bool,
}

impl Sums {
    pub fn of(port: &PortSums) -> Self {
        Self {
            counts: port.counts,
            connects: port.connects,
            datagrams: port.datagrams,
            expects_answers: port.datagrams.answered > 0
                || (port.port, port.proto) == (DNS, Proto::UDP),
        }
    }

    /// Returns the counts since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            counts: self.counts.since(&before.counts),
            connects: self.connects.since(&before.connects),
            datagrams: self.datagrams.since(&before.datagrams),
            expects_answers: self.expects_answers,
        }
    }

    pub fn add(&mut self, other: &Self) {
        self.counts.add(&other.counts);
        self.connects += other.connects;
        self.datagrams += other.datagrams;
        self.expects_answers |= other.expects_answers;
    }

    /// Returns the number of connections and UDP flows that failed.
    fn failed(&self) -> u64 {
        let unanswered = match self.expects_answers {
            true => self.datagrams.unanswered,
            false => 0,
        };
        self.connects.failed().saturating_add(unanswered)
    }

    fn is_empty(&self) -> bool {
        let PortCounts {
            flows_opened,
            flows,
            packets,
            packets_returned,
            dropped,
            rejected,
            ..
        } = self.counts;
        flows_opened + flows + packets + packets_returned + dropped + rejected == 0
    }
}

impl Traffic {
    pub fn of(ports: &[PortSums]) -> Self {
        let mut services = BTreeMap::<_, Sums>::new();
        for port in ports {
            let sums = Sums::of(port);
            if !sums.is_empty() {
                services.entry(port.service.clone()).or_default().add(&sums);
            }
        }
        Self(services)
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

/// The size of a point in the module's comment.
const _: () = assert!(size_of::<Option<Point>>() == 60);

impl Point {
    /// Returns the point of the counts of `secs` seconds.
    #[expect(clippy::cast_possible_truncation, reason = "a rate for a curve")]
    #[expect(clippy::cast_precision_loss, reason = "a number of flows for a curve")]
    fn of(change: &Sums, secs: f64) -> Self {
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
            failed: rate(change.failed()),
            retransmitted: rate(connects.retransmitted),
            udp_answered: rate(change.datagrams.answered),
            udp_unanswered: rate(change.datagrams.unanswered),
        }
    }

    /// Returns a measure of how busy the Service is.
    fn activity(&self) -> f32 {
        self.packets + self.opened + self.dropped + self.rejected + self.failed
    }
}

/// The last points of a Service or of the total, newest last; `None` in a gap.
#[derive(Debug)]
struct Track(VecDeque<Option<Point>>);

impl Default for Track {
    /// Reserves the exact capacity: a growing queue would reserve 128 points.
    fn default() -> Self {
        Self(VecDeque::with_capacity(POINTS))
    }
}

impl Track {
    fn push(&mut self, point: Option<Point>) {
        if self.0.len() == POINTS {
            self.0.pop_front();
        }
        self.0.push_back(point);
    }

    fn activity(&self) -> f32 {
        self.0.iter().flatten().map(Point::activity).sum()
    }
}

/// The points of the last minutes.
#[derive(Debug, Default)]
pub struct Kept {
    /// The instant, the time and the traffic of the last sample.
    last: Option<(Instant, Timestamp, Traffic)>,
    total: Track,
    services: BTreeMap<ObjectName, Track>,
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
fn failing(points: &BTreeMap<ObjectName, Point>) -> BTreeMap<ObjectName, Failures> {
    let failures = points
        .iter()
        .map(|(name, point)| (name, Failures::of(point)));
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
        let points = |(name, sums): (&ObjectName, &Sums)| {
            let before = before.0.get(name).copied().unwrap_or_default();
            let change = sums.since(&before);
            (name.clone(), Point::of(&change, passed.as_secs_f64()))
        };
        let mut points: BTreeMap<_, _> = now.0.iter().map(points).collect();
        let total = Point::of(&now.sum().since(&before.sum()), passed.as_secs_f64());
        for _ in 1..steps(passed) {
            self.push(|_| None);
            self.total.push(None);
        }
        self.total.push(Some(total));
        self.failing = failing(&points);
        self.push(|name| Some(points.remove(name).unwrap_or_default()));
        points.retain(|_, point| point.activity() > 0.0);
        self.admit(points.into_iter().collect());
        self.services.retain(|_, track| track.activity() > 0.0);
        self.last = Some((at, time, now));
    }

    fn push(&mut self, mut point: impl FnMut(&ObjectName) -> Option<Point>) {
        for (name, track) in &mut self.services {
            track.push(point(name));
        }
    }

    /// Adds the busiest Services without points: into free space, then in place of less busy
    /// Services.
    fn admit(&mut self, mut points: Vec<(ObjectName, Point)>) {
        points.sort_by(|(_, a), (_, b)| b.activity().total_cmp(&a.activity()));
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
                .map(|(name, track)| (track.activity(), name.clone()))
                .collect();
            kept.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            let pairs = beyond.into_iter().zip(kept);
            for (busier, (_, quieter)) in
                pairs.take_while(|((_, point), (activity, _))| point.activity() > *activity)
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
                    series: series(track, points),
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

    pub fn get(&self, name: &ObjectName) -> Option<Sums> {
        self.0.get(name).copied()
    }

    fn sum(&self) -> Sums {
        self.0.values().fold(Sums::default(), |mut sum, sums| {
            sum.add(sums);
            sum
        })
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
