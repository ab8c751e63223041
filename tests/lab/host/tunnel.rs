//! Connections to pods that a host outside the cluster cannot reach go through the API server.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::{Dial, Fault, Protocol};
use testbed::lab::{Family, Host, Layout};

use crate::host::fixture::{Fixture, PORT, is_as_before, state, unreachable};

const TUNNEL: [&str; 2] = ["--tunnel", "tcp"];

/// Returns the addresses at which the tunnel listens.
fn starts(kpx: &Agent<'_>) -> Result<Vec<SocketAddr>> {
    let status = kpx.status()?;
    let addresses = status["tunnel"]["addresses"]
        .as_array()
        .context("a tunnel")?;
    addresses
        .iter()
        .map(|address| Ok(address.as_str().context("an address")?.parse()?))
        .collect()
}

fn connect(host: &Host, to: SocketAddr) -> Result<TcpStream> {
    let stream = host
        .ns
        .run(|| TcpStream::connect_timeout(&to, Duration::from_secs(1)))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

/// Returns the output of a command that queries the agent.
fn reported(kpx: &Agent<'_>, host: &Host, command: &str) -> Result<String> {
    let output = testbed::agent::kpx(
        &host.ns,
        &format!("{command} --run-dir {}", kpx.run_dir().display()),
    )?;
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns true if a connection opens and is reset before any data.
fn is_reset(host: &Host, to: SocketAddr) -> bool {
    let said = connect(host, to).and_then(|mut stream| Ok(stream.read(&mut [0; 1])?));
    let error = said
        .err()
        .and_then(|error| error.downcast::<std::io::Error>().ok());
    error.is_some_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn host_reaches_pods_of_an_overlay_through_the_api_server() -> Result<()> {
    let fixture = Fixture::start(Layout::Vxlan)?;
    let c = &fixture.lab.x;
    let web = Service::new("web", 10, &["p1b", "p2a"], PORT);
    let no_pods = Service::new("no-pods", 11, &["p1b"], PORT).of_no_pods();
    [&web, &no_pods]
        .into_iter()
        .try_for_each(|service| fixture.put(service))?;
    fixture.cluster.reach(&fixture.lab, &["p1b", "p2a"])?;
    let before = state(c)?;
    let kpx = fixture.outside(c, &[])?;
    fixture.refused(c, |family| web.frontend(family))?;
    kpx.stop()?;

    let kpx = fixture.outside(c, &TUNNEL)?;
    fixture.served_over(
        &[Protocol::Tcp],
        c,
        |family| web.frontend(family),
        &["p1b", "p2a"],
        None,
    )?;
    // More data than the buffers on the path hold, in more than one request.
    let mut connection = Dial::new(Protocol::Tcp, web.frontend(Family::V4)).connect(&c.ns)?;
    let first = connection.exchange(&vec![7; 1 << 20])?;
    ensure!(connection.exchange(b"once more")?.backend == first.backend);
    // UDP, and endpoints that are not pods, are refused as without the tunnel.
    for family in Family::ALL {
        let udp = Dial::new(Protocol::Udp, web.frontend(family)).exchange(&c.ns, b"hello");
        ensure!(matches!(udp, Err(Fault::Refused)), "{udp:?}");
        let other = Dial::new(Protocol::Tcp, no_pods.frontend(family)).exchange(&c.ns, b"hello");
        ensure!(matches!(other, Err(Fault::Refused)), "{other:?}");
    }
    let services: Vec<_> = unreachable(&kpx)?
        .into_iter()
        .map(|(service, _)| service)
        .collect();
    ensure!(
        services.contains(&"default/no-pods".to_owned()),
        "{services:?}"
    );
    let opened = |kpx: &Agent<'_>| -> Result<u64> {
        Ok(kpx.status()?["tunnel"]["opened"].as_u64().unwrap_or(0))
    };
    ensure!(
        opened(&kpx)? > 20 && kpx.status()?["healthy"] == true,
        "{}",
        kpx.status()?["tunnel"]
    );
    // A client that has closed its sending direction gets its answer.
    let mut stream = connect(c, web.frontend(Family::V6))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.contains("p1b") || answer.contains("p2a"), "{answer}");
    by_name(&fixture, c)?;
    part_out_of_reach_is_named(|command| reported(&kpx, c, command))?;
    ways(
        &kpx,
        c,
        &[
            ("default/web 80/TCP", "tunnel"),
            ("default/web 80/UDP", "unreachable"),
            ("default/no-pods 80/TCP", "unreachable"),
        ],
    )?;
    drop(connection);
    wait_until(DEADLINE, "all streams end", || {
        Ok(kpx.status()?["tunnel"]["streams"] == 0)
    })?;
    kpx.stop()?;
    is_as_before(c, &before)
}

/// Checks that kpx reports only the port out of reach, and not the whole cluster, while another
/// port of its Service is reachable.
fn part_out_of_reach_is_named(run: impl Fn(&str) -> Result<String>) -> Result<()> {
    let why = "first 10.244.1.3:8080: only the default route, and the Service has no node port";
    let reported = run("trace --host --to svc/default/web:80/udp")?;
    let status = run("status")?;
    let parts = [
        "port 80/udp has endpoints over IPv4",
        "none of 2",
        why,
        "--tunnel tcp does not forward UDP.",
    ];
    ensure!(
        parts.iter().all(|part| reported.contains(part)) && !reported.contains("whole cluster"),
        "{reported}"
    );
    let starts = [
        "default/web 80/udp over IPv4 ",
        "default/web 80/udp over IPv6 ",
        "API server: ",
    ];
    let is_there = |start: &&str| status.lines().any(|line| line.starts_with(*start));
    let is_server = |line: &str| {
        line.starts_with("API server: ") && line.contains(" https://") && line.ends_with(":6443")
    };
    ensure!(
        starts.iter().all(is_there) && status.contains(why) && status.lines().any(is_server),
        "{status}"
    );
    let reported = run("trace --host --to svc/default/web:80")?;
    ensure!(
        reported.contains(
            "is kpx's tunnel, which forwards the connection to a pod through the API server"
        ),
        "{reported}"
    );
    Ok(())
}

/// Checks the paths that `kpx backends` shows for ports.
fn ways(kpx: &Agent<'_>, host: &Host, expected: &[(&str, &str)]) -> Result<()> {
    let rows: Value = serde_json::from_str(&reported(kpx, host, "backends --output json")?)?;
    for (port, way) in expected {
        let of_port = |row: &&Value| {
            let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
            format!(
                "{}/{} {}/{}",
                text("namespace"),
                text("service"),
                row["port"],
                text("protocol")
            ) == *port
        };
        let rows: Vec<_> = rows
            .as_array()
            .into_iter()
            .flatten()
            .filter(of_port)
            .collect();
        let is_used = *way != "unreachable";
        let fits = rows
            .iter()
            .all(|row| row["way"] == *way && row["inClusterSet"] == is_used);
        ensure!(!rows.is_empty() && fits, "{port} by {way}: {rows:?}");
    }
    let table = reported(kpx, host, "services")?;
    ensure!(
        table.contains("WAY") && table.contains("tunnel,unreachable"),
        "{table}"
    );
    Ok(())
}

/// Checks that curl reaches Services by their names.
fn by_name(fixture: &Fixture, host: &Host) -> Result<()> {
    let file = fixture.lab.dir().join("resolv.conf");
    std::fs::write(&file, "nameserver 127.0.0.153\n")?;
    let url = "http://web.default.svc.cluster.local";
    let script = format!(
        "mount --bind {} /etc/resolv.conf && curl --silent --max-time 5 {url}",
        file.display()
    );
    let answer = host
        .ns
        .exec(Command::new("unshare").args(["--mount", "sh", "-c", &script]))?;
    ensure!(answer.contains("p1b") || answer.contains("p2a"), "{answer}");
    Ok(())
}

#[test]
fn tunnel_carries_connections_of_its_host_alone() -> Result<()> {
    let fixture = &Fixture::start(Layout::Vxlan)?;
    services()
        .iter()
        .try_for_each(|service| fixture.put(service))?;
    fixture.cluster.reach(&fixture.lab, &["p1b"])?;
    // A host where foreign packets reach loopback addresses.
    for key in [
        "ipv4/ip_forward",
        "ipv4/conf/all/route_localnet",
        "ipv6/conf/all/forwarding",
    ] {
        fixture.lab.x.ns.sysctl(key, "1")?;
    }
    let agent = fixture.outside(&fixture.lab.x, &TUNNEL)?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        failed_stream_resets_the_connection_and_says_why,
        tunnel_is_closed_to_strangers,
    )?;
    running.agent.stop()
}

/// Returns a Service that is served, a Service whose port has no listener, and a Service whose pod
/// is gone.
fn services() -> [Service; 3] {
    [
        Service::new("web", 10, &["p1b"], PORT),
        Service::new("nobody", 11, &["p1b"], PORT + 1),
        Service::new("gone", 12, &["p2a"], PORT),
    ]
}

fn failed_stream_resets_the_connection_and_says_why(running: &Running<Fixture>) -> Result<()> {
    let Running {
        fixture,
        agent: kpx,
    } = running;
    let c = &fixture.lab.x;
    let [web, nobody, gone] = services();
    fixture.served_over(
        &[Protocol::Tcp],
        c,
        |family| web.frontend(family),
        &["p1b"],
        None,
    )?;
    let failure = || -> Result<Value> { Ok(kpx.status()?["tunnel"]["failure"].clone()) };
    ensure!(failure()?.is_null(), "{}", failure()?);
    let refused: [(&Service, &str); 2] = [(&nobody, "the kubelet reports"), (&gone, "404")];
    for (service, why) in refused {
        ensure!(
            is_reset(c, service.frontend(Family::V4)),
            "{}",
            service.name
        );
        let failure = failure()?;
        let says_why = failure["why"].as_str().unwrap_or_default().contains(why);
        ensure!(
            failure["service"] == format!("default/{}", service.name) && says_why,
            "{failure}"
        );
        let traced = reported(
            kpx,
            c,
            &format!("trace --host --to svc/default/{}", service.name),
        )?;
        ensure!(
            traced.contains("is kpx's tunnel") && traced.contains(why),
            "{traced}"
        );
        ensure!(
            traced.contains("pods/portforward") && !traced.contains("targetPort"),
            "{traced}"
        );
    }
    fixture
        .cluster
        .api_server()?
        .fail("get", "pods/portforward", 403);
    ensure!(is_reset(c, web.frontend(Family::V6)), "a refusal resets");
    let why = failure()?["why"].as_str().unwrap_or_default().to_owned();
    ensure!(
        why.contains(
            "grant the verbs get and create of pods/portforward: 403 Forbidden: asked for"
        ),
        "{why}"
    );
    let text = reported(kpx, c, "status")?;
    ensure!(
        text.contains("Tunnel:")
            && text.contains("default/web: ")
            && text
                .lines()
                .any(|line| line.split_whitespace().eq(["tunnel:", "tcp"]))
            && !text.contains("Restarts:"),
        "{text}"
    );
    fixture.cluster.api_server()?.heal();
    fixture.served_over(
        &[Protocol::Tcp],
        c,
        |family| web.frontend(family),
        &["p1b"],
        None,
    )?;
    wait_until(DEADLINE, "all is well again", || Ok(failure()?.is_null()))
}

/// Only connections of this machine's programs to Services use the tunnel, as with ClusterIPs.
fn tunnel_is_closed_to_strangers(running: &Running<Fixture>) -> Result<()> {
    let Running {
        fixture,
        agent: kpx,
    } = running;
    let c = &fixture.lab.x;
    let stranger = &fixture.lab.fabric;
    let [web, _, _] = services();
    fixture.served_over(
        &[Protocol::Tcp],
        c,
        |family| web.frontend(family),
        &["p1b"],
        None,
    )?;
    let starts = starts(kpx)?;
    ensure!(starts.len() == 2, "{starts:?}");
    let opened = || -> Result<Value> { Ok(kpx.status()?["tunnel"]["opened"].clone()) };
    let before = opened()?;
    for start in &starts {
        // A direct dial of the tunnel names no Service.
        ensure!(is_reset(c, *start), "{start}");
        let family = if start.is_ipv4() {
            Family::V4
        } else {
            Family::V6
        };
        let via = c.addrs.ip(family);
        stranger
            .ns
            .ip(&format!("route add {} via {via}", start.ip()))?;
        // The packets arrive: a server without the filter answers them.
        let own = c.ns.run(|| TcpListener::bind((start.ip(), 5353)))?;
        connect(stranger, (start.ip(), 5353).into()).context("the way to the address")?;
        drop(own);
        let reached = connect(stranger, *start);
        ensure!(reached.is_err(), "a stranger reaches {start}");
        stranger.ns.ip(&format!("route del {}", start.ip()))?;
    }
    for family in Family::ALL {
        let frontend = web.frontend(family);
        stranger.ns.ip(&format!(
            "route replace {} via {}",
            frontend.ip(),
            c.addrs.ip(family)
        ))?;
        let answer = Dial::new(Protocol::Tcp, frontend)
            .deadline(Duration::from_millis(300))
            .exchange(&stranger.ns, b"hi");
        ensure!(answer.is_err(), "{answer:?}");
        stranger.ns.ip(&format!(
            "route del {} via {}",
            frontend.ip(),
            c.addrs.ip(family)
        ))?;
    }
    ensure!(opened()? == before, "a stranger opened a stream");
    Ok(())
}
