//! The ways on which the host's own packets to services come to the anchor: routes to ClusterIPs, rules to external
//! frontends.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::Result;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::addr::Proto;
use tracing::info;

use super::Node;
use crate::health::{Health, Problem};
use crate::net::route::{self, Route, Routes};
use crate::net::rule::{self, Rule, Rules};
use crate::net::{Handle, sysctl};

impl Node {
    /// Makes the ways to the anchor what they should be. `verify` asks the kernel first what there is.
    pub(super) async fn update_ways(&mut self, verify: bool, health: &Health) -> Result<Changed> {
        // Not before the first sync: nothing must lead to the anchor before there is anything behind it, and what a
        // predecessor left leads to services that will be there again.
        let Some(wanted) = self.followed.wanted() else { return Ok(Changed::default()) };
        // Nor before the devices have their programs: what a pod sends would come to the anchor untranslated.
        if !self.knows_devices() {
            return Ok(Changed::default());
        }
        let given = &self.options.service_cidrs;
        let want = Want::of(&Surroundings {
            service_cidrs: if given.is_empty() { &wanted.service_cidrs } else { given },
            service_addresses: &wanted.service_addresses,
            external_frontends: &wanted.external_frontends,
            own: &self.own_addresses(),
            primary: &self.addresses(),
            has_ipv6: sysctl::has_ipv6(),
        });
        self.ways.update(&want, verify, health).await
    }
}

/// What the kernel holds of them.
pub(super) struct Ways {
    routes: Routes,
    /// Where the rules lead. One that leads to an empty table is passed over.
    defaults: Routes,
    rules: Rules,
}

/// What it should hold.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Want {
    /// One for each range of ClusterIPs that is known, and one for each ClusterIP outside of them.
    routes: BTreeSet<Route>,
    /// A default route for each family that has rules.
    defaults: BTreeSet<Route>,
    /// One for each external frontend whose address is not the host's own: to those its packets go by lo. And with them
    /// the one of the way back.
    rules: BTreeSet<Rule>,
    /// External frontends for which there is no room.
    left_out: usize,
}

/// How many of them the kernel was told to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Changed {
    pub(super) routes: u64,
    pub(super) rules: u64,
}

/// What decides about ways, of the cluster and of this node.
pub(super) struct Surroundings<'a> {
    pub(super) service_cidrs: &'a [IpNet],
    /// ClusterIPs in force.
    pub(super) service_addresses: &'a BTreeSet<IpAddr>,
    /// ExternalIPs and LoadBalancer addresses in force, with their ports.
    pub(super) external_frontends: &'a BTreeSet<(IpAddr, Proto, u16)>,
    /// The addresses of the node's devices.
    pub(super) own: &'a BTreeSet<IpAddr>,
    /// The addresses with which the node speaks, at most one a family.
    pub(super) primary: &'a [IpAddr],
    pub(super) has_ipv6: bool,
}

impl Ways {
    /// `anchor` is the anchor's interface index. If the anchor is made anew, so must this be.
    pub(super) async fn open(handle: &Handle, anchor: u32) -> Result<Self> {
        let routes = Routes::open(handle.clone(), route::MAIN, anchor).await?;
        let defaults = Routes::open(handle.clone(), rule::TABLE, anchor).await?;
        Ok(Self { routes, defaults, rules: Rules::open(handle.clone()).await? })
    }

    /// Makes them what they should be. `verify` asks the kernel first what there is.
    pub(super) async fn update(&mut self, want: &Want, verify: bool, health: &Health) -> Result<Changed> {
        let (routes, defaults, rules) = if verify {
            let routes = self.routes.verify(&want.routes).await?;
            (routes, self.defaults.verify(&want.defaults).await?, self.rules.verify(&want.rules).await?)
        } else {
            let routes = self.routes.reconcile(&want.routes).await?;
            (routes, self.defaults.reconcile(&want.defaults).await?, self.rules.reconcile(&want.rules).await?)
        };
        note_routes(&Problem::Routes, &routes, want.routes.len(), health);
        note_routes(&Problem::DefaultRoutes, &defaults, want.defaults.len(), health);
        note_rules(&rules, want, health);
        let changed = |report: &route::Report| report.added + report.replaced + report.deleted;
        let routes = changed(&routes) + changed(&defaults);
        Ok(Changed { routes: routes as u64, rules: (rules.added + rules.deleted) as u64 })
    }
}

impl Want {
    pub(super) fn of(around: &Surroundings<'_>) -> Self {
        let is_possible = |addr: &IpAddr| around.has_ipv6 || addr.is_ipv4();
        let cidrs = around.service_cidrs;
        let outside = around.service_addresses.iter().filter(|addr| !cidrs.iter().any(|cidr| cidr.contains(*addr)));
        let dsts = cidrs.iter().copied().chain(outside.map(|addr| IpNet::from(*addr)));
        let routes = dsts.filter(|dst| is_possible(&dst.addr())).map(|dst| Route { dst, src: around.source(&dst) });

        let foreign = around.external_frontends.iter().filter(|(addr, ..)| !around.own.contains(addr));
        let mut rules: BTreeSet<Rule> = foreign
            .filter(|(addr, ..)| is_possible(addr))
            .map(|&(addr, proto, port)| Rule::To(addr, proto, port))
            .collect();
        let left_out = rules.iter().nth(rule::MAX).copied().map(|first| rules.split_off(&first).len());
        let leads_to = |all: &IpNet| rules.iter().any(|rule| matches!(rule, Rule::To(addr, ..) if all.contains(addr)));
        let families = [IpNet::from(Ipv4Net::default()), IpNet::from(Ipv6Net::default())].into_iter().filter(leads_to);
        let defaults: BTreeSet<Route> = families.map(|dst| Route { dst, src: around.source(&dst) }).collect();
        rules.extend(defaults.iter().any(|route| route.dst.addr().is_ipv4()).then_some(Rule::Back));
        Self { routes: routes.collect(), defaults, rules, left_out: left_out.unwrap_or(0) }
    }
}

impl Surroundings<'_> {
    /// The node's address, if a device has it: with another the kernel would refuse the route.
    fn source(&self, dst: &IpNet) -> Option<IpAddr> {
        let mut addrs = self.primary.iter().filter(|addr| addr.is_ipv4() == dst.addr().is_ipv4());
        addrs.find(|addr| self.own.contains(addr)).copied()
    }
}

fn note_routes(what: &Problem, report: &route::Report, wanted: usize, health: &Health) {
    match report.refused.first() {
        None => health.end(what),
        Some((route, why)) => {
            health.begin(what, format!("{} of {wanted} refused, first {}: {why}", report.refused.len(), route.dst));
        }
    }
    if report.added + report.replaced + report.deleted > 0 {
        let (added, replaced, deleted) = (report.added, report.replaced, report.deleted);
        info!(added, replaced, deleted, "{what}");
    }
}

fn note_rules(report: &rule::Report, want: &Want, health: &Health) {
    match report.refused.first() {
        None => health.end(&Problem::Rules),
        Some((rule, why)) => {
            let (refused, wanted) = (report.refused.len(), want.rules.len());
            health.begin(&Problem::Rules, format!("{refused} of {wanted} refused, first the one {rule}: {why}"));
        }
    }
    match want.left_out {
        0 => health.end(&Problem::RulesNumber),
        left_out => {
            let why = format!(
                "there are {} rules at most, so this host's own sockets reach {left_out} external frontends only through the network",
                rule::MAX
            );
            health.begin(&Problem::RulesNumber, why);
        }
    }
    if report.added + report.deleted > 0 {
        info!(added = report.added, deleted = report.deleted, "rules");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_once_and_single_addresses_outside_of_them() {
        let node = Node {
            service_cidrs: vec!["10.96.0.0/16".parse().unwrap(), "fd00:10::/108".parse().unwrap()],
            service_addresses: addrs(&["10.96.0.10", "10.97.0.10", "fd00:10::a", "fd00:11::a"]),
            ..Node::default()
        };
        let routes = ["10.96.0.0/16 192.0.2.1", "10.97.0.10/32 192.0.2.1", "fd00:10::/108 -", "fd00:11::a/128 -"];
        assert_eq!(shown(&node.want().routes), routes);
        assert_eq!(node.want(), Want { routes: node.want().routes, ..Want::default() });
    }

    #[test]
    fn rules_for_what_is_not_our_own_and_a_default_route_behind_them() {
        let frontends = |texts: &[&str]| texts.iter().map(|addr| (addr.parse().unwrap(), Proto::TCP, 80)).collect();
        let external_frontends = frontends(&["198.51.100.7", "192.0.2.9", "2001:db8::7"]);
        let node = Node { external_frontends, ..Node::default() };
        let rules: Vec<String> = node.want().rules.iter().map(Rule::to_string).collect();
        assert_eq!(rules, ["to 198.51.100.7:80/tcp", "to [2001:db8::7]:80/tcp", "of the way back"]);
        assert_eq!(shown(&node.want().defaults), ["0.0.0.0/0 192.0.2.1", "::/0 -"]);

        let node = Node { has_ipv6: false, ..node };
        assert_eq!(shown(&node.want().defaults), ["0.0.0.0/0 192.0.2.1"]);
        assert_eq!(node.want().rules.len(), 2);

        let node = Node { external_frontends: frontends(&["2001:db8::7"]), ..Node::default() };
        assert_eq!(node.want().rules.len(), 1, "IPv6 has no rp_filter");

        let node = Node { external_frontends: frontends(&["192.0.2.9"]), ..Node::default() };
        assert_eq!(node.want(), Want::default());
    }

    #[test]
    fn room_for_a_number_of_rules() {
        for (frontends, left_out) in [(256, 0), (300, 44)] {
            let addr = "198.51.100.7".parse().unwrap();
            let external_frontends = (1..=frontends).map(|port| (addr, Proto::UDP, port)).collect();
            let want = Node { external_frontends, ..Node::default() }.want();
            let first = (1..=256).map(|port| Rule::To(addr, Proto::UDP, port)).chain([Rule::Back]);
            assert_eq!((want.rules, want.left_out), (first.collect(), left_out), "always the same ones");
        }
    }

    struct Node {
        service_cidrs: Vec<IpNet>,
        service_addresses: BTreeSet<IpAddr>,
        external_frontends: BTreeSet<(IpAddr, Proto, u16)>,
        own: BTreeSet<IpAddr>,
        primary: Vec<IpAddr>,
        has_ipv6: bool,
    }

    impl Default for Node {
        /// The IPv6 address that it is said to have is on no device.
        fn default() -> Self {
            Self {
                service_cidrs: Vec::new(),
                service_addresses: BTreeSet::new(),
                external_frontends: BTreeSet::new(),
                own: addrs(&["192.0.2.1", "192.0.2.9"]),
                primary: addrs(&["192.0.2.1", "fd00::1"]).into_iter().collect(),
                has_ipv6: true,
            }
        }
    }

    impl Node {
        fn want(&self) -> Want {
            Want::of(&Surroundings {
                service_cidrs: &self.service_cidrs,
                service_addresses: &self.service_addresses,
                external_frontends: &self.external_frontends,
                own: &self.own,
                primary: &self.primary,
                has_ipv6: self.has_ipv6,
            })
        }
    }

    fn addrs(texts: &[&str]) -> BTreeSet<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn shown(routes: &BTreeSet<Route>) -> Vec<String> {
        let source = |route: &Route| route.src.map_or("-".to_owned(), |src| src.to_string());
        routes.iter().map(|route| format!("{} {}", route.dst, source(route))).collect()
    }
}
