//! Finds the chains that refuse packets between outside clients and pods because no rule accepts
//! them. kube-proxy's mode iptables adds an accepting rule.

use std::collections::BTreeSet;

use ipnet::IpNet;
use nix::libc::{IPPROTO_TCP, IPPROTO_UDP};

use super::legacy::{self, Dropping};
use super::model::{ChainName, Hook, Obstacle, Part, TableFamily};
use super::packet::{Asked, Devices, ESTABLISHED, Family, Mark, NEW, Names};
use super::{Netfilter, walk};

/// The iptables chain for forwarded packets, and its table.
const FORWARD: &str = "FORWARD";
const FILTER: &str = "filter";
/// The chains for the operator's rules of Docker and, by family, of ufw.
const DOCKER: &str = "DOCKER-USER";
const UFW: [&str; 2] = ["ufw-user-forward", "ufw6-user-forward"];

/// A chain that refuses packets between outside clients and pods, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason: `chain FORWARD of table ip filter drops packets that its rules do not accept`.
    pub why: String,
    /// The commands that make the chain accept pods' packets. `PODS` stands for the pods' network
    /// if the rules were evaluated for all addresses.
    pub remedy: String,
    /// True if a rule that kpx does not evaluate may accept the packets.
    pub is_doubtful: bool,
}

impl Netfilter {
    /// Evaluates the rules for new connections of outside clients to addresses of `pods`, and for
    /// the replies. Packets have no mark and use any device. Only rules for the families of `pods`
    /// count.
    pub fn refusals(&self, pods: &[IpNet]) -> Vec<Refusal> {
        let everywhere = Self::everywhere();
        let none = BTreeSet::new();
        let protocols = [IPPROTO_TCP, IPPROTO_UDP].map(|number| number as u8);
        let asked = || {
            let devices = Devices {
                incoming: Names::AnyBut(&none),
                outgoing: Names::AnyBut(&none),
            };
            Asked {
                knows_marks: true,
                ..Asked::new(pods, Mark::ZERO, &protocols, devices)
            }
        };
        let there = Asked {
            sources: &everywhere,
            states: &[NEW],
            ..asked()
        };
        let back = Asked {
            destinations: &everywhere,
            states: &[ESTABLISHED],
            ..asked()
        };
        let found = [there, back].map(|asked| walk::walk(&self.rules, &asked).obstacles);
        let found: BTreeSet<_> = found
            .iter()
            .flatten()
            .filter_map(|obstacle| self.refuses(obstacle))
            .collect();
        let of_nftables = found.into_iter().map(|(chain, does)| Refusal {
            why: format!("{chain} {does} packets that its rules do not accept"),
            remedy: self.remedy(chain, pods),
            is_doubtful: false,
        });
        let of_pods = |family| {
            pods.iter()
                .filter(move |net| Family::of(net) == family)
                .collect::<Vec<_>>()
        };
        let of_legacy = [Family::V4, Family::V6].into_iter().flat_map(|family| {
            let pods = of_pods(family);
            let dropping = self
                .legacy
                .dropping(family, legacy::FORWARD)
                .filter(|_| !pods.is_empty());
            let refusals = dropping.map(
                |Dropping {
                     tool,
                     chain,
                     why,
                     has_rules,
                 }| Refusal {
                    why,
                    remedy: joined(pods.iter().flat_map(|net| by_iptables(tool, chain, net))),
                    is_doubtful: has_rules,
                },
            );
            refusals.collect::<Vec<_>>()
        });
        of_nftables.chain(of_legacy).collect()
    }

    /// Returns the chains that drop packets to the host itself unless a rule accepts them. Their
    /// rules are not evaluated.
    pub fn closed_inputs(&self) -> Vec<String> {
        let drops = |chain: &&ChainName| {
            self.rules[*chain]
                .base
                .is_some_and(|base| base.hook == Hook::Input && base.drops)
        };
        let chains = self
            .rules
            .keys()
            .filter(drops)
            .map(|chain| Obstacle::Policy(chain.clone()).to_string());
        let legacy = [Family::V4, Family::V6]
            .into_iter()
            .flat_map(|family| self.legacy.dropping(family, legacy::INPUT));
        chains.chain(legacy.map(|dropping| dropping.why)).collect()
    }

    /// Returns the chain if it refuses all packets, by its policy or an unconditional rule, and how
    /// it refuses. A rule about some packets is deliberate and does not count.
    fn refuses<'a>(&self, obstacle: &'a Obstacle) -> Option<(&'a ChainName, &'static str)> {
        match obstacle {
            Obstacle::Policy(chain) => Some((chain, "drops")),
            Obstacle::Rule {
                chain: name,
                number,
                ..
            } => {
                let chain = self.rules.get(name).filter(|chain| chain.base.is_some())?;
                let is_whole = matches!(chain.rules.get(number - 1)?[..], [Part::Refuse(_)]);
                is_whole.then_some((name, "refuses"))
            }
            Obstacle::Device(..) | Obstacle::TooMany => None,
        }
    }

    fn remedy(&self, chain: &ChainName, pods: &[IpNet]) -> String {
        let has = |name: &str| {
            self.rules.contains_key(&ChainName {
                chain: name.to_owned(),
                ..chain.clone()
            })
        };
        let (tool, ufw) = match chain.family {
            TableFamily::Ip6 => ("ip6tables-nft", UFW[1]),
            _ => ("iptables-nft", UFW[0]),
        };
        let is_iptables = [TableFamily::Ip, TableFamily::Ip6].contains(&chain.family)
            && (chain.table.as_str(), chain.chain.as_str()) == (FILTER, FORWARD);
        joined(
            pods.iter()
                .filter(|net| Family::of(net).passes(chain.family))
                .flat_map(|net| match is_iptables {
                    true if has(ufw) => {
                        ["to", "from"].map(|way| format!("ufw route allow {way} {}", name(net)))
                    }
                    true => by_iptables(tool, if has(DOCKER) { DOCKER } else { FORWARD }, net),
                    false => {
                        let ChainName {
                            family,
                            table,
                            chain,
                        } = chain;
                        let ip = if net.addr().is_ipv4() { "ip" } else { "ip6" };
                        ["daddr", "saddr"].map(|end| {
                            format!(
                                "nft insert rule {family} {table} {chain} {ip} {end} {} accept",
                                name(net)
                            )
                        })
                    }
                }),
        )
    }
}

fn by_iptables(tool: &str, chain: &str, net: &IpNet) -> [String; 2] {
    ["-d", "-s"].map(|end| format!("{tool} -I {chain} {end} {} -j ACCEPT", name(net)))
}

/// Returns a network as text; `PODS` for the network of all addresses.
fn name(net: &IpNet) -> String {
    if net.prefix_len() == 0 {
        "PODS".to_owned()
    } else {
        net.to_string()
    }
}

fn joined(commands: impl Iterator<Item = String>) -> String {
    commands.collect::<Vec<_>>().join("; ")
}
