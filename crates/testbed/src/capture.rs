//! Captures every packet of a namespace during a scenario, and verifies all checksums.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fmt, io, thread};

use anyhow::{Context, Result, anyhow, bail, ensure};
use etherparse::checksum::Sum16BitWords;
use etherparse::{Ethernet2Slice, IpNumber, IpSlice, LaxIpSlice};
use nix::errno::Errno;
use nix::net::if_::if_nameindex;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;

use crate::echo::sctp_checksum;
use crate::lab::{Host, VXLAN_PORT};

/// The receive buffer, large enough to lose no packets.
const RECEIVE_BUFFER: usize = 64 << 20;
/// The silence after the scenario that completes a capture.
const QUIET: Duration = Duration::from_millis(20);
/// Devices that carry only the host's own packets: their checksums may stay incomplete.
const INTERNAL: [&str; 3] = ["lo", "kpx0", "kpx1"];

/// The allowed states of a TCP or UDP checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// Complete, or the pseudo header's sum that the device completes.
    MayBePending,
    Complete,
}

/// A captured packet. Ports are 0 for protocols without ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    pub protocol: IpNumber,
    pub src: SocketAddr,
    pub dst: SocketAddr,
}

/// A packet from its network header on.
struct Raw {
    ifindex: usize,
    bytes: Vec<u8>,
}

/// A running capture.
pub struct Capture<'a> {
    host: &'a Host,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Raw>>>,
}

impl<'a> Capture<'a> {
    /// Captures IPv4 and IPv6 on all devices of a host's namespace, in both directions.
    pub fn start(host: &'a Host) -> Result<Self> {
        let socket = host
            .ns
            .run(open)
            .with_context(|| format!("capture in {}", host.ns.name()))?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stop = stop.clone();
            move || collect(&socket, &stop)
        });
        Ok(Self { host, stop, thread })
    }

    /// Ends the capture. Returns the packets, or the faults in them.
    pub fn stop(self, checksums: Checksums) -> Result<Vec<Packet>> {
        let name = self.host.name;
        let devices = self.host.ns.run(device_names)?;
        self.stop.store(true, Ordering::Relaxed);
        let captured = self
            .thread
            .join()
            .map_err(|_| anyhow!("capture in {name} panicked"))??;
        ensure!(!captured.is_empty(), "capture in {name} saw no packet");
        let fragments: BTreeSet<_> = captured
            .iter()
            .filter_map(|raw| fragment(&raw.bytes))
            .collect();
        let mut bad = Vec::new();
        let mut packets = Vec::new();
        for Raw { ifindex, bytes } in &captured {
            if put_together(bytes).is_some_and(|way| fragments.contains(&way)) {
                continue;
            }
            let device = devices.get(ifindex).map_or("?", String::as_str);
            let checksums = if INTERNAL.contains(&device) {
                Checksums::MayBePending
            } else {
                checksums
            };
            match verify(bytes, checksums) {
                Ok(packet) => packets.push(packet),
                Err(error) => bad.push(format!("{name}, {device}: {error:#}")),
            }
        }
        if bad.is_empty() {
            return Ok(packets);
        }
        bail!(
            "{} of {} packets are bad, for instance\n{}",
            bad.len(),
            captured.len(),
            bad[..bad.len().min(5)].join("\n")
        )
    }
}

/// Returns the devices of the calling thread's namespace, by interface index.
fn device_names() -> Result<BTreeMap<usize, String>> {
    let devices = if_nameindex().context("list devices")?;
    Ok(devices
        .iter()
        .map(|device| {
            (
                device.index() as usize,
                device.name().to_string_lossy().into_owned(),
            )
        })
        .collect())
}

fn open() -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(
        AddressFamily::Packet,
        SockType::Datagram,
        flags,
        SockProtocol::EthAll,
    )?;
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
    setsockopt(
        &socket,
        sockopt::ReceiveTimeout,
        &TimeVal::new(0, QUIET.as_micros() as _),
    )?;
    Ok(socket)
}

/// Collects packets until stopped and quiet.
fn collect(socket: &OwnedFd, stop: &AtomicBool) -> Result<Vec<Raw>> {
    let mut packets = Vec::new();
    let mut buffer = vec![0; 1 << 17];
    loop {
        let stopping = stop.load(Ordering::Relaxed);
        match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut buffer) {
            Ok((length, from)) => {
                let from = from.context("packet without a link address")?;
                let ethertype = u16::from_be(from.protocol());
                if [0x0800, 0x86dd].contains(&ethertype) {
                    packets.push(Raw {
                        ifindex: from.ifindex(),
                        bytes: buffer[..length].to_vec(),
                    });
                }
            }
            Err(Errno::EAGAIN) if stopping => return Ok(packets),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(errno) => return Err(io::Error::from(errno)).context("receive"),
        }
    }
}

fn fragment(bytes: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let ip = IpSlice::from_slice(bytes).ok()?;
    ip.payload()
        .fragmented
        .then(|| (ip.source_addr(), ip.destination_addr()))
}

/// Returns the addresses of a packet's first fragment if the kernel reassembled the packet before
/// this capture read it. The kernel writes the reassembled header into memory that it shares with
/// the capture.
fn put_together(bytes: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let (ip, stopped) = LaxIpSlice::from_slice(bytes).ok()?;
    (ip.payload().incomplete && stopped.is_none())
        .then(|| (ip.source_addr(), ip.destination_addr()))
}

/// Verifies all checksums of a packet that starts with its network header.
fn verify(bytes: &[u8], checksums: Checksums) -> Result<Packet> {
    let ip = IpSlice::from_slice(bytes)?;
    let payload = ip.payload();
    let segment = payload.payload;
    let mut packet = Packet {
        protocol: payload.ip_number,
        src: SocketAddr::new(ip.source_addr(), 0),
        dst: SocketAddr::new(ip.destination_addr(), 0),
    };
    // The kernel rewrites the headers of fragments during reassembly and refragmentation, in memory
    // shared with this capture.
    if let Some(ipv4) = ip.ipv4().filter(|_| !payload.fragmented) {
        let sum = Sum16BitWords::new().add_slice(ipv4.header().slice());
        ensure!(
            sum.ones_complement() == 0,
            "{packet}: IPv4 header checksum: {:02x?}",
            ipv4.header().slice()
        );
    }
    let at = match packet.protocol {
        IpNumber::SCTP if !payload.fragmented => {
            ensure!(
                segment.len() >= 12,
                "{packet}: {} bytes of transport",
                segment.len()
            );
            ensure!(segment[8..12] == sctp_checksum(segment), "{packet}: CRC32c");
            packet.set_ports(segment);
            return Ok(packet);
        }
        IpNumber::TCP => 16,
        IpNumber::UDP => 6,
        IpNumber::ICMP | IpNumber::IPV6_ICMP => 2,
        _ => return Ok(packet),
    };
    if payload.fragmented {
        return Ok(packet); // The checksum covers more than this fragment.
    }
    ensure!(
        segment.len() >= at + 2,
        "{packet}: {} bytes of transport",
        segment.len()
    );
    if [IpNumber::TCP, IpNumber::UDP].contains(&packet.protocol) {
        packet.set_ports(segment);
    }
    if let Some(inner) = in_vxlan(&packet, segment) {
        return verify(inner, checksums);
    }
    let pseudo = if packet.protocol == IpNumber::ICMP {
        Sum16BitWords::new()
    } else {
        pseudo_header(&packet, segment)
    };
    let field = u16::from_be_bytes([segment[at], segment[at + 1]]);
    // In UDP, zero means no checksum; only VXLAN's sender omits it here.
    let complete = pseudo.clone().add_slice(segment).ones_complement() == 0
        && (field != 0 || packet.protocol != IpNumber::UDP);
    let pending = field == !pseudo.ones_complement().to_be() && packet.src.port() != 0;
    let allowed = complete || pending && checksums == Checksums::MayBePending;
    ensure!(
        allowed,
        "{packet}: checksum {field:#06x} of {} bytes, pending: {pending}",
        segment.len()
    );
    Ok(packet)
}

/// Returns the IP packet in a VXLAN datagram. The datagram's own checksum is omitted: the inner
/// checksum covers the payload.
fn in_vxlan<'a>(packet: &Packet, datagram: &'a [u8]) -> Option<&'a [u8]> {
    /// The length of the headers of UDP and VXLAN.
    const HEADERS: usize = 8 + 8;
    let is_vxlan = packet.protocol == IpNumber::UDP
        && packet.dst.port() == VXLAN_PORT
        && datagram[6..8] == [0, 0];
    let frame = datagram.get(HEADERS..).filter(|_| is_vxlan)?;
    Some(
        Ethernet2Slice::from_slice_without_fcs(frame)
            .ok()?
            .payload_slice(),
    )
}

fn pseudo_header(packet: &Packet, segment: &[u8]) -> Sum16BitWords {
    let mut sum = Sum16BitWords::new();
    for ip in [packet.src.ip(), packet.dst.ip()] {
        sum = match ip {
            IpAddr::V4(ip) => sum.add_4bytes(ip.octets()),
            IpAddr::V6(ip) => sum.add_16bytes(ip.octets()),
        };
    }
    sum.add_4bytes((segment.len() as u32).to_be_bytes())
        .add_2bytes([0, packet.protocol.0])
}

impl Packet {
    fn set_ports(&mut self, segment: &[u8]) {
        self.src
            .set_port(u16::from_be_bytes([segment[0], segment[1]]));
        self.dst
            .set_port(u16::from_be_bytes([segment[2], segment[3]]));
    }
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} -> {}", self.protocol, self.src, self.dst)
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    fn packet() -> Vec<u8> {
        let builder = PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).tcp(1000, 80, 7, 512);
        let mut bytes = Vec::new();
        builder.write(&mut bytes, b"hello").unwrap();
        bytes
    }

    #[test]
    fn a_right_checksum_is_accepted_and_a_wrong_one_is_not() {
        let right = packet();
        assert_eq!(
            verify(&right, Checksums::Complete).unwrap().dst,
            "10.0.0.2:80".parse().unwrap()
        );
        const FRAGMENT_OFFSET: usize = 7; // Incomplete packets are not verified.
        for at in (0..right.len()).filter(|at| *at != FRAGMENT_OFFSET) {
            let mut wrong = right.clone();
            wrong[at] ^= 0x40;
            assert!(
                verify(&wrong, Checksums::MayBePending).is_err(),
                "byte {at}"
            );
        }
    }

    #[test]
    fn a_pending_checksum_is_the_sum_of_the_pseudo_header() {
        let mut pending = packet();
        // 0x0a00 + 0x0001 + 0x0a00 + 0x0002 + 6 + 25
        pending[36..38].copy_from_slice(&0x1422_u16.to_be_bytes());
        verify(&pending, Checksums::MayBePending).unwrap();
        verify(&pending, Checksums::Complete).unwrap_err();
    }
}
