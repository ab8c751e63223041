//! On a node that kpx serves: a trace matches the real packets.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use aya::maps::{HashMap, Map, MapData};
use expect_test::expect;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::counter::Reason;
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::hook::SlowProgram;
use proxy_common::names::{INGRESS, IPV4, IPV6, LO};
use proxy_trace::report::{Origin, Trace, Verdict};
use testbed::agent::{Agent, Cluster, DEADLINE, Service, wait_until};
use testbed::echo::{Dial, Fault, Protocol, Servers};
use testbed::lab::{Family, Host, Lab, Layout};

use crate::trace::{kpx, trace_command};

const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_080;

#[test]
fn trace_predicts_packets() -> Result<()> {
    // The overlay's layout has a bridge too.
    for layout in [Layout::Routed, Layout::Ptp, Layout::Vxlan] {
        agree(layout).with_context(|| format!("{layout:?}"))?;
    }
    Ok(())
}

fn agree(layout: Layout) -> Result<()> {
    let lab = Lab::start(layout)?;
    let servers = Servers::start()?;
    for host in lab.backends() {
        servers.serve(host, PORT)?;
    }
    let cluster = Cluster::with_manifests(&lab)?;
    let services = [
        Service::new("p1b", 11, &["p1b"], PORT),
        Service::new("p2a", 12, &["p2a"], PORT),
        Service::new("p1a", 13, &["p1a"], PORT),
        Service::new("n1", 14, &["n1"], PORT),
        Service::new("empty", 15, &[], PORT),
    ];
    let mut open = Service::new("open", 16, &["p2a"], PORT).objects(&lab);
    open[0].0["spec"]["type"] = "NodePort".into();
    open[0].0["spec"]["ports"][0]["nodePort"] = NODE_PORT.into();
    let sticky = Service::new("sticky", 17, &["p1b", "p2a"], PORT);
    let mut known = sticky.objects(&lab);
    known[0].0["spec"]["sessionAffinity"] = "ClientIP".into();
    open.iter()
        .chain(&known)
        .try_for_each(|object| cluster.put(object))?;
    for object in services.iter().flat_map(|service| service.objects(&lab)) {
        cluster.put(&object)?;
    }
    // A trace explains packets, so packets serve sockets here.
    let packets = ["--socket-lb", "off"].map(str::to_owned);
    let agent = Agent::start_with(&lab, &lab.n1, cluster.source(), &packets)?;
    for family in Family::ALL {
        for service in &services {
            let frontend = service.frontend(family);
            for client in ["p1a", "n1"] {
                let what = format!("{client} dials {frontend}, {}", service.name);
                agrees(&lab, &agent, lab.host(client), frontend).context(what)?;
            }
        }
    }
    for family in Family::ALL {
        let frontend = SocketAddr::new(lab.n1.host.addrs.ip(family), NODE_PORT);
        for client in ["x", "p1a", "n1"] {
            let what = format!("{client} dials the node port at {frontend}");
            agrees(&lab, &agent, lab.host(client), frontend).context(what)?;
        }
    }
    for family in Family::ALL {
        known_client(&lab, &agent, sticky.frontend(family))?;
    }
    by_name(&lab, &agent, &services[0])?;
    in_device(&lab, &agent, services[0].frontend(Family::V4))?;
    to_loopback(&lab, &agent)?;
    from_another_namespace(&lab, &agent, services[0].frontend(Family::V4))?;
    for program in [INGRESS, SlowProgram::Ipv4.program()] {
        other_programs(&lab, &agent, program, services[0].frontend(Family::V4))?;
    }
    if layout == Layout::Ptp {
        a_pod_with_a_network(&lab, &agent, services[1].frontend(Family::V4))?;
    }
    agent.stop()
}

/// A trace of a known client leads to its previous backend; traces of other clients do not change
/// that.
fn known_client(lab: &Lab, agent: &Agent, frontend: SocketAddr) -> Result<()> {
    let family = Family::of(frontend.ip());
    let known = lab.host("p1a");
    let dial = Dial::new(Protocol::Tcp, frontend);
    let before = dial.exchange(&known.ns, b"remember me")?.backend;
    for (client, is_known) in [("p1a", true), ("n1", false)] {
        let from = lab.host(client).addrs.ip(family).to_string();
        let trace = trace(lab, agent.run_dir(), &from, frontend, &[])?;
        ensure!(
            trace.outcome.affinity_hit == is_known,
            "{client}: {trace:?}"
        );
        let backend = trace
            .outcome
            .backend
            .context("a packet that is forwarded has a backend")?;
        let expected = SocketAddr::new(lab.host(&before).addrs.ip(family), PORT).to_string();
        ensure!(
            !is_known || backend.at == expected,
            "{} was said, {expected} serves",
            backend.at
        );
    }
    ensure!(
        dial.exchange(&known.ns, b"here I am again")?.backend == before,
        "tracing moved a client"
    );
    Ok(())
}

/// A packet of p1a from outside counts as spoofed.
fn in_device(lab: &Lab, agent: &Agent, frontend: SocketAddr) -> Result<()> {
    let from = lab.host("p1a").addrs.v4.to_string();
    let trace = trace(
        lab,
        agent.run_dir(),
        &from,
        frontend,
        &["--in-device", "eth0"],
    )?;
    ensure!(trace.hook.device == "eth0", "{trace:?}");
    ensure!(
        trace.outcome.reason.as_deref() == Some(Reason::Spoofed.name()),
        "{trace:?}"
    );
    let error = self::trace(
        lab,
        agent.run_dir(),
        &from,
        frontend,
        &["--in-device", "lo"],
    )
    .err()
    .context("lo")?;
    expect!["kpx: kpx has no ingress program on lo"].assert_eq(&error.to_string());
    Ok(())
}

/// Packets to loopback addresses bypass the anchor.
fn to_loopback(lab: &Lab, agent: &Agent) -> Result<()> {
    // kube-proxy serves 127.0.0.1 alone by default.
    for (to, wanted) in [
        ("127.0.0.1", Verdict::Forward),
        ("127.1.2.3", Verdict::Pass),
        ("::1", Verdict::Pass),
    ] {
        let to = SocketAddr::new(to.parse()?, NODE_PORT);
        let mut command = trace_command()?;
        command
            .args([
                "--host",
                "--to",
                &to.to_string(),
                "--output",
                "json",
                "--run-dir",
            ])
            .arg(agent.run_dir());
        let text = lab.n1.host.ns.run(|| kpx(&mut command))?;
        let trace: Trace = serde_json::from_str(&text)?;
        ensure!(
            (trace.hook.program.as_str(), trace.hook.device.as_str()) == (LO, "lo"),
            "{to}: {trace:?}"
        );
        ensure!(trace.outcome.verdict == wanted, "{to}: {trace:?}");
    }
    Ok(())
}

/// The other namespace has other devices and routes than the agent's.
fn from_another_namespace(lab: &Lab, agent: &Agent, frontend: SocketAddr) -> Result<()> {
    let mut command = trace_command()?;
    command.arg("--run-dir").arg(agent.run_dir()).args([
        "--from",
        "10.244.1.2",
        "--to",
        &frontend.to_string(),
    ]);
    let error = lab
        .host("p1a")
        .ns
        .run(|| kpx(&mut command))
        .err()
        .context("a pod's namespace is taken for the node's")?;
    let error = error.to_string();
    ensure!(
        error.contains("serves another network namespace, net:[") && error.contains("trace there"),
        "{error}"
    );
    Ok(())
}

/// Checks the role of a veth that has its own network, and its reason, until the network goes.
fn a_pod_with_a_network(lab: &Lab, agent: &Agent, frontend: SocketAddr) -> Result<()> {
    let from = lab.host("p1a").addrs.v4.to_string();
    let role = |wanted: &str| {
        wait_until(
            DEADLINE,
            &format!("p1a's device counts as a {wanted}"),
            || {
                let status = agent.status()?;
                let devices = status["devices"].as_array().context("devices")?.iter();
                Ok(devices
                    .filter(|device| device["name"] == "p1a")
                    .any(|device| device["role"] == wanted))
            },
        )
    };
    for (change, wanted) in [("add", "device"), ("del", "pod")] {
        lab.n1
            .host
            .ns
            .ip(&format!("addr {change} 10.9.0.1/24 dev p1a"))?;
        role(wanted)?;
        let trace = trace(lab, agent.run_dir(), &from, frontend, &[])?;
        let origin = trace
            .outcome
            .origin
            .context("a client that opens a flow has an origin")?;
        ensure!((origin == Origin::Pod) == (wanted == "pod"), "{trace:?}");
        let why = "p1a has an address and a network of its own (10.9.0.0/24), so it counts as a router's; if it is a pod's device, give it host routes alone, or set --cluster-cidr or --detect-local-mode";
        let notes = if wanted == "pod" {
            Vec::new()
        } else {
            vec![why.to_owned()]
        };
        ensure!(trace.notes == notes, "{:?}", trace.notes);
    }
    Ok(())
}

/// A status with another tag stands for an agent with programs of another build.
fn other_programs(lab: &Lab, agent: &Agent, program: &str, frontend: SocketAddr) -> Result<()> {
    let mut status = agent.status()?;
    let tag = std::mem::replace(
        &mut status["programs"][program]["tag"],
        "0123456789abcdef".into(),
    );
    let dir = tempfile::tempdir()?;
    let listener = UnixListener::bind(dir.path().join("kpx.sock"))?;
    let from = lab.host("p1a").addrs.v4.to_string();
    let error = thread::scope(|scope| {
        let maps = status["maps"].to_string();
        let status = status.to_string();
        let answer = scope.spawn(move || {
            [&status, &maps, "[]"]
                .iter()
                .try_for_each(|json| answer(&listener, json))
        });
        let traced = trace(lab, dir.path(), &from, frontend, &[]);
        answer
            .join()
            .map_err(|_| anyhow!("the status panicked"))??;
        traced.err().context("other programs run")
    })?;
    let error = error
        .to_string()
        .replace(tag.as_str().context("a tag is text")?, "TAG");
    let expected = format!(
        "kpx: the running kpx 0.1.0 has a different {program} (0123456789abcdef, not TAG): trace with the running binary"
    );
    ensure!(error == expected, "{error}");
    Ok(())
}

/// Answers one request like kpx.
fn answer(listener: &UnixListener, json: &str) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    let mut head = [0; 1024];
    let _ = stream.read(&mut head)?;
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{json}",
        json.len()
    )
}

#[test]
fn trace_needs_an_agent_or_manifests() -> Result<()> {
    let mut command = trace_command()?;
    command.args([
        "--run-dir",
        "/nonexistent",
        "--from",
        "10.0.0.1",
        "--to",
        "10.0.0.2:80",
    ]);
    let error = kpx(&mut command).err().context("no agent runs there")?;
    expect!["kpx: no kpx answers at /nonexistent/kpx.sock: is `kpx run` running?"]
        .assert_eq(&error.to_string());
    Ok(())
}

/// Traces a connection, opens it, and compares.
fn agrees(lab: &Lab, agent: &Agent, client: &Host, frontend: SocketAddr) -> Result<()> {
    let from = client.addrs.ip(Family::of(frontend.ip()));
    let dial = Dial::new(Protocol::Tcp, frontend);
    let real = dial.exchange(&client.ns, b"which way?");
    let flows = flows(agent)?;
    let trace = trace(
        lab,
        agent.run_dir(),
        &from.to_string(),
        frontend,
        &["--count", "100"],
    )?;
    // The sweep may have removed ended flows.
    ensure!(self::flows(agent)?.is_subset(&flows), "tracing left flows");
    match (trace.outcome.verdict, real) {
        (Verdict::Forward, Ok(answer)) => {
            let backend = trace
                .outcome
                .backend
                .context("a packet that is forwarded has a backend")?;
            let expected = SocketAddr::new(
                lab.host(&answer.backend)
                    .addrs
                    .ip(Family::of(frontend.ip())),
                PORT,
            );
            ensure!(
                backend.at == expected.to_string(),
                "{} was said, {} answered",
                backend.at,
                answer.backend
            );
            let source: SocketAddr = trace.outcome.source.context("and a source")?.at.parse()?;
            ensure!(
                source.ip() == answer.source.ip(),
                "{source} was said, {} was seen",
                answer.source
            );
        }
        (Verdict::Reject, Err(Fault::Refused)) => {}
        (verdict, real) => ensure!(false, "{verdict:?} was said, but {real:?}"),
    }
    Ok(())
}

/// The trace shows the agent's names of Services.
fn by_name(lab: &Lab, agent: &Agent, service: &Service) -> Result<()> {
    let mut command = trace_command()?;
    command.arg("--run-dir").arg(agent.run_dir()).args([
        "--from",
        "node/n1",
        "--to",
        &format!("default/{}", service.name),
    ]);
    let text = lab
        .n1
        .host
        .ns
        .run(|| kpx(command.args(["--output", "json"])))?;
    let trace: Trace = serde_json::from_str(&text).with_context(|| text)?;
    assert_eq!(trace.packet.to, service.frontend(Family::V4).to_string());
    Ok(())
}

fn trace(
    lab: &Lab,
    run_dir: &Path,
    from: &str,
    to: SocketAddr,
    arguments: &[&str],
) -> Result<Trace> {
    let mut command = trace_command()?;
    command.arg("--run-dir").arg(run_dir).args([
        "--from",
        from,
        "--to",
        &to.to_string(),
        "--output",
        "json",
    ]);
    let text = lab.n1.host.ns.run(|| kpx(command.args(arguments)))?;
    serde_json::from_str(&text).with_context(|| text)
}

/// Returns the keys of all entries in an agent's flow tables.
fn flows(agent: &Agent) -> Result<BTreeSet<String>> {
    let status = agent.status()?;
    let open = |name: &str| {
        let id = status["maps"][name]
            .as_u64()
            .with_context(|| format!("no map {name} in the status"))?;
        Ok::<_, anyhow::Error>(Map::from_map_data(MapData::from_id(u32::try_from(id)?)?)?)
    };
    let v4: HashMap<MapData, FlowKey<Addr4>, Flow<Addr4>> = open(IPV4.flows)?.try_into()?;
    let v6: HashMap<MapData, FlowKey<Addr6>, Flow<Addr6>> = open(IPV6.flows)?.try_into()?;
    let v4 = v4.keys().map(|key| Ok(format!("{:?}", key?)));
    v4.chain(v6.keys().map(|key| Ok(format!("{:?}", key?))))
        .collect()
}
