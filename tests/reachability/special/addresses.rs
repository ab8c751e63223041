//! Addresses that come and go, that must not be used, or that clients must not see.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use testbed::agent::{SERVICE_PORT, wait_until};
use testbed::capture::{Capture, Checksums};
use testbed::echo::{Dial, Protocol, pattern};
use testbed::lab::{Family, Node};

use crate::case::{Expect, To, same, spare};
use crate::fixture::{Fixture, combinations};
use crate::services::{external_ip, frontend, health_check_port, index, node_port, vip};

/// The time from a new address to the first answer.
const PROMPT: Duration = Duration::from_secs(10);
/// The timeout of path MTU discovery: a host that dials its own address learns the MTU only after
/// several sends.
const LEARNT: Duration = Duration::from_secs(10);
/// The timeout of an error of the socket itself.
const SOON: Duration = Duration::from_millis(400);

pub(super) fn bound(fixture: &Fixture, protocol: Protocol, family: Family) -> Result<()> {
    let loopback = match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    let dial = Dial::new(protocol, frontend("p1b", family));
    fixture.is_silent("n1", dial.source_ip(loopback))?;
    fixture.is_silent("n1", dial.device("eth0"))
}

pub(super) fn comes_and_goes(fixture: &Fixture) -> Result<()> {
    let n1 = &fixture.lab.n1.host;
    let addrs = spare(1);
    let to = |family| SocketAddr::new(addrs.ip(family), node_port(index("p1b")));
    let dial = |protocol, family| Dial::new(protocol, to(family)).deadline(SOON);
    for (protocol, family) in combinations() {
        fixture
            .is_silent("x", dial(protocol, family))
            .context("before")?;
    }
    n1.add_addrs("eth0", addrs)?;
    let started = Instant::now();
    for (protocol, family) in combinations() {
        wait_until(
            PROMPT.saturating_sub(started.elapsed()),
            &format!("{} answers, {protocol}", to(family)),
            || {
                Ok(dial(protocol, family)
                    .exchange(&fixture.lab.x.ns, b"?")
                    .is_ok_and(|answer| answer.backend == "p1b"))
            },
        )?;
    }
    n1.del_addrs("eth0", addrs)?;
    for (protocol, family) in combinations() {
        wait_until(
            PROMPT,
            &format!("{} is silent again, {protocol}", to(family)),
            || {
                Ok(dial(protocol, family)
                    .exchange(&fixture.lab.x.ns, b"?")
                    .is_err())
            },
        )?;
    }
    Ok(())
}

/// Pods and processes of the node are served locally.
pub(super) fn stays(fixture: &Fixture) -> Result<()> {
    let capture = Capture::start(&fixture.lab.fabric)?;
    for service in ["p1b", "p2a", "p2a-local"] {
        for (protocol, family) in combinations() {
            for addrs in [vip(index(service)), external_ip(index(service))] {
                for client in ["p1a", "n1"] {
                    fixture.dial(
                        client,
                        Dial::new(protocol, (addrs.ip(family), SERVICE_PORT).into()),
                    )?;
                }
            }
        }
    }
    let packets = capture.stop(Checksums::MayBePending)?;
    for service in ["p1b", "p2a", "p2a-local"].map(index) {
        for (family, addrs) in Family::ALL
            .into_iter()
            .flat_map(|f| [vip(service), external_ip(service)].map(|a| (f, a)))
        {
            if let Some(packet) = packets
                .iter()
                .find(|packet| packet.dst.ip() == addrs.ip(family))
            {
                bail!("it leaves the node: {packet}");
            }
        }
    }
    Ok(())
}

/// Checks each node's answers to an external load balancer.
pub(super) fn health_check(fixture: &Fixture) -> Result<()> {
    let [n1, n2] = fixture.lab.nodes();
    for (service, node, local) in [
        ("p1b-local", n1, 1),
        ("p1b-local", n2, 0),
        ("p2a-local", n1, 0),
        ("p2a-local", n2, 1),
        ("nowhere-local", n1, 0),
    ] {
        for family in Family::ALL {
            is_health(fixture, service, node, family, local)
                .with_context(|| format!("health of {service} at {}, {family}", node.host.name))?;
        }
    }
    Ok(())
}

fn is_health(
    fixture: &Fixture,
    service: &str,
    node: &Node,
    family: Family,
    local: u64,
) -> Result<()> {
    let to = SocketAddr::new(
        node.host.addrs.ip(family),
        health_check_port(index(service)),
    );
    let answer = fixture.lab.x.ns.run(|| -> Result<String> {
        let mut stream = TcpStream::connect_timeout(&to, PROMPT)?;
        stream.set_read_timeout(Some(PROMPT))?;
        write!(
            stream,
            "GET /healthz HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    })?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("an answer has a head and a body")?;
    let head = head.to_lowercase();
    ensure!(
        head.starts_with(if local > 0 {
            "http/1.1 200"
        } else {
            "http/1.1 503"
        }),
        "{head}"
    );
    ensure!(
        head.contains(&format!("x-load-balancing-endpoint-weight: {local}")),
        "{head}"
    );
    let body: Value = serde_json::from_str(body).with_context(|| format!("body {body:?}"))?;
    ensure!(body["localEndpoints"] == local, "{body}");
    ensure!(
        body["service"]["name"] == service && body["service"]["namespace"] == "default",
        "{body}"
    );
    Ok(())
}

/// Transfers 1 MB in both directions. A sender of oversized packets gets an ICMP error with the
/// addresses of its own side of the translation.
pub(super) fn narrow(fixture: &Fixture) -> Result<()> {
    let frontends = [
        ("x", To::LoadBalancer, "p1b"),
        ("x", To::LoadBalancer, "p2a"),
        ("x", To::LoadBalancer, "p1b-local"),
        ("x", To::LoadBalancer, "here"),
        ("x", To::ExternalIp, "p1b"),
        ("x", To::ExternalIp, "p2a"),
        ("x", To::NodePort("n1"), "p1b"),
        ("x", To::NodePort("n1"), "p2a"),
        ("x", To::NodePort("n1"), "n1"),
        ("x", To::NodePort("n1"), "n2"),
        ("p1a", To::ClusterIp, "ext"),
        ("n1", To::ClusterIp, "ext"),
        ("p1a", To::LoadBalancer, "ext"),
        ("n1", To::NodePort("n1"), "ext"),
    ];
    let transfer = |client: &'static str, to: To, service: &'static str, family| -> Result<()> {
        let to = same("L15", client, to, service, Expect::Silence).addr(fixture.lab, family);
        let answer = Dial::new(Protocol::Tcp, to)
            .deadline(LEARNT)
            .exchange(&fixture.lab.host(client).ns, &pattern(1 << 20));
        answer
            .with_context(|| format!("{client} dials {service} at {to}"))
            .map(drop)
    };
    let checked = frontends
        .into_iter()
        .try_for_each(|(client, to, service)| -> Result<()> {
            fixture.lab.set_narrow(true)?; // Makes all forget what the last transfers taught them.
            // Each family discovers its path MTU separately.
            let [v4, v6] = thread::scope(|scope| {
                Family::ALL
                    .map(|family| scope.spawn(move || transfer(client, to, service, family)))
                    .map(|transfer| {
                        transfer
                            .join()
                            .unwrap_or_else(|_| Err(anyhow!("the thread of a transfer panicked")))
                    })
            });
            v4.and(v6)
        });
    fixture.lab.set_narrow(false)?;
    checked
}
