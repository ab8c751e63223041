//! Lists the NAT rules that may change a packet between two pods of this node, over netlink
//! (linux/netfilter/nf_tables.h). NAT decides with a connection's first packet, so without such rules even this packet
//! can skip the stack.
//!
//! A packet between pods carries no mark before NAT, and its addresses are none of the host. A rule that may or may not
//! apply counts as an obstacle. Messages are read as bytes: a rule that a parser skips would count as harmless.

mod attrs;
mod expression;
mod model;
mod packet;
mod registers;
#[cfg(test)]
mod tests;
mod walk;
mod xt;

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use netlink_packet_core::{DefaultNla, Emitable, NLM_F_DUMP, NLM_F_REQUEST};
use rtnetlink::proto::{ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use self::attrs::Attrs;
use self::model::{Base, Chain, ChainName, Hook, Ruleset, TableFamily};
use self::packet::Family;
use super::forward::{LEGACY, NAT, legacy_tables};
use super::netlink::{dumped, kernel};
use super::raw::{self, Message};

/// The types of messages: the subsystem nftables, and the message's own number.
const NFT_MSG_NEWCHAIN: u16 = 0x0a03;
const NFT_MSG_GETCHAIN: u16 = 0x0a04;
const NFT_MSG_NEWRULE: u16 = 0x0a06;
const NFT_MSG_GETRULE: u16 = 0x0a07;

/// The families of tables, in the first byte of each message.
const NFPROTO_UNSPEC: u8 = 0;
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
/// The length of `struct nfgenmsg`, with which each message begins. Its last two bytes number the state of the tables.
const HEAD_LEN: usize = 4;

const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
const NF_INET_PRE_ROUTING: u32 = 0;
const NF_INET_POST_ROUTING: u32 = 4;
const NF_DROP: u32 = 0;

const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;

/// The number of attempts to read tables that change meanwhile.
const TRIES: u32 = 5;
/// The most lines of an answer; one more line counts the rest.
const LINES: usize = 10;

/// Returns the NAT rules that may change a packet from one address of `pods` to another, one line each. Only the
/// families of `pods` are looked at. After an error, any rule may change packets. Takes CAP_NET_ADMIN.
pub async fn nat_rules(pods: &[IpNet]) -> Result<Vec<String>> {
    let messages = listed(pods).await.context("list the NAT rules of nftables")?;
    let rules = ruleset(&messages).context("read the NAT rules of nftables")?;
    let mut lines: Vec<_> = walk::obstacles(&rules, pods).iter().map(ToString::to_string).collect();
    // The rules of legacy iptables cannot be read without the right to open raw sockets.
    for (family, (tool, path)) in [Family::V4, Family::V6].into_iter().zip(LEGACY) {
        if pods.iter().any(|net| Family::of(net) == family) {
            lines.extend(legacy(tool, &legacy_tables(path)?));
        }
    }
    Ok(shortened(lines))
}

fn legacy(tool: &str, tables: &str) -> Option<String> {
    tables.lines().any(|table| table == NAT).then(|| format!("table {NAT} of {tool}-legacy"))
}

fn shortened(mut lines: Vec<String>) -> Vec<String> {
    let more = lines.len().saturating_sub(LINES);
    lines.truncate(LINES);
    lines.extend((more > 0).then(|| format!("and {more} more")));
    lines
}

/// Returns the kernel's messages about all chains, and about the rules of tables with NAT.
async fn listed(pods: &[IpNet]) -> Result<Vec<Message>> {
    let (mut connection, handle, _) = new_connection::<Message>(NETLINK_NETFILTER).context("open a netlink socket")?;
    // The end of a dump carries its error.
    connection.set_forward_done(true);
    let list = async {
        for _ in 0..TRIES {
            if let Some(messages) = listed_once(&handle, pods).await? {
                return Ok(messages);
            }
        }
        bail!("other programs change the rules all the time")
    };
    tokio::select! {
        messages = list => messages,
        () = connection => bail!("the netlink socket for netfilter has failed"),
    }
}

/// Lists once. Returns None if the tables changed meanwhile.
async fn listed_once(handle: &ConnectionHandle<Message>, pods: &[IpNet]) -> Result<Option<Vec<Message>>> {
    let mut messages = Vec::new();
    let mut is_consistent = match dump(handle, NFT_MSG_GETCHAIN, NFPROTO_UNSPEC, &[], &mut messages).await {
        // A kernel without nftables has no chains.
        Err(error) if error.kind() == ErrorKind::InvalidInput => return Ok(Some(Vec::new())),
        consistent => consistent?,
    };
    for (family, table) in tables(&ruleset(&messages)?, pods) {
        let family = match family {
            TableFamily::Inet => NFPROTO_INET,
            TableFamily::Ip => NFPROTO_IPV4,
            TableFamily::Ip6 => NFPROTO_IPV6,
        };
        let name = DefaultNla::new(NFTA_RULE_TABLE, [table.as_bytes(), &[0]].concat());
        let mut filter = vec![0; name.buffer_len()];
        name.emit(&mut filter);
        is_consistent &= match dump(handle, NFT_MSG_GETRULE, family, &filter, &mut messages).await {
            // The table has gone.
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            consistent => consistent?,
        };
    }
    let states: BTreeSet<_> = messages.iter().map(|message| message.bytes.get(2..HEAD_LEN)).collect();
    Ok((is_consistent && states.len() <= 1).then_some(messages))
}

/// Returns the tables that have NAT chains for packets between pods.
fn tables(rules: &Ruleset, pods: &[IpNet]) -> BTreeSet<(TableFamily, String)> {
    let is_passed =
        |name: &ChainName, chain: &Chain| pods.iter().any(|net| walk::passed(name, chain, Family::of(net)).is_some());
    let passed = rules.iter().filter(|(name, chain)| is_passed(name, chain));
    passed.map(|(name, _)| (name.family, name.table.clone())).collect()
}

/// Appends the answers to a dump; says whether the dump is consistent.
async fn dump(
    handle: &ConnectionHandle<Message>,
    kind: u16,
    family: u8,
    filter: &[u8],
    messages: &mut Vec<Message>,
) -> io::Result<bool> {
    let bytes = [&[family, 0, 0, 0], filter].concat();
    let request = raw::request(kind, NLM_F_REQUEST | NLM_F_DUMP, bytes);
    let answers = handle.clone().request(request, kernel()).map_err(io::Error::other)?;
    dumped(answers, |message| messages.push(message)).await
}

/// Reads the messages. The chains come first.
fn ruleset(messages: &[Message]) -> Result<Ruleset> {
    let mut rules = Ruleset::new();
    for Message { kind, bytes } in messages {
        let (head, attributes) = bytes.split_at_checked(HEAD_LEN).context("a message is too short")?;
        let family = match head[0] {
            NFPROTO_INET => TableFamily::Inet,
            NFPROTO_IPV4 => TableFamily::Ip,
            NFPROTO_IPV6 => TableFamily::Ip6,
            _ => continue,
        };
        let attributes = Attrs::parse(attributes)?;
        match *kind {
            NFT_MSG_NEWCHAIN => {
                let name = chain_name(family, &attributes, [NFTA_CHAIN_TABLE, NFTA_CHAIN_NAME])?;
                rules.insert(name, Chain { base: base(&attributes)?, rules: Vec::new() });
            }
            NFT_MSG_NEWRULE => {
                let name = chain_name(family, &attributes, [NFTA_RULE_TABLE, NFTA_RULE_CHAIN])?;
                let rule = expression::rule(&attributes.inside(NFTA_RULE_EXPRESSIONS)?)?;
                rules.get_mut(&name).with_context(|| format!("a rule of an unlisted {name}"))?.rules.push(rule);
            }
            _ => {}
        }
    }
    Ok(rules)
}

fn chain_name(family: TableFamily, attributes: &Attrs, [table, chain]: [u16; 2]) -> Result<ChainName> {
    let text = |kind| attributes.text(kind).map(str::to_owned).context("a message names no chain");
    Ok(ChainName { family, table: text(table)?, chain: text(chain)? })
}

/// Returns None for a chain that only other chains call, or that no forwarded packet meets, or that translates nothing.
fn base(chain: &Attrs) -> Result<Option<Base>> {
    let hook = chain.inside(NFTA_CHAIN_HOOK)?;
    let number = match hook.u32(NFTA_HOOK_HOOKNUM) {
        Some(NF_INET_PRE_ROUTING) => Hook::Prerouting,
        Some(NF_INET_POST_ROUTING) => Hook::Postrouting,
        _ => return Ok(None),
    };
    let priority = hook.u32(NFTA_HOOK_PRIORITY).unwrap_or_default().cast_signed();
    let drops = chain.u32(NFTA_CHAIN_POLICY) == Some(NF_DROP);
    let is_nat = chain.text(NFTA_CHAIN_TYPE) == Some(NAT);
    Ok(is_nat.then_some(Base { hook: number, priority, drops }))
}
