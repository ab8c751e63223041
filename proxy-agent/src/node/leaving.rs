//! Moves bypass connections to the network stack once rules may stop their packets.
//!
//! Conntrack has not seen these connections, and would mark their packets new or invalid. So each
//! connection gets a conntrack entry before it moves. From then on the rules apply to it as to any
//! open connection.

use anyhow::{Result, bail};
use futures::{StreamExt, stream};
use proxy_common::flow::State;
use proxy_datapath::{BypassFlow, BypassFlows};
use proxy_net::conntrack::Tuple;
use proxy_net::conntrack::liberal::{self, Conntrack};
use proxy_net::sysctl;

use super::bypass_connections::Staying;

/// The maximum number of scans. Scans repeat until one finds nothing: a program may open a flow
/// behind a scan, or undo its work.
const WALKS: usize = 10;
/// The maximum number of pending requests to conntrack.
const AT_ONCE: usize = 64;

/// Conntrack's timeouts for open and for half-closed connections, with the kernel's defaults in
/// seconds.
const ESTABLISHED: (&str, u32) = ("netfilter/nf_conntrack_tcp_timeout_established", 432_000);
const CLOSE_WAIT: (&str, u32) = ("netfilter/nf_conntrack_tcp_timeout_close_wait", 60);

/// The connections that have moved to the stack.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub(super) connections: usize,
    /// The number of connections without a conntrack entry, and the last reason.
    pub(super) unknown: Option<(usize, String)>,
}

/// Moves all bypass connections except `staying` to the stack. `tracks` is set if conntrack tracks
/// connections here.
pub(super) async fn leave(
    flows: &mut BypassFlows,
    staying: &Staying,
    tracks: bool,
) -> Result<Left> {
    let mut left = Left::default();
    if !tracks {
        left.walk(flows, staying, None).await?;
        return Ok(left);
    }
    match liberal::connect() {
        Ok((connection, conntrack)) => tokio::select! {
            walked = left.walk(flows, staying, Some(conntrack)) => walked?,
            () = connection => bail!("the netlink socket for conntrack has failed"),
        },
        Err(error) => {
            left.walk(flows, staying, None).await?;
            left.unknown = (left.connections > 0).then(|| (left.connections, error.to_string()));
        }
    }
    Ok(left)
}

impl Left {
    async fn walk(
        &mut self,
        flows: &mut BypassFlows,
        staying: &Staying,
        conntrack: Option<Conntrack>,
    ) -> Result<()> {
        let leaves =
            |flow: &BypassFlow| !staying.has([flow.client.ip(), flow.backend.ip()], flow.is_far);
        let times = [seconds(ESTABLISHED)?, seconds(CLOSE_WAIT)?];
        for _ in 0..WALKS {
            let found = flows.find(leaves)?;
            if found.is_empty() {
                break;
            }
            self.connections += found.len();
            for some in found.chunks(AT_ONCE) {
                if let Some(conntrack) = &conntrack {
                    self.adopt(conntrack, some, times).await;
                }
                some.iter().try_for_each(|flow| flows.leave(flow))?;
            }
        }
        Ok(())
    }

    /// Makes conntrack entries for open connections, including those that wait only for the
    /// client's ACK. Other connections need none: the rules see their next SYN, FIN or RST.
    async fn adopt(
        &mut self,
        conntrack: &Conntrack,
        flows: &[BypassFlow],
        [established, close_wait]: [u32; 2],
    ) {
        let open = flows.iter().filter_map(|flow| {
            let original = Tuple {
                src: flow.client,
                dst: flow.backend,
            };
            match flow.state {
                State::Answered | State::Established => Some((original, false, established)),
                State::HalfClosed => Some((original, true, close_wait)),
                State::New | State::Closed | State::Reset => None,
            }
        });
        let adopted = stream::iter(open)
            .map(|(original, closing, secs)| conntrack.adopt(original, closing, secs));
        let answers: Vec<_> = adopted.buffer_unordered(AT_ONCE).collect().await;
        for error in answers.into_iter().filter_map(Result::err) {
            let unknown = self.unknown.take().map_or(0, |(unknown, _)| unknown);
            self.unknown = Some((unknown + 1, error.to_string()));
        }
    }
}

fn seconds((key, default): (&str, u32)) -> Result<u32> {
    Ok(sysctl::read(key)?
        .and_then(|secs| secs.trim().parse().ok())
        .unwrap_or(default))
}
