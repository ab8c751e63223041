//! One port of a Service, with its backends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proxy_common::addr::{Addr, Port, SockAddr};
use proxy_common::frontend::{Algorithm, Backend, Endpoint, MAGLEV_PLACES, Maglev, Service, Set};

use super::endpoints::{Joined, UsedSets};
use super::handover::AbleNodes;
use super::places;
use super::read::Reader;
use super::redirect::RedirectedPort;
use crate::compact::WEIGHTS;
use crate::health::{HealthMode, ServiceHealth};
use crate::loss::Placed;
use crate::room::Rows;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort<A: Addr> {
    pub service: Service,
    /// The backends of each set, sorted by address and port, at most 65,535. Empty if no
    /// frontend uses the set.
    pub cluster: Vec<Backend<A>>,
    pub local: Vec<Backend<A>>,
    pub health: HealthMode,
    /// The silent backends that a set omits.
    pub ejected: Vec<SockAddr<A>>,
    /// The look-up tables of the nonempty sets, for Maglev, or if weights differ.
    pub maglev: Vec<(Set, Arc<Maglev>)>,
    /// Set if the maps have no space for these tables.
    pub lacks_tables: bool,
    /// The serving endpoints, if packets of open flows look them up.
    pub endpoints: Vec<(SockAddr<A>, Endpoint)>,
    /// The endpoints on other nodes, if connections to lost nodes are reset.
    pub placed: Option<PlacedEndpoints<A>>,
    /// The endpoints for external clients that are handed over.
    pub direct: Option<Box<Direct<A>>>,
}

/// The backends of [`Set::DIRECT`], at most [`MAGLEV_PLACES`], and for each the slot of
/// [`Set::NODES`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Direct<A: Addr> {
    pub backends: Box<[Backend<A>]>,
    pub nodes: Box<[Backend<A>]>,
}

/// Endpoints by address and port, with node and state.
pub(super) type PlacedEndpoints<A> = Box<[(SockAddr<A>, Placed)]>;

/// The Service's settings for one of its ports.
#[derive(Clone, Copy)]
pub(super) struct PortPolicy {
    /// The service row without backends.
    pub(super) service: Service,
    pub(super) used_sets: UsedSets,
    /// Set if packets of open flows look up the endpoints.
    pub(super) remembers: bool,
    /// Set if connections to lost nodes are reset.
    pub(super) resets: bool,
    /// Set if external clients are handed over.
    pub(super) hands_over: bool,
    /// Set if the maps have space for look-up tables.
    pub(super) has_tables: bool,
}

/// The maximum number of slots that a `Service` row can count.
pub(super) const SLOTS_MAX: usize = u16::MAX as usize;

impl<A: Addr> ServicePort<A> {
    pub(super) fn new(
        reader: &mut Reader<'_>,
        index: usize,
        port_policy: PortPolicy,
        endpoints: &Joined<'_, A>,
        redirected: Option<&RedirectedPort<A>>,
        health: ServiceHealth<'_>,
        able: &AbleNodes,
    ) -> Self {
        let PortPolicy {
            service,
            used_sets,
            remembers,
            resets,
            hands_over,
            has_tables,
        } = port_policy;
        let mut sets = endpoints.select(used_sets);
        if let Some(redirected) = redirected {
            // `Redirect::of` refuses Services with a policy `Local`, so the set is free.
            (sets.local, sets.has_endpoints) = (redirected.backends.clone(), true);
        }
        let most = if service.algorithm == Algorithm::MAGLEV {
            MAGLEV_PLACES
        } else {
            SLOTS_MAX
        };
        for (name, set) in [("cluster", &mut sets.cluster), ("local", &mut sets.local)] {
            if set.len() > most {
                let why = format!(
                    "of {} backends in the {name} set only the first {most} serve",
                    set.len()
                );
                reader.skip(format_args!("spec.ports[{index}]"), why);
                set.truncate(most);
            }
        }
        let fails_over = health.fails_over(&sets.cluster, &sets.local);
        let mut ejected = health.take_silent(&mut sets.cluster);
        // The pods of a redirect are on this node and stay.
        if redirected.is_none() {
            ejected.extend(health.take_silent(&mut sets.local));
        }
        // A backend that another set keeps still takes flows.
        let place = |backend: &Backend<A>| SockAddr::new(backend.addr, backend.port);
        ejected.retain(|at| {
            [&sets.cluster, &sets.local]
                .iter()
                .all(|set| set.binary_search_by_key(at, place).is_err())
        });
        ejected.sort_unstable();
        ejected.dedup();
        let count = |set: &[Backend<A>]| u16::try_from(set.len()).expect("cut to 65,535 above");
        let is_weighted = settle_weights(reader, [&mut sets.cluster, &mut sets.local]);
        // Without this flag, a UDP flow would stay with a deleted pod, because no endpoint could
        // take it over.
        let has_endpoints = sets.has_endpoints || service.has(Service::ELSE_PASSES);
        let flags = service.flags()
            | flag(has_endpoints, Service::HAS_ENDPOINTS)
            | flag(is_weighted, Service::WEIGHTED)
            | flag(fails_over, Service::FAILS_OVER)
            | flag(resets, Service::ENDS_LOST)
            | redirected.map_or(0, |redirected| redirected.flags);
        let mut port = Self {
            service: Service::new(count(&sets.cluster), count(&sets.local), flags)
                .with_algorithm(service.algorithm)
                .with_affinity(service.affinity_secs),
            cluster: sets.cluster,
            local: sets.local,
            health: health.mode,
            ejected,
            maglev: Vec::new(),
            lacks_tables: false,
            endpoints: Vec::new(),
            placed: resets.then(|| endpoints.placed().collect()),
            direct: None,
        };
        if service.algorithm == Algorithm::MAGLEV || is_weighted {
            if has_tables {
                let table = |set| {
                    Some((
                        set,
                        Arc::new(places::table(service.algorithm, port.backends(set))?),
                    ))
                };
                port.maglev = Set::ALL.into_iter().filter_map(table).collect();
            } else {
                (port.service, port.lacks_tables) = (port.plain(), true);
            }
        }
        if hands_over && !port.lacks_tables {
            port.hand_over(reader, index, endpoints.direct(able), has_tables);
        }
        // These lists live long in most ports.
        port.cluster.shrink_to_fit();
        port.local.shrink_to_fit();
        if remembers {
            port.endpoints = endpoints
                .serving()
                .map(|(at, local)| (at, port.endpoint(at, local)))
                .collect();
        }
        if let Some(redirected) = redirected {
            port.endpoints = port.with_redirected(remembers, &redirected.spared);
        }
        port
    }

    /// Returns the endpoint rows, with a redirect's pods, which may not be endpoints of the
    /// Service.
    fn with_redirected(
        &self,
        remembers: bool,
        spared: &BTreeSet<A>,
    ) -> Vec<(SockAddr<A>, Endpoint)> {
        let backends = self
            .local
            .iter()
            .filter(|_| remembers)
            .map(|backend| SockAddr::new(backend.addr, backend.port));
        let backends = backends.map(|at| (at, self.endpoint(at, true)));
        // Port 0 stands for the address alone: see `EndpointKey::spared`.
        let spared = spared.iter().map(|pod| {
            (
                SockAddr::new(*pod, Port::ANY),
                Endpoint::new(Endpoint::LOCAL),
            )
        });
        let rows: BTreeMap<_, _> = self
            .endpoints
            .iter()
            .copied()
            .chain(backends)
            .chain(spared)
            .collect();
        rows.into_iter().collect()
    }

    /// Adds the set of external clients that are handed over. Without a ready endpoint they use the
    /// set of all clients, which then has the endpoints that terminate.
    fn hand_over(
        &mut self,
        reader: &mut Reader<'_>,
        index: usize,
        direct: Direct<A>,
        has_tables: bool,
    ) {
        let count = direct.backends.len();
        if count > MAGLEV_PLACES {
            let why = format!(
                "{count} backends: clients outside are masqueraded, because at most {MAGLEV_PLACES} backends see their addresses"
            );
            reader.skip(format_args!("spec.ports[{index}]"), why);
            return;
        }
        if !has_tables {
            self.lacks_tables |= count > 0;
            return;
        }
        if let Some(table) = places::table(Algorithm::MAGLEV, &direct.backends) {
            self.maglev.push((Set::DIRECT, Arc::new(table)));
            self.service = self.service.with(Service::HANDS_OVER);
            self.direct = Some(Box::new(direct));
        }
    }

    /// Returns the service row without look-up tables: equal weights, and random instead of Maglev.
    pub(crate) fn plain(&self) -> Service {
        let Service {
            algorithm,
            affinity_secs,
            ..
        } = self.service;
        let counts = [Set::CLUSTER, Set::LOCAL].map(|set| self.service.count(set));
        let algorithm = if algorithm == Algorithm::MAGLEV {
            Algorithm::RANDOM
        } else {
            algorithm
        };
        Service::new(
            counts[0],
            counts[1],
            self.service.flags() & !(Service::WEIGHTED | Service::HANDS_OVER),
        )
        .with_algorithm(algorithm)
        .with_affinity(affinity_secs)
    }

    /// Returns the port's rows, without frontends and source ranges.
    pub(crate) fn rows(&self) -> Rows {
        let direct = self
            .direct
            .as_ref()
            .map_or(0, |direct| direct.backends.len() + direct.nodes.len());
        let slots = self.cluster.len() + self.local.len() + direct;
        [0, 1, slots, self.endpoints.len(), self.maglev.len(), 0]
    }

    pub fn backends(&self, set: Set) -> &[Backend<A>] {
        if set == Set::LOCAL {
            &self.local
        } else {
            &self.cluster
        }
    }

    fn endpoint(&self, at: SockAddr<A>, local: bool) -> Endpoint {
        let place = |backend: &Backend<A>| SockAddr::new(backend.addr, backend.port);
        let is_in = |set| self.backends(set).binary_search_by_key(&at, place).is_ok();
        Endpoint::new(
            flag(is_in(Set::CLUSTER), Endpoint::IN_CLUSTER_SET)
                | flag(is_in(Set::LOCAL), Endpoint::IN_LOCAL_SET)
                | flag(local, Endpoint::LOCAL),
        )
    }
}

fn flag<T: Default>(is_set: bool, flag: T) -> T {
    if is_set { flag } else { T::default() }
}

/// Returns true if the backends of a set differ in weight. Clears equal weights, and all weights if
/// the backends outnumber the entries.
fn settle_weights<A: Addr>(reader: &mut Reader<'_>, sets: [&mut Vec<Backend<A>>; 2]) -> bool {
    let differ = |set: &[Backend<A>]| set.windows(2).any(|two| two[0].weight() != two[1].weight());
    let is_weighted = sets.iter().any(|set| differ(set));
    let most = sets.iter().map(|set| set.len()).max().unwrap_or_default();
    if is_weighted && most > MAGLEV_PLACES {
        let why = format!("{most} backends serve alike: weights are for at most {MAGLEV_PLACES}");
        reader.skip(format_args!("metadata.annotations[{WEIGHTS}]"), why);
    }
    let counts = is_weighted && most <= MAGLEV_PLACES;
    if !counts {
        sets.into_iter()
            .flatten()
            .for_each(|backend| *backend = backend.with_weight(1));
    }
    counts
}
