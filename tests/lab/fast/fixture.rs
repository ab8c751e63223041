//! A lab whose first node runs kpx with `--fast-path`.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;
use testbed::agent::{Agent, Service, wait_until};
use testbed::echo::{Connection, Dial, Fault, Protocol};
use testbed::lab::{Family, Host, Layout};
use testbed::served_lab::ServedLab;

/// The port of all servers.
const PORT: u16 = 8080;
const NODE_PORTS: [u16; 3] = [30_081, 30_082, 30_083];
/// The time after which an unanswered connection counts as blocked.
const UNANSWERED: Duration = Duration::from_secs(1);
/// The table of the tests' counters.
const TABLE: &str = "fast";

/// The ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// A pod to a pod of the same node, to a pod of the other node, and to itself.
    Local,
    Remote,
    Hairpin,
    /// An outside client through the node port to a pod of this node, and to a pod of the other
    /// node.
    NodePortLocal,
    NodePortRemote,
    /// A pod to a server outside. A rule of the CNI masquerades the pod as the node.
    Masqueraded,
}

impl Path {
    pub(crate) const ALL: [Self; 6] = [
        Self::Local,
        Self::Remote,
        Self::Hairpin,
        Self::NodePortLocal,
        Self::NodePortRemote,
        Self::Masqueraded,
    ];

    pub(crate) fn is_fast(self) -> bool {
        self != Self::Masqueraded
    }
}

pub(crate) struct Fixture {
    base: ServedLab,
}

is_its_lab!(Fixture);

/// The numbers of packets so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    pub fast: u64,
    pub forwarded: u64,
}

impl Passed {
    pub(crate) fn since(self, before: Self) -> (u64, u64) {
        (self.fast - before.fast, self.forwarded - before.forwarded)
    }
}

impl Fixture {
    pub(crate) fn new() -> Result<Self> {
        Self::of(Layout::Routed)
    }

    pub(crate) fn of(layout: Layout) -> Result<Self> {
        let base =
            ServedLab::with_manifests(layout)?.serve(&["p1b", "p1c", "p2a", "p2b", "ext"], PORT)?;
        let fixture = Self { base };
        fixture.put_services(&[["p1b"], ["p2a"], ["ext"]])?;
        Ok(fixture)
    }

    fn put_services(&self, backends: &[[&'static str; 1]; 3]) -> Result<()> {
        for (n, backends) in backends.iter().enumerate() {
            let service =
                Service::new(["local", "remote", "away"][n], 10 + n as u8, backends, PORT);
            self.base.put(&service.node_port(NODE_PORTS[n]))?;
        }
        Ok(())
    }

    /// Gives the Services other backends.
    pub(crate) fn move_services(&self) -> Result<()> {
        self.put_services(&[["p1c"], ["p2b"], ["ext"]])?;
        self.put_services(&[["p1b"], ["p2a"], ["ext"]])
    }

    pub(crate) fn start(&self, fast_path: &str) -> Result<Agent<'_>> {
        self.kpx(&["--fast-path", fast_path, "--iptables-sync-period", "1s"])
    }

    pub(crate) fn dial(
        &self,
        path: Path,
        protocol: Protocol,
        family: Family,
    ) -> Result<Connection> {
        self.dial_within(Duration::from_secs(5), path, protocol, family)
    }

    /// Returns true if a new connection to a pod of the same node fails, because its packets are
    /// dropped.
    pub(crate) fn is_blocked(&self, family: Family) -> bool {
        self.dial_within(UNANSWERED, Path::Local, Protocol::Tcp, family)
            .is_err()
    }

    pub(crate) fn dial_within(
        &self,
        deadline: Duration,
        path: Path,
        protocol: Protocol,
        family: Family,
    ) -> Result<Connection> {
        let service = |nth| Service::new("", nth, &[], PORT).frontend(family);
        let node_port =
            |nth: usize| SocketAddr::new(self.lab.n1.host.addrs.ip(family), NODE_PORTS[nth]);
        let (client, to) = match path {
            Path::Local => ("p1a", service(10)),
            Path::Remote => ("p1a", service(11)),
            Path::Hairpin => ("p1b", service(10)),
            Path::NodePortLocal => ("x", node_port(0)),
            Path::NodePortRemote => ("x", node_port(1)),
            Path::Masqueraded => ("p1a", service(12)),
        };
        said(
            Dial::new(protocol, to)
                .deadline(deadline)
                .connect(&self.lab.host(client).ns),
        )
    }

    /// Returns the port of every server.
    pub(crate) fn port(&self) -> u16 {
        PORT
    }

    /// Starts to count the packets that the stack forwards, until [`Self::unwatch`].
    pub(crate) fn watch(&self) -> Result<()> {
        self.lab.n1.host.ns.nft(&format!(
            "table inet {TABLE} {{
                counter forwarded {{ }}
                chain forward {{
                    type filter hook forward priority -300
                    meta l4proto {{ tcp, udp, sctp }} counter name forwarded
                }}
            }}"
        ))
    }

    pub(crate) fn unwatch(&self) -> Result<()> {
        self.lab
            .n1
            .host
            .ns
            .nft(&format!("delete table inet {TABLE}"))
    }

    /// Makes the node drop forwarded packets to a pod, in table `inet far`. `what` is a further nft
    /// match.
    pub(crate) fn drop_towards(&self, pod: &str, what: &str) -> Result<()> {
        let pod = self.lab.host(pod).addrs;
        self.lab.n1.host.ns.nft(&format!(
            "table inet far {{
                chain forward {{
                    type filter hook forward priority filter; policy accept
                    ip daddr {} {what} drop
                    ip6 daddr {} {what} drop
                }}
            }}",
            pod.v4, pod.v6
        ))
    }

    /// Returns the counts since [`Self::watch`].
    pub(crate) fn passed(&self, agent: &Agent) -> Result<Passed> {
        Ok(Passed {
            fast: self.fast(agent)?,
            forwarded: counter(&self.lab.n1.host, TABLE, "forwarded")?,
        })
    }

    pub(crate) fn fast(&self, agent: &Agent) -> Result<u64> {
        let status = agent.status()?;
        let of = |name: &str| {
            status["events"][name]
                .as_u64()
                .with_context(|| format!("no event {name}"))
        };
        Ok(of("fast_local")? + of("fast_remote")?)
    }

    /// Returns the number of packets to Services and back that the stack has seen. A packet that
    /// skips the stack counts as fast, and as forwarded or returned too.
    pub(crate) fn stack_saw(&self, agent: &Agent) -> Result<u64> {
        let status = agent.status()?;
        let of = |name: &str| {
            status["events"][name]
                .as_u64()
                .with_context(|| format!("no event {name}"))
        };
        Ok(of("forwarded")? + of("returned")? - of("fast_local")?)
    }

    /// Returns the number of the servers' TCP connections in a state of the node's conntrack.
    pub(crate) fn tracked(&self, state: &str) -> Result<usize> {
        let entries = self
            .lab
            .n1
            .host
            .ns
            .read("/proc/thread-self/net/nf_conntrack")?;
        Ok(entries
            .lines()
            .filter(|entry| entry.contains(state) && entry.contains(&format!("dport={PORT} ")))
            .count())
    }

    /// Starts to count the packets that pods receive, by the hops behind them, and the ICMP errors
    /// that pods receive, until [`Self::count_no_hops`].
    pub(crate) fn count_hops(&self) -> Result<()> {
        self.lab.host("p1b").ns.nft(&format!(
            "table inet {TABLE} {{
                counter one {{ }}
                counter other {{ }}
                chain input {{
                    type filter hook input priority 0
                    meta l4proto != tcp accept
                    ip ttl 63 counter name one accept
                    ip6 hoplimit 63 counter name one accept
                    counter name other
                }}
            }}"
        ))?;
        self.lab.host("p1a").ns.nft(&format!(
            "table inet {TABLE} {{
                counter expired {{ }}
                counter long {{ }}
                chain input {{
                    type filter hook input priority 0
                    icmp type time-exceeded counter name expired
                    icmpv6 type time-exceeded counter name expired
                    icmp type destination-unreachable icmp code frag-needed counter name long
                    icmpv6 type packet-too-big counter name long
                }}
            }}"
        ))
    }

    pub(crate) fn count_no_hops(&self) -> Result<()> {
        ["p1a", "p1b"].into_iter().try_for_each(|pod| {
            let ns = &self.lab.host(pod).ns;
            ns.nft(&format!("delete table inet {TABLE}"))
        })
    }

    pub(crate) fn hops(&self) -> Result<(u64, u64)> {
        let pod = self.lab.host("p1b");
        Ok((counter(pod, TABLE, "one")?, counter(pod, TABLE, "other")?))
    }

    pub(crate) fn too_long(&self) -> Result<u64> {
        counter(self.lab.host("p1a"), TABLE, "long")
    }

    /// Sets the MTU of the path to the backend, until [`Self::widen`].
    pub(crate) fn narrow(&self, family: Family, mtu: u32) -> Result<()> {
        self.route_to_backend(family, &format!("mtu lock {mtu}"))
    }

    pub(crate) fn widen(&self, family: Family) -> Result<()> {
        self.route_to_backend(family, "")
    }

    /// Gives the path to the backend these attributes alone.
    fn route_to_backend(&self, family: Family, attributes: &str) -> Result<()> {
        let pod = self.lab.host("p1b");
        let bits = if family == Family::V4 { 32 } else { 128 };
        self.lab.n1.host.ns.ip(&format!(
            "route replace {}/{bits} dev p1b {attributes}",
            pod.addrs.ip(family)
        ))
    }

    /// Sends datagrams of an open flow with an expired TTL, until the client gets the ICMP error.
    pub(crate) fn expire(&self, family: Family) -> Result<()> {
        let client = self.lab.host("p1a");
        let from = SocketAddr::new(client.addrs.ip(family), 0);
        let socket = client.ns.run(|| UdpSocket::bind(from))?;
        socket.set_read_timeout(Some(Duration::from_secs(2)))?;
        socket.connect(Service::new("", 10, &[], PORT).frontend(family))?;
        let mut buffer = [0; 16];
        for _ in 0..5 {
            socket.send(b"hop")?;
            socket.recv(&mut buffer).context("an open flow")?;
        }
        let socket = socket2::SockRef::from(&socket);
        match family {
            Family::V4 => socket.set_ttl_v4(1)?,
            Family::V6 => socket.set_unicast_hops_v6(1)?,
        }
        // The node limits such messages to one a second, and may have sent one just now.
        let before = counter(client, TABLE, "expired")?;
        wait_until(
            Duration::from_secs(5),
            "the client learns that a packet has no hop left",
            || {
                socket.send(b"hop")?;
                Ok(counter(client, TABLE, "expired")? > before)
            },
        )
    }
}

/// Returns the packet count of a counter in a table of family `inet`.
pub(crate) fn counter(host: &Host, table: &str, name: &str) -> Result<u64> {
    let text = host
        .ns
        .exec(Command::new("nft").args(["-j", "list", "counter", "inet", table, name]))?;
    let list: Value = serde_json::from_str(&text).with_context(|| format!("parse {text}"))?;
    let counter = list["nftables"]
        .as_array()
        .into_iter()
        .flatten()
        .find_map(|item| item.get("counter"));
    counter
        .and_then(|counter| counter["packets"].as_u64())
        .with_context(|| format!("no packets in {text}"))
}

/// Returns a fault as an error.
pub(crate) fn said<T>(result: Result<T, Fault>) -> Result<T> {
    result.map_err(|fault| anyhow!("{fault}"))
}
