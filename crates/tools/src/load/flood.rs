//! Pairs of packets from random sources, at the full speed of a core: a SYN and an ACK with a
//! guessed number, or two datagrams.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use etherparse::PacketBuilder;
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, send, setsockopt,
    socket, sockopt,
};
use rand::RngExt;
use rand::rngs::SmallRng;

use testbed::lab::Host;
use testbed::netns::NetNs;

/// The network of the sources: 198.18.0.0/15, reserved for benchmarks by RFC 2544.
const SOURCES: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
const SOURCES_LEN: u8 = 15;
/// The lengths of an Ethernet header, and of an IPv4 header without options.
const ETHERNET: usize = 14;
const IP: usize = 20;
/// Packets between two checks of the stop flag.
const BATCH: usize = 256;
/// The number of pairs begun between the two packets of a pair.
const LEAD: usize = 512;
const PAYLOAD: &[u8] = b"flood of datagrams";

/// Sends until `finish`.
pub struct Flood {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<u64>>>,
    started: Instant,
}

/// Two packets of the same source. The second is sent without reading the answer to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pair {
    /// A SYN, and an ACK.
    Handshake,
    Datagrams,
}

impl Flood {
    /// Sends from `host`'s eth0 to an address of a neighbour, whose eth0 is on the same segment.
    pub fn start(host: &Host, neighbour: &NetNs, to: SocketAddrV4, kinds: &[Pair]) -> Result<Self> {
        let from = link_addr(&host.ns, "eth0")?;
        let next_hop = link_addr(neighbour, "eth0")?;
        let mac = |link: &LinkAddr| link.addr().context("a device with an Ethernet address");
        let own = mac(&from)?;
        let next_hop = mac(&next_hop)?;
        let pairs = kinds
            .iter()
            .map(|kind| Frame::pair(*kind, own, next_hop, to));
        let mut pairs = pairs
            .map(|frames| Ok(Pairs::new(frames?)))
            .collect::<Result<Vec<_>>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let reported = stop.clone();
        let thread = host.ns.thread("flood", move || {
            let socket = socket(
                AddressFamily::Packet,
                SockType::Raw,
                SockFlag::empty(),
                SockProtocol::EthAll,
            )?;
            bind(socket.as_raw_fd(), &from).context("bind to eth0")?;
            // Arriving packets stay unread.
            setsockopt(&socket, sockopt::RcvBuf, &0)?;
            pour(&socket, &mut pairs, &reported)
        })?;
        Ok(Self {
            stop,
            thread,
            started: Instant::now(),
        })
    }

    /// Returns the numbers of pairs sent by kind, and the duration.
    pub fn finish(self) -> Result<(Vec<u64>, Duration)> {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self
            .thread
            .join()
            .map_err(|_| anyhow!("the flood panicked"))??;
        Ok((sent, self.started.elapsed()))
    }
}

struct Pairs {
    frames: [Frame; 2],
    /// The sources whose second packet is pending.
    begun: VecDeque<u64>,
    sent: u64,
}

impl Pairs {
    fn new(frames: [Frame; 2]) -> Self {
        Self {
            frames,
            begun: VecDeque::new(),
            sent: 0,
        }
    }

    /// Sends the first packet of a new source, or the second packet of the oldest.
    fn send(&mut self, socket: &OwnedFd, random: &mut SmallRng) -> Result<()> {
        let begun = if self.begun.len() > LEAD {
            self.begun.pop_front()
        } else {
            None
        };
        let source = begun.unwrap_or_else(|| random.random());
        let [first, second] = &mut self.frames;
        let frame = if begun.is_some() { second } else { first };
        match send(socket.as_raw_fd(), frame.from(source), MsgFlags::empty()) {
            Ok(_) if begun.is_none() => {
                self.begun.push_back(source);
                self.sent += 1;
                Ok(())
            }
            Ok(_) | Err(Errno::ENOBUFS | Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("send a packet of a pair"),
        }
    }
}

fn pour(socket: &OwnedFd, pairs: &mut [Pairs], stop: &AtomicBool) -> Result<Vec<u64>> {
    let mut random = rand::make_rng::<SmallRng>();
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..BATCH {
            pairs
                .iter_mut()
                .try_for_each(|pairs| pairs.send(socket, &mut random))?;
        }
    }
    Ok(pairs.iter().map(|pairs| pairs.sent).collect())
}

fn link_addr(ns: &NetNs, device: &str) -> Result<LinkAddr> {
    let link = ns.run(|| {
        let addrs = getifaddrs()?.filter(|found| found.interface_name == device);
        nix::Result::Ok(
            addrs
                .filter_map(|found| found.address)
                .find_map(|addr| addr.as_link_addr().copied()),
        )
    });
    link?.with_context(|| format!("no device {device} in {}", ns.name()))
}

/// A packet with a variable source.
struct Frame {
    bytes: Vec<u8>,
    /// The checksums' sums without the source.
    ip_sum: u32,
    sum: u32,
    /// The offset of the transport checksum in the frame.
    sum_at: usize,
}

impl Frame {
    fn pair(kind: Pair, from: [u8; 6], next_hop: [u8; 6], to: SocketAddrV4) -> Result<[Self; 2]> {
        let ip = || {
            PacketBuilder::ethernet2(from, next_hop).ipv4(SOURCES.octets(), to.ip().octets(), 64)
        };
        let tcp = |seq| ip().tcp(0, to.port(), seq, 64_240);
        let mut frames = [Vec::new(), Vec::new()];
        let [first, second] = &mut frames;
        let sum_at = match kind {
            Pair::Handshake => {
                tcp(0x1234_5678).syn().write(first, &[])?;
                tcp(0x1234_5679).ack(0x9abc_def0).write(second, &[])?;
                16
            }
            Pair::Datagrams => {
                ip().udp(0, to.port()).write(first, PAYLOAD)?;
                ip().udp(0, to.port()).write(second, PAYLOAD)?;
                6
            }
        };
        Ok(frames.map(|bytes| Self::new(bytes, ETHERNET + IP + sum_at)))
    }

    fn new(bytes: Vec<u8>, sum_at: usize) -> Self {
        let checksum = |at: usize| u32::from(!u16::from_be_bytes([bytes[at], bytes[at + 1]]));
        // One's complement: subtracting is adding the inverse.
        let without = |sum: u32| {
            sum + SOURCES
                .octets()
                .chunks(2)
                .map(|pair| 0xffff - word(pair))
                .sum::<u32>()
        };
        let ip_sum = without(checksum(ETHERNET + 10));
        let sum = without(checksum(sum_at));
        Self {
            bytes,
            ip_sum,
            sum,
            sum_at,
        }
    }

    /// Returns the packet with the source derived from these random bits.
    fn from(&mut self, random: u64) -> &[u8] {
        let host = (random >> 16) as u32 & (u32::MAX >> SOURCES_LEN);
        let source = (u32::from(SOURCES) | host).to_be_bytes();
        let port = (random as u16).max(1).to_be_bytes();
        let sum: u32 = source.chunks(2).map(word).sum();
        self.put(ETHERNET + 12, &source);
        self.put(ETHERNET + IP, &port);
        self.put(ETHERNET + 10, &fold(self.ip_sum + sum).to_be_bytes());
        self.put(
            self.sum_at,
            &fold(self.sum + sum + word(&port)).to_be_bytes(),
        );
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
    use std::collections::BTreeSet;

    use etherparse::{Ethernet2Header, Ipv4Header, TcpHeader, UdpHeader};

    use super::*;

    #[test]
    fn sources_differ_and_checksums_hold() {
        let pair =
            |kind| Frame::pair(kind, [2; 6], [4; 6], "172.18.0.11:30080".parse().unwrap()).unwrap();
        for (mut frame, syn) in pair(Pair::Handshake).into_iter().zip([true, false]) {
            check(&mut frame, |ip, rest| {
                let (tcp, rest) = TcpHeader::from_slice(rest).unwrap();
                assert!(tcp.syn == syn && tcp.ack != syn && rest.is_empty());
                assert_eq!(tcp.checksum, tcp.calc_checksum_ipv4(ip, &[]).unwrap());
                [tcp.source_port, tcp.destination_port]
            });
        }
        for mut frame in pair(Pair::Datagrams) {
            check(&mut frame, |ip, rest| {
                let (udp, rest) = UdpHeader::from_slice(rest).unwrap();
                assert_eq!(udp.checksum, udp.calc_checksum_ipv4(ip, rest).unwrap());
                [udp.source_port, udp.destination_port]
            });
        }
    }

    /// Checks the frame with a function that checks the bytes after the IP header and returns its
    /// ports.
    fn check(frame: &mut Frame, behind_ip: impl Fn(&Ipv4Header, &[u8]) -> [u16; 2]) {
        let mut sources = BTreeSet::new();
        for random in [
            0,
            1,
            0xffff_ffff_ffff_ffff,
            0x0123_4567_89ab_cdef,
            0xfedc_ba98_7654_3210,
        ] {
            let bytes = frame.from(random);
            let (_, rest) = Ethernet2Header::from_slice(bytes).unwrap();
            let (ip, rest) = Ipv4Header::from_slice(rest).unwrap();
            let [source, destination] = behind_ip(&ip, rest);
            assert_eq!((ip.destination, destination), ([172, 18, 0, 11], 30_080));
            assert_eq!(ip.header_checksum, ip.calc_header_checksum());
            assert!(matches!(ip.source, [198, 18 | 19, ..]), "{ip:?}");
            sources.insert((ip.source, source));
        }
        assert_eq!(sources.len(), 4); // Port 0 became 1.
    }
}
