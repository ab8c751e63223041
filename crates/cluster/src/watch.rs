//! Follows the answers of all nodes: prints new, changed and removed rows.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Write, stderr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Error, Result};
use clap::Args;
use comfy_table::Cell;
use jiff::Timestamp;
use proxy_view::list::{Listed, follow};
use proxy_view::output::{Kind, Narrow, cell};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::answers::{Answers, ask, name_failed};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;

/// Time between two reads. Each read runs `kpx` in the pod of every node.
const PERIOD: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
pub(crate) struct WatchArgs {
    /// After the list, print each row that is new, changed or gone, until stopped. Each node has
    /// rows of its own, and is asked every five seconds.
    #[arg(long, short)]
    pub(crate) watch: bool,
}

/// An object as one node reports it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct OfNode<T> {
    node: String,
    #[serde(flatten)]
    object: T,
}

impl<T: Listed> Listed for OfNode<T> {
    const TELLS_GONE: bool = T::TELLS_GONE;
    const NO_NEWS: &'static [&'static str] = T::NO_NEWS;
    const NARROW: Narrow<'static> = T::NARROW;

    fn header(wide: bool) -> Vec<&'static str> {
        [vec!["NODE"], T::header(wide)].concat()
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        [cell(&self.node)]
            .into_iter()
            .chain(self.object.cells(wide))
            .collect()
    }

    fn time(&self) -> Option<Timestamp> {
        self.object.time()
    }

    fn key(&self) -> String {
        format!("{} {}", self.node, self.object.key())
    }

    fn name(&self) -> String {
        self.object.name()
    }
}

/// Reads all nodes periodically, and prints the changes of their objects. A node that fails keeps
/// its rows; its failure and its recovery are each reported once on standard error.
pub(crate) async fn watch<A, T>(
    connect: &ConnectArgs,
    kind: Kind,
    arguments: &[String],
    objects: impl Fn(A) -> Vec<T>,
) -> Result<ExitCode>
where
    A: DeserializeOwned,
    T: Listed + Clone,
{
    let mut cluster = Cluster::find(connect).await?;
    let mut known = Known {
        rows: BTreeMap::new(),
        failed: BTreeSet::new(),
    };
    let read = async |is_first: bool| {
        // Pods change. If the API server fails, the last list of pods is used.
        if !is_first && let Ok(found) = Cluster::find(connect).await {
            cluster = found;
        }
        let Answers(asked) = ask::<A>(&cluster, connect, arguments).await;
        let all = asked.len();
        let Taken {
            mut rows,
            failed,
            back,
        } = known.take(
            asked
                .into_iter()
                .map(|asked| (asked.at.node, asked.answer.map(&objects))),
        );
        name_failed(
            all,
            &failed
                .iter()
                .map(|(node, error)| (node.as_str(), error))
                .collect::<Vec<_>>(),
        );
        for node in back {
            // A closed standard error leaves no place to report a failure.
            let _written = writeln!(stderr(), "{node} answers again");
        }
        rows.sort_by_key(Listed::time);
        Ok(rows)
    };
    follow(kind, PERIOD, read).await?;
    Ok(ExitCode::SUCCESS)
}

struct Known<T> {
    rows: BTreeMap<String, Vec<T>>,
    failed: BTreeSet<String>,
}

/// The rows of all nodes, and the nodes that failed or recovered in the last read.
struct Taken<T> {
    rows: Vec<OfNode<T>>,
    failed: Vec<(String, Error)>,
    back: Vec<String>,
}

impl<T: Clone> Known<T> {
    /// Stores the answers of all nodes, and returns the changes.
    fn take(&mut self, answers: impl Iterator<Item = (String, Result<Vec<T>>)>) -> Taken<T> {
        let mut before = std::mem::take(&mut self.rows);
        let failed_before = std::mem::take(&mut self.failed);
        let mut news = Vec::new();
        let mut back = Vec::new();
        for (node, answer) in answers {
            match answer {
                Ok(objects) => {
                    back.extend(failed_before.get(&node).cloned());
                    self.rows.insert(node, objects);
                }
                Err(error) => {
                    self.rows.extend(before.remove_entry(&node));
                    self.failed.insert(node.clone());
                    if !failed_before.contains(&node) {
                        news.push((node, error));
                    }
                }
            }
        }
        let rows = self.rows.iter().flat_map(|(node, objects)| {
            objects.iter().map(|object| OfNode {
                node: node.clone(),
                object: object.clone(),
            })
        });
        Taken {
            rows: rows.collect(),
            failed: news,
            back,
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn node_that_fails_keeps_its_rows_and_is_named_once_as_when_it_is_back() {
        let mut known = Known {
            rows: BTreeMap::new(),
            failed: BTreeSet::new(),
        };
        let mut take = |answers: &[(&str, Option<&'static str>)]| {
            let answers = answers.iter().map(|(node, answer)| {
                (
                    (*node).to_owned(),
                    answer.map(|one| vec![one]).ok_or(anyhow!("away")),
                )
            });
            let Taken { rows, failed, back } = known.take(answers);
            let rows: Vec<_> = rows
                .iter()
                .map(|row| format!("{} {}", row.node, row.object))
                .collect();
            let failed: Vec<_> = failed.into_iter().map(|(node, _)| node).collect();
            format!(
                "{}; failed: {}; back: {}",
                rows.join(", "),
                failed.join(" "),
                back.join(" ")
            )
        };
        assert_eq!(
            take(&[("n1", Some("a")), ("n2", None)]),
            "n1 a; failed: n2; back: "
        );
        assert_eq!(
            take(&[("n1", None), ("n2", None)]),
            "n1 a; failed: n1; back: "
        );
        assert_eq!(
            take(&[("n1", None), ("n2", Some("b"))]),
            "n1 a, n2 b; failed: ; back: n2"
        );
        assert_eq!(
            take(&[("n2", Some("c"))]),
            "n2 c; failed: ; back: ",
            "n1 has left the cluster"
        );
    }
}
