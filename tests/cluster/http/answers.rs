//! Bodies, headers and codes equal kube-proxy's.

use std::process::Command;

use anyhow::{Result, ensure};
use proxy_view::status::Status;
use serde_json::{Value, json};
use testbed::agent::{DEADLINE, wait_until};
use testbed::http::{HEALTH, METRICS, get_at_socket};

use crate::http::fixture::{Fixture, node};

#[test]
fn health_is_answered_in_the_form_of_kube_proxy() -> Result<()> {
    let cluster = Fixture::start("health")?;
    let kpx = cluster.healthy_kpx("")?;
    for (path, keys) in [
        (
            "/healthz",
            &[
                "lastUpdated",
                "currentTime",
                "nodeEligible",
                "healthy",
                "status",
            ][..],
        ),
        (
            "/livez",
            &["lastUpdated", "currentTime", "healthy", "status"],
        ),
    ] {
        for (at, method) in [
            (HEALTH, "GET"),
            ("[::1]:10256", "GET"),
            (HEALTH, "POST"),
            (HEALTH, "DELETE"),
        ] {
            let answer = cluster.ask(at, method, path)?;
            ensure!(answer.code == 200, "{method} {path}: {answer:?}");
            for header in [
                "Content-Type: application/json",
                "X-Content-Type-Options: nosniff",
            ] {
                ensure!(
                    answer.headers.contains(&header.to_owned()),
                    "{method} {path}: {answer:?}, no {header}"
                );
            }
            let body: Value = serde_json::from_str(&answer.body)?;
            ensure!(
                in_order(&answer.body, keys)
                    && body
                        .as_object()
                        .is_some_and(|body| body.len() == keys.len())
            );
            ensure!(
                body["healthy"] == true && body["lastUpdated"] == body["currentTime"],
                "{body}"
            );
            for family in ["IPv4", "IPv6"] {
                ensure!(body["status"][family]["healthy"] == true, "{body}");
                ensure!(
                    body["status"][family]["lastUpdated"].as_str() < body["currentTime"].as_str(),
                    "{body}"
                );
            }
        }
    }
    let head = cluster.ask(HEALTH, "HEAD", "/healthz")?;
    ensure!(head.code == 200 && head.body.is_empty(), "{head:?}");
    for path in ["/", "/healthz/", "/metrics", "/status"] {
        let answer = cluster.get(HEALTH, path)?;
        ensure!(
            answer.code == 404 && answer.body == "404 page not found\n",
            "{path}: {answer:?}"
        );
    }
    kpx.stop()
}

/// A problem's reason contains names of servers, files and Services.
#[test]
fn healthz_gives_reasons_to_clients_on_the_node_alone() -> Result<()> {
    let cluster = Fixture::start("reasons")?;
    cluster
        .ns
        .exec(Command::new("ip").args(["address", "add", "192.0.2.1/32", "dev", "lo"]))?;
    let kpx = cluster.healthy_kpx("--healthz-bind-address 0.0.0.0:10256")?;
    cluster.api.fail_all(503, None);
    cluster.api.cut_watches();
    wait_until(DEADLINE, "the API server's failure is a problem", || {
        Ok(kpx.problem("Service watch")?.is_some())
    })?;
    for path in ["/healthz", "/livez"] {
        for at in [HEALTH, "[::1]:10256"] {
            let body: Value = serde_json::from_str(&cluster.get(at, path)?.body)?;
            ensure!(
                body["problems"]["Service watch"]
                    .as_str()
                    .is_some_and(|why| why.contains("503")),
                "{body}"
            );
        }
        let answer = cluster.get("192.0.2.1:10256", path)?;
        let body: Value = serde_json::from_str(&answer.body)?;
        ensure!(answer.code == 200 && body["healthy"] == true, "{body}");
        ensure!(
            body.get("problems").is_none() && !answer.body.contains("watch"),
            "shown to a stranger: {body}"
        );
    }
    kpx.stop()
}

fn in_order(body: &str, keys: &[&str]) -> bool {
    let places = keys.iter().map(|key| body.find(&format!("\"{key}\":")));
    places
        .collect::<Option<Vec<_>>>()
        .is_some_and(|places| places.is_sorted())
}

#[test]
fn a_node_that_is_about_to_go_takes_no_new_traffic() -> Result<()> {
    let cluster = Fixture::start("taint")?;
    let kpx = cluster.healthy_kpx("")?;
    ensure!(cluster.get(HEALTH, "/healthz")?.code == 200);
    let turns = |code: u16| {
        wait_until(DEADLINE, &format!("/healthz answers {code}"), || {
            Ok(cluster.get(HEALTH, "/healthz")?.code == code)
        })
    };
    cluster.api.apply(&node(
        &json!([{ "key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule" }]),
    ))?;
    turns(503)?;
    let body: Value = serde_json::from_str(&cluster.get(HEALTH, "/healthz")?.body)?;
    ensure!(
        body["healthy"] == true && body["nodeEligible"] == false,
        "{body}"
    );
    ensure!(
        cluster.get(HEALTH, "/livez")?.code == 200,
        "the proxy itself is well"
    );
    cluster.api.apply(&node(
        &json!([{ "key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule" }]),
    ))?;
    turns(200)?;

    let metrics = cluster.scrape()?;
    let counted = |metric: &str, code: &str| {
        let samples = metrics
            .get(metric)
            .map(|metric| metric.samples.as_slice())
            .unwrap_or_default();
        samples
            .iter()
            .filter(|sample| sample.labels.get("code").is_some_and(|is| is == code))
            .map(|s| s.value)
            .sum()
    };
    let [ok, unavailable, live]: [f64; 3] = [
        counted("kubeproxy_proxy_healthz_total", "200"),
        counted("kubeproxy_proxy_healthz_total", "503"),
        counted("kubeproxy_proxy_livez_total", "200"),
    ];
    ensure!(
        ok >= 2.0 && unavailable >= 2.0 && live >= 1.0,
        "{ok} {unavailable} {live}"
    );
    kpx.stop()
}

#[test]
fn metrics_server_answers_the_paths_of_kube_proxy() -> Result<()> {
    let cluster = Fixture::start("beside")?;
    let kpx = cluster.healthy_kpx("")?;
    const PLAIN: &str = "Content-Type: text/plain; charset=utf-8";
    const NOSNIFF: &str = "X-Content-Type-Options: nosniff";
    for (path, body) in [
        ("/proxyMode", "ebpf"),
        ("/healthz", "ok"),
        ("/healthz/ping", "ok"),
        ("/healthz?verbose", "[+]ping ok\nhealthz check passed\n"),
    ] {
        let answer = cluster.get(METRICS, path)?;
        ensure!(
            answer.code == 200 && answer.body == body,
            "{path}: {answer:?}"
        );
        ensure!(
            [PLAIN, NOSNIFF]
                .iter()
                .all(|h| answer.headers.contains(&(*h).to_owned())),
            "{path}: {answer:?}"
        );
    }
    let answer = cluster.get(METRICS, "/configz")?;
    ensure!(
        answer.code == 200
            && answer
                .headers
                .contains(&"Content-Type: application/json".to_owned()),
        "{answer:?}"
    );
    ensure!(
        serde_json::from_str::<Value>(&answer.body)?.is_object(),
        "{answer:?}"
    );
    for path in ["/", "/livez", "/proxymode", "/status", "/statusz", "/flagz"] {
        ensure!(cluster.get(METRICS, path)?.code == 404, "{path}");
    }
    for path in ["/metrics", "/metrics/slis"] {
        let answer = cluster.get(METRICS, path)?;
        let content_type = "Content-Type: text/plain; version=0.0.4; charset=utf-8";
        ensure!(
            answer.code == 200 && answer.headers.contains(&content_type.to_owned()),
            "{path}: {:?}",
            answer.headers
        );
    }
    let slis = cluster.get(METRICS, "/metrics/slis")?.body;
    let checks =
        "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 2\n";
    ensure!(
        slis.contains("kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n")
            && slis.contains(checks),
        "{slis}"
    );
    kpx.stop()
}

#[test]
fn the_run_directorys_socket_has_metrics_though_no_address_has() -> Result<()> {
    let cluster = Fixture::start("socket")?;
    let kpx = cluster.healthy_kpx("--healthz-bind-address= --metrics-bind-address=")?;
    for at in [HEALTH, METRICS] {
        ensure!(
            cluster.get(at, "/healthz").is_err(),
            "something listens at {at}"
        );
    }
    let answer = get_at_socket(&kpx.run_dir().join("kpx.sock"), "/metrics")?;
    ensure!(
        answer.code == 200 && answer.body.contains("kpx_problems 0\n"),
        "{answer:?}"
    );
    let status: Status =
        serde_json::from_str(&get_at_socket(&kpx.run_dir().join("kpx.sock"), "/status")?.body)?;
    ensure!(status.healthy);
    kpx.stop()
}
