//! The table of `kpx_limit`, which only benchmarks attach: see proxy-ebpf/src/limit.rs.

use crate::addr::{Addr4, Port, Proto};
use crate::assert_size;

/// The part of a packet's headers that names its way. The client's port is not in it, because a
/// benchmark writes the ways before it has clients.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitKey {
    pub src: Addr4,
    pub dst: Addr4,
    /// The port of the frontend or of the backend.
    pub port: Port,
    pub proto: Proto,
    zero: u8,
}
assert_size!(LimitKey = 4 + 4 + 2 + 1 + 1);

/// The way of a packet: its new end, the frame, the device in front of the pod, and the packets so
/// far.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitWay {
    pub addr: Addr4,
    pub port: Port,
    zero: u16,
    pub ifindex: u32,
    /// The destination and the source of the frame, in words.
    pub macs: [u32; 3],
    pub packets: u64,
    /// The bytes of these packets, with their headers.
    pub bytes: u64,
}
assert_size!(LimitWay = 4 + 2 + 2 + 4 + 12 + 8 + 8);

impl LimitKey {
    #[inline(always)]
    pub const fn new(src: Addr4, dst: Addr4, port: Port, proto: Proto) -> Self {
        Self {
            src,
            dst,
            port,
            proto,
            zero: 0,
        }
    }
}

impl LimitWay {
    /// Leads to a pod behind the device `ifindex`, in a frame from `smac` to `dmac`.
    pub fn new(addr: Addr4, port: Port, ifindex: u32, dmac: [u8; 6], smac: [u8; 6]) -> Self {
        let [a, b, c, d, e, f] = dmac;
        let [g, h, i, j, k, l] = smac;
        let macs = [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_ne_bytes);
        Self {
            addr,
            port,
            zero: 0,
            ifindex,
            macs,
            packets: 0,
            bytes: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_has_its_destination_first() {
        let way = LimitWay::new(
            Addr4::from_wire(1),
            Port::new(80),
            7,
            [1, 2, 3, 4, 5, 6],
            [7, 8, 9, 10, 11, 12],
        );
        let bytes: [u8; 12] = std::array::from_fn(|at| way.macs[at / 4].to_ne_bytes()[at % 4]);
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    }
}
