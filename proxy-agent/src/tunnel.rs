//! Forwards connections of local processes to unreachable pods through the API server.
//!
//! The datapath sends such a connection to a socket of kpx on this machine, as the only backend of
//! the Service port. The flow table names the Service. So one socket of each family serves all
//! Services, and a connection without a local flow is refused.

mod listen;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::Timestamp;
use proxy_core::input::ObjectName;
use proxy_core::model::{HostRoutes, TunnelledPod};
use proxy_datapath::{FlowMaps, HostFlows, TranslatedFlow};
use proxy_net::{anchor, listeners, on_own_thread, sock_diag};
use proxy_source::kubernetes::{Forwarder, Options, PodStream};
use proxy_view::status::{TunnelFailure, TunnelStatus};
use rand::seq::SliceRandom;
use rtnetlink::Handle;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::control::AgentHandle;

/// The maximum number of streams. Further connections wait in the accept queue.
const STREAMS: usize = 256;
/// The maximum number of pods that are tried for one connection.
const TRIES: usize = 3;
/// The time between checks of the tunnel's own addresses.
const LOOK: Duration = Duration::from_secs(10);

/// The wait between checks of a half-closed client socket: first and longest.
const GONE_MIN: Duration = Duration::from_millis(10);
const GONE_MAX: Duration = Duration::from_secs(1);

/// The state of the tunnel for `kpx status`.
pub type TunnelState = watch::Receiver<TunnelStatus>;

/// The candidate pods of a connection.
#[derive(Clone, Debug)]
pub struct Tunnelled {
    pub service: ObjectName,
    pub pods: Vec<TunnelledPod>,
}

pub(crate) struct Tunnel {
    listeners: Vec<TcpListener>,
    netlink: Handle,
    shared: Arc<Shared>,
}

struct Shared {
    flows: HostFlows,
    agent: AgentHandle,
    forwarder: Forwarder,
    status: watch::Sender<TunnelStatus>,
}

impl Tunnel {
    /// Listens if the tunnel is enabled, and writes its addresses into `routes`.
    pub(crate) async fn start(
        options: Option<Options>,
        routes: Option<&mut Arc<HostRoutes>>,
        flows: &FlowMaps,
        agent: &AgentHandle,
        netlink: &Handle,
    ) -> Result<(Option<Self>, Option<TunnelState>)> {
        let (Some(options), Some(routes)) = (options, routes) else {
            return Ok((None, None));
        };
        let listeners = listen::listen(netlink)
            .await
            .context("listen for connections to pods out of reach")?;
        let addresses: Vec<SocketAddr> = listeners
            .iter()
            .map(TcpListener::local_addr)
            .collect::<Result<_, _>>()?;
        info!(
            ?addresses,
            "pods out of reach are reached through the API server, by TCP"
        );
        Arc::make_mut(routes).tunnel.clone_from(&addresses);
        let (status, state) = watch::channel(TunnelStatus {
            addresses,
            ..TunnelStatus::default()
        });
        let flows = flows.host_flows()?;
        let agent = agent.clone();
        let shared = Shared {
            flows,
            agent,
            forwarder: Forwarder::new(options),
            status,
        };
        Ok((
            Some(Self {
                listeners,
                netlink: netlink.clone(),
                shared: Arc::new(shared),
            }),
            Some(state),
        ))
    }

    pub(crate) async fn run(self) -> Infallible {
        let Self {
            listeners,
            netlink,
            shared,
        } = self;
        let mut open = JoinSet::new();
        loop {
            tokio::select! {
                (stream, client) = listen::accept(&listeners), if open.len() < STREAMS => {
                    open.spawn(Arc::clone(&shared).lead(stream, client));
                }
                Some(_) = open.join_next() => {}
                () = sleep(LOOK) => {
                    // The anchor may be new and not yet have the addresses.
                    match anchor::address_listeners(&netlink).await {
                        Ok(()) => shared.clear(None),
                        Err(error) => shared.fail(None, format!("{error:#}")),
                    }
                }
            }
        }
    }
}

pub(crate) async fn serve(tunnel: Option<Tunnel>) -> Infallible {
    match tunnel {
        Some(tunnel) => tunnel.run().await,
        None => std::future::pending().await,
    }
}

impl Shared {
    /// Forwards one connection to a pod until the connection ends. Resets the connection on
    /// failure.
    async fn lead(self: Arc<Self>, stream: TcpStream, client: SocketAddr) {
        let wanted = self.wanted(&stream, client).await;
        let (flow, service, pod) = match wanted {
            Ok(Some((flow, wanted))) => {
                let service = wanted.service.clone();
                (flow, service, self.open(wanted).await)
            }
            Ok(None) => {
                debug!(%client, "a connection to the tunnel is not to a Service");
                return listen::reset(stream);
            }
            Err(error) => {
                self.fail(None, format!("{error:#}"));
                return listen::reset(stream);
            }
        };
        let (pod, opened) = match pod {
            Ok(opened) => opened,
            Err(error) => {
                self.fail(Some(&service), format!("{error:#}"));
                return listen::reset(stream);
            }
        };
        self.count();
        let mut stream = stream;
        let ended = opened.relay(&mut stream, is_gone(flow)).await;
        self.count_end();
        match ended {
            Ok(()) => self.clear(Some(&service)),
            Err(error) => {
                // Clients may reset their connections, which is no failure.
                if error.downcast_ref::<std::io::Error>().is_none() {
                    self.fail(Some(&service), format!("pod {pod}: {error:#}"));
                }
                listen::reset(stream);
            }
        }
    }

    /// Returns the flow of a connection and its candidate pods; `None` if this machine has no such
    /// flow.
    async fn wanted(
        &self,
        stream: &TcpStream,
        client: SocketAddr,
    ) -> Result<Option<(TranslatedFlow, Tunnelled)>> {
        let Some(flow) = self.flows.find(client, stream.local_addr()?)? else {
            return Ok(None);
        };
        let wanted = self.agent.tunnelled(flow.service).await?;
        let wanted = wanted.with_context(|| {
            format!("no pod serves {} through the tunnel any more", flow.service)
        })?;
        Ok(Some((flow, wanted)))
    }

    /// Opens a stream to a pod of the Service. Pods are tried in random order.
    async fn open(&self, Tunnelled { mut pods, .. }: Tunnelled) -> Result<(String, PodStream)> {
        pods.shuffle(&mut rand::rng());
        let mut failed = anyhow::anyhow!("no pods");
        for TunnelledPod {
            namespace,
            name,
            at,
        } in pods.iter().take(TRIES)
        {
            match self.forwarder.open(namespace, name, at.port()).await {
                Ok(stream) => return Ok((format!("{}/{name}", &**namespace), stream)),
                Err(error) => failed = error.context(format!("pod {}/{name}", &**namespace)),
            }
        }
        Err(failed)
    }

    /// Counts a new stream. The status lock makes the counts of concurrent streams consistent.
    fn count(&self) {
        self.status.send_modify(|status| {
            status.opened += 1;
            status.streams += 1;
        });
    }

    fn count_end(&self) {
        self.status.send_modify(|status| status.streams -= 1);
    }

    fn clear(&self, service: Option<&ObjectName>) {
        self.status
            .send_if_modified(|status| clear(status, service));
    }

    /// Notes a failure, and logs it unless it equals the last failure.
    fn fail(&self, service: Option<&ObjectName>, why: String) {
        let service = service.map(ObjectName::to_string);
        let last = self
            .status
            .borrow()
            .failure
            .as_ref()
            .map(|failure| (failure.service.clone(), failure.why.clone()));
        if last != Some((service.clone(), why.clone())) {
            warn!(service, why, "a connection through the tunnel failed");
        }
        let at = Timestamp::now();
        self.status.send_modify(|status| {
            status.failed += 1;
            status.failure = Some(TunnelFailure { service, why, at });
        });
    }
}

/// Clears the failure of a Service whose stream ended well, and a failure of no Service. Returns
/// false if there was no such failure.
fn clear(status: &mut TunnelStatus, service: Option<&ObjectName>) -> bool {
    let service = service.map(ObjectName::to_string);
    let is_past =
        |failure: &mut TunnelFailure| failure.service.is_none() || failure.service == service;
    status.failure.take_if(is_past).is_some()
}

/// Waits until no process has the client's socket. A FIN does not show that: the client may still
/// read.
async fn is_gone(
    TranslatedFlow {
        client, frontend, ..
    }: TranslatedFlow,
) {
    let mut wait = GONE_MIN;
    // The kernel may load a module during the call.
    while on_own_thread(has_owner(client, frontend))
        .await
        .unwrap_or(true)
    {
        sleep(wait).await;
        wait = (wait * 2).min(GONE_MAX);
    }
}

/// Returns true if a process has the client's socket. If unknown, the stream lasts until the pod
/// ends it.
async fn has_owner(client: SocketAddr, frontend: SocketAddr) -> bool {
    match sock_diag::has_owner(client, frontend).await {
        Ok(Some(has_owner)) => has_owner,
        // The kernel may be unable to look up a single socket. To list all sockets takes longer.
        answer => {
            debug!(?answer, %client, "the kernel names no such socket");
            listeners::has_owner(client, frontend).unwrap_or(true)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_stream_clears_its_own_failure_and_that_of_none() {
        let name = |name: &str| ObjectName {
            namespace: "shop".into(),
            name: name.into(),
        };
        let web = name("web");
        let api = name("api");
        for (failed, ended_well, is_cleared) in [
            (Some(&web), Some(&web), true),
            (Some(&web), Some(&api), false),
            (Some(&web), None, false),
            (None, Some(&web), true),
            (None, None, true),
        ] {
            let service = failed.map(ObjectName::to_string);
            let failure = TunnelFailure {
                service,
                why: "no device".to_owned(),
                at: Timestamp::UNIX_EPOCH,
            };
            let mut status = TunnelStatus {
                failure: Some(failure),
                ..TunnelStatus::default()
            };
            assert_eq!(
                clear(&mut status, ended_well),
                is_cleared,
                "{failed:?} {ended_well:?}"
            );
            assert_eq!(status.failure.is_none(), is_cleared);
        }
    }
}
