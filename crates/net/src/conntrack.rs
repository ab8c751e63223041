//! Lists and deletes conntrack entries with a translated destination through netlink.

pub mod liberal;

use std::io;
use std::net::{IpAddr, SocketAddr};

use netlink_packet_core::{DefaultNla, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, Nla};
use netlink_packet_netfilter::conntrack::{
    ConntrackAttribute, ConntrackMessage, IPTuple, ProtoTuple, Protocol, Status, Tuple as Part,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};
use rtnetlink::proto::{Connection, ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::netlink::{self, kernel};

/// The attributes that identify an entry (`enum ctattr_type` of linux/nfnetlink_conntrack.h).
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;

/// The source and destination of one direction of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    pub src: SocketAddr,
    pub dst: SocketAddr,
}

/// A UDP entry with a translated destination.
#[derive(Clone, Debug)]
pub struct Entry {
    pub original: Tuple,
    pub reply: Tuple,
    /// The kernel's key of the entry: original tuple, zone, id.
    name: Vec<ConntrackAttribute>,
}

/// A handle for conntrack queries in this network namespace.
#[derive(Clone)]
pub struct Handle(ConnectionHandle<NetfilterMessage>);

/// Opens the socket. Requests are answered only while the connection's future is polled.
pub fn connect() -> io::Result<(Connection<NetfilterMessage>, Handle)> {
    let (mut connection, handle, _) = new_connection(NETLINK_NETFILTER)?;
    // The message that ends a dump carries its error.
    connection.set_forward_done(true);
    Ok((connection, Handle(handle)))
}

impl Handle {
    /// Calls `take` with each UDP entry of a family in the kernel's order. Entries that change
    /// during the dump may be missing.
    pub async fn list(
        &self,
        family: NetfilterProtoFamily,
        mut take: impl FnMut(Entry),
    ) -> io::Result<()> {
        // Kernels before 5.14 ignore this filter and send all entries.
        let translated = ConntrackAttribute::CtaStatus(Status::DstNat);
        let request = message(
            family,
            ConntrackMessage::Get(vec![translated]),
            NLM_F_REQUEST | NLM_F_DUMP,
        );
        let answers = self
            .0
            .request(request, kernel())
            .map_err(io::Error::other)?;
        netlink::dumped(answers, |message| {
            entry(message).into_iter().for_each(&mut take)
        })
        .await
        .map(drop)
    }

    /// Deletes an entry. Returns false if the entry was already gone.
    pub async fn delete(&self, family: NetfilterProtoFamily, entry: &Entry) -> io::Result<bool> {
        let request = message(
            family,
            ConntrackMessage::Delete(entry.name.clone()),
            NLM_F_REQUEST | NLM_F_ACK,
        );
        netlink::deleted(
            self.0
                .request(request, kernel())
                .map_err(io::Error::other)?,
        )
        .await
    }
}

fn message(
    family: NetfilterProtoFamily,
    message: ConntrackMessage,
    flags: u16,
) -> NetlinkMessage<NetfilterMessage> {
    let header = NetfilterHeader::new(family, 0, 0);
    let mut message = NetlinkMessage::from(NetfilterMessage::new(header, message));
    message.header.flags = flags;
    message
}

/// Returns `None` unless the entry is for UDP.
fn entry(message: NetfilterMessage) -> Option<Entry> {
    let NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)) = message.inner else {
        return None;
    };
    let tuples = |attribute: &ConntrackAttribute| match attribute {
        ConntrackAttribute::CtaTupleOrig(parts) => Some((true, tuple(parts)?)),
        ConntrackAttribute::CtaTupleReply(parts) => Some((false, tuple(parts)?)),
        _ => None,
    };
    let known: Vec<_> = attributes.iter().filter_map(tuples).collect();
    let of = |original| {
        known
            .iter()
            .find(|(is_original, _)| *is_original == original)
            .map(|(_, tuple)| *tuple)
    };
    let original = of(true)?;
    let reply = of(false)?;
    let names = |attribute: &ConntrackAttribute| match attribute {
        ConntrackAttribute::CtaTupleOrig(_) => true,
        ConntrackAttribute::Other(other) => matches!(DefaultNla::kind(other), CTA_ID | CTA_ZONE),
        _ => false,
    };
    let name = attributes.into_iter().filter(names).collect();
    Some(Entry {
        original,
        reply,
        name,
    })
}

/// Returns `None` unless the tuple is for UDP.
fn tuple(parts: &[Part]) -> Option<Tuple> {
    let mut src: Option<IpAddr> = None;
    let mut dst: Option<IpAddr> = None;
    let mut sport = None;
    let mut dport = None;
    let mut is_udp = false;
    for part in parts {
        match part {
            Part::Ip(parts) => parts.iter().for_each(|part| match part {
                IPTuple::SourceAddress(addr) => src = Some(*addr),
                IPTuple::DestinationAddress(addr) => dst = Some(*addr),
                _ => {}
            }),
            Part::Proto(parts) => parts.iter().for_each(|part| match part {
                ProtoTuple::Protocol(protocol) => is_udp = *protocol == Protocol::Udp,
                ProtoTuple::SourcePort(port) => sport = Some(*port),
                ProtoTuple::DestinationPort(port) => dport = Some(*port),
                _ => {}
            }),
            _ => {}
        }
    }
    is_udp.then_some(())?;
    Some(Tuple {
        src: SocketAddr::new(src?, sport?),
        dst: SocketAddr::new(dst?, dport?),
    })
}
