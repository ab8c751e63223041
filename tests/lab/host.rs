//! Hosts that are not nodes reach the cluster's Services (`kpx run --mode host`).

mod changes;
mod fixture;
mod names;
mod resolved;
mod rights;
mod tunnel;
mod unit;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::echo::Protocol;
use testbed::lab::{Dual, Family, Layout};

use crate::host::fixture::{
    Fixture, PORT, cut_off, default_route, is_as_before, pod_routes, route, routes_of, state,
    unreachable,
};

const NODE_PORT: u16 = 30080;

#[test]
fn host_reaches_backends_through_its_own_routes() -> Result<()> {
    for layout in Layout::ALL {
        let fixture = Fixture::start(layout)?;
        let c = &fixture.lab.xl;
        fixture
            .lab
            .nodes()
            .into_iter()
            .try_for_each(|node| route(c, "add", node))?;
        let web = Service::new("web", 10, &["p1b", "p2a"], PORT);
        fixture.put(&web)?;
        let before = state(c)?;
        let kpx = fixture.outside(c, &[])?;
        fixture.served_seeing(
            c,
            |family| web.frontend(family),
            &["p1b", "p2a"],
            Some(c.addrs),
        )?;
        ensure!(
            unreachable(&kpx)?.is_empty() && kpx.status()?["healthy"] == true,
            "{}",
            kpx.status()?
        );
        ensure!(pod_routes(c)?.is_empty());
        kpx.stop()?;
        is_as_before(c, &before).with_context(|| format!("{layout:?}"))?;
    }
    Ok(())
}

#[test]
fn host_reaches_backends_under_every_rp_filter() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    fixture
        .lab
        .nodes()
        .into_iter()
        .try_for_each(|node| route(c, "add", node))?;
    let web = Service::new("web", 10, &["p1b", "p2a"], PORT);
    fixture.put(&web)?;
    for rp_filter in 0..=2 {
        for device in ["all", "default", "lo", "eth0", "eth1"] {
            c.ns.sysctl(
                &format!("ipv4/conf/{device}/rp_filter"),
                &rp_filter.to_string(),
            )?;
        }
        let kpx = fixture.outside(c, &[])?;
        for default in ["without", "with"] {
            let at = || format!("rp_filter {rp_filter}, {default} a default route");
            if default == "with" {
                default_route(&fixture.lab, c, "add")?;
            }
            fixture
                .served_seeing(
                    c,
                    |family| web.frontend(family),
                    &["p1b", "p2a"],
                    Some(c.addrs),
                )
                .with_context(at)?;
        }
        kpx.stop()?;
        default_route(&fixture.lab, c, "del")?;
    }
    Ok(())
}

#[test]
fn host_reaches_backends_through_routes_by_nodes() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    let [n1, n2] = fixture.lab.nodes();
    let web = Service::new("web", 10, &["p1b", "p2a"], PORT);
    fixture.put(&web)?;
    let before = state(c)?;
    let kpx = fixture.outside(c, &["--pod-routes", "nodes"])?;
    fixture.served_seeing(
        c,
        |family| web.frontend(family),
        &["p1b", "p2a"],
        Some(c.addrs),
    )?;
    ensure!(
        pod_routes(c)? == routes_of(&[n1, n2]),
        "{:?}",
        pod_routes(c)?
    );
    ensure!(kpx.status()?["healthy"] == true, "{}", kpx.status()?);

    // The node and its backend are deleted and come back.
    let node = testbed::agent::node(n2);
    fixture.cluster.delete(&node)?;
    wait_until(DEADLINE, "the route goes", || {
        Ok(pod_routes(c)? == routes_of(&[n1]))
    })?;
    fixture.served(c, |family| web.frontend(family), &["p1b"])?;
    let why = "no route, and the Service has no node port";
    ensure!(
        unreachable(&kpx)? == [("default/web".to_owned(), why.to_owned())].into(),
        "{:?}",
        unreachable(&kpx)?
    );
    fixture.cluster.put(&node)?;
    fixture.served(c, |family| web.frontend(family), &["p1b", "p2a"])?;

    // A foreign route for the same network replaces kpx's, which returns when the foreign route
    // goes.
    route(c, "add", n1)?;
    wait_until(DEADLINE, "ours gives way", || {
        Ok(pod_routes(c)? == routes_of(&[n2]))
    })?;
    fixture.served(c, |family| web.frontend(family), &["p1b", "p2a"])?;
    route(c, "del", n1)?;
    wait_until(DEADLINE, "ours comes back", || {
        Ok(pod_routes(c)? == routes_of(&[n1, n2]))
    })?;
    fixture.served(c, |family| web.frontend(family), &["p1b", "p2a"])?;

    // The next kpx takes over the programs of a killed kpx, and removes them when it stops.
    drop(kpx);
    ensure!(
        pod_routes(c)? == routes_of(&[n1, n2]),
        "{:?}",
        pod_routes(c)?
    );
    fixture.cluster.delete(&node)?;
    let kpx = fixture.outside(c, &["--pod-routes", "nodes"])?;
    wait_until(DEADLINE, "what is stale goes", || {
        Ok(pod_routes(c)? == routes_of(&[n1]))
    })?;
    fixture.served(c, |family| web.frontend(family), &["p1b"])?;
    drop(kpx);
    fixture.cluster.put(&node)?;
    let kpx = fixture.outside(c, &[])?;
    ensure!(
        pod_routes(c)?.is_empty(),
        "another mode left {:?}",
        pod_routes(c)?
    );
    fixture.refused(c, |family| web.frontend(family))?;
    kpx.stop()?;
    is_as_before(c, &before)
}

#[test]
fn host_uses_node_ports() -> Result<()> {
    let fixture = &Fixture::start(Layout::Routed)?;
    let nodes = fixture.nodes()?;
    testbed::cases!(
        fixture;
        host_reaches_backends_through_node_ports,
        start_ends_with_what_is_reached_and_a_command_to_try,
    )?;
    nodes.into_iter().try_for_each(Agent::stop)
}

fn host_reaches_backends_through_node_ports(fixture: &Fixture) -> Result<()> {
    let c = &fixture.lab.x;
    let plain = Service::new("plain", 10, &["p1b", "p2a"], PORT);
    let cluster = Service::new("cluster", 11, &["p1b", "p2a"], PORT).node_port(NODE_PORT);
    let local = Service::new("local", 12, &["p2a"], PORT)
        .node_port(NODE_PORT + 1)
        .external_local();
    let host = Service::new("host", 13, &["n1", "n2"], PORT);
    let services = [&plain, &cluster, &local, &host];
    services
        .into_iter()
        .try_for_each(|service| fixture.put(service))?;
    let before = state(c)?;
    let kpx = fixture.outside(c, &[])?;

    fixture.served(c, |family| cluster.frontend(family), &["p1b", "p2a"])?;
    // The node with the endpoint forwards: the backend sees the client's address.
    fixture.served_seeing(c, |family| local.frontend(family), &["p2a"], Some(c.addrs))?;
    // Backends at nodes' addresses are not pods: the default route leads to them.
    fixture.served_seeing(
        c,
        |family| host.frontend(family),
        &["n1", "n2"],
        Some(c.addrs),
    )?;
    fixture.refused(c, |family| plain.frontend(family))?;
    let why = "only the default route, and the Service has no node port";
    ensure!(
        unreachable(&kpx)? == [("default/plain".to_owned(), why.to_owned())].into(),
        "{:?}",
        unreachable(&kpx)?
    );
    let reported = cut_off(&kpx, "default/plain")?.context("the service is named")?;
    ensure!(
        kpx.status()?["healthy"] == true,
        "an overlay is no fault of this machine"
    );
    ensure!(
        reported.contains("reaches 0 of 4 backends") && reported.contains(why),
        "{reported}"
    );
    // The trace explains the refusal by this machine's view, without the cluster's pods or probes.
    let trace = format!(
        "trace --host --to svc/default/plain --run-dir {}",
        kpx.run_dir().display()
    );
    let traced = String::from_utf8(testbed::agent::kpx(&c.ns, &trace)?.stdout)?;
    ensure!(
        traced.contains(why) && traced.contains("node port") && !traced.contains("probe"),
        "{traced}"
    );

    // The endpoints of the Service with policy Local move, and a node goes out of service.
    fixture.put(&local.backed_by(&["p1b"]))?;
    fixture.served_seeing(c, |family| local.frontend(family), &["p1b"], Some(c.addrs))?;
    fixture.put(&local.backed_by(&["p1b", "p2a"]))?;
    fixture.served_seeing(
        c,
        |family| local.frontend(family),
        &["p1b", "p2a"],
        Some(c.addrs),
    )?;
    let n2 = testbed::agent::node(&fixture.lab.n2);
    fixture.cluster.put(&not_ready(&n2))?;
    fixture.served_seeing(c, |family| local.frontend(family), &["p1b"], Some(c.addrs))?;
    let why =
        "only the default route, and no ready node is reached that takes the node port for it";
    ensure!(
        unreachable(&kpx)?.contains(&("default/local".to_owned(), why.to_owned())),
        "{:?}",
        unreachable(&kpx)?
    );
    fixture.served(c, |family| cluster.frontend(family), &["p1b", "p2a"])?;
    fixture.cluster.put(&n2)?;
    fixture.served_seeing(
        c,
        |family| local.frontend(family),
        &["p1b", "p2a"],
        Some(c.addrs),
    )?;

    // Node ports make the Service reachable, and the agent healthy.
    fixture.put(&plain.clone().node_port(NODE_PORT + 2))?;
    fixture.served(c, |family| plain.frontend(family), &["p1b", "p2a"])?;
    ensure!(kpx.status()?["healthy"] == true, "{}", kpx.status()?);
    kpx.stop()?;
    is_as_before(c, &before)?;
    services
        .into_iter()
        .try_for_each(|service| fixture.delete(service))
}

#[test]
fn trace_blames_service_proxy_for_refused_node_port() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.x;
    let service = Service::new("cluster", 11, &["p1b"], PORT).node_port(NODE_PORT);
    fixture.put(&service)?;
    // No node has a service proxy, so node ports are refused.
    let kpx = fixture.outside(c, &[])?;
    fixture.refused(c, |family| service.frontend(family))?;
    for protocol in ["tcp", "udp"] {
        let trace = format!(
            "trace --host --to svc/default/cluster:{protocol} --run-dir {}",
            kpx.run_dir().display()
        );
        let traced = String::from_utf8(testbed::agent::kpx(&c.ns, &trace)?.stdout)?;
        ensure!(
            traced.contains("the node's service proxy refuses its node port")
                && !traced.contains("targetPort"),
            "{traced}"
        );
    }
    kpx.stop()
}

fn start_ends_with_what_is_reached_and_a_command_to_try(fixture: &Fixture) -> Result<()> {
    let c = &fixture.lab.x;
    let plain = Service::new("plain", 10, &["p1b", "p2a"], PORT);
    let web = Service::new("web", 11, &["p1b", "p2a"], PORT).node_port(NODE_PORT);
    fixture.put(&plain)?;
    fixture.put(&web)?;
    fixture.cluster.reach(&fixture.lab, &["p1b", "p2a"])?;

    let kpx = fixture.outside(c, &[])?;
    announces(
        &kpx,
        "ready: 2 Services, 1 out of reach because it has no node port and no route to its pods: try --tunnel tcp; curl http://web.default.svc.cluster.local",
    )?;
    fixture.served(c, |family| web.frontend(family), &["p1b", "p2a"])?;
    let status = format!("status --run-dir {}", kpx.run_dir().display());
    let status = String::from_utf8(testbed::agent::kpx(&c.ns, &status)?.stdout)?;
    ensure!(
        status.contains(
            "\nTO REACH THEM\nkpx run --tunnel tcp forwards TCP to endpoints that are pods"
        ),
        "{status}"
    );
    kpx.stop()?;

    // The announced Services and the advice depend on the enabled features.
    let kpx = fixture.outside(c, &["--tunnel", "tcp", "--dns-address", "none"])?;
    announces(
        &kpx,
        &format!("ready: 2 Services; curl http://{}", plain.cluster_ip().v4),
    )?;
    fixture.served_over(
        &[Protocol::Tcp],
        c,
        |family| plain.frontend(family),
        &["p1b", "p2a"],
        None,
    )?;
    kpx.stop()?;

    let pair = Service::new("pair", 12, &["p1b"], PORT).of_no_pods();
    let other = Service::new("other", 13, &["p2a"], PORT).of_no_pods();
    fixture.put(&pair)?;
    fixture.put(&other)?;
    let kpx = fixture.outside(c, &["--tunnel", "tcp"])?;
    announces(
        &kpx,
        "ready: 4 Services, 2 out of reach because they have no node port and no route to their pods: see kpx status; curl http://plain.default.svc.cluster.local",
    )?;
    kpx.stop()?;
    [&plain, &web, &pair, &other]
        .into_iter()
        .try_for_each(|service| fixture.delete(service))
}

/// Waits until kpx has printed the line.
fn announces(kpx: &Agent<'_>, line: &str) -> Result<()> {
    wait_until(DEADLINE, line, || {
        Ok(kpx.log().lines().any(|printed| printed == line))
    })
    .with_context(|| kpx.log())
}

fn not_ready(node: &testbed::agent::Object) -> testbed::agent::Object {
    let mut node = node.clone();
    node.0["status"]["conditions"] = serde_json::json!([{ "type": "Ready", "status": "False" }]);
    node
}

#[test]
fn host_reaches_backends_through_the_default_route() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.x;
    fixture
        .lab
        .nodes()
        .into_iter()
        .try_for_each(|node| route(&fixture.lab.fabric, "add", node))?;
    let web = Service::new("web", 10, &["p1b", "p2a"], PORT);
    fixture.put(&web)?;
    let kpx = fixture.outside(c, &[])?;
    fixture.refused(c, |family| web.frontend(family))?;
    kpx.stop()?;
    let kpx = fixture.outside(c, &["--pod-routes", "default"])?;
    fixture.served_seeing(
        c,
        |family| web.frontend(family),
        &["p1b", "p2a"],
        Some(c.addrs),
    )?;
    ensure!(pod_routes(c)?.is_empty());
    // A missing route does not count as a route of the operator.
    let gateway = Dual {
        v4: "198.51.100.1".parse()?,
        v6: "fd00:198:51::1".parse()?,
    };
    c.ns.ip(&Family::ALL
        .map(|family| format!("route del default via {}", gateway.ip(family)))
        .join("\n"))?;
    wait_until(DEADLINE, "both are out of reach", || {
        Ok(cut_off(&kpx, "default/web")?.is_some_and(|why| why.contains("no route")))
    })?;
    fixture.refused(c, |family| web.frontend(family))?;
    kpx.stop()
}
