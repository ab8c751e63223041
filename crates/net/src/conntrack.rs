//! Lists conntrack entries with a translated source or destination, and deletes entries, through
//! netlink.

pub mod liberal;

use std::io;
use std::net::{IpAddr, SocketAddr};

use netlink_packet_core::{DefaultNla, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, Nla};
use netlink_packet_netfilter::conntrack::{
    ConntrackAttribute, ConntrackMessage, IPTuple, ProtoInfo, ProtoInfoTCP, ProtoTuple, Protocol,
    Status, Tuple as Part,
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

/// The last state of an open connection (`enum tcp_conntrack` of linux/nf_conntrack_tcp.h).
const TCP_ESTABLISHED: u8 = 3;

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

/// A connection with a translated source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masqueraded {
    /// TCP, UDP or SCTP, as a protocol number of IP.
    pub protocol: u8,
    /// The source of the replies.
    pub peer: SocketAddr,
    /// The destination of the replies: the source that the peer sees.
    pub source: SocketAddr,
    /// True for TCP once one side has sent a FIN or RST.
    pub is_closing: bool,
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
        self.dump(family, Status::DstNat, |attributes| {
            entry(attributes).into_iter().for_each(&mut take)
        })
        .await
    }

    /// Calls `take` with each connection of a family whose source is translated, in the kernel's
    /// order. Connections that change during the dump may be missing.
    pub async fn masqueraded(
        &self,
        family: NetfilterProtoFamily,
        mut take: impl FnMut(Masqueraded),
    ) -> io::Result<()> {
        self.dump(family, Status::SrcNat, |attributes| {
            masqueraded(&attributes).into_iter().for_each(&mut take)
        })
        .await
    }

    /// Calls `take` with the attributes of each entry of this status.
    async fn dump(
        &self,
        family: NetfilterProtoFamily,
        status: Status,
        mut take: impl FnMut(Vec<ConntrackAttribute>),
    ) -> io::Result<()> {
        // Kernels before 5.14 ignore this filter and send all entries.
        let request = message(
            family,
            ConntrackMessage::Get(vec![ConntrackAttribute::CtaStatus(status)]),
            NLM_F_REQUEST | NLM_F_DUMP,
        );
        let answers = self
            .0
            .request(request, kernel())
            .map_err(io::Error::other)?;
        netlink::dumped(answers, |message: NetfilterMessage| {
            if let NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)) =
                message.inner
            {
                take(attributes);
            }
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
fn entry(attributes: Vec<ConntrackAttribute>) -> Option<Entry> {
    let (protocol, original, reply) = tuples(&attributes)?;
    (protocol == Protocol::Udp).then_some(())?;
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

/// Returns `None` unless the entry's source is translated, and its protocol has ports.
fn masqueraded(attributes: &[ConntrackAttribute]) -> Option<Masqueraded> {
    let (protocol, original, reply) = tuples(attributes)?;
    let has_ports = matches!(protocol, Protocol::Tcp | Protocol::Udp | Protocol::Sctp);
    (has_ports && reply.dst != original.src).then(|| Masqueraded {
        protocol: protocol.into(),
        peer: reply.src,
        source: reply.dst,
        is_closing: tcp_state(attributes).is_some_and(|state| state > TCP_ESTABLISHED),
    })
}

/// Returns `None` for other protocols, and for connections in a flowtable.
fn tcp_state(attributes: &[ConntrackAttribute]) -> Option<u8> {
    let infos = attributes.iter().find_map(|attribute| match attribute {
        ConntrackAttribute::CtaProtoInfo(infos) => Some(infos),
        _ => None,
    })?;
    let states = infos.iter().find_map(|info| match info {
        ProtoInfo::TCP(states) => Some(states),
        _ => None,
    })?;
    states.iter().find_map(|state| match state {
        ProtoInfoTCP::State(state) => Some(*state),
        _ => None,
    })
}

/// Returns an entry's protocol, and the tuples of both directions.
fn tuples(attributes: &[ConntrackAttribute]) -> Option<(Protocol, Tuple, Tuple)> {
    let original = attributes.iter().find_map(|attribute| match attribute {
        ConntrackAttribute::CtaTupleOrig(parts) => tuple(parts),
        _ => None,
    });
    let reply = attributes.iter().find_map(|attribute| match attribute {
        ConntrackAttribute::CtaTupleReply(parts) => tuple(parts),
        _ => None,
    });
    let (protocol, original) = original?;
    Some((protocol, original, reply?.1))
}

/// Returns `None` for protocols without ports.
fn tuple(parts: &[Part]) -> Option<(Protocol, Tuple)> {
    let mut src: Option<IpAddr> = None;
    let mut dst: Option<IpAddr> = None;
    let mut sport = None;
    let mut dport = None;
    let mut protocol = None;
    for part in parts {
        match part {
            Part::Ip(parts) => parts.iter().for_each(|part| match part {
                IPTuple::SourceAddress(addr) => src = Some(*addr),
                IPTuple::DestinationAddress(addr) => dst = Some(*addr),
                _ => {}
            }),
            Part::Proto(parts) => parts.iter().for_each(|part| match part {
                ProtoTuple::Protocol(of_ip) => protocol = Some(*of_ip),
                ProtoTuple::SourcePort(port) => sport = Some(*port),
                ProtoTuple::DestinationPort(port) => dport = Some(*port),
                _ => {}
            }),
            _ => {}
        }
    }
    let tuple = Tuple {
        src: SocketAddr::new(src?, sport?),
        dst: SocketAddr::new(dst?, dport?),
    };
    Some((protocol?, tuple))
}
