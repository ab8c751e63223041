//! TCP's header (RFC 9293 §3.1), and the signals of its flags.

use core::mem::size_of;

use proxy_common::addr::Proto;
use proxy_common::counter::Reason;
use proxy_common::flow::Signals;

use crate::checksum::checksum_offset;
use crate::skb::Skb;

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;
pub const RST_ACK: u8 = RST | ACK;

/// The first 16 of the 20 bytes of a TCP header.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TcpStart {
    pub sport: u16,
    pub dport: u16,
    pub numbers: Numbers,
    data_offset: u8,
    pub flags: u8,
    window: u16,
}

/// TCP's sequence and acknowledgement numbers, as they are in the packet: in network byte order.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Numbers {
    pub seq: u32,
    pub acked: u32,
}

impl Numbers {
    /// The numbers of a packet that has none.
    pub const NONE: Self = Self { seq: 0, acked: 0 };
}

/// All 20 bytes of a TCP header without options.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TcpHeader {
    pub start: TcpStart,
    rest: [u16; 2],
}
pub const TCP_LEN: u32 = size_of::<TcpHeader>() as u32;

/// Lowers the maximum segment size that a SYN or SYN-ACK announces by `less` bytes, if it announces
/// one (RFC 9293 §3.2). `l4` is the offset of the TCP header in the packet.
#[inline(never)]
pub fn lower_mss(skb: Skb, l4: u32, less: u16) -> Result<(), Reason> {
    /// The options take 40 bytes at most: 36 of padding, and the last four.
    const OPTIONS_MAX: u32 = 37;
    const END: u8 = 0;
    const PADDING: u8 = 1;
    const MSS: u8 = 2;
    const MSS_LEN: u8 = 4;
    let Ok(start) = skb.load::<TcpStart>(l4) else {
        return Ok(());
    };
    let end = l4 + u32::from(start.data_offset >> 4) * 4;
    let mut at = l4 + TCP_LEN;
    for _ in 0..OPTIONS_MAX {
        if at + u32::from(MSS_LEN) > end {
            break;
        }
        let Ok([kind, len, high, low]) = skb.load::<[u8; 4]>(at) else {
            break;
        };
        match (kind, len) {
            (END, _) => break,
            (PADDING, _) => at += 1,
            (MSS, MSS_LEN) => {
                let from = u16::from_be_bytes([high, low]);
                // Linux ignores an MSS of 0.
                if from <= less {
                    break;
                }
                return replace_mss(skb, l4, at + 2, from, from - less);
            }
            (_, 0 | 1) => break,
            (_, len) => at += u32::from(len),
        }
    }
    Ok(())
}

/// Replaces the value at `at` of a TCP header's options.
#[inline(always)]
fn replace_mss(skb: Skb, l4: u32, at: u32, from: u16, to: u16) -> Result<(), Reason> {
    // The sum is over words from the header's start.
    let word = |value: u16| {
        if (at - l4).is_multiple_of(2) {
            value.to_be()
        } else {
            value.to_le()
        }
    };
    let check = l4 + checksum_offset(Proto::TCP);
    skb.replace_l4_checksum(
        check,
        word(from).into(),
        word(to).into(),
        size_of::<u16>() as u32,
    )?;
    skb.store(at, &to.to_be_bytes(), 0)
}

/// Returns true if a TCP packet with these flags is the first of a connection.
#[inline(always)]
pub fn opens(flags: u8) -> bool {
    flags & (SYN | ACK | RST | FIN) == SYN
}

/// Returns the signals of TCP's flags.
#[inline(always)]
pub fn signals(flags: u8) -> Signals {
    let fin = if flags & FIN != 0 {
        Signals::FIN
    } else {
        Signals::PACKET
    };
    let rst = if flags & RST != 0 {
        Signals::RST
    } else {
        Signals::PACKET
    };
    let opener = if opens(flags) {
        Signals::OPENER
    } else {
        Signals::PACKET
    };
    let answer = if flags & (SYN | RST_ACK | FIN) == SYN | ACK {
        Signals::ANSWER
    } else {
        Signals::PACKET
    };
    fin.with(rst).with(opener).with(answer)
}
