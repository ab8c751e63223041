//! The external addresses of a Service, and the clients allowed to dial them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::addr::Addr;
use proxy_common::frontend::FrontendKind;

use super::cost::{externals_of, report_externals};
use super::guard::Guard;
use super::node::NodeModel;
use super::read::{Reader, addr, cidr, ip};
use crate::compact::Service;

/// An address at which clients dial all ports of a Service.
pub(super) struct External<A: Addr> {
    pub(super) addr: A,
    pub(super) kind: FrontendKind,
    /// The Service field that holds the address.
    pub(super) field: String,
}

/// Returns the external addresses of the family. An ExternalIP that is also a load balancer address
/// counts as the latter, which has stricter rules.
pub(super) fn externals<A: Addr>(
    reader: &mut Reader<'_>,
    service: &Service,
    cluster_ip: A,
    guard: &Guard,
) -> Vec<External<A>> {
    let mut externals = Vec::new();
    let mut read = |kind, field: String, text: &str| {
        if let Some(addr) = of_family(text) {
            let own = || format!("{text:?} is the Service's own ClusterIP");
            let addr = addr.and_then(|addr| {
                if addr == cluster_ip {
                    Err(own())
                } else {
                    Ok(addr)
                }
            });
            let addr = reader.take(format_args!("{field}"), addr);
            let addr = addr.filter(|addr| {
                reader.admit(format_args!("{field}"), guard.admit_address(*addr, kind))
            });
            let addr = addr.filter(|addr: &A| {
                reader.take_address(format_args!("{field}"), guard.takes(addr.ip()))
            });
            externals.extend(addr.map(|addr| External { addr, kind, field }));
        }
    };
    let most = externals_of(service);
    for (index, ingress) in service.ingress.iter().enumerate().take(most) {
        // With `ipMode: Proxy` the load balancer must process all traffic, even from inside the
        // cluster.
        let is_ours = matches!(ingress.ip_mode.as_deref(), None | Some("VIP"));
        if let Some(text) = ingress.ip.as_deref().filter(|ip| is_ours && !ip.is_empty()) {
            read(
                FrontendKind::LOAD_BALANCER,
                format!("status.loadBalancer.ingress[{index}].ip"),
                text,
            );
        }
    }
    let left = most.saturating_sub(service.ingress.len());
    for (index, text) in service.external_ips.iter().enumerate().take(left) {
        read(
            FrontendKind::EXTERNAL_IP,
            format!("spec.externalIPs[{index}]"),
            text,
        );
    }
    report_externals(reader, service);
    externals
}

/// Returns the external and load balancer addresses that kpx does not translate in host mode, with
/// the reasons.
pub fn not_taken<'a>(
    service: &'a Service,
    node: &'a NodeModel,
) -> impl Iterator<Item = (IpAddr, String)> + 'a {
    let ingress = service
        .ingress
        .iter()
        .filter_map(|ingress| ingress.ip.as_deref());
    let texts = ingress.chain(service.external_ips.iter().map(AsRef::as_ref));
    texts
        .filter_map(|text| ip(text).ok())
        .filter_map(|ip| Some((ip, node.guard.takes(ip).err()?)))
}

/// Returns `None` for an address of the other family.
fn of_family<A: Addr>(text: &str) -> Option<Result<A, String>> {
    let other = ip(text).is_ok_and(|ip| A::from_ip(ip).is_none());
    (!other).then(|| addr(text))
}

/// A network address and its prefix length in bits.
pub type Range<A> = (A, u8);

/// Returns the source ranges of the load balancer addresses. Empty allows every client.
pub(super) fn source_ranges<A: Addr>(
    reader: &mut Reader<'_>,
    service: &Service,
    externals: &[External<A>],
    node: &NodeModel,
) -> BTreeSet<Range<A>> {
    let texts = service.load_balancer_source_ranges.iter().enumerate();
    // The API server accepts surrounding blanks.
    let nets = texts.filter_map(|(index, text)| {
        reader.take(
            format_args!("spec.loadBalancerSourceRanges[{index}]"),
            cidr(text.trim()),
        )
    });
    let nets: Vec<IpNet> = nets
        .filter(|net| A::from_ip(net.addr()).is_some())
        .collect();
    let vips = externals
        .iter()
        .filter(|external| external.kind == FrontendKind::LOAD_BALANCER);
    let vips: Vec<A> = vips.map(|external| external.addr).collect();
    if vips.is_empty() || nets.is_empty() {
        return BTreeSet::new();
    }
    let mut ranges: BTreeSet<Range<A>> = nets
        .iter()
        .filter_map(|net| Some((A::from_ip(net.addr())?, net.prefix_len())))
        .collect();
    // A node that dials a load balancer address on one of its own devices uses this address as the
    // source address.
    if nets
        .iter()
        .any(|net| node.primary.iter().any(|ip| net.contains(ip)))
    {
        let bits = (size_of::<A>() * 8).try_into().unwrap_or(u8::MAX);
        ranges.extend(vips.into_iter().map(|vip| (vip, bits)));
    }
    ranges
}
