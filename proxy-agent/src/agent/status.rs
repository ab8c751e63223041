//! Collects the agent's state for `kpx status`.

use std::collections::BTreeMap;

use anyhow::Result;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::names;

use super::Agent;
use super::skipped::not_taken;
use proxy_metrics::{MapFill, old_event_name, old_map_name};

use crate::config::choice;
use crate::control::Query;
use crate::node::{Node, why_cut_off};
use crate::tunnel::Tunnelled;
use proxy_core::desired::{Desired, FamilyCounts};
use proxy_core::model::{Cause, NodeModel, algorithm_name};
use proxy_dns::Known;
use proxy_net::{self as net, role::Role};
use proxy_source::health::{Problem, Problems, Reason};
use proxy_view::status::{
    CutOffPortStatus, CutOffStatus, DeviceStatus, FlowStatus, OptionsStatus, ProblemStatus, Status,
    TableStatus, UnheardStatus, UnreachableStatus,
};

/// The approximate number of Services and slices in one answer. A change waits for at most one
/// answer.
const PART: usize = 512;

impl Agent {
    /// Answers a query, or keeps it until the node is back. The client may be gone.
    pub(super) fn answer(&mut self, query: Query, source_problems: &Problems) {
        match (query, self.node.here()) {
            (query, _) if query.is_abandoned() => {}
            (Query::Status(answer), Some(node)) => {
                drop(answer.send(self.status(node, source_problems)))
            }
            (Query::Readings(answer), Some(node)) => {
                drop(answer.send(self.readings(node, source_problems.len())))
            }
            (Query::Known(wanted, answer), _) => {
                let known = || Known::of(self.desired.store(), &wanted);
                drop(answer.send(self.desired.is_complete().then(known)));
            }
            (Query::Tunnelled(service, answer), _) => {
                let found = self.desired.tunnelled(service);
                drop(answer.send(found.map(|(service, pods)| Tunnelled {
                    service: service.clone(),
                    pods: pods.to_vec(),
                })));
            }
            (Query::Maps(answer), _) => drop(answer.send(self.loaded.maps.clone())),
            (Query::Services(after, answer), _) => {
                let part = self.desired.snapshot_part(after.as_ref(), PART);
                drop(answer.send((part, self.sweeper.flows())));
            }
            (query @ (Query::Status(_) | Query::Readings(_)), None) => {
                self.node.keep_waiting(query)
            }
        }
    }

    pub(super) fn status(&self, node: &Node, source_problems: &Problems) -> Result<Status> {
        let counts = self.desired.counts();
        let problems = self.reports.health.problems();
        let devices = node
            .attachments()
            .devices()
            .iter()
            .map(|(ifindex, attached)| DeviceStatus {
                name: attached.name.clone(),
                ifindex: *ifindex,
                attached_by: attached.mechanism.to_string(),
                role: role_name(node, *ifindex).to_owned(),
                no_pod: node.why_no_pod(*ifindex),
            });
        let flows = self.sweeper.last().iter().map(|(family, swept)| {
            (
                (*family).to_owned(),
                FlowStatus {
                    flows: swept.flows,
                    open: swept.open,
                    entries: swept.entries,
                },
            )
        });
        let refused = self
            .desired
            .skipped()
            .filter(|skipped| skipped.cause != Cause::NotTaken);
        let skipped = refused.chain(node.left_out()).chain(&self.pods.bad);
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: self.started,
            mode: self.mode.to_string(),
            node_name: self.node_name.clone(),
            node_addresses: node.addresses(),
            network_namespace: net::namespace().ok().map(|name| name.display().to_string()),
            options: options_status(node, self.desired.node()),
            healthy: self.passes.has_synced && node.knows_devices() && problems.is_empty(),
            complete: self.desired.is_complete(),
            unheard: unheard(source_problems),
            api_server: self.outside.api_server.clone(),
            last_sync: self.passes.last_change,
            syncs: self.passes.changing,
            problems: problem_status(&problems)
                .into_iter()
                .chain(problem_status(source_problems))
                .collect(),
            skipped: skipped.map(ToString::to_string).collect(),
            unreachable: unreachable_status(&self.desired),
            cut_off: cut_off_status(&self.desired),
            cut_off_ports: cut_off_ports_status(&self.desired),
            silent_backends: self.silent_status(),
            notices: self.all_notices(node),
            devices: devices.collect(),
            names: self
                .outside
                .names
                .as_ref()
                .map(|names| names.borrow().clone()),
            tunnel: self
                .outside
                .tunnel
                .as_ref()
                .map(|tunnel| tunnel.borrow().clone()),
            sockets: node.attachments().sockets_status(),
            pods: self.pods_status(node),
            kept_by: self.persistence_kind().name().to_owned(),
            tables: BTreeMap::from([
                (Addr4::FAMILY.to_owned(), table_status(counts.v4)),
                (Addr6::FAMILY.to_owned(), table_status(counts.v6)),
            ]),
            flows: flows.collect(),
            events: self
                .counters
                .events()?
                .into_iter()
                .flat_map(|(event, count)| {
                    let names = [Some(event.name()), old_event_name(event.name())];
                    names
                        .into_iter()
                        .flatten()
                        .map(move |name| (name.to_owned(), count))
                })
                .collect(),
            reasons: self
                .counters
                .reasons()?
                .into_iter()
                .map(|(reason, count)| (reason.name().to_owned(), count))
                .collect(),
            maps: self.loaded.maps.clone(),
            map_fill: self.map_fill(),
            programs: self.loaded.programs.clone(),
        })
    }

    fn all_notices(&self, node: &Node) -> Vec<String> {
        let of_the_host = node
            .options()
            .notices
            .iter()
            .chain(node.refusals())
            .chain(self.notices.texts())
            .cloned();
        of_the_host.chain(not_taken(&self.desired)).collect()
    }

    /// Returns the fill of each map without reading the maps: from the tables for the maps that the
    /// agent fills, and from the last sweep for flows.
    pub(super) fn map_fill(&self) -> BTreeMap<String, MapFill> {
        let mut entries = self.desired.tables().sizes();
        for (maps, family) in [(names::IPV4, Addr4::FAMILY), (names::IPV6, Addr6::FAMILY)] {
            if let Some(swept) = self.sweeper.last().get(family) {
                entries.extend([
                    (maps.flows, swept.entries),
                    (maps.half_open, swept.half_open),
                ]);
            }
        }
        let fill = |(name, max_entries): (&String, &u32)| {
            let entries = entries.get(name.as_str()).map(|entries| *entries as u64);
            (
                name.clone(),
                MapFill {
                    entries,
                    max_entries: u64::from(*max_entries),
                },
            )
        };
        let mut fills: BTreeMap<_, _> = self.loaded.max_entries.iter().map(fill).collect();
        let old = |(name, fill): (&String, &MapFill)| Some((old_map_name(name)?.to_owned(), *fill));
        let old: Vec<_> = fills.iter().filter_map(old).collect();
        fills.extend(old);
        fills
    }
}

fn options_status(node: &Node, model: &NodeModel) -> OptionsStatus {
    let options = node.options();
    OptionsStatus {
        masquerade: options.masquerade.to_string(),
        masquerade_all: options.masquerade_all,
        local_pods: options.detector.to_string(),
        node_port_addresses: options.node_ports.to_string(),
        localhost_node_ports: options.localhosts(),
        cluster_ip_external: options.cluster_ip_external,
        algorithm: algorithm_name(model.algorithm).to_owned(),
        fast_path: node.fast_path(),
        socket_lb: node.attachments().socket_lb(),
        pod_routes: options.pod_routing.as_ref().map(choice::name),
    }
}

pub(super) fn role_name(node: &Node, ifindex: u32) -> &'static str {
    if ifindex == node.anchor().ifindex {
        return "anchor";
    }
    role_word(node.role(ifindex), node.knows_devices())
}

/// Returns the name of a role. No device has a role before all are listed.
const fn role_word(role: Option<Role>, are_listed: bool) -> &'static str {
    match role {
        Some(Role::Device { pod: true }) => "pod",
        Some(Role::Device { pod: false }) => "device",
        Some(Role::Loopback) => "loopback",
        Some(Role::Anchor) => "anchor",
        Some(Role::Tunnel) => "tunnel",
        None if !are_listed => "unlisted",
        Some(Role::Ignored(_)) | None => "gone",
    }
}

/// Returns the kinds of objects whose watches fail, and the time of the first failure.
fn unheard(source_problems: &Problems) -> Option<UnheardStatus> {
    let watches = source_problems
        .iter()
        .filter_map(|(problem, reason)| match problem {
            Problem::Watch(kind) => Some((kind.clone(), reason.since)),
            _ => None,
        });
    let (kinds, since): (Vec<_>, Vec<_>) = watches.unzip();
    Some(UnheardStatus {
        since: since.into_iter().min()?,
        kinds,
    })
}

fn problem_status(problems: &Problems) -> Vec<ProblemStatus> {
    let status = |(problem, reason): (&Problem, &Reason)| ProblemStatus {
        what: problem.to_string(),
        why: reason.why.clone(),
        since: reason.since,
    };
    let mut problems: Vec<_> = problems.iter().map(status).collect();
    problems.sort_by(|a, b| a.what.cmp(&b.what));
    problems
}

fn cut_off_status(desired: &Desired) -> Vec<CutOffStatus> {
    let cut_off = desired.cut_off().into_iter();
    let status = cut_off.map(|(service, unreachable)| CutOffStatus {
        service: service.to_string(),
        why: why_cut_off(&unreachable),
    });
    status.collect()
}

fn cut_off_ports_status(desired: &Desired) -> Vec<CutOffPortStatus> {
    let ports = desired
        .cut_off_ports()
        .into_iter()
        .filter_map(|(service, unreachable)| {
            let first = unreachable.first()?;
            Some(CutOffPortStatus {
                service: service.to_string(),
                port: format!("{}/{}", first.port, first.proto),
                family: if first.backend.is_ipv6() {
                    Addr6::FAMILY
                } else {
                    Addr4::FAMILY
                }
                .to_owned(),
                why: why_cut_off(&unreachable),
            })
        });
    ports.collect()
}

fn unreachable_status(desired: &Desired) -> Vec<UnreachableStatus> {
    let by_service = desired.unreachable().into_iter();
    let all = by_service.flat_map(|(service, all)| all.into_iter().map(move |one| (service, one)));
    let status = all.map(|(service, one)| UnreachableStatus {
        service: service.to_string(),
        port: format!("{}/{:?}", one.port, one.proto),
        backend: one.backend,
        why: one.to_string(),
    });
    status.collect()
}

fn table_status(counts: FamilyCounts) -> TableStatus {
    TableStatus {
        services: counts.services,
        service_ports: counts.service_ports,
        frontends: counts.frontends,
        slots: counts.backends,
        backends: counts.backends,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_device_is_gone_before_all_are_listed() {
        assert_eq!(role_word(None, false), "unlisted");
        assert_eq!(role_word(None, true), "gone");
        assert_eq!(
            role_word(Some(Role::Ignored("its bridge is served")), true),
            "gone"
        );
        assert_eq!(role_word(Some(Role::Device { pod: true }), true), "pod");
    }
}
