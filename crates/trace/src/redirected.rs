//! Explains packets to an address of a local redirect that belongs to no Service.

use proxy_common::addr::Addr;
use proxy_common::frontend::{FrontendKey, Service, Set};

use crate::input::TraceInput;
use crate::report::{Frontend, FrontendKind};

/// The explanation of a packet that is redirected to a pod of this node.
pub(crate) const TAKEN: &str = "a pod of this node, by a local redirect of this address";
/// The explanation if pods of this node serve the address, and the redirect excludes the client.
pub(crate) const SPARED: &str = "a local redirect takes this address from pods of this node alone, and not from those that it spares";
/// The explanation if no pod of this node serves the address.
pub(crate) const NO_POD: &str =
    "a local redirect takes this address, but no pod of this node serves it now";

/// Returns the Service that represents a local redirect of this address and port.
pub(crate) fn service<'a, A: Addr>(
    input: &'a TraceInput<A>,
    dialled: &FrontendKey<A>,
) -> Option<&'a Service> {
    input
        .tables
        .services
        .get(dialled)
        .filter(|service| service.has(Service::ELSE_PASSES))
}

/// Returns true if pods of this node serve the redirected address.
pub(crate) fn has_pods(service: &Service) -> bool {
    service.count(Set::LOCAL) > 0
}

pub(crate) fn frontend<A: Addr>(dialled: &FrontendKey<A>) -> Frontend {
    Frontend {
        at: format!("{dialled:?}"),
        kind: FrontendKind::Redirected,
    }
}
