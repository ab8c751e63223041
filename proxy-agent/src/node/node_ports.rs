//! Decides which of the node's own addresses serve node ports.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// The value of `--nodeport-addresses`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// All addresses.
    #[default]
    All,
    /// The node's primary addresses.
    Primary,
    /// The addresses in these networks. For a family without a network, or with one of length zero, all addresses.
    In(Vec<IpNet>),
}

impl NodePortAddresses {
    /// Returns true if the address serves node ports. `primary` are the node's primary addresses. Loopback addresses
    /// never take node ports.
    pub fn accepts(&self, addr: IpAddr, primary: &[IpAddr]) -> bool {
        self.names(addr, primary) && !addr.is_loopback()
    }

    /// Returns true by kube-proxy's rule, in which loopback addresses of IPv4 are like others.
    pub fn names(&self, addr: IpAddr, primary: &[IpAddr]) -> bool {
        match self {
            Self::All => true,
            Self::Primary => primary.contains(&addr),
            Self::In(nets) => self.takes_all_of(addr.is_ipv4()) || nets.iter().any(|net| net.contains(&addr)),
        }
    }

    /// Returns the addresses to listen on for a service that is reachable at the same addresses. The unspecified
    /// address stands for all of its family. `own` are the node's addresses.
    pub fn listen_on(
        &self,
        own: impl IntoIterator<Item = IpAddr>,
        primary: &[IpAddr],
        has_ipv6: bool,
    ) -> BTreeSet<IpAddr> {
        let anywhere = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
        let anywhere = anywhere.into_iter().filter(|addr| self.takes_all_of(addr.is_ipv4()));
        let single = own.into_iter().filter(|addr| !self.takes_all_of(addr.is_ipv4()) && self.accepts(*addr, primary));
        anywhere.chain(single).filter(|addr| has_ipv6 || addr.is_ipv4()).collect()
    }

    fn takes_all_of(&self, ipv4: bool) -> bool {
        match self {
            Self::All => true,
            Self::Primary => false,
            Self::In(nets) => {
                let mut nets = nets.iter().filter(|net| net.addr().is_ipv4() == ipv4).peekable();
                nets.peek().is_none() || nets.any(|net| net.prefix_len() == 0)
            }
        }
    }
}

impl fmt::Display for NodePortAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Primary => f.write_str("primary"),
            Self::In(nets) => {
                let nets: Vec<_> = nets.iter().map(IpNet::to_string).collect();
                f.write_str(&nets.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [&str; 6] = ["127.0.0.1", "192.0.2.1", "10.1.0.1", "::1", "fd00::1", "2001:db8::1"];
    const PRIMARY: [&str; 2] = ["192.0.2.1", "fd00::1"];

    /// A case: name, option, the node's own addresses that it accepts, and the addresses to listen on.
    type Case<'a> = (&'a str, &'a [&'a str], &'a [&'a str], &'a [&'a str]);

    #[test]
    fn each_option_accepts_its_addresses() {
        let every = ["192.0.2.1", "10.1.0.1", "fd00::1", "2001:db8::1"];
        let cases: [Case<'_>; 8] = [
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
            ("of both", &["0.0.0.0/0", "::/0"], &every, &["0.0.0.0", "::"]),
            ("never a loopback address", &["127.0.0.0/8", "::1/128"], &[], &[]),
            ("none that the node has", &["198.51.100.0/24", "2001:db8:5::/48"], &[], &[]),
        ];
        for (name, option, accepted, listen) in cases {
            let option = match option {
                [] => NodePortAddresses::All,
                ["primary"] => NodePortAddresses::Primary,
                nets => NodePortAddresses::In(nets.iter().map(|net| net.parse().unwrap()).collect()),
            };
            let own = addrs(&OWN);
            let primary = addrs(&PRIMARY);
            let got: Vec<_> = own.iter().copied().filter(|addr| option.accepts(*addr, &primary)).collect();
            assert_eq!(got, addrs(accepted), "{name}");
            let want: BTreeSet<_> = addrs(listen).into_iter().collect();
            assert_eq!(option.listen_on(own.clone(), &primary, true), want, "{name}");
            let want: BTreeSet<_> = want.into_iter().filter(IpAddr::is_ipv4).collect();
            assert_eq!(option.listen_on(own, &primary, false), want, "{name}, without IPv6");
        }
    }

    fn addrs(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }
}
