//! Connections that netfilter masquerades with fully random ports, and connections that kpx
//! masquerades, at the same time. Both draw ports of the node's address towards the same server.

use std::net::SocketAddr;
use std::thread;

use anyhow::{Context, Result};

use super::Scale;
use super::fixture::{DEADLINE, Fixture, WEB_PORT};
use super::report::Report;
use crate::load::{Dialer, Plan};
use testbed::agent::Service;
use testbed::lab::Family;

/// The node port that the outside client dials.
const NODE_PORT: u16 = 30_081;
/// The pod that dials directly. The server of both clients follows.
const POD: &str = "p1a";
const SERVER: &str = "p2a";

/// Opens connections of each kind at the scale's rate.
pub fn ports(scale: Scale) -> Result<Report> {
    let fixture = Fixture::build(scale.place)?;
    let service = Service::new("ports", 24, &[SERVER], WEB_PORT).node_port(NODE_PORT);
    service
        .objects(&fixture.lab)
        .iter()
        .try_for_each(|object| fixture.cluster.put(object))?;
    let node = &fixture.lab.n1.host;
    // kube-proxy, flannel and Calico masquerade outgoing packets in this way.
    let pod = fixture.lab.host(POD).addrs;
    node.ns.nft(&format!(
        "table inet masquerading {{ chain post {{ type nat hook postrouting priority 90;
           ip saddr {} masquerade fully-random;
           ip6 saddr {} masquerade fully-random;
         }}
         }}",
        pod.ip(Family::V4),
        pod.ip(Family::V6),
    ))?;
    let kpx = fixture.kpx(&[])?;
    let outside = fixture.lab.host("x");
    outside
        .ns
        .sysctl("ipv4/ip_local_port_range", "1024 65535")?;
    let dial = |ns, targets: [SocketAddr; 2]| {
        let allowed = Box::new(|exchange: &crate::load::Exchange| exchange.backend == SERVER);
        Dialer::start(
            ns,
            Plan {
                targets: targets.to_vec(),
                rate: scale.rate,
                deadline: DEADLINE,
                allowed,
            },
        )
    };
    let of = |port| {
        move |addrs: testbed::lab::Dual| {
            Family::ALL.map(|family| SocketAddr::new(addrs.ip(family), port))
        }
    };
    let masqueraded = dial(&outside.ns, of(NODE_PORT)(node.addrs))?;
    let direct = dial(
        &fixture.lab.host(POD).ns,
        of(WEB_PORT)(fixture.lab.host(SERVER).addrs),
    )?;
    thread::sleep(scale.at_least);
    let seen = [
        ("direct", direct.finish()?),
        ("by node port", masqueraded.finish()?),
    ];
    kpx.stop().context("stop kpx")?;
    let what = format!(
        "{} connections a second of each kind share a server and the node's address",
        scale.rate
    );
    Ok(Report::of("ports", what, &seen))
}
