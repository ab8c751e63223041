//! Measures what `kubectl kpx ui` costs in a large cluster: the bytes of each node, the time until
//! the page has all Services, and the share of a processor that the command takes.
//!
//! The command is the real one. It reads an API server, the testbed's or another (see below), by TLS
//! and WebSockets, and the page by HTTP, as a browser does. The nodes are simulated: each `kpx relay`
//! connects to a server in this process, which answers with the status of a real agent and with rounds
//! of changes.
//!
//! Run it as root, with an optimised kpx:
//! `KPX_BIN=$PWD/target/release/kpx cargo run --release -p testbed --example page_cost`.
//! It takes six minutes. The share of a processor is time on processors, so other work beside it
//! changes the time until the first answer alone.
//!
//! With `KUBEBUILDER_ASSETS`, a folder with kube-apiserver and etcd, it runs behind these. Then
//! `KPX_KUBELET` is a program that serves the exec of all nodes as kubelets do: by TLS at a port, with
//! the arguments PORT KPX FOLDER, and each `kpx relay` with `--run-dir FOLDER`. The repository has no
//! such program.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use http::{Request, Response};
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiff::Timestamp;
use proxy_view::page::{COUNTERS, Clock, Digest, Row, RowPort, Sent, Shape, Shaped};
use serde_json::{Value, json};
use testbed::agent::{Agent, DEADLINE, binary, idle, wait_until};
use testbed::apiserver::place::{self, ASSETS};
use testbed::apiserver::real::KubeApiserver;
use testbed::apiserver::{ApiServer, Container, Options};
use testbed::netns::NetNs;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;

const NODES: usize = 200;
const SERVICES: usize = 5_000;
/// The pods beside those of kpx, for the names.
const PODS: usize = 5_000;
/// The namespaces of Services and pods.
const TEAMS: usize = 50;
/// The time that a phase is measured, and the time before it: several rounds.
const PHASE: Duration = Duration::from_secs(40);
const BEFORE: Duration = Duration::from_secs(15);
/// The time between two readings of the browser.
const EVERY: Duration = Duration::from_secs(2);
/// The changed Services of a round at churn.
const CHURN: usize = 250;

/// The program that serves the exec of all nodes, and its port.
const KUBELET: &str = "KPX_KUBELET";
const KUBELET_PORT: u16 = 10_250;
/// The objects that are made at the same time behind kube-apiserver.
const AT_ONCE: usize = 16;
/// The time limit for the first counts: a round has those of a part of the Services.
const FIRST_COUNTS: Duration = Duration::from_secs(240);

/// What happens on the nodes.
const IDLE: usize = 0;
const BUSY: usize = 1;
const CHURNING: usize = 2;

fn main() -> Result<()> {
    let kpx = binary()?;
    let machine = NetNs::machine("page")?;
    let agent = Agent::start_alone(&machine, &[], "")?;
    let status = Bytes::from(agent.status()?.to_string());
    agent.stop()?;

    let home = tempfile::TempDir::with_prefix("kpx-page-").context("make a folder")?;
    let phase = Arc::new(AtomicUsize::new(IDLE));
    let agents = Runtime::new().context("start a runtime")?;
    let _entered = agents.enter();
    let rounds = Arc::new(Mutex::new(Rounds::new(Arc::clone(&phase))));
    let simulated = Simulated {
        status,
        rounds: Arc::clone(&rounds),
    };
    println!(
        "{NODES} nodes, {SERVICES} Services, {PODS} pods, a status of {} B",
        simulated.status.len()
    );
    let socket = UnixListener::bind(home.path().join("kpx.sock")).context("listen")?;
    agents.spawn(simulated.serve(socket));
    let api = match std::env::var_os(ASSETS) {
        Some(assets) => Api::genuine(Path::new(&assets), &kpx, home.path(), &agents)?,
        None => Api::own(&kpx, home.path())?,
    };
    let page = Page::start(&kpx, &api.kubeconfig)?;
    page.first_answer()?;
    page.measure("first counts", true)?;
    wait_until(
        FIRST_COUNTS,
        "the nodes have sent their first counts",
        || Ok(lock(&rounds).are_counted),
    )?;
    page.measure("idle, without a browser", false)?;
    page.measure("idle", true)?;
    for (what, name) in [(BUSY, "busy"), (CHURNING, "churn")] {
        phase.store(what, Ordering::Relaxed);
        page.measure(name, true)?;
    }
    Ok(())
}

/// The API server, with nodes, a pod of kpx on each, and further pods.
struct Api {
    kubeconfig: PathBuf,
    _own: Option<ApiServer>,
    _genuine: Option<(KubeApiserver, Program)>,
}

impl Api {
    fn own(kpx: &Path, run_dir: &Path) -> Result<Self> {
        let api = ApiServer::start(Options::loopback()?)?;
        for object in objects() {
            api.apply(&object)?;
        }
        let relay = Arc::new(Relay {
            kpx: kpx.to_owned(),
            run_dir: run_dir.to_owned(),
        });
        for nth in 0..NODES {
            api.reach("kube-system", &kpx_pod(nth), Arc::clone(&relay) as _);
        }
        let kubeconfig = run_dir.join("kubeconfig");
        api.kubeconfig(&kubeconfig)?;
        Ok(Self {
            kubeconfig,
            _own: Some(api),
            _genuine: None,
        })
    }

    fn genuine(assets: &Path, kpx: &Path, run_dir: &Path, runtime: &Runtime) -> Result<Self> {
        let kubelet = std::env::var_os(KUBELET).with_context(|| format!("set {KUBELET}"))?;
        let mut command = Command::new(kubelet);
        command.arg(KUBELET_PORT.to_string()).arg(kpx).arg(run_dir);
        let kubelet = Program(command.spawn().context("start the kubelet")?);
        let api = KubeApiserver::start(assets)?;
        runtime.block_on(fill(api.kubeconfig()))?;
        Ok(Self {
            kubeconfig: api.kubeconfig().to_owned(),
            _own: None,
            _genuine: Some((api, kubelet)),
        })
    }
}

/// Makes the objects, as the caller of kube-apiserver must: first without their status.
async fn fill(kubeconfig: &Path) -> Result<()> {
    let client = place::client(kubeconfig).await?;
    let send = async |method, path: &str, object: &Value| {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("content-type", "application/json");
        let request = request.body(serde_json::to_vec(object)?)?;
        let sent = client.request::<Value>(request).await;
        sent.map(drop).with_context(|| format!("{path}: {object}"))
    };
    let (namespaces, rest): (Vec<_>, Vec<_>) = objects()
        .into_iter()
        .partition(|object| object["kind"] == "Namespace");
    let send = &send;
    for objects in [namespaces, rest] {
        let made = stream::iter(objects).map(async |object| {
            let text = |at: &str| object.pointer(at).and_then(Value::as_str);
            let (name, kind) = (text("/metadata/name"), text("/kind").unwrap_or_default());
            let kinds = format!("{}s", kind.to_lowercase());
            let kinds = match text("/metadata/namespace") {
                Some(namespace) => format!("/api/v1/namespaces/{namespace}/{kinds}"),
                None => format!("/api/v1/{kinds}"),
            };
            send("POST", &kinds, &object).await?;
            if object["status"].is_null() {
                return Ok(());
            }
            let status = format!("{kinds}/{}/status", name.unwrap_or_default());
            send("PUT", &status, &object).await
        });
        let made = made.buffer_unordered(AT_ONCE);
        made.try_collect::<()>().await?;
    }
    Ok(())
}

fn kpx_pod(nth: usize) -> String {
    format!("kpx-{nth:03}")
}

/// Returns all objects. The nodes have addresses of this machine, where their kubelets listen.
fn objects() -> Vec<Value> {
    let pod = |namespace: &str, name: &str, node: &str, ip: [u8; 4]| {
        let ip = std::net::Ipv4Addr::from(ip);
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/name": "kpx"}},
            "spec": {"nodeName": node, "containers": [{"name": "kpx", "image": "kpx"}]},
            "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]},
        })
    };
    let mut objects = Vec::new();
    for nth in 0..TEAMS {
        let metadata = json!({"name": format!("team-{nth:02}")});
        objects.push(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}));
    }
    for nth in 0..NODES {
        let (node, own) = (format!("node-{nth:03}"), [127, 0, 1, nth as u8]);
        let address = std::net::Ipv4Addr::from(own);
        objects.push(json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": node},
            "spec": {"podCIDR": format!("10.{}.{}.0/24", 128 + nth / 100, nth % 100)},
            "status": {
                "addresses": [{"type": "InternalIP", "address": address}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            },
        }));
        objects.push(pod("kube-system", &kpx_pod(nth), &node, own));
    }
    for nth in 0..PODS {
        let (node, ip) = (nth % NODES, (nth / NODES) as u8);
        let at = [10, 128 + (node / 100) as u8, (node % 100) as u8, ip];
        let namespace = format!("team-{:02}", nth % TEAMS);
        let name = format!("service-{nth:04}-0");
        objects.push(pod(&namespace, &name, &format!("node-{node:03}"), at));
    }
    objects
}

/// A process that ends with this value.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A pod of kpx whose agent is simulated.
#[derive(Debug)]
struct Relay {
    kpx: PathBuf,
    run_dir: PathBuf,
}

impl Container for Relay {
    fn exec(&self, command: &[String]) -> Result<Child> {
        let mut relay = Command::new(&self.kpx);
        relay
            .args(&command[1..])
            .arg("--run-dir")
            .arg(&self.run_dir);
        relay.stdin(Stdio::piped()).stdout(Stdio::piped());
        relay.spawn().context("start kpx relay")
    }

    fn log(&self) -> Result<String> {
        bail!("no log")
    }

    fn connect(&self, _port: u16) -> Result<TcpStream> {
        bail!("no port")
    }
}

/// The command, and its page.
struct Page {
    process: Program,
    port: u16,
    started: Instant,
}

impl Page {
    fn start(kpx: &Path, kubeconfig: &Path) -> Result<Self> {
        let started = Instant::now();
        let mut command = Command::new(kpx);
        command.args(["cluster", "ui", "--port", "0"]);
        command.env("KUBECONFIG", kubeconfig).stdout(Stdio::piped());
        let mut process = Program(command.spawn().context("start kpx cluster ui")?);
        let stdout = process.0.stdout.take().context("an output")?;
        let line = BufReader::new(stdout).lines().next().context("a line")??;
        let port = line.strip_prefix("http://127.0.0.1:");
        let port = port.and_then(|rest| rest.split_once("/ui/"));
        Ok(Self {
            port: port.with_context(|| line.clone())?.0.parse()?,
            process,
            started,
        })
    }

    /// Returns an answer, as the browser reads it.
    fn get(&self, what: &str) -> Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).context("connect")?;
        write!(
            stream,
            "GET /ui/api/{what} HTTP/1.0\r\nHost: localhost\r\nkpx-page: 1\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no end of headers")?;
        ensure!(head.contains(" 200 "), "{what}: {head}");
        Ok(body.to_owned())
    }

    /// Waits until the page has all Services, and then all nodes.
    fn first_answer(&self) -> Result<()> {
        let mut bytes = 0;
        wait_until(DEADLINE, "the page has all Services", || {
            let rows = self.get("rows")?;
            bytes = rows.len();
            Ok(rows.lines().count() == SERVICES + 1)
        })?;
        self.report(&format!("all Services, {} kB of rows", bytes / 1_000))?;
        let mut status = Value::Null;
        wait_until(DEADLINE, "the page has all Services of all nodes", || {
            status = self.status()?;
            let mut nodes = status["nodes"].as_array().into_iter().flatten();
            Ok(nodes.all(|node| node["services"] == SERVICES))
        })?;
        let each = grown(&Value::Null, &status) / 1e3 / NODES as f64;
        self.report(&format!("all Services of all nodes, {each:.0} kB each"))
    }

    fn report(&self, what: &str) -> Result<()> {
        let (secs, cpu) = (self.started.elapsed().as_secs_f64(), self.cpu_secs()?);
        println!("{what}: after {secs:.2} s, {cpu:.2} s of a processor");
        Ok(())
    }

    fn status(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.get("status")?)?)
    }

    /// Measures a phase, in which a browser may have the page open.
    fn measure(&self, name: &str, is_open: bool) -> Result<()> {
        idle(BEFORE)?;
        let (before, cpu, start) = (self.status()?, self.cpu_secs()?, Instant::now());
        let (mut longest, mut reads) = (Duration::ZERO, 0);
        while start.elapsed() < PHASE {
            let asked = Instant::now();
            if is_open {
                self.get("status")?;
                self.get("rows")?;
                reads += 1;
                longest = longest.max(asked.elapsed());
            }
            idle(EVERY.saturating_sub(asked.elapsed()))?;
        }
        let secs = start.elapsed().as_secs_f64();
        let cpu = 100.0 * (self.cpu_secs()? - cpu) / secs;
        let rate = grown(&before, &self.status()?) / secs / 1e3 / NODES as f64;
        println!(
            "{name}: {rate:.2} kB/s a node, {cpu:.1} % of a processor, {reads} reads, the longest {} ms",
            longest.as_millis()
        );
        Ok(())
    }

    /// Returns the time of the command on processors, in seconds.
    fn cpu_secs(&self) -> Result<f64> {
        let path = format!("/proc/{}/stat", self.process.0.id());
        let stat = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        // The name ends with the last parenthesis. The kernel counts 100 ticks a second.
        let fields = stat.rsplit(')').next().unwrap_or_default().split(' ');
        let ticks = fields.skip(12).take(2).map(str::parse::<f64>);
        Ok(ticks.sum::<Result<f64, _>>()? / 100.0)
    }
}

/// Returns the bytes that all nodes sent between two readings. A new stream counts from 0.
fn grown(before: &Value, after: &Value) -> f64 {
    let bytes = |status: &Value, at: usize| status["nodes"][at]["bytes"].as_f64();
    let grown = (0..NODES).map(|at| {
        let now = bytes(after, at).unwrap_or_default();
        let before = bytes(before, at).filter(|before| *before <= now);
        now - before.unwrap_or_default()
    });
    grown.sum()
}

/// The agents of all nodes. All have the same objects.
#[derive(Clone)]
struct Simulated {
    status: Bytes,
    rounds: Arc<Mutex<Rounds>>,
}

impl Simulated {
    async fn serve(self, socket: UnixListener) {
        while let Ok((stream, _)) = socket.accept().await {
            let agent = self.clone();
            let answered = service_fn(move |request: Request<Incoming>| {
                let pieces = agent.answer(request.uri().path(), request.uri().query());
                let frames = pieces.map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
                std::future::ready(Ok::<_, Infallible>(Response::new(StreamBody::new(frames))))
            });
            let server = http2::Builder::new(TokioExecutor::new());
            tokio::spawn(server.serve_connection(TokioIo::new(stream), answered));
        }
    }

    fn answer(&self, path: &str, query: Option<&str>) -> BoxStream<'static, Bytes> {
        let query = query.and_then(|query| query.split_once('='));
        let whole = match (path.trim_start_matches("/ui/api/"), query) {
            ("clock", _) => {
                let now = Timestamp::now();
                line(&Clock { now })
            }
            ("status", _) => self.status.clone(),
            ("shapes", wanted) => lock(&self.rounds).shapes(wanted.map(|(_, of)| of)),
            ("changes", Some((_, every))) => return self.changes(every.parse().unwrap_or(1)),
            _ => Bytes::new(),
        };
        stream::once(async { whole }).boxed()
    }

    /// Returns the rounds of a node, with this number of seconds in between.
    fn changes(&self, every: u64) -> BoxStream<'static, Bytes> {
        let ticks = tokio::time::interval(Duration::from_secs(every));
        let rounds = Arc::clone(&self.rounds);
        let lines = stream::unfold((ticks, rounds, 0), async |(mut ticks, rounds, nth)| {
            ticks.tick().await;
            let line = lock(&rounds).line(nth);
            Some((line, (ticks, rounds, nth + 1)))
        });
        lines.boxed()
    }
}

fn lock(rounds: &Mutex<Rounds>) -> std::sync::MutexGuard<'_, Rounds> {
    rounds.lock().unwrap_or_else(PoisonError::into_inner)
}

fn line(value: &impl serde::Serialize) -> Bytes {
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

/// The rounds of changes, each made when the first node sends it.
struct Rounds {
    phase: Arc<AtomicUsize>,
    rows: Vec<Row>,
    sent: Sent,
    lines: Vec<Bytes>,
    /// True once a node has sent the counts of all Services.
    are_counted: bool,
    shapes: HashMap<Digest, Shape>,
}

impl Rounds {
    fn new(phase: Arc<AtomicUsize>) -> Self {
        Self {
            phase,
            rows: (0..SERVICES).map(row).collect(),
            sent: Sent::default(),
            lines: Vec::new(),
            are_counted: false,
            shapes: HashMap::new(),
        }
    }

    fn line(&mut self, nth: usize) -> Bytes {
        while self.lines.len() <= nth {
            self.change(self.lines.len());
            let round = self.sent.round(self.rows.iter().cloned());
            self.are_counted |= !round.more;
            self.lines.push(line(&round));
        }
        self.lines[nth].clone()
    }

    /// Changes the rows: all numbers on busy nodes, and some Services at churn.
    fn change(&mut self, round: usize) {
        let phase = self.phase.load(Ordering::Relaxed);
        if phase >= BUSY {
            for (nth, row) in self.rows.iter_mut().enumerate() {
                row.flows = (nth + round) as u64;
                row.counts.iter_mut().for_each(|count| *count += 1_234);
            }
        }
        if phase >= CHURNING {
            for nth in 0..CHURN {
                self.rows[(round * CHURN + nth) % SERVICES].shape.ready ^= 1;
            }
        }
        for Row { shape, .. } in &self.rows {
            let digest = Digest::of(shape);
            self.shapes.entry(digest).or_insert_with(|| shape.clone());
        }
    }

    /// Returns the shapes of these digests, or of all Services.
    fn shapes(&self, wanted: Option<&str>) -> Bytes {
        let wanted: Vec<Digest> = match wanted {
            None => self.rows.iter().map(|row| Digest::of(&row.shape)).collect(),
            Some(wanted) => {
                let digests = wanted.split(',').map(|one| one.to_owned().try_into());
                digests.filter_map(Result::ok).collect()
            }
        };
        let shapes = wanted.into_iter().filter_map(|digest| {
            let shape = self.shapes.get(&digest)?.clone();
            Some(line(&Shaped { digest, shape }))
        });
        shapes.collect::<Vec<_>>().concat().into()
    }
}

fn row(nth: usize) -> Row {
    let [high, low] = (nth as u16).to_be_bytes();
    Row {
        shape: Shape {
            namespace: format!("team-{:02}", nth % TEAMS),
            name: format!("service-{nth:04}"),
            r#type: "ClusterIP".to_owned(),
            addresses: vec![[10, 96, high, low].into()],
            ports: vec![RowPort {
                port: 80,
                node_port: None,
                protocol: "TCP".to_owned(),
                name: "http".to_owned(),
            }],
            ready: 3,
            total: 3,
            conflicts: 0,
            endpoints: "aGVsbG8h".to_owned(),
        },
        flows: 0,
        open_flows: 0,
        counts: [1_000_000; COUNTERS],
        failures: None,
    }
}
