//! Pods in the kubelet's cgroups: default use of socket load balancing.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use proxy_view::status::PodStatus;
use serde_json::{Value, json};
use testbed::agent::{Agent, DEADLINE, Object, Service, wait_until};
use testbed::cases::Running;
use testbed::cgroup::{Kubepods, Visited};
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::{Family, Layout};

use crate::forbid;
use crate::socket::fixture::{Fixture, NODE, PORT, count, web};

const TCP: Protocol = Protocol::Tcp;
const STACK: [&str; 2] = ["--fast-path", "off"];
const CHOICE: &str = "kpx.dev/socket-lb";

/// A node whose pods have cgroups. All of them dial from the network namespace of p1a.
struct Cluster {
    // Drops before the test's cgroup, which contains it.
    kubepods: Kubepods,
    fixture: Fixture,
}

impl Cluster {
    fn start() -> Result<Self> {
        let fixture = Fixture::with_api_server(Layout::Routed)?;
        Ok(Self {
            kubepods: Kubepods::make(&fixture.cgroup)?,
            fixture,
        })
    }

    fn agent(&self, args: &[&str]) -> Result<Agent<'_>> {
        self.fixture
            .agent("auto", &[&["--iptables-sync-period", "1s"], args].concat())
    }

    /// Creates a Pod of this node with these annotations, or replaces it.
    fn put(&self, name: &str, annotations: Value, spec: Value) -> Result<()> {
        self.fixture
            .cluster
            .put_as_is(&pod(name, annotations, spec))
    }

    /// Makes the cgroup of a Pod of the API server.
    fn cgroup(&self, name: &str) -> Result<Visited> {
        self.kubepods.pod(&uid(name))
    }

    /// Checks by a dial from a cgroup whether the programs translate its sockets.
    fn reaches(&self, cgroup: &Visited, want: bool) -> Result<()> {
        Family::ALL
            .into_iter()
            .try_for_each(|family| cgroup.visit(|| self.dial(family, want).map(drop))?)
    }

    /// Waits until the programs translate sockets of a cgroup, or no longer do. The programs change
    /// a moment after the status.
    fn eventually(&self, cgroup: &Visited, want: bool) -> Result<()> {
        wait_until(DEADLINE, &format!("sockets are translated: {want}"), || {
            Ok(self.reaches(cgroup, want).is_ok())
        })
    }

    /// Dials from this process. The kernel's peer of a translated socket differs from the peer that
    /// the socket sees.
    fn dial(&self, family: Family, want: bool) -> Result<Connection> {
        let to = web().frontend(family);
        let connection = self.fixture.reach("p1a", TCP, to)?.connection;
        let [local, _] = connection.ends()?;
        let port = format!(":{}", local.port());
        let mut list = Command::new("ss");
        list.args(["-Htn", "state", "established", "sport", "=", &port]);
        let sockets = self.fixture.lab.host("p1a").ns.exec(&mut list)?;
        ensure!(!sockets.trim().is_empty(), "no socket at {port}");
        let is_translated = !sockets.contains(&to.to_string());
        ensure!(
            is_translated == want,
            "p1a to {to}: translated: {is_translated}, not {want}: {sockets}"
        );
        Ok(connection)
    }
}

/// Returns a uid derived from a name.
fn uid(name: &str) -> String {
    let sum = name.bytes().fold(0_u64, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(byte.into())
    });
    format!("00000000-0000-4000-8000-{sum:012x}")
}

fn pod(name: &str, annotations: Value, spec: Value) -> Object {
    let mut object = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "namespace": "default", "name": name, "uid": uid(name), "annotations": annotations },
        "spec": { "nodeName": NODE, "containers": [{ "name": "main" }] },
        "status": { "phase": "Running" },
    });
    let fields = spec.as_object().cloned().unwrap_or_default();
    object["spec"]
        .as_object_mut()
        .expect("an object")
        .extend(fields);
    Object(object)
}

/// Returns the pods of `kpx status` by name.
fn pods(agent: &Agent) -> Result<BTreeMap<String, PodStatus>> {
    let pods = agent.typed_status()?.pods.context("pods are chosen")?;
    Ok(pods
        .pods
        .into_iter()
        .map(|pod| (pod.name.clone(), pod))
        .collect())
}

/// Waits until a pod has this path for this reason.
fn waits(agent: &Agent, name: &str, way: &str, why: &str) -> Result<()> {
    let seen = || {
        Ok::<_, anyhow::Error>(
            pods(agent)?
                .get(name)
                .map(|pod| (pod.path.clone(), pod.why.clone())),
        )
    };
    let is_so = |(has, reason): (String, Option<String>)| {
        has == way && reason.unwrap_or_default().contains(why)
    };
    wait_until(DEADLINE, &format!("{name} is {way}: {why}"), || {
        Ok(seen()?.is_some_and(is_so))
    })
    .with_context(|| format!("{:?}\n{}", seen(), agent.log()))
}

#[test]
fn kpx_translates_sockets_of_pods() -> Result<()> {
    let cluster = &Cluster::start()?;
    cluster.fixture.put(&sticky())?;
    let agent = cluster.agent(&STACK)?;
    testbed::cases!(
        &Running { fixture: cluster, agent };
        packets_serve_a_pods_services_with_affinity,
        packets_serve_a_pods_sockets_of_one_device,
        pods_change_their_ways_and_open_connections_go_on,
    )
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of pods")]
fn pods_sockets_are_translated_unless_their_pod_has_a_reason_against() -> Result<()> {
    let cluster = Cluster::start()?;
    let agent = cluster.agent(&STACK)?;
    let mesh = json!({ "sidecar.istio.io/status": "{}" });
    let rows = [
        ("plain", json!({}), json!({}), "sockets", ""),
        (
            "mesh",
            mesh,
            json!({}),
            "packets",
            "it is in a mesh: annotation sidecar.istio.io/status",
        ),
        (
            "out",
            json!({ CHOICE: "off" }),
            json!({}),
            "packets",
            "its annotation kpx.dev/socket-lb is off",
        ),
        (
            "wrong",
            json!({ CHOICE: "maybe" }),
            json!({}),
            "packets",
            "\"maybe\", which is neither on nor off",
        ),
        (
            "kata",
            json!({}),
            json!({ "runtimeClassName": "kata" }),
            "packets",
            "its runtime class is kata",
        ),
        (
            "brave",
            json!({ CHOICE: "on" }),
            json!({ "runtimeClassName": "kata" }),
            "sockets",
            "",
        ),
        (
            "own",
            json!({}),
            json!({ "hostNetwork": true }),
            "host",
            "its sockets are the host's",
        ),
    ];
    let mut cgroups = BTreeMap::new();
    for (name, annotations, spec, _, _) in &rows {
        cgroups.insert(*name, cluster.cgroup(name)?);
        cluster.put(name, annotations.clone(), spec.clone())?;
    }
    for (name, _, _, way, why) in &rows {
        waits(&agent, name, way, why)?;
        cluster
            .reaches(&cgroups[name], *way == "sockets")
            .with_context(|| format!("from the cgroup of {name}"))?;
    }
    let status = agent.typed_status()?;
    ensure!(
        status.healthy && status.options.socket_lb == "auto: host and pods",
        "{status:?}"
    );
    ensure!(
        status
            .pods
            .as_ref()
            .is_some_and(|pods| pods.by_sockets == 2 && pods.led == 2),
        "{:?}",
        status.pods
    );
    let wrong = status
        .skipped
        .iter()
        .find(|skipped| skipped.contains("Pod default/wrong"));
    ensure!(
        wrong.is_some_and(|wrong| wrong.contains(CHOICE)),
        "{:?}",
        status.skipped
    );

    // A pod's containers, and cgroups that a pod makes under any name, are below the pod's cgroup.
    let within = |pod: &str, name: &str| cgroups[pod].within(name);
    cluster
        .reaches(&within("plain", "container")?, true)
        .context("a container")?;
    cluster
        .reaches(&within("plain", "container/container")?, true)
        .context("a container of crun")?;
    // Nested containers may be nodes of a cluster whose Services have the same addresses.
    cluster
        .reaches(&within("plain", "container/docker/node")?, false)
        .context("a container's own container")?;
    cluster
        .reaches(&within("plain", &format!("pod{}", uid("mesh")))?, true)
        .context("another name")?;
    cluster
        .reaches(
            &within("mesh", &format!("kubepods/pod{}", uid("plain")))?,
            false,
        )
        .context("a spoofed name")?;

    // A process outside of pods, in a pod's network namespace.
    cluster
        .dial(Family::V4, false)
        .context("an unknown cgroup")?;

    // Packets serve UDP of pods, because kpx could not end their stale sockets.
    drop(agent);
    let agent = cluster.agent(&["--fast-path", "off", "--socket-lb-udp"])?;
    waits(&agent, "plain", "sockets", "")?;
    let before = count(&agent, "events", "socket_translated")?;
    cgroups["plain"].visit(|| {
        cluster
            .fixture
            .reach("p1a", Protocol::Udp, web().frontend(Family::V4))
            .map(drop)
    })??;
    ensure!(
        count(&agent, "events", "socket_translated")? == before,
        "datagrams of a pod"
    );
    cluster.reaches(&cgroups["plain"], true)
}

fn pods_change_their_ways_and_open_connections_go_on(running: &Running<Cluster>) -> Result<()> {
    let Running {
        fixture: cluster,
        agent,
    } = running;
    cluster.put("late", json!({}), json!({}))?;
    waits(
        agent,
        "late",
        "packets",
        "kubelet's folders have no cgroup of it",
    )?;
    let cgroup = cluster.cgroup("late")?;
    waits(agent, "late", "sockets", "")?;
    let mut open = cgroup.visit(|| cluster.dial(Family::V4, true))??;

    cluster.put("late", json!({ CHOICE: "off" }), json!({}))?;
    waits(agent, "late", "packets", "is off")?;
    cluster.eventually(&cgroup, false)?;
    open.exchange(b"still there?")?;
    let [_, peer] = open.ends()?;
    ensure!(peer == web().frontend(Family::V4), "{peer}");
    cluster.put("late", json!({}), json!({}))?;
    waits(agent, "late", "sockets", "")?;
    cluster.reaches(&cgroup, true)?;

    cluster
        .fixture
        .cluster
        .delete(&pod("late", json!({}), json!({})))?;
    wait_until(DEADLINE, "the pod is forgotten", || {
        Ok(!pods(agent)?.contains_key("late"))
    })?;
    cluster.eventually(&cgroup, false)?;
    open.exchange(b"still there?")?;
    Ok(())
}

fn sticky() -> Service {
    Service::new("sticky", 11, &["p1b", "p2a"], PORT).affinity(600)
}

/// Checks that a pod has one backend of a Service with affinity, by packets and by sockets.
fn packets_serve_a_pods_services_with_affinity(running: &Running<Cluster>) -> Result<()> {
    let Running {
        fixture: cluster,
        agent,
    } = running;
    let sticky = sticky();
    let cgroup = cluster.cgroup("sticky")?;
    cluster.put("sticky", json!({}), json!({}))?;
    waits(agent, "sticky", "sockets", "")?;
    let before = count(agent, "events", "socket_translated")?;
    for family in Family::ALL {
        let to = sticky.frontend(family);
        let by_packets = cluster.fixture.reach("p1a", TCP, to)?.backend;
        for _ in 0..8 {
            let backend = cgroup
                .visit(|| cluster.fixture.reach("p1a", TCP, to))??
                .backend;
            ensure!(backend == by_packets, "{backend}, not {by_packets}");
        }
    }
    ensure!(
        count(agent, "events", "socket_translated")? == before,
        "sockets were translated"
    );
    cluster.reaches(&cgroup, true)?;
    // All sockets of the host are the same client.
    cluster
        .fixture
        .reaches(NODE, TCP, sticky.frontend(Family::V4), true)
        .map(drop)
}

/// Checks that packets serve a socket that is bound to a device: the backend may be behind another
/// device.
fn packets_serve_a_pods_sockets_of_one_device(running: &Running<Cluster>) -> Result<()> {
    let Running {
        fixture: cluster,
        agent,
    } = running;
    let cgroup = cluster.cgroup("bound")?;
    cluster.put("bound", json!({}), json!({}))?;
    waits(agent, "bound", "sockets", "")?;
    cluster.reaches(&cgroup, true)?;
    let before = count(agent, "events", "socket_translated")?;
    for family in Family::ALL {
        let dial = Dial::new(TCP, web().frontend(family)).device("eth0");
        cgroup.visit(|| {
            dial.exchange(&cluster.fixture.lab.host("p1a").ns, b"hello")
                .map(drop)
        })??;
    }
    ensure!(
        count(agent, "events", "socket_translated")? == before,
        "the socket was translated"
    );
    Ok(())
}

/// Checks that packets serve pods while bypass is possible, with a rule that comes and goes.
#[test]
fn pods_use_socket_lb_only_without_bypass() -> Result<()> {
    const SKIPS: &str = "its connections skip the stack from their first packet on";
    let cluster = Cluster::start()?;
    let agent = cluster.agent(&[])?;
    let cgroup = cluster.cgroup("plain")?;
    cluster.put("plain", json!({}), json!({}))?;
    waits(&agent, "plain", "packets", SKIPS)?;
    // The agent permits bypass for two seconds at a time.
    cluster.eventually(&cgroup, false)?;
    let node = &cluster.fixture.lab.host(NODE).ns;
    for _ in 0..2 {
        let before = count(&agent, "events", "socket_translated")?;
        cluster.reaches(&cgroup, false)?;
        ensure!(count(&agent, "events", "socket_translated")? == before);
        forbid(
            node,
            "ct state invalid drop\ntcp flags & (syn | ack) == ack ct state new drop",
        )?;
        waits(&agent, "plain", "sockets", "")?;
        cluster.eventually(&cgroup, true)?;
        cluster.reaches(&cgroup, true)?;
        node.nft("delete table inet netpol")?;
        waits(&agent, "plain", "packets", SKIPS)?;
        cluster.eventually(&cgroup, false)?;
    }
    Ok(())
}

/// Checks pods on a bridge, where no connection bypasses the stack, although rules would permit it.
#[test]
fn sockets_of_pods_on_a_bridge_are_translated() -> Result<()> {
    let fixture = Fixture::with_api_server(Layout::Bridge)?;
    let cluster = Cluster {
        kubepods: Kubepods::make(&fixture.cgroup)?,
        fixture,
    };
    let agent = cluster.agent(&[])?;
    let cgroup = cluster.cgroup("plain")?;
    cluster.put("plain", json!({}), json!({}))?;
    waits(&agent, "plain", "sockets", "")?;
    cluster.reaches(&cgroup, true)
}

#[test]
fn pods_sockets_are_translated_without_an_agent_and_as_the_next_agent_reads_their_objects()
-> Result<()> {
    let cluster = Cluster::start()?;
    let agent = cluster.agent(&STACK)?;
    let stays = cluster.cgroup("stays")?;
    let goes = cluster.cgroup("goes")?;
    for name in ["stays", "goes"] {
        cluster.put(name, json!({}), json!({}))?;
        waits(&agent, name, "sockets", "")?;
    }
    drop(agent); // By SIGKILL.
    cluster.reaches(&stays, true).context("no agent runs")?;
    cluster.put("goes", json!({ CHOICE: "off" }), json!({}))?;
    let new = cluster.cgroup("new")?;
    cluster.put("new", json!({}), json!({}))?;
    cluster
        .reaches(&new, false)
        .context("a new pod has no row")?;

    let agent = cluster.agent(&STACK)?;
    for (name, cgroup, way) in [
        ("stays", &stays, "sockets"),
        ("goes", &goes, "packets"),
        ("new", &new, "sockets"),
    ] {
        waits(&agent, name, way, "")?;
        cluster
            .eventually(cgroup, way == "sockets")
            .with_context(|| format!("{name}, the next agent runs"))?;
    }
    drop(agent);

    let agent = cluster.fixture.agent("host", &STACK)?;
    ensure!(agent.typed_status()?.pods.is_none());
    cluster.reaches(&stays, false).context("host alone")?;
    drop(agent);
    let _agent = cluster.agent(&["--fast-path", "off", "--masquerade", "compat"])?;
    cluster
        .reaches(&stays, false)
        .context("addresses decide whom to masquerade")
}

/// Checks an agent that must not list Pods, like with kube-proxy's rights.
#[test]
fn without_the_right_to_list_pods_packets_serve_them() -> Result<()> {
    let mut cluster = Cluster::start()?;
    for verb in ["list", "watch"] {
        cluster.fixture.api()?.fail(verb, "pods", 403);
    }
    let cgroup = cluster.cgroup("plain")?;
    cluster.put("plain", json!({}), json!({}))?;
    let agent = cluster.agent(&STACK)?;
    let why = "the API server does not let kpx list and watch Pods";
    agent.wait(DEADLINE, "the reason is reported", |status| {
        status
            .pods
            .as_ref()
            .and_then(|pods| pods.why_none.as_deref())
            == Some(why)
    })?;
    let status = agent.typed_status()?;
    ensure!(
        status.healthy && status.problems.is_empty(),
        "{:?}",
        status.problems
    );
    cluster.reaches(&cgroup, false)?;
    cluster
        .fixture
        .reaches(NODE, TCP, web().frontend(Family::V4), true)
        .context("the host's own")?;
    Ok(())
}

#[test]
fn a_full_table_leaves_more_pods_to_packets() -> Result<()> {
    const MORE: usize = 3;
    let cluster = Cluster::start()?;
    let pods = proxy_common::socket::PODS_MAX as usize + MORE;
    let mut cgroups = Vec::new();
    for nth in 0..pods {
        let name = format!("pod-{nth}");
        cgroups.push(cluster.cgroup(&name)?);
        cluster.put(&name, json!({}), json!({}))?;
    }
    let agent = cluster.agent(&STACK)?;
    agent.wait(DEADLINE, "the table is full", |status| {
        status
            .pods
            .as_ref()
            .is_some_and(|all| all.by_sockets == pods - MORE)
    })?;
    let all = agent.typed_status()?.pods.context("pods")?;
    let left = all
        .pods
        .iter()
        .filter(|pod| pod.why.as_deref() == Some("the table of pods is full"))
        .count();
    ensure!(left == MORE, "{left}");
    ensure!(agent.typed_status()?.healthy);
    let is_translated = |cgroup: &Visited| cluster.reaches(cgroup, true).is_ok();
    ensure!(
        cgroups.iter().take(MORE + 1).any(is_translated),
        "of so many one has a row"
    );
    Ok(())
}
