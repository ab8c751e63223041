//! Compares docs/alerts.md with the code: names exist, and lists that claim to be complete are
//! complete.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use proxy_common::counter::{Event, Reason, Verdict};
use proxy_source::health::Problem;

fn read(path: &str) -> Result<String> {
    fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(path),
    )
    .with_context(|| format!("read {path}"))
}

/// Returns the texts in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns the section below a heading.
fn section<'a>(page: &'a str, heading: &str) -> Result<&'a str> {
    let (_, rest) = page
        .split_once(&format!("\n## {heading}\n"))
        .with_context(|| format!("no section {heading}"))?;
    Ok(rest.split("\n## ").next().unwrap_or(rest))
}

fn first_column(section: &str) -> BTreeSet<&str> {
    let cells = section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .filter_map(|line| line.split('|').nth(1));
    cells.flat_map(quoted).collect()
}

/// Returns true if docs/metrics.md lists the metric with the label. A test compares that page with
/// a running kpx.
fn has_metric(metrics: &str, name: &str, label: Option<&str>) -> bool {
    metrics
        .lines()
        .filter_map(|line| line.strip_prefix(&format!("| `{name}` |")))
        .any(|row| {
            let labels = row.split('|').nth(1).unwrap_or_default();
            label.is_none_or(|label| quoted(labels).any(|known| known == label))
        })
}

#[test]
fn page_lists_each_reason_that_drops_or_rejects() -> Result<()> {
    let page = read("docs/alerts.md")?;
    let listed = first_column(section(&page, "KpxDropsHigh")?);
    let refusing = Reason::ALL
        .into_iter()
        .filter(|reason| reason.verdict() != Verdict::Pass);
    let refusing: BTreeSet<_> = refusing.map(Reason::name).collect();
    let unknown = &listed - &refusing;
    let missing = &refusing - &listed;
    ensure!(
        unknown.is_empty(),
        "docs/alerts.md lists reasons that no dropped packet has: {unknown:?}"
    );
    ensure!(
        missing.is_empty(),
        "docs/alerts.md does not list {missing:?}"
    );
    Ok(())
}

#[test]
fn page_names_metrics_labels_and_alerts_that_exist() -> Result<()> {
    let page = read("docs/alerts.md")?;
    let metrics = read("docs/metrics.md")?;
    let events = Event::ALL.map(Event::name);
    let mut named = 0;
    for text in quoted(&page).filter(|text| text.starts_with("kpx_")) {
        named += 1;
        let (name, label) = text
            .split_once('{')
            .map_or((text, None), |(name, label)| (name, Some(label)));
        let label = label.map(|label| {
            label
                .trim_end_matches('}')
                .split_once('=')
                .context("a label with a value")
        });
        let label = label.transpose()?;
        ensure!(
            has_metric(&metrics, name, label.map(|(key, _)| key)),
            "no metric {text}"
        );
        if let Some(("event", value)) = label {
            ensure!(events.contains(&value.trim_matches('"')), "no event {text}");
        }
    }
    ensure!(
        named >= 2,
        "the page names {named} metrics: are they in backticks?"
    );
    let headings: BTreeSet<_> = page
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .collect();
    for target in page
        .split("](#")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
    {
        ensure!(
            headings
                .iter()
                .any(|heading| heading.to_lowercase() == *target),
            "no section #{target}"
        );
    }
    for word in page
        .split(|letter: char| !letter.is_alphanumeric())
        .filter(|word| word.starts_with("Kpx"))
    {
        ensure!(headings.contains(word), "no alert {word}");
    }
    Ok(())
}

#[test]
fn page_names_problems_as_the_status_does() -> Result<()> {
    let page = read("docs/alerts.md")?;
    let kind = || "Service".to_owned();
    let problems = [
        Problem::Watch(kind()),
        Problem::History(kind()),
        Problem::Objects(kind()),
    ];
    let of_kinds = problems.map(|problem| problem.to_string().replace("Service", "…"));
    let ends: BTreeSet<_> = quoted(&page)
        .filter(|text| text.starts_with("… "))
        .collect();
    ensure!(
        ends == of_kinds.iter().map(String::as_str).collect(),
        "{ends:?} are not {of_kinds:?}"
    );
    ensure!(
        quoted(&page).any(|text| text == Problem::Maps.to_string()),
        "the problem of the maps has another name"
    );
    Ok(())
}

#[test]
fn page_quotes_warnings_that_the_agent_logs() -> Result<()> {
    let page = read("docs/alerts.md")?;
    let code = read("proxy-agent/src/node.rs")? + &read("proxy-agent/src/node/programs.rs")?;
    let quoted: Vec<_> = section(&page, "KpxUndone")?
        .split('*')
        .skip(1)
        .step_by(2)
        .map(|text| text.replace('\n', " "))
        .collect();
    ensure!(!quoted.is_empty(), "the section quotes no warning");
    for warning in quoted {
        ensure!(
            code.contains(&format!("\"{warning}\"")),
            "no warning {warning:?}"
        );
    }
    Ok(())
}

#[test]
fn first_table_has_each_alert_with_its_severity() -> Result<()> {
    let rules = read("deploy/monitoring/alerts.yaml")?;
    let mut alert = None;
    let mut expected = BTreeSet::new();
    for line in rules.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("- alert: ") {
            alert = Some(name);
        } else if let Some((_, labels)) = line.split_once("severity: ") {
            let severity = labels.trim_end_matches(" }");
            expected.extend(alert.take().map(|alert| (alert, severity)));
        }
    }
    ensure!(!expected.is_empty(), "no alert in the rule file");
    let page = read("docs/alerts.md")?;
    let mut listed = BTreeSet::new();
    for row in page.lines().filter(|line| line.starts_with("| [Kpx")) {
        let mut cells = row.split('|').skip(1).map(str::trim);
        let (alerts, severity) = (cells.next().unwrap_or(""), cells.next().unwrap_or(""));
        let names = alerts.split('[').skip(1);
        listed.extend(names.filter_map(|name| Some((name.split(']').next()?, severity))));
    }
    ensure!(
        listed == expected,
        "docs/alerts.md has {:?}, the rules have {:?}",
        &listed - &expected,
        &expected - &listed
    );
    Ok(())
}
