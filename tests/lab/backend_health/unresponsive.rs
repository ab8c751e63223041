//! A node that is cut off: all of its backends are left out before each of them has failed.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::{DEADLINE, Object, Service, idle, wait_until};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

use super::Lab;

/// The ports at which two pods serve: each is a backend.
const PORTS: std::ops::Range<u16> = 9_000..9_030;
const CUT: &str = "table inet cut { chain c { type filter hook input priority 0; tcp dport 9000-9029 drop; }; }";
/// Connections of each family that begin together, and how often.
const TOGETHER: usize = 8;
const TIMES: usize = 15;

#[test]
fn backends_of_cut_off_node_leave_before_each_has_failed() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?;
    for host in ["p2a", "p2b"] {
        PORTS.into_iter().try_for_each(|port| base.servers.serve(base.lab.host(host), port))?;
    }
    let web = Service::new("web", 10, &[], PORTS.start);
    base.cluster.put(&web.service())?;
    Family::ALL.map(|family| slices(&base, family)).into_iter().flatten().try_for_each(|it| base.cluster.put(&it))?;
    let agent = base.kpx(&["--backend-health=on"])?;
    let lab = Lab { base: &base, agent: &agent };
    for _ in 0..4 {
        lab.dial(&web, usize::from(PORTS.end - PORTS.start) * 2, Duration::from_secs(3))?;
    }

    base.lab.host("p2a").ns.nft(CUT)?;
    // Each of the node's backends would need three failures of its own: twice as many connections, if none met the same one.
    const { assert!(TIMES * TOGETHER < 3 * 2 * (PORTS.end - PORTS.start) as usize) };
    let aside = |count: usize| -> Result<bool> {
        let aside = lab.aside(&web)?;
        Ok(aside.len() == count
            && aside.iter().all(|at| at.contains(&base.lab.host("p2a").addrs.v4.to_string()) || at.contains("2::")))
    };
    thread::scope(|scope| -> Result<()> {
        for _ in 0..TIMES {
            scope.spawn(|| lab.dial(&web, TOGETHER, Duration::from_secs(3)));
            idle(Duration::from_millis(100))?;
        }
        Ok(())
    })?;
    let of_node = usize::from(PORTS.end - PORTS.start) * 2;
    wait_until(DEADLINE, "the node's backends are set aside", || aside(of_node))
        .with_context(|| format!("{:?}", agent.typed_status().map(|status| status.silent_backends)))?;
    let times = lab.dial(&web, 24, Duration::from_secs(3))?;
    ensure!(times.iter().all(|time| *time < Duration::from_millis(900)), "none goes there: {times:?}");

    // Each one comes back by its own trial.
    base.lab.host("p2a").ns.nft("delete table inet cut")?;
    wait_until(DEADLINE, "all serve again", || {
        lab.dial(&web, 60, Duration::from_secs(3))?;
        aside(0)
    })?;
    agent.stop()
}

/// Returns a slice for each port. The pods are on two nodes, of which the second one is none of the lab's.
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
