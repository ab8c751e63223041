//! TCP's header (RFC 9293 §3.1), and the signals of its flags.

use core::mem::size_of;

use proxy_common::flow::Signals;

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
