//! The format of the JSON output, and of refusals.

use anyhow::{Context, Result};
use expect_test::{Expect, expect};
use proxy_trace::report::Trace;
use serde_json::Value;
use testbed::lab::Family;

use crate::trace::cluster::{Folder, names};
use crate::trace::manifests::{command, json};
use crate::trace::{kpx, trace_command};

/// Pins the field names that readers of this output rely on.
#[test]
fn trace_shows_a_forwarded_packet() -> Result<()> {
    check(
        "n1:30004",
        &expect![[r#"
            hook.device "eth0"
            hook.program "kpx_ingress"
            node "n1"
            notes []
            outcome.affinityHit false
            outcome.backend.at "p2a:8080"
            outcome.backend.local false
            outcome.explanation "the only backend"
            outcome.frontend.at "*:30004/tcp"
            outcome.frontend.kind "node-port"
            outcome.handedOver false
            outcome.origin "outside"
            outcome.reason null
            outcome.remedy []
            outcome.service.key "port:80/tcp"
            outcome.service.name "port"
            outcome.service.namespace "default"
            outcome.service.portName "http"
            outcome.set.affinitySeconds null
            outcome.set.algorithm "random"
            outcome.set.backends[0].at "p2a:8080"
            outcome.set.backends[0].local false
            outcome.set.name "cluster"
            outcome.source.at "n1:$port"
            outcome.source.explanation "replies from that backend must come back through this node"
            outcome.source.masqueraded true
            outcome.verdict "forward"
            packet.count 1
            packet.from "stranger:32768"
            packet.protocol "tcp"
            packet.to "n1:30004"
            tables "manifests"
            tally[0].backend "p2a:8080"
            tally[0].packets 1
            tally[0].reason null
            tally[0].verdict "forward"
            warnings []
        "#]],
    )
}

#[test]
fn trace_shows_a_rejected_packet() -> Result<()> {
    check(
        "n1:30003",
        &expect![[r#"
            hook.device "eth0"
            hook.program "kpx_ingress"
            node "n1"
            notes []
            outcome.affinityHit false
            outcome.backend null
            outcome.explanation "the service has no endpoint that serves"
            outcome.frontend.at "*:30003/tcp"
            outcome.frontend.kind "node-port"
            outcome.handedOver false
            outcome.origin "outside"
            outcome.reason "no_endpoints"
            outcome.remedy[0] "kpx backends default/empty shows the endpoints."
            outcome.remedy[1] "If there is none, compare the Service's selector with its pods' labels."
            outcome.remedy[2] "If none is ready, check the pods' readiness probes."
            outcome.service.key "empty:80/tcp"
            outcome.service.name "empty"
            outcome.service.namespace "default"
            outcome.service.portName "http"
            outcome.set.affinitySeconds null
            outcome.set.algorithm "random"
            outcome.set.backends []
            outcome.set.name "cluster"
            outcome.source null
            outcome.verdict "reject"
            packet.count 1
            packet.from "stranger:32768"
            packet.protocol "tcp"
            packet.to "n1:30003"
            tables "manifests"
            tally[0].backend null
            tally[0].packets 1
            tally[0].reason "no_endpoints"
            tally[0].verdict "reject"
            warnings []
        "#]],
    )
}

fn check(to: &str, expected: &Expect) -> Result<()> {
    let folder = Folder::create()?;
    let text = kpx(&mut command(
        &folder,
        Family::V4,
        "stranger",
        to,
        &["--output", "json"],
    )?)?;
    let lines = lines("", &serde_json::from_str(&text)?).join("\n") + "\n";
    expected.assert_eq(&names(Family::V4).replace(&lines));
    Ok(())
}

/// Returns lines like `outcome.backend.local true`, one for each value.
fn lines(path: &str, value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| lines(&format!("{path}.{name}"), value))
            .collect(),
        Value::Array(items) if !items.is_empty() => items
            .iter()
            .enumerate()
            .flat_map(|(n, value)| lines(&format!("{path}[{n}]"), value))
            .collect(),
        leaf => vec![format!("{} {leaf}", path.trim_start_matches('.'))],
    }
}

#[test]
fn trace_refuses_what_it_cannot_follow() -> Result<()> {
    let folder = Folder::create()?;
    let v4 = names(Family::V4);
    let mut mixed = trace_command()?;
    mixed.args([
        "--manifests",
        folder.path(),
        "--node",
        "n1",
        "--from",
        "fd00::1",
        "--to",
        &v4.resolve("web:80")?,
    ]);
    let error = kpx(&mut mixed).err().context("families do not mix")?;
    expect!["kpx: fd00::1 and 10.96.0.10 are of different families"]
        .assert_eq(&format!("{error:#}"));
    let mut nowhere = trace_command()?;
    nowhere.args([
        "--manifests",
        "/nonexistent",
        "--node",
        "n1",
        "--from",
        "10.0.0.1",
        "--to",
        "10.0.0.2:80",
    ]);
    let error = kpx(&mut nowhere).err().context("there is no such folder")?;
    expect!["kpx: read folder /nonexistent: No such file or directory (os error 2)"]
        .assert_eq(&format!("{error:#}"));
    Ok(())
}

/// A trace by names gives the same output as a trace by their addresses.
#[test]
fn trace_takes_names_for_addresses() -> Result<()> {
    let folder = Folder::create()?;
    let by_name = |from: &str, to: &str| {
        kpx(trace_command()?.args([
            "--manifests",
            folder.path(),
            "--node",
            "n1",
            "--from",
            from,
            "--to",
            to,
        ]))
    };
    let cases = [
        ("pod/default/p1a", "svc/default/web:http", "p1a", "web:80"),
        ("pod/p1a", "many:dns", "p1a", "many:53/udp"),
        (
            "node/n1",
            "web.default.svc.cluster.local:80",
            "n1",
            "web:80",
        ),
        ("pod/p1b", "pod/p2a:8080", "p1b", "p2a:8080"),
    ];
    for (from, to, from_addr, to_addr) in cases {
        let names = names(Family::V4);
        // Each trace draws another source port of the host, and another backend.
        let replaced = |text: String| names.replace(&text).lines().next().map(str::to_owned);
        let want = kpx(&mut command(&folder, Family::V4, from_addr, to_addr, &[])?)?;
        assert_eq!(replaced(by_name(from, to)?), replaced(want), "{from} {to}");
    }
    let wrong = [
        (
            "pod/p1a",
            "default/wbe:80",
            "kpx: kpx serves no Service default/wbe; did you mean default/web?",
        ),
        (
            "pod/p2a",
            "web:80",
            "kpx: pod default/p2a is on node n2: trace on that node",
        ),
    ];
    for (from, to, want) in wrong {
        let error = by_name(from, to).err().context("a wrong name")?;
        assert_eq!(format!("{error:#}"), want);
    }
    Ok(())
}

#[test]
fn trace_notes_a_missing_node_object() -> Result<()> {
    let folder = Folder::create()?;
    let trace: Trace = json(&folder, Family::V4, "p2a", "web:80", &[])?;
    assert_eq!(trace.notes, Vec::<String>::new());
    let mut command = trace_command()?;
    command.args([
        "--manifests",
        folder.path(),
        "--node",
        "n9",
        "--from",
        "10.244.1.10",
        "--to",
        "10.96.0.10:80",
    ]);
    let text = names(Family::V4).replace(&kpx(&mut command)?);
    expect![[r#"
        p1a:32768 > web:80/tcp on n9, met by kpx_ingress at eth0
          frontend   web:80/tcp, a ClusterIP
          service    default/web port http at web:80/tcp
          client     outside this node
          backends   1 in the cluster set
                     p2a:8080
          verdict    drop (no_node_address)
                     the client must be masqueraded, and the node has no address of this family
          to do      Give the node's device an address of this family, or remove the family from the Service.

        note: Node n9 does not exist: no addresses, pod CIDRs or zone
    "#]]
    .assert_eq(&text);
    Ok(())
}
