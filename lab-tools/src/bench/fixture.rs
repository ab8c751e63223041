//! A lab whose node n1 is served in one way, and what shows that it is.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::net::SocketAddrV4;
use std::path::Path as FilePath;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::kube_proxy::KubeProxy;
use super::traffic::Slice;
use super::{Mode, Path, Variant, services};
use crate::kube_rules::{IPVS_SETTINGS, Rules};
use testbed::agent::{Agent, DEADLINE, Source, binary, node, wait_until};
use testbed::lab::{CLUSTER_PODS, Family, Lab};
use testbed::netns::check;

/// The length of a slice that only has to work.
const SHORT: Duration = Duration::from_millis(20);
/// How long connection tracking remembers a connection that was closed, in seconds, lest a table of closed ones grow
/// while a run goes on.
const TIME_WAIT: &str = "10";

/// For so many Services kpx's tables are large enough without a flag.
const AS_BUILT: usize = 20_000;
/// So many Services have chains of their own with every tool.
const WHOLE: usize = 1_000;
/// Paths on which packets of open connections can take a way past the node's stack.
const FAST: [Path; 3] = [Path::Local, Path::Remote, Path::Routable];

/// One variant at work.
#[derive(Debug)]
pub struct Fixture<'a> {
    pub variant: Variant,
    lab: &'a Lab,
    by: By<'a>,
}

/// The proxy of the node: it serves as long as this value lives.
#[derive(Debug)]
enum By<'a> {
    Nobody,
    Rules,
    KubeProxy { _process: KubeProxy<'a> },
    Kpx(Box<Agent<'a>>),
}

impl<'a> Fixture<'a> {
    pub fn start(lab: &'a Lab, variant: Variant, services: usize, kube_proxy: Option<&FilePath>) -> Result<Self> {
        tune(lab)?;
        // Only some load whole rule sets of this size in seconds.
        let slow = matches!(variant, Variant::IptablesNft | Variant::Nftables);
        let rules = services::rules(lab, services, !slow || services <= WHOLE);
        let by = match variant {
            Variant::Direct | Variant::Control => {
                // Only an outsider that dials pods needs a route to them.
                let (pods, n1) = (lab.n1.pod_net.cidr(Family::V4), lab.n1.host.addrs.v4);
                lab.fabric.ns.ip(&format!("route add {pods} via {n1}"))?;
                By::Nobody
            }
            Variant::IptablesLegacy => restore(lab, "iptables-legacy-restore", &rules)?,
            Variant::IptablesNft => restore(lab, "iptables-nft-restore", &rules)?,
            Variant::Nftables => {
                feed(lab, Command::new("nft").args(["-f", "-"]), &rules.nftables())?;
                By::Rules
            }
            Variant::Ipvs => virtual_servers(lab, &rules)?,
            Variant::KubeProxyIptables | Variant::KubeProxyNftables => {
                let program = kube_proxy.context("which kube-proxy?")?;
                let mode = if variant == Variant::KubeProxyIptables { "iptables" } else { "nftables" };
                By::KubeProxy { _process: KubeProxy::start(lab, program, mode, &services::objects(lab, &rules))? }
            }
            Variant::Kpx | Variant::KpxFast | Variant::KpxSocket => {
                By::Kpx(Box::new(kpx(lab, variant, services, &rules)?))
            }
        };
        Ok(Self { variant, lab, by })
    }

    /// The ends of a path, for slices of that length.
    pub fn slice(&self, path: Path, length: Duration) -> Slice<'a> {
        let to = if self.by.is_nobody() { self.backend(path) } else { services::frontend(self.lab, path) };
        self.slice_to(path, to, length)
    }

    fn slice_to(&self, path: Path, to: SocketAddrV4, length: Duration) -> Slice<'a> {
        let [client, server] = [services::client(path), services::backend(path)].map(|name| &self.lab.host(name).ns);
        Slice { client, to: to.into(), server, at: self.backend(path).into(), length }
    }

    fn backend(&self, path: Path) -> SocketAddrV4 {
        SocketAddrV4::new(self.lab.host(services::backend(path)).addrs.v4, services::TARGET_PORT)
    }

    /// Stops masquerading, as where addresses of pods are known outside the cluster. For good, and once.
    pub fn stop_masquerading(&self) -> Result<()> {
        self.lab.nodes().iter().try_for_each(|node| node.host.ns.nft("delete table inet cni"))
    }

    /// Checks that clients come to their backend by this variant's means, and by no other.
    pub fn prove(&self, path: Path) -> Result<()> {
        if path == Path::Routable && matches!(self.by, By::Nobody | By::Kpx(_)) {
            self.prove_untracked(path)?;
        }
        let frontend = services::frontend(self.lab, path);
        let (before, known) = (self.counts()?, self.tracked()?);
        let done = self.slice_to(path, frontend, SHORT).run(Mode::TcpCrr);
        if self.by.is_nobody() {
            ensure!(done.is_err(), "{frontend} is served without anybody who serves it");
            return self.slice(path, SHORT).run(Mode::TcpCrr).map(drop);
        }
        let connections = done?.amount;
        let mut fresh = self.tracked()?;
        fresh.retain(|connection| !known.contains(connection));
        let tracked = fresh.iter().any(|connection| connection.is_translated(frontend, self.backend(path)));
        let counts = self.counts()?;
        let news = |name: &str| sum(&counts, name) - sum(&before, name);
        match self.variant {
            Variant::Kpx | Variant::KpxFast => {
                ensure!(!tracked, "connection tracking translates {frontend}, not kpx");
                ensure!(news("flow_opened") >= connections, "kpx did not open {connections} flows");
            }
            Variant::KpxSocket => {
                ensure!(news("flow_opened") == 0, "packets were translated, not sockets");
                ensure!(news("socket_translated") >= connections, "kpx did not lead {connections} sockets");
            }
            _ => ensure!(tracked, "connection tracking translates no connection to {frontend}"),
        }
        if self.variant == Variant::Ipvs {
            let known = self.lab.n1.host.ns.read("/proc/thread-self/net/ip_vs_conn")?;
            let [to, at] = [frontend, self.backend(path)].map(hex);
            ensure!(known.lines().any(|line| line.contains(&format!("{to} {at}"))), "IPVS knows none:\n{known}");
        }
        if self.variant == Variant::KpxFast && FAST.contains(&path) {
            ensure!(news("fast") > 0, "no packet went the fast way");
        }
        Ok(())
    }

    fn prove_untracked(&self, path: Path) -> Result<()> {
        let known = self.tracked()?;
        self.slice(path, SHORT).run(Mode::TcpCrr)?;
        let tracked = self.tracked()?.difference(&known).count();
        ensure!(tracked == 0, "{tracked} connections were tracked without need");
        Ok(())
    }

    /// Returns the counters of kpx so far, by name; nothing for another proxy.
    fn counts(&self) -> Result<Vec<(String, u64)>> {
        let By::Kpx(agent) = &self.by else { return Ok(Vec::new()) };
        let status = agent.status()?;
        let events = status["events"].as_object().context("a status without events")?;
        Ok(events.iter().filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect())
    }

    /// Connections that the node's connection tracking knows.
    fn tracked(&self) -> Result<BTreeSet<Tracked>> {
        // Not that of the process, which is elsewhere.
        let text = self.lab.n1.host.ns.read("/proc/thread-self/net/nf_conntrack")?;
        Ok(text.lines().map(Tracked::of).collect())
    }
}

/// Addresses and ports of a connection, as the kernel lists them.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Tracked {
    /// By the client.
    sent: Vec<String>,
    answered: Vec<String>,
}

impl Tracked {
    fn of(line: &str) -> Self {
        let is_tuple = |word: &&str| ["src=", "dst=", "sport=", "dport="].iter().any(|name| word.starts_with(name));
        let mut words = line.split_whitespace().filter(is_tuple).map(str::to_owned);
        Self { sent: words.by_ref().take(4).collect(), answered: words.collect() }
    }

    /// Tells if it is translated: this backend answers what was sent to that frontend.
    fn is_translated(&self, frontend: SocketAddrV4, backend: SocketAddrV4) -> bool {
        let sent = [format!("dst={}", frontend.ip()), format!("dport={}", frontend.port())];
        sent.iter().all(|word| self.sent.contains(word)) && self.answered.contains(&format!("src={}", backend.ip()))
    }
}

/// Adds up all counters whose names contain a text.
fn sum(counts: &[(String, u64)], name: &str) -> u64 {
    counts.iter().filter(|(counter, _)| counter.contains(name)).map(|(_, count)| count).sum()
}

impl By<'_> {
    fn is_nobody(&self) -> bool {
        matches!(self, Self::Nobody)
    }
}

/// Why a variant cannot be run here; nothing if it can.
pub(super) fn obstacle(variant: Variant, services: usize, kube_proxy: Option<&FilePath>) -> Result<Option<String>> {
    if matches!(variant, Variant::KubeProxyIptables | Variant::KubeProxyNftables) && kube_proxy.is_none() {
        return Ok(Some("no kube-proxy was given".to_owned()));
    }
    static HELP: OnceLock<String> = OnceLock::new();
    if HELP.get().is_none() {
        let help = check(Command::new(binary()?).args(["run", "--help"]).output(), "ask kpx for its flags")?;
        let _first = HELP.set(help);
    }
    let words = || HELP.get().into_iter().flat_map(|help| help.split_whitespace());
    let unknown = flags(variant, services).into_iter().find(|(flag, _)| !words().any(|word| word == *flag));
    Ok(unknown.map(|(flag, _)| format!("this kpx knows no {flag}")))
}

/// Returns the flags of kpx beside those of every variant.
fn flags(variant: Variant, services: usize) -> Vec<(&'static str, String)> {
    let mut flags = match variant {
        Variant::Kpx => vec![],
        Variant::KpxFast => vec![("--fast-path", "on".to_owned())],
        Variant::KpxSocket => vec![("--socket-lb", "host".to_owned())],
        _ => return Vec::new(),
    };
    if services > AS_BUILT {
        // A Service has two frontends: its port, and all others of its ClusterIP.
        flags.push(("--service-table-size", (services * 3).to_string()));
    }
    flags
}

/// The same in every fixture.
fn tune(lab: &Lab) -> Result<()> {
    for node in lab.nodes() {
        node.host.ns.sysctl("netfilter/nf_conntrack_tcp_timeout_time_wait", TIME_WAIT)?;
    }
    for client in Path::ALL.map(services::client) {
        let ns = &lab.host(client).ns;
        // A client that closes thousands of connections a second uses their ports again after one.
        ns.sysctl("ipv4/tcp_tw_reuse", "1")?;
        ns.sysctl("ipv4/ip_local_port_range", "10240 65535")?;
        ns.sysctl("ipv4/ip_local_reserved_ports", "30000-32767")?;
    }
    Ok(())
}

fn restore(lab: &Lab, tool: &str, rules: &Rules) -> Result<By<'static>> {
    feed(lab, Command::new(tool).args(["--wait", "--noflush"]), &rules.iptables())?;
    Ok(By::Rules)
}

fn virtual_servers(lab: &Lab, rules: &Rules) -> Result<By<'static>> {
    let ipvs = rules.ipvs();
    let ns = &lab.n1.host.ns;
    IPVS_SETTINGS.iter().try_for_each(|(key, value)| ns.sysctl(key, value))?;
    feed(lab, Command::new("ip").args(["-batch", "-"]), &ipvs.device)?;
    feed(lab, Command::new("ipset").arg("restore"), &ipvs.sets)?;
    feed(lab, Command::new("ipvsadm").arg("--restore"), &ipvs.servers)?;
    feed(lab, Command::new("iptables-legacy-restore").args(["--wait", "--noflush"]), &ipvs.iptables)?;
    Ok(By::Rules)
}

/// Writes an address as the kernel lists connections of IPVS.
fn hex(at: SocketAddrV4) -> String {
    format!("{:08X} {:04X}", u32::from(*at.ip()), at.port())
}

/// Thousands of rules are no part of an error.
fn feed(lab: &Lab, command: &mut Command, text: &str) -> Result<()> {
    let ns = &lab.n1.host.ns;
    let mut child = ns.spawn(command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()))?;
    let written = child.stdin.take().context("open standard input")?.write_all(text.as_bytes());
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?}: {}", said.lines().take(3).collect::<Vec<_>>().join("; "));
    }
    written.with_context(|| format!("write to {command:?}"))
}

/// From a folder of two files: who serves 10,000 Services is another matter than who tells of them.
fn kpx<'a>(lab: &'a Lab, variant: Variant, services: usize, rules: &Rules) -> Result<Agent<'a>> {
    let dir = lab.dir().join("manifests");
    fs::create_dir(&dir).with_context(|| format!("create {}", dir.display()))?;
    let nodes = lab.nodes().map(|n| node(n).0).to_vec();
    for (name, items) in [("nodes", nodes), ("services", self::services::objects(lab, rules))] {
        let path = dir.join(format!("{name}.json"));
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        fs::write(&path, list.to_string()).with_context(|| format!("write {}", path.display()))?;
    }
    let pods = format!("{},{}", CLUSTER_PODS.cidr(Family::V4), CLUSTER_PODS.cidr(Family::V6));
    let flags = [("--cluster-cidr", pods)].into_iter().chain(flags(variant, services));
    let args: Vec<String> = flags.flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
    let agent = Agent::start_with(lab, &lab.n1, Source::Manifests(&dir), &args)?;
    // The agent looks at the rules of the host, and again once it knows where pods have their addresses.
    wait_until(DEADLINE, "the agent knows which connections may skip the stack", || {
        let status = agent.status()?;
        let said = status["options"]["fastPath"].as_str().unwrap_or_default();
        Ok(said == "off" || said.contains("whole connections"))
    })?;
    Ok(agent)
}
