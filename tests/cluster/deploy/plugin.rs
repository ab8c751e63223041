//! `kubectl kpx`, which queries the kpx pods of both nodes through the API server.

mod events;
mod ui;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::DaemonSet;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use testbed::agent::{DEADLINE, Object, Service, binary, wait_until};
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::{Family, Node};
use testbed::pod::Running;

use crate::deploy::cluster::Cluster;
use crate::deploy::own::overlay;

/// The maximum width of a table on a terminal.
const COLUMNS: usize = 100;

/// Both nodes with kpx in pods that the API server lists, and a folder with `kubectl-kpx`.
pub(super) struct Nodes<'a> {
    cluster: &'a Cluster,
    running: BTreeMap<&'static str, Running<'a>>,
    path: PathBuf,
}

impl<'a> Nodes<'a> {
    pub(super) fn start(cluster: &'a Cluster) -> Result<Self> {
        let objects = overlay("kind")?;
        let set = objects.daemon_set.context("a DaemonSet")?;
        let config = objects.config_map.context("a ConfigMap")?;
        let supplies = cluster.supplies(&[&config]);
        let path = cluster.lab.dir().join("plugin");
        fs::create_dir(&path)?;
        symlink(binary()?, path.join("kubectl-kpx"))?;
        let mut running = BTreeMap::new();
        for node in cluster.lab.nodes() {
            let kpx = Running::ready(&cluster.lab, node, &set, &supplies)?;
            cluster.put(&pod_of(&set, node)?)?;
            cluster.api().reach(
                "kube-system",
                &pod_name(node.host.name),
                Arc::new(kpx.inside()?),
            );
            running.insert(node.host.name, kpx);
        }
        Ok(Self {
            cluster,
            running,
            path,
        })
    }

    /// Returns the command `kubectl-kpx`, as kubectl starts it.
    pub(super) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(self.path.join("kubectl-kpx"));
        command.args(arguments.split_whitespace());
        command
            .env_clear()
            .env("KUBECONFIG", &self.cluster.kubeconfig)
            .env("PATH", &self.path);
        command
    }

    /// Runs `kubectl-kpx` on the API server's host.
    fn run(&self, arguments: &str) -> Result<Output> {
        let mut command = self.command(arguments);
        self.cluster
            .lab
            .fabric
            .ns
            .run(|| command.output())
            .with_context(|| format!("run {command:?}"))
    }

    /// Returns the output of a command that must succeed; a table must fit a terminal.
    fn text(&self, arguments: &str) -> Result<String> {
        let output = self.run(arguments)?;
        ensure!(
            output.status.success(),
            "{arguments}: {output:?}\n{}",
            self.logs()
        );
        let text = String::from_utf8(output.stdout)?;
        let is_table = !arguments.contains("json") && !arguments.starts_with("trace");
        let wide = text
            .lines()
            .find(|line| is_table && line.chars().count() > COLUMNS);
        ensure!(wide.is_none(), "{arguments}: {wide:?} is too wide");
        Ok(text)
    }

    /// Returns each node's answer by name.
    fn json(&self, arguments: &str) -> Result<BTreeMap<String, Value>> {
        let nodes: Vec<Value> = serde_json::from_str(&self.text(&format!("{arguments} -o json"))?)?;
        Ok(nodes
            .into_iter()
            .map(|node| (node["node"].as_str().unwrap_or_default().to_owned(), node))
            .collect())
    }

    /// Opens a connection of a client to a Service; the kpx of the client's node follows it.
    fn connect(&self, client: &str, service: &Service) -> Result<Connection> {
        let dial = Dial::new(Protocol::Tcp, service.frontend(Family::V4));
        let mut connection = dial.connect(&self.cluster.lab.host(client).ns)?;
        connection.exchange(b"hello")?;
        Ok(connection)
    }

    /// Lets the node's pod run this command in the place of `kpx trace`.
    fn trace_as(&self, node: &str, command: &'static [&'static str]) -> Result<()> {
        let inside = self.running[node].inside()?;
        let container = Arc::new(ui::TracesAs { inside, command });
        let api = self.cluster.api();
        api.reach("kube-system", &pod_name(node), container);
        Ok(())
    }

    fn logs(&self) -> String {
        self.running
            .values()
            .map(Running::log)
            .collect::<Vec<_>>()
            .join("\n")
    }
}

fn pod_name(node: &str) -> String {
    format!("kpx-{node}")
}

/// Returns the pod that the DaemonSet's controller and the node's kubelet would make.
fn pod_of(set: &DaemonSet, node: &Node) -> Result<Object> {
    let template = &set.spec.as_ref().context("a spec")?.template;
    let mut spec = serde_json::to_value(template.spec.as_ref().context("a pod's spec")?)?;
    spec["nodeName"] = json!(node.host.name);
    let labels = template
        .metadata
        .as_ref()
        .and_then(|metadata| metadata.labels.clone());
    Ok(Object(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": pod_name(node.host.name), "namespace": "kube-system", "labels": labels},
        "spec": spec, "status": {"phase": "Running"},
    })))
}

#[test]
#[expect(
    clippy::too_many_lines,
    reason = "every command asks the same two nodes"
)]
fn plugin_of_kubectl_merges_the_answers_of_all_nodes() -> Result<()> {
    let cluster = Cluster::start()?;
    let web = cluster.web()?;
    let nodes = Nodes::start(&cluster)?;
    cluster.serves("n1")?;
    cluster.serves("n2")?;
    let _one = nodes.connect("p1a", &web)?;
    let _two = nodes.connect("p2b", &web)?;

    let status = nodes.text("status")?;
    let rows: Vec<Vec<&str>> = status
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().collect())
        .collect();
    ensure!(
        rows.len() == 2 && rows.iter().all(|row| row[1] == "healthy"),
        "{status}"
    );
    ensure!([rows[0][0], rows[1][0]] == ["n1", "n2"], "{status}");
    let json = nodes.json("status")?;
    ensure!(
        json["n1"]["answer"]["nodeName"] == "n1" && json["n2"]["answer"]["nodeName"] == "n2",
        "{json:?}"
    );
    ensure!(
        json["n1"]["pod"] == "kpx-n1" && json["n1"]["exitCode"] == 0,
        "{json:?}"
    );

    // Nodes with equal answers share a row.
    let services = nodes.text("services default/web")?;
    let rows: Vec<_> = services
        .lines()
        .skip(1)
        .filter(|line| line.contains("web"))
        .collect();
    ensure!(
        rows.len() == 1 && rows[0].starts_with("all 2 "),
        "{services}"
    );
    ensure!(nodes.run("services default/wbe")?.status.code() == Some(1));

    // A row per node, and a new row when the Service changes.
    let mut watch = nodes.command("services default/web -w");
    let mut watch = cluster.lab.fabric.ns.spawn(watch.stdout(Stdio::piped()))?;
    let mut lines = BufReader::new(watch.stdout.take().context("an output")?).lines();
    let mut next = || -> Result<String> { Ok(lines.next().context("a line")??) };
    let list = [next()?, next()?, next()?];
    ensure!(
        list[0].starts_with("NODE") && list[1].starts_with("n1 ") && list[2].starts_with("n2 "),
        "{list:?}"
    );
    cluster.put_service(&web.backed_by(&["p2a", "p1b"]).label("app", "web"))?;
    let rows = [next()?, next()?];
    let is_new = |row: &String| row.contains(" web ") && !list.contains(row);
    ensure!(
        rows.iter().all(is_new) && rows[0].split(' ').next() != rows[1].split(' ').next(),
        "{rows:?}"
    );
    watch.kill()?;
    watch.wait()?;
    let labelled = nodes.text("services --service-selector app=web")?;
    ensure!(
        labelled
            .lines()
            .filter(|line| line.contains(" default "))
            .count()
            == 1,
        "{labelled}"
    );

    // One column for the queried node, and one for the backend's.
    let backends = nodes.text("backends default/web")?;
    let rows: Vec<Vec<&str>> = backends
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    ensure!(
        rows[0]
            == [
                "NODE", "SERVICE", "PORT", "ADDRESS", "POD", "ON", "STATE", "FLOWS"
            ],
        "{backends}"
    );
    let of_p1b = rows
        .iter()
        .filter(|row| row.contains(&"n1") && row[..3].join(" ") == "all 2 default/web");
    ensure!(
        of_p1b.count() == rows[1..].len() / 2,
        "each node sees both pods:\n{backends}"
    );
    let json = nodes.json("backends default/web")?;
    ensure!(
        json["n2"]["answer"][0]["service"] == "web" && json["n2"]["answer"][0]["node"].is_string(),
        "{json:?}"
    );
    ensure!(nodes.run("backends default/wbe")?.status.code() == Some(1));

    let flows = nodes.text("flows --service default/web --state established")?;
    for (node, client) in [("n1", "p1a"), ("n2", "p2b")] {
        let client = cluster.lab.host(client).addrs.ip(Family::V4).to_string();
        let is_row = |line: &str| {
            line.starts_with(node) && line.contains(&client) && line.contains("default/web")
        };
        ensure!(
            flows.lines().any(is_row),
            "no flow of {client} on {node}:\n{flows}"
        );
    }
    let of_one = nodes.text("flows --node n2")?;
    ensure!(
        of_one.lines().skip(1).all(|line| line.starts_with("n2 ")),
        "{of_one}"
    );
    let limited = nodes.run("flows --limit 1")?;
    ensure!(
        String::from_utf8_lossy(&limited.stderr).contains("n1: there may be more than --limit 1"),
        "{limited:?}"
    );
    let top = nodes.text("top --interval 1 --by-node")?;
    ensure!(
        top.lines()
            .any(|line| line.starts_with("n1 ") && line.contains("default/web")),
        "{top}"
    );

    let version = env!("CARGO_PKG_VERSION");
    let versions = nodes.text("version")?;
    for node in ["n1", "n2"] {
        let row = [node, version, version, "no"];
        let is_row = |line: &str| line.split_whitespace().eq(row);
        ensure!(versions.lines().any(is_row), "{versions}");
    }

    let path = std::env::var("PATH").unwrap_or_default();
    let mut kubectl = Command::new("kubectl");
    kubectl
        .args(["kpx", "status", "-A", "--namespace", "kube-system"])
        .env("KUBECONFIG", &cluster.kubeconfig);
    kubectl
        .env("PATH", format!("{}:{path}", nodes.path.display()))
        .env("HOME", cluster.lab.dir());
    let by_kubectl = cluster.lab.fabric.ns.exec(&mut kubectl)?;
    ensure!(
        by_kubectl
            .lines()
            .filter(|line| line.contains(" healthy "))
            .count()
            == 2,
        "{by_kubectl}"
    );
    Ok(())
}

#[test]
fn trace_runs_on_the_clients_node() -> Result<()> {
    let cluster = Cluster::start()?;
    cluster.web()?;
    let nodes = Nodes::start(&cluster)?;
    // A kpx knows only pods that back a Service, and this pod backs none.
    let client = cluster.lab.host("p2b").addrs;
    cluster.put(&Object(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "client", "namespace": "default"},
        "spec": {"nodeName": "n2", "containers": [{"name": "c", "image": "c"}]},
        "status": {"phase": "Running", "podIP": client.v4, "podIPs": [{"ip": client.v4}, {"ip": client.v6}]},
    })))?;
    let pod = nodes.text("trace --from pod/default/client --to svc/default/web --output json")?;
    let pod: Value = serde_json::from_str(&pod)?;
    ensure!(
        pod["node"] == "n2" && pod["outcome"]["verdict"] == "forward",
        "{pod}"
    );
    ensure!(pod["outcome"]["origin"] == "pod", "{pod}");
    ensure!(
        pod["packet"]["from"]
            .as_str()
            .is_some_and(|from| from.starts_with(&client.v4.to_string())),
        "{pod}"
    );
    let by_address = nodes.text(&format!(
        "trace --from {} --to default/web -o json",
        client.v4
    ))?;
    ensure!(
        serde_json::from_str::<Value>(&by_address)?["node"] == "n2",
        "{by_address}"
    );
    // The API server selects pods only by their first address; this is the second.
    let by_second = nodes.text(&format!(
        "trace --from {} --to default/web -o json",
        client.v6
    ))?;
    ensure!(
        serde_json::from_str::<Value>(&by_second)?["node"] == "n2",
        "{by_second}"
    );
    // A new pod may have the address of an ended pod.
    cluster.put(&Object(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ended", "namespace": "default"},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "c"}]},
        "status": {"phase": "Succeeded", "podIP": "198.51.100.7", "podIPs": [{"ip": "198.51.100.7"}]},
    })))?;
    let of_node = nodes.text("trace --from node/n1 --to default/web")?;
    ensure!(
        of_node
            .lines()
            .next()
            .is_some_and(|line| line.contains(" on n1, ")),
        "{of_node}"
    );
    // The backend is on n2: the translated packet comes in there, where a rule may drop it.
    let words = "then on the backend's node:";
    let (_, onward) = of_node.split_once(words).context("no second half")?;
    let backend = cluster.lab.host("p2a").addrs;
    let way = "the route to ";
    ensure!(
        onward.contains(" on n2, met by kpx_ingress at ") && onward.contains(way),
        "{onward}"
    );
    ensure!(
        onward.contains("netfilter drops such packets by none of its rules"),
        "{onward}"
    );
    cluster.lab.host("n2").ns.nft(
        "add table inet pods; add chain inet pods early { type filter hook forward priority -5; }; add rule inet pods early meta l4proto tcp drop"
    )?;
    let by_pod = nodes.text("trace --from node/n1 --to default/web -o json")?;
    let by_pod: Value = serde_json::from_str(&by_pod)?;
    let there = &by_pod["onward"];
    let to = there["trace"]["packet"]["to"].as_str().unwrap_or_default();
    ensure!(
        there["node"] == "n2" && to.contains(&backend.v4.to_string()),
        "{by_pod}"
    );
    let rule = "rule 1 of chain early of table inet pods";
    ensure!(
        there["trace"]["notes"].to_string().contains(rule),
        "{by_pod}"
    );
    ensure!(pod["onward"].is_null(), "the backend is on n2 too: {pod}");
    let stranger = nodes.run("trace --from 198.51.100.7 --to default/web")?;
    let words = String::from_utf8_lossy(&stranger.stderr).into_owned();
    ensure!(
        !stranger.status.success() && words.contains("--node names the node"),
        "{words}"
    );
    let unknown = nodes.run("trace --from pod/default/client --to default/wbe")?;
    let words = String::from_utf8_lossy(&unknown.stderr).into_owned();
    ensure!(
        !unknown.status.success() && words.contains("did you mean default/web?"),
        "{words}"
    );
    Ok(())
}

#[test]
fn node_that_does_not_answer_is_named() -> Result<()> {
    let cluster = Cluster::start()?;
    let web = cluster.web()?;
    let mut nodes = Nodes::start(&cluster)?;
    cluster.serves("n1")?;
    let _connection = nodes.connect("p1a", &web)?;
    let mut watch = nodes.command("status --watch");
    let mut watch = Watched(
        cluster
            .lab
            .fabric
            .ns
            .spawn(watch.stdout(Stdio::piped()).stderr(Stdio::piped()))?,
    );
    let mut rows = BufReader::new(watch.0.stdout.take().context("an output")?).lines();
    let mut words = BufReader::new(watch.0.stderr.take().context("words")?).lines();
    for (start, part) in [
        ("NODE ", "PROBLEMS"),
        ("n1 ", "healthy"),
        ("n2 ", "healthy"),
    ] {
        let row = rows.next().context("a row")??;
        ensure!(row.starts_with(start) && row.contains(part), "{row}");
    }
    nodes.running.remove("n2").context("a pod on n2")?.stop()?;
    let reported = [
        words.next().context("words")??,
        words.next().context("words")??,
    ];
    ensure!(
        reported[0] == "1 of 2 nodes did not answer:" && reported[1].starts_with("  n2: "),
        "{reported:?}"
    );
    drop(watch);

    let all = [
        ("status", "healthy"),
        ("services", "default"),
        ("flows", "default/web"),
        ("backends", "default/web"),
    ];
    for (command, seen) in all.into_iter().chain([("events", "Starting")]) {
        let output = nodes.run(command)?;
        let text = String::from_utf8_lossy(&output.stdout);
        let words = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "{command}: {output:?}");
        ensure!(
            text.lines()
                .any(|line| line.starts_with("n1 ") && line.contains(seen)),
            "{command}: {text}"
        );
        ensure!(
            words.contains("1 of 2 nodes did not answer:\n  n2: "),
            "{command}: {words}"
        );
    }
    let output = nodes.run("status -o json")?;
    let answers: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(
        answers[1]["node"] == "n2"
            && answers[1]["answer"].is_null()
            && answers[1]["error"].is_string(),
        "{answers}"
    );
    // The queried node is healthy, and the missing one is left out.
    ensure!(nodes.run("status --node n1")?.status.success());
    let missing = nodes.run("status --node n3")?;
    ensure!(
        String::from_utf8_lossy(&missing.stderr).contains("n3: no pod of kpx is on this node"),
        "{missing:?}"
    );
    let nowhere = nodes.run("status --namespace default")?;
    ensure!(
        String::from_utf8_lossy(&nowhere.stderr).contains("--namespace and --selector"),
        "{nowhere:?}"
    );
    Ok(())
}

#[test]
#[expect(clippy::too_many_lines, reason = "every check reads the same archive")]
fn sysdump_holds_the_parts_of_every_node_and_no_secret() -> Result<()> {
    let cluster = Cluster::start()?;
    let web = cluster.web()?;
    let nodes = Nodes::start(&cluster)?;
    cluster.serves("n1")?;
    let _connection = nodes.connect("p1a", &web)?;
    let archive = cluster.lab.dir().join("dump.tar.gz");
    let output = nodes.run(&format!("sysdump --output {}", archive.display()))?;
    ensure!(output.status.success(), "{output:?}");
    let again = nodes.run(&format!("sysdump --output {}", archive.display()))?;
    ensure!(!again.status.success(), "an archive is written over");
    let partial = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().ends_with(".partial");
    let left = fs::read_dir(cluster.lab.dir())?
        .filter_map(Result::ok)
        .find(partial);
    ensure!(left.is_none(), "{left:?} is left");

    let folder = cluster.lab.dir().join("dump");
    fs::create_dir(&folder)?;
    let unpack = Command::new("tar")
        .arg("-xzf")
        .arg(&archive)
        .arg("-C")
        .arg(&folder)
        .status()?;
    ensure!(unpack.success(), "tar: {unpack}");
    let read = |name: &str| {
        fs::read_to_string(folder.join(name)).with_context(|| format!("read {name} of the archive"))
    };
    let contents = read("CONTENTS")?;
    for node in ["n1", "n2"] {
        let status: Value = serde_json::from_str(&read(&format!("nodes/{node}/status.json"))?)?;
        ensure!(
            status["nodeName"] == node && status["mapFill"].is_object(),
            "{status}"
        );
        let parts = [
            "version.txt",
            "check.json",
            "backends.json",
            "config.json",
            "kernel.txt",
            "CONTENTS",
        ];
        for part in parts {
            ensure!(
                !read(&format!("nodes/{node}/{part}"))?.is_empty(),
                "{part} of {node} is empty"
            );
        }
        ensure!(
            !read(&format!("nodes/{node}/CONTENTS"))?.contains("/proc/cmdline"),
            "the boot line of {node} is in"
        );
        ensure!(
            read(&format!("nodes/{node}/metrics.txt"))?.contains("kpx_"),
            "metrics of {node}"
        );
        // The image contains no tool that lists them.
        let rules = read(&format!("nodes/{node}/netfilter.txt"))?;
        let is_masqueraded = rules
            .contains("chain postrouting of table inet cni: hook postrouting, priority 100, nat");
        ensure!(
            is_masqueraded && rules.contains("oifname == \"eth0\""),
            "{rules}"
        );
        ensure!(
            read(&format!("logs/{node}.txt"))?.contains("started"),
            "log of {node}"
        );
        ensure!(contents.contains(&format!("nodes/{node}/ ")), "{contents}");
        ensure!(
            !folder.join(format!("nodes/{node}/flows.jsonl")).exists(),
            "clients are in the archive unasked"
        );
    }
    let flows: Value = serde_json::from_str(&read("nodes/n1/flow-counts.json")?)?;
    ensure!(
        flows["default/web TCP established"].as_u64() >= Some(1),
        "{flows}"
    );
    let services = read("nodes/n2/services.json")?;
    ensure!(services.contains("\"web\""), "{services}");
    // The image contains no tools, and this API server no DaemonSets.
    let of_node = read("nodes/n1/CONTENTS")?;
    let is_missing = |contents: &str, part: &str| {
        contents
            .lines()
            .any(|line| line.starts_with(part) && line.contains(" missing "))
    };
    ensure!(
        is_missing(&of_node, "nft.txt") && is_missing(&contents, "daemonsets.json"),
        "{of_node}\n{contents}"
    );
    let pods = read("pods.json")?;
    ensure!(
        pods.contains("kpx-n1") && pods.contains("<left out>") && !pods.contains("6443"),
        "{pods}"
    );

    let token = cluster.api().token().to_owned();
    let dumped = Command::new("grep")
        .args(["-rl", &token])
        .arg(&folder)
        .output()?;
    ensure!(
        dumped.stdout.is_empty(),
        "a token is in {}",
        String::from_utf8_lossy(&dumped.stdout)
    );
    Ok(())
}

#[test]
fn monitor_names_the_node_of_each_line() -> Result<()> {
    let cluster = Cluster::start()?;
    let web = cluster.web()?;
    let nodes = Nodes::start(&cluster)?;
    cluster.serves("n1")?;
    cluster.serves("n2")?;
    let mut command = nodes.command("monitor --service default/web --decisions");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut monitor = Watched(cluster.lab.fabric.ns.spawn(&mut command)?);
    let stdout = monitor.0.stdout.take().context("output of monitor")?;
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut seen = Vec::new();
    wait_until(DEADLINE, "a line of each node", || {
        // A stream may begin after the first connections.
        nodes.connect("p1a", &web)?;
        nodes.connect("p2b", &web)?;
        seen.extend(lines.try_iter());
        let is_of = |node: &str| {
            seen.iter()
                .any(|line| line.starts_with(node) && line.contains("default/web"))
        };
        Ok(is_of("n1 ") && is_of("n2 "))
    })
    .with_context(|| format!("{seen:?}"))?;
    kill(Pid::from_raw(monitor.0.id().cast_signed()), Signal::SIGINT)?;
    let status = monitor.0.wait()?;
    let mut words = String::new();
    monitor
        .0
        .stderr
        .take()
        .context("words of monitor")?
        .read_to_string(&mut words)?;
    ensure!(status.success() && words.is_empty(), "{status}: {words}");
    Ok(())
}

/// A process that ends on drop.
struct Watched(Child);

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.0.kill(); // It may have ended.
        let _ = self.0.wait();
    }
}
