//! Maintains the service routes and rules that send local processes' packets to the anchor: routes
//! for ClusterIPs in a table of their own, rules for external frontends, and the rules that select
//! the tables.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Result;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::addr::Proto;
use tracing::info;

use proxy_core::input::ObjectName;
use proxy_core::model::{Cause, ObjectRef, Skipped};
use proxy_net::Handle;
use proxy_net::route::{self, Route, Routes};
use proxy_net::rule::{self, Rule, Rules};
use proxy_source::health::{Health, Problem};

use super::Node;

/// The routes and rules, as the kernel holds them.
pub(super) struct ServiceRoutes {
    routes: Routes,
    /// The throw routes in the services' table: they end the look-up for shared networks.
    throws: Routes,
    /// The main table's routes from an earlier version of kpx.
    old: Routes,
    /// The default routes in the table of the rules. The kernel skips a rule whose table is empty.
    defaults: Routes,
    rules: Rules,
    /// The Services with external frontends that have no rule.
    left_out: Vec<Skipped>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct DesiredRoutes {
    /// One route for each known range of ClusterIPs, and one for each ClusterIP outside the ranges
    /// or in a shared network.
    routes: BTreeSet<Route>,
    /// The shared networks within a range that has a route.
    throws: BTreeSet<Route>,
    /// A default route for each family with rules.
    defaults: BTreeSet<Route>,
    /// Three rules for each family with routes, one for each external frontend except at the host's
    /// own addresses (packets to these go through lo), and the rule for replies.
    rules: BTreeSet<Rule>,
    /// The number of external frontends beyond the capacity for rules, by Service.
    left_out: BTreeMap<ObjectName, usize>,
}

/// The number of changes to routes and rules in the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RouteChanges {
    pub(super) routes: u64,
    pub(super) rules: u64,
}

/// The properties of cluster and node from which service routes and rules follow.
pub(super) struct RouteInputs<'a> {
    pub(super) service_cidrs: &'a [IpNet],
    /// The networks in these ranges that also have another use: pods or routes.
    pub(super) shared: &'a [IpNet],
    /// The served ClusterIPs outside the ranges, or in a shared network.
    pub(super) lone_addresses: &'a BTreeSet<IpAddr>,
    /// The served ExternalIPs and LoadBalancer addresses, with Service and port. The first have
    /// rules.
    pub(super) external_frontends: &'a [(ObjectName, (IpAddr, Proto, u16))],
    pub(super) own: &'a BTreeSet<IpAddr>,
    /// The node's source addresses, at most one per family.
    pub(super) primary: &'a [IpAddr],
    pub(super) has_ipv6: bool,
}

impl Node {
    /// Returns the parts of Services without a rule, because the capacity for rules is used up.
    pub fn left_out(&self) -> &[Skipped] {
        &self.routes.left_out
    }
}

impl ServiceRoutes {
    /// Reads kpx's routes and rules. `anchor` is the anchor's interface index. After a new anchor,
    /// call this again.
    pub(super) async fn open(handle: &Handle, anchor: u32) -> Result<Self> {
        let routes = Routes::open(handle.clone(), rule::SERVICES, anchor).await?;
        let throws = Routes::open_throws(handle.clone(), rule::SERVICES).await?;
        let old = Routes::open(handle.clone(), route::MAIN, anchor).await?;
        let defaults = Routes::open(handle.clone(), rule::TABLE, anchor).await?;
        Ok(Self {
            routes,
            throws,
            old,
            defaults,
            rules: Rules::open(handle.clone()).await?,
            left_out: Vec::new(),
        })
    }

    /// Makes routes and rules equal to `desired`. With `verify`, reads the kernel's state first.
    pub(super) async fn update(
        &mut self,
        desired: &DesiredRoutes,
        verify: bool,
        health: &Health,
    ) -> Result<RouteChanges> {
        // ClusterIPs in a shared network always have a route: their own routes are added before its
        // throw route, and removed after it.
        let mut reports = vec![self.throws.retain(&desired.throws).await?];
        let (routes, throws, defaults, rules) = if verify {
            let (routes, throws) = (
                self.routes.verify(&desired.routes).await?,
                self.throws.verify(&desired.throws).await?,
            );
            (
                routes,
                throws,
                self.defaults.verify(&desired.defaults).await?,
                self.rules.verify(&desired.rules).await?,
            )
        } else {
            let (routes, throws) = (
                self.routes.reconcile(&desired.routes).await?,
                self.throws.reconcile(&desired.throws).await?,
            );
            let defaults = &desired.defaults;
            let rules = &desired.rules;
            (
                routes,
                throws,
                self.defaults.reconcile(defaults).await?,
                self.rules.reconcile(rules).await?,
            )
        };
        if rules.refused.is_empty() {
            self.old.reconcile(&BTreeSet::new()).await?;
        }
        report_routes(&Problem::Routes, &routes, desired.routes.len(), health);
        report_routes(
            &Problem::DefaultRoutes,
            &defaults,
            desired.defaults.len(),
            health,
        );
        let nets: Vec<IpNet> = desired.routes.iter().map(|route| route.dst).collect();
        report_rules(&rules, desired, &self.rules.before_ours(&nets), health);
        self.left_out = desired
            .left_out
            .iter()
            .map(|(service, count)| without_rule(service, *count))
            .collect();
        let changed = |report: &route::Report| report.added + report.replaced + report.deleted;
        reports.extend([routes, throws, defaults]);
        let routes: usize = reports.iter().map(changed).sum();
        Ok(RouteChanges {
            routes: routes as u64,
            rules: (rules.added + rules.deleted) as u64,
        })
    }
}

impl DesiredRoutes {
    pub(super) fn of(inputs: &RouteInputs<'_>) -> Self {
        let is_possible = |addr: &IpAddr| inputs.has_ipv6 || addr.is_ipv4();
        let lone = inputs.lone_addresses.iter().map(|addr| IpNet::from(*addr));
        let covers = |net: &IpNet| {
            inputs
                .shared
                .iter()
                .any(|shared| shared.contains(&net.trunc()))
        };
        let ranges: Vec<IpNet> = inputs
            .service_cidrs
            .iter()
            .filter(|range| !covers(range))
            .copied()
            .collect();
        let within = |net: &&IpNet| {
            is_possible(&net.addr()) && ranges.iter().any(|range| range.contains(*net))
        };
        let throws = inputs
            .shared
            .iter()
            .filter(within)
            .map(|dst| Route {
                dst: *dst,
                src: None,
            })
            .collect();
        let dsts = ranges.iter().copied().chain(lone);
        let dsts = dsts.filter(|dst| is_possible(&dst.addr()));
        let routes: BTreeSet<Route> = dsts
            .map(|dst| Route {
                dst,
                src: inputs.source(&dst),
            })
            .collect();

        let needs_rule = |addr: &IpAddr| is_possible(addr) && !inputs.own.contains(addr);
        let mut foreign = inputs
            .external_frontends
            .iter()
            .filter(|(_, (addr, ..))| needs_rule(addr));
        let first = foreign.by_ref().take(rule::MAX);
        let mut rules: BTreeSet<Rule> = first
            .map(|&(_, (addr, proto, port))| Rule::To(addr, proto, port))
            .collect();
        let mut left_out = BTreeMap::new();
        foreign.for_each(|(service, _)| *left_out.entry(service.clone()).or_default() += 1);
        let leads_to = |all: &IpNet| {
            rules
                .iter()
                .any(|rule| matches!(rule, Rule::To(addr, ..) if all.contains(addr)))
        };
        let families = [
            IpNet::from(Ipv4Net::default()),
            IpNet::from(Ipv6Net::default()),
        ]
        .into_iter()
        .filter(leads_to);
        let defaults: BTreeSet<Route> = families
            .map(|dst| Route {
                dst,
                src: inputs.source(&dst),
            })
            .collect();
        rules.extend(
            defaults
                .iter()
                .any(|route| route.dst.addr().is_ipv4())
                .then_some(Rule::Back),
        );
        for ipv6 in [false, true] {
            let lens = routes
                .iter()
                .filter(|route| route.dst.addr().is_ipv6() == ipv6)
                .map(|route| route.dst.prefix_len());
            if let Some(prefix_len) = lens.min() {
                rules.extend([
                    Rule::Own { ipv6 },
                    Rule::Narrow { ipv6, prefix_len },
                    Rule::All { ipv6 },
                ]);
            }
        }
        Self {
            routes,
            throws,
            defaults,
            rules,
            left_out,
        }
    }
}

impl RouteInputs<'_> {
    /// Returns the node's address if a device has it: the kernel refuses other source addresses.
    fn source(&self, dst: &IpNet) -> Option<IpAddr> {
        let mut addrs = self
            .primary
            .iter()
            .filter(|addr| addr.is_ipv4() == dst.addr().is_ipv4());
        addrs.find(|addr| self.own.contains(addr)).copied()
    }
}

fn report_routes(what: &Problem, report: &route::Report, wanted: usize, health: &Health) {
    match report.refused.first() {
        None => health.end(what),
        Some((route, why)) => {
            health.begin(
                what,
                format!(
                    "{} of {wanted} refused, first {}: {why}",
                    report.refused.len(),
                    route.dst
                ),
            );
        }
    }
    if report.added + report.replaced + report.deleted > 0 {
        let added = report.added;
        let replaced = report.replaced;
        let deleted = report.deleted;
        info!(added, replaced, deleted, "{what}");
    }
}

fn report_rules(
    report: &rule::Report,
    desired: &DesiredRoutes,
    before: &[String],
    health: &Health,
) {
    match report.refused.first() {
        None if !before.is_empty() => {
            let rules = before.join(", ");
            let why = format!(
                "{rules} precede kpx's rules and may divert this host's packets to ClusterIPs"
            );
            health.begin(&Problem::Rules, why);
        }
        None => health.end(&Problem::Rules),
        Some((rule, why)) => {
            let refused = report.refused.len();
            let wanted = desired.rules.len();
            health.begin(
                &Problem::Rules,
                format!("{refused} of {wanted} refused, first the one {rule}: {why}"),
            );
        }
    }
    if report.added + report.deleted > 0 {
        info!(added = report.added, deleted = report.deleted, "rules");
    }
}

fn without_rule(service: &ObjectName, count: usize) -> Skipped {
    let why = format!(
        "this host's own sockets reach {count} external frontends only through the network, because there are {} rules at most for all Services",
        rule::MAX
    );
    let object = ObjectRef {
        kind: "Service",
        name: service.clone(),
    };
    Skipped {
        object,
        field: "spec.ports".to_owned(),
        why,
        cause: Cause::NoRoom,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_cover_ranges_and_lone_addresses() {
        let node = Node {
            service_cidrs: vec![
                "10.96.0.0/16".parse().unwrap(),
                "fd00:10::/108".parse().unwrap(),
            ],
            lone_addresses: addrs(&["10.97.0.10", "fd00:11::a"]),
            ..Node::default()
        };
        let routes = [
            "10.96.0.0/16 192.0.2.1",
            "10.97.0.10/32 192.0.2.1",
            "fd00:10::/108 -",
            "fd00:11::a/128 -",
        ];
        assert_eq!(shown(&node.desired().routes), routes);
        let of = |(ipv6, prefix_len)| {
            [
                Rule::Own { ipv6 },
                Rule::Narrow { ipv6, prefix_len },
                Rule::All { ipv6 },
            ]
        };
        let rules = [(false, 16), (true, 108)]
            .into_iter()
            .flat_map(of)
            .collect();
        assert_eq!(
            node.desired(),
            DesiredRoutes {
                routes: node.desired().routes,
                rules,
                ..DesiredRoutes::default()
            }
        );
    }

    #[test]
    fn networks_of_others_in_a_range_are_left_to_them() {
        let node = Node {
            service_cidrs: vec![
                "10.96.0.0/16".parse().unwrap(),
                "fd00:10::/108".parse().unwrap(),
            ],
            shared: vec![
                "10.96.3.0/24".parse().unwrap(),
                "fd00:10::/108".parse().unwrap(),
            ],
            lone_addresses: addrs(&["10.96.3.10", "fd00:10::a"]),
            ..Node::default()
        };
        let desired = node.desired();
        assert_eq!(
            shown(&desired.routes),
            [
                "10.96.0.0/16 192.0.2.1",
                "10.96.3.10/32 192.0.2.1",
                "fd00:10::a/128 -"
            ]
        );
        assert_eq!(
            shown(&desired.throws),
            ["10.96.3.0/24 -"],
            "the other has no range around it"
        );
    }

    #[test]
    fn rules_cover_foreign_frontends_with_a_default_route() {
        let frontends = |texts: &[&str]| {
            texts
                .iter()
                .map(|addr| (web(), (addr.parse().unwrap(), Proto::TCP, 80)))
                .collect::<Vec<_>>()
        };
        let external_frontends = frontends(&["198.51.100.7", "192.0.2.9", "2001:db8::7"]);
        let node = Node {
            external_frontends,
            ..Node::default()
        };
        let rules: Vec<String> = node.desired().rules.iter().map(Rule::to_string).collect();
        assert_eq!(
            rules,
            [
                "to 198.51.100.7:80/tcp",
                "to [2001:db8::7]:80/tcp",
                "of the way back"
            ]
        );
        assert_eq!(
            shown(&node.desired().defaults),
            ["0.0.0.0/0 192.0.2.1", "::/0 -"]
        );

        let node = Node {
            has_ipv6: false,
            ..node
        };
        assert_eq!(shown(&node.desired().defaults), ["0.0.0.0/0 192.0.2.1"]);
        assert_eq!(node.desired().rules.len(), 2);

        let node = Node {
            external_frontends: frontends(&["2001:db8::7"]),
            ..Node::default()
        };
        assert_eq!(node.desired().rules.len(), 1, "IPv6 has no rp_filter");

        let node = Node {
            external_frontends: frontends(&["192.0.2.9"]),
            ..Node::default()
        };
        assert_eq!(node.desired(), DesiredRoutes::default());
    }

    #[test]
    fn the_number_of_rules_is_limited() {
        for (frontends, left_out) in [(256, 0), (300, 44)] {
            let addr = "198.51.100.7".parse().unwrap();
            let external_frontends = (1..=frontends)
                .map(|port| (web(), (addr, Proto::UDP, port)))
                .collect();
            let desired = Node {
                external_frontends,
                ..Node::default()
            }
            .desired();
            let first = (1..=256)
                .map(|port| Rule::To(addr, Proto::UDP, port))
                .chain([Rule::Back]);
            assert_eq!(desired.rules, first.collect(), "always the same ones");
            assert_eq!(desired.left_out.values().sum::<usize>(), left_out);
        }
    }

    #[test]
    fn first_frontends_get_the_rules() {
        let addr = |last: u8| IpAddr::from([198, 51, 100, last]);
        let first = (1..=256).map(|port| (addr(200), Proto::TCP, port));
        let last = (ObjectName::new("shop", "late"), (addr(1), Proto::TCP, 80));
        let external_frontends = first
            .map(|frontend| (web(), frontend))
            .chain([last.clone()])
            .collect();
        let desired = Node {
            external_frontends,
            ..Node::default()
        }
        .desired();
        assert!(!desired.rules.contains(&Rule::To(addr(1), Proto::TCP, 80)));
        assert_eq!(
            desired.left_out,
            BTreeMap::from([(last.0, 1)]),
            "it is the Service's matter"
        );
    }

    struct Node {
        service_cidrs: Vec<IpNet>,
        shared: Vec<IpNet>,
        lone_addresses: BTreeSet<IpAddr>,
        external_frontends: Vec<(ObjectName, (IpAddr, Proto, u16))>,
        own: BTreeSet<IpAddr>,
        primary: Vec<IpAddr>,
        has_ipv6: bool,
    }

    impl Default for Node {
        /// Returns a node whose IPv6 address is on no device.
        fn default() -> Self {
            Self {
                service_cidrs: Vec::new(),
                shared: Vec::new(),
                lone_addresses: BTreeSet::new(),
                external_frontends: Vec::new(),
                own: addrs(&["192.0.2.1", "192.0.2.9"]),
                primary: addrs(&["192.0.2.1", "fd00::1"]).into_iter().collect(),
                has_ipv6: true,
            }
        }
    }

    impl Node {
        fn desired(&self) -> DesiredRoutes {
            DesiredRoutes::of(&RouteInputs {
                service_cidrs: &self.service_cidrs,
                shared: &self.shared,
                lone_addresses: &self.lone_addresses,
                external_frontends: &self.external_frontends,
                own: &self.own,
                primary: &self.primary,
                has_ipv6: self.has_ipv6,
            })
        }
    }

    fn web() -> ObjectName {
        ObjectName::new("shop", "web")
    }

    fn addrs(texts: &[&str]) -> BTreeSet<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn shown(routes: &BTreeSet<Route>) -> Vec<String> {
        let source = |route: &Route| route.src.map_or("-".to_owned(), |src| src.to_string());
        routes
            .iter()
            .map(|route| format!("{} {}", route.dst, source(route)))
            .collect()
    }
}
