//! Finds the parts of ClusterIP ranges that pods or the node's routes also use. Operators and
//! objects may name any range.

use ipnet::IpNet;

/// The maximum number of networks over all ranges. Beyond it, every range that contains a network
/// is shared as a whole.
const MAX: usize = 1_024;

/// The shared networks in ClusterIP ranges. Packets to unknown addresses there follow the routes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedNetworks {
    /// Sorted, without overlaps.
    pub networks: Vec<IpNet>,
    /// The first network and the number of further networks, as text. `None` if there are no
    /// networks.
    pub why: Option<String>,
}

impl SharedNetworks {
    /// Finds the shared networks. `pods` are pod networks, `routes` the networks of the node's
    /// routes. Only networks inside a range count, because wider routes are less specific than the
    /// range.
    pub fn of(ranges: &[IpNet], pods: &[IpNet], routes: &[IpNet]) -> Self {
        let mut found: Vec<(IpNet, IpNet, &str)> = Vec::new();
        for range in ranges {
            let within = |nets: &[IpNet]| {
                nets.iter()
                    .map(IpNet::trunc)
                    .filter(|net| range.contains(net))
                    .collect::<Vec<_>>()
            };
            found.extend(
                within(pods)
                    .into_iter()
                    .map(|net| (range.trunc(), net, "the pods' network")),
            );
            found.extend(
                within(routes)
                    .into_iter()
                    .map(|net| (range.trunc(), net, "a route of this node's to")),
            );
        }
        let Some((range, net, what)) = found.first() else {
            return Self::default();
        };
        let mut networks = IpNet::aggregate(&found.iter().map(|(_, net, _)| *net).collect());
        if networks.len() > MAX {
            networks = IpNet::aggregate(&found.iter().map(|(range, ..)| *range).collect());
        }
        let others = match found.len() - 1 {
            0 => String::new(),
            others => format!(", and {others} more networks"),
        };
        let why = format!(
            "the ClusterIP range {range} contains {what} {net}{others}: packets to addresses there without a Service pass; move the range or the network"
        );
        Self {
            networks,
            why: Some(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn networks_within_ranges_are_shared() {
        type Case = (
            &'static str,
            &'static [&'static str],
            &'static [&'static str],
            &'static [&'static str],
            &'static [&'static str],
        );
        let cases: [Case; 7] = [
            (
                "apart",
                &["10.96.0.0/16"],
                &["10.244.1.0/24"],
                &["10.244.2.0/24", "192.0.2.0/24", "0.0.0.0/0"],
                &[],
            ),
            (
                "pods",
                &["10.244.0.0/16"],
                &["10.244.1.0/24"],
                &[],
                &["10.244.1.0/24"],
            ),
            (
                "routes",
                &["10.96.0.0/12", "fd00::/16"],
                &[],
                &["10.99.0.0/24", "fd00:1::/64"],
                &["10.99.0.0/24", "fd00:1::/64"],
            ),
            (
                "one in the other",
                &["10.244.0.0/16"],
                &["10.244.1.0/24"],
                &["10.244.1.7/32"],
                &["10.244.1.0/24"],
            ),
            (
                "the same",
                &["10.244.0.0/16"],
                &["10.244.0.0/16"],
                &[],
                &["10.244.0.0/16"],
            ),
            (
                "a wider one leaves the range to Services",
                &["10.96.0.0/16"],
                &["10.0.0.0/8"],
                &["10.0.0.0/8"],
                &[],
            ),
            (
                "everything",
                &["0.0.0.0/0"],
                &["10.244.1.0/24"],
                &["0.0.0.0/0", "192.0.2.0/24"],
                &["0.0.0.0/0"],
            ),
        ];
        for (name, ranges, pods, routes, want) in cases {
            let shared = SharedNetworks::of(&nets(ranges), &nets(pods), &nets(routes));
            assert_eq!(shared.networks, nets(want), "{name}");
            assert!(shared.networks.is_sorted(), "{name}");
            assert_eq!(shared.why.is_some(), !want.is_empty(), "{name}");
        }
    }

    #[test]
    fn more_networks_than_are_told_apart_make_the_range_shared() {
        let routes: Vec<IpNet> = (0..4_000_u32)
            .map(|n| {
                format!("10.96.{}.{}/32", n / 125, n % 125 * 2)
                    .parse()
                    .unwrap()
            })
            .collect();
        let shared = SharedNetworks::of(&nets(&["10.96.0.0/16", "10.97.0.0/16"]), &[], &routes);
        assert_eq!(shared.networks, nets(&["10.96.0.0/16"]));
        assert!(
            shared
                .why
                .unwrap()
                .contains("a route of this node's to 10.96.0.0/32, and 3999 more")
        );
    }
}
