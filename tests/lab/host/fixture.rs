//! A cluster with an API server, and hosts outside of it that run kpx: xl on the nodes' segment, x
//! behind a router.

use std::collections::BTreeSet;
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::programs::{SchedClassifier, TcAttachType};
use serde_json::Value;
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::echo::{Dial, Fault, Protocol};
use testbed::lab::{Dual, Family, Host, Lab, Layout, Node};
use testbed::served_lab::ServedLab;

/// The port of all servers.
pub(crate) const PORT: u16 = 8080;
/// The timeout of one answer; early requests are repeated.
const ANSWER: Duration = Duration::from_millis(400);
/// Enough dials to reach both of two backends, except in about one of two thousand rounds.
const DIALS: usize = 12;

pub(crate) struct Fixture {
    base: ServedLab,
}

is_its_lab!(Fixture);

impl Fixture {
    pub(crate) fn start(layout: Layout) -> Result<Self> {
        Ok(Self {
            base: ServedLab::with_api_server(layout)?
                .serve_all(PORT)?
                .serve(&["xl"], PORT)?,
        })
    }

    /// Starts kpx on a host outside.
    pub(crate) fn outside<'a>(&'a self, host: &'a Host, args: &[&str]) -> Result<Agent<'a>> {
        Agent::start_outside(&self.lab, host, self.cluster.source(), args)
    }

    /// Starts kpx on both nodes.
    pub(crate) fn nodes(&self) -> Result<[Agent<'_>; 2]> {
        let start = |node| Agent::start(&self.lab, node, self.cluster.source());
        Ok([start(&self.lab.n1)?, start(&self.lab.n2)?])
    }

    /// Waits up to [`DEADLINE`] until exactly these backends answer, over all protocols and both
    /// families.
    pub(crate) fn served(
        &self,
        host: &Host,
        at: impl Fn(Family) -> SocketAddr,
        backends: &[&str],
    ) -> Result<()> {
        self.served_seeing(host, at, backends, None)
    }

    /// Like [`Self::served`], and the backends see the host with these addresses.
    pub(crate) fn served_seeing(
        &self,
        host: &Host,
        at: impl Fn(Family) -> SocketAddr,
        backends: &[&str],
        sees: Option<Dual>,
    ) -> Result<()> {
        self.served_over(&Protocol::ALL, host, at, backends, sees)
    }

    /// Like [`Self::served_seeing`], for some protocols.
    pub(crate) fn served_over(
        &self,
        protocols: &[Protocol],
        host: &Host,
        at: impl Fn(Family) -> SocketAddr,
        backends: &[&str],
        sees: Option<Dual>,
    ) -> Result<()> {
        let want: BTreeSet<String> = backends.iter().map(|&name| name.to_owned()).collect();
        each(protocols, |protocol, family| {
            let mut last = String::new();
            let what = format!("{} reaches {want:?}", host.name);
            let served = wait_until(DEADLINE, &what, || {
                let answers = (0..DIALS).map(|_| answer(host, protocol, at(family)));
                let answers: Result<Vec<_>, _> = answers.collect();
                last = format!("{answers:?}");
                let Ok(answers) = answers else {
                    return Ok(false);
                };
                let seen = sees.is_none_or(|sees| {
                    answers.iter().all(|(_, client)| *client == sees.ip(family))
                });
                Ok(seen
                    && answers
                        .into_iter()
                        .map(|(name, _)| name)
                        .collect::<BTreeSet<_>>()
                        == want)
            });
            served.with_context(|| format!("last answers: {last}"))
        })
    }

    /// Waits up to [`DEADLINE`] until dials are refused at once, over all protocols and both
    /// families.
    pub(crate) fn refused(&self, host: &Host, at: impl Fn(Family) -> SocketAddr) -> Result<()> {
        each(&Protocol::ALL, |protocol, family| {
            wait_until(DEADLINE, &format!("{} is refused", host.name), || {
                match Dial::new(protocol, at(family))
                    .deadline(ANSWER)
                    .exchange(&host.ns, b"hello")
                {
                    Err(Fault::Refused) => Ok(true),
                    Ok(_) | Err(Fault::TimedOut(_)) => Ok(false),
                    // The agent adds its routes after it is complete, and again after the kernel
                    // has removed them. Until then the kernel has no route, or the router reports
                    // none.
                    Err(Fault::Io(_, error)) if is_unrouted(&error) => Ok(false),
                    Err(fault) => bail!(fault),
                }
            })
        })
    }
}

fn is_unrouted(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable
    )
}

fn each(protocols: &[Protocol], holds: impl Fn(Protocol, Family) -> Result<()>) -> Result<()> {
    for protocol in protocols {
        for family in Family::ALL {
            holds(*protocol, family).with_context(|| format!("by {protocol} over {family}"))?;
        }
    }
    Ok(())
}

/// Returns the answering backend, and the client address that it saw.
fn answer(host: &Host, protocol: Protocol, to: SocketAddr) -> Result<(String, IpAddr), Fault> {
    let answer = Dial::new(protocol, to)
        .deadline(ANSWER)
        .exchange(&host.ns, b"hello")?;
    Ok((answer.backend, answer.source.ip()))
}

/// Adds or deletes a host's route to a node's pods.
pub(crate) fn route(host: &Host, verb: &str, node: &Node) -> Result<()> {
    let routes = Family::ALL.map(|family| {
        format!(
            "route {verb} {} via {}",
            node.pod_net.cidr(family),
            node.host.addrs.ip(family)
        )
    });
    host.ns.ip(&routes.join("\n"))
}

/// Adds or deletes the default route of a host on the nodes' segment, through the fabric.
pub(crate) fn default_route(lab: &Lab, host: &Host, verb: &str) -> Result<()> {
    let route = |family| format!("route {verb} default via {}", lab.fabric.addrs.ip(family));
    host.ns.ip(&Family::ALL.map(route).join("\n"))
}

/// Returns the networks with routes of kpx through nodes.
pub(crate) fn pod_routes(host: &Host) -> Result<Vec<String>> {
    let mut routes = Vec::new();
    for family in ["-4", "-6"] {
        let text = host
            .ns
            .exec(Command::new("ip").args([family, "route", "show", "proto", "75"]))?;
        let lines = text.lines().filter(|line| line.contains(" via "));
        routes
            .extend(lines.map(|line| line.split(" dev").next().unwrap_or(line).trim().to_owned()));
    }
    routes.sort();
    Ok(routes)
}

/// Returns the expected routes to these nodes' pods.
pub(crate) fn routes_of(nodes: &[&Node]) -> Vec<String> {
    let of = |node: &&Node| {
        let pods = node.pod_net;
        let addrs = node.host.addrs;
        Family::ALL.map(|family| format!("{} via {}", pods.cidr(family), addrs.ip(family)))
    };
    let mut routes: Vec<String> = nodes.iter().flat_map(of).collect();
    routes.sort();
    routes
}

/// Returns the unreachable backends of `kpx status` as service port and reason; one entry if both
/// families agree.
pub(crate) fn unreachable(agent: &Agent<'_>) -> Result<BTreeSet<(String, String)>> {
    let status = agent.status()?;
    let all = status["unreachable"]
        .as_array()
        .context("a list of unreachable backends")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(all
        .iter()
        .map(|one| (text(&one["service"]), text(&one["why"])))
        .collect())
}

/// Returns the reason if all of a Service's backends are out of reach.
pub(crate) fn cut_off(agent: &Agent<'_>, service: &str) -> Result<Option<String>> {
    let status = agent.status()?;
    let all = status["cutOff"].as_array().context("a list of services")?;
    let one = all.iter().find(|one| one["service"] == service);
    Ok(one.and_then(|one| one["why"].as_str()).map(str::to_owned))
}

/// Returns all state that kpx could change on a host: devices and their settings, routes, rules,
/// filters, programs.
pub(crate) fn state(host: &Host) -> Result<String> {
    // The kernel adds an IPv6 address's route a moment after the address, by a worker.
    let ip = |args: &str| {
        host.ns
            .exec(Command::new("ip").args(args.split_whitespace()))
    };
    wait_until(DEADLINE, "all addresses have routes", || {
        let routes = ip("-6 -o route show table local type local")?;
        let routes: BTreeSet<_> = routes
            .lines()
            .filter_map(|line| line.split(' ').nth(1))
            .collect();
        let addrs = ip("-6 -o addr show")?;
        let mut addrs = addrs
            .lines()
            .filter_map(|line| line.split_whitespace().nth(3));
        Ok(addrs.all(|addr| {
            addr.split('/')
                .next()
                .is_some_and(|addr| routes.contains(addr))
        }))
    })?;
    let mut state = String::new();
    let commands: [(&str, &[&str]); 6] = [
        ("ip", &["-j", "link", "show"]),
        ("ip", &["-4", "-j", "route", "show", "table", "all"]),
        ("ip", &["-6", "-j", "route", "show", "table", "all"]),
        ("ip", &["-4", "-j", "rule", "show"]),
        ("ip", &["-6", "-j", "rule", "show"]),
        ("tc", &["-j", "qdisc", "show"]),
    ];
    for (command, args) in commands {
        state += &host.ns.exec(Command::new(command).args(args))?;
        state += "\n";
    }
    let settings = host.ns.exec(Command::new("sysctl").args([
        "-a",
        "--pattern",
        "^net\\.ipv[46]\\.(conf|ip_forward)",
    ]))?;
    // `stable_secret` depends on the moment when the interface got its address.
    state.extend(
        settings
            .lines()
            .filter(|line| !line.contains("stable_secret"))
            .map(|line| format!("{line}\n")),
    );
    for device in ["lo", "eth0", "eth1"] {
        for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
            let programs = host
                .ns
                .run(|| match SchedClassifier::query_tcx(device, direction) {
                    Ok((_, programs)) => programs
                        .iter()
                        .map(|program| program.id())
                        .collect::<Vec<_>>(),
                    Err(_) => Vec::new(), // x has no eth1.
                });
            state += &format!("{device} {direction:?}: {programs:?}\n");
        }
    }
    Ok(state)
}

/// Waits until the state equals `before`.
pub(crate) fn is_as_before(host: &Host, before: &str) -> Result<()> {
    let now = state(host)?;
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let old = lines(before);
    let new = lines(&now);
    let gone: Vec<_> = old.difference(&new).collect();
    let come: Vec<_> = new.difference(&old).collect();
    ensure!(
        gone.is_empty() && come.is_empty(),
        "gone:\n{gone:#?}\nnew:\n{come:#?}"
    );
    Ok(())
}
