//! Finds other programs' routing rules with conditions that the BPF programs' route look-ups cannot
//! match. Such a look-up has the packet's addresses and its incoming device, which is the anchor
//! for packets of the host.

use std::fmt;

use anyhow::Result;
use netlink_packet_core::Nla;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::rule::{RuleAttribute, RuleMessage, RulePortRange};

use super::netlink::Handle;
use super::rule;

/// Attributes that netlink_packet_route does not have (linux/fib_rules.h).
const FRA_DSCP: u16 = 25;
const FRA_FLOWLABEL: u16 = 26;

/// A rule with conditions other than addresses and incoming device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignRule {
    is_ipv6: bool,
    preference: u32,
    /// The conditions that a look-up cannot match, in the syntax of `ip rule`.
    conditions: Vec<String>,
}

/// The conditions that the fast path's look-up matches too, or that never match a packet without a
/// mark.
const ASKED_PAST_STACK: [&str; 4] = ["fwmark ", "ipproto ", "sport ", "dport "];

impl ForeignRule {
    /// Returns true if the fast path ignores this rule, provided that no netfilter rule sets marks.
    pub fn is_missed_past_stack(&self) -> bool {
        self.conditions.iter().any(|condition| {
            !ASKED_PAST_STACK
                .iter()
                .any(|asked| condition.starts_with(asked))
        })
    }

    /// Returns true if the rule matches packet marks.
    pub fn asks_for_mark(&self) -> bool {
        self.conditions
            .iter()
            .any(|condition| condition.starts_with("fwmark "))
    }
}

impl fmt::Display for ForeignRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = if self.is_ipv6 { "-6" } else { "-4" };
        write!(
            f,
            "ip {family} rule {}: {}",
            self.preference,
            self.conditions.join(" ")
        )
    }
}

/// Lists the rules of this network namespace that kpx's look-ups cannot match.
pub async fn unasked(handle: &Handle) -> Result<Vec<ForeignRule>> {
    Ok(rule::list(handle, |rule| !rule::is_ours(rule))
        .await?
        .iter()
        .filter_map(foreign)
        .collect())
}

/// Returns true if the kernel's strict source check (`rp_filter`) may find another reverse route
/// than the programs' look-up. The kernel's look-up uses the packet's ports and its outgoing device
/// (net/ipv4/fib_frontend.c), the programs' look-up its incoming device.
pub async fn mislead_strict_check(handle: &Handle) -> Result<bool> {
    Ok(rule::list(handle, |rule| !rule::is_ours(rule))
        .await?
        .iter()
        .any(misleads))
}

fn misleads(message: &RuleMessage) -> bool {
    message.header.family == AddressFamily::Inet
        && message.attributes.iter().any(|attribute| match attribute {
            RuleAttribute::Iifname(name) => name != "lo",
            RuleAttribute::IpProtocol(_)
            | RuleAttribute::SourcePortRange(_)
            | RuleAttribute::DestinationPortRange(_) => true,
            _ => false,
        })
}

/// Returns `None` for a rule that the programs' look-up matches as the kernel does.
fn foreign(message: &RuleMessage) -> Option<ForeignRule> {
    let tos = (message.header.tos != 0).then(|| format!("tos {:#x}", message.header.tos));
    let conditions: Vec<_> = tos
        .into_iter()
        .chain(message.attributes.iter().filter_map(condition))
        .collect();
    // The kernel omits preference 0.
    let preference = message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RuleAttribute::Priority(preference) => Some(*preference),
            _ => None,
        });
    let is_ipv6 = message.header.family == AddressFamily::Inet6;
    let rule = ForeignRule {
        is_ipv6,
        preference: preference.unwrap_or(0),
        conditions,
    };
    (!rule.conditions.is_empty()).then_some(rule)
}

fn condition(attribute: &RuleAttribute) -> Option<String> {
    let ports = |range: &RulePortRange| match (range.start, range.end) {
        (start, end) if start == end => start.to_string(),
        (start, end) => format!("{start}-{end}"),
    };
    Some(match attribute {
        RuleAttribute::FwMark(mark) => format!("fwmark {mark:#x}"),
        RuleAttribute::IpProtocol(proto) => format!("ipproto {}", u8::from(*proto)),
        RuleAttribute::SourcePortRange(range) => format!("sport {}", ports(range)),
        RuleAttribute::DestinationPortRange(range) => format!("dport {}", ports(range)),
        RuleAttribute::UidRange(range) => format!("uidrange {}-{}", range.start, range.end),
        RuleAttribute::L3MDev(true) => "l3mdev".to_owned(),
        RuleAttribute::Oifname(name) => format!("oif {name}"),
        RuleAttribute::Iifname(name) if name == "lo" => "iif lo".to_owned(),
        RuleAttribute::Other(other) if other.kind() == FRA_DSCP => "dscp".to_owned(),
        RuleAttribute::Other(other) if other.kind() == FRA_FLOWLABEL => "flowlabel".to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::rule::RuleUidRange;

    use super::*;

    fn shown(tos: u8, attributes: Vec<RuleAttribute>) -> Option<String> {
        let mut message = RuleMessage::default();
        (message.header.family, message.header.tos) = (AddressFamily::Inet, tos);
        message.attributes = attributes;
        message.attributes.push(RuleAttribute::Priority(1024));
        foreign(&message).map(|rule| rule.to_string())
    }

    #[test]
    fn rules_by_device_or_port_mislead_the_strict_check() {
        let misleads = |family, attribute| {
            let mut message = RuleMessage::default();
            (message.header.family, message.attributes) = (family, vec![attribute]);
            misleads(&message)
        };
        let iif = |name: &str| RuleAttribute::Iifname(name.to_owned());
        assert!(misleads(AddressFamily::Inet, iif("eth1")));
        assert!(misleads(
            AddressFamily::Inet,
            RuleAttribute::IpProtocol(6.into())
        ));
        assert!(
            !misleads(AddressFamily::Inet, iif("lo")),
            "no packet comes in by lo"
        );
        assert!(
            !misleads(AddressFamily::Inet, RuleAttribute::FwMark(1)),
            "no packet past the stack has a mark"
        );
        assert!(
            !misleads(AddressFamily::Inet6, iif("eth1")),
            "IPv6 has no such check"
        );
    }

    #[test]
    fn rules_that_no_look_up_asks_are_found() {
        let range = |start, end| RulePortRange { start, end };
        for (attribute, condition) in [
            (RuleAttribute::FwMark(0x80), "fwmark 0x80"),
            (RuleAttribute::IpProtocol(6.into()), "ipproto 6"),
            (RuleAttribute::SourcePortRange(range(80, 80)), "sport 80"),
            (
                RuleAttribute::DestinationPortRange(range(80, 90)),
                "dport 80-90",
            ),
            (
                RuleAttribute::UidRange(RuleUidRange { start: 0, end: 9 }),
                "uidrange 0-9",
            ),
            (RuleAttribute::L3MDev(true), "l3mdev"),
            (RuleAttribute::Oifname("eth1".to_owned()), "oif eth1"),
            (RuleAttribute::Iifname("lo".to_owned()), "iif lo"),
        ] {
            assert_eq!(
                shown(0, vec![attribute]),
                Some(format!("ip -4 rule 1024: {condition}"))
            );
        }
        assert_eq!(
            shown(0x10, vec![]),
            Some("ip -4 rule 1024: tos 0x10".to_owned())
        );
    }

    #[test]
    fn rules_by_addresses_and_devices_are_asked() {
        let from = RuleAttribute::Source([192, 0, 2, 1].into());
        let rules = [
            from,
            RuleAttribute::Iifname("eth1".to_owned()),
            RuleAttribute::L3MDev(false),
        ];
        rules
            .into_iter()
            .for_each(|attribute| assert_eq!(shown(0, vec![attribute]), None));
    }
}
