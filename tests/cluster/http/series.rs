//! A scrape configuration for kube-proxy keeps its series.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use expect_test::expect_file;
use jiff::Timestamp;
use testbed::agent::{DEADLINE, wait_until};
use testbed::exposition::{Exposition, Metric, lint, parse};
use testbed::http::METRICS;

use crate::http::fixture::{Fixture, service, slice};

/// Name, type, labels, number of buckets including `+Inf`.
const KUBE_PROXY: &str = "
kubeproxy_sync_proxy_rules_duration_seconds histogram ip_family 16
kubeproxy_sync_full_proxy_rules_duration_seconds histogram ip_family 16
kubeproxy_sync_partial_proxy_rules_duration_seconds histogram ip_family 16
kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge ip_family
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds gauge ip_family
kubeproxy_network_programming_duration_seconds histogram ip_family 82
kubeproxy_sync_proxy_rules_endpoint_changes_pending gauge
kubeproxy_sync_proxy_rules_endpoint_changes_total counter
kubeproxy_sync_proxy_rules_service_changes_pending gauge
kubeproxy_sync_proxy_rules_service_changes_total counter
kubeproxy_sync_proxy_rules_no_local_endpoints_total gauge ip_family,traffic_policy
kubeproxy_proxy_healthz_total counter code
kubeproxy_proxy_livez_total counter code
kubeproxy_conntrack_reconciler_sync_duration_seconds histogram ip_family 16
kubeproxy_conntrack_reconciler_deleted_entries_total counter ip_family
rest_client_requests_total counter code,host,method
process_start_time_seconds gauge
process_resident_memory_bytes gauge
process_virtual_memory_bytes gauge
process_open_fds gauge
process_max_fds gauge
process_cpu_seconds_total counter
";

/// kpx's own series, on which dashboards and alerts rely.
const KPX: &str = "
kpx_packets_total counter event
kpx_untranslated_packets_total counter reason,verdict
kpx_flows gauge ip_family
kpx_map_entries gauge map
kpx_map_max_entries gauge map
kpx_program_run_seconds_total counter program
kpx_program_runs_total counter program
kpx_flow_sweep_duration_seconds histogram - 16
kpx_flows_expired_total counter
kpx_sync_phase_duration_seconds histogram phase 11
kpx_sync_failures_total counter ip_family
kpx_devices gauge role
kpx_mended_total counter what
kpx_repairs_total counter what
kpx_problems gauge
kpx_restart_gap gauge
kpx_services_out_of_reach gauge backends
kpx_silent_backends gauge state
kpx_unreadable_objects gauge kind
kpx_watch_failures_total counter kind
kpx_watch_up gauge kind
kpx_build_info gauge arch,version
";

/// A kube-proxy metric whose name says counter and whose type differs.
const MISNAMED: &[&str] = &["kubeproxy_sync_proxy_rules_no_local_endpoints_total"];

#[test]
fn every_series_of_kube_proxy_is_there() -> Result<()> {
    let cluster = Fixture::start("series")?;
    let kpx = cluster.healthy_kpx("--bpf-stats")?;
    cluster.api.apply(&service("web", 10, false))?;
    wait_until(DEADLINE, "a partial sync", || {
        Ok(cluster
            .scrape()?
            .contains_key("kubeproxy_sync_partial_proxy_rules_duration_seconds")
            && kpx.typed_status()?.tables["IPv6"].services == 1)
    })?;
    for path in ["/healthz", "/livez"] {
        cluster.get("127.0.0.1:10256", path)?;
    }
    // The first sweep is over by then.
    wait_until(DEADLINE, "flows are known", || {
        Ok(cluster
            .scrape()?
            .get("kpx_flows")
            .is_some_and(|m| m.samples.len() == 2))
    })?;
    let metrics = cluster.scrape()?;
    let found: BTreeMap<&str, String> = metrics
        .iter()
        .map(|(name, metric)| (name.as_str(), form(metric)))
        .collect();
    for line in KUBE_PROXY
        .lines()
        .chain(KPX.lines())
        .filter(|line| !line.is_empty())
    {
        let (name, form) = line.split_once(' ').context("a name and its form")?;
        let is = found.get(name).with_context(|| format!("no {name}"))?;
        ensure!(is == form, "{name} is {is}, not {form}");
        ensure!(!metrics[name].samples.is_empty(), "{name} has no series");
    }
    let listed: BTreeSet<&str> = KUBE_PROXY
        .lines()
        .chain(KPX.lines())
        .filter_map(|line| line.split(' ').next())
        .collect();
    let unlisted: Vec<_> = found
        .keys()
        .filter(|name| !listed.contains(*name))
        .collect();
    ensure!(unlisted.is_empty(), "not listed here: {unlisted:?}");

    document(&metrics);
    let faults = lint(&metrics, MISNAMED);
    ensure!(faults.is_empty(), "{faults:#?}");
    cluster.get(METRICS, "/healthz")?;
    let slis = parse(&cluster.get(METRICS, "/metrics/slis")?.body)?;
    ensure!(
        slis.len() == 2 && lint(&slis, &[]).is_empty(),
        "{slis:?} {:?}",
        lint(&slis, &[])
    );
    ensure!(
        total(&metrics, "kpx_program_runs_total", &[("program", "kpx_lo")]) > 0.0,
        "the kernel counts nothing"
    );
    let ok = [
        ("method", "GET"),
        ("code", "200"),
        ("host", "127.0.0.1:6443"),
    ];
    ensure!(
        total(&metrics, "rest_client_requests_total", &ok) >= 8.0,
        "four lists and four watches"
    );
    kpx.stop()
}

/// Compares the document's table with kpx's own metrics. `UPDATE_EXPECT=1` writes it again.
fn document(metrics: &Exposition) {
    const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    const BEGIN: &str = "UPDATE_EXPECT=1. -->\n";
    let text = fs::read_to_string(DOCUMENT).expect("the document");
    let (before, _) = text.split_once(BEGIN).expect("the place of the table");
    let rows = metrics.iter().map(|(name, metric)| {
        let labels: BTreeSet<&str> = metric
            .samples
            .iter()
            .flat_map(|s| s.labels.keys())
            .map(String::as_str)
            .collect();
        let labels: Vec<_> = labels
            .into_iter()
            .filter(|label| *label != "le")
            .map(|l| format!("`{l}`"))
            .collect();
        format!(
            "| `{name}` | {} | {} | {} |\n",
            metric.kind,
            labels.join(", "),
            metric.help.trim_end_matches('.')
        )
    });
    let table = format!(
        "\n| metric | type | labels | what it says |\n|---|---|---|---|\n{}",
        rows.collect::<String>()
    );
    expect_file![DOCUMENT].assert_eq(&format!("{before}{BEGIN}{table}"));
}

/// Returns a metric in the form of the lists above.
fn form(metric: &Metric) -> String {
    let labels: BTreeSet<&str> = metric
        .samples
        .iter()
        .flat_map(|s| s.labels.keys())
        .map(String::as_str)
        .collect();
    let labels: Vec<_> = labels.into_iter().filter(|label| *label != "le").collect();
    let labels = labels.join(",");
    if metric.kind != "histogram" {
        return format!("{} {labels}", metric.kind).trim_end().to_owned();
    }
    let bounds: BTreeSet<_> = metric
        .samples
        .iter()
        .filter_map(|sample| sample.labels.get("le"))
        .collect();
    format!(
        "{} {} {}",
        metric.kind,
        if labels.is_empty() { "-" } else { &labels },
        bounds.len()
    )
}

#[test]
fn changes_are_counted_and_their_latency_measured() -> Result<()> {
    let cluster = Fixture::start("changes")?;
    let ago = |duration: Duration| (Timestamp::now() - duration).to_string();
    // kpx applies at its start a change from before it.
    cluster
        .api
        .apply(&slice("old", 1, &ago(Duration::from_secs(60))))?;
    let kpx = cluster.healthy_kpx("")?;
    let latencies = |metrics: &Exposition| total(metrics, LATENCY, &[("ip_family", "IPv4")]);
    let before = cluster.scrape()?;
    ensure!(
        latencies(&before) == 0.0,
        "a change before the start counts"
    );

    cluster.api.apply(&service("web", 10, true))?;
    cluster.api.apply(&slice("web", 5, &ago(Duration::ZERO)))?;
    wait_until(DEADLINE, "the slice is in force", || {
        Ok(latencies(&cluster.scrape()?) == 1.0)
    })?;
    let after = cluster.scrape()?;
    let more = |name: &str| total(&after, name, &[]) - total(&before, name, &[]);
    ensure!(more("kubeproxy_sync_proxy_rules_service_changes_total") >= 1.0);
    ensure!(more("kubeproxy_sync_proxy_rules_endpoint_changes_total") >= 1.0);
    for pending in ["endpoint", "service"] {
        ensure!(
            total(
                &after,
                &format!("kubeproxy_sync_proxy_rules_{pending}_changes_pending"),
                &[]
            ) == 0.0
        );
    }
    let internal = [("ip_family", "IPv4"), ("traffic_policy", "internal")];
    ensure!(
        total(
            &after,
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            &internal
        ) == 1.0,
        "none is local"
    );
    ensure!(total(&after, "kpx_map_entries", &[("map", "SERVICES4")]) == 1.0);
    let latency = total(
        &after,
        "kubeproxy_network_programming_duration_seconds_sum",
        &[("ip_family", "IPv4")],
    );
    ensure!(latency > 0.0 && latency < 10.0, "{latency} s");

    // The deletion of a slice has no latency.
    cluster.api.delete("EndpointSlice", "default", "web-ipv4")?;
    wait_until(DEADLINE, "the slice is gone", || {
        Ok(total(
            &cluster.scrape()?,
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            &internal,
        ) == 0.0)
    })?;
    ensure!(latencies(&cluster.scrape()?) == 1.0);
    kpx.stop()
}

const LATENCY: &str = "kubeproxy_network_programming_duration_seconds_count";

/// Returns the sum of the series that have these labels.
fn total(metrics: &Exposition, series: &str, labels: &[(&str, &str)]) -> f64 {
    let samples = metrics
        .values()
        .flat_map(|metric| &metric.samples)
        .filter(|sample| sample.name == series);
    let has = |name: &str, value: &str, sample: &testbed::exposition::Sample| {
        sample.labels.get(name).is_some_and(|is| is == value)
    };
    samples
        .filter(|sample| labels.iter().all(|(name, value)| has(name, value, sample)))
        .map(|s| s.value)
        .sum()
}
