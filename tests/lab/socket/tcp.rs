//! TCP.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::thread;
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use proxy_common::names::{INGRESS, SOCKETS};
use rustix::net::{self, AddressFamily, SocketType};
use testbed::agent::{DEADLINE, SERVICE_PORT, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::{Dial, Fault, Protocol};
use testbed::lab::{EXTERNAL, Family, Layout};

use crate::socket::fixture::{Fixture, NODE, NODE_PORT, PORT, count, web};
use crate::socket::udp;

const TCP: Protocol = Protocol::Tcp;

#[test]
fn kpx_translates_streams_of_the_host() -> Result<()> {
    let fixture = &Fixture::start()?;
    of_every_kind()
        .iter()
        .chain(&two())
        .try_for_each(|service| fixture.put(service))?;
    let agent = fixture.agent("host", &[])?;
    testbed::cases!(
        &Running { fixture, agent };
        socket_shows_what_it_dialled_last,
        the_hosts_connections_are_translated_to_backends,
    )
}

#[test]
fn kpx_translates_streams_and_datagrams_of_the_host() -> Result<()> {
    let fixture = &Fixture::start()?;
    external(fixture)
        .iter()
        .chain(&[far(), udp::empty()])
        .try_for_each(|service| fixture.put(service))?;
    let agent = fixture.agent("host", &["--socket-lb-udp"])?;
    testbed::cases!(
        &Running { fixture, agent };
        sockets_of_one_device_get_a_backend,
        source_ranges_are_for_packets,
        udp::datagrams_are_translated_to_serving_backends,
    )
}

/// Returns Services with affinity, without endpoints, with policy Local, with the node as backend,
/// with counted flows, and with source ranges.
fn of_every_kind() -> [Service; 6] {
    let service = |name, nth, backends| Service::new(name, nth, backends, PORT);
    [
        service("sticky", 11, &["p1b", "p2a", "p2b"]).affinity(60),
        service("empty", 12, &[]),
        service("local", 13, &["p2a"]).local(),
        service("own", 14, &[NODE]),
        service("counting", 15, &["p1b"]).annotation("kpx.dev/lb-algorithm", "least-connections"),
        service("closed", 16, &["p1b"])
            .load_balancer(EXTERNAL.host(7), "VIP")
            .source_ranges(&["198.51.100.0/24".to_owned()]),
    ]
}

#[expect(clippy::too_many_lines, reason = "every kind of Service on one node")]
fn the_hosts_connections_are_translated_to_backends(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    let [sticky, empty, local, own, counting, _] = of_every_kind();
    let counts = |what: &str, names: [&str; 2]| -> Result<[u64; 2]> {
        Ok([count(agent, what, names[0])?, count(agent, what, names[1])?])
    };
    let by_packets = || counts("events", ["forwarded", "rejected"]);
    let refused = || counts("reasons", ["no_endpoints", "unknown_port"]);
    let dropped = || counts("reasons", ["no_local_endpoints", "source_range"]);
    let by_packets_before = by_packets()?;
    let refused_before = refused()?;
    let translated = count(agent, "events", "socket_translated")?;
    for family in Family::ALL {
        // The anchor sees no packets, whatever the backend.
        let backends: Result<BTreeSet<String>> = (0..32)
            .map(|_| {
                Ok(fixture
                    .reaches(NODE, TCP, web().frontend(family), true)?
                    .backend)
            })
            .collect();
        ensure!(
            backends? == ["p1b", "p2a"].map(str::to_owned).into(),
            "all backends serve"
        );
        fixture
            .reaches(NODE, TCP, fixture.node_at(family, NODE_PORT), true)
            .context("a node port of its own")?;
        fixture
            .reaches(NODE, TCP, own.frontend(family), true)
            .context("a backend of its own")?;
        let stuck: Result<BTreeSet<String>> = (0..16)
            .map(|_| {
                Ok(fixture
                    .reaches(NODE, TCP, sticky.frontend(family), true)?
                    .backend)
            })
            .collect();
        ensure!(stuck?.len() == 1, "affinity");
        ensure!(
            by_packets()?[0] == by_packets_before[0],
            "{}",
            agent.status()?
        );
        fixture
            .refused(empty.frontend(family))
            .context("without endpoints")?;
        fixture
            .refused((web().cluster_ip().ip(family), 81).into())
            .context("another port")?;
        ensure!(
            by_packets()?[1] == by_packets_before[1],
            "no packet was refused, nor any answered"
        );
    }
    ensure!(refused()? == refused_before.map(|count| count + 2));
    ensure!(count(agent, "events", "socket_translated")? == translated + 2 * (32 + 2 + 16));

    // An IPv6 socket may dial an IPv4 address.
    let SocketAddr::V4(v4) = web().frontend(Family::V4) else {
        unreachable!("of this family")
    };
    fixture
        .reaches(
            NODE,
            TCP,
            SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
            true,
        )
        .context("mapped")?;
    fixture
        .reaches(NODE, TCP, (Ipv4Addr::LOCALHOST, NODE_PORT).into(), true)
        .context("a node port at 127.0.0.1")?;

    // The packet path serves what the socket programs leave out.
    fixture
        .reaches(NODE, TCP, counting.frontend(Family::V4), false)
        .context("flows that are counted")?;
    let unheard = |to: SocketAddr| match Dial::new(TCP, to)
        .deadline(crate::socket::fixture::SILENCE)
        .connect(&fixture.lab.host(NODE).ns)
    {
        Err(Fault::TimedOut(_)) => Ok(()),
        other => Err(anyhow::anyhow!("{to}: {other:?}")),
    };
    let dropped_before = dropped()?;
    unheard(local.frontend(Family::V4)).context("endpoints elsewhere only")?;
    unheard((EXTERNAL.host(7).v4, SERVICE_PORT).into()).context("not in the source ranges")?;
    let heard = dropped()?;
    ensure!(heard[0] > dropped_before[0] && heard[1] > dropped_before[1]);
    // Kernel workers have such names.
    let worker = thread::Builder::new().name("kworker/u4:1".to_owned());
    let dials = || {
        fixture
            .reaches(NODE, TCP, web().frontend(Family::V4), false)
            .map(drop)
    };
    thread::scope(|scope| Ok::<_, io::Error>(worker.spawn_scoped(scope, dials)?.join()))?
        .expect("no panic")
        .context("a worker")?;
    fixture
        .reaches(NODE, Protocol::Udp, web().frontend(Family::V4), false)
        .context("datagrams, without --socket-lb-udp")?;
    let before = by_packets()?[0];
    let pod = fixture.reach("p1a", TCP, web().frontend(Family::V4))?;
    ensure!(
        by_packets()?[0] > before,
        "{} serves a pod by packets",
        pod.backend
    );
    Ok(())
}

/// Returns an external Service for all clients, and one for this node.
fn external(fixture: &Fixture) -> [Service; 2] {
    let at = |nth: u8, name| {
        Service::new(name, 10 + nth, &["p1b"], PORT).load_balancer(EXTERNAL.host(nth), "VIP")
    };
    let node = fixture.lab.host(NODE).addrs;
    let ranges = [format!("{}/32", node.v4), format!("{}/128", node.v6)];
    [at(8, "open"), at(9, "fenced").source_ranges(&ranges)]
}

/// Checks that the programs leave sockets of Services with source ranges alone: only packets show
/// the client.
fn source_ranges_are_for_packets(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    let [_, fenced] = external(fixture);
    for (family, protocol) in Family::ALL
        .into_iter()
        .flat_map(|family| Protocol::COMMON.map(|one| (family, one)))
    {
        let at = |host| SocketAddr::new(EXTERNAL.host(host).ip(family), SERVICE_PORT);
        fixture
            .reaches(NODE, protocol, at(8), true)
            .context("for everybody")?;
        fixture
            .reaches(NODE, protocol, at(9), false)
            .context("for this node")?;
        fixture
            .reaches(NODE, protocol, fenced.frontend(family), true)
            .context("a ClusterIP has no ranges")?;
    }

    // A trace has a note where socket programs, not packets, serve the client.
    let pod = fixture.lab.host("p1a").addrs.v4.to_string();
    for (from, proto, is_translated) in [
        (["--host"].as_slice(), "tcp", true),
        (&["--host"], "sctp", false),
        (&["--from", &pod], "tcp", false),
    ] {
        let notes = fixture.notes(agent, from, proto)?;
        let is_noted = notes
            .iter()
            .any(|note| note.contains("--socket-lb host: sockets of the node"));
        ensure!(is_noted == is_translated, "{from:?} by {proto}: {notes:?}");
    }
    Ok(())
}

#[test]
fn packets_are_translated_without_socket_lb() -> Result<()> {
    let fixture = Fixture::start()?;
    let agent = fixture.kpx(&["--socket-lb", "off"])?;
    for family in Family::ALL {
        fixture.reaches(NODE, TCP, web().frontend(family), false)?;
    }
    let status = agent.status()?;
    let programs = status["programs"].as_object().context("programs")?;
    ensure!(
        programs.contains_key(INGRESS) && SOCKETS.iter().all(|name| !programs.contains_key(*name)),
        "{programs:?}"
    );
    for map in ["UDP_SOCKETS4", "UDP_SOCKETS6"] {
        ensure!(
            status["mapFill"][map]["maxEntries"] == 1,
            "{map}: {}",
            status["mapFill"]
        );
    }
    ensure!(fixture.pins()?.is_empty(), "{:?}", fixture.pins()?);
    Ok(())
}

#[test]
fn pods_are_translated_where_all_sockets_are() -> Result<()> {
    let fixture = Fixture::start()?;
    let itself = Service::new("itself", 17, &["p1a"], PORT);
    fixture.put(&itself)?;
    let agent = fixture.agent("all", &[])?;
    for family in Family::ALL {
        for client in ["p1a", NODE] {
            fixture.reaches(client, TCP, web().frontend(family), true)?;
            fixture.reaches(client, TCP, fixture.node_at(family, NODE_PORT), true)?;
        }
        fixture
            .reaches("p1a", TCP, itself.frontend(family), true)
            .context("its own backend")?;
    }
    ensure!(
        count(&agent, "events", "forwarded")? == 0,
        "{}",
        agent.status()?
    );
    let pod = fixture.lab.host("p1a").addrs.v4.to_string();
    for (from, who) in [
        (["--from", &pod], "this pod"),
        (
            ["--from", &fixture.lab.host(NODE).addrs.v4.to_string()],
            "the node",
        ),
    ] {
        let notes = fixture.notes(&agent, &from, "tcp")?;
        ensure!(
            notes
                .iter()
                .any(|note| note.contains(&format!("--socket-lb all: sockets of {who}"))),
            "{notes:?}"
        );
    }
    // A pod's loopback address does not belong to the node.
    let own = Dial::new(TCP, (Ipv4Addr::LOCALHOST, NODE_PORT).into())
        .connect(&fixture.lab.host("p1a").ns);
    ensure!(matches!(own, Err(Fault::Refused)), "{own:?}");
    Ok(())
}

/// Checks the defaults, and the defaults on a host where the programs cannot be attached.
#[test]
fn node_serves_its_own_sockets_where_it_can() -> Result<()> {
    let fixture = Fixture::start()?;
    let agent = fixture.agent("auto", &[])?;
    for family in Family::ALL {
        fixture.reaches(NODE, TCP, web().frontend(family), true)?;
        fixture.reaches(NODE, Protocol::Udp, web().frontend(family), false)?;
        let pod = fixture.reach("p1a", TCP, web().frontend(family))?;
        ensure!(
            count(&agent, "events", "forwarded")? > 0,
            "{} serves a pod by packets",
            pod.backend
        );
    }
    ensure!(agent.typed_status()?.options.socket_lb == "auto: host");
    ensure!(fixture.pins()?.len() == 5, "{:?}", fixture.pins()?);
    drop(agent);

    // This folder is on another file system.
    let agent = fixture.kpx(&["--cgroup-root", "/proc"])?;
    let status = agent.typed_status()?;
    let said = &status.options.socket_lb;
    ensure!(
        said == "auto: off, because /proc is not a cgroup of version 2",
        "{said}"
    );
    ensure!(status.healthy && status.sockets.is_none(), "{status:?}");
    ensure!(fixture.pins()?.is_empty(), "{:?}", fixture.pins()?);
    for family in Family::ALL {
        fixture.reaches(NODE, TCP, web().frontend(family), false)?;
    }
    Ok(())
}

fn far() -> Service {
    Service::new("far", 20, &["p2a"], PORT)
}

/// Checks a node whose overlay has its own address: answers to the node's other address do not
/// return through the overlay.
#[test]
fn packets_serve_sockets_that_have_an_address() -> Result<()> {
    let fixture = Fixture::of(Layout::Vxlan)?;
    let far = far();
    fixture.put(&far)?;
    let agent = fixture.agent("auto", &[])?;
    for family in Family::ALL {
        let to = far.frontend(family);
        let translated = count(&agent, "events", "socket_translated")?;
        let own = fixture.lab.host(NODE).addrs.ip(family);
        let mut bound = Dial::new(TCP, to)
            .source_ip(own)
            .connect(&fixture.lab.host(NODE).ns)?;
        bound
            .exchange(b"hello")
            .with_context(|| format!("from {own} to {to}"))?;
        ensure!(
            count(&agent, "events", "socket_translated")? == translated,
            "the socket has a source of its own"
        );
        fixture.reaches(NODE, TCP, to, true)?;
    }
    Ok(())
}

/// Checks that a socket bound to a device reaches a backend behind that device: no route of kpx
/// takes its packets to the anchor.
fn sockets_of_one_device_get_a_backend(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    let far = far();
    for family in Family::ALL {
        for protocol in Protocol::COMMON {
            let translated = count(agent, "events", "socket_translated")?;
            let dial = Dial::new(protocol, far.frontend(family)).device("eth0");
            let answer = dial.exchange(&fixture.lab.host(NODE).ns, b"hello");
            ensure!(
                answer
                    .with_context(|| format!("{protocol} over {family} by eth0"))?
                    .backend
                    == "p2a"
            );
            ensure!(
                count(agent, "events", "socket_translated")? > translated,
                "the socket was not translated"
            );
            // The anchor's own hook serves a socket bound to the anchor.
            let dial = Dial::new(protocol, far.frontend(family)).device("kpx0");
            let answer = dial.exchange(&fixture.lab.host(NODE).ns, b"hello");
            ensure!(
                answer
                    .with_context(|| format!("{protocol} over {family} by kpx0"))?
                    .backend
                    == "p2a"
            );
        }
    }
    Ok(())
}

/// Checks that `auto` loses nothing but the programs. The cgroup goes while kpx runs, so the
/// programs cannot come back.
#[test]
fn packets_serve_sockets_once_the_programs_cannot_come_back() -> Result<()> {
    let fixture = Fixture::start()?;
    let cgroup = fixture.cgroup.path().join("short-lived");
    fs::create_dir(&cgroup)?;
    let cgroup_root = cgroup.display().to_string();
    let agent = fixture.kpx(&[
        "--cgroup-root",
        &cgroup_root,
        "--iptables-sync-period",
        "1s",
    ])?;
    ensure!(agent.typed_status()?.options.socket_lb == "auto: host");
    fs::remove_dir(&cgroup)?;
    let gone = || {
        Ok(agent
            .typed_status()?
            .options
            .socket_lb
            .starts_with("auto: off, because"))
    };
    wait_until(DEADLINE, "packets serve sockets", gone)?;
    ensure!(
        agent.typed_status()?.healthy,
        "{:?}",
        agent.typed_status()?.problems
    );
    ensure!(fixture.pins()?.is_empty(), "{:?}", fixture.pins()?);
    fixture.reaches(NODE, TCP, web().frontend(Family::V4), false)?;
    Ok(())
}

/// Checks that sockets and packets reach the same backends if a backend's address is a frontend of
/// another Service or a node port.
#[test]
fn socket_is_translated_once() -> Result<()> {
    let fixture = Fixture::start()?;
    let victim = Service::new("victim", 18, &["p1b"], SERVICE_PORT).of_no_pods();
    let pod = fixture.lab.host("p1b");
    fixture.serve(pod, SERVICE_PORT)?;
    let catching = Service::new("catching", 19, &["p2a"], PORT).in_namespace("tenant");
    let catching = catching.load_balancer(pod.addrs, "VIP");
    let knot = Service::new("knot", 20, &[NODE], NODE_PORT);
    for service in [&victim, &catching, &knot] {
        fixture.put(service)?;
    }
    for scope in ["off", "host", "all"] {
        let agent = match scope {
            "off" => fixture.kpx(&["--socket-lb", "off"])?,
            scope => fixture.agent(scope, &["--socket-lb-udp"])?,
        };
        for (family, protocol) in Family::ALL
            .into_iter()
            .flat_map(|family| Protocol::COMMON.map(|one| (family, one)))
        {
            for client in [NODE, "p1a"] {
                let what = || format!("--socket-lb {scope}: {client} by {protocol} over {family}");
                let reached = fixture
                    .reach(client, protocol, victim.frontend(family))
                    .with_context(what)?;
                ensure!(reached.backend == "p1b", "{}: {}", what(), reached.backend);
                let direct = fixture.reach(
                    client,
                    protocol,
                    (pod.addrs.ip(family), SERVICE_PORT).into(),
                )?;
                ensure!(
                    direct.backend == "p2a",
                    "{}: {} has the address",
                    what(),
                    direct.backend
                );
            }
        }
        for family in Family::ALL {
            fixture
                .refused(knot.frontend(family))
                .with_context(|| format!("--socket-lb {scope}: a node port"))?;
        }
        drop(agent);
    }
    Ok(())
}

fn two() -> [Service; 2] {
    [("first", 18), ("second", 19)].map(|(name, nth)| Service::new(name, nth, &["p1b"], PORT))
}

/// Checks that a socket shows the peer of its last call: the dialled frontend, or the backend that
/// it dialled directly.
fn socket_shows_what_it_dialled_last(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    let [first, second] = two();
    let node = &fixture.lab.host(NODE).ns;
    for family in Family::ALL {
        let frontends = [first.frontend(family), second.frontend(family)];
        let backend = SocketAddr::new(fixture.lab.host("p1b").addrs.ip(family), PORT);
        let before = count(agent, "events", "socket_translated")?;
        for dials in [
            vec![frontends[0], frontends[1]],
            vec![frontends[0], backend],
        ] {
            let shown = node.run(|| redialled(&dials))?;
            ensure!(
                dials.ends_with(&[shown]),
                "{dials:?} were dialled, and {shown} is shown"
            );
        }
        ensure!(count(agent, "events", "socket_translated")? == before + 3);
    }
    Ok(())
}

/// Connects a socket to each address in turn. Returns the last peer.
fn redialled(dials: &[SocketAddr]) -> io::Result<SocketAddr> {
    let family = if dials[0].is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let socket = net::socket(family, SocketType::STREAM, None)?;
    for dial in dials {
        net::connect_unspec(&socket)?;
        net::connect(&socket, dial)?;
    }
    TcpStream::from(socket).peer_addr()
}

impl Fixture {
    /// Checks that a client is refused at once.
    fn refused(&self, to: SocketAddr) -> Result<()> {
        let refused = Dial::new(TCP, to).connect(&self.lab.host(NODE).ns);
        ensure!(matches!(refused, Err(Fault::Refused)), "{refused:?}");
        Ok(())
    }
}
