//! Decides at which of the node's addresses node ports are reachable.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// The value of `--nodeport-addresses`. Empty: all addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePortAddresses {
    /// True to include the node's primary addresses.
    primary: bool,
    nets: Vec<IpNet>,
}

/// The loopback addresses at which local processes reach node ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Localhost {
    #[default]
    Off,
    /// 127.0.0.1 unless other addresses are configured, and each loopback address configured by
    /// name: kube-proxy's rule in mode iptables.
    Included,
    /// The loopback addresses that are configured explicitly. Under `externalTrafficPolicy: Local`,
    /// only with local endpoints. This is kube-proxy's rule in mode nftables (KEP-6032).
    Named,
}

const LOCALHOSTS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

impl NodePortAddresses {
    pub const PRIMARY: &str = "primary";

    /// Adds an item of the option: a network or a keyword. Returns false if it is neither.
    pub fn add(&mut self, item: &str) -> bool {
        let nets: &[&str] = match item {
            Self::PRIMARY => {
                self.primary = true;
                return true;
            }
            "localhost" => &["127.0.0.0/8", "::1/128"],
            "all" => &["0.0.0.0/0", "::/0"],
            net => &[net],
        };
        let nets: Result<Vec<IpNet>, _> = nets.iter().map(|net| net.parse()).collect();
        self.nets.extend(nets.iter().flatten());
        nets.is_ok()
    }

    /// Returns true if all clients can reach node ports at the address; never for a loopback
    /// address. `primary` are the node's primary addresses.
    pub fn accepts(&self, addr: IpAddr, primary: &[IpAddr]) -> bool {
        let is_named = self.primary && primary.contains(&addr)
            || self.nets.iter().any(|net| net.contains(&addr));
        (is_named || self.takes_all_of(addr.is_ipv4())) && !addr.is_loopback()
    }

    /// Returns the loopback addresses at which local processes reach node ports.
    pub fn localhosts(&self, localhost: Localhost) -> Vec<IpAddr> {
        // A larger network that contains loopback addresses does not configure them explicitly.
        let is_named = |addr| {
            self.nets
                .iter()
                .any(|net| net.addr().is_loopback() && net.contains(&addr))
        };
        let is_included = |addr: IpAddr| {
            addr.is_ipv4()
                && (self.takes_all_of(true) || self.nets.iter().any(|net| net.contains(&addr)))
        };
        let serves = |addr: &IpAddr| match localhost {
            Localhost::Off => false,
            Localhost::Included => is_named(*addr) || is_included(*addr),
            Localhost::Named => is_named(*addr),
        };
        LOCALHOSTS.into_iter().filter(serves).collect()
    }

    /// Returns the addresses to listen on for a server at the node port addresses. The unspecified
    /// address stands for its whole family. `own` are the node's addresses.
    pub fn listen_on(
        &self,
        own: impl IntoIterator<Item = IpAddr>,
        primary: &[IpAddr],
        has_ipv6: bool,
    ) -> BTreeSet<IpAddr> {
        let anywhere = [
            IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        ];
        let anywhere = anywhere
            .into_iter()
            .filter(|addr| self.takes_all_of(addr.is_ipv4()));
        let single = own
            .into_iter()
            .filter(|addr| !self.takes_all_of(addr.is_ipv4()) && self.accepts(*addr, primary));
        anywhere
            .chain(single)
            .filter(|addr| has_ipv6 || addr.is_ipv4())
            .collect()
    }

    /// Returns true if the option accepts every address of a family.
    fn takes_all_of(&self, ipv4: bool) -> bool {
        let mut nets = self
            .nets
            .iter()
            .filter(|net| net.addr().is_ipv4() == ipv4)
            .peekable();
        !self.primary && nets.peek().is_none() || nets.any(|net| net.prefix_len() == 0)
    }
}

impl fmt::Display for NodePortAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::default() {
            return f.write_str("all");
        }
        let primary = self.primary.then(|| Self::PRIMARY.to_owned());
        let items: Vec<_> = primary
            .into_iter()
            .chain(self.nets.iter().map(IpNet::to_string))
            .collect();
        f.write_str(&items.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [&str; 6] = [
        "127.0.0.1",
        "192.0.2.1",
        "10.1.0.1",
        "::1",
        "fd00::1",
        "2001:db8::1",
    ];
    const PRIMARY: [&str; 2] = ["192.0.2.1", "fd00::1"];

    /// A case: name, option, the accepted addresses of the node, the addresses to listen on.
    type Case<'a> = (&'a str, &'a [&'a str], &'a [&'a str], &'a [&'a str]);

    #[test]
    fn each_option_accepts_its_addresses() {
        let every = ["192.0.2.1", "10.1.0.1", "fd00::1", "2001:db8::1"];
        let cases: [Case<'_>; 12] = [
            ("unset: all but loopback", &[], &every, &["0.0.0.0", "::"]),
            ("primary", &["primary"], &PRIMARY, &PRIMARY),
            (
                "a network of each family",
                &["10.1.0.0/16", "fd00::/8"],
                &["10.1.0.1", "fd00::1"],
                &["10.1.0.1", "fd00::1"],
            ),
            (
                "a family without networks takes all",
                &["192.0.2.0/24"],
                &["192.0.2.1", "fd00::1", "2001:db8::1"],
                &["192.0.2.1", "::"],
            ),
            (
                "a zero network takes all of its family",
                &["10.1.0.0/16", "0.0.0.0/0", "fd00::1/128"],
                &["192.0.2.1", "10.1.0.1", "fd00::1"],
                &["0.0.0.0", "fd00::1"],
            ),
            (
                "of both",
                &["0.0.0.0/0", "::/0"],
                &every,
                &["0.0.0.0", "::"],
            ),
            (
                "never a loopback address",
                &["127.0.0.0/8", "::1/128"],
                &[],
                &[],
            ),
            ("by keyword", &["all"], &every, &["0.0.0.0", "::"]),
            ("loopback alone", &["localhost"], &[], &[]),
            (
                "primary and a network",
                &["primary", "10.1.0.0/16"],
                &["192.0.2.1", "10.1.0.1", "fd00::1"],
                &["192.0.2.1", "10.1.0.1", "fd00::1"],
            ),
            (
                "primary and all of a family",
                &["primary", "::/0"],
                &["192.0.2.1", "fd00::1", "2001:db8::1"],
                &["192.0.2.1", "::"],
            ),
            (
                "none that the node has",
                &["198.51.100.0/24", "2001:db8:5::/48"],
                &[],
                &[],
            ),
        ];
        for (name, option, accepted, listen) in cases {
            let option = of(option);
            let own = addrs(&OWN);
            let primary = addrs(&PRIMARY);
            let got: Vec<_> = own
                .iter()
                .copied()
                .filter(|addr| option.accepts(*addr, &primary))
                .collect();
            assert_eq!(got, addrs(accepted), "{name}");
            let want: BTreeSet<_> = addrs(listen).into_iter().collect();
            assert_eq!(
                option.listen_on(own.clone(), &primary, true),
                want,
                "{name}"
            );
            let want: BTreeSet<_> = want.into_iter().filter(IpAddr::is_ipv4).collect();
            assert_eq!(
                option.listen_on(own, &primary, false),
                want,
                "{name}, without IPv6"
            );
        }
    }

    /// A case: option, and the loopback addresses in the modes iptables and nftables.
    type LocalhostCase<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str]);

    #[test]
    fn loopback_addresses_serve_where_they_are_named() {
        let cases: [LocalhostCase<'_>; 11] = [
            (&[], &["127.0.0.1"], &[]),
            (&["all"], &["127.0.0.1"], &[]),
            (&["primary"], &[], &[]),
            (&["localhost"], &["127.0.0.1", "::1"], &["127.0.0.1", "::1"]),
            (
                &["primary", "localhost"],
                &["127.0.0.1", "::1"],
                &["127.0.0.1", "::1"],
            ),
            (
                &["all", "localhost"],
                &["127.0.0.1", "::1"],
                &["127.0.0.1", "::1"],
            ),
            (
                &["0.0.0.0/0", "127.0.0.1/32"],
                &["127.0.0.1"],
                &["127.0.0.1"],
            ),
            (&["primary", "::1/128"], &["::1"], &["::1"]),
            (&["64.0.0.0/2"], &["127.0.0.1"], &[]),
            (&["127.0.0.2/32"], &[], &[]),
            (&["::/0"], &["127.0.0.1"], &[]),
        ];
        for (option, included, named) in cases {
            assert_eq!(
                of(option).localhosts(Localhost::Included),
                addrs(included),
                "{option:?}"
            );
            assert_eq!(
                of(option).localhosts(Localhost::Named),
                addrs(named),
                "{option:?}"
            );
            assert!(
                of(option).localhosts(Localhost::Off).is_empty(),
                "{option:?}"
            );
        }
    }

    #[test]
    fn an_item_is_a_network_or_a_keyword() {
        for item in ["primary", "localhost", "all", "10.0.0.0/8", "::/0"] {
            assert!(NodePortAddresses::default().add(item), "{item}");
        }
        for item in ["", "Primary", "loopback", "10.0.0.1", "127.0.0.1", "any"] {
            let mut option = NodePortAddresses::default();
            assert!(
                !option.add(item) && option == NodePortAddresses::default(),
                "{item}"
            );
        }
        for (items, shown) in [
            (&[][..], "all"),
            (&["primary", "localhost"], "primary,127.0.0.0/8,::1/128"),
        ] {
            assert_eq!(of(items).to_string(), shown);
        }
    }

    fn of(items: &[&str]) -> NodePortAddresses {
        let mut option = NodePortAddresses::default();
        items
            .iter()
            .for_each(|item| assert!(option.add(item), "{item}"));
        option
    }

    fn addrs(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }
}
