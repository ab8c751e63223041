//! Objects of other programs, and names as operators write them, in a trace of manifests.

use anyhow::Result;
use proxy_trace::report::{Trace, Verdict};
use serde_json::json;
use testbed::lab::Family;

use crate::trace::cluster::{Folder, names};
use crate::trace::manifests;
use crate::trace::{kpx, trace_command};

#[test]
fn two_services_claim_one_frontend() -> Result<()> {
    let folder = Folder::create()?;
    folder.put(
        "rival",
        &json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": "zz" },
            "spec": {
                "type": "LoadBalancer",
                "clusterIP": "10.96.0.201",
                "externalIPs": ["192.0.2.2"],
                "ports": [{ "port": 80, "nodePort": 30004 }],
            },
            "status": { "loadBalancer": { "ingress": [{ "ip": "192.0.2.1" }] } },
        }),
    )?;
    let trace: Trace = manifests::json(&folder, Family::V4, "stranger", "n1:30004", &[])?;
    assert_eq!(
        trace
            .outcome
            .service
            .and_then(|service| service.name)
            .as_deref(),
        Some("port")
    );
    let held = [
        "spec.ports[0].nodePort: IPv4 *:30004/tcp is held by Service default/port",
        "status.loadBalancer.ingress[0].ip: 192.0.2.1:80/tcp is held by Service default/balanced",
        "spec.externalIPs[0]: 192.0.2.2:80/tcp is held by Service default/sticky",
    ];
    assert_eq!(
        trace.notes,
        held.map(|why| format!("Service default/zz {why}"))
    );
    Ok(())
}

#[test]
fn another_proxy_has_the_address() -> Result<()> {
    let folder = Folder::create()?;
    let other = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "other", "labels": { "service.kubernetes.io/service-proxy-name": "another" } },
        "spec": { "clusterIP": "10.96.0.200", "ports": [{ "port": 80 }] },
    });
    folder.put("other", &other)?;
    let trace: Trace = manifests::json(&folder, Family::V4, "p1a", "nobody:80", &[])?;
    assert_eq!(
        (trace.outcome.verdict, trace.outcome.reason.as_deref()),
        (Verdict::Pass, Some("not_ours"))
    );
    let trace: Trace = manifests::json(&folder, Family::V6, "p1a", "nobody:80", &[])?;
    assert_eq!(
        (trace.outcome.verdict, trace.outcome.reason.as_deref()),
        (Verdict::Drop, Some("unallocated"))
    );
    Ok(())
}

#[test]
fn a_nodes_name_is_trimmed_and_in_lower_case() -> Result<()> {
    let folder = Folder::create()?;
    let mut command = trace_command()?;
    command.args([
        "--manifests",
        folder.path(),
        "--node",
        " N1 ",
        "--from",
        "10.244.1.10",
        "--to",
        "10.96.0.10:80",
    ]);
    let text = names(Family::V4).replace(&kpx(&mut command)?);
    assert!(
        text.starts_with("p1a:32768 > web:80/tcp on n1, met by kpx_ingress at pods\n"),
        "{text}"
    );
    assert!(!text.contains("note:"), "{text}");
    Ok(())
}
