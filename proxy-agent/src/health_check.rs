//! `healthCheckNodePort`: reports to external load balancers whether this node has local endpoints
//! of a Service (kube-proxy's `pkg/proxy/healthcheck/service_health.go`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow};
use axum::Router;
use axum::body::Body;
use http::header::{CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;
use serde_json::ser::PrettyFormatter;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::info;

use crate::http_server::{self, Place, Room, files};
use crate::liveness::Liveness;
use proxy_core::input::ObjectName;
use proxy_core::model::HealthCheck;
use proxy_source::events::Events;
use proxy_source::health::{Health, Problem};

/// The listeners of all Services with a `healthCheckNodePort`, at each address. Dropping this value
/// closes them.
pub struct HealthChecks {
    health: Health,
    liveness: Liveness,
    events: Events,
    want: BTreeMap<ObjectName, HealthCheck>,
    addrs: BTreeSet<IpAddr>,
    open: BTreeMap<ObjectName, Check>,
    /// The connection limit of all listeners together.
    room: Room,
    most: usize,
}

struct Check {
    port: u16,
    local_endpoints: Arc<AtomicUsize>,
    /// The server of each address, which never ends.
    listeners: BTreeMap<IpAddr, JoinSet<()>>,
}

impl HealthChecks {
    /// Creates the listeners' state. `health` and `events` get problems; `liveness` reports whether
    /// this node is served.
    pub fn new(health: Health, liveness: Liveness, events: Events) -> Self {
        let (want, addrs, open) = Default::default();
        Self {
            health,
            liveness,
            events,
            want,
            addrs,
            open,
            room: Room::default(),
            most: files() / 4,
        }
    }

    pub fn at_most(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// Returns true if no Service has a `healthCheckNodePort`.
    pub fn is_empty(&self) -> bool {
        self.want.is_empty()
    }

    /// Applies the health checks of Services, after a sync.
    pub async fn set(&mut self, want: &BTreeMap<ObjectName, HealthCheck>) {
        // Each sync retries failed listeners.
        if self.want != *want || !self.is_whole(&self.addrs) {
            self.want.clone_from(want);
            self.update().await;
        }
    }

    /// Sets the addresses to listen on. An unspecified address stands for all addresses of its
    /// family.
    pub async fn listen_on(&mut self, addrs: BTreeSet<IpAddr>) {
        if !self.is_whole(&addrs) || self.addrs != addrs {
            self.addrs = addrs;
            self.update().await;
        }
    }

    /// Returns the Services that may listen. Above the limit, namespaces take turns.
    fn admitted(&self) -> BTreeSet<ObjectName> {
        let mut turns = BTreeMap::<_, usize>::new();
        let mut turn_of = |name: &'_ ObjectName| {
            let turn = turns.entry(name.namespace.clone()).or_default();
            *turn += 1;
            *turn
        };
        let mut in_turn: Vec<_> = self.want.keys().map(|name| (turn_of(name), name)).collect();
        in_turn.sort_unstable();
        in_turn
            .into_iter()
            .take(self.most / self.addrs.len().max(1))
            .map(|(_, name)| name.clone())
            .collect()
    }

    fn is_whole(&self, addrs: &BTreeSet<IpAddr>) -> bool {
        self.open
            .values()
            .all(|check| addrs.iter().eq(check.listeners.keys()))
    }

    /// Opens, closes and moves listeners; correct listeners stay open. A failing port is a problem
    /// of its Service only, and the next call retries it.
    async fn update(&mut self) {
        let admitted = self.admitted();
        // All obsolete listeners close before a new listener opens, because a port may move between
        // Services.
        let names: Vec<ObjectName> = self.open.keys().cloned().collect();
        for name in names {
            let want = self.want.get(&name);
            let Some(mut check) = self.open.remove(&name) else {
                continue;
            };
            if want.is_some_and(|want| want.port == check.port) {
                check
                    .close(|addr| !admitted.contains(&name) || !self.addrs.contains(&addr))
                    .await;
                self.open.insert(name, check);
            } else {
                check.close(|_| true).await;
                info!(service = %name, port = check.port, "health check closed");
                self.health.end(&problem(&name));
            }
        }
        for (name, want) in &self.want {
            let check = self.open.entry(name.clone()).or_insert_with(|| {
                info!(service = %name, port = want.port, "health check opened");
                Check {
                    port: want.port,
                    local_endpoints: Arc::default(),
                    listeners: BTreeMap::new(),
                }
            });
            check
                .local_endpoints
                .store(want.local_endpoints, Ordering::Relaxed);
            let listened = if admitted.contains(name) {
                check.listen(name, &self.addrs, &self.liveness, &self.room)
            } else {
                Err(anyhow!(
                    "the limit of health check listeners is reached: {}",
                    self.most
                ))
            };
            match listened {
                Ok(()) => self.health.end(&problem(name)),
                Err(error) => {
                    // Each sync retries the port; the Event is sent once.
                    if !self.health.has(&problem(name)) {
                        self.events.health_check_failed(name, want.port, &error);
                    }
                    self.health.begin(&problem(name), format!("{error:#}"));
                }
            }
        }
    }
}

impl Check {
    async fn close(&mut self, which: impl Fn(IpAddr) -> bool) {
        let closing: Vec<IpAddr> = self
            .listeners
            .keys()
            .copied()
            .filter(|addr| which(*addr))
            .collect();
        for addr in closing {
            if let Some(mut listener) = self.listeners.remove(&addr) {
                listener.shutdown().await;
            }
        }
    }

    fn listen(
        &mut self,
        name: &ObjectName,
        addrs: &BTreeSet<IpAddr>,
        liveness: &Liveness,
        room: &Room,
    ) -> Result<()> {
        let mut result = Ok(());
        for addr in addrs {
            if self.listeners.contains_key(addr) {
                continue;
            }
            let at = SocketAddr::new(*addr, self.port);
            // The IPv6 socket serves only IPv6, so that both unspecified addresses can have a
            // listener.
            match http_server::bind(at, true).with_context(|| format!("listen on {at}")) {
                Ok(listener) => drop(
                    self.listeners
                        .insert(*addr, self.serve(listener, name, liveness, room.place())),
                ),
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    fn serve(
        &self,
        listener: TcpListener,
        name: &ObjectName,
        liveness: &Liveness,
        place: Place,
    ) -> JoinSet<()> {
        let name = name.clone();
        let liveness = liveness.clone();
        let local_endpoints = self.local_endpoints.clone();
        let answer = move || async move {
            answer(
                &name,
                local_endpoints.load(Ordering::Relaxed),
                liveness.is_live(),
            )
        };
        let mut task = JoinSet::new();
        // Load balancers may probe with any path and method.
        task.spawn(http_server::serve(
            listener,
            Router::new().fallback(answer),
            place,
        ));
        task
    }
}

fn problem(name: &ObjectName) -> Problem {
    Problem::HealthCheck(name.clone())
}

/// The body, with fields in kube-proxy's order.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    service: ServiceName<'a>,
    local_endpoints: usize,
    service_proxy_healthy: bool,
}

#[derive(Serialize)]
struct ServiceName<'a> {
    namespace: &'a str,
    name: &'a str,
}

fn answer(name: &ObjectName, local_endpoints: usize, is_live: bool) -> Response<Body> {
    let service = ServiceName {
        namespace: &name.namespace,
        name: &name.name,
    };
    let answer = Answer {
        service,
        local_endpoints,
        service_proxy_healthy: is_live,
    };
    let mut body = Vec::new();
    let mut json =
        serde_json::Serializer::with_formatter(&mut body, PrettyFormatter::with_indent(b"\t"));
    answer
        .serialize(&mut json)
        .expect("names and numbers are JSON, and a vector takes all of it");
    let mut response = Response::new(Body::from(body));
    if local_endpoints == 0 || !is_live {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(
        "x-load-balancing-endpoint-weight",
        HeaderValue::from(local_endpoints),
    );
    http_server::close_after(&mut response);
    response
}
