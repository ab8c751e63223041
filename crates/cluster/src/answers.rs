//! Runs a command on all nodes concurrently, and reports the nodes that fail.

use std::io::{Write, stderr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::{Stream, StreamExt, stream};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::connect::ConnectArgs;
use crate::exec::{self, Answer};
use crate::pods::{Cluster, NodePod};
use proxy_view::output::{Form, OutputArgs, escaped};

/// Time limit for a node's answer in seconds.
const TIMEOUT: u64 = 20;
/// Maximum size of a node's answer in bytes.
pub(crate) const LONGEST: u64 = 16 << 20;

/// The answer of a node, or its error.
pub(crate) struct Asked<T> {
    pub(crate) at: NodePod,
    pub(crate) answer: Result<T>,
    /// The answer as JSON; null if the node failed.
    data: Value,
    /// The exit status and the standard error of kpx on that node.
    code: Option<i32>,
    stderr: String,
}

pub(crate) struct Answers<T>(pub(crate) Vec<Asked<T>>);

/// A node in the form of `--output json`. Fields may be added, and no field is renamed or removed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeAnswer<'a> {
    node: &'a str,
    pod: &'a str,
    /// The output of `kpx … -o json`; null if the node failed.
    answer: Option<&'a Value>,
    exit_code: Option<i32>,
    /// The error; null if the node answered.
    error: Option<String>,
    stderr: &'a str,
}

/// Runs a kpx command on all nodes, a limited number at a time. Yields answers in the order of
/// completion.
pub(crate) fn run_all<'a>(
    cluster: &'a Cluster,
    args: &ConnectArgs,
    arguments: &'a [String],
    limit: Duration,
    longest: u64,
) -> impl Stream<Item = (NodePod, Result<Answer>)> + 'a {
    let runs = cluster.nodes.iter().map(move |at| async move {
        let answer = exec::run(&cluster.client, at, arguments, limit, longest).await;
        (at.clone(), answer)
    });
    stream::iter(runs).buffer_unordered(args.parallel())
}

/// Runs `kpx ARGUMENTS -o json` on all nodes.
pub(crate) async fn ask<T: DeserializeOwned>(
    cluster: &Cluster,
    args: &ConnectArgs,
    arguments: &[String],
) -> Answers<T> {
    let arguments: Vec<_> = arguments
        .iter()
        .cloned()
        .chain(["--output=json".to_owned()])
        .collect();
    let mut answers: Vec<_> = run_all(cluster, args, &arguments, args.timeout(TIMEOUT), LONGEST)
        .collect()
        .await;
    answers.sort_by(|(a, _), (b, _)| a.node.cmp(&b.node));
    Answers(
        answers
            .into_iter()
            .map(|(at, answer)| Asked::new(at, answer))
            .collect(),
    )
}

impl<T: DeserializeOwned> Asked<T> {
    fn new(at: NodePod, answer: Result<Answer>) -> Self {
        let none = |at, error| Self {
            at,
            answer: Err(error),
            data: Value::Null,
            code: None,
            stderr: String::new(),
        };
        let Answer {
            code,
            stdout,
            stderr,
        } = match answer {
            Ok(answer) => answer,
            Err(error) => return none(at, error),
        };
        let (data, answer) = match value(code, &stdout, &stderr) {
            Ok(data) => (
                data.clone(),
                serde_json::from_value(data).context("this node runs another version of kpx"),
            ),
            Err(error) => (Value::Null, Err(error)),
        };
        Self {
            at,
            answer,
            data,
            code: Some(code),
            stderr,
        }
    }
}

/// Parses the output. The exit status alone is not an error: `kpx status` prints its data and fails
/// on an unhealthy node.
fn value(code: i32, stdout: &[u8], stderr: &str) -> Result<Value> {
    if code != 0 && stdout.is_empty() {
        let words = stderr.trim().trim_start_matches("kpx: ");
        anyhow::bail!(
            "{}",
            if words.is_empty() {
                format!("kpx ended with {code}")
            } else {
                words.to_owned()
            }
        );
    }
    serde_json::from_slice(stdout).context("this node's kpx answers in an unknown form")
}

impl<'a> NodeAnswer<'a> {
    fn of<T>(asked: &'a Asked<T>) -> Self {
        Self {
            node: &asked.at.node,
            pod: &asked.at.pod,
            answer: Some(&asked.data).filter(|data| !data.is_null()),
            exit_code: asked.code,
            error: asked
                .answer
                .as_ref()
                .err()
                .map(|error| format!("{error:#}")),
            stderr: &asked.stderr,
        }
    }
}

impl<T> Answers<T> {
    /// Prints the answers as data (an object per node), or as the text that `text` returns;
    /// `nothing` is the message for an empty text. Returns the exit status.
    pub(crate) fn print(
        &self,
        output: &OutputArgs,
        nothing: &str,
        text: impl FnOnce(Form) -> String,
    ) -> Result<ExitCode> {
        let data: Vec<_> = self.0.iter().map(NodeAnswer::of).collect();
        output.print_list(&data, nothing, text)?;
        self.report_words();
        self.end()
    }

    pub(crate) fn answered(&self) -> impl Iterator<Item = (&str, &T)> {
        self.0
            .iter()
            .filter_map(|asked| Some((asked.at.node.as_str(), asked.answer.as_ref().ok()?)))
    }

    /// Prints the standard error of the nodes that answered.
    fn report_words(&self) {
        for asked in self.0.iter().filter(|asked| asked.answer.is_ok()) {
            let words = escaped(asked.stderr.trim());
            let text: String = words
                .lines()
                .map(|line| format!("{}: {line}\n", asked.at.node))
                .collect();
            // A closed standard error leaves no place to report a failure.
            let _written = stderr().write_all(text.as_bytes());
        }
    }

    /// Reports the nodes that failed, and returns the exit status.
    pub(crate) fn end(&self) -> Result<ExitCode> {
        ensure!(!self.0.is_empty(), "no node was selected");
        let failed: Vec<_> = self
            .0
            .iter()
            .filter_map(|asked| Some((asked.at.node.as_str(), asked.answer.as_ref().err()?)))
            .collect();
        name_failed(self.0.len(), &failed);
        let well = self
            .0
            .iter()
            .all(|asked| asked.code == Some(0) && asked.answer.is_ok());
        Ok(if well {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

impl<T: DeserializeOwned> Answers<Vec<T>> {
    /// Keeps the objects that `wants` accepts, in the parsed answers and in their JSON.
    pub(crate) fn retain(&mut self, wants: impl Fn(&T) -> bool) {
        let is_wanted =
            |data: &Value| serde_json::from_value(data.clone()).is_ok_and(|object| wants(&object));
        for asked in &mut self.0 {
            if let Ok(objects) = &mut asked.answer {
                objects.retain(&wants);
                asked
                    .data
                    .as_array_mut()
                    .into_iter()
                    .for_each(|data| data.retain(is_wanted));
            }
        }
    }
}

pub(crate) fn name_failed(all: usize, failed: &[(&str, &anyhow::Error)]) {
    if failed.is_empty() {
        return;
    }
    let mut text = format!("{} of {all} nodes did not answer:\n", failed.len());
    for (node, error) in failed {
        text += &format!(
            "  {node}: {}\n",
            escaped(&format!("{error:#}")).replace('\n', " ")
        );
    }
    // A closed standard error leaves no place to report a failure.
    let _written = stderr().write_all(text.as_bytes());
}

#[cfg(test)]
impl<T> Answers<T> {
    pub(crate) fn of(answers: impl IntoIterator<Item = (&'static str, T)>) -> Self {
        let asked = |(node, answer): (&str, T)| Asked {
            at: NodePod {
                node: node.to_owned(),
                namespace: "kube-system".to_owned(),
                pod: format!("kpx-{node}"),
                container: None,
                image: None,
                absent: None,
            },
            answer: Ok(answer),
            data: Value::Null,
            code: Some(0),
            stderr: String::new(),
        };
        Self(answers.into_iter().map(asked).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_command_that_failed_are_the_reason() {
        assert_eq!(
            value(1, b"{\"healthy\": false}", "").unwrap()["healthy"],
            false
        );
        assert_eq!(
            value(1, b"", "kpx: no kpx answers\n")
                .unwrap_err()
                .to_string(),
            "no kpx answers"
        );
        assert_eq!(
            value(137, b"", "").unwrap_err().to_string(),
            "kpx ended with 137"
        );
        assert!(value(0, b"<html>", "").is_err());
    }
}
