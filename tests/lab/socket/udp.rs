//! UDP.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;

use crate::socket::fixture::{Fixture, NODE, PORT, count, web};

const UDP: Protocol = Protocol::Udp;

pub(crate) fn empty() -> Service {
    Service::new("empty", 12, &[], PORT)
}

pub(crate) fn datagrams_are_translated_to_serving_backends(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    let empty = empty();
    let forwarded = count(agent, "events", "forwarded")?;
    let mut connected = Vec::new();
    let mut loose = Vec::new();
    for family in Family::ALL {
        let to = web().frontend(family);
        let backends: Result<BTreeSet<String>> = (0..32)
            .map(|_| Ok(fixture.reaches(NODE, UDP, to, true)?.backend))
            .collect();
        ensure!(
            backends? == ["p1b", "p2a"].map(str::to_owned).into(),
            "all backends serve"
        );
        connected.push((to, fixture.reaches(NODE, UDP, to, true)?));
        loose.push(fixture.loose(to)?);
        // A connected socket that also names its peer accepts answers from the backend of its
        // connect.
        for _ in 0..16 {
            let named = fixture.loose(to)?;
            named.socket.connect(to)?;
            named.ask().context("connected, and named")?;
        }
        let error = fixture
            .loose(empty.frontend(family))?
            .ask()
            .err()
            .context("no backend serves")?;
        ensure!(error.kind() == ErrorKind::ConnectionRefused, "{error}");
    }
    let SocketAddr::V4(v4) = web().frontend(Family::V4) else {
        unreachable!("of this family")
    };
    let mapped = SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port());
    fixture.reaches(NODE, UDP, mapped, true)?;
    loose.push(fixture.loose(mapped)?);
    let mut before = Vec::new();
    for client in &loose {
        let first = client.ask()?;
        for _ in 0..8 {
            ensure!(
                client.ask()? == first,
                "it has left {first} for another backend, which both serve"
            );
        }
        before.push(first);
    }
    ensure!(
        count(agent, "events", "forwarded")? == forwarded,
        "{}",
        agent.status()?
    );

    // Only the clients of p1b must change their backend.
    fixture.put(&web().backed_by(&["p2a"]))?;
    for (client, before) in loose.iter().zip(before) {
        wait_until(DEADLINE, "p2a serves", || Ok(client.ask()? == "p2a"))
            .with_context(|| format!("from {before}"))?;
    }
    for (dialled, reached) in connected {
        let mut connection = reached.connection;
        let moves = reached.backend == "p1b";
        if moves {
            wait_until(DEADLINE, "it is aborted", || {
                Ok(connection.exchange(b"hello").is_err())
            })?;
        } else {
            connection
                .exchange(b"hello")
                .context("its backend serves on")?;
        }
        // The families' endpoints change separately.
        let moved = || Ok(fixture.reaches(NODE, UDP, dialled, true)?.backend == "p2a");
        wait_until(DEADLINE, "a new connection goes to p2a", moved)?;
    }
    fixture.put(&web())?;
    let both = || {
        Ok(fixture
            .reaches(NODE, UDP, web().frontend(Family::V6), true)?
            .backend
            == "p1b")
    };
    wait_until(DEADLINE, "p1b serves again", both)
}

/// An unconnected socket, and its peer.
struct Loose {
    socket: UdpSocket,
    to: SocketAddr,
}

impl Fixture {
    fn loose(&self, to: SocketAddr) -> Result<Loose> {
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = self.lab.host(NODE).ns.run(|| UdpSocket::bind((any, 0)))?;
        socket.set_read_timeout(Some(Dial::new(UDP, to).deadline))?;
        Ok(Loose { socket, to })
    }
}

impl Loose {
    /// Returns the answering backend. The answer must come from the peer and go to the socket's own
    /// port.
    fn ask(&self) -> io::Result<String> {
        self.socket.send_to(b"who?", self.to)?;
        let mut greeting = [0; 256];
        let (length, from) = self.socket.recv_from(&mut greeting)?;
        let text = String::from_utf8_lossy(&greeting[1..length]).into_owned();
        let (backend, seen) = text.split_once(' ').unwrap_or_default();
        let port = self.socket.local_addr()?.port();
        if from != self.to || !seen.ends_with(&format!(":{port}")) {
            return Err(io::Error::other(format!(
                "asked {} at port {port}, answered by {from}: {text}",
                self.to
            )));
        }
        Ok(backend.to_owned())
    }
}
