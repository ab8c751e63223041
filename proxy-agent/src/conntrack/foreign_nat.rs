//! Finds the source ports of connections that netfilter masqueraded before kpx ran, for example by
//! kube-proxy's rules. The programs see such a connection's port only at its start and at its end,
//! and would draw the same port for a masqueraded client towards the same peer.

use anyhow::{Context, Result, anyhow};
use netlink_packet_netfilter::NetfilterProtoFamily;
use proxy_common::flow::may_be_drawn;
use proxy_datapath::ForeignNatPorts;
use proxy_net::conntrack::{self, Masqueraded};
use proxy_net::sysctl;
use tracing::{debug, info, warn};

use super::{COUNT, is_denied};

/// Keeps the ports free. Only logs a failure: the node is served without.
pub async fn keep(ports: &mut ForeignNatPorts) {
    match find_and_keep(ports).await {
        Ok(0) => {}
        Ok(kept) => info!(kept, "source ports of masqueraded connections stay free"),
        Err(error) if is_denied(&error) => debug!(
            error = format!("{error:#}"),
            "the kernel does not list its connections"
        ),
        Err(error) => warn!(
            error = format!("{error:#}"),
            "new flows may use source ports of masqueraded connections"
        ),
    }
}

async fn find_and_keep(ports: &mut ForeignNatPorts) -> Result<usize> {
    if sysctl::read(COUNT)?.is_none_or(|count| count == "0") {
        return Ok(0);
    }
    let mut found = Vec::new();
    let (connection, handle) = conntrack::connect().context("open a netlink socket")?;
    let list = async {
        for family in [NetfilterProtoFamily::IPv4, NetfilterProtoFamily::IPv6] {
            handle
                .masqueraded(family, |entry| {
                    found.extend(may_be_drawn(entry.source.port()).then_some(entry));
                })
                .await
                .context("list connections")?;
        }
        Ok(())
    };
    tokio::select! {
        listed = list => listed,
        () = connection => Err(anyhow!("the netlink socket has failed")),
    }?;
    for Masqueraded {
        protocol,
        peer,
        source,
        timeout_secs,
    } in &found
    {
        ports.keep(*protocol, *source, *peer, *timeout_secs)?;
    }
    Ok(found.len())
}
