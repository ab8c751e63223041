//! The last minutes of all nodes, from the time before the page was opened.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::StreamExt;
use jiff::{SignedDuration, Timestamp};
use proxy_view::history::STEP;
use proxy_view::{HistoryView, SeriesView, ServiceSeriesView, UdpPortView};
use serde::Serialize;

use super::{Page, lock, question};

/// Time limit for each node: a slow one is left out of this answer.
const LIMIT: Duration = Duration::from_secs(3);
/// The maximum number of points: those of a day. A node may announce any number.
const POINTS: usize = 8_640;
/// The maximum number of a node's UDP ports.
const PORTS: usize = 8;
/// The maximum distance of a node's last point from now. A node whose agent hangs, or whose clock is
/// wrong, shortens no other history.
const STALE: SignedDuration = SignedDuration::from_secs(30);

/// The history in the form of a node's. Rates are sums over the nodes that answered, connect times
/// those of the slowest node.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ClusterHistory {
    #[serde(flatten)]
    pub history: HistoryView,
    /// The UDP flows of each node's clients to the Service in the history's time.
    pub nodes: Vec<NodeUdp>,
    /// The nodes whose history is missing: they gave no answer, or their last point is not of now.
    pub missing: BTreeSet<String>,
}

/// UDP flows per second on one node.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeUdp {
    pub node: String,
    pub answered: f64,
    pub unanswered: f64,
}

/// A node's history, with the time of its last point on this machine's clock.
struct Of {
    node: String,
    end: Timestamp,
    history: HistoryView,
}

impl Page {
    /// Returns the history of all traffic, and of the Service `NAMESPACE/NAME`. The nodes do not
    /// send other Services' points: they are megabytes.
    pub async fn history(&self, service: Option<&str>) -> ClusterHistory {
        // No Service has an empty name.
        let question = question("history", [("service", service.unwrap_or_default())]);
        let mut answers = self.0.ask_all::<HistoryView>(&question, LIMIT);
        let mut all = Vec::new();
        let mut missing = BTreeSet::new();
        while let Some((node, answer)) = answers.next().await {
            let Some((end, history)) = answer
                .ok()
                .and_then(|history| Some((history.end?, history)))
            else {
                missing.insert(node);
                continue;
            };
            let skew = lock(&self.0.merged).skew(&node);
            let end = skew.map_or(end, |skew| skew.corrected(end));
            all.push(Of { node, end, history });
        }
        let mut found = merged(all, service, Timestamp::now());
        found.missing.append(&mut missing);
        found
    }
}

/// Merges histories point by point.
fn merged(all: Vec<Of>, service: Option<&str>, now: Timestamp) -> ClusterHistory {
    let (mut all, stale): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|one| now.duration_since(one.end).abs() <= STALE);
    let missing = stale.into_iter().map(|one| one.node).collect();
    all.sort_by(|a, b| a.node.cmp(&b.node));
    // The points of all nodes end there.
    let Some(end) = all.iter().map(|one| one.end).min() else {
        return ClusterHistory {
            missing,
            ..ClusterHistory::default()
        };
    };
    let points = all.iter().map(|one| one.history.points).max();
    let points = points.unwrap_or(0).min(POINTS);
    let mut total = SeriesView::default();
    let mut of_service: Option<ServiceSeriesView> = None;
    let mut nodes = Vec::new();
    for Of {
        node,
        end: ends,
        history,
    } in &all
    {
        let ahead = steps(ends.duration_since(end));
        add(&mut total, &history.total, ahead, points);
        let wanted = |one: &&ServiceSeriesView| {
            service.is_some_and(|service| service == format!("{}/{}", one.namespace, one.name))
        };
        let Some(found) = history.services.iter().find(wanted) else {
            continue;
        };
        let sum = of_service.get_or_insert_with(|| ServiceSeriesView {
            namespace: found.namespace.clone(),
            name: found.name.clone(),
            series: SeriesView::default(),
            udp_ports: Vec::new(),
        });
        add_ports(&mut sum.udp_ports, &found.udp_ports);
        add(&mut sum.series, &found.series, ahead, points);
        let [answered, unanswered] =
            [&found.series.udp_answered, &found.series.udp_unanswered].map(|values| mean(values));
        nodes.push(NodeUdp {
            node: node.clone(),
            answered,
            unanswered,
        });
    }
    ClusterHistory {
        history: HistoryView {
            step_secs: STEP.as_secs(),
            end: Some(end),
            points,
            total,
            services: of_service.into_iter().collect(),
            ..HistoryView::default()
        },
        nodes,
        missing,
    }
}

/// Adds a node's UDP ports: at most [`PORTS`], because a node may send any number.
fn add_ports(sum: &mut Vec<UdpPortView>, ports: &[UdpPortView]) {
    for one in ports.iter().take(PORTS) {
        match sum.iter_mut().find(|known| known.port == one.port) {
            Some(known) => {
                known.answered += one.answered;
                known.unanswered += one.unanswered;
            }
            None => sum.push(*one),
        }
    }
}

/// Returns the number of steps in a time, rounded.
fn steps(time: SignedDuration) -> usize {
    let step = SignedDuration::try_from(STEP).unwrap_or_default();
    let steps = (time + step / 2).as_secs() / step.as_secs().max(1);
    usize::try_from(steps).unwrap_or(0)
}

fn mean(values: &[Option<f64>]) -> f64 {
    let known: Vec<f64> = values.iter().flatten().copied().collect();
    #[expect(clippy::cast_precision_loss, reason = "a small number of points")]
    let number = known.len().max(1) as f64;
    known.iter().sum::<f64>() / number
}

/// Adds a node's series, without its last `ahead` points.
fn add(sum: &mut SeriesView, one: &SeriesView, ahead: usize, points: usize) {
    let plus = |a: f64, b: f64| a + b;
    // Destructured, so that no field is forgotten.
    let SeriesView {
        opened,
        packets,
        bytes,
        dropped,
        rejected,
        flows,
        connects,
        connect_p50,
        connect_p99,
        failed,
        retransmitted,
        udp_answered,
        udp_unanswered,
    } = one;
    for (sum, one) in [
        (&mut sum.opened, opened),
        (&mut sum.packets, packets),
        (&mut sum.bytes, bytes),
        (&mut sum.dropped, dropped),
        (&mut sum.rejected, rejected),
        (&mut sum.flows, flows),
        (&mut sum.connects, connects),
        (&mut sum.failed, failed),
        (&mut sum.retransmitted, retransmitted),
        (&mut sum.udp_answered, udp_answered),
        (&mut sum.udp_unanswered, udp_unanswered),
    ] {
        join(sum, one, ahead, points, plus);
    }
    for (slowest, one) in [
        (&mut sum.connect_p50, connect_p50),
        (&mut sum.connect_p99, connect_p99),
    ] {
        join(slowest, one, ahead, points, f64::max);
    }
}

/// Joins the values of each point. A point is known if one node knows it.
fn join(
    sum: &mut Vec<Option<f64>>,
    one: &[Option<f64>],
    ahead: usize,
    points: usize,
    join: impl Fn(f64, f64) -> f64,
) {
    sum.resize(points, None);
    let one = &one[..one.len().saturating_sub(ahead)];
    for (sum, value) in sum.iter_mut().rev().zip(one.iter().rev()) {
        *sum = match (*sum, *value) {
            (Some(a), Some(b)) => Some(join(a, b)),
            (a, b) => a.or(b),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(node: &str, end: i64, opened: &[f64], p50: f64) -> Of {
        let series = SeriesView {
            opened: opened.iter().copied().map(Some).collect(),
            connect_p50: opened.iter().map(|_| Some(p50)).collect(),
            udp_answered: vec![Some(3.0), None],
            udp_unanswered: vec![Some(1.0), None],
            ..SeriesView::default()
        };
        Of {
            node: node.to_owned(),
            end: Timestamp::from_millisecond(end).unwrap(),
            history: HistoryView {
                points: opened.len(),
                total: series.clone(),
                services: vec![ServiceSeriesView {
                    namespace: "kube-system".to_owned(),
                    name: "dns".to_owned(),
                    series,
                    udp_ports: vec![UdpPortView {
                        port: 53,
                        answered: 2.0,
                        unanswered: 1.0,
                    }],
                }],
                ..HistoryView::default()
            },
        }
    }

    #[test]
    fn points_of_the_same_time_are_summed() {
        // n2 is a step ahead and has just started, n3 has hung for a while, and n4's clock is wrong.
        let all = vec![
            of("n1", 100_000, &[1.0, 2.0, 3.0], 0.1),
            of("n2", 112_000, &[20.0, 30.0], 0.4),
            of("n3", 70_000, &[900.0], 9.0),
            of("n4", 900_000, &[900.0], 9.0),
        ];
        let now = Timestamp::from_millisecond(105_000).unwrap();
        let found = merged(all, Some("kube-system/dns"), now);
        assert_eq!(
            found.missing,
            BTreeSet::from(["n3".to_owned(), "n4".to_owned()])
        );
        let series = &found.history.services[0].series;
        assert_eq!(
            found.history.end.map(|end| end.as_millisecond()),
            Some(100_000)
        );
        for series in [series, &found.history.total] {
            assert_eq!(series.opened, [Some(1.0), Some(2.0), Some(23.0)]);
            assert_eq!(series.connect_p50, [Some(0.1), Some(0.1), Some(0.4)]);
        }
        let nodes: Vec<_> = found
            .nodes
            .iter()
            .map(|one| (one.node.as_str(), one.answered, one.unanswered))
            .collect();
        assert_eq!(nodes, [("n1", 3.0, 1.0), ("n2", 3.0, 1.0)]);
        let [port] = found.history.services[0].udp_ports[..] else {
            panic!("one port");
        };
        assert_eq!((port.port, port.answered, port.unanswered), (53, 4.0, 2.0));
    }

    #[test]
    fn other_services_and_no_answer_leave_nothing() {
        let now = Timestamp::UNIX_EPOCH;
        let found = merged(vec![of("n1", 0, &[1.0], 0.1)], None, now);
        assert!(found.history.services.is_empty() && found.nodes.is_empty());
        assert_eq!(found.history.total.opened, [Some(1.0)]);
        assert_eq!(
            merged(Vec::new(), None, now).history,
            HistoryView::default()
        );
    }
}
