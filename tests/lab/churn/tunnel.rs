//! A device without Ethernet headers: its clients, and their connections across a restart of kpx.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use aya::programs::TcAttachType;
use testbed::agent::{Service, kpx as kpx_in, wait_until};
use testbed::echo::{Dial, Fault, Protocol, pattern};
use testbed::lab::{Family, Layout, TunnelKind};

use crate::churn::fixture::{
    Fixture, NODE_PORT, PORT, PROMPT, TRY, ifindex, is_hooked_headerless, tc, tcx,
};
use crate::churn::links::detach_all;

const DEVICE: &str = "tun0";
const NEAR: u16 = 30_081;
const FAR: u16 = 30_082;
const NONE: u16 = 30_083;

#[test]
fn a_peer_behind_a_tunnel_is_served_as_strangers_are() -> Result<()> {
    let fixture = Fixture::on(Layout::Tunnel(TunnelKind::Tun))?;
    for (name, nth, backends, node_port) in [
        ("near", 21, &["p1b"][..], NEAR),
        ("far", 22, &["p2a"], FAR),
        ("none", 23, &[], NONE),
    ] {
        fixture.put(&Service::new(name, nth, backends, PORT).node_port(node_port))?;
    }
    for (attach, flag) in [
        ("tcx", "--cluster-ip-external=false"),
        ("clsact", "--cluster-ip-external=true"),
    ] {
        let kpx = fixture.base.kpx(&["--attach", attach, flag])?;
        wait_until(PROMPT, "the tunnel has its programs", || {
            is_hooked_headerless(fixture.node(), attach, DEVICE)
        })?;
        for family in Family::ALL {
            let node = fixture.lab.n1.pod_net.host(0).ip(family);
            let peer = fixture.lab.n2.pod_net.host(0).ip(family);
            for protocol in Protocol::ALL {
                let what = format!("{protocol} {family} by {attach}");
                let dial = |port| Dial::new(protocol, SocketAddr::new(node, port));
                // The far backend is behind the same tunnel, so the node masquerades the client.
                for (port, backend, seen_as) in [(NEAR, "p1b", peer), (FAR, "p2a", node)] {
                    for dial in [dial(port), dial(port).fragments()] {
                        let answer = dial.exchange(&fixture.lab.n2.host.ns, &pattern(5_000));
                        let answer = answer.with_context(|| format!("{backend}, {what}"))?;
                        ensure!(
                            (answer.backend.as_str(), answer.source.ip()) == (backend, seen_as),
                            "{what}: {answer:?}"
                        );
                    }
                }
                let refused = dial(NONE).exchange(&fixture.lab.n2.host.ns, b"hello");
                ensure!(
                    matches!(refused, Err(Fault::Refused)),
                    "{what}: {refused:?}"
                );
            }
            let to = fixture.web.frontend(family);
            fixture
                .lab
                .n2
                .host
                .ns
                .ip(&format!("route replace {} dev {DEVICE}", to.ip()))?;
            let by_cluster_ip = Dial::new(Protocol::Tcp, to)
                .deadline(TRY)
                .exchange(&fixture.lab.n2.host.ns, b"hello");
            ensure!(
                by_cluster_ip.is_ok() == (flag == "--cluster-ip-external=true"),
                "{flag}: {by_cluster_ip:?}"
            );
        }
        kpx.stop()?;
    }
    Ok(())
}

#[test]
fn a_peer_behind_a_tunnel_cannot_speak_for_a_pod() -> Result<()> {
    let fixture = Fixture::on(Layout::Tunnel(TunnelKind::Tun))?;
    // The kernel's own source validation is off.
    fixture.lab.set_rp_filter(0)?;
    let kpx = fixture.kpx("tcx")?;
    let peer = &fixture.lab.n2.host.ns;
    let spoofed = || {
        anyhow::Ok(
            kpx.status()?["reasons"]["spoofed"]
                .as_u64()
                .context("no such reason")?,
        )
    };
    for family in Family::ALL {
        let pod = fixture.lab.host("p1a").addrs.ip(family);
        let own = fixture.lab.n2.pod_net.host(0).ip(family);
        peer.ip(&format!(
            "addr add {pod} dev lo{}",
            if pod.is_ipv6() { " nodad" } else { "" }
        ))?;
        let before = spoofed()?;
        let to = SocketAddr::new(fixture.lab.n1.pod_net.host(0).ip(family), NODE_PORT);
        let dial = |from| {
            Dial::new(Protocol::Tcp, to)
                .source_ip(from)
                .deadline(TRY)
                .exchange(peer, b"hello")
        };
        ensure!(
            dial(pod).is_err(),
            "the peer is answered in the pod's name, {family}"
        );
        wait_until(PROMPT, "the packet counts as spoofed", || {
            Ok(spoofed()? > before)
        })?;
        // The peer's own flow shows that the spoofed flow would be listed.
        dial(own).with_context(|| format!("in its own name, {family}"))?;
        let flows = kpx_in(
            fixture.node(),
            &format!("flows --run-dir {}", kpx.run_dir().display()),
        )?;
        let listed = String::from_utf8_lossy(&flows.stdout);
        let names = |client: IpAddr| {
            listed.contains(SocketAddr::new(client, 0).to_string().trim_end_matches('0'))
        };
        ensure!(
            flows.status.success() && names(own) && !names(pod),
            "{family}: {flows:?}"
        );
    }
    kpx.stop()
}

#[test]
fn connections_through_a_tunnel_survive_restarts() -> Result<()> {
    let fixture = Fixture::on(Layout::Tunnel(TunnelKind::Tun))?;
    fixture.put(&fixture.web.backed_by(&["p2a"]))?;
    for attach in ["tcx", "clsact"] {
        let kpx = fixture.kpx(attach)?;
        wait_until(PROMPT, "the tunnel has its programs", || {
            is_hooked_headerless(fixture.node(), attach, DEVICE)
        })?;
        let clients = ["p1a", "n1", "x"]
            .into_iter()
            .flat_map(|client| Family::ALL.map(|family| (client, family)));
        let connections =
            clients.map(|(client, family)| Ok((client, family, fixture.connect(client, family)?)));
        let mut connections: Vec<_> = connections.collect::<Result<_>>()?;
        let mut all_go_on = |when: &str| {
            connections
                .iter_mut()
                .try_for_each(|(client, family, connection)| {
                    let answer = connection.exchange(b"hello").map(drop);
                    answer.with_context(|| format!("{when}: {client} by {family}, {attach}"))
                })
        };
        kpx.crash()?;
        all_go_on("while no agent runs")?;
        let kpx = fixture.kpx(attach)?;
        all_go_on("with another agent")?;
        ensure!(
            is_hooked_headerless(fixture.node(), attach, DEVICE)?,
            "{attach}: the tunnel lost a program"
        );
        // kpx restores the programs, as on any device.
        if attach == "tcx" {
            detach_all(kpx.pid(), ifindex(fixture.node(), DEVICE)?, "ingress")?;
            ensure!(
                tcx(fixture.node(), DEVICE, TcAttachType::Ingress)?.is_empty(),
                "a program is left"
            );
        } else {
            tc(fixture.node(), &format!("filter del dev {DEVICE} ingress"))?;
        }
        let is_back = || is_hooked_headerless(fixture.node(), attach, DEVICE);
        wait_until(PROMPT, "the program is put back", is_back)?;
        fixture.all_served(&["p1a", "n1", "x"])?;
        for client in Family::ALL.map(|family| fixture.lab.host("p2a").addrs.ip(family)) {
            let run_dir = kpx.run_dir().display();
            let to = fixture.web.frontend(if client.is_ipv4() {
                Family::V4
            } else {
                Family::V6
            });
            let trace =
                format!("trace --from {client} --to {to} --in-device {DEVICE} --run-dir {run_dir}");
            let refused = kpx_in(fixture.node(), &trace)?;
            let why = String::from_utf8_lossy(&refused.stderr);
            ensure!(
                !refused.status.success() && why.contains("have no Ethernet header"),
                "{refused:?}"
            );
        }
        kpx.stop()?;
    }
    Ok(())
}
