//! Maintains the rules by which packets take the routes of kpx's tables.
//!
//! The host's own packets look for a service route before the operator's rules: a rule such as
//! `from ADDRESS` of a host with several networks would else lead them away. Packets of others meet
//! their Service at a hook, before the routes. Those that no hook has met come to the same routes
//! behind all rules that others chose for them.
//!
//! Rules for external frontends lead the host's own packets to a frontend, and no others, to a
//! second table.
//! A route to the frontend's address would take too much. The address may be another machine's real
//! one, and packets to ports other than the frontend's must still go there.
//!
//! Replies are injected into the anchor, with the frontend as source. IPv4's rp_filter looks up the
//! way back to that source. The lookup has no ports, since all our rules concern the host's own
//! packets (`rule_requires_fldissect` in the kernel's fib_rules.h). The lookup has the packet's
//! mark, if the device is configured for that: see [`Rule::Back`].

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

/// The table of external frontends: "kpx" as a number, which no other program uses.
/// `ip route show table 7041144` lists it.
pub const TABLE: u32 = u32::from_be_bytes(*b"\0kpx");

/// The table of service routes.
pub const SERVICES: u32 = TABLE + 1;

/// The preference of the rules for the host's own packets: behind the local table (0), so that the
/// host's own addresses stay its own, and before the operator's rules. `ip rule show pref 75` lists
/// them.
///
/// `ip rule add` without a preference takes the place before the second rule of the list, which is
/// ours. Our rules then go before that one: see [`Rules::verify`].
pub const PREFERENCE: u32 = b'K' as u32;

/// The preference of the rules for all packets: before the main table's (32766), and behind the
/// operator's rules, the first of which `ip rule add` puts here without a preference. Of rules with
/// one preference the kernel asks the oldest first.
pub const LAST_PREFERENCE: u32 = 32_765;

/// The largest number of rules. More would be felt: the kernel goes through its rules one by one
/// for each packet that it routes.
pub const MAX: usize = 256;

/// The packets that take the routes of a table of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Packets of the host's own sockets, by the routes of [`SERVICES`].
    Own { ipv6: bool },
    /// All packets behind the operator's rules, by those routes of the main table that are for
    /// networks narrower than this prefix length.
    Narrow { ipv6: bool, prefix_len: u8 },
    /// All packets behind those, by the routes of [`SERVICES`].
    All { ipv6: bool },
    /// Packets of the host's own sockets to this address and port, by the routes of [`TABLE`].
    To(IpAddr, Proto, u16),
    /// The way back of IPv4 packets that are injected into the anchor, as rp_filter looks it up.
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

/// The result of one pass. The kernel may refuse a rule and take all others.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub added: usize,
    pub deleted: usize,
    /// The refused rules, with the kernel's reason. Every pass tries them again.
    pub refused: Vec<(Rule, String)>,
}

/// The rules of kpx, of both families.
pub struct Rules {
    handle: Handle,
    /// The rules in the kernel with their preferences, as far as known. Any program may delete
    /// rules: see [`Rules::verify`].
    now: BTreeMap<Rule, u32>,
    others: OtherRules,
}

impl Rules {
    /// Takes over the rules of a dead predecessor.
    pub async fn open(handle: Handle) -> anyhow::Result<Self> {
        let (now, others) = read(&handle).await?;
        Ok(Self {
            handle,
            now,
            others,
        })
    }

    /// Makes our rules equal to `want`. Asks the kernel nothing, so the cost is that of the
    /// difference.
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
                // They are for addresses and marks that the local table does not know.
                Rule::To(..) | Rule::Back => first.min(PREFERENCE),
            };
            if self.now.get(&rule) != Some(&preference) {
                self.put(rule, preference, &mut report).await?;
            }
        }
        Ok(report)
    }

    /// Adds a rule, and then deletes the same one with another preference.
    async fn put(
        &mut self,
        rule: Rule,
        preference: u32,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let before = self.now.get(&rule).copied();
        if let Rule::Narrow { ipv6, .. } = rule {
            // It is to come before this one, which follows in turn.
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

    /// Reads the kernel's rules, and then does the same as [`Rules::reconcile`]. Our rules go
    /// before those of others that would take packets of the host's own sockets.
    pub async fn verify(&mut self, want: &BTreeSet<Rule>) -> anyhow::Result<Report> {
        (self.now, self.others) = read(&self.handle).await?;
        self.reconcile(want).await
    }

    /// Returns the rules of others that come before ours and may take the host's packets to these
    /// networks, in the words of `ip rule`.
    pub fn before_ours(&self, nets: &[IpNet]) -> Vec<String> {
        self.others.before_ours(nets)
    }

    /// Deletes a rule. Returns true if it is gone.
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
        // A missing rule is as wanted.
        taken(result, nix::libc::ENOENT, rule, refused)
    }
}

/// The rules of other programs that decide about the place of ours.
#[derive(Debug, Default)]
struct OtherRules {
    /// The preference of the local table's rule, which some programs move (Cilium).
    local: u32,
    /// Those that may take packets of the host's own sockets.
    taking: Vec<OtherRule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct OtherRule {
    is_ipv6: bool,
    preference: u32,
    /// The destinations; None for all.
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
    /// Packets with a mark, and those of sockets that are bound to a device, are the matter of the
    /// program that made the rule.
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

    /// Returns the preference of our rules for the host's own packets: behind the local table, and
    /// before the rules of others that would take these packets wherever they go. A rule that names
    /// destinations stays before ours: its owner has chosen it for them.
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

/// Returns the rules of others that come before ours wherever ours are, as [`Rules::before_ours`]
/// does. Changes nothing.
pub async fn before_ours(handle: &Handle, nets: &[IpNet]) -> anyhow::Result<Vec<String>> {
    let mut others = OtherRules::default();
    list(handle, |rule| !is_ours(rule))
        .await?
        .iter()
        .for_each(|message| others.take(message));
    Ok(others.before_ours(nets))
}

/// Returns the number of our rules, including those of earlier agents.
pub async fn count(handle: &Handle) -> anyhow::Result<usize> {
    Ok(ours(handle).await?.len())
}

/// Deletes our rules, including those of earlier agents. Does nothing if there are none.
pub async fn remove(handle: &Handle) -> anyhow::Result<()> {
    for message in ours(handle).await? {
        match handle.rule().del(message).execute().await {
            Err(Error::NetlinkError(error)) if error.raw_code() == -nix::libc::ENOENT => {}
            result => result.context("delete a rule")?,
        }
    }
    Ok(())
}

/// Returns true if the kernel's state is as wanted: the request succeeded, or the error `done` says
/// that it was so already. Records a refusal. Returns an error only if the kernel cannot be asked.
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

/// Reads the rules of this version's form, and those of others that may come before. Our rules of
/// another form are deleted, and so are doubles, which a move leaves behind that was cut short.
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

/// Returns all rules with our protocol and preference, or to one of our tables.
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
        // The kernel's input device for a packet that starts here.
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

/// Returns the rule of a message with its preference, or None for another program's rule or one of
/// another form than [`message`] makes.
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
    // The kernel adds attributes that every rule has.
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
