//! The parts of host mode outside the datapath: the DNS server for the cluster's names, and the
//! tunnel.

use std::convert::Infallible;

use anyhow::Result;
use proxy_core::model::ModelOptions;
use proxy_datapath::FlowMaps;
use proxy_source::{Source, kubernetes};
use rtnetlink::Handle;
use tracing::warn;

use crate::control::AgentHandle;
use crate::names::{self, Names, NamesOptions, NamesState};
use crate::tunnel::{self, Tunnel, TunnelState};

pub(super) struct OutsideOptions<'a> {
    pub(super) source: &'a Source,
    pub(super) names: Option<NamesOptions>,
    pub(super) tunnel: Option<kubernetes::Options>,
}

/// The servers for local processes, each if enabled.
pub(super) struct Outside {
    names: Option<Names>,
    tunnel: Option<Tunnel>,
}

/// The states of these servers for reports, and the API server.
#[derive(Debug, Default)]
pub struct OutsideStates {
    /// `None` if there is no API server.
    pub(crate) api_server: Option<String>,
    pub(crate) names: Option<NamesState>,
    pub(crate) tunnel: Option<TunnelState>,
}

/// Starts the enabled servers, and enters the tunnel's addresses in `model`.
pub(super) async fn start(
    wanted: OutsideOptions<'_>,
    model: &mut ModelOptions,
    flows: &FlowMaps,
    agent: &AgentHandle,
    netlink: &Handle,
) -> Result<(Outside, OutsideStates)> {
    let (names, names_state) = names::start(wanted.names, agent, netlink);
    let (tunnel, tunnel_state) = Tunnel::start(
        wanted.tunnel,
        model.host_routes.as_mut(),
        flows,
        agent,
        netlink,
    )
    .await?;
    if let Source::Kubernetes(options) = wanted.source
        && let Some(foreign) = options.foreign_home().await
    {
        warn!("{foreign}: docs/host-mode.md#kubeconfigs-with-exec-plugins");
    }
    // Only reports use the URL. The source reports its own errors.
    let api_server = wanted.source.server().await.unwrap_or_default();
    let states = OutsideStates {
        api_server,
        names: names_state,
        tunnel: tunnel_state,
    };
    Ok((Outside { names, tunnel }, states))
}

impl Outside {
    pub(super) async fn serve(self) -> Infallible {
        tokio::select! {
            never = names::serve(self.names) => never,
            never = tunnel::serve(self.tunnel) => never,
        }
    }
}
