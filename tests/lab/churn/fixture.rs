//! A lab with a Service, and kpx's state on one of its nodes.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use aya::programs::{SchedClassifier, TcAttachType};
use nix::net::if_::if_nametoindex;
use proxy_common::device::Device;
use proxy_common::layout::LAYOUT;
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::echo::{Answer, Connection, Dial, Protocol};
use testbed::http::get_at_socket;
use testbed::lab::{EXTERNAL, Family, Host, Layout};
use testbed::netns::NetNs;
use testbed::served_lab::ServedLab;

pub(crate) const PORT: u16 = 8080;
pub(crate) const NODE_PORT: u16 = 30_080;

/// The limit from an event, or from kpx's next sync (once a second), until the state is restored.
pub(crate) const PROMPT: Duration = DEADLINE;
/// The timeout of one of several tries.
pub(crate) const TRY: Duration = Duration::from_millis(300);

pub(crate) struct Fixture {
    pub(crate) base: ServedLab,
    pub(crate) web: Service,
}

is_its_lab!(Fixture);

impl Fixture {
    /// Makes a Service with a backend on each node.
    pub(crate) fn new() -> Result<Self> {
        Self::on(Layout::Routed)
    }

    pub(crate) fn on(layout: Layout) -> Result<Self> {
        let base = ServedLab::with_manifests(layout)?.serve_all(PORT)?;
        let web = Service::new("web", 10, &["p2a", "p1b"], PORT)
            .node_port(NODE_PORT)
            .external_ips(EXTERNAL.host(7));
        base.put(&web)?;
        Ok(Self { base, web })
    }

    pub(crate) fn node(&self) -> &NetNs {
        &self.lab.n1.host.ns
    }

    /// Starts kpx on n1 with one attach mechanism and a sync period of one second.
    pub(crate) fn kpx(&self, attach: &str) -> Result<Agent<'_>> {
        self.base
            .kpx(&["--attach", attach, "--iptables-sync-period", "1s"])
    }

    /// Returns a connection from a host to the Service's ClusterIP, or from outside to its node
    /// port.
    pub(crate) fn dial(&self, client: &str, family: Family) -> Dial {
        let to = match client {
            "x" | "xl" => (self.lab.n1.host.addrs.ip(family), NODE_PORT).into(),
            _ => self.web.frontend(family),
        };
        Dial::new(Protocol::Tcp, to)
    }

    pub(crate) fn connect(&self, client: &str, family: Family) -> Result<Connection> {
        let connection = self.dial(client, family).connect(&self.lab.host(client).ns);
        let mut connection = connection.with_context(|| format!("{client} by {family}"))?;
        connection
            .exchange(b"hello")
            .with_context(|| format!("{client} by {family}"))?;
        Ok(connection)
    }

    pub(crate) fn ask(&self, client: &str, family: Family) -> Result<Answer> {
        let answer = self
            .dial(client, family)
            .exchange(&self.lab.host(client).ns, b"hello");
        answer.with_context(|| format!("{client} by {family}"))
    }

    pub(crate) fn all_served(&self, clients: &[&str]) -> Result<()> {
        clients.iter().try_for_each(|client| {
            Family::ALL
                .iter()
                .try_for_each(|family| self.ask(client, *family).map(drop))
        })
    }

    /// Returns true if new connections of these clients succeed soon, by both families.
    pub(crate) fn serves(&self, clients: &[&str]) -> bool {
        let serves = |client: &str, family| {
            self.dial(client, family)
                .deadline(TRY)
                .exchange(&self.lab.host(client).ns, b"hello")
                .is_ok()
        };
        clients
            .iter()
            .all(|client| Family::ALL.iter().all(|family| serves(client, *family)))
    }

    /// Waits until all data is acknowledged: a packet that passes a device without programs may
    /// break its connection.
    pub(crate) fn settles(&self) -> Result<()> {
        wait_until(PROMPT, "all is acknowledged", || {
            let sockets = |host: &Host| host.ns.exec(Command::new("ss").args(["-H", "-t", "-i"]));
            self.lab.backends().try_fold(true, |settled, host| {
                Ok(settled && !sockets(host)?.contains("unacked:"))
            })
        })
    }

    /// Opens the map of the node's devices.
    pub(crate) fn devices(&self) -> Result<HashMap<MapData, u32, Device>> {
        let pin = self
            .node()
            .bpf_dir()
            .join(format!("v{LAYOUT}/maps/DEVICES"));
        Ok(Map::from_map_data(MapData::from_pin(&pin)?)?.try_into()?)
    }
}

/// A fixture, and the kpx that runs in it with one attach mechanism.
pub(crate) struct Running<'a> {
    pub(crate) fixture: &'a Fixture,
    pub(crate) kpx: Agent<'a>,
    pub(crate) attach: &'static str,
}

impl<'a> Running<'a> {
    pub(crate) fn start(fixture: &'a Fixture, attach: &'static str) -> Result<Self> {
        Ok(Self {
            fixture,
            kpx: fixture.kpx(attach)?,
            attach,
        })
    }
}

pub(crate) fn ifindex(ns: &NetNs, device: &str) -> Result<u32> {
    ns.run(|| if_nametoindex(device))
        .with_context(|| format!("no device {device}"))
}

/// Returns the names of a device's TCX programs, in the order of execution.
pub(crate) fn tcx(ns: &NetNs, device: &str, direction: TcAttachType) -> Result<Vec<String>> {
    let (_, programs) = ns.run(|| SchedClassifier::query_tcx(device, direction))?;
    Ok(programs
        .iter()
        .map(|program| program.name_as_str().unwrap_or_default().to_owned())
        .collect())
}

/// Checks that a device carries its two programs, each once.
pub(crate) fn is_hooked(ns: &NetNs, attach: &str, device: &str) -> Result<bool> {
    carries(ns, attach, device, ["kpx_ingress", "kpx_egress"])
}

/// Checks that a device without Ethernet headers carries the programs for such devices, each once.
pub(crate) fn is_hooked_headerless(ns: &NetNs, attach: &str, device: &str) -> Result<bool> {
    carries(ns, attach, device, ["kpx_ingress_l3", "kpx_egress_l3"])
}

fn carries(ns: &NetNs, attach: &str, device: &str, [ingress, egress]: [&str; 2]) -> Result<bool> {
    let hooks = [
        ("ingress", TcAttachType::Ingress, ingress),
        ("egress", TcAttachType::Egress, egress),
    ];
    for (hook, direction, program) in hooks {
        let is_there = match attach {
            "tcx" => {
                tcx(ns, device, direction)?
                    .iter()
                    .filter(|name| *name == program)
                    .count()
                    == 1
            }
            _ => {
                let filters = tc(ns, &format!("filter show dev {device} {hook}"))?;
                filters
                    .lines()
                    .filter(|line| {
                        line.contains(&format!("{program} "))
                            || line.contains(&format!("{program}:"))
                    })
                    .count()
                    == 1
            }
        };
        if !is_there {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(crate) fn tc(ns: &NetNs, arguments: &str) -> Result<String> {
    ns.exec(Command::new("tc").args(arguments.split_whitespace()))
}

/// Returns kpx's count of repairs of this kind.
pub(crate) fn repairs(agent: &Agent<'_>, what: &str) -> Result<f64> {
    let answer = get_at_socket(&agent.run_dir().join("kpx.sock"), "/metrics")?.body;
    let line = format!("kpx_repairs_total{{what=\"{what}\"}} ");
    let value = answer.lines().find_map(|found| found.strip_prefix(&line));
    ensure!(value.is_some(), "no {line} in {answer}");
    Ok(value.unwrap_or_default().trim().parse()?)
}
