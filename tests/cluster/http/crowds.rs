//! Clients that try to starve others, or to exhaust the node's memory and files.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use socket2::{Domain, Socket, Type};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::http::{HEALTH, get_at_socket};

use crate::http::fixture::{Fixture, service};

/// Ordinary connections of three pods are queued before a probe while the agent is busy.
#[test]
fn probe_behind_connections_of_three_pods_is_answered() -> Result<()> {
    let cluster = Fixture::start("crowd")?;
    let kpx = cluster.healthy_kpx("")?;
    kill(kpx.pid(), Signal::SIGSTOP)?;
    let asked = (|| {
        let pods: Vec<_> = [2, 3, 4]
            .repeat(300)
            .iter()
            .map(|host| connect(&cluster, *host, HEALTH))
            .collect::<Result<_>>()?;
        let mut probe = connect(&cluster, 9, HEALTH)?;
        probe.write_all(b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n")?;
        anyhow::Ok((pods, probe))
    })();
    kill(kpx.pid(), Signal::SIGCONT)?;
    let (_pods, mut probe) = asked?;
    let mut answer = String::new();
    probe.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200 OK"), "{answer:?}");
    kpx.stop()
}

/// The health check ports of one tenant's Services.
const PORTS: [u16; 8] = [32100, 32101, 32102, 32103, 32104, 32105, 32106, 32107];
/// Memory for 1,280 connections with 16 KiB each, and as much again for their tasks and the
/// allocator's slack.
const MEMORY_KIB: u64 = 48 << 10;
/// The maximum number of connections, and some that are closing.
const FILES: usize = 256 + 1_024 + 64;

#[test]
fn headers_without_end_take_neither_memory_nor_files() -> Result<()> {
    let cluster = Fixture::start("headers")?;
    for (nth, port) in (10..).zip(PORTS) {
        let mut service = service(&format!("web-{port}"), nth, false);
        service["spec"]["type"] = "LoadBalancer".into();
        service["spec"]["externalTrafficPolicy"] = "Local".into();
        service["spec"]["healthCheckNodePort"] = port.into();
        cluster.put(&service)?;
    }
    let kpx = cluster.healthy_kpx("")?;
    let at: Vec<_> = PORTS
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .chain([HEALTH.to_owned()])
        .collect();
    wait_until(DEADLINE, "all listen", || {
        Ok(at.iter().all(|at| cluster.get(at, "/").is_ok()))
    })?;
    let memory = kib(&kpx, "VmRSS:")?;
    let files = open_files(&kpx)?;
    let mut held = Vec::new();
    let mut most_files = 0;
    for bytes in [15 << 10, 400 << 10] {
        let header = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(bytes));
        for at in &at {
            for _ in 0..256 {
                let mut stream = connect(&cluster, 2, at)?;
                stream.set_write_timeout(Some(DEADLINE))?;
                // The agent may have closed the connection.
                let _sent = stream.write_all(header.as_bytes());
                held.push(stream);
            }
            most_files = most_files.max(open_files(&kpx)?.saturating_sub(files));
        }
    }
    let peak = kib(&kpx, "VmHWM:")?.saturating_sub(memory);
    ensure!(peak < MEMORY_KIB, "{peak} KiB for headers");
    ensure!(most_files < FILES, "{most_files} connections are open");
    ensure!(get_at_socket(&proxy_view::socket(kpx.run_dir()), "/status")?.code == 200);
    let probe = cluster.get(HEALTH, "/healthz")?;
    ensure!(probe.code == 200, "{probe:?}");
    drop(held);
    kpx.stop()
}

/// Connects from 127.0.0.`host`.
fn connect(cluster: &Fixture, host: u8, to: &str) -> Result<TcpStream> {
    let to: SocketAddr = to.parse()?;
    let socket = cluster
        .ns
        .run(|| Socket::new(Domain::IPV4, Type::STREAM, None))?;
    socket.bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), 0)).into())?;
    socket
        .connect_timeout(&to.into(), DEADLINE)
        .with_context(|| format!("connect to {to}"))?;
    socket.set_read_timeout(Some(DEADLINE))?;
    Ok(socket.into())
}

fn open_files(kpx: &Agent<'_>) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{}/fd", kpx.pid()))?.count())
}

/// Returns a field of the agent's memory, in KiB.
fn kib(kpx: &Agent<'_>, field: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{}/status", kpx.pid()))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(field))
        .with_context(|| format!("no {field}"))?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
