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

/// Keeps the ports free. Only logs a failure: the node is served without.
pub async fn keep(ports: &mut ForeignNatPorts) {
    let mut found = Vec::new();
    let listed = match timeout(DEADLINE, list(&mut found)).await {
        Ok(listed) => listed,
        Err(_elapsed) => Err(anyhow!("the list takes longer than {DEADLINE:?}")),
    };
    let left_out = found.len().saturating_sub(MAX_PORTS);
    found.truncate(MAX_PORTS);
    match listed.and_then(|()| write(ports, &found)) {
        Err(error) if is_denied(&error) => debug!(
            error = format!("{error:#}"),
            "the kernel does not list its connections"
        ),
        Err(error) => warn!(
            error = format!("{error:#}"),
            "new flows may use source ports of masqueraded connections"
        ),
        Ok(()) if left_out > 0 => warn!(
            kept = found.len(),
            left_out, "new flows may use source ports of masqueraded connections"
        ),
        Ok(()) if found.is_empty() => {}
        Ok(()) => info!(
            kept = found.len(),
            "source ports of masqueraded connections stay free"
        ),
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
