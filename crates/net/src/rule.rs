//! Maintains the rules that send packets to kpx's tables.
//!
//! The rule for the host's own packets precedes the operator's rules: a rule such as `from ADDRESS`
//! on a multihomed host would otherwise match first. Other packets are translated at a hook, before
//! routing. Packets that no hook has translated reach the same routes after all other rules.
//!
//! Rules for external frontends send only the host's own packets to a frontend to a second table. A
//! route to the frontend's address would apply to too many packets: the address may be another
//! machine's real address, and packets to its other ports must still reach that machine.
//!
//! The programs inject replies into the anchor with the frontend as source. IPv4's rp_filter looks
//! up the reverse route to that source. This look-up has no ports, since all rules of kpx are for
//! the host's own packets (`rule_requires_fldissect` in the kernel's fib_rules.h). The look-up has
//! the packet's mark if the device is configured for that: see [`Rule::Back`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use anyhow::Context;
use ipnet::IpNet;
use netlink_packet_route::IpProtocol;
use netlink_packet_route::route::RouteProtocol;
use netlink_packet_route::rule::{
    RuleAction, RuleAttribute, RuleFlags, RuleMessage, RulePortRange,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use proxy_common::addr::Proto;
use proxy_common::device::{INJECTED_MARK, INJECTED_MASK};
use rtnetlink::Error;
use tracing::debug;

use super::netlink::{Handle, dump};
use super::{route, sysctl};

/// The table of external frontends: "kpx" as a number. `ip route show table 7041144` lists it.
pub const TABLE: u32 = u32::from_be_bytes(*b"\0kpx");

/// The table of service routes.
pub const SERVICES: u32 = TABLE + 1;

/// The preference of the rules for the host's own packets: after the local table (0), so that the
/// host's own addresses stay local, and before the operator's rules. `ip rule show pref 75` lists
/// the rules.
///
/// `ip rule add` without a preference inserts a rule before the second rule of the list, which is
/// kpx's. kpx's rules then move before the inserted rule: see [`Rules::verify`].
pub const PREFERENCE: u32 = b'K' as u32;

/// The preference of the rules for all packets: before the main table's rule (32766) and after the
/// operator's rules; `ip rule add` without a preference gives the first such rule this preference
/// too. Among rules with the same preference the kernel uses the oldest first.
pub const LAST_PREFERENCE: u32 = 32_765;

/// The maximum number of rules. The kernel evaluates rules one by one for each routed packet, so
/// more rules would reduce throughput.
pub const MAX: usize = 256;

/// The packets that use one of kpx's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Packets of the host's own sockets, to the routes of [`SERVICES`].
    Own { ipv6: bool },
    /// All packets, after the operator's rules, to the main table's routes with prefixes longer
    /// than this length.
    Narrow { ipv6: bool, prefix_len: u8 },
    /// All packets, after `Narrow`, to the routes of [`SERVICES`].
    All { ipv6: bool },
    /// Packets of the host's own sockets to this address and port, to the routes of [`TABLE`].
    To(IpAddr, Proto, u16),
    /// The reverse route of IPv4 packets injected into the anchor, for rp_filter.
    Back,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = |ipv6: bool| if ipv6 { "IPv6" } else { "IPv4" };
        match self {
            Self::Own { ipv6 } => write!(f, "of the host's own packets, {}", family(*ipv6)),
            Self::Narrow { ipv6, prefix_len } => {
                write!(
                    f,
                    "of networks narrower than a /{prefix_len}, {}",
                    family(*ipv6)
                )
            }
            Self::All { ipv6 } => write!(f, "of all packets, {}", family(*ipv6)),
            Self::To(addr, proto, port) => {
                write!(f, "to {}/{proto}", SocketAddr::new(*addr, *port))
            }
            Self::Back => f.write_str("of the way back"),
        }
    }
}

/// The result of a pass. The kernel may refuse some rules and accept the rest.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub added: usize,
    pub deleted: usize,
    /// The refused rules, with the kernel's error. Every pass retries them.
    pub refused: Vec<(Rule, String)>,
}

/// kpx's rules of both families.
pub struct Rules {
    handle: Handle,
    /// The rules in the kernel with their preferences, as last read or written. Any program may
    /// delete rules: see [`Rules::verify`].
    now: BTreeMap<Rule, u32>,
    others: OtherRules,
}

impl Rules {
    /// Reads the existing rules, including those of an earlier kpx instance.
    pub async fn open(handle: Handle) -> anyhow::Result<Self> {
        let (now, others) = read(&handle).await?;
        Ok(Self {
            handle,
            now,
            others,
        })
    }

    /// Makes kpx's rules equal to `want`. Compares with the rules in memory, so the cost is
    /// proportional to the difference.
    pub async fn reconcile(&mut self, want: &BTreeSet<Rule>) -> anyhow::Result<Report> {
        let mut report = Report::default();
        for (rule, preference) in self
            .now
            .clone()
            .into_iter()
            .filter(|(rule, _)| !want.contains(rule))
        {
            if self.delete(rule, preference, &mut report.refused).await? {
                self.now.remove(&rule);
                report.deleted += 1;
                debug!(%rule, "rule deleted");
            }
        }
        let first = self.others.first_preference();
        for &rule in want {
            let preference = match rule {
                Rule::Narrow { .. } | Rule::All { .. } => LAST_PREFERENCE,
                Rule::Own { .. } => first,
                // No route of the local table matches these addresses and marks.
                Rule::To(..) | Rule::Back => first.min(PREFERENCE),
            };
            if self.now.get(&rule) != Some(&preference) {
                self.put(rule, preference, &mut report).await?;
            }
        }
        Ok(report)
    }

    /// Adds a rule, then deletes its copy with another preference.
    async fn put(
        &mut self,
        rule: Rule,
        preference: u32,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let before = self.now.get(&rule).copied();
        if let Rule::Narrow { ipv6, .. } = rule {
            // `Narrow` must precede `All`, which is added again afterwards.
            let all = Rule::All { ipv6 };
            if let Some(last) = self.now.remove(&all) {
                self.delete(all, last, &mut report.refused).await?;
            }
        }
        let mut request = self.handle.rule().add();
        *request.message_mut() = message(&rule, preference);
        if taken(
            request.execute().await,
            nix::libc::EEXIST,
            rule,
            &mut report.refused,
        )? {
            self.now.insert(rule, preference);
            report.added += 1;
            debug!(%rule, preference, "rule added");
            if let Some(before) = before {
                self.delete(rule, before, &mut report.refused).await?;
            }
        }
        Ok(())
    }

    /// Reads the kernel's rules, then reconciles like [`Rules::reconcile`]. kpx's rules move before
    /// other rules that would match packets of the host's own sockets.
    pub async fn verify(&mut self, want: &BTreeSet<Rule>) -> anyhow::Result<Report> {
        (self.now, self.others) = read(&self.handle).await?;
        self.reconcile(want).await
    }

    /// Returns the other programs' rules before kpx's rules that may match the host's packets to
    /// these networks, in the syntax of `ip rule`.
    pub fn before_ours(&self, nets: &[IpNet]) -> Vec<String> {
        self.others.before_ours(nets)
    }

    async fn delete(
        &self,
        rule: Rule,
        preference: u32,
        refused: &mut Vec<(Rule, String)>,
    ) -> anyhow::Result<bool> {
        let result = self
            .handle
            .rule()
            .del(message(&rule, preference))
            .execute()
            .await;
        // A missing rule counts as deleted.
        taken(result, nix::libc::ENOENT, rule, refused)
    }
}

/// The other programs' rules that affect the preference of kpx's rules.
#[derive(Debug, Default)]
struct OtherRules {
    /// The preference of the local table's rule, which some programs move (Cilium).
    local: u32,
    /// The rules that may match packets of the host's own sockets.
    taking: Vec<OtherRule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct OtherRule {
    is_ipv6: bool,
    preference: u32,
    /// The destinations; `None` for all.
    to: Option<IpNet>,
}

impl fmt::Display for OtherRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = if self.is_ipv6 { "-6" } else { "-4" };
        write!(f, "ip {family} rule {}", self.preference)?;
        self.to.map_or(Ok(()), |to| write!(f, " to {to}"))
    }
}

impl OtherRules {
    /// Records a rule if it may match the host's packets. Rules for marked packets or for sockets
    /// bound to a device are skipped, because they concern only their own program.
    fn take(&mut self, message: &RuleMessage) {
        let mut preference = 0;
        let mut to = None;
        let mut table = u32::from(message.header.table);
        let mut mark = 0;
        let mut mask = 0;
        let mut is_for_others = false;
        for attribute in &message.attributes {
            match attribute {
                RuleAttribute::Priority(number) => preference = *number,
                RuleAttribute::Table(number) => table = *number,
                RuleAttribute::Destination(addr) => {
                    to = IpNet::new(*addr, message.header.dst_len).ok()
                }
                RuleAttribute::FwMark(number) => mark = *number,
                RuleAttribute::FwMask(number) => mask = *number,
                RuleAttribute::Iifname(name) => is_for_others |= name != "lo",
                RuleAttribute::Oifname(_) | RuleAttribute::L3MDev(true) => is_for_others = true,
                _ => {}
            }
        }
        is_for_others |= mark & mask != 0;
        let is_of_all = to.is_none() && message.header.src_len == 0 && !is_for_others;
        if is_of_all
            && message.header.action == RuleAction::ToTable
            && table == u32::from(nix::libc::RT_TABLE_LOCAL)
        {
            self.local = self.local.max(preference);
            return;
        }
        let is_inverted = message.header.flags.contains(RuleFlags::Invert);
        let is_idle = matches!(message.header.action, RuleAction::Nop | RuleAction::Unspec);
        if !is_idle && (!is_for_others || is_inverted) {
            let is_ipv6 = message.header.family == AddressFamily::Inet6;
            self.taking.push(OtherRule {
                is_ipv6,
                preference,
                to: to.filter(|_| !is_inverted),
            });
        }
    }

    /// Returns the preference of kpx's rules for the host's own packets: after the local table, and
    /// before other rules that match any destination. A rule with destinations stays before kpx's
    /// rules: its owner chose them.
    fn first_preference(&self) -> u32 {
        let usual = PREFERENCE.max(self.local + 1).min(LAST_PREFERENCE);
        let others = self
            .taking
            .iter()
            .filter(|rule| rule.to.is_none())
            .map(|rule| rule.preference);
        let early = others
            .filter(|preference| (self.local + 2..=usual).contains(preference))
            .min();
        early.map_or(usual, |preference| preference - 1)
    }

    fn before_ours(&self, nets: &[IpNet]) -> Vec<String> {
        let first = self.first_preference();
        let meets = |rule: &OtherRule| match rule.to {
            None => true,
            Some(to) => nets.iter().any(|net| net.contains(&to) || to.contains(net)),
        };
        let before = self
            .taking
            .iter()
            .filter(|rule| rule.preference <= first && meets(rule));
        before.map(ToString::to_string).collect()
    }
}

/// Returns the other programs' rules that precede kpx's rules at any preference, like
/// [`Rules::before_ours`].
pub async fn before_ours(handle: &Handle, nets: &[IpNet]) -> anyhow::Result<Vec<String>> {
    let mut others = OtherRules::default();
    list(handle, |rule| !is_ours(rule))
        .await?
        .iter()
        .for_each(|message| others.take(message));
    Ok(others.before_ours(nets))
}

/// Returns the number of kpx's rules, including those of earlier agents.
pub async fn count(handle: &Handle) -> anyhow::Result<usize> {
    Ok(ours(handle).await?.len())
}

/// Deletes kpx's rules, including those of earlier agents.
pub async fn remove(handle: &Handle) -> anyhow::Result<()> {
    for message in ours(handle).await? {
        match handle.rule().del(message).execute().await {
            Err(Error::NetlinkError(error)) if error.raw_code() == -nix::libc::ENOENT => {}
            result => result.context("delete a rule")?,
        }
    }
    Ok(())
}

/// Returns true if the request succeeded, or failed with the error number `done` because nothing
/// was left to do. Records a refusal; any other failure is an error.
fn taken(
    result: Result<(), Error>,
    done: i32,
    rule: Rule,
    refused: &mut Vec<(Rule, String)>,
) -> anyhow::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Error::NetlinkError(error)) if error.raw_code() == -done => Ok(true),
        Err(Error::NetlinkError(error)) => {
            refused.push((rule, error.to_string()));
            Ok(false)
        }
        Err(error) => Err(error).with_context(|| format!("program the rule {rule}")),
    }
}

/// Reads kpx's rules and the other rules that may precede them. Deletes kpx's rules of another
/// form, and duplicates that an interrupted move left.
async fn read(handle: &Handle) -> anyhow::Result<(BTreeMap<Rule, u32>, OtherRules)> {
    let (ours, others): (Vec<_>, Vec<_>) =
        list(handle, |_| true).await?.into_iter().partition(is_ours);
    let mut now = BTreeMap::new();
    for message in ours {
        match parse(&message) {
            Some((rule, preference)) if !now.contains_key(&rule) => {
                now.insert(rule, preference);
            }
            _ => handle
                .rule()
                .del(message)
                .execute()
                .await
                .context("delete a rule of another version")?,
        }
    }
    let mut of_others = OtherRules::default();
    others.iter().for_each(|message| of_others.take(message));
    Ok((now, of_others))
}

/// Returns all rules with kpx's protocol and preference, or to one of kpx's tables.
async fn ours(handle: &Handle) -> anyhow::Result<Vec<RuleMessage>> {
    list(handle, is_ours).await
}

/// Returns the rules of both families that `pick` selects.
pub(super) async fn list(
    handle: &Handle,
    pick: impl Fn(&RuleMessage) -> bool,
) -> anyhow::Result<Vec<RuleMessage>> {
    let mut picked = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        if family == AddressFamily::Inet6 && !sysctl::has_ipv6() {
            continue;
        }
        let mut request = RuleMessage::default();
        request.header.family = family;
        let rules = dump(
            handle,
            RouteNetlinkMessage::GetRule(request),
            |message| match message {
                RouteNetlinkMessage::NewRule(rule) => Some(rule).filter(&pick),
                _ => None,
            },
        );
        picked.extend(
            rules
                .await
                .with_context(|| format!("list the {family:?} rules"))?,
        );
    }
    Ok(picked)
}

pub(super) fn is_ours(rule: &RuleMessage) -> bool {
    let has = |attribute| rule.attributes.contains(&attribute);
    let is_place = [
        RuleAttribute::Priority(PREFERENCE),
        RuleAttribute::Priority(LAST_PREFERENCE),
        RuleAttribute::Table(TABLE),
        RuleAttribute::Table(SERVICES),
    ];
    has(RuleAttribute::Protocol(RouteProtocol::Other(
        route::PROTOCOL,
    ))) && is_place.into_iter().any(has)
}

fn message(rule: &Rule, preference: u32) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.action = RuleAction::ToTable;
    message.header.family = AddressFamily::Inet;
    let table = match rule {
        Rule::Own { .. } | Rule::All { .. } => SERVICES,
        Rule::Narrow { .. } => route::MAIN,
        Rule::To(..) | Rule::Back => TABLE,
    };
    message.attributes = vec![
        RuleAttribute::Protocol(RouteProtocol::Other(route::PROTOCOL)),
        RuleAttribute::Priority(preference),
        RuleAttribute::Table(table),
    ];
    if !matches!(rule, Rule::All { .. } | Rule::Narrow { .. }) {
        // The kernel's input device for locally generated packets.
        message
            .attributes
            .push(RuleAttribute::Iifname("lo".to_owned()));
    }
    match *rule {
        Rule::Own { ipv6 } | Rule::All { ipv6 } | Rule::Narrow { ipv6, .. } => {
            if ipv6 {
                message.header.family = AddressFamily::Inet6;
            }
            if let Rule::Narrow { prefix_len, .. } = *rule {
                message
                    .attributes
                    .push(RuleAttribute::SuppressPrefixLen(prefix_len.into()));
            }
        }
        Rule::To(addr, proto, port) => {
            message.header.dst_len = IpNet::from(addr).prefix_len();
            if addr.is_ipv6() {
                message.header.family = AddressFamily::Inet6;
            }
            message.attributes.extend([
                RuleAttribute::Destination(addr),
                RuleAttribute::IpProtocol(IpProtocol::from(proto.0)),
                RuleAttribute::DestinationPortRange(RulePortRange {
                    start: port,
                    end: port,
                }),
            ]);
        }
        Rule::Back => {
            let mark = [
                RuleAttribute::FwMark(INJECTED_MARK),
                RuleAttribute::FwMask(INJECTED_MASK),
            ];
            message.attributes.extend(mark);
        }
    }
    message
}

/// Returns the rule in a message with its preference; `None` for another program's rule, or for a
/// form that [`message`] does not build.
fn parse(message: &RuleMessage) -> Option<(Rule, u32)> {
    let mut addr = None;
    let mut proto = None;
    let mut port = None;
    let mut table = 0;
    let mut preference = 0;
    let mut is_own = false;
    let mut narrow = None;
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Destination(dst) => addr = Some(*dst),
            RuleAttribute::IpProtocol(number) => proto = Some(Proto(u8::from(*number))),
            RuleAttribute::DestinationPortRange(range) => port = Some(range.start),
            RuleAttribute::Table(number) => table = *number,
            RuleAttribute::Priority(number) => preference = *number,
            RuleAttribute::Iifname(_) => is_own = true,
            RuleAttribute::SuppressPrefixLen(len) => narrow = u8::try_from(*len).ok(),
            _ => {}
        }
    }
    let ipv6 = message.header.family == AddressFamily::Inet6;
    let rule = match addr {
        Some(addr) => Rule::To(addr, proto?, port?),
        None if table == route::MAIN => Rule::Narrow {
            ipv6,
            prefix_len: narrow?,
        },
        None if table != SERVICES => Rule::Back,
        None if is_own => Rule::Own { ipv6 },
        None => Rule::All { ipv6 },
    };
    let as_made = self::message(&rule, preference);
    // The kernel adds attributes to every rule.
    let complete = as_made
        .attributes
        .iter()
        .all(|attribute| message.attributes.contains(attribute));
    let made = &as_made.header;
    let read = &message.header;
    let alike = (
        made.family,
        made.dst_len,
        made.src_len,
        made.tos,
        made.action,
    ) == (
        read.family,
        read.dst_len,
        read.src_len,
        read.tos,
        read.action,
    );
    (complete && alike).then_some((rule, preference))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sent_rule_is_read_back() {
        let to = |addr: &str, proto| Rule::To(addr.parse().unwrap(), proto, 80);
        let of = |ipv6| {
            [
                Rule::Own { ipv6 },
                Rule::All { ipv6 },
                Rule::Narrow {
                    ipv6,
                    prefix_len: 16,
                },
            ]
        };
        let frontends = [
            to("203.0.113.7", Proto::TCP),
            to("2001:db8::7", Proto::UDP),
            Rule::Back,
        ];
        for rule in frontends.into_iter().chain(of(false)).chain(of(true)) {
            let preference = if matches!(rule, Rule::Narrow { .. }) {
                LAST_PREFERENCE
            } else {
                74
            };
            let message = || message(&rule, preference);
            assert!(is_ours(&message()));
            assert_eq!(parse(&message()), Some((rule, preference)));
            let mut wider = message();
            wider.header.dst_len ^= 1;
            assert_eq!(parse(&wider), None, "of another shape");
            let mut elsewhere = message();
            elsewhere
                .attributes
                .retain(|attribute| !matches!(attribute, RuleAttribute::Table(_)));
            assert_eq!(parse(&elsewhere), None, "to another table");
            let mut foreign = message();
            foreign
                .attributes
                .retain(|attribute| !matches!(attribute, RuleAttribute::Protocol(_)));
            assert!(!is_ours(&foreign));
        }
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn our_rules_go_before_those_that_take_the_hosts_packets() {
        use RuleAttribute::{
            Destination, FwMark, FwMask, Iifname, L3MDev, Oifname, Priority, Source,
            SuppressPrefixLen, Table,
        };
        let to = |addr: &str| Destination(addr.parse().unwrap());
        let from = || Source("192.0.2.1".parse().unwrap());
        let lo = || Iifname("lo".to_owned());
        for (name, attributes, is_inverted, first) in [
            ("the local table", vec![Table(255)], false, 75),
            (
                "the local table, as Cilium moves it",
                vec![Priority(100), Table(255)],
                false,
                101,
            ),
            (
                "the local table, behind the rules of VRFs",
                vec![Priority(32_765), Table(255)],
                false,
                32_765,
            ),
            (
                "the main table",
                vec![Priority(32_766), Table(254)],
                false,
                75,
            ),
            (
                "ip rule add from 192.0.2.1",
                vec![Priority(74), Table(99), from()],
                false,
                73,
            ),
            ("beside ours", vec![Priority(75), Table(99)], false, 74),
            ("behind ours", vec![Priority(76), Table(99)], false, 75),
            (
                "of the host's own packets",
                vec![Priority(10), Table(99), lo()],
                false,
                9,
            ),
            (
                "wg-quick, the default route",
                vec![Priority(74), Table(99), FwMark(0xca6c), FwMask(!0)],
                true,
                73,
            ),
            (
                "wg-quick, the other routes",
                vec![Priority(73), Table(254), SuppressPrefixLen(0)],
                false,
                72,
            ),
            (
                "Cilium's proxy",
                vec![Priority(9), Table(2004), FwMark(0x200), FwMask(0xf00)],
                false,
                75,
            ),
            (
                "an incoming device",
                vec![Priority(9), Table(99), Iifname("eth1".to_owned())],
                false,
                75,
            ),
            (
                "an outgoing device",
                vec![Priority(9), Table(99), Oifname("eth1".to_owned())],
                false,
                75,
            ),
            ("a VRF", vec![Priority(9), L3MDev(true)], false, 75),
            (
                "destinations that its owner names",
                vec![Priority(9), Table(99), to("10.96.5.0")],
                false,
                75,
            ),
            (
                "no place before it",
                vec![Priority(1), Table(99)],
                false,
                75,
            ),
        ] {
            let mut message = RuleMessage::default();
            message.header.family = AddressFamily::Inet;
            message.header.action = RuleAction::ToTable;
            if attributes
                .iter()
                .any(|attribute| matches!(attribute, Destination(_)))
            {
                message.header.dst_len = 24;
            }
            message.header.flags = if is_inverted {
                RuleFlags::Invert
            } else {
                RuleFlags::empty()
            };
            message.attributes = attributes;
            let mut others = OtherRules::default();
            others.take(&message);
            assert_eq!(others.first_preference(), first, "{name}");
        }
    }
}
