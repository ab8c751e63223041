//! Follows the answers of all nodes: each row that is new, changed or gone.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Error, Result};
use clap::Args;
use comfy_table::Cell;
use proxy_view::list::{Listed, follow};
use proxy_view::output::{Kind, cell};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::answers::{Answers, ask, name_failed};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;

/// The time between two questions. Each one runs `kpx` in the pod of every node.
const PERIOD: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
pub(crate) struct WatchArgs {
    /// After the list, print each row that is new, changed or gone, until stopped. Each node has rows of its own, and is asked every five seconds.
    #[arg(long, short)]
    pub(crate) watch: bool,
}

/// An object as one node has it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct OfNode<T> {
    node: String,
    #[serde(flatten)]
    object: T,
}

impl<T: Listed> Listed for OfNode<T> {
    fn header(wide: bool) -> Vec<&'static str> {
        [vec!["NODE"], T::header(wide)].concat()
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        [cell(&self.node)].into_iter().chain(self.object.cells(wide)).collect()
    }

    fn key(&self) -> String {
        format!("{} {}", self.node, self.object.key())
    }

    fn name(&self) -> String {
        self.object.name()
    }
}

/// Asks all nodes again and again, and prints what has changed. A node that fails keeps its rows, and is named on standard error once.
pub(crate) async fn watch<T>(
    connect: &ConnectArgs,
    kind: Kind,
    arguments: &[String],
    wants: impl Fn(&T) -> bool,
) -> Result<ExitCode>
where
    T: Listed + Clone + DeserializeOwned,
{
    let mut cluster = Cluster::find(connect).await?;
    let mut known = Known { rows: BTreeMap::new(), failed: BTreeSet::new() };
    let read = async |is_first: bool| {
        // Pods come and go. Without an answer the last list counts.
        if !is_first && let Ok(found) = Cluster::find(connect).await {
            cluster = found;
        }
        let Answers(asked) = ask::<Vec<T>>(&cluster, connect, arguments).await;
        let all = asked.len();
        let (rows, failed) = known.take(asked.into_iter().map(|asked| {
            let answer = asked.answer.map(|objects| objects.into_iter().filter(|object| wants(object)).collect());
            (asked.at.node, answer)
        }));
        name_failed(all, &failed.iter().map(|(node, error)| (node.as_str(), error)).collect::<Vec<_>>());
        Ok(rows)
    };
    follow(kind, Some(PERIOD), read).await?;
    Ok(ExitCode::SUCCESS)
}

/// What the nodes answered last.
struct Known<T> {
    rows: BTreeMap<String, Vec<T>>,
    failed: BTreeSet<String>,
}

impl<T: Clone> Known<T> {
    /// Takes the answers of all nodes. Returns the rows, and the nodes that answered before and do not now.
    fn take(
        &mut self,
        answers: impl Iterator<Item = (String, Result<Vec<T>>)>,
    ) -> (Vec<OfNode<T>>, Vec<(String, Error)>) {
        let mut before = std::mem::take(&mut self.rows);
        let failed_before = std::mem::take(&mut self.failed);
        let mut news = Vec::new();
        for (node, answer) in answers {
            match answer {
                Ok(objects) => drop(self.rows.insert(node, objects)),
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
            objects.iter().map(|object| OfNode { node: node.clone(), object: object.clone() })
        });
        (rows.collect(), news)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn node_that_fails_keeps_its_rows_and_is_named_once() {
        let mut known = Known { rows: BTreeMap::new(), failed: BTreeSet::new() };
        let mut take = |answers: &[(&str, Option<&'static str>)]| {
            let answers = answers
                .iter()
                .map(|(node, answer)| ((*node).to_owned(), answer.map(|one| vec![one]).ok_or(anyhow!("away"))));
            let (rows, failed) = known.take(answers);
            let rows: Vec<_> = rows.iter().map(|row| format!("{} {}", row.node, row.object)).collect();
            (rows.join(", "), failed.into_iter().map(|(node, _)| node).collect::<Vec<_>>())
        };
        let none = Vec::<String>::new();
        assert_eq!(take(&[("n1", Some("a")), ("n2", None)]), ("n1 a".to_owned(), vec!["n2".to_owned()]));
        assert_eq!(take(&[("n1", None), ("n2", None)]), ("n1 a".to_owned(), vec!["n1".to_owned()]));
        assert_eq!(take(&[("n1", None), ("n2", Some("b"))]), ("n1 a, n2 b".to_owned(), none.clone()));
        assert_eq!(take(&[("n2", Some("c"))]), ("n2 c".to_owned(), none), "n1 has left the cluster");
    }
}
