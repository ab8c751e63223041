//! The answers of a run, and their differences with another proxy's.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::ask::NOT_PERMITTED;

/// A client's question to a frontend of a Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Question {
    pub(crate) service: String,
    pub(crate) frontend: String,
    pub(crate) client: String,
    /// `tcp4` and the like.
    pub(crate) protocol: String,
}

/// The answers by question.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Vec<(Question, String)>", into = "Vec<(Question, String)>")]
pub(crate) struct Answers(BTreeMap<Question, String>);

/// The differences with another proxy.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Differences {
    /// The number of those that the documentation explains, by its words.
    pub(crate) documented: BTreeMap<&'static str, usize>,
    /// The others, a line for all protocols with the same.
    pub(crate) unexplained: Vec<String>,
}

impl From<Vec<(Question, String)>> for Answers {
    fn from(all: Vec<(Question, String)>) -> Self {
        Self(all.into_iter().collect())
    }
}

impl From<Answers> for Vec<(Question, String)> {
    fn from(answers: Answers) -> Self {
        answers.0.into_iter().collect()
    }
}

impl Answers {
    pub(crate) fn text(&self) -> String {
        let answers = self
            .0
            .iter()
            .map(|(question, answer)| (question, answer.clone()));
        lines(answers).join("\n") + "\n"
    }

    /// Counts the answers by their first word.
    pub(crate) fn summary(&self) -> String {
        let mut counts = BTreeMap::new();
        for answer in self.0.values() {
            let word = answer.split(' ').next().unwrap_or_default();
            *counts.entry(word).or_insert(0) += 1;
        }
        let mut text = format!("{} questions", self.0.len());
        for (word, count) in counts {
            let _ = write!(text, ", {count} x {word}");
        }
        text
    }

    /// Lists answers at ClusterIPs to pods that the network policy keeps out, and missing answers to
    /// the pod that it lets in. kube-router 2.1 fails to write IPv6 rules: they name sets that do not
    /// exist.
    pub(crate) fn broken_policies(&self) -> Vec<String> {
        let broken = self.0.iter().filter(|(question, answer)| {
            let answered = answer.starts_with("answer");
            question.service.starts_with("policy")
                && question.frontend == "ClusterIP"
                && question.protocol.ends_with('4')
                && (question.client.starts_with("pod near") && !answered
                    || question.client.starts_with("pod far") && answered)
        });
        lines(broken.map(|(question, answer)| (question, format!("{answer}, against the policy"))))
    }

    /// Compares the answers of kpx with those of kube-proxy.
    pub(crate) fn against(&self, proxy: &str, others: &Self) -> Differences {
        let mut found = Differences::default();
        let mut unexplained = Vec::new();
        for (question, answer) in &self.0 {
            let Some(other) = others.0.get(question).filter(|other| *other != answer) else {
                continue;
            };
            match documented(question, answer, other) {
                Some(reason) => *found.documented.entry(reason).or_insert(0) += 1,
                None => unexplained.push((question, format!("{answer}; with {proxy} {other}"))),
            }
        }
        found.unexplained = lines(unexplained.into_iter());
        found
    }
}

/// Returns what docs/migration.md says about a difference with kube-proxy, in short.
fn documented(question: &Question, kpx: &str, kube_proxy: &str) -> Option<&'static str> {
    // "pod near of n1" is seen as "pod near".
    let is_client = |answer: &str| {
        let source = answer.strip_prefix("answer to ");
        source.is_some_and(|source| question.client.starts_with(source))
    };
    match (kpx, kube_proxy) {
        (kpx, kube_proxy) if is_client(kpx) && kube_proxy.starts_with("answer to ") => {
            Some("the backend sees the client where kube-proxy masquerades")
        }
        ("refusal" | "silence", NOT_PERMITTED) => {
            Some("the host's datagram is refused or lost where kube-proxy's rule ends it")
        }
        ("refusal", "silence") if question.protocol == "tcp6" => {
            Some("a connection over IPv6 is refused where kube-proxy's refusal has no effect")
        }
        _ => None,
    }
}

/// Returns a line for each answer, and one for protocols with the same.
fn lines<'a>(answers: impl Iterator<Item = (&'a Question, String)>) -> Vec<String> {
    let mut groups: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    for (question, answer) in answers {
        let Question {
            service,
            frontend,
            client,
            protocol,
        } = question;
        groups
            .entry((service, frontend, client, answer))
            .or_default()
            .push(protocol);
    }
    groups
        .into_iter()
        .map(|((service, frontend, client, answer), protocols)| {
            format!(
                "{service}, {frontend}, from {client}, {}: {answer}",
                protocols.join(" ")
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(all: &[(&str, &str, &str, &str, &str)]) -> Answers {
        let question =
            |(service, frontend, client, protocol, answer): &(&str, &str, &str, &str, &str)| {
                let question = Question {
                    service: (*service).to_owned(),
                    frontend: (*frontend).to_owned(),
                    client: (*client).to_owned(),
                    protocol: (*protocol).to_owned(),
                };
                (question, (*answer).to_owned())
            };
        all.iter().map(question).collect::<Vec<_>>().into()
    }

    #[test]
    fn difference_is_documented_or_unexplained() {
        let kpx = answers(&[
            ("local", "NodePort of n1", "x", "tcp4", "answer to x"),
            (
                "cluster",
                "NodePort of n1",
                "pod near of n1",
                "tcp4",
                "answer to pod near",
            ),
            ("none", "ClusterIP", "n1", "tcp4", "silence"),
            ("none", "ClusterIP", "n1", "udp4", "silence"),
            ("none", "ClusterIP", "n1", "tcp6", "refusal"),
            ("none", "ClusterIP", "n1", "udp6", "refusal"),
        ]);
        let others = answers(&[
            ("local", "NodePort of n1", "x", "tcp4", "answer to x"),
            (
                "cluster",
                "NodePort of n1",
                "pod near of n1",
                "tcp4",
                "answer to n1",
            ),
            ("none", "ClusterIP", "n1", "tcp4", "refusal"),
            ("none", "ClusterIP", "n1", "udp4", "refusal"),
            ("none", "ClusterIP", "n1", "tcp6", "silence"),
            ("none", "ClusterIP", "n1", "udp6", NOT_PERMITTED),
        ]);
        let found = kpx.against("kube-proxy", &others);
        assert_eq!(
            found.documented.values().copied().collect::<Vec<_>>(),
            [1, 1, 1]
        );
        assert_eq!(
            found.unexplained,
            ["none, ClusterIP, from n1, tcp4 udp4: silence; with kube-proxy refusal"]
        );
    }

    #[test]
    fn policy_is_broken_by_an_answer_to_a_pod_that_it_keeps_out() {
        let all = [
            (
                "policy",
                "ClusterIP",
                "pod far of n2",
                "tcp4",
                "answer to pod far",
            ),
            ("policy", "ClusterIP", "pod far of n2", "udp4", "refusal"),
            (
                "policy",
                "ClusterIP",
                "pod near of n1",
                "tcp4",
                "answer to pod near",
            ),
            ("policy", "ClusterIP", "pod near of n1", "udp4", "silence"),
            (
                "policy",
                "ClusterIP",
                "pod far of n2",
                "tcp6",
                "answer to pod far",
            ),
        ];
        assert_eq!(answers(&all).broken_policies().len(), 2);
    }
}
