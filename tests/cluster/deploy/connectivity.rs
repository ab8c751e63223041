//! `kubectl kpx connectivity-test`, with pods on both nodes and real packets.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::agent::{DEADLINE, binary, wait_until};
use testbed::apiserver::{ApiServer, Options};
use testbed::lab::{EXTERNAL, Family, Lab};
use testbed::pod::Kubelets;

use crate::deploy::cluster::Cluster;
use crate::deploy::plugin::Nodes;

/// The port of the guarded pod that the test's policy closes, and the first node port of the API
/// server.
const CLOSED: u16 = 18_481;
const NODE_PORT: u16 = 30_000;

/// The time that a run may take. It waits for pods, asks each case of each client, and lets broken
/// cases run into their own time limits.
const RUN_DEADLINE: Duration = DEADLINE.saturating_mul(2);

/// The output and the exit status of a run.
struct Ended {
    status: ExitStatus,
    text: String,
    words: String,
}

impl Ended {
    fn report(&self) -> Result<Value> {
        serde_json::from_str(&self.text).with_context(|| format!("{}\n{}", self.text, self.words))
    }
}

/// A run whose pods the kubelets start and end.
struct Test<'a> {
    cluster: &'a Cluster,
    nodes: Nodes<'a>,
    kubelets: Kubelets<'a>,
}

impl Test<'_> {
    fn spawn(&self, arguments: &str) -> Result<Child> {
        let mut command = self
            .nodes
            .command(&format!("connectivity-test {arguments}"));
        let file = |name: &str| File::create(self.cluster.lab.dir().join(name));
        command.stdout(file("stdout")?).stderr(file("stderr")?);
        self.cluster.lab.fabric.ns.spawn(&mut command)
    }

    /// Plays the kubelets until the command ends.
    fn wait(&mut self, mut child: Child) -> Result<Ended> {
        let mut status = None;
        wait_until(RUN_DEADLINE, "the test ends", || {
            self.kubelets.sync(&self.cluster.api())?;
            status = child.try_wait()?;
            Ok(status.is_some())
        })?;
        self.kubelets.sync(&self.cluster.api())?;
        let read = |name: &str| fs::read_to_string(self.cluster.lab.dir().join(name));
        Ok(Ended {
            status: status.context("it has ended")?,
            text: read("stdout")?,
            words: read("stderr")?,
        })
    }

    fn run(&mut self, arguments: &str) -> Result<Ended> {
        let child = self.spawn(arguments)?;
        self.wait(child)
    }

    fn namespaces(&self) -> Vec<String> {
        let names = self.cluster.api().list("namespaces").into_iter();
        let names =
            names.filter_map(|namespace| Some(namespace["metadata"]["name"].as_str()?.to_owned()));
        names
            .filter(|name| name.starts_with("kpx-connectivity-"))
            .collect()
    }
}

/// Returns the results of rows by case and client.
fn results(report: &Value) -> BTreeMap<String, &str> {
    let rows = report["rows"].as_array().into_iter().flatten();
    let word = |row: &Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
    rows.map(|row| {
        (
            format!("{}, {}", word(row, "case"), word(row, "from")),
            row["result"].as_str().unwrap_or_default(),
        )
    })
    .collect()
}

#[test]
fn connectivity_test_passes_and_names_what_is_broken() -> Result<()> {
    let cluster = Cluster::start()?;
    let nodes = Nodes::start(&cluster)?;
    let kubelets = Kubelets::new(&cluster.lab, cluster.supplies(&[]));
    let mut test = Test {
        cluster: &cluster,
        nodes,
        kubelets,
    };
    works(&mut test)?;
    names_what_is_broken(&mut test)?;
    removes_all_after_a_signal(&mut test)
}

/// All rows pass under an enforced NetworkPolicy, and the run removes all of its objects.
fn works(test: &mut Test) -> Result<()> {
    let lab = &test.cluster.lab;
    lab.n1.host.ns.nft(&format!(
        "table inet netpol {{ chain forward {{
            type filter hook forward priority filter
            meta l4proto {{ tcp, udp }} th dport {CLOSED} drop
        }}
        }}"
    ))?;
    let flag = |flag: &str, nth: u8| {
        Family::ALL
            .map(|family| format!("--{flag} {}", EXTERNAL.host(nth).ip(family)))
            .join(" ")
    };
    let given = format!("{} {}", flag("load-balancer-ip", 7), flag("external-ip", 8));
    let ended = test.run(&format!("{given} --external-forwarding -o json"))?;
    let report = ended.report()?;
    ensure!(
        ended.status.success() && report["failed"] == 0,
        "{:#}\n{}",
        report,
        ended.words
    );
    let results = results(&report);
    let left_out: Vec<_> = results
        .iter()
        .filter(|(_, result)| **result == "leftOut")
        .map(|(row, _)| row.as_str())
        .collect();
    ensure!(
        left_out == ["ClusterIP by name, pod", "headless Service by name, pod"],
        "{left_out:?}"
    );
    for row in [
        "ClusterIP, the client itself, backend",
        "ClusterIP, all backends, node",
        "sessionAffinity ClientIP, pod",
        "internalTrafficPolicy Local, no local backend, pod",
        "NodePort of another node, node",
        "NodePort, outside",
        "externalTrafficPolicy Local, no local backend, outside",
        "LoadBalancer, outside",
        "ExternalIP, node",
        "NetworkPolicy: denied, pod",
        "external forwarding: node to node in IPIP, node",
        "external forwarding: answers with other sources, outside",
    ] {
        ensure!(results.get(row) == Some(&"passed"), "{row}: {results:#?}");
    }
    ensure!(
        test.namespaces().is_empty() && test.kubelets.running() == 0,
        "{:?} are left",
        test.namespaces()
    );
    Ok(())
}

/// Endpoints with a wrong port, an unenforced policy, and a broken network.
fn names_what_is_broken(test: &mut Test) -> Result<()> {
    let lab = &test.cluster.lab;
    lab.n1.host.ns.nft("delete table inet netpol")?;
    break_network(lab)?;
    test.kubelets.misdirected = Some(("second", 1));
    let ended = test.run("--keep --settle 1 --external-forwarding")?;
    let text = &ended.text;
    ensure!(ended.status.code() == Some(1), "{text}\n{}", ended.words);
    let failed: Vec<_> = text
        .lines()
        .filter(|line| line.contains(" failed "))
        .collect();
    let of = |line: &&str| {
        [
            line.split("   ").next().unwrap_or_default(),
            line.split_whitespace().rev().nth(2).unwrap_or_default(),
        ]
        .join(", ")
    };
    let mut failed: Vec<_> = failed
        .iter()
        .filter(|line| line.contains('/'))
        .map(of)
        .collect();
    failed.sort();
    let broken = [
        "ClusterIP, a backend of another node, node",
        "ClusterIP, a backend of another node, pod",
        "ClusterIP, a backend of the node, node",
        "ClusterIP, a backend of the node, pod",
        "ClusterIP, long messages, node",
        "ClusterIP, long messages, pod",
        "NodePort, outside",
        "external forwarding: answers with other sources, outside",
        "external forwarding: node to node in IPIP, node",
        "pod address, long messages, node",
        "pod address, long messages, pod",
    ];
    ensure!(failed == broken, "{failed:#?}\n{text}");
    let [n1, n2] = lab.nodes().map(|node| node.host.addrs.v4);
    for words in [
        ": a refusal, not an answer of server-2; kpx there: forward to ",
        &format!("here: tcp {n1}:{NODE_PORT}: no answer, not an answer of server-1"),
        ":18480: a connection, and then no answer (a hole in the path's MTU?)",
        &format!("n1: ipip {n2}: nothing arrived, not an arrival at n2"),
        "external forwarding: answers with other sources, outside: 1 of 4 failed",
        &format!(": no datagram with the source {n1}, not an arrival here"),
        "not enforced: ",
    ] {
        ensure!(text.contains(words), "{words}\n{text}");
    }
    let invented: Vec<_> = documented()?
        .into_iter()
        .filter(|row| !text.lines().any(|line| form(line) == form(row)))
        .collect();
    ensure!(
        invented.is_empty(),
        "docs/kubectl.md shows {invented:#?}, and the test printed\n{text}"
    );
    test.kubelets.misdirected = None;
    ensure!(
        test.namespaces().len() == 1 && test.kubelets.running() == 7,
        "{:?} are kept",
        test.namespaces()
    );
    let lab = &test.cluster.lab;
    lab.fabric
        .ns
        .nft("delete table inet broken\ndelete table bridge broken")?;
    lab.n2.host.ns.nft("delete table inet broken")
}

/// Adds a filter before a node port, a path between the nodes that loses long packets, a switch that
/// checks n2's sources, and a stateful firewall of n2 that drops IPIP.
fn break_network(lab: &Lab) -> Result<()> {
    let n1 = lab.n1.host.addrs.v4;
    lab.fabric.ns.nft(&format!(
        "table inet broken {{ chain output {{
            type filter hook output priority filter
            tcp dport {NODE_PORT} drop
        }}
        }}
        table bridge broken {{ chain forward {{
            type filter hook forward priority 0
            meta length > 1400 drop
        }}
        chain source_guard {{
            type filter hook prerouting priority 0
            iifname n2 ip saddr {n1} drop
        }}
        }}"
    ))?;
    lab.n2.host.ns.nft(
        "table inet broken { chain input {
            type filter hook input priority filter
            ct state established,related accept
            ip protocol 4 drop
        }
        }",
    )
}

/// Returns the rows of the sample in docs/kubectl.md, which is an output of this test.
fn documented() -> Result<Vec<String>> {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kubectl.md"))?;
    let (_, sample) = page
        .split_once("$ kubectl kpx connectivity-test --external-forwarding\n")
        .context("the sample")?;
    let rows = sample
        .lines()
        .take_while(|line| *line != "```")
        .filter(|line| *line != "…");
    Ok(rows.map(str::to_owned).collect())
}

/// Returns a row without widths and addresses, which depend on neighbouring rows.
fn form(row: &str) -> String {
    let is_number = |letter: char| letter.is_ascii_digit() || ".:".contains(letter);
    let words = row.split_whitespace().map(|word| {
        if word.contains(['.', ':']) {
            word.trim_matches(is_number)
        } else {
            word
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Ctrl-C ends a run whose pods never start. The run removes its own objects and those of the
/// previous run, and leaves other users' runs alone.
fn removes_all_after_a_signal(test: &mut Test) -> Result<()> {
    let other = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
        "name": "kpx-connectivity-other",
        "labels": {"app.kubernetes.io/managed-by": "kpx-connectivity-test"},
        "annotations": {"kpx.dev/ends-by": "2999-01-01T00:00:00Z"},
    }});
    test.cluster.api().apply(&other)?;
    let before = test.namespaces();
    let child = test.spawn("")?;
    wait_until(DEADLINE, "pods of this run are made", || {
        let is_new = |name: &str| {
            name.starts_with("kpx-connectivity-") && !before.iter().any(|known| known == name)
        };
        let pods = test.cluster.api().list("pods");
        Ok(pods
            .iter()
            .any(|pod| pod["metadata"]["namespace"].as_str().is_some_and(is_new)))
    })?;
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT)?;
    let ended = test.wait(child)?;
    ensure!(
        ended.status.code() == Some(1) && ended.words.contains("stopped by Ctrl-C"),
        "{}",
        ended.words
    );
    ensure!(
        ended
            .words
            .contains("is left from an earlier test, and is removed"),
        "{}",
        ended.words
    );
    ensure!(
        test.namespaces() == ["kpx-connectivity-other"],
        "{:?} are left",
        test.namespaces()
    );
    ensure!(test.kubelets.running() == 0, "pods run on");
    let again = test.run("--test-namespace kpx-connectivity-other")?;
    ensure!(
        again.status.code() == Some(1) && again.words.contains("already exists"),
        "{}",
        again.words
    );
    ensure!(
        test.namespaces() == ["kpx-connectivity-other"],
        "a namespace of another is removed"
    );
    Ok(())
}

/// An API server with a kpx pod and without kubelets, so that a test's pods never start.
struct Apart {
    server: ApiServer,
    folder: TempDir,
}

impl Apart {
    fn start() -> Result<Self> {
        let server = ApiServer::start(Options::loopback()?)?;
        let folder = TempDir::new()?;
        server.kubeconfig(&folder.path().join("kubeconfig"))?;
        symlink(binary()?, folder.path().join("kubectl-kpx"))?;
        let labels = json!({"app.kubernetes.io/name": "kpx"});
        server.apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}))?;
        server.apply(&json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "kpx-n1", "namespace": "kube-system", "labels": labels},
            "spec": {"nodeName": "n1", "containers": [{"name": "kpx", "image": "kpx"}]},
            "status": {"phase": "Running"},
        }))?;
        Ok(Self { server, folder })
    }

    /// Makes a namespace with a run's label and these annotations.
    fn put(&self, name: &str, annotations: &Value) -> Result<()> {
        let labels = json!({"app.kubernetes.io/managed-by": "kpx-connectivity-test"});
        let metadata = json!({"name": name, "labels": labels, "annotations": annotations});
        self.server
            .apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}))
            .map(drop)
    }

    fn has(&self, namespace: &str) -> bool {
        self.server.get("Namespace", "", namespace).is_some()
    }

    fn spawn(&self, namespace: &str) -> Result<Child> {
        let mut command = Command::new(self.folder.path().join("kubectl-kpx"));
        command.args(["connectivity-test", "--test-namespace", namespace]);
        command
            .env_clear()
            .env("KUBECONFIG", self.folder.path().join("kubeconfig"));
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start kubectl-kpx")
    }

    /// Returns the error of a run that cannot succeed.
    fn fails(&self, namespace: &str) -> Result<String> {
        words(&self.spawn(namespace)?.wait_with_output()?)
    }

    /// Waits for a condition, interrupts the run with Ctrl-C, and returns its output.
    fn interrupted(
        &self,
        child: Child,
        what: &str,
        mut happened: impl FnMut() -> bool,
    ) -> Result<String> {
        wait_until(DEADLINE, what, || Ok(happened()))?;
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT)?;
        words(&child.wait_with_output()?)
    }
}

fn words(output: &Output) -> Result<String> {
    ensure!(output.status.code() == Some(1), "{output:?}");
    Ok(String::from_utf8(output.stderr.clone())?)
}

#[test]
fn connectivity_test_removes_only_the_namespace_that_it_made() -> Result<()> {
    let apart = Apart::start()?;
    let server = &apart.server;
    apart.put(
        "prod",
        &json!({"kpx.dev/ends-by": "2999-01-01T00:00:00Z", "kpx.dev/run": "another"}),
    )?;
    for (verb, resource, code) in [
        ("list", "nodes", 403),
        ("create", "namespaces", 403),
        ("create", "namespaces", 500),
    ] {
        server.fail(verb, resource, code);
        let words = apart.fails("prod")?;
        ensure!(
            words.contains("asked for by a test"),
            "{verb} {resource}: {words}"
        );
        ensure!(
            apart.has("prod"),
            "{verb} {resource}, {code}: a namespace of another is removed"
        );
        server.heal();
    }
    // A user may also set the label on a namespace.
    apart.put("labelled", &json!({}))?;
    apart.put("garbled", &json!({"kpx.dev/ends-by": "tomorrow"}))?;
    let words = apart.fails("prod")?;
    for name in ["labelled", "garbled"] {
        let reported = words.contains(&format!(
            "namespace {name} has the label of a test and no time in kpx.dev/ends-by"
        ));
        ensure!(apart.has(name) && reported, "{name}: {words}");
    }
    let deletions = || server.traffic().requests("delete", "namespaces");
    ensure!(deletions() == 0, "a namespace of another was to be removed");

    // The run cannot see that the API server has made its namespace.
    server.swallow_answers("create", "namespaces");
    let words = apart.interrupted(apart.spawn("own")?, "the namespace is made", || {
        apart.has("own")
    })?;
    ensure!(
        words.contains("stopped by Ctrl-C") && !apart.has("own"),
        "the run's own namespace is left: {words}"
    );
    ensure!(
        deletions() == 1,
        "{} namespaces were to be removed",
        deletions()
    );
    server.heal();

    // Another user replaces the run's namespace by one of the same name.
    let child = apart.spawn("own")?;
    let pods = || {
        server
            .list("pods")
            .iter()
            .filter(|pod| pod["metadata"]["namespace"] == "own")
            .count()
    };
    wait_until(DEADLINE, "all pods are made", || Ok(pods() == 5))?;
    server.delete("Namespace", "", "own")?;
    apart.put("own", &json!({}))?;
    apart.interrupted(child, "nothing more", || true)?;
    ensure!(
        apart.has("own"),
        "a later namespace of the same name is removed"
    );

    apart.put("ended", &json!({"kpx.dev/ends-by": "2001-01-01T00:00:00Z"}))?;
    let words = apart.fails("prod")?;
    let reported = words.contains("namespace ended is left from an earlier test, and is removed");
    ensure!(
        reported && !apart.has("ended"),
        "a namespace of an earlier run is left: {words}"
    );
    Ok(())
}
