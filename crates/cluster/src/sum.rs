//! Sums of what several nodes see of one backend, for the commands and for the page.

use proxy_view::{BackendView, UdpOutcomes};

/// Returns the sum of the outcomes that are known.
pub(crate) fn summed(sum: Option<UdpOutcomes>, one: Option<UdpOutcomes>) -> Option<UdpOutcomes> {
    sum.into_iter().chain(one).reduce(UdpOutcomes::plus)
}

/// Adds what another node sees of a backend: numbers are sums, and a set that has the backend on one
/// node has it.
pub(crate) fn add_backend(sum: &mut BackendView, backend: &BackendView) {
    sum.flows = sum.flows.saturating_add(backend.flows);
    sum.open_flows = sum.open_flows.saturating_add(backend.open_flows);
    sum.connect = sum.connect.plus(&backend.connect);
    sum.udp = summed(sum.udp, backend.udp);
    sum.in_cluster_set |= backend.in_cluster_set;
    sum.in_local_set |= backend.in_local_set;
    sum.in_redirect_set |= backend.in_redirect_set;
    sum.silent |= backend.silent;
    sum.ejected |= backend.is_ejected();
}
