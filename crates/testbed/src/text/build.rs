//! Converts text to a frame.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use etherparse::checksum::Sum16BitWords;

use super::Names;
use super::wire::*;

pub const DST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const SRC_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// The bytes of a cut transport header.
const CUT: usize = 8;
/// The initial sequence number of both sides of every TCP connection.
const ISN: u32 = 1_000;

pub(super) fn frame(names: &Names, text: &str) -> Result<Vec<u8>> {
    let words: Vec<_> = text.split_whitespace().collect();
    let packet = packet(names, &words).with_context(|| format!("packet `{text}`"))?;
    let ethertype = if packet[0] >> 4 == 4 {
        [0x08, 0x00]
    } else {
        [0x86, 0xdd]
    };
    Ok([&DST_MAC[..], &SRC_MAC, &ethertype, &packet].concat())
}

/// Returns a packet, from its IP header on.
fn packet(names: &Names, words: &[&str]) -> Result<Vec<u8>> {
    let (extras, words) = match words {
        [first, rest @ ..] if first.starts_with('[') => (extras(first)?, rest),
        _ => (Vec::new(), words),
    };
    if let ["unreachable", proto, rest @ ..] = words {
        let quoted = [&["about", "cut", proto], rest].concat();
        let at = rest.iter().position(|word| *word == ">").context("no >")?;
        let src = rest.get(at - 1).context("no source")?;
        let dst = rest.get(at + 1).context("no destination")?;
        let addr = |peer: &str| -> Result<_> { Ok(SocketAddr::new(names.peer(peer)?.ip(), 0)) };
        let from = addr(dst)?;
        let to = addr(src)?;
        let (proto, message) = icmp(names, "port-unreachable", from, to, &quoted)?;
        return ip(from.ip(), to.ip(), &extras, proto, message);
    }
    // The flags are cut off, as in a quote.
    let (words, most) = match words {
        ["cut", proto, rest @ ..] => ([&[*proto], any_flags(proto), rest].concat(), CUT),
        _ => (words.to_vec(), usize::MAX),
    };
    let is_later = extras.iter().any(|extra| matches!(extra, Extra::Later(_)));
    let (what, rest) = match words.as_slice() {
        ["udp", rest @ ..] => (["udp", ""], rest),
        [what, rest @ ..] if is_later => ([*what, ""], rest),
        [what @ ("tcp" | "sctp" | "icmp"), kind, rest @ ..] => ([*what, *kind], rest),
        _ => bail!("neither tcp, udp, sctp, nor icmp"),
    };
    let [src, ">", dst, rest @ ..] = rest else {
        bail!("no SOURCE > DESTINATION")
    };
    let src = names.peer(src)?;
    let dst = names.peer(dst)?;
    let (proto, mut transport) = match what {
        _ if is_later => {
            let proto = match what[0] {
                "tcp" => TCP,
                "udp" => UDP,
                "sctp" => SCTP,
                other => bail!("{other} in a later fragment"),
            };
            (proto, payload(rest)?)
        }
        ["tcp", flags] => (TCP, tcp(flags, src, dst, &payload(rest)?)?),
        ["udp", _] => (UDP, udp(src, dst, &payload(rest)?)?),
        ["sctp", chunks] => (SCTP, sctp(chunks, src, dst, &payload(rest)?)?),
        [_, kind] => icmp(names, kind, src, dst, rest)?,
    };
    transport.truncate(most);
    ip(src.ip(), dst.ip(), &extras, proto, transport)
}

/// Returns valid flags of this transport; empty if it has no flags.
fn any_flags(proto: &str) -> &'static [&'static str] {
    match proto {
        "tcp" => &["A"],
        "sctp" => &["DATA"],
        _ => &[],
    }
}

/// An extra part of an IP header.
#[derive(Clone, Copy)]
enum Extra {
    Options(u8),
    First(u32),
    Later(u32),
    /// An IPv6 extension header: its number, and its first 8 bytes without the next header.
    Extension(u8, [u8; 7]),
}

fn extras(text: &str) -> Result<Vec<Extra>> {
    let list = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .context("no [LIST]")?;
    let extra = |text: &str| {
        let (name, number) = text.split_once('=').unwrap_or((text, "8"));
        Ok(match name {
            "options" => Extra::Options(number.parse()?),
            "first" => Extra::First(number.parse()?),
            "later" => Extra::Later(number.parse()?),
            // PadN of 4 bytes.
            "hop" => Extra::Extension(HOP_BY_HOP, [0, 1, 4, 0, 0, 0, 0]),
            "routing" => Extra::Extension(ROUTING, [0, 4, 0, 0, 0, 0, 0]),
            "visits" => Extra::Extension(ROUTING, [0, 4, 1, 0, 0, 0, 0]),
            "atomic" => Extra::Extension(FRAGMENT, [0, 0, 0, 0, 0, 0, 9]),
            "auth" => Extra::Extension(AUTHENTICATION, [0; 7]),
            "esp" => Extra::Extension(ESP, [0; 7]),
            "none" => Extra::Extension(NO_NEXT_HEADER, [0; 7]),
            _ => bail!("{text} is nothing that an IP header has"),
        })
    };
    list.split(',').map(extra).collect()
}

fn ip(
    src: IpAddr,
    dst: IpAddr,
    extras: &[Extra],
    proto: u8,
    transport: Vec<u8>,
) -> Result<Vec<u8>> {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let mut id = 0;
            let mut fragment = 0x4000_u16;
            let mut options = Vec::new();
            for extra in extras {
                match *extra {
                    Extra::Options(len) => options.extend(vec![1; len.into()]), // No operation.
                    Extra::First(n) => (id, fragment) = (u16::try_from(n)?, 0x2000),
                    Extra::Later(n) => (id, fragment) = (u16::try_from(n)?, 8),
                    Extra::Extension(..) => bail!("IPv4 has no extension headers"),
                }
            }
            ensure!(
                options.len() % 4 == 0 && options.len() <= 40,
                "{} bytes of options",
                options.len()
            );
            let header_len = 20 + options.len();
            let total_len = u16::try_from(header_len + transport.len())?;
            let mut header = vec![0x40 | (header_len / 4) as u8, 0];
            header.extend([total_len, id, fragment].map(u16::to_be_bytes).concat());
            header.extend([64, proto, 0, 0]);
            header.extend([src.octets(), dst.octets()].concat());
            header.extend(options);
            let sum = checksum(Sum16BitWords::new(), &header, 10);
            header[10..12].copy_from_slice(&sum);
            Ok([header, transport].concat())
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let extensions: Vec<_> = extras.iter().map(extension).collect();
            let kinds: Vec<_> = extensions
                .iter()
                .map(|(kind, _)| *kind)
                .chain([proto])
                .collect();
            let chain: Vec<u8> = extensions
                .iter()
                .zip(&kinds[1..])
                .flat_map(|((_, rest), next)| [&[*next], rest.as_slice()].concat())
                .collect();
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(u16::try_from(chain.len() + transport.len())?.to_be_bytes());
            header.extend([kinds[0], 64]);
            header.extend([src.octets(), dst.octets()].concat());
            Ok([header, chain, transport].concat())
        }
        _ => bail!("{src} and {dst} are of different families"),
    }
}

/// Returns an IPv6 extension header: its number, and its bytes without the next header.
fn extension(extra: &Extra) -> (u8, Vec<u8>) {
    let fragment = |offset_more: u16, id: u32| {
        [&[0][..], &offset_more.to_be_bytes(), &id.to_be_bytes()].concat()
    };
    match *extra {
        Extra::Options(len) => {
            let mut rest = vec![0; usize::from(len) - 1];
            // A single PadN.
            rest[..3].copy_from_slice(&[len / 8 - 1, 1, len - 4]);
            (DESTINATION, rest)
        }
        Extra::First(id) => (FRAGMENT, fragment(1, id)),
        Extra::Later(id) => (FRAGMENT, fragment(8 << 3, id)),
        Extra::Extension(kind, rest) => (kind, rest.to_vec()),
    }
}

fn tcp(flags: &str, src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Result<Vec<u8>> {
    let (flags, options) = match flags.split_once('=') {
        Some((flags, mss)) => (flags, tcp_options(mss)?),
        None => (flags, Vec::new()),
    };
    let (flags, seq) = flags
        .split_once('#')
        .map_or((flags, None), |(flags, seq)| (flags, Some(seq)));
    let (flags, ack) = flags
        .split_once('@')
        .map_or((flags, None), |(flags, ack)| (flags, Some(ack)));
    let mut bits = 0;
    for flag in flags.chars() {
        let at = TCP_FLAGS.iter().find(|(name, _)| *name == flag);
        bits |= at.with_context(|| format!("{flag} is no TCP flag"))?.1;
    }
    let number = |given: Option<&str>, usual| match given {
        Some(given) => given.parse().with_context(|| format!("number {given}")),
        None => Ok(usual),
    };
    let seq = number(seq, if bits & SYN != 0 { ISN } else { ISN + 1 })?;
    let ack = number(ack, if bits & ACK != 0 { ISN + 1 } else { 0 })?;
    let mut segment = [src.port(), dst.port()].map(u16::to_be_bytes).concat();
    segment.extend([seq, ack].map(u32::to_be_bytes).concat());
    let words = u8::try_from(5 + options.len() / 4)?;
    segment.extend([words << 4, bits, 0xfd, 0xe8, 0, 0, 0, 0]);
    segment.extend(options);
    segment.extend(payload);
    let sum = checksum(
        pseudo(src.ip(), dst.ip(), TCP, segment.len())?,
        &segment,
        16,
    );
    segment[16..18].copy_from_slice(&sum);
    Ok(segment)
}

/// Returns TCP's options with a maximum segment size, as in `1460` or, after two bytes of padding,
/// `1460/2`.
fn tcp_options(mss: &str) -> Result<Vec<u8>> {
    let (mss, padding) = mss.split_once('/').unwrap_or((mss, "0"));
    let mut options = vec![TCP_PADDING; padding.parse()?];
    options.extend([TCP_MSS, 4]);
    options.extend(mss.parse::<u16>()?.to_be_bytes());
    options.resize(options.len().next_multiple_of(4), 0);
    Ok(options)
}

fn udp(src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Result<Vec<u8>> {
    let len = u16::try_from(8 + payload.len())?;
    let mut datagram = [src.port(), dst.port(), len, 0]
        .map(u16::to_be_bytes)
        .concat();
    datagram.extend(payload);
    let sum = match checksum(
        pseudo(src.ip(), dst.ip(), UDP, datagram.len())?,
        &datagram,
        6,
    ) {
        [0, 0] => [0xff; 2], // RFC 768.
        sum => sum,
    };
    datagram[6..8].copy_from_slice(&sum);
    Ok(datagram)
}

fn sctp(chunks: &str, src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Result<Vec<u8>> {
    let mut packet = [src.port(), dst.port()].map(u16::to_be_bytes).concat();
    packet.extend([0, 0, 0, 7, 0, 0, 0, 0]);
    let chunks: Vec<_> = chunks.split(',').collect();
    for (n, name) in chunks.iter().enumerate() {
        let chunk = CHUNKS.iter().find(|(known, _)| known == name);
        let kind = chunk.with_context(|| format!("{name} is no SCTP chunk"))?.1;
        let payload = if n + 1 == chunks.len() { payload } else { &[] };
        packet.extend([kind, 0]);
        packet.extend(u16::try_from(4 + payload.len())?.to_be_bytes());
        packet.extend(payload);
        packet.resize(packet.len().next_multiple_of(4), 0);
    }
    let crc = crc32c(&packet);
    packet[8..12].copy_from_slice(&crc);
    Ok(packet)
}

fn icmp(
    names: &Names,
    kind: &str,
    src: SocketAddr,
    dst: SocketAddr,
    rest: &[&str],
) -> Result<(u8, Vec<u8>)> {
    let (name, mtu) = kind.split_once('=').unwrap_or((kind, "0"));
    let known = ICMP
        .iter()
        .find(|(known, ..)| *known == name)
        .with_context(|| format!("{name} is no ICMP message"))?;
    let mtu: u16 = mtu.parse()?;
    let [a, b] = mtu.to_be_bytes();
    let (proto, start) = if src.is_ipv4() {
        (ICMP4, known.1)
    } else {
        (ICMP6, known.2)
    };
    let mut message = [&start[..], &[0, 0, 0, 0, a, b]].concat();
    message.extend(match rest {
        ["about", "cut", proto, quoted @ ..] => {
            let mut quoted = packet(names, &[&[*proto], any_flags(proto), quoted].concat())?;
            quoted.truncate(super::read::transport_at(&quoted)? + CUT);
            quoted
        }
        ["about", quoted @ ..] => packet(names, quoted)?,
        rest => payload(rest)?,
    });
    let sum = checksum(icmp_seed(src.ip(), dst.ip(), message.len())?, &message, 2);
    message[2..4].copy_from_slice(&sum);
    Ok((proto, message))
}

fn payload(words: &[&str]) -> Result<Vec<u8>> {
    match words {
        [] => Ok(Vec::new()),
        [len] => {
            let len: usize = len
                .strip_prefix('+')
                .context("a payload is +LENGTH")?
                .parse()?;
            Ok((0..len).map(|n| n as u8).collect())
        }
        more => bail!("{more:?} after a packet"),
    }
}
