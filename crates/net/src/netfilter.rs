//! Reads the rules of netfilter through netlink (linux/netfilter/nf_tables.h) and finds their
//! possible effects on packets that bypass the network stack.
//!
//! A packet between pods has no mark, and its addresses are not the host's. A rule that may or may
//! not match counts as an obstacle. Messages are parsed as bytes, because a rule that a parser
//! skips would count as harmless.

pub(crate) mod attrs;
mod expression;
mod legacy;
mod listing;
mod model;
mod packet;
mod refusals;
mod registers;
#[cfg(test)]
mod tests;
mod walk;
mod xt;

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use netlink_packet_core::{DefaultNla, Emitable, NLM_F_DUMP, NLM_F_REQUEST, NetlinkPayload};
use nix::libc::{IPPROTO_SCTP, IPPROTO_TCP, IPPROTO_UDP};
use rtnetlink::proto::ConnectionHandle;
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

pub(crate) use self::legacy::{Legacy, tracks_connections};
pub use self::refusals::Refusal;

use self::attrs::Attrs;
use self::legacy::NAT;
use self::model::{Base, Chain, ChainName, Found, Hook, Ruleset, TableFamily};
use self::packet::{Asked, Devices, ESTABLISHED, Family, INVALID, Mark, NEW, Names, RELATED};
use super::netlink::{dumped, kernel};
use super::raw::{self, Asker, Message, attribute};
use super::sysctl;

/// The types of messages: the nftables subsystem and the message number.
const NFT_MSG_NEWCHAIN: u16 = 0x0a03;
const NFT_MSG_GETCHAIN: u16 = 0x0a04;
const NFT_MSG_NEWRULE: u16 = 0x0a06;
const NFT_MSG_GETRULE: u16 = 0x0a07;

/// The families of tables, in the first byte of each message.
const NFPROTO_UNSPEC: u8 = 0;
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_NETDEV: u8 = 5;
const NFPROTO_IPV6: u8 = 10;
/// The length of `struct nfgenmsg`, the header of each message. Its last two bytes are the
/// generation of the tables.
const HEAD_LEN: usize = 4;

const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_USE: u16 = 6;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
const NFTA_HOOK_DEV: u16 = 3;
const NFTA_HOOK_DEVS: u16 = 4;
const NFTA_DEVICE_NAME: u16 = 1;
const NF_INET_PRE_ROUTING: u32 = 0;
const NF_INET_LOCAL_IN: u32 = 1;
const NF_INET_FORWARD: u32 = 2;
const NF_INET_POST_ROUTING: u32 = 4;
const NF_INET_INGRESS: u32 = 5;
const NF_DROP: u32 = 0;

const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;

/// The number of attempts to read tables while they change.
const TRIES: u32 = 5;
/// The maximum number of reasons and of chains in a [`Judgement`]; an extra line counts the rest.
const LINES: usize = 10;
const CHAINS: usize = 5;

/// A snapshot of the rules of this network namespace.
#[derive(Debug)]
pub struct Netfilter {
    rules: Ruleset,
    legacy: Legacy,
    follows: bool,
    /// True if conntrack picks up connections midstream. If false, packets of such connections are
    /// `INVALID`.
    takes_up: bool,
}

/// The sysctl for midstream pickup; 0 disables it.
const LOOSE: &str = "netfilter/nf_conntrack_tcp_loose";

/// The effects of the rules on a set of packets. Each text is a reason or a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judgement {
    /// The rules, chains and tables that may refuse, change or record some of the packets.
    pub against: Vec<String>,
    /// The chains whose rules accept all of the packets unchanged.
    pub harmless: Vec<String>,
}

impl Netfilter {
    /// Reads the rules. Requires CAP_NET_ADMIN. After an error, assume that rules may have any
    /// effect.
    pub async fn read() -> Result<Self> {
        let messages = listed().await.context("list the rules of nftables")?;
        let rules = ruleset(&messages).context("read the rules of nftables")?;
        let takes_up = sysctl::read(LOOSE)?.is_none_or(|loose| loose.trim() != "0");
        Ok(Self {
            rules,
            legacy: Legacy::read(false)?,
            follows: legacy::tracks_connections()?,
            takes_up,
        })
    }

    /// Evaluates the rules for connections between addresses of `pods`, from first to last packet,
    /// on all devices except `others`. `is_far`: replies may arrive at any device except `lo`, and
    /// conntrack recognises neither packets that go through the network stack nor routers' ICMP
    /// errors about these connections. Only rules for the families of `pods` count.
    pub fn judge_bypass(
        &self,
        pods: &[IpNet],
        others: &BTreeSet<String>,
        is_far: bool,
    ) -> Judgement {
        self.judge_from_first(pods, others, is_far, &[IPPROTO_TCP, IPPROTO_UDP])
    }

    /// Evaluates the rules for flows of one IP protocol number between `ends`, on any device.
    pub fn judge_flows(&self, ends: &[IpNet], protocol: u8) -> Judgement {
        self.judge_from_first(ends, &BTreeSet::new(), false, &[protocol.into()])
    }

    fn judge_from_first(
        &self,
        pods: &[IpNet],
        others: &BTreeSet<String>,
        is_far: bool,
        protocols: &[i32],
    ) -> Judgement {
        let everywhere = Self::everywhere();
        // ICMP errors between pods bypass the network stack too. A rule that matches only INVALID
        // packets is no obstacle for such errors.
        let reporters: &[IpNet] = if is_far { &everywhere } else { pods };
        let protocols: Vec<u8> = protocols.iter().map(|number| *number as u8).collect();
        let is_known = !is_far && self.takes_up;
        let states: &[u32] = if is_known {
            &[NEW, ESTABLISHED]
        } else {
            &[NEW, ESTABLISHED, INVALID]
        };
        let lo = BTreeSet::from(["lo".to_owned()]);
        let devices = Devices {
            incoming: Names::AnyBut(if is_far { &lo } else { others }),
            outgoing: Names::AnyBut(others),
        };
        let reports = if is_known { RELATED } else { INVALID };
        let asked = Asked {
            states,
            reporters,
            reports,
            ..Asked::new(pods, Mark::ZERO, &protocols, devices)
        };
        self.judge(
            &asked,
            |family| pods.iter().any(|net| Family::of(net) == family),
            |_| true,
        )
    }

    /// Evaluates the rules for packets of open bypass TCP connections ([`Self::judge_bypass`]), as
    /// if conntrack had tracked them from the start. `heeds_marks`: a mark that a rule sets has an
    /// effect elsewhere.
    pub fn judge_open_bypass(
        &self,
        pods: &[IpNet],
        others: &BTreeSet<String>,
        is_far: bool,
        heeds_marks: bool,
    ) -> Judgement {
        let lo = BTreeSet::from(["lo".to_owned()]);
        let devices = Devices {
            incoming: Names::AnyBut(if is_far { &lo } else { others }),
            outgoing: Names::AnyBut(others),
        };
        let protocols = [IPPROTO_TCP as u8];
        let asked = Asked::new(pods, Mark::ZERO, &protocols, devices);
        let asked = Asked {
            heeds_marks,
            knows_marks: true,
            knows_senders: !is_far,
            ..asked
        };
        self.judge(
            &asked,
            |family| pods.iter().any(|net| Family::of(net) == family),
            |table| table != NAT,
        )
    }

    /// Evaluates the rules for packets of open connections between any addresses, on any devices.
    pub fn judge_open(&self) -> Judgement {
        let everywhere = Self::everywhere();
        let others = BTreeSet::new();
        let protocols = [IPPROTO_TCP, IPPROTO_UDP, IPPROTO_SCTP].map(|number| number as u8);
        let devices = Devices {
            incoming: Names::AnyBut(&others),
            outgoing: Names::AnyBut(&others),
        };
        let asked = Asked::new(&everywhere, Mark::UNKNOWN, &protocols, devices);
        self.judge(&asked, |_| true, |table| table != NAT)
    }

    /// Evaluates the rules for packets of open connections between addresses of `pods` with valid
    /// sources, only on the devices `ports`. Only rules for the families of `pods` count.
    /// `heeds_marks`: a mark that a rule sets has an effect elsewhere.
    pub fn judge_opened(
        &self,
        pods: &[IpNet],
        ports: &BTreeSet<String>,
        heeds_marks: bool,
    ) -> Judgement {
        let protocols = [IPPROTO_TCP, IPPROTO_UDP].map(|number| number as u8);
        let ports = Names::Only(Rc::new(ports.clone()));
        let devices = Devices {
            incoming: ports.clone(),
            outgoing: ports,
        };
        let of_ports = Asked::new(pods, Mark::ZERO, &protocols, devices);
        let asked = Asked {
            heeds_marks,
            knows_marks: true,
            knows_senders: true,
            ..of_ports
        };
        self.judge(
            &asked,
            |family| pods.iter().any(|net| Family::of(net) == family),
            |table| table != NAT,
        )
    }

    /// Evaluates the rules for UDP packets of open flows between outside clients and addresses of
    /// `pods`, in both directions. `ports` are the pods' devices, `ways` the uplinks to the
    /// clients. A pod's source is valid, but a client's source may be spoofed. `heeds_marks` as in
    /// [`Self::judge_opened`].
    pub fn judge_opened_outside(
        &self,
        pods: &[IpNet],
        ports: &BTreeSet<String>,
        ways: &BTreeSet<String>,
        heeds_marks: bool,
    ) -> Judgement {
        let everywhere = Self::everywhere();
        let protocols = [IPPROTO_UDP as u8];
        let [ports, ways] = [ports, ways].map(|names| Names::Only(Rc::new(names.clone())));
        let there = Devices {
            incoming: ways.clone(),
            outgoing: ports.clone(),
        };
        let back = Devices {
            incoming: ports,
            outgoing: ways,
        };
        let asked = |devices| Asked {
            heeds_marks,
            knows_marks: true,
            ..Asked::new(pods, Mark::ZERO, &protocols, devices)
        };
        let requests = Asked {
            sources: &everywhere,
            ..asked(there)
        };
        let answers = Asked {
            destinations: &everywhere,
            knows_senders: true,
            ..asked(back)
        };
        let has_family = |family| pods.iter().any(|net| Family::of(net) == family);
        let [requests, answers] =
            [requests, answers].map(|asked| self.judge(&asked, has_family, |table| table != NAT));
        let more = answers
            .against
            .into_iter()
            .filter(|line| !requests.against.contains(line));
        let against = requests.against.iter().cloned().chain(more).collect();
        let harmless = requests
            .harmless
            .into_iter()
            .filter(|chain| answers.harmless.contains(chain))
            .collect();
        Judgement {
            against: shortened(against, LINES),
            harmless,
        }
    }

    /// Returns the networks of all IPv4 and IPv6 addresses.
    pub fn everywhere() -> [IpNet; 2] {
        [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())]
    }

    /// Returns true if conntrack may be active here. The kernel activates conntrack in a network
    /// namespace with the first rule that needs it, in any chain.
    pub fn may_follow_connections(&self) -> bool {
        let has_rules = |(name, chain): (&ChainName, &Chain)| {
            name.family != TableFamily::Netdev && chain.base.is_some() && chain.uses > 0
        };
        self.follows || self.legacy.has_rules() || self.rules.iter().any(has_rules)
    }

    fn judge(
        &self,
        asked: &Asked,
        has_family: impl Fn(Family) -> bool,
        is_met: impl Fn(&str) -> bool,
    ) -> Judgement {
        let Found {
            obstacles,
            harmless,
        } = walk::walk(&self.rules, asked);
        let found = obstacles.iter().map(ToString::to_string);
        let legacy = [Family::V4, Family::V6]
            .into_iter()
            .filter(|family| has_family(*family));
        let against = found
            .chain(legacy.flat_map(|family| self.legacy.obstacles(family, &is_met)))
            .collect();
        let harmless = harmless.iter().map(ToString::to_string).collect();
        Judgement {
            against: shortened(against, LINES),
            harmless: shortened(harmless, CHAINS),
        }
    }
}

fn shortened(mut lines: Vec<String>, most: usize) -> Vec<String> {
    let more = lines.len().saturating_sub(most);
    lines.truncate(most);
    lines.extend((more > 0).then(|| format!("and {more} more")));
    lines
}

/// Returns true if an nftables table for IPv4 or IPv6 has this chain.
pub async fn has_chain(table: &str, chain: &str) -> Result<bool> {
    let text = |text: &str| [text.as_bytes(), &[0]].concat();
    let names = [
        attribute(NFTA_CHAIN_TABLE, &text(table)),
        attribute(NFTA_CHAIN_NAME, &text(chain)),
    ]
    .concat();
    let mut socket =
        Asker::open(NETLINK_NETFILTER).context("open a netlink socket for netfilter")?;
    let look = async |handle: &ConnectionHandle<Message>| {
        for family in [NFPROTO_IPV4, NFPROTO_IPV6] {
            let request = raw::request(
                NFT_MSG_GETCHAIN,
                NLM_F_REQUEST,
                [&[family, 0, 0, 0], &names[..]].concat(),
            );
            let mut answers = handle
                .clone()
                .request(request, kernel())
                .map_err(io::Error::other)?;
            match answers.next().await.map(|answer| answer.payload) {
                Some(NetlinkPayload::InnerMessage(_)) => return Ok(true),
                Some(NetlinkPayload::Error(error)) => match error.to_io() {
                    // The chain is missing, or the kernel has no nftables.
                    error
                        if [ErrorKind::NotFound, ErrorKind::InvalidInput]
                            .contains(&error.kind()) => {}
                    error => return Err(error),
                },
                _ => return Err(ErrorKind::UnexpectedEof.into()),
            }
        }
        io::Result::Ok(false)
    };
    socket
        .ask(look)
        .await
        .with_context(|| format!("look for the chain {chain} of table {table}"))
}

/// Returns the nftables tables with this text in the table's name or in a rule's comment, in the
/// form `ip nat`.
pub async fn tables_with(text: &str) -> Result<BTreeSet<String>> {
    let mut messages = Vec::new();
    let mut socket =
        Asker::open(NETLINK_NETFILTER).context("open a netlink socket for netfilter")?;
    let list = async |handle: &ConnectionHandle<Message>| {
        match dump(handle, NFT_MSG_GETRULE, NFPROTO_UNSPEC, &[], &mut messages).await {
            // A kernel without nftables has no rules.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(false),
            listed => listed,
        }
    };
    socket
        .ask(list)
        .await
        .context("list the rules of nftables")?;
    let has_text = |message: &&Message| {
        message
            .bytes
            .windows(text.len())
            .any(|bytes| bytes == text.as_bytes())
    };
    let found = messages
        .iter()
        .filter(has_text)
        .filter_map(|Message { bytes, .. }| {
            let (head, attributes) = bytes.split_at_checked(HEAD_LEN)?;
            let family = match head[0] {
                NFPROTO_INET => "inet",
                NFPROTO_IPV4 => "ip",
                NFPROTO_IPV6 => "ip6",
                _ => return None,
            };
            Some(format!(
                "{family} {}",
                Attrs::parse(attributes).ok()?.text(NFTA_RULE_TABLE)?
            ))
        });
    Ok(found.collect())
}

/// Returns the kernel's messages about all chains, and about the rules of the tables that have
/// chains for forwarded packets.
async fn listed() -> Result<Vec<Message>> {
    let mut socket =
        Asker::open(NETLINK_NETFILTER).context("open a netlink socket for netfilter")?;
    let list = async |handle: &ConnectionHandle<Message>| {
        for _ in 0..TRIES {
            if let Some(messages) = listed_once(handle).await? {
                return Ok(messages);
            }
        }
        bail!("other programs change the rules all the time")
    };
    socket.ask(list).await
}

/// Lists once. Returns `None` if the tables changed meanwhile.
async fn listed_once(handle: &ConnectionHandle<Message>) -> Result<Option<Vec<Message>>> {
    let mut messages = Vec::new();
    let mut is_consistent =
        match dump(handle, NFT_MSG_GETCHAIN, NFPROTO_UNSPEC, &[], &mut messages).await {
            // A kernel without nftables has no chains.
            Err(error) if error.kind() == ErrorKind::InvalidInput => return Ok(Some(Vec::new())),
            consistent => consistent?,
        };
    for (family, table) in tables(&ruleset(&messages)?) {
        let family = match family {
            TableFamily::Inet => NFPROTO_INET,
            TableFamily::Ip => NFPROTO_IPV4,
            TableFamily::Ip6 => NFPROTO_IPV6,
            // Rules at device hooks are not evaluated.
            TableFamily::Netdev => continue,
        };
        let name = DefaultNla::new(NFTA_RULE_TABLE, [table.as_bytes(), &[0]].concat());
        let mut filter = vec![0; name.buffer_len()];
        name.emit(&mut filter);
        is_consistent &= match dump(handle, NFT_MSG_GETRULE, family, &filter, &mut messages).await {
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            consistent => consistent?,
        };
    }
    let states: BTreeSet<_> = messages
        .iter()
        .map(|message| message.bytes.get(2..HEAD_LEN))
        .collect();
    Ok((is_consistent && states.len() <= 1).then_some(messages))
}

/// Returns the tables that have chains for forwarded packets.
fn tables(rules: &Ruleset) -> BTreeSet<(TableFamily, String)> {
    let is_passed = |name: &ChainName, chain: &Chain| {
        [Family::V4, Family::V6]
            .into_iter()
            .any(|family| walk::passed(name, chain, family).is_some())
    };
    let passed = rules.iter().filter(|(name, chain)| is_passed(name, chain));
    passed
        .map(|(name, _)| (name.family, name.table.clone()))
        .collect()
}

/// Appends the answers to a dump. Returns true if the dump is consistent.
async fn dump(
    handle: &ConnectionHandle<Message>,
    kind: u16,
    family: u8,
    filter: &[u8],
    messages: &mut Vec<Message>,
) -> io::Result<bool> {
    let bytes = [&[family, 0, 0, 0], filter].concat();
    let request = raw::request(kind, NLM_F_REQUEST | NLM_F_DUMP, bytes);
    let answers = handle
        .clone()
        .request(request, kernel())
        .map_err(io::Error::other)?;
    dumped(answers, |message| messages.push(message)).await
}

/// Parses the messages, in which chains come first.
fn ruleset(messages: &[Message]) -> Result<Ruleset> {
    let mut rules = Ruleset::new();
    for Message { kind, bytes } in messages {
        let (head, attributes) = bytes
            .split_at_checked(HEAD_LEN)
            .context("a message is too short")?;
        let family = match head[0] {
            NFPROTO_INET => TableFamily::Inet,
            NFPROTO_IPV4 => TableFamily::Ip,
            NFPROTO_IPV6 => TableFamily::Ip6,
            NFPROTO_NETDEV => TableFamily::Netdev,
            _ => continue,
        };
        let attributes = Attrs::parse(attributes)?;
        match *kind {
            NFT_MSG_NEWCHAIN => {
                let name = chain_name(family, &attributes, [NFTA_CHAIN_TABLE, NFTA_CHAIN_NAME])?;
                rules.insert(name, chain(family, &attributes)?);
            }
            NFT_MSG_NEWRULE => {
                let name = chain_name(family, &attributes, [NFTA_RULE_TABLE, NFTA_RULE_CHAIN])?;
                let rule = expression::rule(&attributes.inside(NFTA_RULE_EXPRESSIONS)?)?;
                rules
                    .get_mut(&name)
                    .with_context(|| format!("a rule of an unlisted {name}"))?
                    .rules
                    .push(rule);
            }
            _ => {}
        }
    }
    Ok(rules)
}

fn chain_name(
    family: TableFamily,
    attributes: &Attrs,
    [table, chain]: [u16; 2],
) -> Result<ChainName> {
    let text = |kind| {
        attributes
            .text(kind)
            .map(str::to_owned)
            .context("a message names no chain")
    };
    Ok(ChainName {
        family,
        table: text(table)?,
        chain: text(chain)?,
    })
}

/// Parses a chain. A chain without a hook runs only when other chains call it.
fn chain(family: TableFamily, chain: &Attrs) -> Result<Chain> {
    let hook = chain.inside(NFTA_CHAIN_HOOK)?;
    let base = hook.u32(NFTA_HOOK_HOOKNUM).map(|number| Base {
        hook: match number {
            _ if family == TableFamily::Netdev => Hook::Device,
            NF_INET_PRE_ROUTING => Hook::Prerouting,
            NF_INET_LOCAL_IN => Hook::Input,
            NF_INET_FORWARD => Hook::Forward,
            NF_INET_POST_ROUTING => Hook::Postrouting,
            NF_INET_INGRESS => Hook::Device,
            _ => Hook::Host,
        },
        priority: hook
            .u32(NFTA_HOOK_PRIORITY)
            .unwrap_or_default()
            .cast_signed(),
        drops: chain.u32(NFTA_CHAIN_POLICY) == Some(NF_DROP),
        is_nat: chain.text(NFTA_CHAIN_TYPE) == Some(NAT),
    });
    let devices = devices(&hook)?;
    Ok(Chain {
        base,
        devices,
        uses: chain.u32(NFTA_CHAIN_USE).unwrap_or_default(),
        rules: Vec::new(),
    })
}

/// Returns the devices of a hook; empty if the kernel names only some of them.
fn devices(hook: &Attrs) -> Result<Vec<String>> {
    let list = hook.inside(NFTA_HOOK_DEVS)?;
    if list.has_others(NFTA_DEVICE_NAME) {
        return Ok(Vec::new());
    }
    let names = list.all(NFTA_DEVICE_NAME).chain(hook.all(NFTA_HOOK_DEV));
    Ok(names
        .map(|name| {
            String::from_utf8_lossy(name)
                .trim_end_matches('\0')
                .to_owned()
        })
        .collect())
}
