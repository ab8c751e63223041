//! Finds and removes nftables tables that another program left, without the tool `nft`
//! (linux/netfilter/nf_tables.h).

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result};
use netlink_packet_core::{
    NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR,
};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto,
    setsockopt, socket, sockopt,
};

use crate::netfilter::attrs::Attrs;
use crate::raw::{attribute, nested};

/// The nftables subsystem and its messages.
const SUBSYSTEM: u16 = 10;
const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const GET_CHAIN: u16 = 4;
const DELETE_CHAIN: u16 = 5;
const NEW_RULE: u16 = 6;
const GET_RULE: u16 = 7;
const DELETE_RULE: u16 = 8;
/// The messages around a batch, which the kernel applies atomically.
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// The lengths of `struct nlmsghdr` and of `struct nfgenmsg` after it.
const HEAD_LEN: usize = 16;
const FAMILY_LEN: usize = 4;
/// The attempts at a dump.
const DUMPS: usize = 5;
/// The kernel's limit on a message of a dump, in bytes.
const ANSWER_LEN: usize = 1 << 16;
/// The receive buffer for errors about a batch, in bytes.
const ANSWERS: usize = 4 << 20;

const TABLE_NAME: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const POSTROUTING: u32 = 4;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_HANDLE: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
const ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
const IMMEDIATE_DATA: u16 = 2;
const RETURN: i32 = -5;
const REGISTER: u32 = 1;
const STATE_ESTABLISHED: u32 = 1 << 1;

/// The families of the tables that other programs create for Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    Ip = 2,
    Ip6 = 10,
}

impl Family {
    const ALL: [Self; 2] = [Self::Ip, Self::Ip6];

    /// Returns the family's name in `nft`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub family: Family,
    pub table: String,
    pub name: String,
    pub is_nat: bool,
}

/// Returns the families that have a table of this name.
pub fn families_of(table: &str) -> Result<Vec<Family>> {
    let mut found = Vec::new();
    for family in Family::ALL {
        let listed = list(family, GET_TABLE, &[]).context("list the tables of nftables")?;
        let mut names = listed
            .iter()
            .filter_map(|bytes| attributes(bytes)?.text(TABLE_NAME));
        found.extend(names.any(|name| name == table).then_some(family));
    }
    Ok(found)
}

pub fn chains() -> Result<Vec<Chain>> {
    let mut chains = Vec::new();
    for family in Family::ALL {
        let listed = list(family, GET_CHAIN, &[]).context("list the chains of nftables")?;
        chains.extend(listed.iter().filter_map(|bytes| {
            let chain = attributes(bytes)?;
            Some(Chain {
                family,
                table: chain.text(CHAIN_TABLE)?.to_owned(),
                name: chain.text(CHAIN_NAME)?.to_owned(),
                is_nat: chain.text(CHAIN_TYPE) == Some("nat"),
            })
        }));
    }
    Ok(chains)
}

/// Removes chains of a table with their rules, and the rules of other chains that jump to them.
pub fn remove_chains(family: Family, table: &str, names: &BTreeSet<String>) -> Result<()> {
    let mut batch = Batch::new(family);
    let listed = list(family, GET_RULE, &text(RULE_TABLE, table))
        .with_context(|| format!("list the rules of table {} {table}", family.name()))?;
    for rule in listed.iter().filter_map(|bytes| attributes(bytes)) {
        let chain = rule.text(RULE_CHAIN).unwrap_or_default();
        if !names.contains(chain)
            && jumps(&rule)?.iter().any(|target| names.contains(target))
            && let Some(handle) = rule.get(RULE_HANDLE)
        {
            let rule = [
                text(RULE_TABLE, table),
                text(RULE_CHAIN, chain),
                attribute(RULE_HANDLE, handle),
            ];
            batch.add(DELETE_RULE, 0, &rule.concat());
        }
    }
    // Without a handle, the message deletes all rules of the chain. Chains may jump to one another.
    for name in names {
        let rules = [text(RULE_TABLE, table), text(RULE_CHAIN, name)];
        batch.add(DELETE_RULE, 0, &rules.concat());
    }
    for name in names {
        let chain = [text(CHAIN_TABLE, table), text(CHAIN_NAME, name)];
        batch.add(DELETE_CHAIN, 0, &chain.concat());
    }
    batch
        .commit()
        .with_context(|| format!("remove chains of table {} {table}", family.name()))
}

pub fn remove_table(family: Family, table: &str) -> Result<()> {
    let mut batch = Batch::new(family);
    batch.add(DELETE_TABLE, 0, &text(TABLE_NAME, table));
    batch
        .commit()
        .with_context(|| format!("remove table {} {table}", family.name()))
}

/// Creates a table that leaves packets unchanged and makes the kernel track connections and
/// translate open connections. New connections traverse its chain, open connections do not reach
/// it.
pub fn make_keeper(family: Family, table: &str) -> Result<()> {
    const CHAIN: &str = "nat";
    let mut batch = Batch::new(family);
    batch.add(NEW_TABLE, NLM_F_CREATE, &text(TABLE_NAME, table));
    batch.add(DELETE_RULE, 0, &text(RULE_TABLE, table));
    let hook = [number(HOOK_NUMBER, POSTROUTING), number(HOOK_PRIORITY, 300)];
    let chain = [
        text(CHAIN_TABLE, table),
        text(CHAIN_NAME, CHAIN),
        nested(CHAIN_HOOK, &hook.concat()),
        text(CHAIN_TYPE, "nat"),
    ];
    batch.add(NEW_CHAIN, NLM_F_CREATE, &chain.concat());
    let rule = [
        text(RULE_TABLE, table),
        text(RULE_CHAIN, CHAIN),
        nested(RULE_EXPRESSIONS, &established_returns()),
    ];
    batch.add(NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, &rule.concat());
    batch
        .commit()
        .with_context(|| format!("make table {} {table}", family.name()))
}

/// Builds the expressions of `ct state established return`.
fn established_returns() -> Vec<u8> {
    let value = |value: u32| attribute(DATA_VALUE, &value.to_ne_bytes());
    let ct = [number(1, REGISTER), number(2, 0)];
    let bitwise = [
        number(1, REGISTER),
        number(2, REGISTER),
        number(3, 4),
        nested(4, &value(STATE_ESTABLISHED)),
        nested(5, &value(0)),
    ];
    let is_not_zero = [number(1, REGISTER), number(2, 1), nested(3, &value(0))];
    let verdict = nested(DATA_VERDICT, &number(VERDICT_CODE, RETURN.cast_unsigned()));
    let returns = [number(1, 0), nested(IMMEDIATE_DATA, &verdict)];
    [
        ("ct", ct.concat()),
        ("bitwise", bitwise.concat()),
        ("cmp", is_not_zero.concat()),
        ("immediate", returns.concat()),
    ]
    .into_iter()
    .flat_map(|(name, data)| {
        let expression = [text(EXPRESSION_NAME, name), nested(EXPRESSION_DATA, &data)];
        nested(ELEMENT, &expression.concat())
    })
    .collect()
}

/// Returns the chains to which a rule jumps.
fn jumps(rule: &Attrs) -> Result<Vec<String>> {
    let mut targets = Vec::new();
    for expression in rule.inside(RULE_EXPRESSIONS)?.all(ELEMENT) {
        let expression = Attrs::parse(expression)?;
        if expression.text(EXPRESSION_NAME) == Some("immediate") {
            let verdict = expression
                .inside(EXPRESSION_DATA)?
                .inside(IMMEDIATE_DATA)?
                .inside(DATA_VERDICT)?;
            targets.extend(verdict.text(VERDICT_CHAIN).map(str::to_owned));
        }
    }
    Ok(targets)
}

/// Messages of one family that the kernel applies atomically.
struct Batch {
    family: Family,
    bytes: Vec<u8>,
    messages: u32,
}

impl Batch {
    fn new(family: Family) -> Self {
        Self {
            family,
            bytes: bound(BATCH_BEGIN),
            messages: 0,
        }
    }

    /// Adds a message without a request for an acknowledgement: the kernel reports errors in any
    /// case, and acknowledgements of thousands of chains would overrun the socket.
    fn add(&mut self, kind: u16, flags: u16, attributes: &[u8]) {
        self.messages += 1;
        let flags = NLM_F_REQUEST | flags;
        let content = [&[self.family as u8, 0, 0, 0], attributes].concat();
        self.bytes.extend(message(
            SUBSYSTEM << 8 | kind,
            flags,
            self.messages,
            &content,
        ));
    }

    fn commit(mut self) -> io::Result<()> {
        self.bytes.extend(bound(BATCH_END));
        let socket = open()?;
        // The kernel refuses a message larger than the socket's buffer, and a batch counts as one
        // message.
        setsockopt(&socket, sockopt::SndBufForce, &(self.bytes.len() * 2))?;
        setsockopt(&socket, sockopt::RcvBufForce, &ANSWERS)?;
        send(&socket, &self.bytes)?;
        // The kernel has queued all errors when the send call returns.
        let mut answer = vec![0; ANSWER_LEN];
        loop {
            match recv(socket.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EAGAIN) => return Ok(()),
                length => each(&answer[..length?], |kind, content| match kind {
                    NLMSG_ERROR => error(content),
                    _ => Ok(()),
                })?,
            }
        }
    }
}

/// Dumps objects of a family, again if they changed meanwhile. Empty if the kernel has no nftables.
fn list(family: Family, kind: u16, filter: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    for _ in 1..DUMPS {
        match list_once(family, kind, filter) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            objects => return objects,
        }
    }
    list_once(family, kind, filter)
}

fn list_once(family: Family, kind: u16, filter: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let socket = open()?;
    let content = [&[family as u8, 0, 0, 0], filter].concat();
    let flags = NLM_F_REQUEST | NLM_F_DUMP;
    send(&socket, &message(SUBSYSTEM << 8 | kind, flags, 1, &content))?;
    let mut objects = Vec::new();
    let mut answer = vec![0; ANSWER_LEN];
    let mut is_done = false;
    while !is_done {
        let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        let read = each(&answer[..length], |kind, content| {
            match kind {
                NLMSG_ERROR => error(content)?,
                NLMSG_DONE => is_done = true,
                _ => objects.push(content.to_vec()),
            }
            Ok(())
        });
        match read {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(Vec::new()),
            read => read?,
        }
    }
    Ok(objects)
}

fn open() -> io::Result<OwnedFd> {
    Ok(socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?)
}

fn send(socket: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    let kernel = NetlinkAddr::new(0, 0);
    sendto(socket.as_raw_fd(), bytes, &kernel, MsgFlags::empty())?;
    Ok(())
}

/// Calls `take` with the kind and content of each message. Fails with `Interrupted` if objects
/// changed during the dump.
fn each(mut bytes: &[u8], mut take: impl FnMut(u16, &[u8]) -> io::Result<()>) -> io::Result<()> {
    while let Some((head, _)) = bytes.split_at_checked(HEAD_LEN) {
        let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let content = bytes.get(HEAD_LEN..length);
        if u16::from_ne_bytes([head[6], head[7]]) & NLM_F_DUMP_INTR != 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        take(
            u16::from_ne_bytes([head[4], head[5]]),
            content.ok_or(io::ErrorKind::InvalidData)?,
        )?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(())
}

/// Reads the error number of an answer, which is negative, or 0 for success.
fn error(content: &[u8]) -> io::Result<()> {
    let code = content.get(..4).and_then(|code| code.try_into().ok());
    match i32::from_ne_bytes(code.ok_or(io::ErrorKind::InvalidData)?) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

/// Returns the attributes after the message's `struct nfgenmsg`.
fn attributes(bytes: &[u8]) -> Option<Attrs<'_>> {
    Attrs::parse(bytes.get(FAMILY_LEN..)?).ok()
}

fn message(kind: u16, flags: u16, number: u32, content: &[u8]) -> Vec<u8> {
    let length = (HEAD_LEN + content.len()) as u32;
    [
        &length.to_ne_bytes()[..],
        &kind.to_ne_bytes(),
        &flags.to_ne_bytes(),
        &number.to_ne_bytes(),
        &[0; 4],
        content,
    ]
    .concat()
}

/// Builds the first or last message of a batch, which has the subsystem in network byte order.
fn bound(kind: u16) -> Vec<u8> {
    let [high, low] = SUBSYSTEM.to_be_bytes();
    message(kind, NLM_F_REQUEST, 0, &[0, 0, high, low])
}

fn text(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}
