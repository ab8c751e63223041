//! Packets as text, and back: `tcp S client:1000 > web:80 +5` is a SYN with 5 bytes of payload.
//!
//! The first word is `tcp` with its flags as tcpdump has them (S, F, R, P, A for `.`), or `udp`; names stand for
//! addresses, so that one table of packets serves both families. `unreachable tcp S …` is an ICMP "port unreachable"
//! that quotes such a packet, from its destination to its source. A port `$x` stands for a number that the first packet
//! with it shows.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use etherparse::{
    Icmpv4Type, Icmpv6Type, IpNumber, NetSlice, PacketBuilder, PacketBuilderStep, SlicedPacket, TransportSlice,
    ip_number,
};

/// Names of addresses of one family, and the ports found so far.
#[derive(Clone, Debug, Default)]
pub struct Names {
    addrs: BTreeMap<&'static str, IpAddr>,
    ports: BTreeMap<String, u16>,
}

impl Names {
    pub fn new(addrs: impl IntoIterator<Item = (&'static str, IpAddr)>) -> Self {
        Self { addrs: addrs.into_iter().collect(), ports: BTreeMap::new() }
    }

    pub fn addr(&self, name: &str) -> Result<IpAddr> {
        self.addrs.get(name).copied().with_context(|| format!("no address is called {name}"))
    }

    /// The port called `$name`, once a packet has shown it.
    pub fn port(&self, name: &str) -> Option<u16> {
        self.ports.get(name).copied()
    }

    fn name(&self, addr: IpAddr) -> String {
        self.addrs
            .iter()
            .find(|(_, known)| **known == addr)
            .map_or_else(|| addr.to_string(), |(name, _)| (*name).into())
    }

    fn peer(&self, text: &str) -> Result<SocketAddr> {
        let (name, port) = text.split_once(':').with_context(|| format!("{text} is not NAME:PORT"))?;
        let port = match port.strip_prefix('$') {
            Some(_) => *self.ports.get(port).with_context(|| format!("port {port} is not known yet"))?,
            None => port.parse().with_context(|| format!("port of {text}"))?,
        };
        Ok(SocketAddr::new(self.addr(name)?, port))
    }

    /// The frame that `text` stands for, with right checksums.
    pub fn frame(&self, text: &str) -> Result<Vec<u8>> {
        let words: Vec<_> = text.split_whitespace().collect();
        match words.as_slice() {
            ["tcp", flags, src, ">", dst, rest @ ..] => {
                let (src, dst) = (self.peer(src)?, self.peer(dst)?);
                let payload = payload(rest)?;
                let mut tcp = ip(src.ip(), dst.ip())?.tcp(src.port(), dst.port(), 1_000, 65_000);
                for flag in flags.chars() {
                    tcp = match flag {
                        'S' => tcp.syn(),
                        'F' => tcp.fin(),
                        'R' => tcp.rst(),
                        'P' => tcp.psh(),
                        'A' => tcp.ack(2_000),
                        other => bail!("{other} is no TCP flag"),
                    };
                }
                let mut frame = Vec::with_capacity(tcp.size(payload.len()));
                tcp.write(&mut frame, &payload)?;
                Ok(frame)
            }
            ["udp", src, ">", dst, rest @ ..] => {
                let (src, dst) = (self.peer(src)?, self.peer(dst)?);
                let payload = payload(rest)?;
                let udp = ip(src.ip(), dst.ip())?.udp(src.port(), dst.port());
                let mut frame = Vec::with_capacity(udp.size(payload.len()));
                udp.write(&mut frame, &payload)?;
                Ok(frame)
            }
            _ => bail!("{text} is no packet"),
        }
    }

    /// What `frame` is, as text. Checks every checksum on the way.
    pub fn text(&self, frame: &[u8]) -> Result<String> {
        let packet = SlicedPacket::from_ethernet(frame)?;
        let (src, dst) = addrs(&packet)?;
        check_header(&packet)?;
        match packet.transport.context("no transport header")? {
            TransportSlice::Tcp(tcp) => {
                let expected = match (src, dst) {
                    (IpAddr::V4(src), IpAddr::V4(dst)) => tcp.calc_checksum_ipv4(src.octets(), dst.octets())?,
                    (IpAddr::V6(src), IpAddr::V6(dst)) => tcp.calc_checksum_ipv6(src.octets(), dst.octets())?,
                    _ => bail!("mixed families"),
                };
                ensure!(tcp.checksum() == expected, "TCP checksum {:04x}, not {expected:04x}", tcp.checksum());
                let flags = [(tcp.syn(), 'S'), (tcp.fin(), 'F'), (tcp.rst(), 'R'), (tcp.psh(), 'P'), (tcp.ack(), 'A')];
                let flags: String = flags.iter().filter(|(set, _)| *set).map(|(_, flag)| *flag).collect();
                Ok(self.line(
                    &format!("tcp {flags}"),
                    src,
                    tcp.source_port(),
                    dst,
                    tcp.destination_port(),
                    tcp.payload(),
                ))
            }
            TransportSlice::Udp(udp) => {
                // 0 means that there is none (RFC 768).
                if udp.checksum() != 0 {
                    let header = udp.to_header();
                    let expected = match (src, dst) {
                        (IpAddr::V4(src), IpAddr::V4(dst)) => {
                            header.calc_checksum_ipv4_raw(src.octets(), dst.octets(), udp.payload())?
                        }
                        (IpAddr::V6(src), IpAddr::V6(dst)) => {
                            header.calc_checksum_ipv6_raw(src.octets(), dst.octets(), udp.payload())?
                        }
                        _ => bail!("mixed families"),
                    };
                    ensure!(udp.checksum() == expected, "UDP checksum {:04x}, not {expected:04x}", udp.checksum());
                }
                Ok(self.line("udp", src, udp.source_port(), dst, udp.destination_port(), udp.payload()))
            }
            TransportSlice::Icmpv4(icmp) => {
                let kind = icmp.icmp_type();
                ensure!(
                    kind == Icmpv4Type::DestinationUnreachable(etherparse::icmpv4::DestUnreachableHeader::Port),
                    "ICMP {kind:?}"
                );
                ensure!(icmp.checksum() == icmp.header().icmp_type.calc_checksum(icmp.payload()), "ICMP checksum");
                self.quoted(0x0800, icmp.payload(), src, dst)
            }
            TransportSlice::Icmpv6(icmp) => {
                let kind = icmp.icmp_type();
                ensure!(
                    kind == Icmpv6Type::DestinationUnreachable(etherparse::icmpv6::DestUnreachableCode::Port),
                    "ICMPv6 {kind:?}"
                );
                let (IpAddr::V6(from), IpAddr::V6(to)) = (src, dst) else { bail!("mixed families") };
                let expected = icmp.icmp_type().calc_checksum(from.octets(), to.octets(), icmp.payload())?;
                ensure!(icmp.checksum() == expected, "ICMPv6 checksum {:04x}, not {expected:04x}", icmp.checksum());
                self.quoted(0x86dd, icmp.payload(), src, dst)
            }
            TransportSlice::Igmp(_) => bail!("an IGMP packet"),
        }
    }

    /// As [`Names::text`], and learns the ports that `expected` calls `$x`. The two are equal if all is as expected.
    pub fn learn(&mut self, frame: &[u8], expected: &str) -> Result<String> {
        let plain = Self { ports: BTreeMap::new(), ..self.clone() }.text(frame)?;
        for (found, wanted) in plain.split_whitespace().zip(expected.split_whitespace()) {
            let (Some((_, number)), Some((_, name))) = (found.rsplit_once(':'), wanted.rsplit_once(':')) else {
                continue;
            };
            if name.starts_with('$') && !self.ports.contains_key(name) {
                self.ports.insert(name.to_owned(), number.parse()?);
            }
        }
        self.text(frame)
    }

    /// What an ICMP error quotes: as many bytes as its header and 8 of the transport's, so no checksum can be checked.
    fn quoted(&self, ethertype: u16, quote: &[u8], src: IpAddr, dst: IpAddr) -> Result<String> {
        let (header_len, proto, quoted_src, quoted_dst) = match (ethertype, quote) {
            (0x0800, [first, ..]) => {
                let len = usize::from(first & 0x0f) * 4;
                (len, quote[9], ipv4(&quote[12..16])?, ipv4(&quote[16..20])?)
            }
            _ => (40, quote[6], ipv6(&quote[8..24])?, ipv6(&quote[24..40])?),
        };
        ensure!(quoted_src == dst && quoted_dst == src, "the error goes from {src} to {dst}, the quote otherwise");
        let ports = quote.get(header_len..header_len + 8).context("the quote is too short")?;
        let port = |at: usize| u16::from_be_bytes([ports[at], ports[at + 1]]);
        let proto = if IpNumber(proto) == ip_number::TCP { "tcp" } else { "udp" };
        Ok(self.line(&format!("unreachable {proto}"), quoted_src, port(0), quoted_dst, port(2), &[]))
    }

    fn line(&self, what: &str, src: IpAddr, sport: u16, dst: IpAddr, dport: u16, payload: &[u8]) -> String {
        let peer = |addr, port: u16| {
            let name = self.ports.iter().find(|(_, known)| **known == port).map(|(name, _)| name.clone());
            format!("{}:{}", self.name(addr), name.unwrap_or_else(|| port.to_string()))
        };
        let payload = if payload.is_empty() { String::new() } else { format!(" +{}", payload.len()) };
        format!("{what} {} > {}{payload}", peer(src, sport), peer(dst, dport))
    }
}

fn ip(src: IpAddr, dst: IpAddr) -> Result<PacketBuilderStep<etherparse::IpHeaders>> {
    const SRC_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const DST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
    let ethernet = PacketBuilder::ethernet2(SRC_MAC, DST_MAC);
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => Ok(ethernet.ipv4(src.octets(), dst.octets(), 64)),
        (IpAddr::V6(src), IpAddr::V6(dst)) => Ok(ethernet.ipv6(src.octets(), dst.octets(), 64)),
        _ => bail!("{src} and {dst} are of different families"),
    }
}

fn payload(words: &[&str]) -> Result<Vec<u8>> {
    match words {
        [] => Ok(Vec::new()),
        [len] => {
            let len: usize = len.strip_prefix('+').context("a payload is +LENGTH")?.parse()?;
            Ok((0..len).map(|n| n as u8).collect())
        }
        more => bail!("{more:?} after a packet"),
    }
}

fn addrs(packet: &SlicedPacket<'_>) -> Result<(IpAddr, IpAddr)> {
    match packet.net.as_ref().context("no IP header")? {
        NetSlice::Ipv4(ip) => Ok((ip.header().source_addr().into(), ip.header().destination_addr().into())),
        NetSlice::Ipv6(ip) => Ok((ip.header().source_addr().into(), ip.header().destination_addr().into())),
        NetSlice::Arp(_) => bail!("an ARP packet"),
    }
}

fn check_header(packet: &SlicedPacket<'_>) -> Result<()> {
    if let Some(NetSlice::Ipv4(ip)) = &packet.net {
        let (found, expected) = (ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
        ensure!(found == expected, "IPv4 header checksum {found:04x}, not {expected:04x}");
    }
    Ok(())
}

fn ipv4(bytes: &[u8]) -> Result<IpAddr> {
    Ok(IpAddr::from(<[u8; 4]>::try_from(bytes)?))
}

fn ipv6(bytes: &[u8]) -> Result<IpAddr> {
    Ok(IpAddr::from(<[u8; 16]>::try_from(bytes)?))
}
