//! A lab with its servers, its cluster and its running agents.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use proxy_net::rule::TABLE;
use testbed::agent::{Agent, Cluster, DEADLINE, Service, wait_until};
use testbed::echo::{Answer, Dial, Fault, Protocol, Servers, kernel_speaks_sctp, pattern};
use testbed::kernel_tables;
use testbed::lab::{CLUSTER_PODS, EXTERNAL, Family, Lab};

use super::services::{self, PORT, SECOND_PORT};

/// The timeout of one of several tries.
const TRY: Duration = Duration::from_millis(250);

/// The number of equal reads in a row after which the tables count as settled.
const QUIET: u32 = 3;

/// Tables with room for the cases. The tests read them often, and the kernel visits each free place.
const TABLES: [&str; 3] = [
    "--flow-table-size=32768",
    "--service-table-size=8192",
    "--endpoint-table-size=16384",
];

/// Parts of the names of the kernel's counters of losses.
const LOSSES: [&str; 5] = ["Reasm", "Err", "Discard", "Drop", "Fail"];

pub(crate) struct Fixture<'a> {
    pub(crate) lab: &'a Lab,
    pub(crate) cluster: &'a Cluster,
    pub(crate) agents: Vec<Agent<'a>>,
}

/// Makes all listeners, and the addresses besides the hosts' own ones.
pub(crate) fn create_services(lab: &Lab, servers: &Servers) -> Result<()> {
    for host in lab.backends() {
        servers.serve(host, PORT)?;
    }
    let n1 = &lab.n1.host;
    let ext = &lab.ext;
    for service in services::HERE {
        let nth = services::index(service);
        n1.add_addrs("eth0", services::vip(nth))?;
        n1.add_addrs("eth0", services::external_ip(nth))?;
    }
    let proxy = services::vip(services::index("proxied"));
    ext.add_addrs("eth0", proxy)?;
    for family in Family::ALL {
        let at = |addrs: testbed::lab::Dual, port| SocketAddr::new(addrs.ip(family), port);
        servers.serve_at(ext, "proxy", at(proxy, testbed::agent::SERVICE_PORT))?;
        servers.serve_at(
            n1,
            "host",
            at(services::vip(services::index("here")), SECOND_PORT),
        )?;
        servers.serve_at(
            n1,
            "host",
            at(n1.addrs, services::node_port(services::index("listened"))),
        )?;
        let len = if family == Family::V4 { 32 } else { 128 };
        lab.fabric.ns.ip(&format!(
            "route add {}/{len} via {}",
            proxy.ip(family),
            ext.addrs.ip(family)
        ))?;
    }
    if kernel_speaks_sctp() {
        set_up_sctp(lab)
    } else {
        lead_sctp_to_rules(lab)
    }
}

/// Sets up the kernel's SCTP. By default it does not dial a public address from a private one if
/// the host has any other, whichever source the route names. In one kernel a refusal that precedes
/// the return of `connect` is lost; only the refusal of the next INIT counts, by default three
/// seconds later.
fn set_up_sctp(lab: &Lab) -> Result<()> {
    lab.nodes()
        .into_iter()
        .try_for_each(|node| node.host.ns.sysctl("sctp/addr_scope_policy", "0"))?;
    let hosts = lab.backends().chain([&lab.x, &lab.xl]);
    hosts
        .into_iter()
        .try_for_each(|host| host.ns.sysctl("sctp/rto_initial", "200")) // Milliseconds.
}

/// The kernel's SCTP sets ports in its route look-ups, SCTP of a raw socket does not. So each of
/// kpx's rules with a port needs a twin without a port. That holds for all frontends that our
/// sockets dial, which are all but the proxy's.
fn lead_sctp_to_rules(lab: &Lab) -> Result<()> {
    let all = EXTERNAL;
    let proxy = services::vip(services::index("proxied"));
    for (family, version) in [(Family::V4, "-4"), (Family::V6, "-6")] {
        for rule in [
            format!("to {} lookup main pref 1000", proxy.ip(family)),
            format!(
                "to {} iif lo ipproto sctp lookup {TABLE} pref 1001",
                all.cidr(family)
            ),
        ] {
            let mut command = Command::new("ip");
            lab.n1.host.ns.exec(
                command
                    .arg(version)
                    .args(["rule", "add"])
                    .args(rule.split(' ')),
            )?;
        }
    }
    Ok(())
}

impl<'a> Fixture<'a> {
    /// Runs kpx on both nodes with these arguments.
    pub(crate) fn new(lab: &'a Lab, cluster: &'a Cluster, args: &[String]) -> Result<Self> {
        // ::1 serves node ports only if `--nodeport-addresses` names it.
        let named = if args.iter().any(|arg| arg == "--nodeport-addresses") {
            "localhost"
        } else {
            "all,localhost"
        };
        let tables = TABLES.map(str::to_owned);
        let args = [&tables, args, &[format!("--nodeport-addresses={named}")]].concat();
        let start = |node| Agent::start_with(lab, node, cluster.source(), &args);
        let agents = lab.nodes().into_iter().map(start).collect::<Result<_>>()?;
        Ok(Self {
            lab,
            cluster,
            agents,
        })
    }

    /// Returns the kernel's counts of losses on each host, those of this machine's queues, and the
    /// counts of both agents: a packet that a test misses is in one of them.
    pub(crate) fn losses(&self) -> String {
        let queues = std::fs::read_to_string("/proc/net/softnet_stat").unwrap_or_default();
        let mut text = format!("softnet_stat, dropped in the second column:\n{queues}");
        let hosts = self.lab.backends().chain([&self.lab.x]);
        for host in hosts.chain(self.lab.nodes().map(|node| &node.host)) {
            let counts = host.ns.exec(Command::new("nstat").arg("-as"));
            let counts = counts.unwrap_or_else(|error| format!("{error:#}"));
            let lost: Vec<_> = counts
                .lines()
                .filter(|line| LOSSES.iter().any(|part| line.contains(part)))
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect();
            text += &format!("{}: {}\n", host.name, lost.join(", "));
        }
        for agent in &self.agents {
            let events = agent.status().map(|status| status["events"].clone());
            text += &format!("{events:?}\n");
        }
        text
    }

    pub(crate) fn logs(&self) -> String {
        self.agents
            .iter()
            .map(Agent::log)
            .collect::<Vec<_>>()
            .join("\n")
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.agents.into_iter().try_for_each(Agent::stop)
    }

    pub(crate) fn put(&self, service: &Service) -> Result<()> {
        service
            .objects(self.lab)
            .iter()
            .try_for_each(|object| self.cluster.put(object))
    }

    /// Makes a change of the cluster in both families, and waits until both nodes' tables show all
    /// of it.
    pub(crate) fn settle(&self, change: impl FnOnce() -> Result<()>) -> Result<()> {
        let tables = || {
            self.agents
                .iter()
                .map(|agent| kernel_tables::of(agent.pid()))
                .collect::<Result<Vec<_>>>()
        };
        let before = tables()?;
        change()?;
        let mut last = Vec::new();
        let mut quiet = 0;
        wait_until(DEADLINE, "both nodes' tables change", || {
            let now = tables()?;
            let changed = now
                .iter()
                .zip(&before)
                .all(|(now, was)| now.v4 != was.v4 && now.v6 != was.v6);
            quiet = if now == last { quiet + 1 } else { 0 };
            last = now;
            Ok(changed && quiet == QUIET)
        })
    }

    /// Creates a Service and waits until all of its protocols and families are served.
    pub(crate) fn start(&self, service: &Service) -> Result<()> {
        self.settle(|| self.put(service))?;
        self.eventually(&format!("{} is served", service.name), "p1a", service, true)
    }

    /// Deletes a Service with its objects, and waits until the nodes have removed it.
    pub(crate) fn end(&self, service: &Service) -> Result<()> {
        self.settle(|| self.delete(service))
    }

    pub(crate) fn delete(&self, service: &Service) -> Result<()> {
        service
            .objects(self.lab)
            .iter()
            .try_for_each(|object| self.cluster.delete(object))
    }

    /// Waits until a client gets an answer from a Service's ClusterIP, or none, over every protocol
    /// and family.
    pub(crate) fn eventually(
        &self,
        what: &str,
        client: &str,
        service: &Service,
        answers: bool,
    ) -> Result<()> {
        self.eventually_at(what, client, |family| service.frontend(family), answers)
    }

    /// Like `eventually`, at the address that `at` returns for each family.
    pub(crate) fn eventually_at(
        &self,
        what: &str,
        client: &str,
        at: impl Fn(Family) -> SocketAddr,
        answers: bool,
    ) -> Result<()> {
        for (protocol, family) in combinations() {
            let dial = Dial::new(protocol, at(family)).deadline(TRY);
            wait_until(DEADLINE, &format!("{what}, {protocol} {family}"), || {
                Ok(dial.exchange(&self.lab.host(client).ns, b"?").is_ok() == answers)
            })?;
        }
        Ok(())
    }

    /// Dials as a new flow.
    pub(crate) fn dial(&self, client: &str, dial: Dial) -> Result<Answer> {
        let dial = from_unused_port(dial);
        let answer = dial.exchange(&self.lab.host(client).ns, &pattern(100));
        answer.with_context(|| format!("{client} dials {} over {}", dial.to, dial.protocol))
    }

    /// Returns the backends that answer a client over this many connections.
    pub(crate) fn answering(
        &self,
        client: &str,
        dial: Dial,
        times: usize,
    ) -> Result<BTreeSet<String>> {
        (0..times)
            .map(|_| Ok(self.dial(client, dial)?.backend))
            .collect()
    }

    /// Checks that all of these backends answer, and no other.
    pub(crate) fn only(
        &self,
        client: &str,
        dial: Dial,
        times: usize,
        backends: &[&str],
    ) -> Result<()> {
        let answered = self.answering(client, dial, times)?;
        let Dial { protocol, to, .. } = dial;
        ensure!(
            answered.iter().eq(backends),
            "{client} dials {to} {protocol}: {answered:?} answer, not {backends:?}"
        );
        Ok(())
    }

    /// Checks that no backend of the cluster answers.
    pub(crate) fn is_silent(&self, client: &str, dial: Dial) -> Result<()> {
        match dial.deadline(TRY).exchange(&self.lab.host(client).ns, b"?") {
            Ok(answer) => anyhow::bail!("{client} dials {}: {} answers", dial.to, answer.backend),
            Err(Fault::Corrupt(what)) => anyhow::bail!("{client} dials {}: {what}", dial.to),
            Err(Fault::Refused | Fault::TimedOut(_) | Fault::Io(..)) => Ok(()),
        }
    }
}

/// Dials from a port without an earlier flow, if the protocol distinguishes flows only by ports. A
/// port that the kernel chooses might continue an older flow.
pub(crate) fn from_unused_port(dial: Dial) -> Dial {
    match dial {
        Dial {
            protocol: Protocol::Udp,
            source_port: 0,
            ..
        } => dial.source_port(fresh_ports(1)),
        dial => dial,
    }
}

/// Returns the first of `count` consecutive unused ports, above the servers' and below the node
/// ports and the kernel's ephemeral ports.
pub(crate) fn fresh_ports(count: u16) -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(count.into(), Ordering::Relaxed) % 19_900;
    10_000 + u16::try_from(next).expect("it is below 19,900")
}

pub(crate) fn combinations() -> impl Iterator<Item = (Protocol, Family)> {
    Protocol::ALL
        .into_iter()
        .flat_map(|protocol| Family::ALL.map(|family| (protocol, family)))
}

/// Calls `check` for every protocol and family in turn.
pub(crate) fn each(mut check: impl FnMut(Protocol, Family) -> Result<()>) -> Result<()> {
    combinations().try_for_each(|(protocol, family)| {
        check(protocol, family).with_context(|| format!("{protocol} {family}"))
    })
}

/// Returns the arguments for kube-proxy's masquerading.
pub(crate) fn compat_args() -> Vec<String> {
    let pods = Family::ALL
        .map(|family| CLUSTER_PODS.cidr(family))
        .join(",");
    // Here the node's sockets send packets to frontends; in the other settings socket load
    // balancing translates connections at connect.
    [
        "--masquerade",
        "compat",
        "--cluster-cidr",
        &pods,
        "--socket-lb",
        "off",
    ]
    .map(str::to_owned)
    .to_vec()
}
