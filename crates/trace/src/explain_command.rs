//! `kpx explain`.

use std::fmt::Write;

use anyhow::Result;
use clap::Args;
use proxy_common::counter::Reason;
use serde::Serialize;

use crate::explain::{explain as meaning, remedy};
use proxy_view::output::{Form, OutputArgs, cell};
use proxy_view::reason_parser;

/// Explain a reason for untranslated packets, with a fix.
///
/// `kpx status`, `kpx monitor`, `kpx trace` and the metrics show reasons. Without a reason, lists
/// them all.
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// Reason, such as no_endpoints.
    #[arg(value_name = "REASON", value_parser = reason_parser(), hide_possible_values = true)]
    reason: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

/// A reason in the form of `--output json`. Fields may be added, and no field is renamed or
/// removed.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Explanation {
    reason: &'static str,
    /// The verdict: `pass`, `drop` or `reject`.
    verdict: &'static str,
    meaning: &'static str,
    /// The next steps, a sentence each; empty if nothing is wrong.
    remedy: &'static [&'static str],
}

pub fn explain(args: &ExplainArgs) -> Result<()> {
    let is_asked = |reason: &Reason| {
        args.reason
            .as_ref()
            .is_none_or(|name| reason.name() == name)
    };
    let explanations: Vec<_> = Reason::ALL
        .into_iter()
        .filter(is_asked)
        .map(Explanation::of)
        .collect();
    args.output
        .print(&explanations, |form| match &explanations[..] {
            [one] => one.text(),
            all => table(all, form),
        })
}

impl Explanation {
    fn of(reason: Reason) -> Self {
        Self {
            reason: reason.name(),
            verdict: reason.verdict().name(),
            meaning: meaning(reason),
            remedy: remedy(reason),
        }
    }

    fn text(&self) -> String {
        let mut text = format!(
            "{}: the packet is {}.\n  {}\n",
            self.reason,
            past(self.verdict),
            self.meaning
        );
        if !self.remedy.is_empty() {
            text.push_str("What to do:\n");
        }
        for step in self.remedy {
            let _ = writeln!(text, "  {step}");
        }
        text
    }
}

fn past(verdict: &str) -> &'static str {
    match verdict {
        "drop" => "dropped without an answer",
        "reject" => "answered with a TCP RST or an ICMP port unreachable",
        _ => "left as it is",
    }
}

fn table(all: &[Explanation], form: Form) -> String {
    form.sentences(
        &["REASON", "VERDICT", "MEANING"],
        all.iter()
            .map(|one| [one.reason, one.verdict, one.meaning].map(cell).into()),
    )
}

#[cfg(test)]
mod tests {
    use proxy_common::counter::Verdict;

    use super::*;

    #[test]
    fn reason_of_refused_packet_has_a_next_step() {
        for reason in Reason::ALL
            .into_iter()
            .filter(|reason| reason.verdict() != Verdict::Pass)
        {
            let Explanation {
                meaning, remedy, ..
            } = Explanation::of(reason);
            assert!(
                !meaning.is_empty() && !remedy.is_empty(),
                "{}",
                reason.name()
            );
            assert!(
                remedy
                    .iter()
                    .all(|step| step.ends_with('.') && step.len() < 110),
                "{remedy:?}"
            );
        }
        let text = Explanation::of(Reason::Unallocated).text();
        let [first, second, third, last] = &text.lines().collect::<Vec<_>>()[..] else {
            panic!("{text}")
        };
        assert_eq!(
            *first,
            "unallocated: the packet is dropped without an answer."
        );
        assert_eq!(*second, "  an address of a ServiceCIDR that no service has");
        assert_eq!(*third, "What to do:");
        assert!(
            last.starts_with("  The client uses an old address"),
            "{last}"
        );
    }
}
