//! The ipsets of this network namespace, through netlink (linux/netfilter/ipset/ip_set.h).

use std::io;
use std::path::Path;

use anyhow::{Context, Result, bail};
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST};
use rtnetlink::proto::{ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::netfilter::attrs::Attrs;
use super::netlink::{deleted, dumped, kernel};
use super::raw::{self, Message, attribute};

/// This directory exists if the module is loaded. A netlink request would load the module.
const MODULE: &str = "/sys/module/ip_set";
/// The subsystem, in the upper byte of a message's type.
const NFNL_SUBSYS_IPSET: u16 = 6 << 8;
const IPSET_CMD_DESTROY: u16 = 3;
const IPSET_CMD_LIST: u16 = 7;
/// The oldest protocol version of the kernels that kpx supports.
const PROTOCOL: u8 = 6;
const IPSET_ATTR_PROTOCOL: u16 = 1;
const IPSET_ATTR_SETNAME: u16 = 2;
const IPSET_ATTR_FLAGS: u16 = 6;
const IPSET_ATTR_DATA: u16 = 7;
const IPSET_ATTR_ADT: u16 = 8;
/// The port of an element, inside the element's data attribute.
const IPSET_ATTR_PORT: u16 = 4;
/// Requests only the sets' names.
const IPSET_FLAG_LIST_SETNAME: u32 = 1 << 1;
/// The length of `struct nfgenmsg`.
const HEAD_LEN: usize = 4;
/// The error for a set that a rule references: `IPSET_ERR_BUSY`.
const BUSY: i32 = 4_096 + 4;

/// Returns the names of all sets; empty if ipset is not loaded.
pub async fn names() -> Result<Vec<String>> {
    let mut names = Vec::new();
    let flags = attribute(IPSET_ATTR_FLAGS, &IPSET_FLAG_LIST_SETNAME.to_be_bytes());
    list(&flags, |attrs| {
        names.extend(attrs.text(IPSET_ATTR_SETNAME).map(str::to_owned))
    })
    .await?;
    Ok(names)
}

/// Returns the ports of a set's elements.
pub async fn ports(name: &str) -> Result<Vec<u16>> {
    let mut ports = Vec::new();
    list(&attribute(IPSET_ATTR_SETNAME, &text(name)), |attrs| {
        ports.extend(ports_in(&attrs).unwrap_or_default())
    })
    .await?;
    Ok(ports)
}

/// Destroys a set. Returns false if the set was already gone. A set may be busy for a moment after
/// a rule stops using it.
pub async fn destroy(name: &str) -> io::Result<bool> {
    let (connection, handle, _) = new_connection(NETLINK_NETFILTER)?;
    let request = request(
        IPSET_CMD_DESTROY,
        NLM_F_REQUEST | NLM_F_ACK,
        &attribute(IPSET_ATTR_SETNAME, &text(name)),
    );
    let answers = handle
        .request(request, kernel())
        .map_err(io::Error::other)?;
    tokio::select! {
        result = deleted(answers) => result.map_err(|error| match error.raw_os_error() {
            Some(BUSY) => io::Error::new(io::ErrorKind::ResourceBusy, "a rule or another set still names it"),
            _ => error,
        }),
        () = connection => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Calls `take` with the attributes of each message of the answer.
async fn list(asked: &[u8], take: impl FnMut(Attrs<'_>)) -> Result<()> {
    if !Path::new(MODULE).exists() {
        return Ok(());
    }
    let (mut connection, handle, _) =
        new_connection(NETLINK_NETFILTER).context("open a netlink socket for ipsets")?;
    // The message that ends a dump carries its error.
    connection.set_forward_done(true);
    tokio::select! {
        result = dump(handle, asked, take) => result.context("list the ipsets"),
        () = connection => bail!("the netlink socket for ipsets has failed"),
    }
}

async fn dump(
    handle: ConnectionHandle<Message>,
    asked: &[u8],
    mut take: impl FnMut(Attrs<'_>),
) -> io::Result<()> {
    let request = request(IPSET_CMD_LIST, NLM_F_REQUEST | NLM_F_DUMP, asked);
    let answers = handle
        .request(request, kernel())
        .map_err(io::Error::other)?;
    let read = |message: Message| {
        let attrs = message
            .bytes
            .get(HEAD_LEN..)
            .and_then(|bytes| Attrs::parse(bytes).ok());
        attrs.into_iter().for_each(&mut take);
    };
    dumped(answers, read).await.map(drop)
}

fn request(command: u16, flags: u16, asked: &[u8]) -> netlink_packet_core::NetlinkMessage<Message> {
    let bytes = [
        &[0; HEAD_LEN][..],
        &attribute(IPSET_ATTR_PROTOCOL, &[PROTOCOL]),
        asked,
    ]
    .concat();
    raw::request(NFNL_SUBSYS_IPSET | command, flags, bytes)
}

fn text(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

fn ports_in(attrs: &Attrs<'_>) -> Result<Vec<u16>> {
    let elements = attrs.inside(IPSET_ATTR_ADT)?;
    let port = |data| {
        Some(u16::from_be_bytes(
            Attrs::parse(data)
                .ok()?
                .get(IPSET_ATTR_PORT)?
                .try_into()
                .ok()?,
        ))
    };
    Ok(elements.all(IPSET_ATTR_DATA).filter_map(port).collect())
}
