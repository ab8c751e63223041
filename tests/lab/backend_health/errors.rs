//! ICMP errors in place of a backend's answer. They count only on the device from which the
//! backend's own packets would come.

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use proxy_view::FlowView;
use testbed::agent::{Agent, DEADLINE, Service, kpx, wait_until};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;
use testbed::stranger::{self, Stranger};

use super::{CLIENTS, CUT, HEAL, Lab, PORT, web};

/// A firewall that refuses packets for the backends' port by an ICMP error, as most refusing
/// firewalls do.
const PROHIBIT: &str = "table inet cut { chain c { type filter hook input priority 0; tcp dport 8080 reject with icmpx admin-prohibited; }; }";

/// One backend is on the clients' node, and one on the other node.
pub(super) fn connections_leave_backends_that_are_unreachable(lab: &Lab) -> Result<()> {
    /// In milliseconds between two errors: the kernel's default.
    const RATE_LIMIT: &str = "1000";
    let web = web();
    lab.dial(&web, 6, Duration::from_secs(3))?;
    for refusing in ["p1b", "p2a"] {
        let refused = &lab.base.lab.host(refusing).ns;
        refused.nft(PROHIBIT)?;
        // Each SYN gets an error, against the default limit of one a second.
        let limit_errors = |limit: &str| {
            ["ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"]
                .into_iter()
                .try_for_each(|key| refused.sysctl(key, limit))
        };
        limit_errors("0")?;
        wait_until(DEADLINE, "the refusing backend is left out", || {
            let _some_fail = lab.dial(&web, 6, Duration::from_secs(3));
            let mut ejected = lab.ejected(&web)?;
            ejected.sort_unstable();
            Ok(ejected == lab.addresses(refusing))
        })
        .context(refusing)?;
        lab.dial(&web, 12, Duration::from_millis(900))
            .with_context(|| format!("none goes to {refusing}"))?;
        refused.nft(HEAL)?;
        limit_errors(RATE_LIMIT)?;
        lab.comes_back(&web)?;
    }
    Ok(())
}

/// Other pods have the addresses and ports of a waiting connection, and send errors about its
/// backend from their own addresses. Pods on a bridge or a macvlan share a device, and pods of
/// another node an uplink: there a pod could also spoof the backend's RST.
#[test]
fn no_pod_elsewhere_speaks_against_backend_by_errors() -> Result<()> {
    for layout in Layout::ALL {
        let base = ServedLab::with_manifests(layout)?.serve(&["p1b", "p2a"], PORT)?;
        let near = Service::new("near", 10, &["p1b"], PORT);
        let far = Service::new("far", 11, &["p2a"], PORT);
        [&near, &far]
            .into_iter()
            .try_for_each(|service| base.put(service))?;
        // Without rp_filter, only the programs validate sources.
        base.lab.set_rp_filter(0)?;
        let agent = base.kpx(&["--backend-health=on"])?;
        let lab = Lab {
            base: &base,
            agent: &agent,
        };
        let is_shared = matches!(layout, Layout::Bridge | Layout::Vxlan | Layout::Macvlan);
        for family in Family::ALL {
            let tellers = [(CLIENTS[1], u64::from(is_shared)), ("p2a", 0), ("p1b", 1)];
            lab.hears((CLIENTS[0], &near, "p1b"), family, &tellers)
                .with_context(|| format!("{layout:?}"))?;
            let tellers = [(CLIENTS[1], 0), ("p1b", 0), ("p2b", 1), ("p2a", 1)];
            lab.hears((CLIENTS[0], &far, "p2a"), family, &tellers)
                .with_context(|| format!("{layout:?}"))?;
        }
        agent.stop()?;
    }
    Ok(())
}

/// A machine outside does not forward on its uplink.
#[test]
fn errors_count_on_device_that_does_not_forward() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve(&["p2a"], PORT)?;
    let far = Service::new("far", 11, &["p2a"], PORT);
    base.put(&far)?;
    for family in ["ipv4", "ipv6"] {
        base.lab
            .n1
            .host
            .ns
            .sysctl(&format!("{family}/conf/eth0/forwarding"), "0")?;
    }
    let agent = base.kpx(&["--backend-health=on"])?;
    let lab = Lab {
        base: &base,
        agent: &agent,
    };
    for family in Family::ALL {
        lab.hears(("n1", &far, "p2a"), family, &[("p2b", 1), ("p2a", 1)])?;
    }
    agent.stop()
}

impl Lab<'_> {
    /// Leaves a client's SYN unanswered, and sends errors about its backend from hosts. Checks how
    /// often each host's error counts.
    fn hears(
        &self,
        (client, service, backend): (&str, &Service, &str),
        family: Family,
        tellers: &[(&str, u64)],
    ) -> Result<()> {
        let Self { base, agent } = self;
        let [client, backend] = [client, backend].map(|name| base.lab.host(name));
        backend.ns.nft(CUT)?;
        let [from, to] = [client, backend].map(|host| SocketAddr::new(host.addrs.ip(family), PORT));
        // No socket repeats this SYN or receives the errors.
        let frontend = service.frontend(family);
        Stranger::on(client)?.send(stranger::tcp(from, frontend).syn(), frontend.ip())?;
        let from = self.source(from, to)?;
        for (teller, counts) in tellers {
            let teller = base.lab.host(teller);
            let what = format!("{} of {} by {family}", teller.name, service.name);
            let before = [
                counted(agent, "returned")?,
                counted(agent, "backend_failed")?,
            ];
            Stranger::on(teller)?.send_unreachable(teller.addrs.ip(family), from, to)?;
            wait_until(DEADLINE, "the error goes to the client", || {
                Ok(counted(agent, "returned")? > before[0])
            })
            .with_context(|| what.clone())?;
            let now = counted(agent, "backend_failed")?;
            ensure!(
                now == before[1] + counts,
                "{what}: {now} failures, {} before",
                before[1]
            );
        }
        backend.ns.nft(HEAL)
    }

    /// Returns the client as the backend sees it: the node's own connections get another port.
    fn source(&self, client: SocketAddr, backend: SocketAddr) -> Result<SocketAddr> {
        let run_dir = self.agent.run_dir().display();
        let command = format!(
            "flows --backend {} -o json --run-dir {run_dir}",
            backend.ip()
        );
        let source = Cell::new(None);
        wait_until(DEADLINE, "the SYN has a flow", || {
            let listed = kpx(self.agent.ns(), &command)?;
            let flows: Vec<FlowView> =
                serde_json::from_slice(&listed.stdout).with_context(|| format!("{listed:?}"))?;
            let flow = flows
                .iter()
                .find(|flow| flow.client == client && flow.backend == backend);
            source.set(flow.map(|flow| flow.source));
            Ok(flow.is_some())
        })?;
        source.get().context("a flow")
    }
}

/// Returns the programs' count of an event.
fn counted(agent: &Agent, event: &str) -> Result<u64> {
    agent
        .typed_status()?
        .events
        .get(event)
        .copied()
        .context("no such event")
}
