//! A node that is cut off: all of its backends are ejected before each of them has failed.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::{DEADLINE, Object, Service, idle, wait_until};
use testbed::lab::{Family, Layout, TunnelKind};
use testbed::served_lab::ServedLab;

use super::{HEAL, Lab};

/// The ports of two pods: each port is a backend.
const PORTS: std::ops::Range<u16> = 9_000..9_030;
const CUT: &str =
    "table inet cut { chain c { type filter hook input priority 0; tcp dport 9000-9029 drop; }; }";
/// The same on the client's node, for forwarded packets.
const PAUSE: &str = "table inet cut { chain c { type filter hook forward priority 0; tcp dport 9000-9029 drop; }; }";
/// The number of simultaneous connections of each family, and of such batches.
const TOGETHER: usize = 8;
const TIMES: usize = 15;

#[test]
fn backends_of_cut_off_node_leave_before_each_has_failed() -> Result<()> {
    for layout in [
        Layout::Routed,
        Layout::Vxlan,
        Layout::Tunnel(TunnelKind::Tun),
    ] {
        backends_leave_together(layout).with_context(|| format!("{layout:?}"))?;
    }
    Ok(())
}

fn backends_leave_together(layout: Layout) -> Result<()> {
    let base = ServedLab::with_manifests(layout)?;
    let web = serve(&base)?;
    let agent = base.kpx(&["--backend-health=on"])?;
    let lab = Lab {
        base: &base,
        agent: &agent,
    };
    lab.dial_each(&web)?;
    let node = base.lab.host("p2a");
    node.ns.nft(CUT)?;
    // Each backend alone would need three failures of its own: three for every two connections.
    const { assert!(TIMES * TOGETHER < 3 * 2 * (PORTS.end - PORTS.start) as usize) };
    let mut of_node: Vec<_> = Family::ALL
        .into_iter()
        .flat_map(|family| {
            PORTS.map(move |port| SocketAddr::new(node.addrs.ip(family), port).to_string())
        })
        .collect();
    of_node.sort_unstable();
    thread::scope(|scope| -> Result<()> {
        for _ in 0..TIMES {
            scope.spawn(|| lab.dial(&web, TOGETHER, Duration::from_secs(3)));
            idle(Duration::from_millis(100))?;
        }
        wait_until(DEADLINE, "the node's backends are ejected", || {
            let mut ejected = lab.ejected(&web)?;
            ejected.sort_unstable();
            Ok(ejected == of_node)
        })
        .with_context(|| {
            format!(
                "{:?}",
                agent.typed_status().map(|status| status.silent_backends)
            )
        })
    })?;

    node.ns.nft(HEAL)?;
    wait_until(DEADLINE, "a trial is answered", || {
        lab.dial(&web, 60, Duration::from_secs(3))?;
        if !lab.has_few_silent()? {
            return Ok(false);
        }
        // An unanswered probation is over by then.
        idle(Duration::from_secs(1))?;
        lab.has_few_silent()
    })?;
    agent.stop()
}

/// All nodes fail at once, so the fault is this node's. It ends before clients repeat their SYN.
#[test]
fn pause_of_own_network_silences_no_node() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?;
    let web = serve(&base)?;
    let agent = base.kpx(&["--backend-health=on"])?;
    let lab = Lab {
        base: &base,
        agent: &agent,
    };
    lab.dial_each(&web)?;
    let uplink = &base.lab.n1.host.ns;
    thread::scope(|scope| -> Result<()> {
        for nth in 0..TIMES {
            match nth {
                2 => uplink.nft(PAUSE)?,
                9 => uplink.nft(HEAL)?,
                _ => {}
            }
            scope.spawn(|| lab.dial(&web, TOGETHER, Duration::from_secs(3)));
            idle(Duration::from_millis(100))?;
            ensure!(
                lab.has_few_silent()?,
                "{nth}: {:?}",
                agent.typed_status()?.silent_backends
            );
        }
        Ok(())
    })?;
    agent.stop()
}

/// Serves a Service with many backends on each of two nodes.
fn serve(base: &ServedLab) -> Result<Service> {
    for host in ["p2a", "p2b"] {
        PORTS
            .into_iter()
            .try_for_each(|port| base.servers.serve(base.lab.host(host), port))?;
    }
    let web = Service::new("web", 10, &[], PORTS.start);
    base.cluster.put(&web.service())?;
    Family::ALL
        .map(|family| slices(base, family))
        .into_iter()
        .flatten()
        .try_for_each(|it| base.cluster.put(&it))?;
    Ok(web)
}

impl Lab<'_> {
    /// Returns true if no node is silent as a whole. Single backends may have their own failures.
    fn has_few_silent(&self) -> Result<bool> {
        Ok(self.agent.typed_status()?.silent_backends.len() < PORTS.len() / 2)
    }

    /// Dials until each backend has almost certainly answered.
    fn dial_each(&self, web: &Service) -> Result<()> {
        (0..4).try_for_each(|_| {
            self.dial(web, PORTS.len() * 2, Duration::from_secs(3))
                .map(drop)
        })
    }
}

/// Returns a slice for each port. The pods are on two nodes; the second node is outside of the lab.
fn slices(base: &ServedLab, family: Family) -> Vec<Object> {
    let endpoint = |host: &str, node: &str| json!({ "addresses": [base.lab.host(host).addrs.ip(family)], "conditions": { "ready": true }, "nodeName": node });
    let slice = |port: u16| {
        let name = format!("web-{port}-{}", family.to_string().to_lowercase());
        Object(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "name": name, "namespace": "default", "labels": { "kubernetes.io/service-name": "web" } },
            "addressType": family.to_string(), "endpoints": [endpoint("p2a", "n2"), endpoint("p2b", "n3")],
            "ports": [{ "name": "tcp", "protocol": "TCP", "port": port }],
        }))
    };
    PORTS.map(slice).collect()
}
