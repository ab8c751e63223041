//! Logs the outcome of each packet, in objects built with the feature `log`. Otherwise the function
//! is empty.

use crate::maps::Memory;
use crate::net::Net;
use crate::skb::{LinkHeader, Skb};

#[cfg(not(feature = "log"))]
#[inline(always)]
pub fn packet<A: Net>(_skb: Skb, _link: LinkHeader, _outcome: i32, _memory: Memory) {}

/// Logs a packet as it leaves a hook. An outcome below 1024 is a tc action; from 1024 on, it is
/// 1024 plus an index into `Reason::ALL`. (Names would be strings of many lengths, which the
/// verifier cannot follow.)
#[cfg(feature = "log")]
#[inline(never)]
pub fn packet<A: Net>(skb: Skb, link: LinkHeader, outcome: i32, memory: Memory) {
    let ctx = aya_ebpf::programs::TcContext::new(skb.as_ptr());
    let Some((scratch, _)) = memory.scratch::<A>() else {
        return;
    };
    let Ok(()) = scratch.packet.parse(
        skb,
        proxy_common::flow::Hook::INGRESS,
        crate::packet::Reading::behind(link),
    ) else {
        aya_log_ebpf::debug!(&ctx, "device {}: outcome {}", skb.ifindex(), outcome);
        return;
    };
    let src = scratch.packet.src;
    let dst = scratch.packet.dst;
    aya_log_ebpf::debug!(
        &ctx,
        "device {}: {:i} port {} to",
        skb.ifindex(),
        src.addr.log(),
        src.port.get()
    );
    aya_log_ebpf::debug!(
        &ctx,
        "{:i} port {}: outcome {}",
        dst.addr.log(),
        dst.port.get(),
        outcome
    );
}
