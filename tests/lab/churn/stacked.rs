//! Stacked devices: a packet passes the hooks of both, and is translated once.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use testbed::agent::wait_until;
use testbed::echo::{Dial, Protocol};

use crate::churn::fixture::{NODE_PORT, PROMPT, Running, TRY, is_hooked};

/// An address on the segment beside the fabric.
const ON_TOP: &str = "172.19.0.77";

/// Bonds and VLANs are equal to kpx: they pass on the packets that their lower devices received.
pub(super) fn a_macvlan_on_a_device_with_programs_serves_too(running: &Running) -> Result<()> {
    let Running {
        fixture,
        kpx,
        attach,
    } = running;
    let node = fixture.node();
    node.ip(&format!(
        "link add link eth1 name top type macvlan mode bridge\nlink set top up\naddr add {ON_TOP}/24 dev top"
    ))?;
    wait_until(PROMPT, "it has its programs", || {
        is_hooked(node, attach, "top")
    })?;
    let to: IpAddr = ON_TOP.parse()?;
    let dial = Dial::new(Protocol::Tcp, SocketAddr::new(to, NODE_PORT));
    // The kernel announces a device and its address separately.
    let is_served = || {
        Ok(dial
            .deadline(TRY)
            .exchange(&fixture.lab.xl.ns, b"hello")
            .is_ok())
    };
    wait_until(PROMPT, "its address is the node's", is_served)?;
    for payload in [100, 100_000] {
        let answer = dial.exchange(&fixture.lab.xl.ns, &vec![7; payload]);
        let answer =
            answer.with_context(|| format!("{payload} bytes through a macvlan, by {attach}"))?;
        ensure!(
            ["p1b", "p2a"].contains(&answer.backend.as_str()),
            "{answer:?}"
        );
    }
    fixture.all_served(&["p1a", "n1", "x"])?;
    node.ip("link del top")?;
    wait_until(PROMPT, "it is forgotten", || {
        Ok(!kpx.status()?["devices"].to_string().contains("\"top\""))
    })
}
