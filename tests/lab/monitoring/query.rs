//! The series that a query selects, and the check that a scrape has them.

use std::collections::BTreeSet;

use anyhow::{Context, Result, anyhow, ensure};
use promql_parser::label::{MatchOp, Matcher};
use promql_parser::parser::{self, AggregateExpr, BinaryExpr, Expr, LabelModifier};
use testbed::exposition::{Exposition, Sample};

/// Labels that a scrape adds to every series of a target.
const TARGET_LABELS: [&str; 2] = ["job", "instance"];
/// A series that Prometheus itself adds for each target.
const UP: &str = "up";

#[derive(Debug)]
pub(crate) struct Selector {
    pub(crate) name: String,
    matchers: Vec<Matcher>,
    /// The labels by which the enclosing expressions distinguish its series.
    labels: BTreeSet<String>,
}

/// Returns the selectors of a Grafana query, in which variables match anything.
pub(crate) fn selectors(text: &str) -> Result<Vec<Selector>> {
    let text = text
        .replace("$__rate_interval", "5m")
        .replace("$job", ".*")
        .replace("$instance", ".*");
    ensure!(!text.contains('$'), "a variable without a value");
    let expr = parser::parse(&text).map_err(|error| anyhow!(error))?;
    let mut found = Vec::new();
    walk(&expr, &BTreeSet::new(), &mut found)?;
    ensure!(!found.is_empty(), "it selects nothing");
    Ok(found)
}

/// Checks that the metric exists, that its series have the labels, and that a series matches.
pub(crate) fn check(selector: &Selector, metrics: &Exposition) -> Result<()> {
    let Selector {
        name,
        matchers,
        labels,
    } = selector;
    if name == UP {
        return Ok(());
    }
    let samples: Vec<&Sample> = metrics
        .values()
        .flat_map(|m| &m.samples)
        .filter(|sample| sample.name == *name)
        .collect();
    ensure!(!samples.is_empty(), "/metrics has no {name}");
    let matched = matchers.iter().map(|matcher| &matcher.name);
    let wanted = labels
        .iter()
        .chain(matched)
        .filter(|label| !TARGET_LABELS.contains(&label.as_str()));
    for label in wanted {
        ensure!(
            samples
                .iter()
                .all(|sample| sample.labels.contains_key(label)),
            "{name} has no label {label}"
        );
    }
    // Which HTTP codes exist depends on past requests.
    let reported = matchers.iter().filter(|matcher| {
        matcher.name != "code" && !TARGET_LABELS.contains(&matcher.name.as_str())
    });
    let reported: Vec<_> = reported.collect();
    let any = samples.iter().any(|sample| {
        reported
            .iter()
            .all(|matcher| is_match(matcher, &sample.labels[&matcher.name]))
    });
    ensure!(any, "no series of {name} has {reported:?}");
    Ok(())
}

fn is_match(matcher: &Matcher, value: &str) -> bool {
    match &matcher.op {
        MatchOp::Equal => value == matcher.value,
        MatchOp::NotEqual => value != matcher.value,
        MatchOp::Re(regex) => regex.is_match(value),
        MatchOp::NotRe(regex) => !regex.is_match(value),
    }
}

/// Collects the selectors of an expression. `labels` are the labels that the enclosing expressions
/// need.
fn walk(expr: &Expr, labels: &BTreeSet<String>, found: &mut Vec<Selector>) -> Result<()> {
    match expr {
        Expr::VectorSelector(selector) => {
            let name = selector.name.clone().context("a selector without a name")?;
            ensure!(
                selector.matchers.or_matchers.is_empty(),
                "`or` between matchers"
            );
            found.push(Selector {
                name,
                matchers: selector.matchers.matchers.clone(),
                labels: labels.clone(),
            });
        }
        Expr::MatrixSelector(matrix) => {
            walk(&Expr::VectorSelector(matrix.vs.clone()), labels, found)?
        }
        Expr::Aggregate(AggregateExpr { expr, modifier, .. }) => {
            let by = match modifier {
                Some(LabelModifier::Include(by)) => by.labels.iter().cloned().collect(),
                Some(LabelModifier::Exclude(_)) => {
                    return Err(anyhow!("`without` leaves open which labels there are"));
                }
                None => BTreeSet::new(),
            };
            walk(expr, &by, found)?;
        }
        Expr::Binary(BinaryExpr {
            lhs, rhs, modifier, ..
        }) => {
            let on = modifier
                .as_ref()
                .and_then(|modifier| modifier.matching.as_ref());
            let mut labels = labels.clone();
            if let Some(LabelModifier::Include(on)) = on {
                labels.extend(on.labels.iter().cloned());
            }
            walk(lhs, &labels, found)?;
            // The right side of a comparison or join need not have all labels of the left side.
            let right = if on.is_some() { on_labels(on) } else { labels };
            walk(rhs, &right, found)?;
        }
        Expr::Call(call) => call
            .args
            .args
            .iter()
            .try_for_each(|arg| walk(arg, labels, found))?,
        Expr::Paren(paren) => walk(&paren.expr, labels, found)?,
        Expr::Unary(unary) => walk(&unary.expr, labels, found)?,
        Expr::Subquery(subquery) => walk(&subquery.expr, labels, found)?,
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) => {}
        Expr::Extension(_) => return Err(anyhow!("an expression of another language")),
    }
    Ok(())
}

fn on_labels(on: Option<&LabelModifier>) -> BTreeSet<String> {
    match on {
        Some(LabelModifier::Include(on)) => on.labels.iter().cloned().collect(),
        Some(LabelModifier::Exclude(_)) | None => BTreeSet::new(),
    }
}

#[test]
fn check_finds_queries_of_missing_series() {
    let metrics = "# HELP a_total A.\n# TYPE a_total counter\na_total{reason=\"x\"} 1\n";
    let metrics = testbed::exposition::parse(metrics).unwrap();
    let outcome = |query: &str| {
        let all = selectors(query).and_then(|found| {
            found
                .iter()
                .try_for_each(|selector| check(selector, &metrics))
        });
        all.err()
            .map_or_else(|| "ok".to_owned(), |error| error.to_string())
    };
    for query in [
        "a_total",
        "sum by (reason, job) (rate(a_total{job=~\"$job\"}[$__rate_interval]))",
        "up == 0",
    ] {
        assert_eq!(outcome(query), "ok", "{query}");
    }
    for (query, fault) in [
        ("b_total", "/metrics has no b_total"),
        ("a_total + b_total", "/metrics has no b_total"),
        ("sum by (zone) (a_total)", "a_total has no label zone"),
        ("a_total / on (zone) a_total", "a_total has no label zone"),
        ("a_total{zone=\"x\"}", "a_total has no label zone"),
        ("rate(a_total[$foo])", "a variable without a value"),
        ("1", "it selects nothing"),
    ] {
        assert_eq!(outcome(query), fault, "{query}");
    }
    assert!(outcome("a_total{reason=\"y\"}").starts_with("no series of a_total has"));
    assert_ne!(outcome("sum(a_total"), "ok");
}
