//! Refusals of a client's own node, for clients that dial a node port of another node.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use testbed::agent::Service;
use testbed::echo::{Dial, Fault, Protocol};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_086;

/// The error comes from an address of the client's node, which over IPv4 takes no packet with that
/// source from its uplink.
#[test]
fn clients_hear_refusals_of_their_own_node() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve_all(PORT)?;
    let service = Service::new("guarded", 10, &["p2b"], PORT).node_port(NODE_PORT);
    base.put(&service)?;
    let [n1, n2] = base.lab.nodes();
    let kpx = base.kpx(&[])?;
    let dial = |client: &str, protocol, family| {
        let node_port = SocketAddr::new(n1.host.addrs.ip(family), NODE_PORT);
        Dial::new(protocol, node_port).exchange(&base.lab.host(client).ns, b"hello")
    };
    let all = || {
        ["n2", "p2a"].into_iter().flat_map(|client| {
            Protocol::COMMON
                .into_iter()
                .flat_map(move |protocol| Family::ALL.map(move |family| (client, protocol, family)))
        })
    };
    let are_served = || -> Result<()> {
        for (client, protocol, family) in all() {
            let answer = dial(client, protocol, family)?;
            ensure!(answer.backend == "p2b", "{client}: {answer:?}");
        }
        Ok(())
    };
    are_served()?;
    n2.host.ns.nft(&format!(
        "table inet guard {{ chain c {{ type filter hook forward priority filter
            meta l4proto {{ tcp, udp }} th dport {PORT} reject
        }}; }}"
    ))?;
    // Each packet gets an error, against the default limit of one a second.
    for limit in ["ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"] {
        n2.host.ns.sysctl(limit, "0")?;
    }
    for (client, protocol, family) in all() {
        let answer = dial(client, protocol, family);
        ensure!(
            matches!(answer, Err(Fault::Refused)),
            "{client} by {protocol} over {family}: {answer:?}"
        );
    }
    // The entry node itself has refused nothing.
    n2.host.ns.nft("delete table inet guard")?;
    are_served()?;
    kpx.stop()
}
