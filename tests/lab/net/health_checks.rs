//! Health checks of Services, requested as by a load balancer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use proxy_agent::health_check::HealthChecks;
use proxy_agent::liveness::Liveness;
use proxy_agent::settings::Mode;
use proxy_core::input::ObjectName;
use proxy_core::ip_family::IpFamily;
use proxy_core::model::HealthCheck;
use proxy_source::events::Events;
use proxy_source::health::Health;
use testbed::agent::DEADLINE;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::net::{in_netns, ip, is_local};

#[test]
fn answers_are_those_of_kube_proxy() {
    in_netns(async {
        node().await?;
        let liveness = Liveness::new(Duration::ZERO, Mode::Node);
        let mut checks =
            HealthChecks::new(Health::default(), liveness.clone(), Events::new("n1").0);
        checks.listen_on(addrs(&["0.0.0.0", "::"])).await;
        checks
            .set(&wanted(&[("web", 30100, 2), ("none", 30200, 0)]))
            .await;
        for to in [
            "127.0.0.1:30100",
            "192.0.2.1:30100",
            "[::1]:30100",
            "[fd00::1]:30100",
        ] {
            for request in [
                "GET /healthz",
                "GET /",
                "POST /any/path?x=1",
                "PUT /healthz",
            ] {
                let (status, headers, body) = ask(to, request).await?;
                ensure!(status == "HTTP/1.1 200 OK", "{to} {request}: {status}");
                for header in [
                    "Content-Type: application/json",
                    "X-Content-Type-Options: nosniff",
                    "X-Load-Balancing-Endpoint-Weight: 2",
                ] {
                    ensure!(
                        headers.contains(&header.to_owned()),
                        "{to} {request}: {headers:?}, no {header}"
                    );
                }
                ensure!(body == BODY, "{to} {request}: {body}");
            }
        }
        let (status, headers, body) = ask("127.0.0.1:30200", "GET /healthz").await?;
        ensure!(status == "HTTP/1.1 503 Service Unavailable", "{status}");
        ensure!(
            headers.contains(&"X-Load-Balancing-Endpoint-Weight: 0".to_owned()),
            "{headers:?}"
        );
        ensure!(
            body.contains("\"localEndpoints\": 0,\n\t\"serviceProxyHealthy\": true\n}"),
            "{body}"
        );

        let (status, headers, body) = ask("127.0.0.1:30100", "HEAD /healthz").await?;
        ensure!(
            status == "HTTP/1.1 200 OK" && body.is_empty(),
            "{status} {body}"
        );
        ensure!(
            headers.contains(&format!("Content-Length: {}", BODY.len())),
            "{headers:?}"
        );

        liveness.queued(IpFamily::V6);
        let (status, _, body) = ask("127.0.0.1:30100", "GET /").await?;
        ensure!(status == "HTTP/1.1 503 Service Unavailable", "{status}");
        ensure!(body == BODY.replace("true", "false"), "{body}");
        Ok(())
    });
}

fn liveness() -> Liveness {
    Liveness::new(Duration::from_secs(30), Mode::Node)
}

const BODY: &str = "{
\t\"service\": {
\t\t\"namespace\": \"default\",
\t\t\"name\": \"web\"
\t},
\t\"localEndpoints\": 2,
\t\"serviceProxyHealthy\": true
}";

#[test]
fn listeners_follow_the_services_and_the_addresses() {
    in_netns(async {
        node().await?;
        let health = Health::default();
        let mut checks = HealthChecks::new(health.clone(), liveness(), Events::new("n1").0);
        checks.listen_on(addrs(&["192.0.2.1", "fd00::1"])).await;
        checks
            .set(&wanted(&[("web", 30100, 1), ("dns", 30200, 1)]))
            .await;
        ask("192.0.2.1:30100", "GET /").await?;
        ask("[fd00::1]:30200", "GET /").await?;
        ensure!(
            is_closed("127.0.0.1:30100").await,
            "it listens where it should not"
        );

        // An unchanged check keeps its listener: a connection lives on and sees the new count.
        let mut kept = TcpStream::connect("192.0.2.1:30100").await?;
        checks.set(&wanted(&[("web", 30100, 7)])).await;
        closes("192.0.2.1:30200").await?;
        kept.write_all(b"GET / HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
            .await?;
        let mut answer = String::new();
        timeout(DEADLINE, kept.read_to_string(&mut answer)).await??;
        ensure!(answer.contains("\"localEndpoints\": 7"), "{answer}");

        // A port passes to another Service in the same update that moves its old Service to a new
        // port.
        let idle = TcpStream::connect("192.0.2.1:30100").await?;
        set_all(
            &mut checks,
            &[("api", 30100, 3), ("web", 30300, 7)],
            &health,
        )
        .await?;
        ensure!(
            ask("192.0.2.1:30100", "GET /")
                .await?
                .2
                .contains("\"name\": \"api\"")
        );
        ensure!(
            ask("192.0.2.1:30300", "GET /")
                .await?
                .2
                .contains("\"name\": \"web\"")
        );
        ensure!(
            is_ended(idle).await?,
            "a connection to what is closed lives on"
        );

        ip("addr add 192.0.2.2/32 dev lo").await?;
        checks.listen_on(addrs(&["192.0.2.2", "fd00::1"])).await;
        closes("192.0.2.1:30100").await?;
        ask("192.0.2.2:30100", "GET /").await?;
        checks.listen_on(addrs(&["0.0.0.0"])).await;
        closes("[fd00::1]:30100").await?;
        ask("127.0.0.1:30100", "GET /").await?;
        drop(checks);
        closes("127.0.0.1:30100").await
    });
}

#[test]
fn a_port_that_is_taken_costs_only_its_own_service() {
    in_netns(async {
        node().await?;
        let health = Health::default();
        let mut checks = HealthChecks::new(health.clone(), liveness(), Events::new("n1").0);
        let taken = TcpListener::bind("192.0.2.1:30100").await?;
        checks.listen_on(addrs(&["0.0.0.0", "::"])).await;
        let want = wanted(&[("web", 30100, 1), ("dns", 30200, 1)]);
        checks.set(&want).await;
        let problems = health.problems();
        let what = "healthCheckNodePort of default/web";
        let why = &problems
            .iter()
            .find(|(problem, _)| problem.to_string() == what)
            .context("no problem")?
            .1
            .why;
        ensure!(
            problems.len() == 1
                && why.starts_with("listen on 0.0.0.0:30100: Address already in use"),
            "{why}"
        );
        ensure!(
            ask("[::1]:30100", "GET /").await.is_ok(),
            "the other family's address was free"
        );
        ensure!(ask("127.0.0.1:30200", "GET /").await.is_ok());

        drop(taken);
        set_all(
            &mut checks,
            &[("web", 30100, 1), ("dns", 30200, 1)],
            &health,
        )
        .await?;
        ensure!(
            ask("192.0.2.1:30100", "GET /")
                .await?
                .2
                .contains("\"name\": \"web\"")
        );

        // A taken port without a health check is no longer a problem.
        let _taken = TcpListener::bind("192.0.2.1:30400").await?;
        checks.set(&wanted(&[("web", 30400, 1)])).await;
        ensure!(health.problems().len() == 1);
        checks.set(&wanted(&[])).await;
        ensure!(health.problems().is_empty(), "{:?}", health.problems());
        Ok(())
    });
}

#[test]
fn ports_beyond_the_room_go_to_the_namespaces_in_turn() {
    in_netns(async {
        node().await?;
        let health = Health::default();
        let mut checks =
            HealthChecks::new(health.clone(), liveness(), Events::new("n1").0).at_most(4);
        checks.listen_on(addrs(&["0.0.0.0", "::"])).await;
        let check = |namespace, name, port| {
            (
                ObjectName::new(namespace, name),
                HealthCheck {
                    port,
                    local_endpoints: 1,
                },
            )
        };
        let greedy = [
            check("greedy", "a", 30100),
            check("greedy", "b", 30200),
            check("greedy", "c", 30300),
        ];
        let mut want: BTreeMap<_, _> = greedy.into();
        checks.set(&want).await;
        ask("127.0.0.1:30200", "GET /").await?;
        want.extend([check("shop", "web", 30400)]);
        checks.set(&want).await;
        for open in ["127.0.0.1:30100", "[::1]:30400"] {
            ask(open, "GET /").await?;
        }
        closes("127.0.0.1:30200").await?;
        let problems: Vec<_> = health.problems().keys().map(ToString::to_string).collect();
        ensure!(
            problems == ["b", "c"].map(|name| format!("healthCheckNodePort of greedy/{name}")),
            "{problems:?}"
        );
        want.retain(|name, _| *name.namespace != *"greedy");
        checks.set(&want).await;
        ensure!(health.problems().is_empty(), "{:?}", health.problems());
        Ok(())
    });
}

/// Adds 192.0.2.1 and fd00::1 to lo, which has its carrier at once.
async fn node() -> Result<()> {
    for command in [
        "link set lo up",
        "addr add 192.0.2.1/32 dev lo",
        "addr add fd00::1/128 dev lo nodad",
    ] {
        ip(command).await?;
    }
    is_local("fd00::1").await
}

fn addrs(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts
        .iter()
        .map(|text| text.parse().expect("an address"))
        .collect()
}

fn wanted(checks: &[(&str, u16, usize)]) -> BTreeMap<ObjectName, HealthCheck> {
    let check = |&(name, port, local_endpoints): &(&str, u16, usize)| {
        (
            ObjectName::new("default", name),
            HealthCheck {
                port,
                local_endpoints,
            },
        )
    };
    checks.iter().map(check).collect()
}

/// Returns status line, headers and body.
async fn ask(to: &str, request: &str) -> Result<(String, Vec<String>, String)> {
    let mut stream = TcpStream::connect(to.parse::<SocketAddr>()?)
        .await
        .with_context(|| format!("connect to {to}"))?;
    let request = format!("{request} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    timeout(DEADLINE, stream.read_to_string(&mut answer))
        .await
        .with_context(|| format!("{to} is silent"))??;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("no end of the header: {answer}"))?;
    let mut lines = head.split("\r\n").map(str::to_owned);
    Ok((
        lines.next().context("no status line")?,
        lines.collect(),
        body.to_owned(),
    ))
}

/// Sets checks until all of them have their ports. A child process of another test holds copies of
/// this process's sockets until it calls exec.
async fn set_all(
    checks: &mut HealthChecks,
    want: &[(&str, u16, usize)],
    health: &Health,
) -> Result<()> {
    let all = async {
        checks.set(&wanted(want)).await;
        while !health.problems().is_empty() {
            tokio::task::yield_now().await;
            checks.set(&wanted(want)).await;
        }
    };
    timeout(DEADLINE, all)
        .await
        .with_context(|| format!("{:?}", health.problems()))
}

/// Waits until a port is closed, also in the copies described at [`set_all`].
async fn closes(to: &str) -> Result<()> {
    timeout(DEADLINE, async { while !is_closed(to).await {} })
        .await
        .with_context(|| format!("{to} is left open"))
}

async fn is_closed(to: &str) -> bool {
    let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
    TcpStream::connect(to).await.is_err_and(refused)
}

/// Returns true if the other side closes an idle connection.
async fn is_ended(mut stream: TcpStream) -> Result<bool> {
    let read = timeout(DEADLINE, stream.read(&mut [0; 1]))
        .await
        .context("nothing happens")?;
    Ok(matches!(read, Ok(0) | Err(_)))
}
