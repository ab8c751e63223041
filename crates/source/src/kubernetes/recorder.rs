//! Sends Events to the API server, as kube-proxy does: `events.k8s.io/v1`, reporting controller
//! `kube-proxy`.
//!
//! kube's `Recorder` merges two problems of a Service that have the same reason, has no limit per
//! object, and loses its series when new credentials replace its client.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event as Object, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use super::errors::explain;
use crate::events::history::{History, Step};
use crate::events::{Event, Queue, Regarding, Severity};

const CONTROLLER: &str = "kube-proxy";
const DEFAULT_NAMESPACE: &str = "default";
/// The API server's limit on a note, in bytes.
const NOTE: usize = 1024;
/// The server's limit on the reporting instance, in bytes.
const INSTANCE: usize = 128;
/// The timeout of an attempt.
const ANSWER: Duration = Duration::from_secs(10);
/// The maximum number of attempts to send an Event to an unresponsive server.
const TRIES: u32 = 12;
/// The maximum wait between two attempts.
const WAIT: Duration = Duration::from_secs(10);

/// Takes Events off the queue and sends them. Cancel-safe: the next run continues with another
/// client, and no Event is lost or sent twice.
pub(super) struct Recorder {
    instance: String,
    queue: Queue,
    history: History,
    current: Option<(Event, Step, Timestamp)>,
    /// Set after the log has reported that the server refuses Events.
    refused: bool,
}

impl Recorder {
    pub(super) fn new(node_name: &str, queue: Queue) -> Self {
        let instance = truncated(node_name.to_owned(), INSTANCE);
        Self {
            instance,
            queue,
            history: History::default(),
            current: None,
            refused: false,
        }
    }

    pub(super) async fn run(&mut self, client: &Client) -> ! {
        loop {
            let (event, step, at) = match &self.current {
                Some(current) => current.clone(),
                None => {
                    let event = self.queue.next().await;
                    self.enter(event)
                }
            };
            match self.send(client, &event, &step, at).await {
                Err(kube::Error::Api(status))
                    if status.code == 404 && matches!(step, Step::Count(..)) =>
                {
                    // The server deletes Events after an hour.
                    self.history.forget(&event);
                    self.enter(event);
                    continue;
                }
                Err(kube::Error::Api(status)) if !is_passing(status.code) && status.code != 409 => {
                    if !std::mem::replace(&mut self.refused, true) {
                        info!(
                            code = status.code,
                            why = status.message,
                            "the API server refuses Events"
                        );
                    }
                }
                Err(error) => debug!(
                    error = explain(&error),
                    reason = event.reason,
                    "Event given up"
                ),
                Ok(()) => self.refused = false,
            }
            self.current = None;
            self.queue.done();
        }
    }

    fn enter(&mut self, event: Event) -> (Event, Step, Timestamp) {
        let at = Timestamp::now();
        let name = || {
            format!(
                "{}.{:x}",
                event.regarding.object.name.name,
                at.as_nanosecond()
            )
        };
        let step = self.history.enter(&event, name, Instant::now());
        self.current.insert((event, step, at)).clone()
    }

    /// Sends an Event. Retries while the server is unresponsive or busy.
    async fn send(
        &self,
        client: &Client,
        event: &Event,
        step: &Step,
        at: Timestamp,
    ) -> kube::Result<()> {
        let mut tries = 0;
        loop {
            let result = match timeout(ANSWER, self.send_once(client, event, step, at)).await {
                Ok(Err(kube::Error::Api(status))) if !is_passing(status.code) => {
                    return Err(kube::Error::Api(status));
                }
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => Err(error),
                Err(_late) => Err(kube::Error::Service("no answer".into())),
            };
            tries += 1;
            if tries == TRIES {
                return result;
            }
            sleep(WAIT.min(Duration::from_secs(1 << tries.min(5)))).await;
        }
    }

    async fn send_once(
        &self,
        client: &Client,
        event: &Event,
        step: &Step,
        at: Timestamp,
    ) -> kube::Result<()> {
        let namespace = match &*event.regarding.object.name.namespace {
            "" => DEFAULT_NAMESPACE,
            namespace => namespace,
        };
        let api = Api::<Object>::namespaced(client.clone(), namespace);
        match step {
            Step::Create(name) => api
                .create(
                    &PostParams::default(),
                    &self.object(event, namespace, name, at),
                )
                .await
                .map(drop),
            Step::Count(name, count) => {
                let series = EventSeries {
                    count: *count,
                    last_observed_time: MicroTime(at),
                };
                let patch = Patch::Merge(serde_json::json!({ "series": series }));
                api.patch(name, &PatchParams::default(), &patch)
                    .await
                    .map(drop)
            }
            Step::Nothing => Ok(()),
        }
    }

    fn object(&self, event: &Event, namespace: &str, name: &str, at: Timestamp) -> Object {
        Object {
            metadata: ObjectMeta {
                namespace: Some(namespace.to_owned()),
                name: Some(name.to_owned()),
                ..Default::default()
            },
            event_time: Some(MicroTime(at)),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            regarding: Some(reference(&event.regarding)),
            type_: Some(severity(event.severity).to_owned()),
            reason: Some(event.reason.to_owned()),
            action: Some(event.action.to_owned()),
            note: (!event.note.is_empty()).then(|| truncated(event.note.clone(), NOTE)),
            ..Default::default()
        }
    }
}

/// Returns true if a retry may succeed; after a 401, with another client's credentials.
fn is_passing(code: u16) -> bool {
    matches!(code, 401 | 429 | 500..)
}

fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Normal => "Normal",
        Severity::Warning => "Warning",
    }
}

fn reference(regarding: &Regarding) -> ObjectReference {
    let name = &regarding.object.name;
    ObjectReference {
        kind: Some(regarding.object.kind.to_owned()),
        namespace: (!name.namespace.is_empty()).then(|| name.namespace.to_string()),
        name: Some(name.name.to_string()),
        uid: regarding.uid.clone(),
        ..Default::default()
    }
}

fn truncated(mut text: String, bytes: usize) -> String {
    text.truncate(text.floor_char_boundary(bytes));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_notes_are_cut_between_characters() {
        assert_eq!(truncated("short".to_owned(), 5), "short");
        assert_eq!(truncated("longer".to_owned(), 5), "longe");
        assert_eq!(truncated("äöü".to_owned(), 5), "äö");
        assert_eq!(truncated(String::new(), 5), "");
    }
}
