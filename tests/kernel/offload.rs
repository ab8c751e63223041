//! Offload, which only packets on a device have: pending checksums and segmentation.
//!
//! Frames enter and leave through packet sockets with a virtio header (linux/virtio_net.h), which
//! holds the kernel's offload metadata. The test does the device's work from that metadata alone.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use testbed::agent::DEADLINE;
use testbed::kernel;

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;
use nix::{libc, setsockopt_impl, sockopt_impl};
use proxy_common::hook::Place;

use crate::fixture::{Fixture, fixtures};

sockopt_impl!(
    VirtioHeader,
    SetOnly,
    libc::SOL_PACKET,
    libc::PACKET_VNET_HDR,
    bool
);

/// The kernel's offload metadata of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Notes {
    /// The start of the bytes that the checksum covers, and the offset of its field from there.
    checksum: Option<(u16, u16)>,
    /// The kind of segmentation, and the payload size of each segment.
    segments: Option<(u8, u16)>,
}

const NEEDS_CHECKSUM: u8 = 1;
const TCP4: u8 = 1;
const TCP6: u8 = 4;
const UDP_SEGMENTS: u8 = 5;
/// The first kernel with UDP segmentation from sockets: commit 860b7f27b8f7 (linux/virtio_net.h:
/// Support USO offload in vnet header).
const UDP_FROM_SOCKETS: (u32, u32) = (6, 2);

#[test]
fn pending_checksum_stays_pending_and_comes_out_right() -> Result<()> {
    for mut fixture in fixtures("pending")? {
        let wire = Wire::new(&mut fixture)?;
        for (packet, out) in [
            (
                "udp client:1000 > web:53 +100",
                "udp client:1000 > pod:5353 +100",
            ),
            ("tcp S client:1000 > web:80", "tcp S client:1000 > pod:8080"),
            (
                "tcp PA client:1000 > web:80 +99",
                "tcp PA client:1000 > pod:8080 +99",
            ),
            (
                "[options] tcp PA client:1000 > web:80 +99",
                "[options] tcp PA client:1000 > pod:8080 +99",
            ),
            (
                "udp pod:5353 > client:1000 +7",
                "udp web:53 > client:1000 +7",
            ),
        ] {
            let (frame, notes) = pending(&fixture.names.frame(packet)?)?;
            wire.send(&frame, notes)?;
            let (frame, found) = wire.receive()?;
            ensure!(found == notes, "{packet}: {found:?}, not {notes:?}");
            ensure!(
                fixture.names.text(&frame).is_err(),
                "{packet}: the checksum was finished"
            );
            let text = fixture.names.text(&finished(frame, found)?)?;
            ensure!(text == out, "{packet} became {text}");
        }
    }
    Ok(())
}

#[test]
fn reject_of_packet_with_pending_checksum_is_right() -> Result<()> {
    for mut fixture in fixtures("rejpend")? {
        let wire = Wire::new(&mut fixture)?;
        for (packet, out) in [
            (
                "udp client:1000 > none:80 +100",
                "unreachable udp client:1000 > none:80",
            ),
            (
                "tcp S client:1000 > none:80",
                "tcp RA none:80 > client:1000",
            ),
            (
                "[options=40] udp client:1000 > none:80 +100",
                "unreachable udp client:1000 > none:80",
            ),
            (
                "[options=16] tcp S client:1000 > none:80",
                "tcp RA none:80 > client:1000",
            ),
        ] {
            let (frame, notes) = pending(&fixture.names.frame(packet)?)?;
            wire.send(&frame, notes)?;
            let (frame, found) = wire.receive()?;
            let text = fixture.names.text(&finished(frame, found)?)?;
            ensure!(text == out, "{packet} became {text}");
        }
    }
    Ok(())
}

/// A device would write the CRC into the middle of the ICMP error's quote. Only sockets of this
/// host send such packets, and the answer stays on the host.
#[test]
fn sctp_packet_with_pending_checksum_is_rejected() -> Result<()> {
    for mut fixture in fixtures("sctppend")? {
        let wire = Wire::new(&mut fixture)?;
        let (frame, notes) = pending(
            &fixture
                .names
                .frame("sctp INIT client:1000 > none:3868 +16")?,
        )?;
        wire.send(&frame, notes)?;
        let text = fixture.names.text(&wire.receive()?.0)?;
        ensure!(
            text == "unreachable sctp INIT client:1000 > none:3868",
            "it became {text}"
        );
    }
    Ok(())
}

#[test]
fn requested_segmentation_stays() -> Result<()> {
    for mut fixture in fixtures("segments")? {
        let wire = Wire::new(&mut fixture)?;
        let tcp = if fixture.names.addr("web")?.is_ipv4() {
            TCP4
        } else {
            TCP6
        };
        wire.send(
            &fixture.names.frame("tcp S client:1000 > web:80")?,
            Notes::default(),
        )?;
        ensure!(fixture.names.text(&wire.receive()?.0)? == "tcp S client:1000 > pod:8080");
        for (packet, kind, out) in [
            (
                "tcp PA client:1000 > web:80 +9000",
                tcp,
                "tcp PA client:1000 > pod:8080 +9000",
            ),
            (
                "udp client:1000 > web:53 +9000",
                UDP_SEGMENTS,
                "udp client:1000 > pod:5353 +9000",
            ),
            (
                "udp pod:5353 > client:1000 +9000",
                UDP_SEGMENTS,
                "udp web:53 > client:1000 +9000",
            ),
        ] {
            if kind == UDP_SEGMENTS && kernel::version()? < UDP_FROM_SOCKETS {
                println!(
                    "{packet}: left out, as this kernel takes no UDP from a socket that is to be segmented"
                );
                continue;
            }
            let (frame, notes) = pending(&fixture.names.frame(packet)?)?;
            let notes = Notes {
                segments: Some((kind, 1_000)),
                ..notes
            };
            wire.send(&frame, notes)?;
            let (frame, found) = wire.receive()?;
            ensure!(found == notes, "{packet}: {found:?}, not {notes:?}");
            let text = fixture.names.text(&finished(frame, found)?)?;
            ensure!(text == out, "{packet} became {text}");
        }
    }
    Ok(())
}

/// The far end of a pod's veth, whose near end has the programs.
pub(crate) struct Wire(OwnedFd);

impl Wire {
    pub(crate) fn new(fixture: &mut Fixture) -> Result<Self> {
        // The destination of the frames. No pod answers here, so the neighbour entries are
        // permanent.
        let pods = ["client", "pod"]
            .map(|name| fixture.names.addr(name))
            .into_iter()
            .collect::<Result<Vec<_>>>()?;
        fixture.netns.ip(&format!(
            "link set pod0 address 02:00:00:00:00:02
             route replace {client} dev pod0
             neigh replace {client} dev pod0 lladdr 02:00:00:00:00:01
             neigh replace {pod} dev pod0 lladdr 02:00:00:00:00:01",
            client = pods[0],
            pod = pods[1],
        ))?;
        for (key, value) in [
            ("ipv4/ip_forward", "1"),
            ("ipv6/conf/all/forwarding", "1"),
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/conf/pod0/rp_filter", "0"),
            ("ipv4/conf/all/send_redirects", "0"),
            ("ipv4/conf/pod0/send_redirects", "0"),
        ] {
            fixture.netns.sysctl(key, value)?;
        }
        let attachments = &mut fixture.bench.datapath.attachments;
        fixture.netns.run(|| {
            attachments.attach(
                nix::net::if_::if_nametoindex("pod0")?,
                "pod0",
                Place::Device,
            )
        })?;
        fixture.netns.run(|| {
            let flags = SockFlag::SOCK_CLOEXEC;
            let socket = socket(
                AddressFamily::Packet,
                SockType::Raw,
                flags,
                SockProtocol::EthAll,
            )?;
            setsockopt(&socket, VirtioHeader, &true).context("ask for virtio headers")?;
            setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(0, 100_000))?;
            let addrs = getifaddrs()?.filter(|found| found.interface_name == "pod1");
            let link = addrs
                .filter_map(|found| found.address)
                .find_map(|addr| addr.as_link_addr().copied());
            bind(socket.as_raw_fd(), &link.context("no device pod1")?)?;
            Ok(Self(socket))
        })
    }

    pub(crate) fn send(&self, frame: &[u8], notes: Notes) -> Result<()> {
        let (start, offset) = notes.checksum.unwrap_or_default();
        let (kind, size) = notes.segments.unwrap_or_default();
        // The end of the headers, for segmentation: behind the checksum and the rest of the header.
        let headers = match kind {
            0 => 0,
            UDP_SEGMENTS => start + 8,
            _ => start + 20,
        };
        let flags = if notes.checksum.is_some() {
            NEEDS_CHECKSUM
        } else {
            0
        };
        let mut bytes = vec![flags, kind];
        bytes.extend(
            [headers, size, start, offset]
                .map(u16::to_ne_bytes)
                .concat(),
        );
        bytes.extend(frame);
        send(self.0.as_raw_fd(), &bytes, MsgFlags::empty()).context("send a frame")?;
        Ok(())
    }

    /// Receives the next frame, except the kernel's own (neighbour discovery, multicast reports,
    /// redirects).
    pub(crate) fn receive(&self) -> Result<(Vec<u8>, Notes)> {
        let since = Instant::now();
        let mut buffer = vec![0; 1 << 17];
        while since.elapsed() < DEADLINE {
            let len = match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(len) => len,
                Err(Errno::EAGAIN | Errno::EINTR) => continue,
                Err(errno) => return Err(errno).context("receive a frame"),
            };
            let word = |at: usize| u16::from_ne_bytes([buffer[at], buffer[at + 1]]);
            let notes = Notes {
                checksum: (buffer[0] & NEEDS_CHECKSUM != 0).then(|| (word(6), word(8))),
                segments: (buffer[1] != 0).then(|| (buffer[1], word(4))),
            };
            let frame = &buffer[10..len];
            let v4 = frame[12..14] == [0x08, 0x00];
            let v6 = frame[12..14] == [0x86, 0xdd];
            let is_ours = frame[0] & 1 == 0 && (v4 || v6 && frame[22..24] != [0xfe, 0x80]);
            if is_ours {
                return Ok((frame.to_vec(), notes));
            }
        }
        bail!("no frame came within {DEADLINE:?}")
    }
}

/// Returns the frame as its sender leaves it to the device: the checksum field holds the sum of the
/// pseudo header.
fn pending(frame: &[u8]) -> Result<(Vec<u8>, Notes)> {
    let (proto, start) = transport(frame)?;
    let mut frame = frame.to_vec();
    let at = start + field(proto);
    if proto == 132 {
        frame[at..at + 4].fill(0);
    } else {
        let addrs = if frame[14] >> 4 == 4 { 26..34 } else { 22..54 };
        let len = (frame.len() - start) as u32;
        let pseudo = [&frame[addrs], &len.to_be_bytes(), &[0, proto]].concat();
        frame[at..at + 2].copy_from_slice(&sum(&pseudo).to_be_bytes());
    }
    Ok((
        frame,
        Notes {
            checksum: Some((start as u16, field(proto) as u16)),
            segments: None,
        },
    ))
}

/// Returns the frame as the device would send it.
fn finished(mut frame: Vec<u8>, notes: Notes) -> Result<Vec<u8>> {
    let Some((start, offset)) = notes.checksum else {
        return Ok(frame);
    };
    let at = usize::from(start + offset);
    let start = usize::from(start);
    let checksum = !sum(frame
        .get(start..)
        .context("the checksum starts behind the frame")?);
    frame
        .get_mut(at..at + 2)
        .context("the checksum is behind the frame")?
        .copy_from_slice(&checksum.to_be_bytes());
    Ok(frame)
}

/// Returns the protocol and the offset of a frame's transport header, behind IPv4 options or one
/// IPv6 padding header.
fn transport(frame: &[u8]) -> Result<(u8, usize)> {
    let (proto, start) = match frame[14] >> 4 {
        4 => (frame[23], 14 + usize::from(frame[14] & 0x0f) * 4),
        _ if frame[20] == 60 => (frame[54], 54 + 8 * (usize::from(frame[55]) + 1)),
        _ => (frame[20], 54),
    };
    ensure!([6, 17, 132].contains(&proto), "protocol {proto}");
    Ok((proto, start))
}

fn field(proto: u8) -> usize {
    match proto {
        6 => 16,
        17 => 6,
        _ => 8,
    }
}

/// Returns the one's complement sum (RFC 1071).
pub(crate) fn sum(bytes: &[u8]) -> u16 {
    let word = |two: &[u8]| {
        u32::from(u16::from_be_bytes([
            two[0],
            two.get(1).copied().unwrap_or(0),
        ]))
    };
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
