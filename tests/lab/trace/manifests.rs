//! Traces for a node that need not exist.

use std::process::Command;

use anyhow::{Context, Result};
use expect_test::{Expect, expect};
use proxy_trace::report::Trace;
use testbed::lab::Family;

use crate::trace::cluster::{Folder, names};
use crate::trace::{kpx, trace_command};

/// Checks the output, equal in both families, for a packet from one name to another on node n1. The
/// four lines of a Service's single backend are folded into `only`.
pub(crate) fn check(from: &str, to: &str, arguments: &[&str], expected: &Expect) -> Result<()> {
    expected.assert_eq(&folded(&said(from, to, arguments)?));
    Ok(())
}

fn said(from: &str, to: &str, arguments: &[&str]) -> Result<String> {
    let folder = Folder::create()?;
    let say = |family| {
        let text = kpx(&mut command(&folder, family, from, to, arguments)?);
        let text = text.with_context(|| format!("{family}: from {from} to {to}"))?;
        anyhow::Ok(names(family).replace(&text))
    };
    let text = say(Family::V4)?;
    assert_eq!(text, say(Family::V6)?);
    Ok(text)
}

fn folded(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    let place = lines
        .iter()
        .position(|line| *line == "  backends   1 in the cluster set");
    let backend = place
        .and_then(|place| lines.get(place + 1))
        .map(|line| line.trim());
    backend.map_or_else(
        || text.to_owned(),
        |backend| text.replacen(&of_only(backend), &format!("  only       {backend}\n"), 1),
    )
}

fn of_only(backend: &str) -> String {
    format!(
        "  backends   1 in the cluster set\n             {backend}\n  verdict    forward to {backend}\n             the only backend\n"
    )
}

pub(crate) fn command(
    folder: &Folder,
    family: Family,
    from: &str,
    to: &str,
    arguments: &[&str],
) -> Result<Command> {
    let names = names(family);
    let mut command = trace_command()?;
    command.args([
        "--manifests",
        folder.path(),
        "--node",
        "n1",
        "--from",
        &names.resolve(from)?,
    ]);
    command.args(["--to", &names.resolve(to)?]).args(arguments);
    Ok(command)
}

#[test]
fn a_pod_dials_a_clusterip() -> Result<()> {
    let whole = expect![[r#"
        p1a:32768 > web:80/tcp on n1, met by kpx_ingress at pods
          frontend   web:80/tcp, a ClusterIP
          service    default/web port http at web:80/tcp
          client     a pod of this node
          backends   1 in the cluster set
                     p2a:8080
          verdict    forward to p2a:8080
                     the only backend
          source     seen as p1a:32768
                     the client's own address and port
    "#]];
    whole.assert_eq(&said("p1a", "web:80", &[])?);
    Ok(())
}

#[test]
fn a_pod_dials_itself() -> Result<()> {
    check(
        "p1a:4000",
        "itself:80",
        &[],
        &expect![[r#"
        p1a:4000 > itself:80/tcp on n1, met by kpx_ingress at pods
          frontend   itself:80/tcp, a ClusterIP
          service    default/itself port http at itself:80/tcp
          client     a pod of this node
          only       p1a:8080, on this node
          source     masqueraded as n1:$port
                     the client is its own backend, and would answer itself without passing the service
    "#]],
    )
}

#[test]
fn the_host_dials_a_clusterip() -> Result<()> {
    check(
        "n1",
        "web:80",
        &[],
        &expect![[r#"
        n1:32768 > web:80/tcp on n1, met by kpx_anchor at kpx0
          frontend   web:80/tcp, a ClusterIP
          service    default/web port http at web:80/tcp
          client     this node itself
          only       p2a:8080
          source     seen as n1:$port
                     the client's own address, and a port that no connection of the host has
    "#]],
    )
}

#[test]
fn a_pod_dials_a_service_of_the_host() -> Result<()> {
    check(
        "p1a",
        "host:80",
        &[],
        &expect![[r#"
        p1a:32768 > host:80/tcp on n1, met by kpx_ingress at pods
          frontend   host:80/tcp, a ClusterIP
          service    default/host port http at host:80/tcp
          client     a pod of this node
          only       n1:8080, on this node
          source     seen as p1a:32768
                     the client's own address and port
    "#]],
    )
}

#[test]
fn a_service_does_not_offer_the_port() -> Result<()> {
    check(
        "p1a",
        "web:80/udp",
        &[],
        &expect![[r#"
            p1a:32768 > web:80/udp on n1, met by kpx_ingress at pods
              frontend   web, a ClusterIP without this port
              service    default/web
              client     a pod of this node
              verdict    reject (unknown_port)
                         a ClusterIP, but its service does not offer this port
              to do      kpx services default/web lists the ports.
                         Clients that dial the pod's targetPort at the ClusterIP get this.
        "#]],
    )
}

#[test]
fn other_protocols_pass() -> Result<()> {
    check(
        "p1a",
        "web:53/udp",
        &[],
        &expect![[r#"
        p1a:32768 > web:53/udp on n1, met by kpx_ingress at pods
          frontend   web:53/udp, a ClusterIP
          service    default/web port dns at web:53/udp
          client     a pod of this node
          only       p2a:5353
          source     seen as p1a:32768
                     the client's own address and port
    "#]],
    )?;
    check(
        "p2a",
        "itself:2905/sctp",
        &["--cluster-ip-external"],
        &expect![[r#"
        p2a:32768 > itself:2905/sctp on n1, met by kpx_ingress at eth0
          frontend   itself:2905/sctp, a ClusterIP
          service    default/itself port sigtran at itself:2905/sctp
          client     outside this node
          only       p1a:2905, on this node
          source     seen as p2a:32768
                     the client's own address and port
    "#]],
    )
}

#[test]
fn a_service_has_no_endpoints() -> Result<()> {
    check(
        "p1a",
        "empty:80",
        &[],
        &expect![[r#"
            p1a:32768 > empty:80/tcp on n1, met by kpx_ingress at pods
              frontend   empty:80/tcp, a ClusterIP
              service    default/empty port http at empty:80/tcp
              client     a pod of this node
              backends   0 in the cluster set
              verdict    reject (no_endpoints)
                         the service has no endpoint that serves
              to do      kpx backends default/empty shows the endpoints.
                         If there is none, compare the Service's selector with its pods' labels.
                         If none is ready, check the pods' readiness probes.
        "#]],
    )
}

#[test]
fn address_belongs_to_no_service() -> Result<()> {
    check(
        "p1a",
        "nobody:80",
        &[],
        &expect![[r#"
            p1a:32768 > nobody:80/tcp on n1, met by kpx_ingress at pods
              client     a pod of this node
              verdict    drop (unallocated)
                         an address of a ServiceCIDR that no service has
              to do      The client uses an old address: look for a deleted Service, and for a DNS answer that a client keeps.
        "#]],
    )?;
    check(
        "p1a",
        "stranger:80",
        &[],
        &expect![[r#"
            p1a:32768 > stranger:80/tcp on n1, met by kpx_ingress at pods
              verdict    pass (not_ours)
                         no service is offered there
        "#]],
    )
}

#[test]
fn a_client_outside_dials_a_clusterip() -> Result<()> {
    check(
        "stranger",
        "web:80",
        &[],
        &expect![[r#"
            stranger:32768 > web:80/tcp on n1, met by kpx_ingress at eth0
              frontend   web:80/tcp, a ClusterIP
              service    default/web port http at web:80/tcp
              client     outside this node
              only       p2a:8080
              source     masqueraded as n1:$port
                         replies from that backend must come back through this node
        "#]],
    )
}

#[test]
fn a_client_outside_dials_a_node_port() -> Result<()> {
    check(
        "stranger",
        "n1:30004",
        &[],
        &expect![[r#"
        stranger:32768 > n1:30004/tcp on n1, met by kpx_ingress at eth0
          frontend   *:30004/tcp, a node port
          service    default/port port http at port:80/tcp
          client     outside this node
          only       p2a:8080
          source     masqueraded as n1:$port
                     replies from that backend must come back through this node
    "#]],
    )
}

#[test]
fn the_host_dials_its_own_node_port() -> Result<()> {
    check(
        "n1",
        "n1:30004",
        &[],
        &expect![[r#"
        n1:32768 > n1:30004/tcp on n1, met by kpx_lo at lo
          frontend   *:30004/tcp, a node port
          service    default/port port http at port:80/tcp
          client     this node itself
          only       p2a:8080
          source     seen as n1:$port
                     the client's own address, and a port that no connection of the host has
    "#]],
    )
}

/// The kernel delivers packets to its own loopback address; no route of kpx leads there.
#[test]
fn the_host_dials_its_loopback_address() -> Result<()> {
    const PRIMARY: &[&str] = &["--nodeport-addresses", "primary"];
    let said = expect![[r#"
        n1:32768 > loopback:30004/tcp on n1, met by kpx_lo at lo
          verdict    pass (not_unicast)
                     from or to a multicast, broadcast, loopback or unspecified address, or one of fe80::/10
    "#]];
    check("n1", "loopback:30004", PRIMARY, &said)?;
    check(
        "n1",
        "loopback:30004",
        &[PRIMARY, &["--host"]].concat(),
        &said,
    )?;
    check(
        "loopback",
        "n1:30004",
        &[],
        &expect![[r#"
        loopback:32768 > n1:30004/tcp on n1, met by kpx_lo at lo
          verdict    pass (not_unicast)
                     from or to a multicast, broadcast, loopback or unspecified address, or one of fe80::/10
    "#]],
    )
}

#[test]
fn policy_local_needs_local_endpoints_for_outside_clients_alone() -> Result<()> {
    check(
        "stranger",
        "n1:30005",
        &[],
        &expect![[r#"
            stranger:32768 > n1:30005/tcp on n1, met by kpx_ingress at eth0
              frontend   *:30005/tcp, a node port
              service    default/near port http at near:80/tcp
              client     outside this node
              backends   0 in the local set
              verdict    drop (no_local_endpoints)
                         the service's traffic policy is Local, and none of its endpoints is on this node
              to do      Dial a node with an endpoint; nodes with endpoints answer 200 on the health check node port.
                         Or run a pod on each node, or set the traffic policy to Cluster.
        "#]],
    )?;
    check(
        "p1a",
        "n1:30005",
        &[],
        &expect![[r#"
        p1a:32768 > n1:30005/tcp on n1, met by kpx_ingress at pods
          frontend   *:30005/tcp, a node port
          service    default/near port http at near:80/tcp
          client     a pod of this node
          only       p2a:8080
          source     seen as p1a:32768
                     the client's own address and port
    "#]],
    )
}

#[test]
fn source_ranges_restrict_a_load_balancer() -> Result<()> {
    check(
        "friend",
        "vip:80",
        &[],
        &expect![[r#"
        friend:32768 > vip:80/tcp on n1, met by kpx_ingress at eth0
          frontend   vip:80/tcp, a load balancer's address
          service    default/balanced port http at balanced:80/tcp
          client     outside this node
          only       p2a:8080
          source     masqueraded as n1:$port
                     replies from that backend must come back through this node
    "#]],
    )?;
    check(
        "stranger",
        "vip:80",
        &[],
        &expect![[r#"
            stranger:32768 > vip:80/tcp on n1, met by kpx_ingress at eth0
              frontend   vip:80/tcp, a load balancer's address
              service    default/balanced port http at balanced:80/tcp
              client     outside this node
              verdict    drop (source_range)
                         the client is outside the service's loadBalancerSourceRanges
              to do      Add the client's network to spec.loadBalancerSourceRanges.
                         A client behind NAT comes with the address of its router.
        "#]],
    )
}

#[test]
fn the_host_dials_no_service() -> Result<()> {
    check(
        "n1",
        "stranger:80",
        &[],
        &expect![[r#"
            n1:32768 > stranger:80/tcp on n1, met by kpx_anchor at kpx0
              verdict    pass (not_ours)
                         no service is offered there
        "#]],
    )
}

pub(crate) fn json(
    folder: &Folder,
    family: Family,
    from: &str,
    to: &str,
    arguments: &[&str],
) -> Result<Trace> {
    let text = kpx(command(folder, family, from, to, arguments)?.args(["--output", "json"]))?;
    serde_json::from_str(&text).with_context(|| text)
}
