//! The cases: client, destination, expected reply.

use std::net::{IpAddr, SocketAddr};

use super::objects::{CLOSED, CLOSED_PORT, NO_PORT, PORT, Role, SERVED};
use super::report::LeftOut;
use super::stage::Stage;
use crate::probe::{Outcome, Protocol, Reply, Target};

/// The bytes of a long message: many packets in each direction.
const LONG: usize = 64 << 10;
/// The number of connections that shows whether all backends answer. With two backends, chance
/// leaves one of them unused in one of 2^23 runs.
const MANY: usize = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum From {
    Pod,
    Backend,
    Node,
    Outside,
}

impl From {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Backend => "backend",
            Self::Node => "node",
            Self::Outside => "outside",
        }
    }
}

/// The expected replies of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    /// Every reply comes from one of these servers.
    From(&'static [&'static str]),
    /// Each of these servers sends at least one reply.
    All(&'static [&'static str]),
    /// All replies come from the same server.
    Same,
    Refused,
    Silent,
    /// No server replies; a refusal is allowed.
    Closed,
}

#[derive(Clone, Debug)]
pub(super) struct Dial {
    pub(super) case: &'static str,
    pub(super) from: From,
    /// The index of the client's pod; `None` for this process.
    pub(super) client: Option<usize>,
    pub(super) target: Target,
    pub(super) expect: Expect,
}

const DIRECT: &str = "pod address, without a Service";
const DIRECT_LONG: &str = "pod address, long messages";
pub(super) const DENIED_DIRECT: &str = "NetworkPolicy: denied, without a Service";
pub(super) const DENIED: &str = "NetworkPolicy: denied";
const ALLOWED: &str = "NetworkPolicy: allowed";
const BY_NAME: &str = "ClusterIP by name";
const HEADLESS: &str = "headless Service by name";
const LOAD_BALANCER: &str = "LoadBalancer";
const EXTERNAL_IP: &str = "ExternalIP";

const FIRST: &[&str] = &["server-1"];
const SECOND: &[&str] = &["server-2"];
const BOTH: &[&str] = &["server-1", "server-2"];
const GUARDED: &[&str] = &["guarded-1"];

/// The dials of a run, and the cases that are skipped.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) dials: Vec<Dial>,
    pub(super) left_out: Vec<LeftOut>,
}

impl Plan {
    pub(super) fn of(stage: &Stage) -> Self {
        let mut plan = Self::default();
        for (index, pod) in stage.pods.iter().enumerate() {
            match pod.role {
                Role::Client => plan.of_client(stage, From::Pod, index),
                Role::Host => plan.of_client(stage, From::Node, index),
                Role::Server | Role::Guarded => {}
            }
        }
        plan.of_backend(stage);
        plan.policies(stage);
        plan.names(stage);
        plan.outside(stage);
        let given = [
            (LOAD_BALANCER, "load-balancer", "--load-balancer-ip"),
            (EXTERNAL_IP, "external-ip", "--external-ip"),
        ];
        for (case, service, flag) in given {
            if !stage.services.contains_key(service) {
                plan.leave_out(case, From::Pod, format!("no {flag} is given"));
            }
        }
        plan
    }

    /// Adds the dials of each client inside the cluster.
    fn of_client(&mut self, stage: &Stage, from: From, client: usize) {
        let node = &stage.pods[client].node;
        let mut add = |case, to, expect| self.push(case, from, Some(client), to, expect);
        add(
            DIRECT,
            pod_ips(stage, "server-1", SERVED),
            Expect::From(FIRST),
        );
        add(
            DIRECT,
            pod_ips(stage, "server-2", SERVED),
            Expect::From(SECOND),
        );
        for (service, server, expect) in
            [("first", "server-1", FIRST), ("second", "server-2", SECOND)]
        {
            let is_own = stage
                .pods
                .iter()
                .any(|pod| pod.name == server && &pod.node == node);
            let case = if is_own {
                "ClusterIP, a backend of the node"
            } else {
                "ClusterIP, a backend of another node"
            };
            add(
                case,
                cluster_ips(stage, service, PORT),
                Expect::From(expect),
            );
        }
        add(
            "ClusterIP, no backend",
            cluster_ips(stage, "nowhere", PORT),
            Expect::Refused,
        );
        add(
            "ClusterIP, a port that it lacks",
            cluster_ips(stage, "first", NO_PORT),
            Expect::Refused,
        );
        let has_local = stage
            .pods
            .iter()
            .any(|pod| pod.name == "server-1" && &pod.node == node);
        let (case, expect) = match has_local {
            true => (
                "internalTrafficPolicy Local, a local backend",
                Expect::From(FIRST),
            ),
            false => (
                "internalTrafficPolicy Local, no local backend",
                Expect::Silent,
            ),
        };
        add(case, cluster_ips(stage, "internal", PORT), expect);
        for name in stage.nodes.keys() {
            let case = if name == node {
                "NodePort of the client's node"
            } else {
                "NodePort of another node"
            };
            add(
                case,
                node_ports(stage, "node-port", name),
                Expect::From(BOTH),
            );
        }
        add(
            "externalTrafficPolicy Local, inside",
            node_ports(stage, "node-port-local", node),
            Expect::From(FIRST),
        );
        add(
            LOAD_BALANCER,
            given(stage, "load-balancer"),
            Expect::From(BOTH),
        );
        add(EXTERNAL_IP, given(stage, "external-ip"), Expect::From(BOTH));
        let many = cluster_ips(stage, "both", PORT);
        let many = many.into_iter().map(|target| target.times(MANY));
        self.push(
            "ClusterIP, all backends",
            from,
            Some(client),
            many,
            Expect::All(BOTH),
        );
        let sticky = cluster_ips(stage, "sticky", PORT);
        let sticky = sticky.into_iter().map(|target| target.times(MANY));
        self.push(
            "sessionAffinity ClientIP",
            from,
            Some(client),
            sticky,
            Expect::Same,
        );
        self.long_messages(stage, from, client);
    }

    /// Adds the dials with a message of many packets.
    fn long_messages(&mut self, stage: &Stage, from: From, client: usize) {
        let servers = [("server-1", "first", FIRST), ("server-2", "second", SECOND)];
        for (server, service, expect) in servers {
            let direct = pod_ips(stage, server, SERVED);
            for (case, to) in [
                (DIRECT_LONG, direct),
                (
                    "ClusterIP, long messages",
                    cluster_ips(stage, service, PORT),
                ),
            ] {
                // Long datagrams are omitted: they would test fragmentation.
                let tcp = to
                    .into_iter()
                    .filter(|target| target.protocol == Protocol::Tcp);
                self.push(
                    case,
                    from,
                    Some(client),
                    tcp.map(|target| target.bytes(LONG)),
                    Expect::From(expect),
                );
            }
        }
    }

    /// Adds the dial of a backend to its own Service.
    fn of_backend(&mut self, stage: &Stage) {
        let client = stage.pods.iter().position(|pod| pod.name == "server-1");
        let to = cluster_ips(stage, "first", PORT);
        self.push(
            "ClusterIP, the client itself",
            From::Backend,
            client,
            to,
            Expect::From(FIRST),
        );
    }

    fn policies(&mut self, stage: &Stage) {
        if let Some(why) = &stage.no_policy {
            return self.leave_out("NetworkPolicy", From::Pod, why.clone());
        }
        for client in clients(stage) {
            let mut add = |case, to, expect| self.push(case, From::Pod, Some(client), to, expect);
            add(
                DENIED_DIRECT,
                pod_ips(stage, "guarded-1", CLOSED),
                Expect::Closed,
            );
            add(
                DENIED,
                cluster_ips(stage, "guarded", CLOSED_PORT),
                Expect::Closed,
            );
            add(
                ALLOWED,
                cluster_ips(stage, "guarded", PORT),
                Expect::From(GUARDED),
            );
        }
    }

    fn names(&mut self, stage: &Stage) {
        if !stage.has_dns {
            for case in [BY_NAME, HEADLESS] {
                self.leave_out(
                    case,
                    From::Pod,
                    "no Service of kube-system has the label k8s-app=kube-dns".to_owned(),
                );
            }
            return;
        }
        for client in clients(stage) {
            for (case, service, port, expect) in [
                (BY_NAME, "first", PORT, FIRST),
                (HEADLESS, "headless", SERVED, BOTH),
            ] {
                let name = format!("{service}.{}.svc:{port}", stage.namespace);
                let targets = Protocol::ALL.map(|protocol| Target::new(protocol, &name));
                self.push(case, From::Pod, Some(client), targets, Expect::From(expect));
            }
        }
    }

    /// Adds the dials of this process.
    fn outside(&mut self, stage: &Stage) {
        let local = stage
            .pods
            .iter()
            .find(|pod| pod.name == "server-1")
            .map(|pod| &pod.node);
        for name in stage.nodes.keys() {
            let mut add = |case, service, expect| {
                let to = node_ports(stage, service, name);
                self.push(case, From::Outside, None, to, expect);
            };
            add("NodePort", "node-port", Expect::From(BOTH));
            match Some(name) == local {
                true => add(
                    "externalTrafficPolicy Local, a local backend",
                    "node-port-local",
                    Expect::From(FIRST),
                ),
                false => add(
                    "externalTrafficPolicy Local, no local backend",
                    "node-port-local",
                    Expect::Silent,
                ),
            }
        }
        for (case, service) in [
            (LOAD_BALANCER, "load-balancer"),
            (EXTERNAL_IP, "external-ip"),
        ] {
            self.push(
                case,
                From::Outside,
                None,
                given(stage, service),
                Expect::From(BOTH),
            );
        }
    }

    fn push(
        &mut self,
        case: &'static str,
        from: From,
        client: Option<usize>,
        targets: impl IntoIterator<Item = Target>,
        expect: Expect,
    ) {
        self.dials.extend(targets.into_iter().map(|target| Dial {
            case,
            from,
            client,
            target,
            expect,
        }));
    }

    fn leave_out(&mut self, case: &'static str, from: From, why: String) {
        self.left_out.push(LeftOut { case, from, why });
    }
}

impl Expect {
    /// Compares the replies with the expected replies. The error describes the difference.
    pub(super) fn judge(self, replies: &[Reply]) -> Result<(), String> {
        let answers = |reply: &Reply, servers: &[&str]| {
            reply.outcome == Outcome::Answered
                && reply
                    .server
                    .as_deref()
                    .is_some_and(|name| servers.contains(&name))
        };
        let is_right = |reply: &Reply| match self {
            Self::From(servers) | Self::All(servers) => answers(reply, servers),
            Self::Same => reply.outcome == Outcome::Answered && reply.server == replies[0].server,
            Self::Refused => reply.outcome == Outcome::Refused,
            Self::Silent => reply.outcome == Outcome::Silent,
            Self::Closed => reply.outcome != Outcome::Answered,
        };
        if let Some(wrong) = replies.iter().find(|reply| !is_right(reply)) {
            return Err(wrong.to_string());
        }
        if let Self::All(servers) = self {
            let missing = servers
                .iter()
                .find(|server| !replies.iter().any(|reply| answers(reply, &[server])));
            return missing.map_or(Ok(()), |server| {
                Err(format!(
                    "none of {} answers came from {server}",
                    replies.len()
                ))
            });
        }
        if replies.is_empty() {
            Err("no reply".to_owned())
        } else {
            Ok(())
        }
    }
}

impl std::fmt::Display for Expect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::From(servers) => write!(f, "an answer of {}", servers.join(" or ")),
            Self::All(servers) => write!(f, "answers of {}", servers.join(" and ")),
            Self::Same => f.write_str("one server for all connections"),
            Self::Refused => f.write_str("a refusal at once"),
            Self::Silent => f.write_str("no answer"),
            Self::Closed => f.write_str("no connection"),
        }
    }
}

fn clients(stage: &Stage) -> impl Iterator<Item = usize> {
    stage
        .pods
        .iter()
        .enumerate()
        .filter(|(_, pod)| pod.role == Role::Client)
        .map(|(index, _)| index)
}

fn pod_ips(stage: &Stage, pod: &str, port: u16) -> Vec<Target> {
    let pod = stage.pods.iter().find(|known| known.name == pod);
    by_both(pod.iter().flat_map(|pod| &pod.ips), port)
}

fn by_both<'a>(addresses: impl IntoIterator<Item = &'a IpAddr>, port: u16) -> Vec<Target> {
    let at = addresses.into_iter().map(|ip| SocketAddr::new(*ip, port));
    at.flat_map(|at| Protocol::ALL.map(|protocol| Target::new(protocol, at)))
        .collect()
}

fn cluster_ips(stage: &Stage, service: &str, port: u16) -> Vec<Target> {
    by_both(&ips_of(stage, service), port)
}

fn ips_of(stage: &Stage, service: &str) -> Vec<IpAddr> {
    let spec = stage
        .services
        .get(service)
        .and_then(|service| service.spec.as_ref());
    spec.iter()
        .flat_map(|spec| spec.cluster_ips.iter().flatten())
        .filter_map(|ip| ip.parse().ok())
        .collect()
}

/// Returns the destinations of node ports on a node, in the Service's families.
fn node_ports(stage: &Stage, service: &str, node: &str) -> Vec<Target> {
    let families = ips_of(stage, service);
    let own = stage.nodes.get(node).into_iter().flatten();
    let own: Vec<_> = own
        .filter(|ip| families.iter().any(|known| known.is_ipv4() == ip.is_ipv4()))
        .collect();
    let spec = stage
        .services
        .get(service)
        .and_then(|service| service.spec.as_ref());
    let ports = spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let numbers = ports
        .filter_map(|port| Some((port.protocol.clone()?, u16::try_from(port.node_port?).ok()?)));
    numbers
        .flat_map(|(protocol, number)| {
            let targets = by_both(own.iter().copied(), number);
            targets
                .into_iter()
                .filter(move |target| target.protocol.to_string() == protocol.to_lowercase())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Returns the addresses that an operator gave to a Service.
fn given(stage: &Stage, service: &str) -> Vec<Target> {
    let Some(service) = stage.services.get(service) else {
        return Vec::new();
    };
    let external = service
        .spec
        .iter()
        .flat_map(|spec| spec.external_ips.iter().flatten());
    let balancer = service
        .status
        .iter()
        .filter_map(|status| status.load_balancer.as_ref());
    let balancer = balancer
        .flat_map(|status| status.ingress.iter().flatten())
        .filter_map(|one| one.ip.as_ref());
    let ips: Vec<IpAddr> = external
        .chain(balancer)
        .filter_map(|ip| ip.parse().ok())
        .collect();
    by_both(&ips, PORT)
}
