//! Explains the programs' decision: the map rows that led to it, and the reason.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proxy_common::addr::{Addr, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::device::Node;
use proxy_common::flow::Flow;
use proxy_common::frontend::{self, Choice, Dialled, FrontendKey, SlotKey};
use proxy_common::policy::{self, Client, Decision};

use crate::input::{PortName, TraceInput};
use crate::outside_reach::DialledPort;
use crate::programs::{Disposition, Run};
use crate::redirected;
use crate::report::{
    Algorithm, Backend, Frontend, FrontendKind, Origin, Outcome, Service, Set, Source, Tally,
    Verdict,
};
use proxy_core::tables::set_name;

pub(crate) fn outcome<A: Addr>(
    input: &TraceInput<A>,
    client: SocketAddr,
    dialled: &FrontendKey<A>,
    run: &Run<A>,
) -> Outcome {
    let (verdict, reason) = verdict(run);
    let met = run
        .decision
        .filter(|decision| decision.has(Decision::<A>::FRONTEND));
    let chosen = met.filter(|decision| decision.has(Decision::<A>::SET));
    let affinity_hit = met.is_some_and(|decision| decision.has(Decision::<A>::AFFINITY));
    let set = chosen.and_then(|decision| set(input, &decision));
    let (to, source) = match &run.disposition {
        Disposition::Forward(flow) => (
            Some(backend(flow, met.as_ref())),
            Some(source(input, flow, met.as_ref())),
        ),
        Disposition::HandOver(backend) => (Some(elsewhere(backend)), Some(unchanged(client))),
        Disposition::Pass(_) | Disposition::Drop(_) | Disposition::Reject(_) => (None, None),
    };
    let redirect = redirected::service(input, dialled);
    let explanation = match (reason, &set) {
        (Some(Reason::NotOurs), _) if redirect.is_some_and(redirected::has_pods) => {
            redirected::SPARED
        }
        (Some(Reason::NotOurs), _) if redirect.is_some() => redirected::NO_POD,
        (Some(reason), _) => explain(reason),
        (None, _) if affinity_hit => "the backend that this client had before (session affinity)",
        (None, Some(_)) if redirect.is_some() => redirected::TAKEN,
        (None, Some(set)) if set.name == REDIRECT => {
            "a pod of this node, by the Service's local redirect"
        }
        (None, Some(set)) if set.backends.len() == 1 => "the only backend",
        (None, Some(_)) if chosen.is_some_and(|decision| is_by_address(input, &decision)) => {
            "the backend that every node has for this client's address (session affinity)"
        }
        (None, Some(set)) if set.backends.iter().any(|backend| backend.weight.is_some()) => {
            set.algorithm.explain_weighted()
        }
        (None, Some(set)) => set.algorithm.explain(),
        (None, None) => "sent to a backend",
    };
    let explanation = explanation.to_owned();
    let (frontend, service) = match met {
        Some(decision) => (
            Some(frontend(&decision, redirect.is_some())),
            Some(service(input, &decision.service)),
        ),
        None if redirect.is_some() => (
            Some(redirected::frontend(dialled)),
            Some(service(input, dialled)),
        ),
        None if reason == Some(Reason::UnknownPort) => (
            address(input, dialled.addr),
            service_at(input, dialled.addr),
        ),
        None => (None, None),
    };
    let remedy = reason
        .map(|reason| remedy_for(reason, service.as_ref()))
        .unwrap_or_default();
    let seen = reason
        .zip(input.outside.as_ref())
        .zip(met)
        .and_then(|((reason, outside), met)| {
            let name = service.as_ref().and_then(full_name);
            let port = (met.service.port.get(), met.service.proto);
            outside.seen(
                reason,
                &DialledPort {
                    service: name.as_deref(),
                    port,
                    family: A::FAMILY,
                },
            )
        });
    let (explanation, remedy) = seen.unwrap_or((explanation, remedy));
    Outcome {
        verdict,
        reason: reason.map(|reason| reason.name().to_owned()),
        explanation,
        remedy,
        frontend,
        service,
        // The programs do not determine the client's origin for a packet without a Service.
        origin: run
            .decision
            .filter(|_| verdict != Verdict::Pass)
            .map(|decision| origin(decision.origin)),
        backend: to,
        set,
        source,
        affinity_hit,
        handed_over: matches!(run.disposition, Disposition::HandOver(_)),
    }
}

/// Returns true if all nodes choose the same backend for a client's address, whatever its port.
fn is_by_address<A: Addr>(input: &TraceInput<A>, decision: &Decision<A>) -> bool {
    let service = input.tables.services.get(&decision.service);
    decision.set == frontend::Set::DIRECT
        && service.is_some_and(|service| service.affinity_secs > 0)
}

fn full_name(service: &Service) -> Option<String> {
    Some(format!(
        "{}/{}",
        service.namespace.as_ref()?,
        service.name.as_ref()?
    ))
}

/// Returns the next steps, with the Service's name filled in if it is known.
fn remedy_for(reason: Reason, service: Option<&Service>) -> Vec<String> {
    let name = service.and_then(full_name);
    let name = name.as_deref().unwrap_or(ANY_SERVICE);
    remedy(reason)
        .iter()
        .map(|step| step.replace(ANY_SERVICE, name))
        .collect()
}

/// The placeholder for a Service's name in a remedy.
pub(crate) const ANY_SERVICE: &str = "NAMESPACE/NAME";

pub(crate) fn tally<A: Addr>(runs: &[Run<A>]) -> Vec<Tally> {
    let mut counts: BTreeMap<_, u32> = BTreeMap::new();
    for run in runs {
        let (verdict, reason) = verdict(run);
        let backend = match &run.disposition {
            Disposition::Forward(flow) => Some(flow.backend),
            Disposition::HandOver(backend) => Some(SockAddr::new(backend.addr, backend.port)),
            _ => None,
        };
        *counts.entry((verdict, reason, backend)).or_default() += 1;
    }
    let rows = counts
        .into_iter()
        .map(|((verdict, reason, backend), packets)| Tally {
            packets,
            verdict,
            reason: reason.map(|reason| reason.name().to_owned()),
            backend: backend.map(|backend| format!("{backend:?}")),
        });
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.packets));
    rows
}

fn verdict<A: Addr>(run: &Run<A>) -> (Verdict, Option<Reason>) {
    match run.disposition {
        Disposition::Forward(_) | Disposition::HandOver(_) => (Verdict::Forward, None),
        Disposition::Reject(reason) => (Verdict::Reject, Some(reason)),
        Disposition::Drop(reason) => (Verdict::Drop, Some(reason)),
        Disposition::Pass(reason) => (Verdict::Pass, Some(reason)),
    }
}

fn frontend<A: Addr>(decision: &Decision<A>, is_redirected: bool) -> Frontend {
    let kind = match decision.kind.known() {
        Some(Dialled::ClusterIp) if is_redirected => FrontendKind::Redirected,
        Some(Dialled::Address) => FrontendKind::Address,
        Some(Dialled::ClusterIp) => FrontendKind::ClusterIp,
        Some(Dialled::NodePort) => FrontendKind::NodePort,
        Some(Dialled::ExternalIp) => FrontendKind::ExternalIp,
        Some(Dialled::LoadBalancer) => FrontendKind::LoadBalancer,
        None => FrontendKind::Unknown,
    };
    Frontend {
        at: format!("{:?}", decision.frontend),
        kind,
    }
}

/// Returns the frontend of a whole ClusterIP, for a packet whose port has no frontend.
fn address<A: Addr>(input: &TraceInput<A>, addr: A) -> Option<Frontend> {
    let key = FrontendKey::address(addr);
    input.tables.frontends.contains_key(&key).then(|| Frontend {
        at: format!("{key:?}"),
        kind: FrontendKind::Address,
    })
}

fn service<A: Addr>(input: &TraceInput<A>, key: &FrontendKey<A>) -> Service {
    let name = input.names.get(key);
    Service {
        port_name: name.map(|name| name.port.clone()),
        ..named(format!("{key:?}"), name)
    }
}

fn service_at<A: Addr>(input: &TraceInput<A>, addr: A) -> Option<Service> {
    let (key, name) = input.names.iter().find(|(key, _)| key.addr == addr)?;
    Some(named(
        format!("{:?}", FrontendKey::address(key.addr)),
        Some(name),
    ))
}

fn named(key: String, name: Option<&PortName>) -> Service {
    let namespace = name.map(|name| name.namespace.clone());
    Service {
        key,
        namespace,
        name: name.map(|name| name.service.clone()),
        port_name: None,
    }
}

fn origin(origin: policy::Origin) -> Origin {
    match origin.known() {
        Some(Client::Node) => Origin::Node,
        Some(Client::Pod) => Origin::Pod,
        Some(Client::Detected) => Origin::Detected,
        Some(Client::External | Client::Elsewhere | Client::HandedOver) | None => Origin::Outside,
    }
}

/// The name of the set of pods of a local redirect.
const REDIRECT: &str = "redirect";

fn set<A: Addr>(input: &TraceInput<A>, decision: &Decision<A>) -> Option<Set> {
    let service = input.tables.services.get(&decision.service)?;
    let is_direct = decision.set == frontend::Set::DIRECT;
    // The direct set may be larger than the cluster's: it has neither hints nor ejections.
    let count = if is_direct {
        u16::MAX
    } else {
        service.count(decision.set)
    };
    let slots = (0..count).map(|index| SlotKey::new(decision.service, decision.set, index));
    let backends = slots
        .map_while(|slot| input.tables.slots.get(&slot))
        .map(|backend| Backend {
            at: format!("{:?}", SockAddr::new(backend.addr, backend.port)),
            local: backend.is_local(),
            weight: service
                .has(frontend::Service::WEIGHTED)
                .then(|| backend.weight()),
        });
    Some(Set {
        name: match service.has(frontend::Service::REDIRECTED)
            && decision.set == frontend::Set::LOCAL
        {
            true => REDIRECT.to_owned(),
            false => set_name(decision.set).to_owned(),
        },
        algorithm: match service.algorithm.known() {
            // All nodes choose alike from this set.
            _ if is_direct => Algorithm::Maglev,
            Some(Choice::Random) => Algorithm::Random,
            Some(Choice::Maglev) => Algorithm::Maglev,
            Some(Choice::RoundRobin) => Algorithm::RoundRobin,
            Some(Choice::LeastConnections) => Algorithm::LeastConnections,
            None => Algorithm::Unknown,
        },
        affinity_seconds: Some(service.affinity_secs).filter(|&secs| secs != 0 && !is_direct),
        backends: backends.collect(),
    })
}

/// Describes the backend of a packet that is handed over to the backend's node.
fn elsewhere<A: Addr>(backend: &frontend::Backend<A>) -> Backend {
    Backend {
        at: format!("{:?}", SockAddr::new(backend.addr, backend.port)),
        local: false,
        weight: None,
    }
}

/// Describes the source of a packet that is handed over.
fn unchanged(client: SocketAddr) -> Source {
    Source {
        at: client.to_string(),
        masqueraded: false,
        explanation: "the packet goes unchanged to the backend's node, which translates it and answers the client directly"
            .to_owned(),
    }
}

fn backend<A: Addr>(flow: &Flow<A>, met: Option<&Decision<A>>) -> Backend {
    let local = met.is_some_and(|decision| {
        decision.backend_at() == flow.backend && decision.backend.is_local()
    });
    Backend {
        at: format!("{:?}", flow.backend),
        local,
        weight: None,
    }
}

fn source<A: Addr>(input: &TraceInput<A>, flow: &Flow<A>, met: Option<&Decision<A>>) -> Source {
    let masqueraded = flow.is_snat();
    let cluster_ip =
        met.is_some_and(|decision| decision.kind == frontend::FrontendKind::CLUSTER_IP);
    let explanation = if flow.source == flow.client {
        "the client's own address and port"
    } else if !masqueraded && flow.has(Flow::<A>::HOST) {
        "the client's own address, and a port that no connection of the host has"
    } else if !masqueraded {
        "the client's own address, and another port, as its own is in use towards this backend"
    } else if flow.backend.addr == flow.client.addr {
        "the client is its own backend, and would answer itself without passing the service"
    } else if flow.has(Flow::<A>::HOST) {
        "the host's own address on the way to this backend"
    } else if cluster_ip && input.node.has(Node::MASQUERADE_ALL) {
        "every client of a ClusterIP is masqueraded (--masquerade-all)"
    } else if input.node.has(Node::COMPAT) {
        "masqueraded where kube-proxy does it (--masquerade compat)"
    } else {
        "replies from that backend must come back through this node"
    };
    Source {
        at: format!("{:?}", flow.source),
        masqueraded,
        explanation: explanation.to_owned(),
    }
}

impl Algorithm {
    fn explain(self) -> &'static str {
        match self {
            Self::Random => "a backend chosen at random",
            Self::Maglev => {
                "the backend that Maglev has for this client's address and port, on every node"
            }
            Self::RoundRobin => "the next backend in turn",
            Self::LeastConnections => "the backend with fewer connections of two random backends",
            Self::Unknown => "sent to a backend",
        }
    }

    /// Explains the choice among backends of different weights.
    fn explain_weighted(self) -> &'static str {
        match self {
            Self::Random => "a backend chosen at random, by weight",
            Self::Maglev => {
                "the backend that Maglev has for this client's address and port, on every node, by weight"
            }
            Self::RoundRobin => "the next backend in turn, by weight",
            Self::LeastConnections => {
                "the backend with fewer connections per weight of two backends, drawn by weight"
            }
            Self::Unknown => "sent to a backend",
        }
    }
}

pub fn explain(reason: Reason) -> &'static str {
    match reason {
        Reason::NotIp => "neither IPv4 nor IPv6",
        Reason::Vlan => "it carries a VLAN tag, and the VLAN's own device handles it",
        Reason::SeenBefore => "another of our hooks has translated it already",
        Reason::Malformed => "its headers are malformed",
        Reason::Fragment => "a fragment without its first fragment",
        Reason::Protocol => "a transport that kpx does not translate",
        Reason::NotUnicast => {
            "from or to a multicast, broadcast, loopback or unspecified address, or one of fe80::/10"
        }
        Reason::NotOurs => "no service is offered there",
        Reason::NoFlow => "it belongs to no flow and cannot open a flow",
        Reason::NoEndpoints => "the service has no endpoint that serves",
        Reason::UnknownPort => "a ClusterIP, but its service does not offer this port",
        Reason::NoLocalEndpoints => {
            "the service's traffic policy is Local, and none of its endpoints is on this node"
        }
        Reason::Outside => {
            "a client outside the cluster dials a ClusterIP, which --cluster-ip-external=false keeps to the cluster"
        }
        Reason::SourceRange => "the client is outside the service's loadBalancerSourceRanges",
        Reason::Unallocated => "an address of a ServiceCIDR that no service has",
        Reason::StaleSlot => "a backend vanished while it was looked up",
        Reason::FlowsFull => "the flow table is full",
        Reason::ClientShare => {
            "the client, or the Service's namespace, holds its share of the flow table"
        }
        Reason::NoSourcePort => "every source port tried towards this backend is taken",
        Reason::NoNodeAddress => {
            "the client must be masqueraded, and the node has no address of this family"
        }
        Reason::NoRoute => "the node has no route to the backend",
        Reason::RouteLost => "the node has lost its route to the backend",
        Reason::Spoofed => {
            "it is spoofed: its source is an address of the node, or the route back to its source uses another device, or it is a RST outside the backend's window"
        }
        Reason::CutHeader => "a first fragment too short for its transport header",
        Reason::BackendLost => {
            "the backend's node is gone, and the service has its connections reset"
        }
        Reason::Unhooked => {
            "its flow is alive, but no program saw it on arrival: a program is missing on that device"
        }
        Reason::Draining => "kpx is about to leave this node, and opens no more flows",
        Reason::Rewrite => "the kernel refused to change the packet",
        Reason::SlowPathMissing => {
            "the program of the slow path was missing: another program has emptied the map SLOW"
        }
        Reason::HandoverRefused => {
            "it came through the tunnel of nodes that hand clients over, and this node takes no such packet: the sender is no such node, the destination no frontend of the mode, the backend is elsewhere, or the packet is from the middle of a connection that has no flow here"
        }
        Reason::NotHandedOver => {
            "it belongs to a connection of a client outside that another node served, and the table of backends has changed: no flow here and no place of the table leads it to a node"
        }
    }
}

/// Returns the operator's next steps for a reason, a sentence each; empty if nothing is wrong.
pub fn remedy(reason: Reason) -> &'static [&'static str] {
    match reason {
        Reason::NoEndpoints => &[
            "kpx backends NAMESPACE/NAME shows the endpoints.",
            "If there is none, compare the Service's selector with its pods' labels.",
            "If none is ready, check the pods' readiness probes.",
        ],
        Reason::NoLocalEndpoints => &[
            "Dial a node with an endpoint; nodes with endpoints answer 200 on the health check node port.",
            "Or run a pod on each node, or set the traffic policy to Cluster.",
        ],
        Reason::BackendLost => &[
            "The client's next connection goes to a backend that serves.",
            "kubectl get nodes shows the node, and the Service's Events name the backend.",
        ],
        Reason::UnknownPort => &[
            "kpx services NAMESPACE/NAME lists the ports.",
            "Clients that dial the pod's targetPort at the ClusterIP get this.",
        ],
        Reason::Outside => &[
            "Dial a node port or a load balancer from outside.",
            "If the client is a pod, look at kpx devices and at --cluster-cidr.",
            "--cluster-ip-external=true lets all clients in.",
        ],
        Reason::SourceRange => &[
            "Add the client's network to spec.loadBalancerSourceRanges.",
            "A client behind NAT comes with the address of its router.",
        ],
        Reason::Unallocated => &[
            "The client uses an old address: look for a deleted Service, and for a DNS answer that a client keeps.",
        ],
        Reason::FlowsFull => &[
            "kpx status shows the table, and kpx flows its clients.",
            "Raise --flow-table-size.",
        ],
        Reason::ClientShare => &[
            "kpx flows --client IP shows the client's flows, kpx flows those of all Services.",
            "If it needs them, raise --flow-table-size.",
        ],
        Reason::NoSourcePort => &[
            "Too many masqueraded connections use one backend.",
            "Add backends, or give clients addresses that the backend can answer.",
        ],
        Reason::NoNodeAddress => &[
            "Give the node's device an address of this family, or remove the family from the Service.",
        ],
        Reason::NoRoute | Reason::RouteLost => &[
            "ip route get BACKEND, on the node, fails: the CNI plugin's route to that pod is missing.",
            "kpx backends names the backend's node.",
        ],
        Reason::Unhooked => {
            &["kpx status shows the device without programs, and the log the cause."]
        }
        Reason::Spoofed => &[
            "Compare ip route get CLIENT with the device that the client's packets arrive at.",
            "If the node has no route to the client's pod, restore the CNI plugin's route.",
            "If they agree, look for a sender with spoofed addresses.",
        ],
        Reason::Draining => {
            &["kpx cleanup --drain runs: another proxy has to serve new connections."]
        }
        Reason::Fragment | Reason::CutHeader | Reason::Malformed => &[
            "Look for a path with a smaller MTU than the pods', and capture the packets (tcpdump).",
        ],
        Reason::StaleSlot | Reason::Rewrite => &[
            "The client's next attempt succeeds.",
            "If the count grows steadily, report it with kpx status -o json.",
        ],
        Reason::SlowPathMissing => &[
            "kpx fills the map again within its sync period.",
            "Look for a program on the node that changes BPF maps or removes pins.",
        ],
        Reason::HandoverRefused => &[
            "A few while endpoints change are harmless: two nodes had different tables.",
            "If the count grows steadily, capture the senders: tcpdump -ni any 'ip proto 4 or ip6 proto 41'.",
        ],
        Reason::NotHandedOver => &[
            "The connection has ended: its backend is gone, or another backend has the client's place now.",
            "A few are normal while endpoints change.",
        ],
        Reason::NotIp
        | Reason::Vlan
        | Reason::SeenBefore
        | Reason::Protocol
        | Reason::NotUnicast
        | Reason::NotOurs
        | Reason::NoFlow => &[],
    }
}
