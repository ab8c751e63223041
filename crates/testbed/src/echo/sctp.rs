//! SCTP (RFC 9260) for short conversations over raw sockets, independent of the kernel's SCTP.
//!
//! Each packet has one chunk. Lost packets are not retransmitted, so nothing is acknowledged.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::LazyLock;

use crc::{CRC_32_ISCSI, Crc, Table};
use etherparse::IpNumber;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// The longest message in a packet, which fits an Ethernet frame even in an overlay and over IPv6.
pub(super) const MAX_MESSAGE: usize = 1350;
const HEADER: usize = 12;
const RECEIVE_BUFFER: usize = 4 << 20;

const DATA: u8 = 0;
const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
const ABORT: u8 = 6;
const COOKIE_ECHO: u8 = 10;
const COOKIE_ACK: u8 = 11;
/// The flags of a complete message.
const WHOLE: u8 = 3;
const COOKIE_PARAMETER: u16 = 7;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) src_port: u16,
    pub(super) dst_port: u16,
    /// The receiver's verification tag; 0 in an INIT.
    pub(super) tag: u32,
    pub(super) chunk: Chunk,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// With the sender's tag.
    Init(u32),
    /// With the sender's tag and its cookie.
    InitAck(u32, Vec<u8>),
    CookieEcho(Vec<u8>),
    CookieAck,
    /// A transmission sequence number and a whole message.
    Data(u32, Vec<u8>),
    Abort,
}

impl Packet {
    /// Returns the packet from the common header on, with its checksum.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, flags, body) = match &self.chunk {
            Chunk::Init(tag) => (INIT, 0, init(*tag)),
            Chunk::InitAck(tag, cookie) => (INIT_ACK, 0, [init(*tag), parameter(cookie)].concat()),
            Chunk::CookieEcho(cookie) => (COOKIE_ECHO, 0, cookie.clone()),
            Chunk::CookieAck => (COOKIE_ACK, 0, Vec::new()),
            Chunk::Data(number, message) => {
                // Stream 0, sequence number 0, no payload protocol.
                (
                    DATA,
                    WHOLE,
                    [&number.to_be_bytes()[..], &[0; 8], message].concat(),
                )
            }
            Chunk::Abort => (ABORT, 0, Vec::new()),
        };
        let mut packet = [self.src_port.to_be_bytes(), self.dst_port.to_be_bytes()].concat();
        packet.extend(self.tag.to_be_bytes());
        packet.extend([0; 4]);
        packet.extend([kind, flags]);
        packet.extend(length(4 + body.len()));
        packet.extend(body);
        packet.resize(packet.len().next_multiple_of(4), 0);
        let sum = checksum(&packet);
        packet[8..HEADER].copy_from_slice(&sum);
        packet
    }

    /// Decodes a packet if its checksum is right.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, chunk) = bytes.split_at_checked(HEADER)?;
        if header[8..] != checksum(bytes) {
            return None;
        }
        let (src_port, dst_port) = ports(bytes)?;
        let word = |bytes: &[u8], at: usize| {
            Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
        };
        let body =
            chunk.get(4..usize::from(u16::from_be_bytes([*chunk.get(2)?, *chunk.get(3)?])))?;
        let chunk = match chunk[0] {
            INIT => Chunk::Init(word(body, 0)?),
            INIT_ACK => Chunk::InitAck(word(body, 0)?, cookie(body.get(16..)?)?),
            COOKIE_ECHO => Chunk::CookieEcho(body.to_vec()),
            COOKIE_ACK => Chunk::CookieAck,
            DATA => Chunk::Data(word(body, 0)?, body.get(12..)?.to_vec()),
            ABORT => Chunk::Abort,
            _ => return None,
        };
        Some(Self {
            src_port,
            dst_port,
            tag: word(header, 4)?,
            chunk,
        })
    }
}

/// Returns the source and destination port of a common header.
pub(super) fn ports(bytes: &[u8]) -> Option<(u16, u16)> {
    let bytes = bytes.get(..4)?;
    Some((
        u16::from_be_bytes([bytes[0], bytes[1]]),
        u16::from_be_bytes([bytes[2], bytes[3]]),
    ))
}

/// Returns the CRC32c of a packet with its checksum as 0, in wire order.
pub fn checksum(packet: &[u8]) -> [u8; 4] {
    static CRC: LazyLock<Crc<u32, Table<16>>> =
        LazyLock::new(|| Crc::<u32, Table<16>>::new(&CRC_32_ISCSI));
    let mut digest = CRC.digest();
    digest.update(&packet[..packet.len().min(8)]);
    digest.update(&[0; 4]);
    digest.update(packet.get(HEADER..).unwrap_or_default());
    digest.finalize().to_le_bytes()
}

/// Opens a raw socket for SCTP. While it is open, the kernel does not refuse SCTP at that address.
pub(super) fn socket(addr: IpAddr) -> io::Result<Socket> {
    let addr = SocketAddr::new(addr, 0);
    let socket = Socket::new(
        Domain::for_address(addr),
        Type::RAW,
        Some(Protocol::from(i32::from(IpNumber::SCTP.0))),
    )?;
    nix::sys::socket::setsockopt(
        &socket,
        nix::sys::socket::sockopt::RcvBufForce,
        &RECEIVE_BUFFER,
    )?;
    socket.bind(&SockAddr::from(addr))?;
    Ok(socket)
}

/// Returns the wildcard address of the same family.
pub(super) fn any(addr: IpAddr) -> IpAddr {
    match addr {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Returns the received payload without the IP header, which only IPv4 raw sockets include.
pub(super) fn payload(from: IpAddr, received: &[u8]) -> &[u8] {
    let header = match (from, received) {
        (IpAddr::V4(_), [first, ..]) => usize::from(first & 0x0f) * 4,
        _ => 0,
    };
    received.get(header..).unwrap_or_default()
}

/// Tag, window, outbound and inbound streams, initial TSN.
fn init(tag: u32) -> Vec<u8> {
    [
        tag.to_be_bytes(),
        (1_u32 << 20).to_be_bytes(),
        [0, 1, 0, 1],
        1_u32.to_be_bytes(),
    ]
    .concat()
}

fn parameter(cookie: &[u8]) -> Vec<u8> {
    [
        &COOKIE_PARAMETER.to_be_bytes(),
        &length(4 + cookie.len())[..],
        cookie,
    ]
    .concat()
}

fn cookie(parameter: &[u8]) -> Option<Vec<u8>> {
    let length = u16::from_be_bytes([*parameter.get(2)?, *parameter.get(3)?]);
    (parameter[..2] == COOKIE_PARAMETER.to_be_bytes()).then_some(())?;
    Some(parameter.get(4..length.into())?.to_vec())
}

fn length(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes)
        .expect("a chunk fits a packet")
        .to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoder_reads_encoded_packets_and_sees_one_wrong_bit() {
        let chunks = [
            Chunk::Init(7),
            Chunk::InitAck(8, vec![1, 2, 3, 4]),
            Chunk::CookieEcho(vec![1, 2, 3, 4]),
            Chunk::CookieAck,
            Chunk::Data(9, b"hello".to_vec()),
            Chunk::Abort,
        ];
        for chunk in chunks {
            let packet = Packet {
                src_port: 1000,
                dst_port: 80,
                tag: 5,
                chunk,
            };
            let bytes = packet.encode();
            assert_eq!(Packet::decode(&bytes).as_ref(), Some(&packet));
            for bit in 0..bytes.len() * 8 {
                let mut wrong = bytes.clone();
                wrong[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Packet::decode(&wrong), None, "{packet:?}, bit {bit}");
            }
        }
    }

    #[test]
    fn the_checksum_is_crc32c() {
        // RFC 3720, B.4: CRC32c of 32 zero bytes is aa 36 91 8a on the wire.
        assert_eq!(checksum(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a]);
    }
}
