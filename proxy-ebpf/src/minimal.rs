//! The least that a packet of a flow costs. Headers are read, one entry is looked up, one address
//! and port are rewritten. The checksums of the transport and of IPv4 are brought up to date. Each
//! step takes the helper that the kernel has for it. Nothing is counted,
//! followed, marked or checked. The hooks are measured against this. Only objects with the feature
//! `bench` have it.
//!
//! It is the yardstick: it stays as it is when the hooks learn something, and finds its flows in
//! their own table.

use aya_ebpf::bindings::BPF_F_MARK_MANGLED_0;
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use proxy_common::addr::{Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::flow::{FlowKey, Hook};

use crate::net::{Header, Net};
use crate::packet::checksum_offset;
use crate::skb::{ETH_LEN, Skb};
use crate::{Action, maps};

/// A program that does nothing. The cost of the others is measured against it.
#[classifier]
pub fn kpx_empty(_ctx: TcContext) -> i32 {
    Action::PASS.0
}

/// Rewrites the destination of a packet of a flow. The cost of `kpx_ingress` is measured against
/// it.
#[classifier]
pub fn kpx_minimal(ctx: TcContext) -> i32 {
    either(Skb::new(&ctx), Hook::INGRESS).0
}

/// Rewrites the source of a packet of a flow. The cost of `kpx_egress` is measured against it.
#[classifier]
pub fn kpx_minimal_out(ctx: TcContext) -> i32 {
    either(Skb::new(&ctx), Hook::EGRESS).0
}

/// Handles a packet of either family.
#[inline(always)]
fn either(skb: Skb, hook: Hook) -> Action {
    let result = match skb.ethertype() {
        Addr4::ETHERTYPE => run::<Addr4>(skb, hook),
        Addr6::ETHERTYPE => run::<Addr6>(skb, hook),
        _ => return Action::PASS,
    };
    result.unwrap_or(Action::PASS)
}

/// Gives a packet the backend for its destination, or on the way out the frontend for its source.
#[inline(always)]
fn run<A: Net>(skb: Skb, hook: Hook) -> Result<Action, Reason> {
    let Header {
        src,
        dst,
        proto,
        l4,
        ..
    } = A::read(skb, ETH_LEN)?;
    if !matches!(proto, Proto::TCP | Proto::UDP) {
        return Err(Reason::Protocol);
    }
    let [sport, dport]: [u16; 2] = skb.load(l4)?;
    let src = SockAddr::new(src, Port::from_wire(sport));
    let dst = SockAddr::new(dst, Port::from_wire(dport));
    let to = maps::other_end(&FlowKey::new(hook, proto, src, dst), hook).ok_or(Reason::NoFlow)?;
    let (from, addr_at, port_at) = if hook == Hook::INGRESS {
        (dst, A::DST_OFFSET, l4 + 2)
    } else {
        (src, A::SRC_OFFSET, l4)
    };
    let check_at = l4 + checksum_offset(proto);
    let flags = if proto == Proto::UDP {
        BPF_F_MARK_MANGLED_0
    } else {
        0
    };
    A::replace_pseudo_checksum(skb, check_at, flags, from.addr, to.addr)?;
    skb.replace_l4_checksum(
        check_at,
        from.port.wire().into(),
        to.port.wire().into(),
        flags | 2,
    )?;
    A::store_addr(skb, ETH_LEN, addr_at, from.addr, to.addr)?;
    skb.store(port_at, &to.port.wire(), 0)?;
    Ok(Action::PASS)
}
