//! Describes the way of a packet that kpx passes on unchanged: the route, the neighbour, and the
//! rules that may drop the packet. A packet that another node has translated arrives so.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use nix::net::if_::if_indextoname;
use proxy_common::addr::Proto;
use proxy_net::netfilter::Netfilter;
use proxy_net::next_hop::{NextHop, next_hop};

use crate::answered::suspicious;
use crate::input::Notes;
use crate::programs::LO;
use crate::report::{Trace, Verdict};

/// Returns notes on the way from this node to the destination.
pub(crate) async fn notes(trace: &Trace) -> Notes {
    let mut notes = Notes::default();
    let ends = [&trace.packet.from, &trace.packet.to].map(|end| end.parse::<SocketAddr>());
    let (Verdict::Pass, [Ok(from), Ok(to)]) = (trace.outcome.verdict, ends) else {
        return notes;
    };
    let (from, to) = (from.ip(), to.ip());
    match next_hop(to).await {
        Ok(hop) => {
            let (way, is_fault) = way(to, &hop, &device(hop.device));
            if is_fault {
                notes.warn([way]);
            } else {
                notes.all.push(way);
            }
        }
        Err(error) => notes.warn([format!("the route to {to} cannot be read: {error:#}")]),
    }
    let protocols = [Proto::TCP, Proto::UDP, Proto::SCTP].into_iter();
    let mut protocol = protocols.filter(|proto| proto.to_string() == trace.packet.protocol);
    if let Some(proto) = protocol.next() {
        notes.all.push(rules(from, to, proto).await);
    }
    notes
}

/// Returns the way, and whether it has a fault.
fn way(to: IpAddr, hop: &NextHop, device: &str) -> (String, bool) {
    if hop.device == LO {
        return (format!("{to} is an address of this node"), false);
    }
    let gateway = hop.gateway.map(|gateway| format!(" via {gateway}"));
    let way = format!(
        "the route to {to} leads to device {device}{}",
        gateway.unwrap_or_default()
    );
    if hop.is_silent {
        let silent = hop.gateway.unwrap_or(to);
        return (
            format!("{way}, where {silent} does not answer (ARP or neighbour discovery failed)"),
            true,
        );
    }
    (way, false)
}

fn device(ifindex: u32) -> String {
    let name = if_indextoname(ifindex).map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|_| ifindex.to_string())
}

/// Returns the rules of netfilter that may drop the packet or its answers.
async fn rules(from: IpAddr, to: IpAddr, proto: Proto) -> String {
    let read = match Netfilter::read().await {
        Ok(read) => read,
        Err(error) => return format!("netfilter's rules cannot be read: {error:#}"),
    };
    let judged = read.judge_flows(&[from, to].map(IpNet::from), proto.0);
    let found = suspicious(&judged.against);
    if found.is_empty() {
        "netfilter drops such packets by none of its rules that kpx has judged".to_owned()
    } else {
        format!("may drop the packet: {}", found.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_neighbour_is_a_fault_of_the_way() {
        let to = "10.244.2.2".parse().unwrap();
        let hop = |gateway: Option<&str>, is_silent| NextHop {
            device: 7,
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
            is_silent,
            ..NextHop::default()
        };
        assert_eq!(
            way(to, &hop(None, false), "veth2"),
            (
                "the route to 10.244.2.2 leads to device veth2".to_owned(),
                false
            )
        );
        assert_eq!(
            way(to, &hop(Some("10.0.0.2"), true), "eth0"),
            (
                "the route to 10.244.2.2 leads to device eth0 via 10.0.0.2, where 10.0.0.2 does not answer (ARP or neighbour discovery failed)"
                    .to_owned(),
                true
            )
        );
    }
}
