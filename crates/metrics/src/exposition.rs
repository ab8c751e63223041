//! Prometheus' text format 0.0.4. The encoder writes OpenMetrics, which names counters and formats
//! numbers differently; kube-proxy's dashboards expect the older form.

use std::fmt;

use prometheus_client::encoding::text::encode_registry;
use prometheus_client::registry::Registry;

/// The media type of [`text`].
pub const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) fn text(registries: &[&Registry]) -> Result<String, fmt::Error> {
    let mut open_metrics = String::new();
    registries
        .iter()
        .try_for_each(|registry| encode_registry(&mut open_metrics, registry))?;
    Ok(translate(&open_metrics))
}

fn translate(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            // The name depends on the type, which stands in the next line.
            help = described.split_once(' ');
        } else if let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|typed| typed.split_once(' '))
        {
            // OpenMetrics appends a counter's suffix to samples only.
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some((_, about)) = help.take() {
                text += &format!("# HELP {name}{suffix} {about}\n");
            }
            text += &format!("# TYPE {name}{suffix} {kind}\n");
        } else if !line.starts_with('#') {
            text += &whole_numbers(line);
            text.push('\n');
        }
    }
    text
}

/// Formats integral bucket bounds without a fraction, as Go does, because queries match them as
/// text.
fn whole_numbers(sample: &str) -> String {
    const BOUND: &str = "_bucket{le=\"";
    let bound = sample
        .split_once(BOUND)
        .and_then(|(name, rest)| Some((name, rest.split_once('"')?)));
    match bound {
        Some((name, (bound, rest))) => format!(
            "{name}{BOUND}{}\"{rest}",
            bound.strip_suffix(".0").unwrap_or(bound)
        ),
        None => sample.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_the_counters_names_and_bounds_in_gos_form() {
        let open_metrics = "\
# HELP sheep Counted.
# TYPE sheep counter
sheep_total{version=\"1.0\"} 7
# HELP hours Slept.
# TYPE hours histogram
# UNIT hours hours
hours_sum 9.0
hours_count 1
hours_bucket{le=\"8.0\",who=\"2.0\"} 0
hours_bucket{le=\"9.5\",who=\"2.0\"} 1
hours_bucket{le=\"+Inf\",who=\"2.0\"} 1
";
        let text = translate(open_metrics);
        assert_eq!(
            text,
            "\
# HELP sheep_total Counted.
# TYPE sheep_total counter
sheep_total{version=\"1.0\"} 7
# HELP hours Slept.
# TYPE hours histogram
hours_sum 9.0
hours_count 1
hours_bucket{le=\"8\",who=\"2.0\"} 0
hours_bucket{le=\"9.5\",who=\"2.0\"} 1
hours_bucket{le=\"+Inf\",who=\"2.0\"} 1
"
        );
    }
}
