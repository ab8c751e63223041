//! Maintains the host's way to external frontends. The rules lead the host's own packets to a frontend, and no others,
//! to a table of kpx.
//!
//! A route to the frontend's address would take too much. The address may be another machine's real one, and packets to
//! ports other than the frontend's must still go there.
//!
//! Replies are injected into the anchor, with the frontend as source. IPv4's rp_filter looks up the way back to that
//! source. The lookup has no ports, since all our rules concern the host's own packets (`rule_requires_fldissect` in
//! the kernel's fib_rules.h). The lookup has the packet's mark, if the device is configured for that: see
//! [`Rule::Back`].

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use anyhow::Context;
use ipnet::IpNet;
use netlink_packet_route::IpProtocol;
use netlink_packet_route::route::RouteProtocol;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage, RulePortRange};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use proxy_common::addr::Proto;
use proxy_common::device::{INJECTED_MARK, INJECTED_MASK};
use rtnetlink::Error;
use tracing::debug;

use super::netlink::{Handle, dump};
use super::{route, sysctl};

/// The table to which the rules lead: "kpx" as a number, which no other program uses. `ip route show table 7041144`
/// lists it.
pub const TABLE: u32 = u32::from_be_bytes(*b"\0kpx");

/// The preference of the rules: behind the local table (0), so that the host's own addresses stay its own, and before
/// all less exact rules. `ip rule show pref 75` lists them.
pub const PREFERENCE: u32 = b'K' as u32;

/// The largest number of rules. More would be felt: the kernel goes through its rules one by one for each packet that
/// it routes.
pub const MAX: usize = 256;

/// The packets that take the routes of [`TABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Packets of the host's own sockets to this address and port.
    To(IpAddr, Proto, u16),
    /// The way back of IPv4 packets that are injected into the anchor, as rp_filter looks it up.
    Back,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::To(addr, proto, port) => write!(f, "to {}/{proto}", SocketAddr::new(*addr, *port)),
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
    /// The rules in the kernel, as far as known. Any program may delete rules: see [`Rules::verify`].
    now: BTreeSet<Rule>,
}

impl Rules {
    /// Takes over the rules of a dead predecessor.
    pub async fn open(handle: Handle) -> anyhow::Result<Self> {
        let now = read(&handle).await?;
        Ok(Self { handle, now })
    }

    /// Makes our rules equal to `want`. Asks the kernel nothing, so the cost is that of the difference.
    pub async fn reconcile(&mut self, want: &BTreeSet<Rule>) -> anyhow::Result<Report> {
        let mut report = Report::default();
        for rule in self.now.difference(want).copied().collect::<Vec<_>>() {
            let result = self.handle.rule().del(message(&rule)).execute().await;
            // A missing rule is as wanted.
            if taken(result, nix::libc::ENOENT, rule, &mut report.refused)? {
                self.now.remove(&rule);
                report.deleted += 1;
                debug!(%rule, "rule deleted");
            }
        }
        for rule in want.difference(&self.now).copied().collect::<Vec<_>>() {
            let mut request = self.handle.rule().add();
            *request.message_mut() = message(&rule);
            if taken(request.execute().await, nix::libc::EEXIST, rule, &mut report.refused)? {
                self.now.insert(rule);
                report.added += 1;
                debug!(%rule, "rule added");
            }
        }
        Ok(report)
    }

    /// Reads the kernel's rules, and then does the same as [`Rules::reconcile`].
    pub async fn verify(&mut self, want: &BTreeSet<Rule>) -> anyhow::Result<Report> {
        self.now = read(&self.handle).await?;
        self.reconcile(want).await
    }
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

/// Returns true if the kernel's state is as wanted: the request succeeded, or the error `done` says that it was so
/// already. Records a refusal. Returns an error only if the kernel cannot be asked.
fn taken(result: Result<(), Error>, done: i32, rule: Rule, refused: &mut Vec<(Rule, String)>) -> anyhow::Result<bool> {
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

/// Reads the rules of this version's form. Our rules of another form are deleted.
async fn read(handle: &Handle) -> anyhow::Result<BTreeSet<Rule>> {
    let mut now = BTreeSet::new();
    for message in ours(handle).await? {
        match parse(&message) {
            Some(rule) => drop(now.insert(rule)),
            None => handle.rule().del(message).execute().await.context("delete a rule of another version")?,
        }
    }
    Ok(now)
}

/// Returns all rules with our protocol and preference.
async fn ours(handle: &Handle) -> anyhow::Result<Vec<RuleMessage>> {
    list(handle, is_ours).await
}

/// Returns the rules of both families that `pick` selects.
pub(super) async fn list(handle: &Handle, pick: impl Fn(&RuleMessage) -> bool) -> anyhow::Result<Vec<RuleMessage>> {
    let mut picked = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        if family == AddressFamily::Inet6 && !sysctl::has_ipv6() {
            continue;
        }
        let mut request = RuleMessage::default();
        request.header.family = family;
        let rules = dump(handle, RouteNetlinkMessage::GetRule(request), |message| match message {
            RouteNetlinkMessage::NewRule(rule) => Some(rule).filter(&pick),
            _ => None,
        });
        picked.extend(rules.await.with_context(|| format!("list the {family:?} rules"))?);
    }
    Ok(picked)
}

pub(super) fn is_ours(rule: &RuleMessage) -> bool {
    let has = |attribute| rule.attributes.contains(&attribute);
    has(RuleAttribute::Protocol(RouteProtocol::Other(route::PROTOCOL))) && has(RuleAttribute::Priority(PREFERENCE))
}

fn message(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.action = RuleAction::ToTable;
    message.header.family = AddressFamily::Inet;
    message.attributes = vec![
        RuleAttribute::Protocol(RouteProtocol::Other(route::PROTOCOL)),
        RuleAttribute::Priority(PREFERENCE),
        RuleAttribute::Table(TABLE),
        // The kernel's input device for a packet that starts here.
        RuleAttribute::Iifname("lo".to_owned()),
    ];
    match *rule {
        Rule::To(addr, proto, port) => {
            message.header.dst_len = IpNet::from(addr).prefix_len();
            if addr.is_ipv6() {
                message.header.family = AddressFamily::Inet6;
            }
            message.attributes.extend([
                RuleAttribute::Destination(addr),
                RuleAttribute::IpProtocol(IpProtocol::from(proto.0)),
                RuleAttribute::DestinationPortRange(RulePortRange { start: port, end: port }),
            ]);
        }
        Rule::Back => {
            let mark = [RuleAttribute::FwMark(INJECTED_MARK), RuleAttribute::FwMask(INJECTED_MASK)];
            message.attributes.extend(mark);
        }
    }
    message
}

/// Returns the rule of a message, or None for another program's rule or one of another form than [`message`] makes.
fn parse(message: &RuleMessage) -> Option<Rule> {
    let (mut addr, mut proto, mut port) = (None, None, None);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Destination(dst) => addr = Some(*dst),
            RuleAttribute::IpProtocol(number) => proto = Some(Proto(u8::from(*number))),
            RuleAttribute::DestinationPortRange(range) => port = Some(range.start),
            _ => {}
        }
    }
    let rule = addr.map_or(Some(Rule::Back), |addr| Some(Rule::To(addr, proto?, port?)))?;
    let as_made = self::message(&rule);
    // The kernel adds attributes that every rule has.
    let complete = as_made.attributes.iter().all(|attribute| message.attributes.contains(attribute));
    let (made, read) = (&as_made.header, &message.header);
    let alike = (made.family, made.dst_len, made.src_len, made.tos, made.action)
        == (read.family, read.dst_len, read.src_len, read.tos, read.action);
    (complete && alike).then_some(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sent_rule_is_read_back() {
        let to = |addr: &str, proto| Rule::To(addr.parse().unwrap(), proto, 80);
        for rule in [to("203.0.113.7", Proto::TCP), to("2001:db8::7", Proto::UDP), Rule::Back] {
            assert!(is_ours(&message(&rule)));
            assert_eq!(parse(&message(&rule)), Some(rule));
            let mut wider = message(&rule);
            wider.header.dst_len ^= 1;
            assert_eq!(parse(&wider), None, "of another shape");
            let mut elsewhere = message(&rule);
            elsewhere.attributes.retain(|attribute| *attribute != RuleAttribute::Table(TABLE));
            assert_eq!(parse(&elsewhere), None, "to another table");
            let mut foreign = message(&rule);
            foreign.attributes.retain(|attribute| *attribute != RuleAttribute::Priority(PREFERENCE));
            assert!(!is_ours(&foreign));
        }
    }
}
