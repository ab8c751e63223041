//! Settings of the operator and of a Service for masquerading and load balancing.

use anyhow::Result;
use expect_test::expect;
use proxy_trace::report::Verdict;
use testbed::lab::Family;

use crate::trace::cluster::Folder;
use crate::trace::manifests::{check, json};

#[test]
fn options_of_the_node_decide_as_in_kpx_run() -> Result<()> {
    let compat = [
        "--masquerade",
        "compat",
        "--cluster-cidr",
        "10.244.0.0/16,fd00:10:244::/48",
    ];
    check(
        "p1a",
        "port:80",
        &compat,
        &expect![[r#"
        p1a:32768 > port:80/tcp on n1, met by kpx_ingress at pods
          frontend   port:80/tcp, a ClusterIP
          service    default/port port http at port:80/tcp
          client     a local pod by --detect-local-mode
          only       p2a:8080
          source     seen as p1a:32768
                     the client's own address and port
    "#]],
    )?;
    check(
        "p1a",
        "n1:30004",
        &compat,
        &expect![[r#"
        p1a:32768 > n1:30004/tcp on n1, met by kpx_ingress at pods
          frontend   *:30004/tcp, a node port
          service    default/port port http at port:80/tcp
          client     a local pod by --detect-local-mode
          only       p2a:8080
          source     masqueraded as n1:$port
                     masqueraded where kube-proxy does it (--masquerade compat)
    "#]],
    )?;
    check(
        "stranger",
        "web:80",
        &["--cluster-ip-external"],
        &expect![[r#"
        stranger:32768 > web:80/tcp on n1, met by kpx_ingress at eth0
          frontend   web:80/tcp, a ClusterIP
          service    default/web port http at web:80/tcp
          client     outside this node
          only       p2a:8080
          source     masqueraded as n1:$port
                     replies from that backend must come back through this node
    "#]],
    )?;
    check(
        "stranger",
        "n1:30004",
        &["--nodeport-addresses", "10.0.0.0/8,fd10::/16"],
        &expect![[r#"
            stranger:32768 > n1:30004/tcp on n1, met by kpx_ingress at eth0
              verdict    pass (not_ours)
                         no service is offered there
        "#]],
    )
}

#[test]
fn trace_follows_the_algorithms() -> Result<()> {
    let folder = Folder::create()?;
    let tally = |algorithm, from| -> Result<Vec<(u32, Option<String>)>> {
        let trace = json(
            &folder,
            Family::V4,
            from,
            "many:80",
            &["--count", "100", "--lb-algorithm", algorithm],
        )?;
        Ok(trace
            .tally
            .into_iter()
            .map(|row| (row.packets, row.backend))
            .collect())
    };
    let even = |tally: &[(u32, _)]| {
        tally
            .iter()
            .map(|(packets, _)| *packets)
            .collect::<Vec<_>>()
            == [50, 50]
    };
    assert!(even(&tally("round-robin", "p1a")?));
    // Flows stay open, so the other backend has fewer connections.
    assert!(even(&tally("least-connections", "p1a")?));
    assert_eq!(
        tally("maglev", "p1a")?,
        tally("maglev", "p1a")?,
        "by address and port alone"
    );
    assert_ne!(
        tally("maglev", "p1a:1000")?,
        tally("maglev", "p1a:2000")?,
        "other clients, other backends"
    );
    Ok(())
}

#[test]
fn packets_are_counted_by_fate() -> Result<()> {
    let folder = Folder::create()?;
    for family in Family::ALL {
        let trace = json(&folder, family, "p1a", "many:80", &["--count", "200"])?;
        let backends: Vec<_> = trace
            .tally
            .iter()
            .map(|row| (row.verdict, row.backend.is_some()))
            .collect();
        assert_eq!(backends, [(Verdict::Forward, true); 2], "{trace:?}");
        assert_eq!(trace.tally.iter().map(|row| row.packets).sum::<u32>(), 200);
        // Random selection: the bound is 12 standard deviations from even.
        assert!(trace.tally.iter().all(|row| row.packets > 15), "{trace:?}");
    }
    Ok(())
}

#[test]
fn a_client_with_affinity_keeps_its_backend() -> Result<()> {
    let folder = Folder::create()?;
    for family in Family::ALL {
        let trace = json(
            &folder,
            family,
            "stranger",
            "external:80",
            &["--count", "50"],
        )?;
        assert_eq!(trace.tally.len(), 1, "{trace:?}");
        assert_eq!(
            trace.outcome.set.and_then(|set| set.affinity_seconds),
            Some(60)
        );
    }
    Ok(())
}

#[test]
fn the_host_reaches_node_ports_at_a_loopback_address_where_it_is_named() -> Result<()> {
    check(
        "n1",
        "loopback:30004",
        &["--nodeport-addresses", "localhost"],
        &expect![[r#"
        n1:32768 > loopback:30004/tcp on n1, met by kpx_lo at lo
          frontend   *:30004/tcp, a node port
          service    default/port port http at port:80/tcp
          client     this node itself
          only       p2a:8080
          source     seen as n1:$port
                     the client's own address, and a port that no connection of the host has
    "#]],
    )
}
