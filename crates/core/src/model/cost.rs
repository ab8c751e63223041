//! Bounds on the cost of one Service in a pass, and an estimate of it from the objects' sizes
//! alone.

use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::frontend::Algorithm;

use super::policy::algorithm;
use super::read::Reader;
use super::{ModelOptions, cluster_ips};
use crate::compact::{Service, WEIGHTS};
use crate::input::ObjectName;
use crate::store::Store;

/// The maximum number of a Service's external frontends. One object can hold 60,000 addresses, and
/// each port multiplies them.
const EXTERNALS: usize = 8_192;
/// The maximum number of a Service's look-up tables in a family.
pub(super) const TABLES_OF_SERVICE: usize = 2_048;

/// The cost of an external frontend and of a look-up table, in slots.
const EXTERNAL: usize = 8;
const TABLE: usize = 32;

/// Returns the maximum number of a Service's external addresses.
pub(super) fn externals_of(service: &Service) -> usize {
    EXTERNALS / service.ports.len().max(1)
}

/// Reports a Service with more external addresses than [`externals_of`] permits.
pub(super) fn report_externals(reader: &mut Reader<'_>, service: &Service) {
    let given = service.ingress.len() + service.external_ips.len();
    let most = externals_of(service);
    if given > most {
        let ports = service.ports.len();
        let why = format!(
            "of {given} external addresses only the first {most} are served: with {ports} ports a Service has no more"
        );
        reader.no_room(format_args!("spec.externalIPs"), why);
    }
}

pub(super) fn report_without_tables(reader: &mut Reader<'_>, ports: usize) {
    if ports > 0 {
        let why = format!(
            "{ports} ports are served without weights and Maglev tables, of which a Service has {TABLES_OF_SERVICE} at most"
        );
        reader.no_room(format_args!("metadata.annotations[{WEIGHTS}]"), why);
    }
}

/// Returns an upper bound of a Service's rows in both families, in slots.
pub(crate) fn rows_at_most(store: &Store, name: &ObjectName, options: &ModelOptions) -> usize {
    let room = options.room.slots();
    let Some(service) = store.service(name) else {
        return 0;
    };
    let ports = service.ports.len();
    let given = service.ingress.len() + service.external_ips.len();
    let externals = ports * given.min(externals_of(service));
    let ranges = ports
        .saturating_mul(service.load_balancer_source_ranges.len())
        .min(room);
    let asked = service
        .algorithm
        .as_deref()
        .and_then(|name| algorithm(name).ok());
    let is_weighted =
        service.weights.is_some() || store.slices_of(name).any(|slice| slice.weight.is_some());
    let has_tables = is_weighted || asked.unwrap_or(options.algorithm) == Algorithm::MAGLEV;
    // The set of external clients that are handed over has a table, and two slots for an endpoint.
    let has_direct = options.able.is_able();
    let sets = 2 * usize::from(has_tables) + usize::from(has_direct);
    let tables = (sets * ports).min(TABLES_OF_SERVICE) * cluster_ips(service).count();
    let slots = |family: &str| {
        let slices = store
            .slices_of(name)
            .filter(|slice| *slice.address_type == *family);
        let endpoints: usize = slices.map(|slice| slice.endpoints.len()).sum();
        let slots = endpoints * (1 + 2 * usize::from(has_direct));
        endpoints + ports.saturating_mul(slots).min(room)
    };
    ports
        + externals * EXTERNAL
        + ranges
        + tables * TABLE
        + slots(Addr4::FAMILY)
        + slots(Addr6::FAMILY)
}
