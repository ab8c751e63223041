//! UDP's header (RFC 768).

use core::mem::size_of;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct UdpHeader {
    pub sport: u16,
    pub dport: u16,
    pub len: u16,
    pub check: u16,
}
pub const UDP_LEN: u32 = size_of::<UdpHeader>() as u32;
