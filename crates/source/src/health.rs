//! The current problems of the source and of the agent's own work.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::path::PathBuf;

use jiff::Timestamp;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::journal::{Entry as Reported, Journal};
use proxy_core::input::ObjectName;

/// The subject of a problem. Its text appears in status, log and `/healthz`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    /// Reading the failures of backends.
    BackendHealth,
    Conntrack,
    Counters,
    Credentials,
    /// The default routes in the table that the routing rules point to.
    DefaultRoutes,
    /// A device, by name, that should carry programs.
    Device(String),
    Devices,
    /// The sweep of the flow tables.
    Flows,
    Folder(PathBuf),
    /// The hand-over of external clients to the nodes of their backends.
    Handover,
    HealthCheck(ObjectName),
    HealthServer,
    /// The server's history, by kind of object.
    History(String),
    LocalPods,
    /// A place in a manifest file: `web.yaml:14`.
    Manifest(String),
    Maps,
    MetricsServer,
    /// The steps that direct the node's own packets to the datapath.
    Node,
    NodeObject,
    /// The unreadable objects of a kind.
    Objects(String),
    /// The routes to pods of other nodes, in host mode.
    PodRoutes,
    /// The local pods that detection classifies as clients outside the cluster.
    PodsOutside,
    /// Repairs that another process undoes each time.
    Repairs(String),
    Routes,
    /// The kernel's routes to backends, in host mode.
    RoutesToBackends,
    Rules,
    /// The ClusterIP ranges that also hold other addresses.
    ServiceRanges,
    /// The watch on objects of a kind.
    Watch(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BackendHealth => f.write_str("backend health"),
            Self::Conntrack => f.write_str("conntrack"),
            Self::Counters => f.write_str("counters"),
            Self::Credentials => f.write_str("credentials"),
            Self::DefaultRoutes => f.write_str("default routes of rules"),
            Self::Device(name) => write!(f, "device {name}"),
            Self::Devices => f.write_str("devices"),
            Self::Flows => f.write_str("flows"),
            Self::Folder(path) => write!(f, "{}", path.display()),
            Self::Handover => f.write_str("external forwarding"),
            Self::HealthCheck(service) => write!(f, "healthCheckNodePort of {service}"),
            Self::HealthServer => f.write_str("health server"),
            Self::History(kind) => write!(f, "{kind} history"),
            Self::LocalPods => f.write_str("local pods"),
            Self::Manifest(place) => f.write_str(place),
            Self::Maps => f.write_str("maps"),
            Self::MetricsServer => f.write_str("metrics server"),
            Self::Node => f.write_str("node"),
            Self::NodeObject => f.write_str("Node object"),
            Self::Objects(kind) => write!(f, "{kind} objects"),
            Self::PodRoutes => f.write_str("pod routes"),
            Self::PodsOutside => f.write_str("pods taken for outside clients"),
            Self::Repairs(what) => write!(f, "repairs of {what}"),
            Self::Routes => f.write_str("routes"),
            Self::RoutesToBackends => f.write_str("routes to backends"),
            Self::Rules => f.write_str("rules"),
            Self::ServiceRanges => f.write_str("ranges of ClusterIPs"),
            Self::Watch(kind) => write!(f, "{kind} watch"),
        }
    }
}

pub type Problems = BTreeMap<Problem, Reason>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    pub why: String,
    /// The time when the problem began. A change of its reason keeps this time.
    pub since: Timestamp,
}

/// The registry of problems, which status and servers read.
///
/// A problem is logged when it begins, when its reason changes, and when it ends.
#[derive(Clone, Debug, Default)]
pub struct Health {
    problems: watch::Sender<Problems>,
    journal: Journal,
}

impl Health {
    /// Creates a registry that writes changes to the journal.
    pub fn reporting(journal: &Journal) -> Self {
        Self {
            journal: journal.clone(),
            ..Self::default()
        }
    }

    pub fn problems(&self) -> Problems {
        self.problems.borrow().clone()
    }

    /// Returns true while the problem lasts.
    pub fn has(&self, problem: &Problem) -> bool {
        self.problems.borrow().contains_key(problem)
    }

    /// Returns a receiver that wakes at every change.
    pub fn subscribe(&self) -> watch::Receiver<Problems> {
        self.problems.subscribe()
    }

    pub fn begin(&self, problem: &Problem, why: impl Into<String>) {
        let why = why.into();
        self.problems.send_if_modified(|problems| {
            let mut reason = "ProblemBegan";
            match problems.entry(problem.clone()) {
                Entry::Occupied(known) if known.get().why == why => return false,
                Entry::Occupied(mut known) => {
                    reason = "ProblemChanged";
                    known.get_mut().why.clone_from(&why);
                }
                Entry::Vacant(new) => drop(new.insert(Reason {
                    why: why.clone(),
                    since: Timestamp::now(),
                })),
            }
            warn!(what = problem.to_string(), why, "problem");
            self.report(problem, true, reason, &why);
            true
        });
    }

    pub fn end(&self, problem: &Problem) {
        self.problems.send_if_modified(|problems| {
            let Some(over) = problems.remove(problem) else {
                return false;
            };
            info!(what = problem.to_string(), since = %over.since, "problem is over");
            self.report(problem, false, "ProblemOver", &over.why);
            true
        });
    }

    fn report(&self, problem: &Problem, is_warning: bool, reason: &'static str, note: &str) {
        let namespace = "".into();
        let name = problem.to_string().into();
        let note = note.into();
        let services = match problem {
            Problem::HealthCheck(service) => [service.clone()].into(),
            _ => [].into(),
        };
        self.journal.report(Reported {
            is_warning,
            reason,
            kind: "Problem",
            namespace,
            name,
            note,
            services,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_keeps_its_beginning_and_wakes_readers_only_when_it_changes() {
        let health = Health::default();
        let mut reader = health.subscribe();
        let watch = Problem::Watch("Service".into());

        health.begin(&watch, "refused");
        assert!(reader.has_changed().unwrap());
        let since = reader.borrow_and_update()[&watch].since;

        health.begin(&watch, "refused");
        assert!(
            !reader.has_changed().unwrap(),
            "the same problem is no news"
        );

        health.begin(&watch, "timed out");
        assert!(reader.has_changed().unwrap());
        let reason = Reason {
            why: "timed out".into(),
            since,
        };
        assert_eq!(health.problems(), BTreeMap::from([(watch.clone(), reason)]));
        reader.mark_unchanged();

        health.end(&watch);
        assert!(reader.has_changed().unwrap());
        assert!(reader.borrow_and_update().is_empty());

        health.end(&watch);
        assert!(
            !reader.has_changed().unwrap(),
            "what was over before is no news"
        );
    }

    #[test]
    fn journal_has_the_beginning_changes_and_end_of_a_problem() {
        let journal = Journal::default();
        let health = Health::reporting(&journal);
        let maps = Problem::Maps;
        for why in ["full", "full", "refused"] {
            health.begin(&maps, why);
        }
        health.end(&maps);
        let reported: Vec<_> = journal
            .all()
            .iter()
            .map(|reported| format!("{} {}", reported.entry.reason, reported.entry.note))
            .collect();
        assert_eq!(
            reported,
            [
                "ProblemBegan full",
                "ProblemChanged refused",
                "ProblemOver refused"
            ]
        );
    }

    #[test]
    fn problem_has_the_text_that_operators_read() {
        let service = ObjectName::new("shop", "web");
        let texts = [
            (
                Problem::Watch("EndpointSlice".into()),
                "EndpointSlice watch",
            ),
            (Problem::Manifest("web.yaml:14".into()), "web.yaml:14"),
            (
                Problem::HealthCheck(service),
                "healthCheckNodePort of shop/web",
            ),
            (Problem::Device("eth0".into()), "device eth0"),
        ];
        for (problem, text) in texts {
            assert_eq!(problem.to_string(), text);
        }
    }
}
