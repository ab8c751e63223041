//! What is told about objects of the cluster, as kube-proxy tells it: `kubectl describe` shows it beside them.
//!
//! Telling never waits: events go through a queue to whoever speaks to the API (`source/kubernetes/recorder.rs`). What
//! does not fit is counted and forgotten, and without an API server all of it is.

pub(crate) mod history;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Error;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use proxy_core::input::ObjectName;
use proxy_core::model::{Cause, ObjectRef, Skipped};

/// Events that may wait to be sent.
const QUEUE: usize = 1_000;
/// How long an end waits until what it told is sent.
const FLUSH: Duration = Duration::from_secs(2);

/// One thing to tell. Equal ones are counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event {
    pub regarding: Regarding,
    pub severity: Severity,
    pub reason: &'static str,
    pub action: &'static str,
    pub note: String,
}

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Regarding {
    pub object: ObjectRef,
    /// Of the object, or what kube-proxy puts there.
    pub uid: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    Normal,
    Warning,
}

/// Where events are left by whoever has something to tell.
#[derive(Clone, Debug)]
pub struct Events {
    node_name: Arc<str>,
    sender: mpsc::Sender<Event>,
    /// Told and neither sent nor given up.
    pending: watch::Sender<usize>,
    dropped: Arc<AtomicU64>,
}

impl Events {
    /// `node_name` is who tells.
    pub fn new(node_name: &str) -> (Self, Queue) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let pending = watch::Sender::new(0);
        let queue = Queue { receiver, pending: pending.clone() };
        (Self { node_name: node_name.into(), sender, pending, dropped: Arc::default() }, queue)
    }

    /// The agent begins to serve.
    pub fn starting(&self) {
        self.node(Severity::Normal, "Starting", START, String::new());
    }

    /// The server of `/healthz` cannot be had, and the agent ends for that.
    pub fn healthz_failed(&self, why: &Error) {
        self.node(Severity::Warning, "FailedToStartProxierHealthcheck", START, format!("health server: {why:#}"));
    }

    /// The server of `/metrics` cannot be had, and the agent ends for that.
    pub fn metrics_failed(&self, why: &Error) {
        self.node(Severity::Warning, "FailedToStartMetricServer", START, format!("metrics server: {why:#}"));
    }

    /// The limits of connection tracking stay what they are.
    pub fn sysctls_read_only(&self, why: &Error) {
        self.node(Severity::Warning, "readOnlySysFS", START, format!("cannot set the limits of conntrack: {why:#}"));
    }

    /// The agent ends because of its Node object.
    pub fn node_changed(&self, why: &Error) {
        self.node(Severity::Warning, "NodeChanged", "StopKubeProxy", format!("{why:#}"));
    }

    /// Addresses of this node's pods are taken for clients outside the cluster.
    pub fn pods_outside(&self, why: &str) {
        self.node(Severity::Warning, "PodsTakenForOutside", "Sync", why.to_owned());
    }

    /// A healthCheckNodePort cannot be listened on.
    pub fn health_check_failed(&self, service: &ObjectName, port: u16, why: &Error) {
        let node = &self.node_name;
        self.tell(Event {
            regarding: Regarding {
                object: ObjectRef { kind: "Service", name: service.clone() },
                uid: Some(service.to_string()),
            },
            severity: Severity::Warning,
            reason: "FailedToStartServiceHealthcheck",
            action: "Listen",
            note: format!("node {node} cannot serve the health check of {service} at port {port}: {why:#}"),
        });
    }

    /// A part of an object has no effect. `uid` is the object's.
    pub fn skipped(&self, skipped: &Skipped, uid: Option<&str>) {
        let Skipped { object, field, why, cause } = skipped;
        self.tell(Event {
            regarding: Regarding { object: object.clone(), uid: uid.map(str::to_owned) },
            severity: Severity::Warning,
            reason: match cause {
                Cause::Invalid => "InvalidField",
                Cause::Conflict => "FrontendConflict",
                Cause::Refused => "FrontendRefused",
            },
            action: "Sync",
            note: format!("{field}: {why}"),
        });
    }

    /// An endpoint of a Service has no effect, as no Service may have it. `uid` is the Service's.
    pub fn endpoint_refused(&self, service: ObjectRef, uid: Option<&str>, skipped: &Skipped) {
        let regarding = Regarding { object: service, uid: uid.map(str::to_owned) };
        let severity = Severity::Warning;
        self.tell(Event { regarding, severity, reason: "EndpointRefused", action: "Sync", note: skipped.to_string() });
    }

    /// A process of this node gets no packets any more at an address and port: a Service does. `uid` is the Service's.
    pub fn shadows(&self, service: &ObjectRef, uid: Option<&str>, note: String) {
        self.tell(Event {
            regarding: Regarding { object: service.clone(), uid: uid.map(str::to_owned) },
            severity: Severity::Warning,
            reason: "FrontendShadowsHost",
            action: "Sync",
            note: format!("node {}: {note}", self.node_name),
        });
    }

    /// Waits until all that was told is sent; not for long, since whoever asks is about to end.
    pub async fn flushed(&self) {
        let mut pending = self.pending.subscribe();
        let _in_time = timeout(FLUSH, pending.wait_for(|pending| *pending == 0)).await;
    }

    /// How many were forgotten because too many were waiting.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// kube-proxy gives a Node's name for its uid, and `kubectl describe node` asks for that.
    fn node(&self, severity: Severity, reason: &'static str, action: &'static str, note: String) {
        let name = self.node_name.to_string();
        let object = ObjectRef { kind: "Node", name: ObjectName::new("", &name) };
        self.tell(Event { regarding: Regarding { object, uid: Some(name) }, severity, reason, action, note });
    }

    fn tell(&self, event: Event) {
        self.pending.send_modify(|pending| *pending += 1);
        let Err(refused) = self.sender.try_send(event) else { return };
        self.pending.send_modify(|pending| *pending = pending.saturating_sub(1));
        if matches!(refused, TrySendError::Full(_)) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

const START: &str = "StartKubeProxy";

/// Where events are taken from. Without it they are forgotten.
#[derive(Debug)]
pub struct Queue {
    receiver: mpsc::Receiver<Event>,
    pending: watch::Sender<usize>,
}

impl Queue {
    /// Nobody tells anything.
    pub fn none() -> Self {
        Events::new("").1
    }

    /// Itself if anybody will take what is in it, else one that takes nothing.
    pub fn only_if(self, taken: bool) -> Self {
        if taken { self } else { Self::none() }
    }

    /// The next event, which [`Queue::done`] must follow.
    pub(crate) async fn next(&mut self) -> Event {
        match self.receiver.recv().await {
            Some(event) => event,
            // Nobody is left to tell anything.
            None => std::future::pending().await,
        }
    }

    /// How many events wait.
    pub fn waiting(&self) -> usize {
        self.receiver.len()
    }

    /// One event was sent, or given up.
    pub(crate) fn done(&self) {
        self.pending.send_modify(|pending| *pending = pending.saturating_sub(1));
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
    async fn a_full_queue_forgets_and_counts_and_never_blocks() {
        let (events, mut queue) = Events::new("n1");
        for _ in 0..QUEUE + 3 {
            events.starting();
        }
        assert_eq!(events.dropped(), 3);
        let started = tokio::time::Instant::now();
        events.flushed().await;
        assert_eq!(started.elapsed(), FLUSH, "nobody sends, and an end does not wait for ever");
        while events.pending.borrow().gt(&0) {
            queue.next().await;
            queue.done();
        }
        let started = tokio::time::Instant::now();
        events.flushed().await;
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn without_an_api_server_nothing_is_waited_for() {
        let (events, queue) = Events::new("n1");
        events.starting();
        drop(queue);
        events.starting();
        let started = tokio::time::Instant::now();
        events.flushed().await;
        assert_eq!((started.elapsed(), events.dropped()), (Duration::ZERO, 0));
    }

    #[tokio::test]
    async fn the_table_of_events() {
        let (events, mut queue) = Events::new("n1");
        let why = anyhow::anyhow!("in use").context("listen on 0.0.0.0:30000");
        let web = ObjectName::new("default", "web");
        let skipped = |cause| Skipped {
            object: ObjectRef { kind: "EndpointSlice", name: ObjectName::new("default", "web-1") },
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
        events.skipped(&skipped(Cause::Invalid), Some("1234"));
        events.skipped(&skipped(Cause::Conflict), None);
        events.skipped(&skipped(Cause::Refused), None);
        let service = ObjectRef { kind: "Service", name: web.clone() };
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
            "Service default/web Some(\"5678\") Warning EndpointRefused Sync: EndpointSlice default/web-1 ports[0]: port 0",
        ];
        for row in rows {
            let Event { regarding, severity, reason, action, note } = queue.next().await;
            let Regarding { object, uid } = regarding;
            assert_eq!(format!("{object} {uid:?} {severity:?} {reason} {action}: {note}"), row);
        }
    }
}
