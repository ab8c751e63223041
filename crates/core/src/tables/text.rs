//! The text form of the maps' contents.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;

use proxy_common::addr::Addr;
use proxy_common::frontend::{
    Backend, Choice, Dialled, Endpoint, Endpoints, Frontend, FrontendKey, Maglev, Service, Set,
    SourceRange,
};

use super::{FamilyTables, RangeKey, Tables};

impl fmt::Display for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.v4, self.v6)
    }
}

/// One paragraph for each frontend or service port. Every row is shown, including unexpected rows.
impl<A: Addr> fmt::Display for FamilyTables<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = self
            .frontends
            .keys()
            .chain(self.services.keys())
            .chain(self.slots.keys().map(|key| &key.service));
        let keys = keys.chain(self.endpoints.keys().map(|key| &key.service));
        let keys = keys.chain(self.maglev.keys().map(|key| &key.service));
        let keys = keys.chain(self.source_ranges.iter().map(|key| &key.range.service));
        for key in keys.collect::<BTreeSet<_>>() {
            write!(f, "{key:?}")?;
            if let Some(frontend) = self.frontends.get(key) {
                write!(f, " {}", FrontendText(key, frontend))?;
            }
            if let Some(service) = self.services.get(key) {
                write!(f, " {}", ServiceText(service))?;
            }
            writeln!(f)?;
            for (slot, backend) in self.slots_of(key) {
                writeln!(
                    f,
                    "  {}[{}] -> {}",
                    set_name(slot.set),
                    slot.index,
                    BackendText(backend)
                )?;
            }
            for (set, maglev) in self.maglev_of(key) {
                writeln!(f, "  maglev {} {}", set_name(set.set), MaglevText(maglev))?;
            }
            for (endpoint, flags) in self.endpoints_of(key) {
                writeln!(f, "  endpoint {:?}{}", endpoint.at, EndpointText(flags))?;
            }
            for range in self.source_ranges_of(key) {
                writeln!(f, "  from {}", RangeText(range))?;
            }
        }
        Ok(())
    }
}

/// A frontend: its kind, and its service port unless the keys are equal.
pub struct FrontendText<'a, A: Addr>(pub &'a FrontendKey<A>, pub &'a Frontend<A>);
pub struct ServiceText<'a>(pub &'a Service);
pub struct BackendText<'a, A: Addr>(pub &'a Backend<A>);
/// An endpoint: its sets.
pub struct EndpointText<'a>(pub &'a Endpoint);
/// A look-up table: the number of slots with entries, and a checksum of the entries.
pub struct MaglevText<'a>(pub &'a Maglev);
/// A range, without its service port.
pub struct RangeText<'a, A: Addr>(pub &'a RangeKey<A>);

pub fn set_name(set: Set) -> &'static str {
    match set.known() {
        Some(Endpoints::Local) => "local",
        Some(Endpoints::Direct) => "direct",
        Some(Endpoints::Nodes) => "nodes",
        Some(Endpoints::Cluster) | None => "cluster",
    }
}

impl<A: Addr> fmt::Display for FrontendText<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(key, frontend) = self;
        match frontend.kind.known() {
            Some(Dialled::Address) => f.write_str("address")?,
            Some(Dialled::ClusterIp) => f.write_str("cluster-ip")?,
            Some(Dialled::NodePort) => f.write_str("node-port")?,
            Some(Dialled::ExternalIp) => f.write_str("external-ip")?,
            Some(Dialled::LoadBalancer) => f.write_str("load-balancer")?,
            None => write!(f, "{:?}", frontend.kind)?,
        }
        if frontend.service == **key {
            Ok(())
        } else {
            write!(f, " of {:?}", frontend.service)
        }
    }
}

impl fmt::Display for ServiceText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(service) = self;
        write!(
            f,
            "cluster={} local={}",
            service.count(Set::CLUSTER),
            service.count(Set::LOCAL)
        )?;
        let flags = [
            (Service::INTERNAL_LOCAL, " internal-local"),
            (Service::EXTERNAL_LOCAL, " external-local"),
            (Service::HAS_ENDPOINTS, " has-endpoints"),
            (Service::SOURCE_RANGES, " source-ranges"),
            (Service::REDIRECTED, " redirected"),
            (Service::SPARES_PODS, " spares-pods"),
            (Service::SPARES_NODE, " spares-node"),
            (Service::WEIGHTED, " weighted"),
            (Service::FAILS_OVER, " fails-over"),
            (Service::ENDS_LOST, " ends-lost"),
            (Service::ELSE_PASSES, " else-passes"),
            (Service::HANDS_OVER, " hands-over"),
        ];
        for (_, name) in flags.into_iter().filter(|(flag, _)| service.has(*flag)) {
            f.write_str(name)?;
        }
        match service.algorithm.known() {
            Some(Choice::Random) => {}
            Some(Choice::Maglev) => f.write_str(" maglev")?,
            Some(Choice::RoundRobin) => f.write_str(" round-robin")?,
            Some(Choice::LeastConnections) => f.write_str(" least-connections")?,
            None => write!(f, " {:?}", service.algorithm)?,
        }
        if service.affinity_secs > 0 {
            write!(f, " affinity={}s", service.affinity_secs)
        } else {
            Ok(())
        }
    }
}

impl<A: Addr> fmt::Display for BackendText<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(backend) = self;
        let at = SocketAddr::new(backend.addr.ip(), backend.port.get());
        write!(f, "{at}{}", if backend.is_local() { " local" } else { "" })?;
        if backend.is_tunnelled() {
            f.write_str(" tunnelled")?;
        }
        if backend.weight() > 1 {
            write!(f, " weight={}", backend.weight())
        } else {
            Ok(())
        }
    }
}

impl fmt::Display for EndpointText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(endpoint) = self;
        for set in Set::ALL.into_iter().filter(|set| endpoint.is_in(*set)) {
            write!(f, " in-{}", set_name(set))?;
        }
        f.write_str(if endpoint.is_local() { " local" } else { "" })
    }
}

impl fmt::Display for MaglevText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(maglev) = self;
        let slots = maglev.slots.iter().collect::<BTreeSet<_>>().len();
        // FNV-1a.
        let fold = |sum: u32, slot: &u16| (sum ^ u32::from(*slot)).wrapping_mul(0x0100_0193);
        let sum = maglev.slots.iter().fold(0x811c_9dc5, fold);
        write!(f, "{slots} slots {sum:08x}")
    }
}

impl<A: Addr> fmt::Display for RangeText<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(RangeKey { range, bits }) = self;
        write!(
            f,
            "{}/{}",
            range.addr.ip(),
            i64::from(*bits) - i64::from(SourceRange::<A>::SERVICE_BITS)
        )
    }
}
