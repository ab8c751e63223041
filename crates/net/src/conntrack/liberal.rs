//! Makes the conntrack entries of single connections liberal
//! (linux/netfilter/nfnetlink_conntrack.h), because conntrack receives only some of their packets,
//! or none.
//!
//! A liberal entry ignores TCP windows. kpx also clears two flags: DATA_UNACKNOWLEDGED shortens the
//! timeout until the last bytes are acknowledged, and MAXACK_SET compares a RST with an old
//! sequence number. Conntrack sets both flags again with the next packet that it accepts in order.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, NetlinkMessage};
use nix::libc::{IPPROTO_TCP, IPPROTO_UDP};
use rtnetlink::proto::{Connection, ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use super::Tuple;
use crate::netfilter::attrs::Attrs;
use crate::netlink::{deleted, kernel};
use crate::raw::{self, Message, attribute, nested};

/// The types of messages: the conntrack subsystem and the message number.
const IPCTNL_MSG_CT_NEW: u16 = 0x0100;
const IPCTNL_MSG_CT_GET: u16 = 0x0101;
/// The length of `struct nfgenmsg`, the header of each message.
const HEAD_LEN: usize = 4;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_PROTOINFO: u16 = 4;
const CTA_TIMEOUT: u16 = 7;
/// The attributes of a plain entry: tuples, status, protocol, timeout, mark, counters, uses, id,
/// security context, time, labels. An entry with any other attribute is not plain: a helper, an
/// expectation, adjusted sequence numbers, another zone, synproxy, newer attributes.
const HARMLESS: [u16; 13] = [1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 19, 20, 22];
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
const CTA_PROTOINFO_TCP_FLAGS_ORIGINAL: u16 = 4;
const CTA_PROTOINFO_TCP_FLAGS_REPLY: u16 = 5;

/// The state after the handshake, and the state in which one side has sent its FIN.
const TCP_CONNTRACK_ESTABLISHED: u8 = 3;
const TCP_CONNTRACK_CLOSE_WAIT: u8 = 5;
const IP_CT_TCP_FLAG_BE_LIBERAL: u8 = 0x08;
const IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED: u8 = 0x10;
const IP_CT_TCP_FLAG_MAXACK_SET: u8 = 0x20;
/// `struct nf_ct_tcp_flags`: the flags, and their mask.
const FLAGS: [u8; 2] = [
    IP_CT_TCP_FLAG_BE_LIBERAL,
    IP_CT_TCP_FLAG_BE_LIBERAL | IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED | IP_CT_TCP_FLAG_MAXACK_SET,
];

/// The required bits of an entry's status: reply seen, assured, confirmed. The permitted bits also
/// include "NAT was set up", without a translation.
const NEEDED: u32 = 1 << 1 | 1 << 2 | 1 << 3;
const ALLOWED: u32 = NEEDED | 1 << 7 | 1 << 8;

/// A connection that conntrack tracks without translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Followed {
    pub original: Tuple,
    pub is_tcp: bool,
}

/// A handle for queries about single connections in this network namespace.
#[derive(Clone)]
pub struct Conntrack(ConnectionHandle<Message>);

/// Opens the socket. Requests are answered only while the connection's future is polled.
pub fn connect() -> io::Result<(Connection<Message>, Conntrack)> {
    let (connection, handle, _) = new_connection(NETLINK_NETFILTER)?;
    Ok((connection, Conntrack(handle)))
}

impl Conntrack {
    /// Makes the entry of an open connection liberal. Returns false if conntrack does not track
    /// these addresses and ports, translates the connection, or does more than track it. UDP
    /// entries need no flag, because UDP has no windows.
    pub async fn ask(&self, followed: &Followed) -> io::Result<bool> {
        Ok(self.is_plain(followed).await?
            && (!followed.is_tcp || self.relax(followed, None).await?))
    }

    /// Makes the entry of an open TCP connection liberal again, with a timeout of `secs` seconds.
    /// Returns false as [`Self::ask`] does.
    pub async fn renew(&self, followed: &Followed, secs: u32) -> io::Result<bool> {
        Ok(self.is_plain(followed).await?
            && (!followed.is_tcp || self.relax(followed, Some(secs)).await?))
    }

    /// Creates an entry for a TCP connection that conntrack does not track, as established by both
    /// sides, with a timeout of `secs` seconds. `is_closing`: one side has sent its FIN. An
    /// existing entry gets this state.
    pub async fn adopt(&self, original: Tuple, is_closing: bool, secs: u32) -> io::Result<()> {
        let followed = Followed {
            original,
            is_tcp: true,
        };
        let state = if is_closing {
            TCP_CONNTRACK_CLOSE_WAIT
        } else {
            TCP_CONNTRACK_ESTABLISHED
        };
        let back = Tuple {
            src: original.dst,
            dst: original.src,
        };
        let info = [attribute(CTA_PROTOINFO_TCP_STATE, &[state]), liberal()].concat();
        let entry = [
            nested(CTA_TUPLE_REPLY, &tuple(back, true)),
            attribute(CTA_STATUS, &NEEDED.to_be_bytes()),
            attribute(CTA_TIMEOUT, &secs.to_be_bytes()),
            nested(CTA_PROTOINFO, &nested(CTA_PROTOINFO_TCP, &info)),
        ];
        let flags = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_ACK;
        let request = raw::request(
            IPCTNL_MSG_CT_NEW,
            flags,
            message(&followed, &entry.concat()),
        );
        self.acknowledged(request).await.map(drop)
    }

    /// Sends a change. Returns false if there is no such entry.
    async fn acknowledged(&self, request: NetlinkMessage<Message>) -> io::Result<bool> {
        let answers = self
            .0
            .request(request, kernel())
            .map_err(io::Error::other)?;
        deleted(answers).await
    }

    async fn is_plain(&self, followed: &Followed) -> io::Result<bool> {
        let request = raw::request(IPCTNL_MSG_CT_GET, NLM_F_REQUEST, message(followed, &[]));
        match raw::first(&self.0, request).await {
            Ok(message) => Ok(is_plain(followed, &message.bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn relax(&self, followed: &Followed, secs: Option<u32>) -> io::Result<bool> {
        let mut changes = nested(CTA_PROTOINFO, &nested(CTA_PROTOINFO_TCP, &liberal()));
        changes.extend(
            secs.into_iter()
                .flat_map(|secs| attribute(CTA_TIMEOUT, &secs.to_be_bytes())),
        );
        let request = raw::request(
            IPCTNL_MSG_CT_NEW,
            NLM_F_REQUEST | NLM_F_ACK,
            message(followed, &changes),
        );
        self.acknowledged(request).await
    }
}

/// Returns the attributes that make an entry liberal in both directions.
fn liberal() -> Vec<u8> {
    let kinds = [
        CTA_PROTOINFO_TCP_FLAGS_ORIGINAL,
        CTA_PROTOINFO_TCP_FLAGS_REPLY,
    ];
    kinds
        .into_iter()
        .flat_map(|kind| attribute(kind, &FLAGS))
        .collect()
}

/// Returns a message with a connection's tuple and the changes.
fn message(followed: &Followed, changes: &[u8]) -> Vec<u8> {
    let family = if followed.original.src.is_ipv4() {
        AF_INET
    } else {
        AF_INET6
    };
    let name = nested(CTA_TUPLE_ORIG, &tuple(followed.original, followed.is_tcp));
    [&[family, 0, 0, 0], &name[..], changes].concat()
}

fn tuple(Tuple { src, dst }: Tuple, is_tcp: bool) -> Vec<u8> {
    let addr = |at: SocketAddr, [v4, v6]: [u16; 2]| match at.ip() {
        IpAddr::V4(addr) => attribute(v4, &addr.octets()),
        IpAddr::V6(addr) => attribute(v6, &addr.octets()),
    };
    let addrs = [
        addr(src, [CTA_IP_V4_SRC, CTA_IP_V6_SRC]),
        addr(dst, [CTA_IP_V4_DST, CTA_IP_V6_DST]),
    ]
    .concat();
    let proto = if is_tcp { IPPROTO_TCP } else { IPPROTO_UDP } as u8;
    let ports = [
        attribute(CTA_PROTO_NUM, &[proto]),
        attribute(CTA_PROTO_SRC_PORT, &src.port().to_be_bytes()),
        attribute(CTA_PROTO_DST_PORT, &dst.port().to_be_bytes()),
    ];
    [
        nested(CTA_TUPLE_IP, &addrs),
        nested(CTA_TUPLE_PROTO, &ports.concat()),
    ]
    .concat()
}

/// Returns true if the kernel's answer is for this connection and conntrack only tracks it.
fn is_plain(followed: &Followed, bytes: &[u8]) -> bool {
    let Some(entry) = bytes
        .get(HEAD_LEN..)
        .and_then(|attributes| Attrs::parse(attributes).ok())
    else {
        return false;
    };
    let Tuple { src, dst } = followed.original;
    let back = Tuple { src: dst, dst: src };
    let has_tuple = |kind, wanted| {
        entry
            .get(kind)
            .is_some_and(|found| is_tuple(found, wanted, followed.is_tcp))
    };
    let status = entry.u32(CTA_STATUS).unwrap_or(0);
    let tcp = entry
        .inside(CTA_PROTOINFO)
        .and_then(|info| info.inside(CTA_PROTOINFO_TCP));
    let state = tcp
        .ok()
        .and_then(|tcp| tcp.get(CTA_PROTOINFO_TCP_STATE)?.first().copied());
    has_tuple(CTA_TUPLE_ORIG, followed.original)
        && has_tuple(CTA_TUPLE_REPLY, back)
        && !entry.has_others_than(&HARMLESS)
        && status & NEEDED == NEEDED
        && status & !ALLOWED == 0
        && (!followed.is_tcp || state == Some(TCP_CONNTRACK_ESTABLISHED))
}

fn is_tuple(found: &[u8], wanted: Tuple, is_tcp: bool) -> bool {
    let read = |bytes: &[u8]| -> Option<Vec<Vec<u8>>> {
        let parts = Attrs::parse(bytes).ok()?;
        let ip = parts.inside(CTA_TUPLE_IP).ok()?;
        let proto = parts.inside(CTA_TUPLE_PROTO).ok()?;
        let of = |attrs: &Attrs, kinds: [u16; 4]| {
            kinds.map(|kind| attrs.get(kind).unwrap_or_default().to_vec())
        };
        let addrs = of(
            &ip,
            [CTA_IP_V4_SRC, CTA_IP_V4_DST, CTA_IP_V6_SRC, CTA_IP_V6_DST],
        );
        let ports = [CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT];
        let ports = ports.map(|kind| proto.get(kind).unwrap_or_default().to_vec());
        Some(addrs.into_iter().chain(ports).collect())
    };
    let wanted = read(&tuple(wanted, is_tcp));
    wanted.is_some() && read(found) == wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a kernel's answer about a connection, with the additional attributes `more`.
    fn answer(reply: [&str; 2], status: u32, state: u8, more: &[u8]) -> Vec<u8> {
        let ends = |[src, dst]: [&str; 2]| Tuple {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
        };
        let info = nested(
            CTA_PROTOINFO,
            &nested(
                CTA_PROTOINFO_TCP,
                &attribute(CTA_PROTOINFO_TCP_STATE, &[state]),
            ),
        );
        [
            &[AF_INET, 0, 0, 0],
            &nested(CTA_TUPLE_ORIG, &tuple(ends(ENDS), true))[..],
            &nested(CTA_TUPLE_REPLY, &tuple(ends(reply), true)),
            &attribute(CTA_STATUS, &status.to_be_bytes()),
            &info,
            more,
        ]
        .concat()
    }

    const ENDS: [&str; 2] = ["10.244.1.2:40000", "10.244.1.3:8080"];
    const BACK: [&str; 2] = [ENDS[1], ENDS[0]];
    const PLAIN: u32 = NEEDED | 1 << 7 | 1 << 8;

    #[test]
    fn conntrack_tolerates_what_it_only_follows() {
        let cases = [
            ("an open connection", answer(BACK, PLAIN, 3, &[]), true),
            (
                "with a mark and a number",
                answer(BACK, PLAIN, 3, &attribute(8, &[0; 4])),
                true,
            ),
            (
                "with a helper",
                answer(BACK, PLAIN, 3, &nested(5, &[])),
                false,
            ),
            (
                "an expected one",
                answer(BACK, PLAIN | 1, 3, &nested(14, &[])),
                false,
            ),
            (
                "with adjusted numbers",
                answer(BACK, PLAIN, 3, &nested(15, &[])),
                false,
            ),
            (
                "in another zone",
                answer(BACK, PLAIN, 3, &attribute(18, &[0, 7])),
                false,
            ),
            (
                "behind synproxy",
                answer(BACK, PLAIN, 3, &nested(24, &[])),
                false,
            ),
            (
                "with what is newer than kpx",
                answer(BACK, PLAIN, 3, &attribute(99, &[])),
                false,
            ),
            (
                "translated",
                answer([BACK[0], "192.0.2.1:40000"], PLAIN | 1 << 4, 3, &[]),
                false,
            ),
            (
                "translated at one port",
                answer([BACK[0], "10.244.1.2:40001"], PLAIN, 3, &[]),
                false,
            ),
            (
                "in a flow table",
                answer(BACK, PLAIN | 1 << 14, 3, &[]),
                false,
            ),
            ("without an answer", answer(BACK, 1 << 3, 1, &[]), false),
            ("at its end", answer(BACK, PLAIN, 4, &[]), false),
            ("cut off", answer(BACK, PLAIN, 3, &[])[..90].to_vec(), false),
        ];
        let [src, dst] = ENDS.map(|end| end.parse().unwrap());
        let followed = Followed {
            original: Tuple { src, dst },
            is_tcp: true,
        };
        for (name, answer, want) in cases {
            assert_eq!(is_plain(&followed, &answer), want, "{name}");
        }
    }
}
