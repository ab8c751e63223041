//! The files of deploy/monitoring.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

const SEVERITIES: [&str; 3] = ["critical", "warning", "info"];

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(repository().join(path)).with_context(|| format!("read {path}"))
}

fn dashboard() -> Result<Value> {
    Ok(serde_json::from_str(&read(
        "deploy/monitoring/grafana-dashboard.json",
    )?)?)
}

fn rules() -> Result<Value> {
    Ok(serde_saphyr::from_str(&read(
        "deploy/monitoring/alerts.yaml",
    )?)?)
}

/// Returns the alerts, each with its name.
fn alerts() -> Result<Vec<(String, Value)>> {
    let rules = rules()?;
    let groups = rules["groups"].as_array().context("groups")?;
    let alerts = groups
        .iter()
        .filter_map(|group| group["rules"].as_array())
        .flatten();
    alerts
        .map(|alert| {
            Ok((
                alert["alert"]
                    .as_str()
                    .context("a rule without a name")?
                    .to_owned(),
                alert.clone(),
            ))
        })
        .collect()
}

/// Returns the panels without rows, each with its title.
fn panels() -> Result<Vec<(String, Value)>> {
    let dashboard = dashboard()?;
    let panels = dashboard["panels"].as_array().context("panels")?;
    let panels = panels.iter().filter(|panel| panel["type"] != "row");
    panels
        .map(|panel| {
            Ok((
                panel["title"].as_str().context("a title")?.to_owned(),
                panel.clone(),
            ))
        })
        .collect()
}

/// Returns all queries, each with its place in the files.
pub(crate) fn queries() -> Result<Vec<(String, String)>> {
    let mut queries = Vec::new();
    for (title, panel) in panels()? {
        for target in panel["targets"].as_array().context("targets")? {
            queries.push((
                format!("panel {title}"),
                target["expr"].as_str().context("a query")?.to_owned(),
            ));
        }
    }
    for (name, alert) in alerts()? {
        queries.push((
            format!("alert {name}"),
            alert["expr"].as_str().context("a query")?.to_owned(),
        ));
    }
    Ok(queries)
}

#[test]
fn alerts_say_what_is_wrong_and_what_to_do() -> Result<()> {
    let document = read("docs/alerts.md")?;
    let headings: BTreeSet<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .collect();
    let alerts = alerts()?;
    let names: BTreeSet<&str> = alerts.iter().map(|(name, _)| name.as_str()).collect();
    ensure!(names.len() == alerts.len(), "a name comes twice");
    ensure!(
        names == headings,
        "docs/alerts.md has sections {headings:?}"
    );
    for (name, alert) in &alerts {
        let annotation = |key: &str| alert["annotations"][key].as_str().unwrap_or_default();
        ensure!(
            SEVERITIES.contains(&alert["labels"]["severity"].as_str().unwrap_or_default()),
            "{name}: severity"
        );
        ensure!(
            !annotation("summary").is_empty() && !annotation("description").is_empty(),
            "{name} is not explained"
        );
        let runbook = format!("docs/alerts.md#{}", name.to_lowercase());
        ensure!(
            annotation("runbook_url") == runbook,
            "{name}: {} is not {runbook}",
            annotation("runbook_url")
        );
        // A count over an hour needs no `for`.
        ensure!(
            alert["for"].is_string()
                || alert["expr"]
                    .as_str()
                    .is_some_and(|expr| expr.contains("[1h]")),
            "{name}: for"
        );
    }
    Ok(())
}

#[test]
fn the_operators_rules_are_the_same() -> Result<()> {
    let wrapped: Value = serde_saphyr::from_str(&read("deploy/monitoring/prometheus-rule.yaml")?)?;
    ensure!(
        wrapped["apiVersion"] == "monitoring.coreos.com/v1" && wrapped["kind"] == "PrometheusRule"
    );
    ensure!(
        wrapped["spec"] == rules()?,
        "prometheus-rule.yaml has other rules than alerts.yaml"
    );
    Ok(())
}

#[test]
fn panels_do_not_overlap_and_ask_the_chosen_source() -> Result<()> {
    let dashboard = dashboard()?;
    ensure!(
        dashboard["schemaVersion"].as_u64() >= Some(38),
        "Grafana 10"
    );
    let variables = dashboard["templating"]["list"]
        .as_array()
        .context("variables")?;
    let variables: Vec<&str> = variables
        .iter()
        .filter_map(|variable| variable["name"].as_str())
        .collect();
    ensure!(
        variables == ["datasource", "job", "instance"],
        "{variables:?}"
    );
    let mut ids = BTreeSet::new();
    let mut cells = BTreeSet::new();
    for panel in dashboard["panels"].as_array().context("panels")? {
        let title = &panel["title"];
        ensure!(
            ids.insert(panel["id"].as_u64().context("an id")?),
            "{title}: its id comes twice"
        );
        let [x, y, w, h] =
            ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap_or(99));
        ensure!(x + w <= 24, "{title} is cut off");
        for (column, line) in
            (x..x + w).flat_map(|column| (y..y + h).map(move |line| (column, line)))
        {
            ensure!(cells.insert((column, line)), "{title} covers another panel");
        }
    }
    for (title, panel) in panels()? {
        let targets = panel["targets"].as_array().context("targets")?;
        ensure!(!targets.is_empty(), "{title} asks nothing");
        for target in targets {
            ensure!(
                target["datasource"]["uid"] == "${datasource}",
                "{title} asks another source"
            );
            let query = target["expr"].as_str().context("a query")?;
            ensure!(
                query.contains("job=~\"$job\", instance=~\"$instance\""),
                "{title} does not heed the chosen nodes"
            );
        }
    }
    Ok(())
}
