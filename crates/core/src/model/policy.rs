//! The settings that apply to all ports of a Service.

use proxy_common::addr::{Port, Proto};
use proxy_common::frontend::{Algorithm, Service};

use super::endpoints::UsedSets;
use super::handover::ExternalForwarding;
use super::node::NodeModel;
use super::port::PortPolicy;
use super::read::{Reader, port_number};
use crate::compact::{self, ALGORITHM, BACKEND_HEALTH, EXTERNAL_FORWARDING, RESET_ON_NODE_LOSS};
use crate::health::HealthMode;

/// The default of `sessionAffinityConfig.clientIP.timeoutSeconds` (core/v1), three hours, and its
/// maximum, one day.
const AFFINITY_SECS: u32 = 10_800;
const AFFINITY_SECS_MAX: u32 = 86_400;

pub(super) struct Policy {
    /// Set by `internalTrafficPolicy: Local`.
    pub(super) internal_local: bool,
    /// Set by `externalTrafficPolicy: Local` on a Service with external frontends.
    pub(super) external_local: bool,
    node_ports: bool,
    affinity_secs: u32,
    algorithm: Algorithm,
    pub(super) backend_health: HealthMode,
    pub(super) external_forwarding: ExternalForwarding,
    /// Set if connections to lost nodes are reset.
    resets: bool,
    /// Set if packets pass to the original address when no local pod serves them.
    else_passes: bool,
    /// The `healthCheckNodePort`, if the Service has a health check.
    pub(super) health_check_port: Option<u16>,
}

impl Policy {
    pub(super) fn new(
        reader: &mut Reader<'_>,
        service: &compact::Service,
        node: &NodeModel,
    ) -> Self {
        let load_balancer = service.type_.as_deref() == Some("LoadBalancer");
        let node_ports = load_balancer || service.type_.as_deref() == Some("NodePort");
        let external = node_ports || !service.external_ips.is_empty();
        let external_local =
            external && service.external_traffic_policy.as_deref() == Some("Local");
        Self {
            internal_local: service.internal_traffic_policy.as_deref() == Some("Local"),
            external_local,
            node_ports,
            affinity_secs: affinity_secs(reader, service),
            algorithm: algorithm_of(reader, service).unwrap_or(node.algorithm),
            backend_health: backend_health(reader, service).unwrap_or(node.backend_health),
            external_forwarding: external_forwarding(reader, service)
                .unwrap_or(node.external_forwarding),
            resets: resets(reader, service).unwrap_or_default(),
            else_passes: service.is_redirected_address,
            health_check_port: if load_balancer && external_local {
                health_check_port(reader, service)
            } else {
                None
            },
        }
    }

    /// Returns the settings of a port. `external` is set if the port has an external frontend.
    /// `guarded` is set if the load balancer addresses have source ranges.
    pub(super) fn port_policy(&self, proto: Proto, external: bool, guarded: bool) -> PortPolicy {
        let flag = |set, flag| if set { flag } else { 0 };
        let flags = flag(self.internal_local, Service::INTERNAL_LOCAL)
            | flag(self.external_local, Service::EXTERNAL_LOCAL)
            | flag(guarded, Service::SOURCE_RANGES)
            | flag(self.else_passes, Service::ELSE_PASSES);
        PortPolicy {
            service: Service::new(0, 0, flags)
                .with_algorithm(self.algorithm)
                .with_affinity(self.affinity_secs),
            used_sets: UsedSets {
                // Under the external policy, clients inside the cluster still use this set.
                cluster: !self.internal_local || external,
                local: self.internal_local || self.external_local && external,
            },
            remembers: proto == Proto::UDP || self.affinity_secs > 0,
            resets: proto == Proto::TCP && self.resets,
            hands_over: false,
            has_tables: true,
        }
    }

    pub(super) fn node_port(
        &self,
        reader: &mut Reader<'_>,
        index: usize,
        port: &compact::ServicePort,
    ) -> Option<Port> {
        let number = port
            .node_port
            .filter(|number| self.node_ports && *number != 0)?;
        reader.take(
            format_args!("spec.ports[{index}].nodePort"),
            port_number(number),
        )
    }
}

fn affinity_secs(reader: &mut Reader<'_>, service: &compact::Service) -> u32 {
    match service.session_affinity.as_deref() {
        None | Some("" | "None") => return 0,
        Some("ClientIP") => {}
        Some(other) => {
            reader.skip(
                format_args!("spec.sessionAffinity"),
                format!("{other:?} is not one of None, ClientIP"),
            );
            return 0;
        }
    }
    let Some(secs) = service.affinity_secs else {
        return AFFINITY_SECS;
    };
    match u32::try_from(secs) {
        Ok(secs @ 1..=AFFINITY_SECS_MAX) => secs,
        Ok(_) | Err(_) => {
            let why =
                format!("{secs} is not in 1..={AFFINITY_SECS_MAX}, so {AFFINITY_SECS} counts");
            reader.skip(
                format_args!("spec.sessionAffinityConfig.clientIP.timeoutSeconds"),
                why,
            );
            AFFINITY_SECS
        }
    }
}

fn algorithm_of(reader: &mut Reader<'_>, service: &compact::Service) -> Option<Algorithm> {
    let name = service.algorithm.as_ref()?;
    reader.take(
        format_args!("metadata.annotations[{ALGORITHM}]"),
        algorithm(name),
    )
}

fn backend_health(reader: &mut Reader<'_>, service: &compact::Service) -> Option<HealthMode> {
    let name = service.backend_health.as_ref()?;
    reader.take(
        format_args!("metadata.annotations[{BACKEND_HEALTH}]"),
        HealthMode::from_name(name),
    )
}

fn external_forwarding(
    reader: &mut Reader<'_>,
    service: &compact::Service,
) -> Option<ExternalForwarding> {
    let name = service.external_forwarding.as_ref()?;
    reader.take(
        format_args!("metadata.annotations[{EXTERNAL_FORWARDING}]"),
        ExternalForwarding::from_name(name),
    )
}

fn resets(reader: &mut Reader<'_>, service: &compact::Service) -> Option<bool> {
    let value = service.reset_on_node_loss.as_ref()?;
    let read = value
        .parse::<bool>()
        .map_err(|_| format!("{:?} is not one of true, false", &**value));
    reader.take(
        format_args!("metadata.annotations[{RESET_ON_NODE_LOSS}]"),
        read,
    )
}

pub(super) fn algorithm(name: &str) -> Result<Algorithm, String> {
    let named = ALGORITHMS.iter().find(|(known, _)| *known == name);
    named.map(|(_, algorithm)| *algorithm).ok_or_else(|| {
        format!(
            "{name:?} is not one of {}",
            ALGORITHMS.map(|(name, _)| name).join(", ")
        )
    })
}

pub fn algorithm_name(algorithm: Algorithm) -> &'static str {
    ALGORITHMS
        .iter()
        .find(|(_, known)| *known == algorithm)
        .map_or("unknown", |(name, _)| name)
}

/// The algorithms by name, for `lbAlgorithm` and the annotation.
pub const ALGORITHMS: [(&str, Algorithm); 4] = [
    ("random", Algorithm::RANDOM),
    ("maglev", Algorithm::MAGLEV),
    ("round-robin", Algorithm::ROUND_ROBIN),
    ("least-connections", Algorithm::LEAST_CONNECTIONS),
];

fn health_check_port(reader: &mut Reader<'_>, service: &compact::Service) -> Option<u16> {
    let number = service.health_check_node_port.unwrap_or_default();
    let port = port_number(number);
    reader
        .take(format_args!("spec.healthCheckNodePort"), port)
        .map(|port| port.get())
}
