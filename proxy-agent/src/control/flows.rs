//! `/flows`: lists the flows of this node as lines of JSON, and ends selected flows.
//!
//! A large table has hundreds of thousands of flows. The agent reads a batch on its own thread when
//! the client has read the previous batch. So neither memory nor the loop depends on the number of
//! flows or on a slow client.

use std::net::IpAddr;

use anyhow::{Context, Result};
use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use futures::{TryStream, stream};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::spawn_blocking;
use tracing::info;

use super::AgentHandle;
use crate::http_server::Client;
use proxy_core::desired::Snapshot;
use proxy_datapath::{FlowMaps, FlowReader};
use proxy_view::{FlowView, Names, frontend_names};

/// The maximum number of concurrent lists: each holds a batch and the names of all frontends.
const LISTS: usize = 4;

static ROOM: Semaphore = Semaphore::const_new(LISTS);

/// A client's selection of flows: every field that is set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct FlowFilter {
    /// `namespace/name`.
    pub service: Option<String>,
    pub client: Option<IpAddr>,
    pub backend: Option<IpAddr>,
    pub namespace: Option<String>,
    /// A comma-separated list.
    pub states: Option<String>,
}

/// The answer to a client that ends flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct EndedFlows {
    pub ended: usize,
}

impl FlowFilter {
    /// Returns the request path for these flows.
    pub fn path(&self) -> String {
        let service = self
            .service
            .iter()
            .map(|service| format!("service={service}"));
        let client = self.client.iter().map(|client| format!("client={client}"));
        let backend = self
            .backend
            .iter()
            .map(|backend| format!("backend={backend}"));
        let namespace = self
            .namespace
            .iter()
            .map(|namespace| format!("namespace={}", encoded(namespace)));
        let states = self.states.iter().map(|states| format!("states={states}"));
        let terms: Vec<_> = service
            .chain(client)
            .chain(backend)
            .chain(namespace)
            .chain(states)
            .collect();
        format!("/flows?{}", terms.join("&"))
    }

    fn has(&self, flow: &FlowView) -> bool {
        self.client.is_none_or(|client| flow.client.ip() == client)
            && self
                .backend
                .is_none_or(|backend| flow.backend.ip() == backend)
            && self.service.as_ref().is_none_or(|service| {
                let found = flow.service.as_ref();
                found.is_some_and(|found| {
                    service.split_once('/') == Some((&found.namespace, &found.name))
                })
            })
            && self.namespace.as_ref().is_none_or(|namespace| {
                flow.service
                    .as_ref()
                    .is_some_and(|service| service.namespace == *namespace)
            })
            && self
                .states
                .as_ref()
                .is_none_or(|states| states.split(',').any(|state| state == flow.state))
    }
}

pub(super) async fn flows(
    State(agent): State<AgentHandle>,
    Query(filter): Query<FlowFilter>,
) -> Response {
    let Ok(room) = ROOM.try_acquire() else {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{LISTS} lists of flows are being read already"),
        )
            .into_response();
    };
    match agent.flows().await {
        Ok((snapshot, flows)) => match List::open(snapshot, flows, filter, room).await {
            Ok(list) => Body::from_stream(list.lines()).into_response(),
            Err(error) => super::answer::<()>(Err(error)),
        },
        Err(error) => super::answer::<()>(Err(error)),
    }
}

/// Percent-encodes user input for a path (RFC 3986).
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

/// Ends flows. Refuses a client that may only read.
pub(super) async fn end(
    State(agent): State<AgentHandle>,
    client: Option<Extension<Client>>,
    Query(filter): Query<FlowFilter>,
) -> Response {
    if client.is_none_or(|Extension(client)| client != Client::Own) {
        return (StatusCode::FORBIDDEN, "to end flows takes root").into_response();
    }
    super::answer(end_flows(&agent, filter).await)
}

async fn end_flows(agent: &AgentHandle, filter: FlowFilter) -> Result<EndedFlows> {
    let (snapshot, flows) = agent.flows().await?;
    let wanted = filter.clone();
    let end = move || {
        let names = Names::new(frontend_names(&snapshot));
        flows.end(|flow| filter.has(&FlowView::new(flow, &names)))
    };
    let ended = spawn_blocking(end).await.context("end flows")??;
    info!(ended, flows = wanted.path(), "ended flows on request");
    Ok(EndedFlows { ended })
}

struct List {
    reader: FlowReader,
    names: Names,
    filter: FlowFilter,
    _room: SemaphorePermit<'static>,
}

impl List {
    async fn open(
        snapshot: Snapshot,
        flows: FlowMaps,
        filter: FlowFilter,
        room: SemaphorePermit<'static>,
    ) -> Result<Self> {
        let list = move || {
            Ok(Self {
                reader: flows.reader()?,
                names: Names::new(frontend_names(&snapshot)),
                filter,
                _room: room,
            })
        };
        spawn_blocking(list)
            .await
            .context("open the list of flows")?
    }

    /// Returns the lines. Each batch is read when the client has read the previous batch.
    fn lines(self) -> impl TryStream<Ok = Bytes, Error = anyhow::Error> + Send + 'static {
        stream::try_unfold(self, |mut list| async {
            let batch = spawn_blocking(move || {
                let lines = list.next_lines();
                (list, lines)
            });
            let (list, lines) = batch.await.context("read the list of flows")?;
            Ok(lines?.map(|lines| (lines, list)))
        })
    }

    /// Returns some lines; `None` after the last matching flow.
    fn next_lines(&mut self) -> Result<Option<Bytes>> {
        while let Some(flows) = self.reader.next_batch()? {
            let views = flows
                .iter()
                .map(|flow| FlowView::new(flow, &self.names))
                .filter(|view| self.filter.has(view));
            let mut lines = Vec::new();
            for view in views {
                serde_json::to_writer(&mut lines, &view).context("write a flow")?;
                lines.push(b'\n');
            }
            if !lines.is_empty() {
                return Ok(Some(lines.into()));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_view::FlowService;

    #[test]
    fn filter_survives_the_way_through_a_path() {
        let filter = FlowFilter {
            service: Some("shop/web".to_owned()),
            client: Some([0xfd00, 0, 0, 0, 0, 0, 0, 1].into()),
            backend: Some([10, 0, 0, 1].into()),
            namespace: Some("shop&client=ä".to_owned()),
            states: Some("new,closed".to_owned()),
        };
        for filter in [filter, FlowFilter::default()] {
            let uri = filter.path().parse().unwrap();
            assert_eq!(Query::<FlowFilter>::try_from_uri(&uri).unwrap().0, filter);
        }
    }

    #[test]
    fn filter_selects_by_service_client_and_backend() {
        let service = FlowService {
            namespace: "shop".into(),
            name: "web".into(),
            port_name: String::new(),
        };
        let flow = FlowView {
            protocol: "TCP".into(),
            client: ([10, 1, 0, 1], 40_000).into(),
            frontend: ([10, 96, 0, 10], 80).into(),
            backend: ([10, 2, 0, 1], 8080).into(),
            source: ([10, 1, 0, 1], 40_000).into(),
            masqueraded: false,
            from_node: false,
            state: "new".into(),
            idle_secs: 0,
            timeout_secs: 30,
            service: Some(service),
        };
        let has = |path: &str| {
            Query::<FlowFilter>::try_from_uri(&path.parse().unwrap())
                .unwrap()
                .0
                .has(&flow)
        };
        for path in [
            "/flows",
            "/flows?service=shop/web",
            "/flows?client=10.1.0.1&backend=10.2.0.1",
            "/flows?namespace=shop&states=closed,new",
        ] {
            assert!(has(path), "{path}");
        }
        for path in [
            "/flows?service=shop/we",
            "/flows?service=web",
            "/flows?client=10.1.0.2",
            "/flows?backend=10.1.0.1",
            "/flows?namespace=sho",
            "/flows?states=closed,ne",
        ] {
            assert!(!has(path), "{path}");
        }
    }
}
