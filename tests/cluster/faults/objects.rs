//! Objects that are too large, or invalid.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use testbed::agent::DEADLINE;

use crate::faults::fixture::Run;

pub(crate) fn of_all_sorts(run: &Run) -> Result<()> {
    large(run)?;
    nonsense(run)?;
    bookmarks(run)
}

/// The size limit of etcd.
fn large(run: &Run) -> Result<()> {
    let object = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "large", "namespace": "default", "annotations": {"note": "x".repeat(1_500_000)}},
        "spec": {"ports": [{"name": "http", "port": 80, "protocol": "TCP"}]}});
    run.api().apply(&object)?;
    run.recovers("an object of 1.5 MB")?;
    run.api().compact();
    run.api().cut_watches();
    run.change()?;
    run.recovers("a list with it")?;
    run.api().delete("Service", "default", "large")
}

/// Among valid objects: some of the wrong shape, and some of the right shape with meaningless
/// values.
fn nonsense(run: &Run) -> Result<()> {
    let name = |nth: usize| format!("bad-{nth:02}");
    for nth in 0..50 {
        let meta = json!({"name": name(nth), "namespace": "default"});
        let shapeless = [
            json!({"ports": "eighty"}),
            json!(8),
            json!({"ports": [{"port": "http"}]}),
        ];
        run.api().apply_as_is(
            &json!({"apiVersion": "v1", "kind": "Service", "metadata": meta,
            "spec": shapeless[nth % shapeless.len()]}),
        )?;
        let endpoints = [
            json!(["nowhere"]),
            json!([]),
            json!(["0.0.0.0"]),
            json!(["127.0.0.1", "::1"]),
        ];
        let labels = json!({"kubernetes.io/service-name": "web"});
        run.api().apply_as_is(&json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": name(nth), "namespace": "default", "labels": labels}, "addressType": "IPv4",
            "endpoints": [{"addresses": endpoints[nth % endpoints.len()]}],
            "ports": [{"name": "tcp", "port": 0, "protocol": "TCP"}, {"name": "tcp", "port": 8080, "protocol": "NONE"}]}))?;
    }
    run.change()?;
    run.recovers("100 objects with nonsense")?;
    run.reports(DEADLINE, "Service objects", "50 cannot be read")?;
    ensure!(
        run.metric("kpx_unreadable_objects", "Service")? == 50.0,
        "not counted"
    );

    // An object that was valid before keeps its state.
    let tables = run.tables()?;
    let good = run
        .api()
        .get("Service", "default", "web")
        .unwrap_or_default();
    let mut bad = good.clone();
    bad["spec"]["ports"] = json!("eighty");
    run.api().apply_as_is(&bad)?;
    run.api().compact();
    run.api().cut_watches();
    run.reports(DEADLINE, "Service objects", "51 cannot be read")?;
    run.pass(Duration::from_secs(1), |_| Ok(()))?;
    ensure!(
        run.tables()? == tables,
        "what cannot be read has changed the tables"
    );

    run.api().apply_as_is(&good)?;
    for nth in 0..50 {
        run.api().delete_as_is("Service", "default", &name(nth))?;
        run.api()
            .delete_as_is("EndpointSlice", "default", &name(nth))?;
    }
    run.recovers("no nonsense any more")?;
    run.is_well()
}

/// Versions grow with every object's changes. A watch with bookmarks stays valid when the old
/// versions are compacted, and needs no list.
fn bookmarks(run: &Run) -> Result<()> {
    run.api().apply(
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "elsewhere"}}),
    )?;
    run.api().compact();
    // Bookmarks come once a second.
    run.pass(Duration::from_millis(2200), |_| Ok(()))?;
    let lists = run.api().traffic().lists("services");
    run.api().cut_watches();
    run.change()?;
    run.recovers("history compacted behind a bookmark")?;
    ensure!(
        run.api().traffic().lists("services") == lists,
        "listed in spite of the bookmark"
    );
    Ok(())
}
