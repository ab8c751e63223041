//! The cost of dead backends. Connections go at a steady rate to a Service of 100 backends, and ten
//! are cut off in the middle.

use std::fmt;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use serde::{Deserialize, Serialize};
use serde_json::json;
use socket2::{Domain, Socket, Type};
use testbed::agent::{Agent, Cluster, Object, idle};
use testbed::lab::{CLUSTER_PODS, Family, Lab, Layout, SERVICE_CIDR};

mod syns;

use self::syns::{Avoided, Begun, Watch};
use crate::kube_rules::{Proto, Rules, ServicePort};

const PORT: u16 = 8080;
const BACKENDS: u8 = 100;
const DEAD: u8 = 10;
/// The pods of the node that dial.
const PODS: [&str; 2] = ["p1a", "p1c"];
/// Slower than this is more than one SYN.
const SLOW: Duration = Duration::from_millis(1_200);

#[derive(Clone, Debug)]
pub struct Options {
    pub means: Vec<Means>,
    /// The nodes of the dead backends. Only kpx in mode `on` looks at nodes: other means have one
    /// row for both.
    pub places: Vec<Place>,
    /// The numbers of clients, each an address of one of the pods: the programs know a client by
    /// its address.
    pub clients: Vec<u8>,
    /// Connections a second, of all clients.
    pub per_second: u32,
    /// The time before the cut, and the time after it in which connections begin.
    pub before: Duration,
    pub after: Duration,
    /// The time after which a client gives up.
    pub patience: Duration,
}

/// The means that serve the Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Means {
    Nftables,
    KpxOff,
    KpxOn,
}

/// The nodes of the backends that are cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// All ten are one node's, and other nodes have the others.
    #[default]
    OneNode,
    /// One of ten on each node.
    EachNode,
}

impl Place {
    /// Returns the node of a backend: every tenth one is cut off.
    fn node(self, nth: u8) -> String {
        format!(
            "m{}",
            if self == Self::OneNode {
                nth % DEAD
            } else {
                nth / DEAD
            }
        )
    }
}

/// The outcome of the connections that began after the cut.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub means: Means,
    /// Records of earlier runs have none, because no rule looked at nodes.
    #[serde(default)]
    pub place: Option<Place>,
    pub clients: u8,
    pub connections: usize,
    /// The connections slower than 1.2 s, and those of them that failed.
    pub slower: usize,
    pub failed: usize,
    pub one_syn_more: usize,
    /// The time of a connection in seconds: the 99th percentile, and the slowest.
    pub p99: f64,
    pub slowest: f64,
    /// The seconds from the cut until a dead backend was avoided: the median, and all. None if one
    /// of them never was.
    pub avoided: Option<[f64; 2]>,
    /// The same from the moment when two clients had dialled it.
    pub since_two: Option<[f64; 2]>,
    /// The share of each second's connections that began at dead backends, in percent. The last
    /// second is shorter.
    pub dead_percent: Vec<f64>,
}

/// Measures each of the means with each number of clients. Needs root.
pub fn run(options: &Options, keep: &mut impl FnMut(Row) -> Result<()>) -> Result<()> {
    for &means in &options.means {
        for &place in if means == Means::KpxOn {
            &options.places[..]
        } else {
            &[Place::OneNode]
        } {
            for &clients in &options.clients {
                keep(
                    of(options, (means, place), clients)
                        .with_context(|| format!("{means}, {place:?}, {clients} clients"))?,
                )?;
            }
        }
    }
    Ok(())
}

fn of(options: &Options, (means, place): (Means, Place), clients: u8) -> Result<Row> {
    let lab = Lab::start(Layout::Routed)?;
    backends(&lab)?;
    add_clients(&lab, clients)?;
    let cluster = Cluster::with_manifests(&lab)?;
    objects(place)
        .iter()
        .try_for_each(|object| cluster.put(object))?;
    let kpx = |mode: &str| {
        Agent::start_with(
            &lab,
            &lab.n1,
            cluster.source(),
            &[format!("--backend-health={mode}")],
        )
        .map(Some)
    };
    let agent = match means {
        Means::Nftables => lab.n1.host.ns.nft(&rules(&lab).nftables()).map(|()| None)?,
        Means::KpxOff => kpx("off")?,
        Means::KpxOn => kpx("on")?,
    };
    let (dials, begun) = measure(options, &lab, clients)?;
    agent.map_or(Ok(()), Agent::stop)?;
    Ok(row((means, place), clients, &dials, &begun))
}

fn row((means, place): (Means, Place), clients: u8, dials: &[Dialled], begun: &Begun) -> Row {
    let of_all =
        |what: &dyn Fn(&Dialled) -> bool| dials.iter().filter(|dialled| what(dialled)).count();
    let mut times: Vec<_> = dials.iter().map(|it| it.took).collect();
    times.sort_unstable();
    let at = |nth: usize| times.get(nth).map_or(0.0, Duration::as_secs_f64);
    let percent = |[dead, all]: &[usize; 2]| *dead as f64 * 100.0 / (*all).max(1) as f64;
    Row {
        means,
        place: (means == Means::KpxOn).then_some(place),
        clients,
        connections: dials.len(),
        slower: of_all(&|it| it.took > SLOW),
        failed: of_all(&|it| it.has_failed && it.took > SLOW),
        one_syn_more: of_all(&|it| it.took > SLOW / 2 && it.took <= SLOW),
        p99: at(times.len() * 99 / 100),
        slowest: at(times.len().saturating_sub(1)),
        avoided: spread(begun.avoided.iter().map(|it| it.after)),
        since_two: spread(begun.avoided.iter().map(Avoided::since_two)),
        dead_percent: begun.dead_of_all.iter().map(percent).collect(),
    }
}

/// Returns the median and the longest in seconds; None if one is missing.
fn spread(times: impl Iterator<Item = Option<Duration>>) -> Option<[f64; 2]> {
    let mut times: Vec<Duration> = times.collect::<Option<_>>()?;
    times.sort_unstable();
    Some([times.get(times.len() / 2)?, times.last()?].map(Duration::as_secs_f64))
}

impl fmt::Display for Means {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Nftables => "nftables, as kube-proxy writes it",
            Self::KpxOff => "kpx, `off`",
            Self::KpxOn => "kpx, `on`",
        })
    }
}

/// The end of a connection.
#[derive(Clone, Copy)]
struct Dialled {
    took: Duration,
    has_failed: bool,
}

/// Dials at the rate, and cuts backends off. Returns the connections that began after that, and
/// where they began.
fn measure(options: &Options, lab: &Lab, clients: u8) -> Result<(Vec<Dialled>, Begun)> {
    let &Options {
        per_second,
        before,
        after,
        patience,
        ..
    } = options;
    let service = SocketAddr::from((SERVICE_CIDR.host(10).v4, 80));
    let watch = Watch::start(lab.host("p2b"))?;
    let started = Instant::now();
    let pods = PODS.len() as u32;
    let count = per_second / pods * (before + after).as_secs() as u32;
    let diallers = PODS.map(|pod| {
        let host = lab.host(pod);
        let sources = sources(lab, pod, clients);
        host.ns.thread("dialler", move || {
            let dials = (0..count).map(|nth| {
                thread::park_timeout(
                    (started + Duration::from_secs(1) * pods * nth / per_second)
                        .saturating_duration_since(Instant::now()),
                );
                let source = sources[nth as usize % sources.len()];
                let socket = socket(source)?;
                let dial = move || {
                    let began = Instant::now();
                    let has_failed = socket.connect_timeout(&service.into(), patience).is_err();
                    (began, began.elapsed(), has_failed)
                };
                Ok(thread::Builder::new().stack_size(64 << 10).spawn(dial)?)
            });
            let dials: Vec<Result<_>> = dials.collect();
            dials
                .into_iter()
                .map(|dial| Ok(dial?.join().expect("no dial panics")))
                .collect::<Result<Vec<_>>>()
        })
    });
    idle(before)?;
    let dead: Vec<_> = (0..DEAD).map(|nth| address(nth * 10)).collect();
    let cut = format!(
        "table ip cut {{ chain c {{ type filter hook input priority 0; ip daddr {{ {} }} drop; }}; }}",
        dead.iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    );
    lab.host("p2b").ns.nft(&cut)?;
    let cut = Instant::now();
    let mut dialled = Vec::new();
    for dialler in diallers {
        let dials = dialler?.join().ok().context("a dialler has panicked")??;
        dialled.extend(
            dials
                .into_iter()
                .filter(|(began, ..)| *began >= cut)
                .map(|(_, took, has_failed)| Dialled { took, has_failed }),
        );
    }
    ensure!(
        dialled.len() > count as usize,
        "{} of {count} connections a pod",
        dialled.len()
    );
    let begun = syns::begun(&watch.stop()?, &dead, cut, started + before + after);
    Ok((dialled, begun))
}

/// Returns a pod's share of the clients: its own address, and those that [`add_clients`] has added.
fn sources(lab: &Lab, pod: &str, clients: u8) -> Vec<Ipv4Addr> {
    let nth_pod = PODS
        .iter()
        .position(|name| *name == pod)
        .expect("one of the pods") as u8;
    let pods = PODS.len() as u8;
    let more = (pods..clients)
        .filter(|nth| nth % pods == nth_pod)
        .map(|nth| Ipv4Addr::new(10, 244, 1, 101 + nth));
    [lab.host(pod).addrs.v4].into_iter().chain(more).collect()
}

/// Gives pods further addresses, so that there are so many clients.
fn add_clients(lab: &Lab, clients: u8) -> Result<()> {
    for pod in PODS {
        for addr in sources(lab, pod, clients).into_iter().skip(1) {
            lab.host(pod)
                .ns
                .ip(&format!("addr add {addr}/32 dev eth0"))?;
            lab.n1
                .host
                .ns
                .ip(&format!("route add {addr}/32 dev {pod}"))?;
        }
    }
    Ok(())
}

/// Returns a socket with a client's address. The kernel chooses the port when it knows the
/// destination.
fn socket(source: Ipv4Addr) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    setsockopt(&socket, sockopt::IpBindAddressNoPort, &true)?;
    socket.bind(&SocketAddrV4::new(source, 0).into())?;
    Ok(socket)
}

fn address(nth: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, 2, 101 + nth)
}

/// Gives a pod of the other node the addresses of all backends, and a server there.
fn backends(lab: &Lab) -> Result<()> {
    let pod = lab.host("p2b");
    let lines = |line: &dyn Fn(Ipv4Addr) -> String| {
        (0..BACKENDS)
            .map(|nth| line(address(nth)) + "\n")
            .collect::<String>()
    };
    pod.ns
        .ip(&lines(&|addr| format!("addr add {addr}/32 dev eth0")))?;
    lab.n2
        .host
        .ns
        .ip(&lines(&|addr| format!("route add {addr}/32 dev p2b")))?;
    let listener = pod
        .ns
        .run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)))?;
    // It goes with the process.
    pod.ns.thread("server", move || {
        loop {
            match listener.accept() {
                Ok(connection) => drop(connection),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    })?;
    Ok(())
}

fn objects(place: Place) -> [Object; 2] {
    let cluster_ip = SERVICE_CIDR.host(10).v4;
    let port = json!({ "name": "tcp", "protocol": "TCP", "port": 80, "targetPort": PORT });
    let endpoint = |nth| json!({ "addresses": [address(nth)], "conditions": { "ready": true }, "nodeName": place.node(nth) });
    let endpoints: Vec<_> = (0..BACKENDS).map(endpoint).collect();
    let labels = json!({ "kubernetes.io/service-name": "web" });
    [
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web", "namespace": "default" },
            "spec": { "type": "ClusterIP", "clusterIP": cluster_ip, "clusterIPs": [cluster_ip], "ipFamilies": ["IPv4"], "ports": [port] },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "name": "web-1", "namespace": "default", "labels": labels },
            "addressType": "IPv4", "endpoints": endpoints, "ports": [{ "name": "tcp", "protocol": "TCP", "port": PORT }],
        }),
    ]
    .map(Object)
}

/// Returns kube-proxy's rules for the same Service.
fn rules(lab: &Lab) -> Rules {
    Rules {
        pods: CLUSTER_PODS.cidr(Family::V4),
        services: SERVICE_CIDR.cidr(Family::V4),
        node: lab.n1.host.addrs.v4,
        local: lab.n1.pods.iter().map(|pod| pod.addrs.v4).collect(),
        ports: vec![ServicePort {
            service: "default/web".to_owned(),
            name: "tcp".to_owned(),
            proto: Proto::Tcp,
            cluster_ip: SERVICE_CIDR.host(10).v4,
            port: 80,
            node_port: None,
            endpoints: (0..BACKENDS)
                .map(|nth| SocketAddrV4::new(address(nth), PORT))
                .collect(),
            stand_in: false,
        }],
    }
}
