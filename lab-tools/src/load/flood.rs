//! Handshakes from random sources, as many as one core can send: SYNs, and ACKs that do not know what was answered.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use etherparse::{PacketBuilder, PacketBuilderStep, TcpHeader};
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, send, setsockopt, socket, sockopt,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use testbed::lab::Host;
use testbed::netns::NetNs;

/// The network of the sources: 198.18.0.0/15, set apart for such things by RFC 2544.
const SOURCES: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
const SOURCES_LEN: u8 = 15;
/// The lengths of an Ethernet header, and of an IPv4 header without options.
const ETHERNET: usize = 14;
const IP: usize = 20;
/// Between looks at whether to stop.
const BATCH: usize = 256;
/// SYNs between a SYN and its ACK.
const LEAD: usize = 512;

/// Sends until it is told to finish.
pub struct Flood {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u64>>,
    started: Instant,
}

impl Flood {
    /// From `host`'s eth0 to that address of a neighbour, whose eth0 is on the same segment.
    pub fn start(host: &Host, neighbour: &NetNs, to: SocketAddrV4) -> Result<Self> {
        let (from, next_hop) = (link_addr(&host.ns, "eth0")?, link_addr(neighbour, "eth0")?);
        let mac = |link: &LinkAddr| link.addr().context("a device with an Ethernet address");
        let mut frames = Frame::handshake(mac(&from)?, mac(&next_hop)?, to)?;
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = host.ns.thread("flood", move || {
            let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), SockProtocol::EthAll)?;
            bind(socket.as_raw_fd(), &from).context("bind to eth0")?;
            // Arriving packets stay unread.
            setsockopt(&socket, sockopt::RcvBuf, &0)?;
            pour(&socket, &mut frames, &told)
        })?;
        Ok(Self { stop, thread, started: Instant::now() })
    }

    /// How many SYNs were sent, each with an ACK behind it, and in which time.
    pub fn finish(self) -> Result<(u64, Duration)> {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self.thread.join().map_err(|_| anyhow!("the flood panicked"))??;
        Ok((sent, self.started.elapsed()))
    }
}

fn pour(socket: &OwnedFd, [syn, ack]: &mut [Frame; 2], stop: &AtomicBool) -> Result<u64> {
    let mut random = SmallRng::from_os_rng();
    let mut dialled: VecDeque<u64> = VecDeque::new();
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..BATCH {
            let answered = if dialled.len() > LEAD { dialled.pop_front() } else { None };
            let source = answered.unwrap_or_else(|| random.random());
            let frame = if answered.is_some() { &mut *ack } else { &mut *syn };
            match send(socket.as_raw_fd(), frame.from(source), MsgFlags::empty()) {
                Ok(_) if answered.is_none() => {
                    dialled.push_back(source);
                    sent += 1;
                }
                Ok(_) | Err(Errno::ENOBUFS | Errno::EINTR) => {}
                Err(error) => return Err(error).context("send a packet of a handshake"),
            }
        }
    }
    Ok(sent)
}

fn link_addr(ns: &NetNs, device: &str) -> Result<LinkAddr> {
    let link = ns.run(|| {
        let addrs = getifaddrs()?.filter(|found| found.interface_name == device);
        nix::Result::Ok(addrs.filter_map(|found| found.address).find_map(|addr| addr.as_link_addr().copied()))
    });
    link?.with_context(|| format!("no device {device} in {}", ns.name()))
}

/// A packet whose source is yet to be filled in.
struct Frame {
    bytes: Vec<u8>,
    /// The sums that the checksums are made of, but for the source.
    ip_sum: u32,
    tcp_sum: u32,
}

impl Frame {
    /// Returns a SYN, and the ACK that follows it.
    fn handshake(from: [u8; 6], next_hop: [u8; 6], to: SocketAddrV4) -> Result<[Self; 2]> {
        let packet = |seq| {
            let ip = PacketBuilder::ethernet2(from, next_hop).ipv4(SOURCES.octets(), to.ip().octets(), 64);
            ip.tcp(0, to.port(), seq, 64_240)
        };
        Ok([Self::new(packet(0x1234_5678).syn())?, Self::new(packet(0x1234_5679).ack(0x9abc_def0))?])
    }

    fn new(builder: PacketBuilderStep<TcpHeader>) -> Result<Self> {
        let mut bytes = Vec::new();
        builder.write(&mut bytes, &[])?;
        let checksum = |at: usize| u32::from(!u16::from_be_bytes([bytes[at], bytes[at + 1]]));
        // One's complement: to subtract is to add what is inverted.
        let without = |sum: u32| sum + SOURCES.octets().chunks(2).map(|pair| 0xffff - word(pair)).sum::<u32>();
        let (ip_sum, tcp_sum) = (without(checksum(ETHERNET + 10)), without(checksum(ETHERNET + IP + 16)));
        Ok(Self { bytes, ip_sum, tcp_sum })
    }

    /// From the source that these random bits stand for.
    fn from(&mut self, random: u64) -> &[u8] {
        let host = (random >> 16) as u32 & (u32::MAX >> SOURCES_LEN);
        let source = (u32::from(SOURCES) | host).to_be_bytes();
        let port = (random as u16).max(1).to_be_bytes();
        let sum: u32 = source.chunks(2).map(word).sum();
        self.put(ETHERNET + 12, &source);
        self.put(ETHERNET + IP, &port);
        self.put(ETHERNET + 10, &fold(self.ip_sum + sum).to_be_bytes());
        self.put(ETHERNET + IP + 16, &fold(self.tcp_sum + sum + word(&port)).to_be_bytes());
        &self.bytes
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

fn word(pair: &[u8]) -> u32 {
    u32::from(pair[0]) << 8 | u32::from(pair[1])
}

/// RFC 1071.
fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    !(((sum & 0xffff) + (sum >> 16)) as u16)
}

#[cfg(test)]
mod tests {
    use etherparse::{Ethernet2Header, Ipv4Header};

    use super::*;

    #[test]
    fn sources_differ_and_checksums_hold() {
        let frames = Frame::handshake([2; 6], [4; 6], "172.18.0.11:30080".parse().unwrap()).unwrap();
        for (mut frame, syn) in frames.into_iter().zip([true, false]) {
            check(&mut frame, syn);
        }
    }

    fn check(frame: &mut Frame, syn: bool) {
        let mut sources = std::collections::BTreeSet::new();
        for random in [0, 1, 0xffff_ffff_ffff_ffff, 0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210] {
            let bytes = frame.from(random);
            let (_, rest) = Ethernet2Header::from_slice(bytes).unwrap();
            let (ip, rest) = Ipv4Header::from_slice(rest).unwrap();
            let (tcp, rest) = TcpHeader::from_slice(rest).unwrap();
            assert!(tcp.syn == syn && tcp.ack != syn && rest.is_empty());
            assert_eq!((ip.destination, tcp.destination_port), ([172, 18, 0, 11], 30_080));
            assert_eq!(ip.header_checksum, ip.calc_header_checksum());
            assert_eq!(tcp.checksum, tcp.calc_checksum_ipv4(&ip, &[]).unwrap());
            assert!(matches!(ip.source, [198, 18 | 19, ..]), "{ip:?}");
            sources.insert((ip.source, tcp.source_port));
        }
        assert_eq!(sources.len(), 4); // Port 0 became 1.
    }
}
