//! Other layouts of nodes and pods: which of their connections skip the stack.

use anyhow::{Context, Result, ensure};
use testbed::echo::Protocol;
use testbed::lab::{Family, Layout, TunnelKind};

use super::fixture::{Fixture, Path};
use super::{EXCHANGES, exchange, says, until_bypass};

/// Packets through a bridge meet netfilter there, and a macvlan has no peer device.
#[test]
fn the_stack_sees_pods_that_are_not_behind_a_plain_veth() -> Result<()> {
    for layout in [Layout::Bridge, Layout::Vxlan, Layout::Macvlan] {
        takes_stack(layout, Path::Local)?;
    }
    Ok(())
}

/// The tunnel's packets have no Ethernet header.
#[test]
fn the_stack_sees_connections_into_a_tunnel() -> Result<()> {
    takes_stack(Layout::Tunnel(TunnelKind::Tun), Path::Remote)
}

/// Checks that this connection takes the stack, although the agent permits bypass.
fn takes_stack(layout: Layout, path: Path) -> Result<()> {
    let fixture = Fixture::of(layout)?;
    let agent = fixture.start("auto")?;
    says(&agent, "; bypass for connections").with_context(|| format!("{layout:?}"))?;
    let before = fixture.fast(&agent)?;
    for family in Family::ALL {
        for protocol in Protocol::COMMON {
            // The first connection makes the link addresses known.
            for _ in 0..2 {
                let connection = fixture.dial(path, protocol, family);
                let what = || format!("{layout:?}, {protocol} over {family}");
                exchange(&mut connection.with_context(what)?, EXCHANGES, 1_000)
                    .with_context(what)?;
            }
        }
    }
    let fast = fixture.fast(&agent)? - before;
    ensure!(
        fast == 0,
        "{layout:?}: {fast} packets have skipped the stack"
    );
    agent.stop()
}

/// Without netfilter rules conntrack tracks no connection, and so misses none.
#[test]
fn open_connections_skip_the_stack_of_a_node_without_conntrack() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.lab.n1.host.ns.nft("flush ruleset")?;
    let agent = fixture.start("auto")?;
    says(&agent, "bypass for connections of this node's pods to pods")?;
    ensure!(
        !agent.status()?["options"]["fastPath"]
            .to_string()
            .contains("conntrack"),
        "conntrack follows connections"
    );
    for family in Family::ALL {
        until_bypass(&fixture, &agent, family)?;
        for path in [
            Path::Remote,
            Path::Hairpin,
            Path::NodePortLocal,
            Path::NodePortRemote,
        ] {
            let mut connection = fixture.dial(path, Protocol::Tcp, family)?;
            exchange(&mut connection, 3, 100)?;
            let before = fixture.fast(&agent)?;
            exchange(&mut connection, EXCHANGES, 1_000)?;
            let fast = fixture.fast(&agent)? - before;
            ensure!(
                fast >= EXCHANGES as u64,
                "{family}, {path:?}: {fast} packets have skipped the stack"
            );
        }
    }
    agent.stop()
}
