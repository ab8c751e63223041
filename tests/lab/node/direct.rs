//! Direct connections of pods to backends, while flows through a Service use the same ports.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::{Dial, Protocol};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;
use testbed::stranger::{self, Stranger};

const PORT: u16 = 8080;

#[test]
fn direct_connections_live_beside_flows_from_their_ports() -> Result<()> {
    for layout in [Layout::Bridge, Layout::Vxlan] {
        let fixture = &started(layout)?;
        let agent = fixture.kpx(&[])?;
        let running = Running { fixture, agent };
        testbed::cases!(
            &running;
            neighbours_syn_through_service_leaves_direct_connection_alone,
            pod_reaches_service_from_port_of_its_direct_connection,
        )
        .with_context(|| format!("{layout:?}"))?;
        running.agent.stop()?;
    }
    Ok(())
}

#[test]
fn routed_pod_reaches_service_from_port_of_its_direct_connection() -> Result<()> {
    let fixture = &started(Layout::Routed)?;
    for args in [&[][..], &["--fast-path", "off"]] {
        let agent = fixture.kpx(args)?;
        let running = Running { fixture, agent };
        pod_reaches_service_from_port_of_its_direct_connection(&running)
            .with_context(|| format!("{args:?}"))?;
        running.agent.stop()?;
    }
    Ok(())
}

/// Builds a lab with both Services.
fn started(layout: Layout) -> Result<ServedLab> {
    let lab = ServedLab::with_manifests(layout)?.serve_all(PORT)?;
    services()
        .iter()
        .try_for_each(|(_, service)| lab.put(service))?;
    Ok(lab)
}

/// Returns the Services with their backends: a pod on the same bridge, and a pod of another node.
fn services() -> [(&'static str, Service); 2] {
    [
        ("p1c", Service::new("near", 10, &["p1c"], PORT)),
        ("p2a", Service::new("far", 11, &["p2a"], PORT)),
    ]
}

fn neighbours_syn_through_service_leaves_direct_connection_alone(
    running: &Running<ServedLab>,
) -> Result<()> {
    let Running {
        fixture,
        agent: kpx,
    } = running;
    let services = services();
    let stranger = Stranger::on(fixture.lab.host("p1a"))?;
    let victim = fixture.lab.host("p1b");
    for (family, (name, service)) in Family::ALL
        .into_iter()
        .flat_map(|family| services.iter().map(move |row| (family, row)))
    {
        let what = || format!("{family}, {name}");
        let client = SocketAddr::new(victim.addrs.ip(family), 45_000);
        let backend = SocketAddr::new(fixture.lab.host(name).addrs.ip(family), PORT);
        let dial = Dial::new(Protocol::Tcp, backend).source_port(client.port());
        let mut direct = dial.connect(&victim.ns).with_context(what)?;
        direct.exchange(b"before").with_context(what)?;
        let opened = counted(kpx, "flow_opened")?;
        let frontend = service.frontend(family);
        stranger.send(stranger::tcp(client, frontend).syn(), frontend.ip())?;
        wait_until(DEADLINE, "the SYN opens a flow", || {
            Ok(counted(kpx, "flow_opened")? > opened)
        })
        .with_context(what)?;
        for _ in 0..3 {
            direct.exchange(b"after").with_context(what)?;
        }
        direct.reset()?;
    }
    Ok(())
}

fn pod_reaches_service_from_port_of_its_direct_connection(
    running: &Running<ServedLab>,
) -> Result<()> {
    let lab = &running.fixture.lab;
    let services = services();
    let client = lab.host("p1b");
    for (family, (name, service)) in Family::ALL
        .into_iter()
        .flat_map(|family| services.iter().map(move |row| (family, row)))
    {
        let what = || format!("{family}, {name}");
        let backend = SocketAddr::new(lab.host(name).addrs.ip(family), PORT);
        let from = |to| {
            Dial::new(Protocol::Tcp, to)
                .source_port(45_001)
                .deadline(DEADLINE)
        };
        let mut direct = from(backend).connect(&client.ns).with_context(what)?;
        direct.exchange(b"before").with_context(what)?;
        // The client repeats the SYN after a second, and gets another port then.
        let mut served = from(service.frontend(family))
            .connect(&client.ns)
            .with_context(what)?;
        let answer = served.exchange(b"served").with_context(what)?;
        ensure!(
            answer.backend == *name && answer.source.port() != 45_001,
            "{}: {answer:?}",
            what()
        );
        direct.exchange(b"after").with_context(what)?;
        served.exchange(b"served").with_context(what)?;
        direct.reset()?;
        served.reset()?;
    }
    Ok(())
}

/// Returns the programs' count of an event.
fn counted(kpx: &Agent, event: &str) -> Result<u64> {
    kpx.typed_status()?
        .events
        .get(event)
        .copied()
        .context("no such event")
}
