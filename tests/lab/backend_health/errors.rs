//! ICMP errors in place of a backend's answer: they count where the backend's own packets would come from, and from no one else.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;
use testbed::stranger::{self, Stranger};

use super::{CLIENTS, CUT, HEAL, Lab, PORT};

/// A firewall that refuses packets for the backends' port by an ICMP error, as most do that refuse.
const PROHIBIT: &str =
    "table inet cut { chain c { type filter hook input priority 0; tcp dport 8080 reject with icmpx admin-prohibited; }; }";

#[test]
fn connections_leave_backends_that_are_unreachable() -> Result<()> {
    for layout in Layout::ALL {
        let base = ServedLab::with_manifests(layout)?.serve(&["p1b", "p2a", "p2b"], PORT)?;
        let web = Service::new("web", 10, &["p1b", "p2a", "p2b"], PORT);
        base.put(&web)?;
        let agent = base.kpx(&["--backend-health=on"])?;
        let lab = Lab { base: &base, agent: &agent };
        lab.dial(&web, 6, Duration::from_secs(3)).with_context(|| format!("{layout:?}"))?;

        // One on the clients' node, and one on the other.
        for refusing in ["p1b", "p2a"] {
            base.lab.host(refusing).ns.nft(PROHIBIT)?;
            wait_until(DEADLINE, "the refusing backend is left out", || {
                let _some_fail = lab.dial(&web, 6, Duration::from_secs(3));
                let mut aside = lab.aside(&web)?;
                aside.sort_unstable();
                Ok(aside == lab.addresses(refusing))
            })
            .with_context(|| format!("{layout:?}: {refusing}"))?;
            // None of them waits: no SYN has come again.
            let times = lab.dial(&web, 12, Duration::from_millis(900));
            ensure!(times.is_ok(), "{layout:?}: {refusing}: {times:?}");
            base.lab.host(refusing).ns.nft(HEAL)?;
            lab.comes_back(&web)?;
        }
        agent.stop()?;
    }
    Ok(())
}

/// Another pod of the node, and one of another node, know the ends of a connection that waits. They say that its backend is unreachable.
/// Pods on a bridge or a macvlan share a device, so a neighbour there can also send a RST in the backend's name.
#[test]
fn no_other_pod_speaks_against_backend_by_errors() -> Result<()> {
    for layout in Layout::ALL {
        let base = ServedLab::with_manifests(layout)?.serve(&["p1b"], PORT)?;
        let web = Service::new("web", 10, &["p1b"], PORT);
        base.put(&web)?;
        let agent = base.kpx(&["--backend-health=on"])?;
        let [client, backend] = [CLIENTS[0], "p1b"].map(|name| base.lab.host(name));
        backend.ns.nft(CUT)?;
        for family in Family::ALL {
            let [from, to] = [client, backend].map(|host| SocketAddr::new(host.addrs.ip(family), PORT));
            // No socket sends this SYN again, and none hears of the errors.
            Stranger::on(client)?.send(stranger::tcp(from, web.frontend(family)).syn(), web.frontend(family).ip())?;
            let shares_device = matches!(layout, Layout::Bridge | Layout::Vxlan | Layout::Macvlan);
            for (teller, counts) in [(CLIENTS[1], u64::from(shares_device)), ("p2a", 0), ("p1b", 1)] {
                let teller = base.lab.host(teller);
                let what = format!("{} in {layout:?} by {family}", teller.name);
                let before = [counted(&agent, "returned")?, counted(&agent, "backend_failed")?];
                Stranger::on(teller)?.send_unreachable(teller.addrs.ip(family), from, to)?;
                wait_until(DEADLINE, "the error goes to the client", || Ok(counted(&agent, "returned")? > before[0]))
                    .with_context(|| what.clone())?;
                let now = counted(&agent, "backend_failed")?;
                ensure!(now == before[1] + counts, "{what}: {now} failures, {} before", before[1]);
            }
        }
        agent.stop()?;
    }
    Ok(())
}

/// Returns how often the programs have counted an event.
fn counted(agent: &Agent, event: &str) -> Result<u64> {
    agent.typed_status()?.events.get(event).copied().context("no such event")
}
