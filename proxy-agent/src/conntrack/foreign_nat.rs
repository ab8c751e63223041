//! Finds the source ports of connections that netfilter masqueraded before kpx ran, for example by
//! kube-proxy's rules. Of TCP connections from the lower range of ports the programs see only the
//! start and the end, and would draw the port of an older connection again towards the same peer.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use netlink_packet_netfilter::NetfilterProtoFamily;
use proxy_common::flow::{CLIENT_PORT_FIRST, CLIENT_PORT_LAST, SOURCE_PORT_FIRST};
use proxy_datapath::ForeignNatPorts;
use proxy_net::conntrack::{self, Masqueraded};
use proxy_net::sysctl;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::{COUNT, is_denied};

/// The time limit for the list. The start waits for it.
const DEADLINE: Duration = Duration::from_secs(3);
/// Half of the programs' table: more rows would evict those of the programs.
const MAX_PORTS: usize = 16_384;

const IN_USE: &str = "new flows may use source ports of masqueraded connections";

/// Keeps the ports free. Only logs a failure: the node is served without.
pub async fn keep(ports: &mut ForeignNatPorts) {
    let mut found = Vec::new();
    let listed = match timeout(DEADLINE, list(&mut found)).await {
        Ok(listed) => listed,
        Err(_elapsed) => Err(anyhow!("the list takes longer than {DEADLINE:?}")),
    };
    let left_out = found.len().saturating_sub(MAX_PORTS);
    found.truncate(MAX_PORTS);
    // A list in part is better than none.
    let written = write(ports, &found);
    match listed.and(written) {
        Ok(()) => log(found.len(), left_out),
        Err(error) => log_failure(&error),
    }
}

fn log(kept: usize, left_out: usize) {
    if left_out > 0 {
        warn!(kept, left_out, "{IN_USE}");
    } else if kept > 0 {
        info!(kept, "source ports of masqueraded connections stay free");
    }
}

fn log_failure(error: &anyhow::Error) {
    let text = format!("{error:#}");
    if is_denied(error) {
        debug!(error = text, "the kernel does not list its connections");
    } else {
        warn!(error = text, "{IN_USE}");
    }
}

async fn list(found: &mut Vec<Masqueraded>) -> Result<()> {
    if sysctl::read(COUNT)?.is_none_or(|count| count == "0") {
        return Ok(());
    }
    let (connection, handle) = conntrack::connect().context("open a netlink socket")?;
    let list = async {
        for family in [NetfilterProtoFamily::IPv4, NetfilterProtoFamily::IPv6] {
            handle
                .masqueraded(family, |entry| {
                    found.extend(is_drawn(entry.source.port()).then_some(entry));
                })
                .await
                .context("list connections")?;
        }
        Ok(())
    };
    tokio::select! {
        listed = list => listed,
        () = connection => Err(anyhow!("the netlink socket has failed")),
    }
}

/// Returns true for the ports that the programs draw.
fn is_drawn(port: u16) -> bool {
    (CLIENT_PORT_FIRST..=CLIENT_PORT_LAST).contains(&port) || port >= SOURCE_PORT_FIRST
}

fn write(ports: &mut ForeignNatPorts, found: &[Masqueraded]) -> Result<()> {
    for Masqueraded {
        protocol,
        peer,
        source,
        is_closing,
    } in found
    {
        ports.keep(*protocol, *source, *peer, *is_closing)?;
    }
    Ok(())
}
