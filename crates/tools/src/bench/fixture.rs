//! A lab whose node n1 has one variant of Services.

use std::env;
use std::fs;
use std::io::Write;
use std::net::SocketAddrV4;
use std::path::Path as FilePath;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::kube_proxy::{self, KubeProxy};
use super::open::Connection;
use super::traffic::Slice;
use super::{Mode, Path, Variant, Work, policies, services};
use crate::kube_rules::{IPVS_SETTINGS, Rules};
use testbed::agent::{Agent, Source, binary, idle, node, wait_until};
use testbed::cgroup::Visited;
use testbed::lab::{CLUSTER_PODS, Family, Lab};
use testbed::netns::check;

/// The seconds that conntrack keeps a closed connection, so that its table does not grow during a
/// run.
const TIME_WAIT: &str = "10";

/// Time limit for a proxy with the most Services.
const LONG: Duration = Duration::from_secs(180);
/// Time limit for iptables-nft to write the rules of 10,000 Services again.
const LONGER: Duration = Duration::from_secs(600);
/// The environment variable with the kpx of [`Variant::KpxB`].
const OTHER: &str = "KPX_BIN_B";
/// Up to this number of Services kpx's default tables are large enough.
const AS_BUILT: usize = 20_000;
/// Up to this number of Services each has its own chains with every tool.
const WHOLE: usize = 1_000;
/// Time after which every agent has seen new rules: the kernel notifies it of most, and it checks
/// the rest once a second.
pub(super) const SETTLE: Duration = Duration::from_secs(2);

/// A running variant.
#[derive(Debug)]
pub struct Fixture<'a> {
    pub variant: Variant,
    pub(super) lab: &'a Lab,
    pub(super) by: By<'a>,
    /// The cgroup of the clients' sockets, if kpx translates pods' sockets. In the root cgroup, it
    /// would translate those of other labs too.
    pub(super) cgroup: Option<Visited>,
}

/// The node's proxy, which serves as long as this value lives.
#[derive(Debug)]
pub(super) enum By<'a> {
    Nobody,
    Rules,
    KubeProxy(KubeProxy<'a>),
    Kpx(Box<Agent<'a>>),
}

impl<'a> Fixture<'a> {
    pub fn start(
        lab: &'a Lab,
        variant: Variant,
        services: usize,
        kube_proxy: Option<&FilePath>,
    ) -> Result<Self> {
        Self::start_with(lab, variant, services, kube_proxy, None)
    }

    /// `flag` is an additional flag of kpx, with its value.
    pub fn start_with(
        lab: &'a Lab,
        variant: Variant,
        services: usize,
        kube_proxy: Option<&FilePath>,
        flag: Option<(&'static str, String)>,
    ) -> Result<Self> {
        tune(lab)?;
        // Some variants cannot load complete rule sets of this size in seconds.
        let slow = matches!(variant, Variant::IptablesNft | Variant::Nftables);
        let rules = services::rules(lab, services, !slow || services <= WHOLE);
        let cgroup = variant.leads_pods().then(Visited::make).transpose()?;
        let by = match variant {
            Variant::Direct | Variant::Control => {
                route_to_pods(lab)?;
                By::Nobody
            }
            Variant::IptablesLegacy => restore(lab, "iptables-legacy-restore", &rules)?,
            Variant::IptablesNft => restore(lab, "iptables-nft-restore", &rules)?,
            Variant::Nftables => {
                feed(
                    lab,
                    Command::new("nft").args(["-f", "-"]),
                    &rules.nftables(),
                )?;
                By::Rules
            }
            Variant::Ipvs => virtual_servers(lab, &rules)?,
            Variant::KubeProxyIptables | Variant::KubeProxyNftables => {
                let program = kube_proxy.context("which kube-proxy?")?;
                let mode = if variant == Variant::KubeProxyIptables {
                    "iptables"
                } else {
                    "nftables"
                };
                By::KubeProxy(KubeProxy::start(lab, program, mode, &rules)?)
            }
            Variant::Kpx
            | Variant::KpxB
            | Variant::KpxOff
            | Variant::KpxSocketAll
            | Variant::Beside => {
                let more = cgroup
                    .as_ref()
                    .map(|cgroup| ("--cgroup-root", cgroup.path().display().to_string()));
                let flags = [
                    flags(variant, services),
                    more.into_iter().chain(flag).collect(),
                ]
                .concat();
                let by = (variant == Variant::KpxB).then(other_build).transpose()?;
                By::Kpx(Box::new(kpx(lab, by, flags, &rules)?))
            }
        };
        let mut fixture = Self {
            variant,
            lab,
            by,
            cgroup,
        };
        let slice = fixture.slice(Path::Local, Duration::ZERO);
        if let By::KubeProxy(process) = &mut fixture.by {
            // kube-proxy writes all rules at once.
            wait_until(LONG, "kube-proxy serves", || {
                Ok(slice.run(Mode::TcpCrr).is_ok())
            })?;
            process.running.rest(LONGER)?;
        }
        Ok(fixture)
    }

    /// Returns the ends of a path, for slices of this length.
    pub fn slice(&self, path: Path, length: Duration) -> Slice<'a> {
        let to = if self.variant.is_direct() {
            self.backend(path)
        } else {
            services::frontend(self.lab, path)
        };
        self.slice_to(path, to, length)
    }

    pub(super) fn slice_to(&self, path: Path, to: SocketAddrV4, length: Duration) -> Slice<'a> {
        let [client, server] =
            [services::client(path), services::backend(path)].map(|name| &self.lab.host(name).ns);
        Slice {
            client,
            to: to.into(),
            server,
            at: self.backend(path).into(),
            length,
        }
    }

    pub(super) fn backend(&self, path: Path) -> SocketAddrV4 {
        SocketAddrV4::new(
            self.lab.host(services::backend(path)).addrs.v4,
            services::TARGET_PORT,
        )
    }

    /// Configures the nodes for a path.
    pub fn prepare(&self, path: Path) -> Result<()> {
        if path == Path::Routable {
            self.stop_masquerading()?;
        }
        policies::set(self.lab, path)
    }

    /// Waits until the agent has seen the nodes' configuration.
    pub fn settle(&self) -> Result<()> {
        if self.variant.is_kpx() {
            idle(SETTLE)
        } else {
            Ok(())
        }
    }

    /// Measures a slice of a path over a new connection; see [`Slice::run`].
    pub fn run(&self, path: Path, length: Duration, mode: Mode) -> Result<Work> {
        let slice = self.slice(path, length);
        self.inside(|| slice.run(mode))
    }

    /// Opens a connection for all slices of a path.
    pub(super) fn open(&self, path: Path, mode: Mode) -> Result<Connection> {
        let slice = self.slice(path, Duration::ZERO);
        self.inside(|| Connection::open(&slice, mode))
    }

    /// Opens sockets in the cgroup that kpx translates.
    fn inside<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        match &self.cgroup {
            Some(cgroup) => cgroup.visit(f)?,
            None => f(),
        }
    }

    /// Adds a netfilter flowtable for established connections through n1.
    pub fn add_flowtable(&self) -> Result<()> {
        let pods = self
            .lab
            .n1
            .pods
            .iter()
            .map(|pod| pod.name)
            .collect::<Vec<_>>()
            .join(", ");
        self.lab.n1.host.ns.nft(&format!(
            "table ip passing {{
                flowtable known {{
                    hook ingress priority filter
                    devices = {{ {pods}, eth0 }}
                    counter
                }}
                chain forward {{
                    type filter hook forward priority filter; policy accept;
                    counter
                    ct state established flow add @known
                }}
            }}"
        ))
    }

    /// Returns the number of packets that the chain of [`Fixture::add_flowtable`] has seen.
    pub fn past_flowtable(&self) -> Result<u64> {
        let text = self
            .lab
            .n1
            .host
            .ns
            .exec(Command::new("nft").args(["list", "chain", "ip", "passing", "forward"]))?;
        let packets = text
            .split_once("counter packets ")
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        packets.with_context(|| format!("no counter in {text}"))
    }

    /// Stops masquerading, as in a cluster with routable pod addresses. Permanent; call once.
    pub fn stop_masquerading(&self) -> Result<()> {
        self.lab
            .nodes()
            .iter()
            .try_for_each(|node| node.host.ns.nft("delete table inet cni"))
    }
}

impl By<'_> {
    pub(super) fn is_nobody(&self) -> bool {
        matches!(self, Self::Nobody)
    }
}

/// Returns the reason why a variant cannot run here; `None` if it can.
pub(super) fn obstacle(
    variant: Variant,
    services: usize,
    kube_proxy: Option<&FilePath>,
) -> Result<Option<String>> {
    if matches!(
        variant,
        Variant::KubeProxyIptables | Variant::KubeProxyNftables
    ) {
        let Some(program) = kube_proxy else {
            return Ok(Some("no kube-proxy was given".to_owned()));
        };
        let minor = kube_proxy::minor(program)?;
        let is_old = variant == Variant::KubeProxyNftables && minor < kube_proxy::NFTABLES_SINCE;
        return Ok(is_old.then(|| format!("kube-proxy 1.{minor} has no mode nftables")));
    }
    if variant == Variant::KpxB && env::var_os(OTHER).is_none() {
        return Ok(Some(format!("{OTHER} does not name another kpx")));
    }
    static HELP: OnceLock<String> = OnceLock::new();
    if HELP.get().is_none() {
        let help = check(
            Command::new(binary()?).args(["run", "--help"]).output(),
            "ask kpx for its flags",
        )?;
        let _first = HELP.set(help);
    }
    let words = || {
        HELP.get()
            .into_iter()
            .flat_map(|help| help.split_whitespace())
    };
    let unknown = flags(variant, services)
        .into_iter()
        .find(|(flag, _)| !words().any(|word| word == *flag));
    Ok(unknown.map(|(flag, _)| format!("this kpx knows no {flag}")))
}

/// Returns kpx's flags other than the variant's own.
fn flags(variant: Variant, services: usize) -> Vec<(&'static str, String)> {
    let mut flags: Vec<_> = variant
        .flags()
        .iter()
        .map(|&(flag, value)| (flag, value.to_owned()))
        .collect();
    if variant.is_kpx() && services > AS_BUILT {
        // A Service has two frontends: its port, and the rest of its ClusterIP.
        flags.push(("--service-table-size", (services * 3).to_string()));
    }
    flags
}

/// Sets the sysctls of every fixture.
fn tune(lab: &Lab) -> Result<()> {
    for node in lab.nodes() {
        let ns = &node.host.ns;
        ns.sysctl("netfilter/nf_conntrack_tcp_timeout_time_wait", TIME_WAIT)?;
        // A packet for a node port leaves by its incoming device.
        ns.sysctl("ipv4/conf/all/send_redirects", "0")?;
        ns.sysctl("ipv4/conf/eth0/send_redirects", "0")?;
    }
    for client in Path::ALL.map(services::client) {
        let ns = &lab.host(client).ns;
        // A client that closes thousands of connections a second reuses their ports after a second.
        // The range is the kernel's default: kpx could draw ports of a larger range, and checks
        // packets to such ports more closely.
        ns.sysctl("ipv4/tcp_tw_reuse", "1")?;
        ns.sysctl("ipv4/ip_local_port_range", "32768 60999")?;
    }
    Ok(())
}

/// An outside client needs routes to pods only to dial them. All routes lead through n1 in both
/// directions, like those of its node ports.
fn route_to_pods(lab: &Lab) -> Result<()> {
    let [n1, x] = [&lab.n1.host, &lab.x].map(|host| host.addrs.v4);
    let routes = lab
        .nodes()
        .map(|node| format!("route add {} via {n1}", node.pod_net.cidr(Family::V4)));
    lab.fabric.ns.ip(&routes.join("\n"))?;
    lab.n2.host.ns.ip(&format!("route add {x}/32 via {n1}"))
}

fn restore(lab: &Lab, tool: &str, rules: &Rules) -> Result<By<'static>> {
    feed(
        lab,
        Command::new(tool).args(["--wait", "--noflush"]),
        &rules.iptables(),
    )?;
    Ok(By::Rules)
}

fn virtual_servers(lab: &Lab, rules: &Rules) -> Result<By<'static>> {
    let ipvs = rules.ipvs();
    let ns = &lab.n1.host.ns;
    IPVS_SETTINGS
        .iter()
        .try_for_each(|(key, value)| ns.sysctl(key, value))?;
    feed(lab, Command::new("ip").args(["-batch", "-"]), &ipvs.device)?;
    feed(lab, Command::new("ipset").arg("restore"), &ipvs.sets)?;
    feed(lab, Command::new("ipvsadm").arg("--restore"), &ipvs.servers)?;
    feed(
        lab,
        Command::new("iptables-legacy-restore").args(["--wait", "--noflush"]),
        &ipvs.iptables,
    )?;
    Ok(By::Rules)
}

/// Thousands of rules do not belong in an error.
fn feed(lab: &Lab, command: &mut Command, text: &str) -> Result<()> {
    let ns = &lab.n1.host.ns;
    let mut child = ns.spawn(
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped()),
    )?;
    let written = child
        .stdin
        .take()
        .context("open standard input")?
        .write_all(text.as_bytes());
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{command:?}: {}",
            said.lines().take(3).collect::<Vec<_>>().join("; ")
        );
    }
    written.with_context(|| format!("write to {command:?}"))
}

/// Returns a command that executes the other kpx with the same arguments.
fn other_build() -> Result<Command> {
    let program =
        env::var_os(OTHER).with_context(|| format!("{OTHER} does not name the other kpx"))?;
    let mut command = Command::new("sh");
    command
        .args(["-c", "program=$0; shift; exec \"$program\" \"$@\""])
        .arg(program);
    Ok(command)
}

/// Starts kpx with a folder of two files: the API server's cost for 10,000 Services is measured
/// elsewhere.
fn kpx<'a>(
    lab: &'a Lab,
    by: Option<Command>,
    more: Vec<(&'static str, String)>,
    rules: &Rules,
) -> Result<Agent<'a>> {
    let dir = lab.dir().join("manifests");
    fs::create_dir(&dir).with_context(|| format!("create {}", dir.display()))?;
    let nodes = lab.nodes().map(|n| node(n).0).to_vec();
    for (name, items) in [
        ("nodes", nodes),
        ("services", self::services::objects(lab, rules)),
    ] {
        let path = dir.join(format!("{name}.json"));
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        fs::write(&path, list.to_string()).with_context(|| format!("write {}", path.display()))?;
    }
    let pods = format!(
        "{},{}",
        CLUSTER_PODS.cidr(Family::V4),
        CLUSTER_PODS.cidr(Family::V6)
    );
    let flags = [("--cluster-cidr", pods)].into_iter().chain(more);
    let args: Vec<String> = flags
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
    let agent =
        Agent::launch_by(by, lab, &lab.n1.host, Source::Manifests(&dir), &args)?.answering()?;
    // The agent reads the host's rules at the start, and again once it has the pods' networks.
    wait_until(
        LONG,
        "the agent serves, and knows which connections may skip the stack",
        || {
            // An agent that writes the maps of 100,000 Services does not answer in that time.
            let Ok(status) = agent.status() else {
                return Ok(false);
            };
            let said = status["options"]["fastPath"].as_str().unwrap_or_default();
            Ok(status["healthy"] == true
                && (said == "off" || said.contains("bypass for connections")))
        },
    )?;
    Ok(agent)
}
