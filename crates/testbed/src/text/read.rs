//! Converts a frame to text, and verifies every checksum.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use etherparse::checksum::Sum16BitWords;

use super::Names;
use super::wire::*;

/// The quoted bytes of an INIT: up to the tag that identifies it to its sender.
const CUT_SCTP: usize = 20;

pub(super) fn frame(names: &Names, frame: &[u8]) -> Result<String> {
    let packet = frame
        .get(ETH_LEN..)
        .context("shorter than an Ethernet header")?;
    let ip = Ip::read(packet)?;
    ensure!(
        ip.src.is_ipv4() == (frame[12..14] == [0x08, 0x00]),
        "EtherType {:02x?}",
        &frame[12..14]
    );
    ensure!(
        ip.len <= packet.len(),
        "{} bytes, {} by its IP header",
        packet.len(),
        ip.len
    );
    let ip = Ip::read(&packet[..ip.len])?;
    let extras = ip.extras();
    let text = match ip.proto {
        ICMP4 | ICMP6 => icmp(names, &ip)?,
        _ => transport(names, &ip, true)?,
    };
    Ok(extras + &text)
}

/// Returns the offset of a packet's transport header.
pub(super) fn transport_at(packet: &[u8]) -> Result<usize> {
    Ok(packet.len() - Ip::read(packet)?.transport.len())
}

/// An IP header, with the headers before the transport.
struct Ip<'a> {
    src: IpAddr,
    dst: IpAddr,
    proto: u8,
    /// The length of the packet, from its header.
    len: usize,
    extras: Vec<String>,
    is_later: bool,
    transport: &'a [u8],
}

impl<'a> Ip<'a> {
    fn read(packet: &'a [u8]) -> Result<Self> {
        match packet.first().context("an empty packet")? >> 4 {
            4 => Self::v4(packet),
            6 => Self::v6(packet),
            version => bail!("IP version {version}"),
        }
    }

    fn v4(packet: &'a [u8]) -> Result<Self> {
        let header_len = usize::from(packet[0] & 0x0f) * 4;
        let (header, transport) = packet
            .split_at_checked(header_len)
            .context("a short IPv4 header")?;
        ensure!(header_len >= 20, "a short IPv4 header");
        let sum = Sum16BitWords::new().add_slice(header).ones_complement();
        ensure!(sum == 0, "IPv4 header checksum is off by {sum:04x}");
        let id = word(header, 4);
        let fragment = word(header, 6);
        let mut extras = Vec::new();
        if header_len > 20 {
            extras.push(options(header_len - 20));
        }
        let is_later = fragment & 0x1fff != 0;
        if is_later {
            extras.push(format!("later={id}"));
        } else if fragment & 0x2000 != 0 {
            extras.push(format!("first={id}"));
        }
        let addr = |at: usize| {
            IpAddr::V4(Ipv4Addr::new(
                header[at],
                header[at + 1],
                header[at + 2],
                header[at + 3],
            ))
        };
        let len = usize::from(word(header, 2));
        Ok(Self {
            src: addr(12),
            dst: addr(16),
            proto: header[9],
            len,
            extras,
            is_later,
            transport,
        })
    }

    fn v6(packet: &'a [u8]) -> Result<Self> {
        let (header, mut rest) = packet.split_at_checked(40).context("a short IPv6 header")?;
        let mut proto = header[6];
        let mut extras = Vec::new();
        let mut is_later = false;
        while !is_later && [HOP_BY_HOP, ROUTING, FRAGMENT, DESTINATION].contains(&proto) {
            ensure!(rest.len() >= 8, "a short extension header");
            let len = if proto == FRAGMENT {
                8
            } else {
                8 * (usize::from(rest[1]) + 1)
            };
            if proto == DESTINATION {
                let padding = rest.get(2..len).context("a short extension header")?;
                let all = padding[0] == 1
                    && padding[1] as usize == len - 4
                    && padding[2..].iter().all(|byte| *byte == 0);
                ensure!(all, "options other than padding");
            }
            let id = u32::from_be_bytes([rest[4], rest[5], rest[6], rest[7]]);
            ensure!(
                proto != FRAGMENT || rest[1] == 0 && rest[3] & 6 == 0,
                "reserved bits of a fragment header"
            );
            is_later = proto == FRAGMENT && word(rest, 2) >> 3 != 0;
            ensure!(
                !is_later || word(rest, 2) == 8 << 3,
                "a later fragment of another place"
            );
            extras.push(match proto {
                HOP_BY_HOP => "hop".to_owned(),
                ROUTING if rest[3] == 0 => "routing".to_owned(),
                ROUTING => "visits".to_owned(),
                DESTINATION => options(len),
                _ if is_later => format!("later={id}"),
                _ if word(rest, 2) & 1 != 0 => format!("first={id}"),
                _ => "atomic".to_owned(),
            });
            proto = rest[0];
            rest = rest.get(len..).context("a short extension header")?;
        }
        let addr = |at: usize| {
            IpAddr::V6(Ipv6Addr::from(
                <[u8; 16]>::try_from(&header[at..at + 16]).expect("16 bytes were taken"),
            ))
        };
        let len = 40 + usize::from(word(header, 4));
        Ok(Self {
            src: addr(8),
            dst: addr(24),
            proto,
            len,
            extras,
            is_later,
            transport: rest,
        })
    }

    fn extras(&self) -> String {
        if self.extras.is_empty() {
            String::new()
        } else {
            format!("[{}] ", self.extras.join(","))
        }
    }

    fn is_first(&self) -> bool {
        self.extras.iter().any(|extra| extra.starts_with("first="))
    }

    fn pseudo(&self) -> Result<Sum16BitWords> {
        pseudo(self.src, self.dst, self.proto, self.transport.len())
    }
}

/// Returns the text of a TCP, UDP or SCTP packet, complete or quoted.
fn transport(names: &Names, ip: &Ip<'_>, whole: bool) -> Result<String> {
    let bytes = ip.transport;
    let proto = match ip.proto {
        TCP => "tcp",
        UDP => "udp",
        SCTP => "sctp",
        other => bail!("protocol {other}"),
    };
    if ip.is_later {
        return Ok(format!(
            "{proto} {} > {}{}",
            names.name(ip.src),
            names.name(ip.dst),
            payload(bytes.len())
        ));
    }
    ensure!(bytes.len() >= 8, "{} bytes of transport", bytes.len());
    let peers = |what: &str, payload_len: usize| {
        let src = SocketAddr::new(ip.src, word(bytes, 0));
        let dst = SocketAddr::new(ip.dst, word(bytes, 2));
        format!(
            "{what} {} > {}{}",
            names.peer_name(src),
            names.peer_name(dst),
            payload(payload_len)
        )
    };
    if bytes.len() == 8 && (proto != "udp" || word(bytes, 4) != 8) {
        ensure!(!whole || ip.is_first(), "only 8 bytes of {proto}");
        return Ok(peers(&format!("cut {proto}"), 0));
    }
    if proto == "sctp" && bytes.len() == CUT_SCTP && !whole {
        return Ok(peers(&format!("cut sctp {}", chunk(bytes[12])?), 0));
    }
    if proto == "udp" {
        ensure!(
            usize::from(word(bytes, 4)) == bytes.len(),
            "UDP length {}, not {}",
            word(bytes, 4),
            bytes.len()
        );
        // 0 means no checksum, which IPv6 forbids (RFC 768, RFC 8200 §8.1).
        let none = ip.src.is_ipv4() && word(bytes, 6) == 0;
        let sum = ip.pseudo()?.add_slice(bytes).ones_complement();
        ensure!(
            !whole || none || sum == 0 && word(bytes, 6) != 0,
            "UDP checksum is off by {sum:04x}"
        );
        return Ok(peers("udp", bytes.len() - 8));
    }
    if proto == "tcp" {
        ensure!(bytes.len() >= 20, "{} bytes of TCP", bytes.len());
        let header_len = usize::from(bytes[12] >> 4) * 4;
        let options = bytes.get(20..header_len).context("a short TCP header")?;
        let options = tcp_options(options)?;
        let sum = ip.pseudo()?.add_slice(bytes).ones_complement();
        ensure!(!whole || sum == 0, "TCP checksum is off by {sum:04x}");
        let flags: String = TCP_FLAGS
            .iter()
            .filter(|(_, bit)| bytes[13] & bit != 0)
            .map(|(name, _)| name)
            .collect();
        return Ok(peers(
            &format!("tcp {flags}{options}"),
            bytes.len() - header_len,
        ));
    }
    ensure!(bytes.len() >= 12, "a short SCTP header");
    ensure!(
        !whole || bytes[8..12] == crc32c(bytes),
        "SCTP checksum {:02x?}, not {:02x?}",
        &bytes[8..12],
        crc32c(bytes)
    );
    let (chunks, payload_len) = chunks(bytes)?;
    Ok(peers(&format!("sctp {chunks}"), payload_len))
}

/// Returns the text of TCP's options: padding, and a maximum segment size.
fn tcp_options(options: &[u8]) -> Result<String> {
    if options.is_empty() {
        return Ok(String::new());
    }
    let padding = options.iter().take_while(|kind| **kind == TCP_PADDING);
    let padding = padding.count();
    let [TCP_MSS, 4, high, low, rest @ ..] = &options[padding..] else {
        bail!("TCP options other than a maximum segment size");
    };
    ensure!(rest.iter().all(|byte| *byte == 0), "more TCP options");
    let mss = u16::from_be_bytes([*high, *low]);
    Ok(match padding {
        0 => format!("={mss}"),
        _ => format!("={mss}/{padding}"),
    })
}

/// Returns the names of an SCTP packet's chunks, and the payload length of the last chunk.
fn chunks(packet: &[u8]) -> Result<(String, usize)> {
    let mut names = Vec::new();
    let mut payload_len = 0;
    let mut rest = &packet[12..];
    while !rest.is_empty() {
        ensure!(rest.len() >= 4, "a short chunk");
        names.push(chunk(rest[0])?);
        let len = usize::from(word(rest, 2));
        payload_len = len.checked_sub(4).context("a short chunk")?;
        rest = rest
            .get(len.next_multiple_of(4)..)
            .context("a short chunk")?;
    }
    Ok((names.join(","), payload_len))
}

fn chunk(kind: u8) -> Result<&'static str> {
    let known = CHUNKS.iter().find(|(_, known)| *known == kind);
    Ok(known.with_context(|| format!("SCTP chunk {kind}"))?.0)
}

fn icmp(names: &Names, ip: &Ip<'_>) -> Result<String> {
    let message = ip.transport;
    ensure!(
        message.len() >= 8,
        "an ICMP message of {} bytes",
        message.len()
    );
    let sum = icmp_seed(ip.src, ip.dst, message.len())?
        .add_slice(message)
        .ones_complement();
    ensure!(sum == 0, "ICMP checksum is off by {sum:04x}");
    let known = ICMP
        .iter()
        .find(|(_, v4, v6)| message[..2] == *if ip.src.is_ipv4() { v4 } else { v6 });
    let kind = known
        .with_context(|| format!("ICMP type and code {:?}", &message[..2]))?
        .0;
    let src = names.name(ip.src);
    let dst = names.name(ip.dst);
    if !is_error(kind) {
        return Ok(format!(
            "icmp {kind} {src} > {dst}{}",
            payload(message.len() - 8)
        ));
    }
    let quote = Ip::read(&message[8..]).context("quoted")?;
    let quoted = quote.extras() + &transport(names, &quote, false)?;
    let mirrored = (quote.src, quote.dst) == (ip.dst, ip.src) && quote.extras.is_empty();
    if kind == "port-unreachable"
        && mirrored
        && (quote.transport.len() == 8 || quoted.starts_with("cut "))
    {
        return Ok(format!(
            "unreachable {}",
            quoted.strip_prefix("cut ").unwrap_or(&quoted)
        ));
    }
    let mtu = match word(message, 6) {
        0 => String::new(),
        mtu => format!("={mtu}"),
    };
    Ok(format!("icmp {kind}{mtu} {src} > {dst} about {quoted}"))
}

fn options(len: usize) -> String {
    if len == 8 {
        "options".to_owned()
    } else {
        format!("options={len}")
    }
}

fn payload(len: usize) -> String {
    if len == 0 {
        String::new()
    } else {
        format!(" +{len}")
    }
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}
