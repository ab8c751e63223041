//! The table of a run: a row per case and kind of client.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use comfy_table::Cell;
use proxy_view::output::{Form, OutputArgs, cell, green, red, yellow};
use serde::Serialize;

use super::cases::{DENIED, DENIED_DIRECT, Dial, From, Plan};
use super::forwarding::{Forwarding, Sent};
use super::run::{Judged, decision, unreached};
use super::stage::Stage;

/// The maximum number of failures that a row shows.
const SHOWN: usize = 3;
/// The maximum number of requests for kpx's decision: each loads a copy of the programs.
const ASKED: usize = 8;

/// A case that was skipped.
#[derive(Clone, Debug)]
pub(super) struct LeftOut {
    pub(super) case: &'static str,
    pub(super) from: From,
    pub(super) why: String,
}

/// The result in the form of `--output json`. Fields may be added, and no field is renamed or
/// removed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    namespace: String,
    nodes: Vec<String>,
    passed: usize,
    failed: usize,
    left_out: usize,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    case: &'static str,
    /// The client: `pod`, `backend`, `node` or `outside`.
    from: &'static str,
    /// `passed`, `failed` or `leftOut`.
    result: &'static str,
    /// The number of dialled destinations; `right` counts destinations with the expected replies.
    dials: usize,
    right: usize,
    /// The reason why the case or a part of it was skipped.
    why: Option<String>,
    failures: Vec<Failure>,
    #[serde(skip)]
    first: Option<usize>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Failure {
    /// The sender's node; null for this process.
    pub(super) node: Option<String>,
    pub(super) protocol: String,
    pub(super) to: String,
    pub(super) expected: String,
    pub(super) got: String,
    /// kpx's decision for such a packet on the client's node; null if it was not requested.
    pub(super) kpx: Option<String>,
}

impl Report {
    pub(super) async fn of(
        stage: &Stage<'_>,
        mut plan: Plan,
        judged: Vec<Judged>,
        forwarding: Forwarding,
    ) -> Self {
        let mut results: Vec<(Dial, Judged)> = plan.dials.drain(..).zip(judged).collect();
        plan.leave_out_unenforced(&mut results);
        plan.leave_out_unreached(&mut results).await;
        let mut rows: BTreeMap<(usize, From), Row> = BTreeMap::new();
        let mut order: Vec<&'static str> = Vec::new();
        let place = |case: &'static str, order: &mut Vec<&'static str>| {
            order
                .iter()
                .position(|known| *known == case)
                .unwrap_or_else(|| {
                    order.push(case);
                    order.len() - 1
                })
        };
        for (index, (dial, judged)) in results.iter().enumerate() {
            let key = (place(dial.case, &mut order), dial.from);
            let row = rows
                .entry(key)
                .or_insert_with(|| Row::new(dial.case, dial.from));
            row.add(stage, index, dial, judged);
        }
        for Sent {
            case,
            from,
            failure,
        } in forwarding.sent
        {
            let row = rows
                .entry((place(case, &mut order), from))
                .or_insert_with(|| Row::new(case, from));
            row.count(failure);
        }
        let left_out = plan.left_out.into_iter().chain(forwarding.left_out);
        for LeftOut { case, from, why } in left_out {
            let row = rows
                .entry((place(case, &mut order), from))
                .or_insert_with(|| Row::new(case, from));
            row.why = Some(match row.why.take() {
                Some(others) => format!("{others}; {why}"),
                None => why,
            });
        }
        let mut rows: Vec<_> = rows.into_values().collect();
        for row in rows
            .iter_mut()
            .filter(|row| row.first.is_some())
            .take(ASKED)
        {
            let dial = row.first.map(|index| &results[index].0);
            if let (Some(dial), Some(failure)) = (dial, row.failures.first_mut()) {
                failure.kpx = decision(stage, dial).await;
            }
        }
        rows.iter_mut().for_each(Row::settle);
        let count = |result: &str| rows.iter().filter(|row| row.result == result).count();
        let passed = count("passed");
        let failed = count("failed");
        let left_out = count("leftOut");
        let nodes = stage.kpx.iter().map(|at| at.node.clone()).collect();
        Self {
            namespace: stage.namespace.clone(),
            nodes,
            passed,
            failed,
            left_out,
            rows,
        }
    }

    /// Prints the table or the data, and returns the exit status.
    pub(super) fn print(&self, output: &OutputArgs) -> Result<ExitCode> {
        output.print(self, |form| self.text(form))?;
        Ok(if self.failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    fn text(&self, form: Form) -> String {
        let mut text = form.table(
            &["CASE", "FROM", "RESULT", "RIGHT"],
            self.rows.iter().map(Row::cells),
        );
        let notes = self.rows.iter().filter_map(|row| {
            Some(vec![
                cell(format!("{}, {}", row.case, row.from)),
                cell(row.why.as_ref()?),
            ])
        });
        let notes = form.sentences(&["LEFT OUT", "WHY"], notes);
        if !notes.is_empty() {
            text += &format!("\n{notes}");
        }
        for row in self.rows.iter().filter(|row| row.result == "failed") {
            text += &format!(
                "\n{}, {}: {} of {} failed\n",
                row.case,
                row.from,
                row.failures.len(),
                row.dials
            );
            for failure in row.failures.iter().take(SHOWN) {
                text += &format!("  {failure}\n");
            }
        }
        text + &format!(
            "\n{} rows passed, {} failed, {} were left out, on {}\n",
            self.passed,
            self.failed,
            self.left_out,
            self.nodes.join(", ")
        )
    }
}

impl Plan {
    /// Skips the denied cases if the cluster does not enforce policies, which shows if the pods are
    /// reachable without a Service.
    fn leave_out_unenforced(&mut self, results: &mut Vec<(Dial, Judged)>) {
        let Some((dial, Err(got))) = results
            .iter()
            .find(|(dial, judged)| dial.case == DENIED_DIRECT && judged.is_err())
        else {
            return;
        };
        let why = format!(
            "not enforced: {} has {got} at a port that the policy closes",
            dial.target.to
        );
        results.retain(|(dial, _)| ![DENIED, DENIED_DIRECT].contains(&dial.case));
        for case in [DENIED_DIRECT, DENIED] {
            self.left_out.push(LeftOut {
                case,
                from: From::Pod,
                why: why.clone(),
            });
        }
    }

    /// Skips the failures from outside at addresses that this process does not reach at all.
    async fn leave_out_unreached(&mut self, results: &mut Vec<(Dial, Judged)>) {
        let failed = results
            .iter()
            .filter(|(dial, judged)| dial.from == From::Outside && judged.is_err());
        let failed: Vec<Dial> = failed.map(|(dial, _)| dial.clone()).collect();
        let unreached = unreached(&failed).await;
        results.retain(|(dial, judged)| {
            let unreached = dial.target.ip().filter(|ip| unreached.contains(ip));
            let (From::Outside, Some(ip), true) = (dial.from, unreached, judged.is_err()) else {
                return true;
            };
            let why = format!("{ip} does not answer here at the port of kpx's health either");
            self.left_out.push(LeftOut {
                case: dial.case,
                from: dial.from,
                why,
            });
            false
        });
    }
}

impl Row {
    fn new(case: &'static str, from: From) -> Self {
        Self {
            case,
            from: from.name(),
            result: "leftOut",
            dials: 0,
            right: 0,
            why: None,
            failures: Vec::new(),
            first: None,
        }
    }

    fn add(&mut self, stage: &Stage, index: usize, dial: &Dial, judged: &Judged) {
        if judged.is_err() {
            self.first.get_or_insert(index);
        }
        self.count(judged.as_ref().err().map(|got| Failure {
            node: dial.client.map(|client| stage.pods[client].node.clone()),
            protocol: dial.target.protocol.to_string(),
            to: dial.target.to.clone(),
            expected: dial.expect.to_string(),
            got: got.clone(),
            kpx: None,
        }));
    }

    fn count(&mut self, failure: Option<Failure>) {
        self.dials += 1;
        match failure {
            Some(failure) => self.failures.push(failure),
            None => self.right += 1,
        }
    }

    fn settle(&mut self) {
        self.result = match (self.dials, self.failures.len()) {
            (0, _) => "leftOut",
            (_, 0) => "passed",
            _ => "failed",
        };
    }

    fn cells(&self) -> Vec<Cell> {
        let result = match self.result {
            "passed" => green("passed"),
            "failed" => red("failed"),
            _ => yellow("left out"),
        };
        vec![
            cell(self.case),
            cell(self.from),
            result,
            cell(format!("{}/{}", self.right, self.dials)),
        ]
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            node,
            protocol,
            to,
            expected,
            got,
            kpx,
        } = self;
        let node = node.as_deref().unwrap_or("here");
        let escaped = proxy_view::output::escaped(got).replace('\n', " ");
        write!(f, "{node}: {protocol} {to}: {escaped}, not {expected}")?;
        match kpx {
            Some(kpx) => write!(
                f,
                "; kpx there: {}",
                proxy_view::output::escaped(kpx).replace('\n', " ")
            ),
            None => Ok(()),
        }
    }
}
