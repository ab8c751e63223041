//! Events about objects of the cluster, in kube-proxy's form, for `kubectl describe`.
//!
//! Sending never blocks: Events wait in a queue for the recorder (`kubernetes/recorder.rs`). A full
//! queue drops Events and counts them; without an API server, all Events are dropped.

pub(crate) mod history;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Error;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::journal::{Entry, Journal};
use proxy_core::input::ObjectName;
use proxy_core::model::{Cause, ObjectRef, Skipped};

/// The maximum number of Events that wait to be sent.
const QUEUE: usize = 1_000;
/// The maximum time that an exiting agent waits until its Events are sent.
const FLUSH: Duration = Duration::from_secs(2);

/// An Event. Repetitions increase its count.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event {
    pub regarding: Regarding,
    pub severity: Severity,
    pub reason: &'static str,
    pub action: &'static str,
    pub note: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Regarding {
    pub object: ObjectRef,
    /// The object's uid, or its name where kube-proxy's Events have the name.
    pub uid: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    Normal,
    Warning,
}

/// The sending half of the queue.
#[derive(Clone, Debug)]
pub struct Events {
    node_name: Arc<str>,
    sender: mpsc::Sender<Event>,
    /// The number of Events that are neither sent nor abandoned yet.
    pending: watch::Sender<usize>,
    dropped: Arc<AtomicU64>,
    journal: Journal,
}

impl Events {
    /// Creates both halves of the queue. `node_name` is the reporting node.
    pub fn new(node_name: &str) -> (Self, Queue) {
        Self::reporting(node_name, &Journal::default())
    }

    /// Like [`Self::new`], and writes each Event to the journal, whether it is sent or not.
    pub fn reporting(node_name: &str, journal: &Journal) -> (Self, Queue) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let pending = watch::Sender::new(0);
        let queue = Queue {
            receiver,
            pending: pending.clone(),
        };
        (
            Self {
                node_name: node_name.into(),
                sender,
                pending,
                dropped: Arc::default(),
                journal: journal.clone(),
            },
            queue,
        )
    }

    /// Reports that the agent begins to serve.
    pub fn starting(&self) {
        self.node(Severity::Normal, "Starting", START, String::new());
    }

    /// Reports that the server of `/healthz` failed to start, which ends the agent.
    pub fn healthz_failed(&self, why: &Error) {
        self.node(
            Severity::Warning,
            "FailedToStartProxierHealthcheck",
            START,
            format!("health server: {why:#}"),
        );
    }

    /// Reports that the server of `/metrics` failed to start, which ends the agent.
    pub fn metrics_failed(&self, why: &Error) {
        self.node(
            Severity::Warning,
            "FailedToStartMetricServer",
            START,
            format!("metrics server: {why:#}"),
        );
    }

    /// Reports that conntrack's limits cannot be set.
    pub fn sysctls_read_only(&self, why: &Error) {
        self.node(
            Severity::Warning,
            "readOnlySysFS",
            START,
            format!("cannot set the limits of conntrack: {why:#}"),
        );
    }

    /// Reports that the agent ends because of its Node object.
    pub fn node_changed(&self, why: &Error) {
        self.node(
            Severity::Warning,
            "NodeChanged",
            "StopKubeProxy",
            format!("{why:#}"),
        );
    }

    /// Reports that addresses of this node's pods count as clients outside the cluster.
    pub fn undetected_pods(&self, why: &str) {
        self.node(
            Severity::Warning,
            "PodsTakenForOutside",
            "Sync",
            why.to_owned(),
        );
    }

    /// Reports that the agent cannot listen on a healthCheckNodePort.
    pub fn health_check_failed(&self, service: &ObjectName, port: u16, why: &Error) {
        let node = &self.node_name;
        self.report(Event {
            regarding: Regarding {
                object: ObjectRef {
                    kind: "Service",
                    name: service.clone(),
                },
                uid: Some(service.to_string()),
            },
            severity: Severity::Warning,
            reason: "FailedToStartServiceHealthcheck",
            action: "Listen",
            note: format!(
                "node {node} cannot serve the health check of {service} at port {port}: {why:#}"
            ),
        });
    }

    /// Reports that a part of an object has no effect. `uid` is the object's uid; `concerned` are
    /// its Services.
    pub fn skipped(&self, skipped: &Skipped, uid: Option<&str>, concerned: &[ObjectName]) {
        let Skipped {
            object,
            field,
            why,
            cause,
        } = skipped;
        let event = Event {
            regarding: Regarding {
                object: object.clone(),
                uid: uid.map(str::to_owned),
            },
            severity: if *cause == Cause::KeptByHost {
                Severity::Normal
            } else {
                Severity::Warning
            },
            reason: match cause {
                Cause::Invalid => "InvalidField",
                Cause::Conflict => "FrontendConflict",
                Cause::Refused | Cause::NotTaken => "FrontendRefused",
                Cause::NoRoom => "ShareExceeded",
                Cause::KeptByHost => "FrontendKeptByHost",
            },
            action: "Sync",
            note: format!("{field}: {why}"),
        };
        self.report_about(event, concerned);
    }

    /// Reports that an endpoint is omitted, because no Service may have it. `uid` is the Service's
    /// uid.
    pub fn endpoint_refused(&self, service: ObjectRef, uid: Option<&str>, skipped: &Skipped) {
        let regarding = Regarding {
            object: service,
            uid: uid.map(str::to_owned),
        };
        let severity = Severity::Warning;
        self.report(Event {
            regarding,
            severity,
            reason: "EndpointRefused",
            action: "Sync",
            note: skipped.to_string(),
        });
    }

    /// Reports that a Service receives the packets of a process of this node. `uid` is the
    /// Service's uid.
    pub fn port_conflict(&self, service: &ObjectRef, uid: Option<&str>, note: String) {
        self.report(Event {
            regarding: Regarding {
                object: service.clone(),
                uid: uid.map(str::to_owned),
            },
            severity: Severity::Warning,
            reason: "FrontendShadowsHost",
            action: "Sync",
            note: format!("node {}: {note}", self.node_name),
        });
    }

    /// Reports that backends of a Service port became unresponsive or answer again. `uid` is the
    /// Service's uid.
    pub fn backends_changed(
        &self,
        service: &ObjectRef,
        uid: Option<&str>,
        port: u16,
        is_silent: bool,
        backends: &[String],
    ) {
        let what = if is_silent {
            "give no answer"
        } else {
            "answer again"
        };
        let node = &self.node_name;
        let number = backends.len();
        let some = named(backends.iter().map(String::as_str), number);
        self.report(Event {
            regarding: Regarding {
                object: service.clone(),
                uid: uid.map(str::to_owned),
            },
            severity: if is_silent {
                Severity::Warning
            } else {
                Severity::Normal
            },
            reason: if is_silent {
                "BackendsSilent"
            } else {
                "BackendsAnswer"
            },
            action: "Connect",
            note: format!("node {node}: {number} backends of port {port} {what}: {some}"),
        });
    }

    /// Reports that connections of a Service port were ended because their backends' node is lost.
    /// `uid` is the Service's uid.
    pub fn connections_ended(
        &self,
        service: &ObjectRef,
        uid: Option<&str>,
        port: u16,
        lost: &str,
        count: usize,
        backends: &BTreeSet<String>,
    ) {
        let node = &self.node_name;
        let some = named(backends.iter().map(String::as_str), backends.len());
        self.report(Event {
            regarding: Regarding { object: service.clone(), uid: uid.map(str::to_owned) },
            severity: Severity::Warning,
            reason: "ConnectionsEnded",
            action: "Connect",
            note: format!(
                "node {node}: {count} connections of port {port} end with node {lost}, which is lost: {some}"
            ),
        });
    }

    /// Waits until all Events are sent, for 2 s at most, because the agent is about to exit.
    pub async fn flushed(&self) {
        let mut pending = self.pending.subscribe();
        let _in_time = timeout(FLUSH, pending.wait_for(|pending| *pending == 0)).await;
    }

    /// Returns the number of Events that a full queue dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Reports an Event about this node. The uid is the node's name, as in kube-proxy's Events:
    /// `kubectl describe node` selects by it.
    fn node(&self, severity: Severity, reason: &'static str, action: &'static str, note: String) {
        let name = self.node_name.to_string();
        let object = ObjectRef {
            kind: "Node",
            name: ObjectName::new("", &name),
        };
        self.report(Event {
            regarding: Regarding {
                object,
                uid: Some(name),
            },
            severity,
            reason,
            action,
            note,
        });
    }

    fn report(&self, event: Event) {
        self.report_about(event, &[]);
    }

    fn report_about(&self, event: Event, services: &[ObjectName]) {
        self.journal.report(entry(&event, services));
        self.pending.send_modify(|pending| *pending += 1);
        let Err(refused) = self.sender.try_send(event) else {
            return;
        };
        self.pending
            .send_modify(|pending| *pending = pending.saturating_sub(1));
        if matches!(refused, TrySendError::Full(_)) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn entry(event: &Event, services: &[ObjectName]) -> Entry {
    let ObjectRef {
        kind,
        name: ObjectName { namespace, name },
    } = &event.regarding.object;
    Entry {
        is_warning: event.severity == Severity::Warning,
        reason: event.reason,
        kind,
        namespace: (**namespace).into(),
        name: (**name).into(),
        note: event.note.as_str().into(),
        services: services.into(),
    }
}

const START: &str = "StartKubeProxy";

/// The maximum number of backends that an Event names.
const NAMED_BACKENDS: usize = 5;

fn named<'a>(backends: impl Iterator<Item = &'a str>, number: usize) -> String {
    let some = backends.take(NAMED_BACKENDS).collect::<Vec<_>>().join(", ");
    if number > NAMED_BACKENDS {
        format!("{some}, …")
    } else {
        some
    }
}

/// The receiving half of the queue. After it is dropped, the queue drops Events.
#[derive(Debug)]
pub struct Queue {
    receiver: mpsc::Receiver<Event>,
    pending: watch::Sender<usize>,
}

impl Queue {
    /// Creates a queue that receives no Event.
    pub fn none() -> Self {
        Events::new("").1
    }

    /// Returns the queue if a recorder will take its Events, else an empty queue.
    pub fn only_if(self, taken: bool) -> Self {
        if taken { self } else { Self::none() }
    }

    /// Takes the next Event; the caller must call [`Queue::done`] after it.
    pub(crate) async fn next(&mut self) -> Event {
        match self.receiver.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Returns the number of waiting Events.
    pub fn waiting(&self) -> usize {
        self.receiver.len()
    }

    /// Counts one Event as sent or abandoned.
    pub(crate) fn done(&self) {
        self.pending
            .send_modify(|pending| *pending = pending.saturating_sub(1));
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.receiver.close();
        self.pending.send_replace(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn full_queue_drops_counts_and_never_blocks() {
        let (events, mut queue) = Events::new("n1");
        for _ in 0..QUEUE + 3 {
            events.starting();
        }
        assert_eq!(events.dropped(), 3);
        let started = tokio::time::Instant::now();
        events.flushed().await;
        assert_eq!(
            started.elapsed(),
            FLUSH,
            "without a sender the wait still ends"
        );
        while events.pending.borrow().gt(&0) {
            queue.next().await;
            queue.done();
        }
        let started = tokio::time::Instant::now();
        events.flushed().await;
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn flush_returns_at_once_without_api_server() {
        let journal = Journal::default();
        let (events, queue) = Events::reporting("n1", &journal);
        events.starting();
        drop(queue);
        events.starting();
        let reported: Vec<_> = journal
            .all()
            .iter()
            .map(|reported| {
                (
                    reported.entry.reason,
                    &*reported.entry.name == "n1",
                    reported.count,
                )
            })
            .collect();
        assert_eq!(
            reported,
            [("Starting", true, 2)],
            "the journal has what is not sent"
        );
        let started = tokio::time::Instant::now();
        events.flushed().await;
        assert_eq!((started.elapsed(), events.dropped()), (Duration::ZERO, 0));
    }

    #[tokio::test]
    async fn events_have_their_fields() {
        let (events, mut queue) = Events::new("n1");
        let why = anyhow::anyhow!("in use").context("listen on 0.0.0.0:30000");
        let web = ObjectName::new("default", "web");
        let skipped = |cause| Skipped {
            object: ObjectRef {
                kind: "EndpointSlice",
                name: ObjectName::new("default", "web-1"),
            },
            field: "ports[0]".to_owned(),
            why: "port 0".to_owned(),
            cause,
        };
        events.starting();
        events.healthz_failed(&why);
        events.metrics_failed(&why);
        events.sysctls_read_only(&why);
        events.node_changed(&why);
        events.health_check_failed(&web, 30000, &why);
        events.skipped(&skipped(Cause::Invalid), Some("1234"), &[]);
        events.skipped(&skipped(Cause::Conflict), None, &[]);
        events.skipped(&skipped(Cause::Refused), None, &[]);
        events.skipped(&skipped(Cause::KeptByHost), None, &[]);
        let service = ObjectRef {
            kind: "Service",
            name: web.clone(),
        };
        events.endpoint_refused(service, Some("5678"), &skipped(Cause::Refused));
        let rows = [
            "Node n1 Some(\"n1\") Normal Starting StartKubeProxy: ",
            "Node n1 Some(\"n1\") Warning FailedToStartProxierHealthcheck StartKubeProxy: \
             health server: listen on 0.0.0.0:30000: in use",
            "Node n1 Some(\"n1\") Warning FailedToStartMetricServer StartKubeProxy: \
             metrics server: listen on 0.0.0.0:30000: in use",
            "Node n1 Some(\"n1\") Warning readOnlySysFS StartKubeProxy: \
             cannot set the limits of conntrack: listen on 0.0.0.0:30000: in use",
            "Node n1 Some(\"n1\") Warning NodeChanged StopKubeProxy: listen on 0.0.0.0:30000: in use",
            "Service default/web Some(\"default/web\") Warning FailedToStartServiceHealthcheck Listen: \
             node n1 cannot serve the health check of default/web at port 30000: listen on 0.0.0.0:30000: in use",
            "EndpointSlice default/web-1 Some(\"1234\") Warning InvalidField Sync: ports[0]: port 0",
            "EndpointSlice default/web-1 None Warning FrontendConflict Sync: ports[0]: port 0",
            "EndpointSlice default/web-1 None Warning FrontendRefused Sync: ports[0]: port 0",
            "EndpointSlice default/web-1 None Normal FrontendKeptByHost Sync: ports[0]: port 0",
            "Service default/web Some(\"5678\") Warning EndpointRefused Sync: EndpointSlice default/web-1 ports[0]: port 0",
        ];
        for row in rows {
            let Event {
                regarding,
                severity,
                reason,
                action,
                note,
            } = queue.next().await;
            let Regarding { object, uid } = regarding;
            assert_eq!(
                format!("{object} {uid:?} {severity:?} {reason} {action}: {note}"),
                row
            );
        }
    }
}
