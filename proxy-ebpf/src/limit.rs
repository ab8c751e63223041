//! The least that a whole connection past the stack costs. One entry is looked up, one address and
//! port are rewritten, one hop is spent. The frame gets its addresses, the packet is counted, and
//! the kernel puts it into the pod's end of its veth. SYN and FIN go the same way. IPv4, TCP and
//! UDP, pods of one node. Only objects with the feature `bench` have it.
//!
//! It has no state: a benchmark writes every way beforehand. So it is a bound for what the hooks
//! may cost, and no design.

use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use proxy_common::addr::{Addr4, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::limit::LimitKey;

use crate::net::Net;
use crate::skb::Skb;
use crate::{Action, maps};

/// Takes a client's packets to their backend: at the ingress of the client's device.
#[classifier]
pub fn kpx_limit(ctx: TcContext) -> i32 {
    run(Skb::new(&ctx), true).unwrap_or(Action::PASS).0
}

/// Takes a backend's packets back to their client: at the ingress of the backend's device.
#[classifier]
pub fn kpx_limit_back(ctx: TcContext) -> i32 {
    run(Skb::new(&ctx), false).unwrap_or(Action::PASS).0
}

/// Fails with a packet that has no way, which then takes the stack as it is.
#[inline(always)]
fn run(skb: Skb, is_there: bool) -> Result<Action, Reason> {
    if skb.ethertype() != Addr4::ETHERTYPE {
        return Err(Reason::NotIp);
    }
    let mut head = Addr4::peek(skb).ok_or(Reason::Malformed)?;
    let port = if is_there {
        head.dst.port
    } else {
        head.src.port
    };
    let key = LimitKey::new(head.src.addr, head.dst.addr, port, head.proto);
    let way = maps::limit_way(&key, skb.len()).ok_or(Reason::NoFlow)?;
    head.check = spend_hop(head.check).ok_or(Reason::NotOurs)?;
    let end = SockAddr::new(way.addr, way.port);
    let (src, dst) = if is_there {
        (head.src, end)
    } else {
        (end, head.dst)
    };
    Addr4::rewrite(skb, &head, &src, &dst)?;
    skb.store(0, &way.macs, 0)?;
    Ok(skb.into_peer(way.ifindex))
}

/// Takes a hop from the word with hop limit, protocol and checksum, which makes up for it (RFC
/// 1624). None is left for others.
#[inline(always)]
fn spend_hop(word: u32) -> Option<u32> {
    let [hops, proto, high, low] = word.to_ne_bytes();
    let sum = u32::from(u16::from_be_bytes([high, low])) + 0x0100;
    let [high, low] = ((sum + u32::from(sum >= 0xffff)) as u16).to_be_bytes();
    (hops > 1).then(|| u32::from_ne_bytes([hops - 1, proto, high, low]))
}
