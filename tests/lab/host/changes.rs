//! Changes while kpx runs: backends, addresses, routes come and go.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::{DEADLINE, Object, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::{Dial, Fault, Protocol, Servers};
use testbed::lab::{Dual, EXTERNAL, Family, Host, Layout};

use crate::host::fixture::{
    Fixture, PORT, cut_off, default_route, is_as_before, route, state, unreachable,
};

#[test]
fn host_with_routes_through_nodes_follows_changes() -> Result<()> {
    let fixture = &Fixture::start(Layout::Routed)?;
    let agent = fixture.outside(&fixture.lab.xl, &["--pod-routes", "nodes"])?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        backends_come_and_go_and_move,
        the_hosts_address_changes,
    )?;
    running.agent.stop()
}

fn backends_come_and_go_and_move(running: &Running<Fixture>) -> Result<()> {
    let Running {
        fixture,
        agent: kpx,
    } = running;
    let c = &fixture.lab.xl;
    let web = Service::new("web", 10, &["p1b"], PORT);
    for backends in [
        vec!["p1b"],
        vec!["p1b", "p2a"],
        vec!["p2b"],
        vec!["p1c"],
        vec!["n1", "p2a"],
    ] {
        let at = || format!("{backends:?}");
        fixture.put(&web.backed_by(&backends))?;
        fixture
            .served_seeing(c, |family| web.frontend(family), &backends, Some(c.addrs))
            .with_context(at)?;
    }
    // A connection survives the removal of its backend from the Service.
    let dial = Dial::new(Protocol::Tcp, web.frontend(Family::V4));
    fixture.put(&web.backed_by(&["p1b"]))?;
    fixture.served(c, |family| web.frontend(family), &["p1b"])?;
    let mut connection = dial.connect(&c.ns)?;
    fixture.put(&web.backed_by(&["p2b"]))?;
    fixture.served(c, |family| web.frontend(family), &["p2b"])?;
    ensure!(connection.exchange(b"still there?")?.backend == "p1b");
    fixture.put(&web.backed_by(&[]))?;
    fixture.refused(c, |family| web.frontend(family))?;
    ensure!(
        cut_off(kpx, "default/web")?.is_none(),
        "a service without endpoints is none of ours"
    );
    fixture.delete(&web)
}

#[test]
fn routes_come_and_go() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    let [n1, n2] = fixture.lab.nodes();
    let web = Service::new("web", 10, &["p1b", "p2a"], PORT);
    fixture.put(&web)?;
    let kpx = fixture.outside(c, &[])?;
    fixture.refused(c, |family| web.frontend(family))?;
    route(c, "add", n1)?;
    fixture.served(c, |family| web.frontend(family), &["p1b"])?;
    route(c, "add", n2)?;
    fixture.served(c, |family| web.frontend(family), &["p1b", "p2a"])?;
    wait_until(DEADLINE, "all is well", || {
        Ok(unreachable(&kpx)?.is_empty() && kpx.status()?["healthy"] == true)
    })?;
    // An unreachable route does not count as a route to a pod, however specific it is.
    route(c, "del", n1)?;
    let forbid = |verb: &str| {
        c.ns.ip(&Family::ALL
            .map(|f| format!("route {verb} {}", n1.pod_net.cidr(f)))
            .join("\n"))
    };
    forbid("add unreachable")?;
    fixture.served(c, |family| web.frontend(family), &["p2a"])?;
    forbid("del unreachable")?;
    // The kernel removes a device's routes without an event when the device goes down.
    c.ns.ip("link set eth0 down\nlink set eth0 up")?;
    fixture.refused(c, |family| web.frontend(family))?;
    c.ns.ip(&format!(
        "addr replace {}/24 dev eth0\naddr replace {}/64 dev eth0 nodad",
        c.addrs.v4, c.addrs.v6
    ))?;
    [n1, n2]
        .into_iter()
        .try_for_each(|node| route(c, "replace", node))?;
    fixture.served(c, |family| web.frontend(family), &["p1b", "p2a"])?;
    [n1, n2]
        .into_iter()
        .try_for_each(|node| route(c, "del", node))?;
    kpx.stop()
}

fn the_hosts_address_changes(running: &Running<Fixture>) -> Result<()> {
    let fixture = running.fixture;
    let c = &fixture.lab.xl;
    let moved = Service::new("moved", 11, &["p1b", "p2a"], PORT);
    fixture.put(&moved)?;
    let served = |sees| {
        fixture.served_seeing(
            c,
            |family| moved.frontend(family),
            &["p1b", "p2a"],
            Some(sees),
        )
    };
    served(c.addrs)?;
    let old = c.addrs;
    let new = Dual {
        v4: "172.18.0.31".parse()?,
        v6: "fd00:172:18::31".parse()?,
    };
    for (gone, come) in [(old, new), (new, old)] {
        c.ns.ip(&format!(
            "addr del {}/24 dev eth0
             addr del {}/64 dev eth0
             addr add {}/24 dev eth0
             addr add {}/64 dev eth0 nodad",
            gone.v4, gone.v6, come.v4, come.v6
        ))?;
        served(come)?;
    }
    fixture.delete(&moved)
}

#[test]
fn host_follows_policies_external_addresses_and_its_own_backends() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    fixture
        .lab
        .nodes()
        .into_iter()
        .try_for_each(|node| route(c, "add", node))?;
    let internal = Service::new("internal", 10, &["p1b"], PORT).local();
    let foreign = EXTERNAL.host(7);
    let own = EXTERNAL.host(8);
    let shop = Service::new("shop", 11, &["p2a"], PORT).external_ips(foreign);
    let taken = Service::new("taken", 12, &["p1b"], PORT).external_ips(own);
    let here = Service::new("here", 13, &["xl"], PORT);
    [&internal, &shop, &taken, &here]
        .into_iter()
        .try_for_each(|service| fixture.put(service))?;
    c.add_addrs("eth0", own)?;
    c.ns.sysctl("ipv4/ip_forward", "1")?;
    c.ns.sysctl("ipv6/conf/all/forwarding", "1")?;
    let servers = Servers::start()?;
    for family in Family::ALL {
        servers.serve_at(c, "own", (own.ip(family), 80).into())?;
    }
    let before = state(c)?;
    let kpx = fixture.outside(c, &["--external-ip-cidrs", &external_cidrs()])?;
    // No endpoint is local to a host outside, even if its node name is the host's name.
    fixture.refused(c, |family| internal.frontend(family))?;
    // Without SCTP: its raw socket looks up a route without ports, and the rules need ports.
    let external = |family| (foreign.ip(family), 80).into();
    fixture.served_over(&Protocol::COMMON, c, external, &["p2a"], Some(c.addrs))?;
    fixture.served(c, |family| here.frontend(family), &["xl"])?;
    // Listeners at the host's own addresses stay reachable, from this host and from other machines.
    fixture.served(c, |family| (own.ip(family), 80).into(), &["own"])?;
    let own_from_n1 = |f: Family| format!("route add {} via {}", own.ip(f), c.addrs.ip(f));
    fixture
        .lab
        .n1
        .host
        .ns
        .ip(&Family::ALL.map(own_from_n1).join("\n"))?;
    fixture.served(
        &fixture.lab.n1.host,
        |family| (own.ip(family), 80).into(),
        &["own"],
    )?;
    // The host does not forward Services for other machines.
    nobody_else(&fixture.lab.n1.host, c, &shop)?;
    kpx.stop()?;
    is_as_before(c, &before)
}

/// A tenant of the cluster claims addresses of servers elsewhere, as an ExternalIP and as a load
/// balancer's address.
#[test]
fn host_leaves_external_addresses_to_the_network() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    let net = &fixture.lab.fabric;
    fixture
        .lab
        .nodes()
        .into_iter()
        .try_for_each(|node| route(c, "add", node))?;
    default_route(&fixture.lab, c, "add")?;
    let external = EXTERNAL.host(7);
    let vip = EXTERNAL.host(8);
    let servers = Servers::start()?;
    for addrs in [external, vip] {
        net.add_addrs("lo", addrs)?;
        Family::ALL
            .into_iter()
            .try_for_each(|family| servers.serve_at(net, "net", (addrs.ip(family), 80).into()))?;
    }
    let thief = Service::new("thief", 10, &["p1b"], PORT)
        .load_balancer(vip, "VIP")
        .external_ips(external);
    fixture.put(&thief)?;
    let at = |addrs: Dual| move |family| (addrs.ip(family), 80).into();

    let kpx = fixture.outside(c, &[])?;
    fixture.served(c, |family| thief.frontend(family), &["p1b"])?;
    for addrs in [external, vip] {
        fixture.served_over(&Protocol::COMMON, c, at(addrs), &["net"], None)?;
    }
    let notices = kpx.typed_status()?.notices.join("\n");
    ensure!(
        notices.starts_with("4 external addresses, of 1 Services, are left to the network"),
        "{notices}"
    );
    kpx.stop()?;

    let kpx = fixture.outside(c, &["--external-ip-cidrs", &external_cidrs()])?;
    for addrs in [external, vip] {
        fixture.served_over(&Protocol::COMMON, c, at(addrs), &["p1b"], None)?;
    }
    ensure!(
        kpx.typed_status()?.notices.is_empty(),
        "{:?}",
        kpx.typed_status()?.notices
    );
    kpx.stop()
}

fn external_cidrs() -> String {
    Family::ALL
        .map(|family| EXTERNAL.cidr(family).to_string())
        .join(",")
}

/// Checks that another machine's packets to a Service through this host stay unanswered.
fn nobody_else(client: &Host, through: &Host, service: &Service) -> Result<()> {
    for family in Family::ALL {
        let frontend = service.frontend(family);
        client.ns.ip(&format!(
            "route add {} via {}",
            frontend.ip(),
            through.addrs.ip(family)
        ))?;
        for protocol in Protocol::ALL {
            let answer =
                Dial::new(protocol, frontend).deadline(std::time::Duration::from_millis(300));
            let answer = answer.exchange(&client.ns, b"hello");
            ensure!(
                matches!(
                    answer,
                    Err(Fault::TimedOut(_) | Fault::Refused | Fault::Io(..))
                ),
                "{protocol}: {answer:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn host_with_routes_to_pods_needs_no_nodes() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    fixture
        .lab
        .nodes()
        .into_iter()
        .try_for_each(|node| route(c, "add", node))?;
    let web = Service::new("web", 10, &["p1b"], PORT);
    fixture.put(&web)?;
    for node in fixture.lab.nodes() {
        fixture.cluster.delete(&Object(
            json!({ "kind": "Node", "metadata": { "name": node.host.name } }),
        ))?;
    }
    let kpx = fixture.outside(c, &[])?;
    fixture.served_seeing(c, |family| web.frontend(family), &["p1b"], Some(c.addrs))?;
    kpx.stop()
}
