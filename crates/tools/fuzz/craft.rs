//! Makes well-formed frames with random content.

use std::net::{IpAddr, SocketAddr};

use rand::RngExt;
use testbed::reference::generate::{Dice, one};

use crate::model::rewrite::{crc32c, fold, pseudo_sum, sum};
use crate::model::wire::{self, SCTP, TCP, UDP};

/// The headers between the IP header and the transport.
#[derive(Clone, Debug, Default)]
pub(crate) struct Between {
    /// IPv4 options, a multiple of four bytes.
    options: Vec<u8>,
    /// IPv6 extension headers: their numbers, and the bytes after the first two.
    extensions: Vec<(u8, Vec<u8>)>,
    /// Offset in units of 8 bytes, the flag "more fragments", identification.
    fragment: Option<(u16, bool, u32)>,
}

impl Between {
    /// Returns mostly no headers.
    pub(crate) fn random(dice: &mut Dice) -> Self {
        let mut between = Self::default();
        if dice.random_bool(0.1) {
            between.options = random_bytes(dice, 4, 40);
            between.options.truncate(between.options.len() / 4 * 4);
            for _ in 0..one(dice, &[1, 1, 2, 3, 5, 6, 7]) {
                let kind = one(dice, &[0, 60, 60, 43, 43, 51, 135]);
                let max = one(dice, &[7, 14, 30, 300]);
                let mut body = random_bytes(dice, 6, max);
                body.resize((body.len() + 2) / 8 * 8 - 2, 0);
                // A routing header usually has no segments left.
                body[1] = if dice.random_bool(0.9) { 0 } else { body[1] };
                between.extensions.push((kind, body));
            }
        }
        if dice.random_bool(0.08) {
            // Few identifications, so that fragments match.
            between.fragment = Some((
                one(dice, &[0, 0, 0, 1, 185]),
                dice.random(),
                dice.random_range(1..5),
            ));
        }
        between
    }
}

/// Returns a frame around a transport packet.
pub(crate) fn frame(
    dice: &mut Dice,
    src: IpAddr,
    dst: IpAddr,
    proto: u8,
    between: &Between,
    transport: &[u8],
) -> Vec<u8> {
    // Mostly to the node's link address, rarely to another machine on the link.
    let to = if dice.random_bool(0.9) {
        2
    } else {
        dice.random()
    };
    let macs = [[2, 0, 0, 0, 0, to], [2, 0, 0, 0, 0, dice.random()]].concat();
    let ethertype = if src.is_ipv4() {
        [0x08, 0x00]
    } else {
        [0x86, 0xdd]
    };
    let mut frame = [macs, ethertype.to_vec()].concat();
    frame.extend(ip(dice, src, dst, proto, between, transport));
    frame
}

pub(crate) fn ip(
    dice: &mut Dice,
    src: IpAddr,
    dst: IpAddr,
    proto: u8,
    between: &Between,
    transport: &[u8],
) -> Vec<u8> {
    if src.is_ipv4() {
        v4(dice, src, dst, proto, between, transport)
    } else {
        v6(dice, src, dst, proto, between, transport)
    }
}

fn v4(
    dice: &mut Dice,
    src: IpAddr,
    dst: IpAddr,
    proto: u8,
    between: &Between,
    transport: &[u8],
) -> Vec<u8> {
    let header_len = 20 + between.options.len();
    let words = u8::try_from(header_len / 4).expect("40 bytes of options at the most");
    let total = u16::try_from(header_len + transport.len()).unwrap_or(u16::MAX);
    let (fragment, id) = match between.fragment {
        Some((offset, more, id)) => (
            offset | u16::from(more) << 13,
            u16::try_from(id).unwrap_or(1),
        ),
        None => (one(dice, &[0x4000, 0]), dice.random()),
    };
    let mut header = vec![0x40 | words, dice.random()];
    header.extend(
        [
            total.to_be_bytes(),
            id.to_be_bytes(),
            fragment.to_be_bytes(),
        ]
        .concat(),
    );
    header.extend([dice.random(), proto, 0, 0]);
    header.extend([wire::bytes(src), wire::bytes(dst), between.options.clone()].concat());
    let checksum = !fold(sum(&header));
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    [&header, transport].concat()
}

fn v6(
    dice: &mut Dice,
    src: IpAddr,
    dst: IpAddr,
    proto: u8,
    between: &Between,
    transport: &[u8],
) -> Vec<u8> {
    let mut chain: Vec<(u8, Vec<u8>)> = between.extensions.clone();
    if let Some((offset, more, id)) = between.fragment {
        let offset_more = (offset << 3 | u16::from(more)).to_be_bytes();
        let header = (
            44,
            [offset_more.to_vec(), id.to_be_bytes().to_vec()].concat(),
        );
        chain.insert(dice.random_range(0..=chain.len()), header);
    }
    let mut behind = Vec::new();
    let first = chain.first().map_or(proto, |(kind, _)| *kind);
    for (place, (kind, body)) in chain.iter().enumerate() {
        let next = chain.get(place + 1).map_or(proto, |(kind, _)| *kind);
        let units = if *kind == 44 {
            0
        } else {
            u8::try_from((body.len() + 2) / 8 - 1).unwrap_or(u8::MAX)
        };
        behind.extend([next, units]);
        behind.extend(body);
    }
    behind.extend(transport);
    let len = u16::try_from(behind.len())
        .unwrap_or(u16::MAX)
        .to_be_bytes();
    let mut header = vec![
        0x60 | dice.random_range(0..16),
        dice.random(),
        dice.random(),
        dice.random(),
    ];
    header.extend([len[0], len[1], first, dice.random()]);
    [header, wire::bytes(src), wire::bytes(dst), behind].concat()
}

/// Returns a transport header and random payload. `says` is the flags of TCP, or the type of SCTP's
/// first chunk.
pub(crate) fn transport(
    dice: &mut Dice,
    src: SocketAddr,
    dst: SocketAddr,
    proto: u8,
    says: u8,
) -> Vec<u8> {
    let max = one(dice, &[0, 0, 1, 20, 60, 1_400]);
    let payload = random_bytes(dice, 0, max);
    let mut transport = [src.port().to_be_bytes(), dst.port().to_be_bytes()].concat();
    match proto {
        TCP => {
            let seq = if says & 0b10 != 0 { 1_000 } else { 1_001 };
            let numbers = [random_near(dice, seq), random_near(dice, 1_001)];
            transport.extend(numbers.map(u32::to_be_bytes).concat());
            transport.extend([5 << 4, says, dice.random(), dice.random(), 0, 0, 0, 0]);
        }
        UDP => {
            transport.extend(u16::try_from(8 + payload.len()).unwrap_or(0).to_be_bytes());
            transport.extend([0, 0]);
        }
        SCTP => {
            transport.extend([dice.random(), dice.random(), 0, 1, 0, 0, 0, 0]);
            transport.extend([says, 0, 0, 20]);
            transport.extend(&payload);
            let checksum = crc32c(&transport);
            transport[8..12].copy_from_slice(&checksum.to_le_bytes());
            return transport;
        }
        _ => return payload,
    }
    transport.extend(payload);
    let checksum = !fold(pseudo_sum(src.ip(), dst.ip(), proto, transport.len()) + sum(&transport));
    let checksum = if proto == UDP && dice.random_bool(0.1) {
        0
    } else {
        checksum
    };
    let at = wire::checksum_offset(proto);
    transport[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    transport
}

/// Sets a TCP header's sequence and acknowledgement numbers, and fixes its checksum.
pub(crate) fn renumber(transport: &mut [u8], src: IpAddr, dst: IpAddr, numbers: [u32; 2]) {
    transport[4..12].copy_from_slice(&numbers.map(u32::to_be_bytes).concat());
    transport[16..18].fill(0);
    let checksum = !fold(pseudo_sum(src, dst, TCP, transport.len()) + sum(transport));
    transport[16..18].copy_from_slice(&checksum.to_be_bytes());
}

/// Returns mostly this number, so that most clients acknowledge their backends' bytes, and some
/// miss them narrowly.
fn random_near(dice: &mut Dice, number: u32) -> u32 {
    match dice.random_range(0..20) {
        0 => dice.random(),
        1 => number.wrapping_add(one(
            dice,
            &[
                1,
                1 << 17,
                (1 << 17) - 1,
                1 << 20,
                (1 << 20) - 1,
                1 << 25,
                (1 << 25) - 1,
                u32::MAX,
            ],
        )),
        _ => number,
    }
}

/// Returns an ICMP error from `src` that quotes as much of a packet as fits.
pub(crate) fn error(dice: &mut Dice, src: IpAddr, dst: IpAddr, quoted: &[u8]) -> (u8, Vec<u8>) {
    let v4 = src.is_ipv4();
    let kind = if v4 {
        one(dice, &[3, 3, 3, 11, 12, 5, 8])
    } else {
        one(dice, &[1, 2, 2, 3, 4, 128, 0])
    };
    let quote = &quoted[..quoted.len().min(one(dice, &[28, 48, 64, 128, 548, 1_232]))];
    let mut message = vec![
        kind,
        dice.random_range(0..6),
        0,
        0,
        0,
        0,
        dice.random(),
        dice.random(),
    ];
    message.extend(quote);
    let proto = if v4 { 1 } else { 58 };
    let pseudo = if v4 {
        0
    } else {
        pseudo_sum(src, dst, proto, message.len())
    };
    let checksum = !fold(pseudo + sum(&message));
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    (proto, message)
}

pub(crate) fn random_bytes(dice: &mut Dice, min: usize, max: usize) -> Vec<u8> {
    let len = dice.random_range(min..=max.max(min));
    let mut bytes = vec![0; len];
    dice.fill(bytes.as_mut_slice());
    bytes
}
