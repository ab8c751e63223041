//! Parses and lints Prometheus' text format 0.0.4 like `promtool check metrics`, independent of
//! kpx's writer.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};

/// All metrics of a scrape, by name.
pub type Exposition = BTreeMap<String, Metric>;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metric {
    pub help: String,
    /// `counter`, `gauge`, `histogram`, …
    pub kind: String,
    pub samples: Vec<Sample>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name, with `_bucket`, `_sum` or `_count` in a histogram.
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// Parses metrics. Errors include the line.
pub fn parse(text: &str) -> Result<Exposition> {
    ensure!(text.ends_with('\n'), "the last line has no end");
    let mut metrics = Exposition::new();
    for line in text.lines() {
        take_in(line, &mut metrics).with_context(|| line.to_owned())?;
    }
    Ok(metrics)
}

fn take_in(line: &str, metrics: &mut Exposition) -> Result<()> {
    if let Some(rest) = line.strip_prefix("# HELP ") {
        let (name, help) = rest.split_once(' ').context("no text")?;
        let metric = metrics.entry(name.to_owned()).or_default();
        ensure!(
            metric.help.is_empty() && metric.samples.is_empty(),
            "help comes twice or late"
        );
        help.clone_into(&mut metric.help);
    } else if let Some(rest) = line.strip_prefix("# TYPE ") {
        let (name, kind) = rest.split_once(' ').context("no type")?;
        ensure!(
            ["counter", "gauge", "histogram", "summary", "untyped"].contains(&kind),
            "no such type"
        );
        let metric = metrics.entry(name.to_owned()).or_default();
        ensure!(
            metric.kind.is_empty() && metric.samples.is_empty(),
            "the type comes twice or late"
        );
        kind.clone_into(&mut metric.kind);
    } else if line.starts_with('#') {
        bail!("no comment that means anything");
    } else {
        let sample = sample(line)?;
        let base = ["_bucket", "_sum", "_count"]
            .into_iter()
            .find_map(|suffix| sample.name.strip_suffix(suffix));
        let of_histogram = base.filter(|base| {
            metrics
                .get(*base)
                .is_some_and(|metric| metric.kind == "histogram")
        });
        let name = of_histogram.unwrap_or(&sample.name).to_owned();
        metrics
            .get_mut(&name)
            .context("a sample without a type")?
            .samples
            .push(sample);
    }
    Ok(())
}

fn sample(line: &str) -> Result<Sample> {
    let (series, value) = line.rsplit_once(' ').context("no value")?;
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (
            name,
            parse_labels(labels.strip_suffix('}').context("labels without an end")?)?,
        ),
        None => (series, BTreeMap::new()),
    };
    let value = if value == "+Inf" {
        f64::INFINITY
    } else {
        value.parse().context("no number")?
    };
    Ok(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

fn parse_labels(mut text: &str) -> Result<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    while !text.is_empty() {
        let (name, rest) = text.split_once("=\"").context("a label without a value")?;
        let mut value = String::new();
        let mut chars = rest.char_indices();
        let end = loop {
            match chars.next().context("a label's value without an end")?.1 {
                '"' => break chars.offset(),
                '\\' => value.push(match chars.next().context("nothing is escaped")?.1 {
                    'n' => '\n',
                    quoted @ ('"' | '\\') => quoted,
                    other => bail!("\\{other} is no escape"),
                }),
                other => value.push(other),
            }
        };
        ensure!(
            labels.insert(name.to_owned(), value).is_none(),
            "label {name} comes twice"
        );
        let rest = &rest[end..];
        text = rest.strip_prefix(',').unwrap_or(rest);
        ensure!(
            rest.is_empty() || rest.len() > text.len(),
            "no comma between labels"
        );
    }
    Ok(labels)
}

/// Returns faults in names, units, help and histograms. `exempt` are metrics with names from other
/// projects.
pub fn lint(metrics: &Exposition, exempt: &[&str]) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, metric) in metrics {
        let mut fault = |what: &str| faults.push(format!("{name}: {what}"));
        if metric.help.trim().len() < 10 {
            fault("no help");
        }
        if metric.kind.is_empty() {
            fault("no type");
        }
        if !is_name(name) {
            fault("not in snake case");
        }
        let is_total = name.ends_with("_total");
        if !exempt.contains(&name.as_str()) && is_total != (metric.kind == "counter") {
            fault("counters, and only they, end in _total");
        }
        for unit in [
            "milliseconds",
            "ms",
            "microseconds",
            "minutes",
            "kilobytes",
            "percent",
        ] {
            if name.split('_').any(|word| word == unit) {
                fault("not in a base unit");
            }
        }
        if ["_count", "_sum", "_bucket"]
            .iter()
            .any(|suffix| name.ends_with(suffix))
        {
            fault("ends as a part of a histogram does");
        }
        let mut seen = BTreeSet::new();
        for sample in &metric.samples {
            if !seen.insert((&sample.name, &sample.labels)) {
                fault("a series comes twice");
            }
            if !sample
                .labels
                .keys()
                .all(|label| is_name(label) && !label.starts_with("__"))
            {
                fault("a label's name");
            }
            if metric.kind != "histogram"
                && ["le", "quantile"]
                    .iter()
                    .any(|label| sample.labels.contains_key(*label))
            {
                fault("a label of histograms");
            }
            if metric.kind == "counter" && sample.value < 0.0 {
                fault("a counter below zero");
            }
        }
        if metric.kind == "histogram" {
            faults.extend(
                histogram_faults(metric)
                    .into_iter()
                    .map(|what| format!("{name}: {what}")),
            );
        }
    }
    faults
}

fn histogram_faults(metric: &Metric) -> Vec<&'static str> {
    let mut faults = Vec::new();
    let mut series: BTreeMap<_, [Vec<(f64, f64)>; 3]> = BTreeMap::new();
    for sample in &metric.samples {
        let mut labels = sample.labels.clone();
        let bound = labels.remove("le").map_or(Some(f64::NAN), |le| {
            if le == "+Inf" {
                Some(f64::INFINITY)
            } else {
                le.parse().ok()
            }
        });
        let Some(bound) = bound else {
            faults.push("a bucket whose bound is not a number");
            continue;
        };
        let part = ["_bucket", "_sum", "_count"]
            .iter()
            .position(|suffix| sample.name.ends_with(suffix));
        series.entry(labels).or_default()[part.unwrap_or(0)].push((bound, sample.value));
    }
    for [buckets, sum, count] in series.into_values() {
        if sum.len() != 1 || count.len() != 1 {
            faults.push("not one _sum and one _count");
        }
        if !buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1) {
            faults.push("buckets do not grow");
        }
        let last = buckets.last().copied();
        if last.is_none_or(|(bound, of)| {
            bound != f64::INFINITY || Some(&of) != count.first().map(|(_, count)| count)
        }) {
            faults.push("no bucket +Inf that has them all");
        }
    }
    faults
}

fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes
        .next()
        .is_some_and(|byte| byte.is_ascii_lowercase() || byte == b'_')
        && bytes.all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parser_reads_well_formed_text() {
        let text = "# HELP a_total What a is for.\n# TYPE a_total counter\na_total{x=\"1,\\\"}\\n\",y=\"\"} 3\n";
        let metrics = parse(text).unwrap();
        let labels = BTreeMap::from([
            ("x".to_owned(), "1,\"}\n".to_owned()),
            ("y".to_owned(), String::new()),
        ]);
        assert_eq!(
            metrics["a_total"].samples,
            [Sample {
                name: "a_total".to_owned(),
                labels,
                value: 3.0
            }]
        );
        assert_eq!(lint(&metrics, &[]), [""; 0]);
    }

    #[test]
    fn parser_finds_every_fault() {
        let cases = [
            ("a 1", "a sample without a type"),
            ("# TYPE a numbers", "no such type"),
            ("# TYPE a gauge\na x", "no number: invalid float literal"),
            (
                "# TYPE a gauge\na{b=\"1\"c=\"2\"} 1",
                "no comma between labels",
            ),
            (
                "# TYPE a gauge\na{b=\"1\",b=\"2\"} 1",
                "label b comes twice",
            ),
            (
                "# TYPE a gauge\na 1\n# TYPE a gauge",
                "the type comes twice or late",
            ),
        ];
        for (text, want) in cases {
            let error = format!("{:#}", parse(&format!("{text}\n")).unwrap_err());
            assert!(error.ends_with(want), "{text}: {error}");
        }
        let cases = [
            ("# TYPE a_total counter\na_total 1", "a_total: no help"),
            (
                "# HELP a Something of a.\n# TYPE a counter\na 1",
                "a: counters, and only they, end in _total",
            ),
            (
                "# HELP a_total Something of a.\n# TYPE a_total gauge\na_total 1",
                "a_total: counters, and only they, end in _total",
            ),
            (
                "# HELP a_ms Something of a.\n# TYPE a_ms gauge\na_ms 1",
                "a_ms: not in a base unit",
            ),
            (
                "# HELP a Something of a.\n# TYPE a gauge\na 1\na 1",
                "a: a series comes twice",
            ),
            (
                "# HELP a Something of a.\n# TYPE a gauge\na{le=\"1\"} 1",
                "a: a label of histograms",
            ),
            (
                "# HELP a Something of a.\n# TYPE a histogram\na_sum 1\na_count 1\na_bucket{le=\"1\"} 1",
                "a: no bucket +Inf that has them all",
            ),
            (
                "# HELP a Something of a.\n# TYPE a histogram\na_sum 1\na_bucket{le=\"+Inf\"} 1",
                "a: not one _sum and one _count",
            ),
            (
                "# HELP a Something of a.\n# TYPE a histogram\na_sum 1\na_count 1\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1",
                "a: buckets do not grow",
            ),
        ];
        for (text, want) in cases {
            let faults = lint(&parse(&format!("{text}\n")).unwrap(), &[]);
            assert!(faults.contains(&want.to_owned()), "{text}: {faults:?}");
        }
    }
}
