//! Damages frames.

use rand::RngExt;
use rand::seq::IndexedRandom;
use testbed::reference::generate::{Dice, one};
use testbed::reference::place::{self, Family};

use crate::craft::random_bytes;
use crate::model::wire::{self, ETH_LEN};

/// The kernel takes no longer frame from user space in one piece.
const MAX: usize = 3_000;

/// Damages less than half of all frames. The kernel accepts every result.
pub(crate) fn frame(dice: &mut Dice, frame: &mut Vec<u8>) {
    let times = one(dice, &[0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 4]);
    for _ in 0..times {
        spoil(dice, frame);
    }
    // The kernel refuses a frame that is shorter than its announced IP header.
    let min = match wire::family(frame) {
        Some(Family::V4) => ETH_LEN + 20,
        Some(Family::V6) => ETH_LEN + 40,
        None => ETH_LEN,
    };
    frame.resize(frame.len().clamp(min, MAX), 0);
}

fn spoil(dice: &mut Dice, frame: &mut Vec<u8>) {
    let len = frame.len();
    let family = wire::family(frame);
    let ip = family.and_then(|family| wire::ip(frame, ETH_LEN, family).ok());
    match (dice.random_range(0..15), family, ip) {
        (0, ..) => frame.truncate(dice.random_range(ETH_LEN..=len)),
        // Cuts inside the transport header or just after it.
        (1 | 2, _, Some(ip)) => frame.truncate((ip.l4 + dice.random_range(0..24)).min(len)),
        (3, ..) => frame.extend(random_bytes(dice, 1, 60)),
        // A wrong length.
        (4 | 5, Some(family), _) => {
            let at = ETH_LEN + if family == Family::V4 { 2 } else { 4 };
            let said = wire::half(frame, at).unwrap_or(0);
            let lie = one(
                dice,
                &[
                    0,
                    1,
                    8,
                    19,
                    20,
                    28,
                    said.wrapping_sub(1),
                    said.wrapping_add(1),
                    said / 2,
                    u16::MAX,
                ],
            );
            lie.to_be_bytes()
                .into_iter()
                .zip(at..)
                .for_each(|(byte, at)| put(frame, at, byte));
        }
        (6, Some(family), _) => put(
            frame,
            ETH_LEN + if family == Family::V4 { 9 } else { 6 },
            dice.random(),
        ),
        (7, ..) => put(frame, ETH_LEN, dice.random()),
        (8, Some(Family::V4), _) => {
            put(frame, ETH_LEN + 6, one(dice, &[0, 0x20, 0x40, 0x1f, 0x3f]))
        }
        // A wrong or unusual checksum.
        (9, _, Some(ip)) => {
            let at = ip.l4 + wire::checksum_offset(ip.proto);
            let values = [0, 0xff, dice.random()];
            let value = one(dice, &values);
            put(frame, at, value);
            put(frame, at + 1, value);
        }
        (10, Some(family), _) => strange_addr(dice, frame, family),
        (13, Some(family), _) => put(
            frame,
            ETH_LEN + if family == Family::V4 { 8 } else { 7 },
            dice.random_range(0..3),
        ),
        (11, ..) if dice.random_bool(0.3) => other_ethertype(dice, frame),
        // Any byte of the transport header, or of the packet that an error quotes.
        (12, _, Some(ip)) => put(frame, ip.l4 + dice.random_range(0..60), dice.random()),
        _ => {
            let at = dice.random_range(0..len.min(120));
            frame[at] ^= 1 << dice.random_range(0..8);
        }
    }
}

fn put(frame: &mut [u8], at: usize, value: u8) {
    if let Some(byte) = frame.get_mut(at) {
        *byte = value;
    }
}

fn other_ethertype(dice: &mut Dice, frame: &mut Vec<u8>) {
    if dice.random() {
        // IEEE 802.1Q
        frame.splice(
            12..12,
            [0x81, 0x00, dice.random_range(0..16), dice.random()],
        );
    } else {
        let ethertype: [u8; 2] = one(
            dice,
            &[
                [0x08, 0x06],
                [0x88, 0xa8],
                [0x88, 0x47],
                [0, 46],
                [0x86, 0xdd],
                [0x08, 0x00],
            ],
        );
        frame[12..14].copy_from_slice(&ethertype);
    }
}

fn strange_addr(dice: &mut Dice, frame: &mut [u8], family: Family) {
    let strange: &[&str] = match family {
        Family::V4 => &[
            "0.0.0.0",
            "127.0.0.1",
            "169.254.1.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "8.8.8.8",
        ],
        Family::V6 => &[
            "::",
            "::1",
            "fe80::1",
            "ff02::1",
            "::ffff:10.96.0.1",
            "2001:db8::1",
            "::2",
        ],
    };
    let strange = strange.iter().map(|addr| addr.parse().expect("an address"));
    let strange: Vec<_> = strange
        .chain(place::own(family).map(|(addr, _)| addr))
        .collect();
    let ats = if family == Family::V4 {
        [26, 30]
    } else {
        [22, 38]
    };
    let addr = *strange.choose(dice).expect("there are some");
    let at = one(dice, &ats);
    if frame.len() >= at + wire::bytes(addr).len() {
        wire::put_addr(frame, at, addr);
    }
}
