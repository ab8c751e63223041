//! The share of the flow table for one client.
//!
//! A client may hold no more entries than are free. So one client gets at most half of the table,
//! two get a third each, and the free part stays at least as large as the part of the greediest
//! client. While half of the table is free, the rule refuses no client. Network switches share
//! their buffer memory among ports by the same rule ("dynamic thresholds").
//!
//! Only flows that are no longer half-open count: any host can open half-open flows with spoofed
//! addresses, and the programs evict these.
//!
//! Flows of one namespace's Services may hold up to [`NAMESPACE`] times the free entries. A
//! malicious backend pod can complete handshakes with made-up clients, so it controls its number of
//! clients. One such namespace leaves a fifth of the table to others.

use crate::addr::{Addr, Port, Proto};
use crate::frontend::FrontendKey;

/// The ratio of a namespace's entries to free entries.
pub const NAMESPACE: u32 = 4;

/// Returns true if a client with `held` entries may not get more. The table has `room` entries, of
/// which `lasting` belong to flows that are no longer half-open.
#[inline(always)]
pub const fn is_used_up(held: u32, lasting: u32, room: u32) -> bool {
    held >= room.saturating_sub(lasting)
}

/// Returns true if a namespace's Services may not get more entries.
#[inline(always)]
pub const fn is_used_up_by_namespace(held: u32, lasting: u32, room: u32) -> bool {
    held >= room.saturating_sub(lasting).saturating_mul(NAMESPACE)
}

/// Returns true while the rule refuses no client.
#[inline(always)]
pub const fn is_ample(lasting: u32, room: u32) -> bool {
    lasting < room / 2
}

/// A query or change of a client's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Queries whether the client may hold more.
    Ask,
    /// Takes entries, if the client may hold more. Always succeeds for 0 entries.
    Hold(u32),
    /// Returns entries.
    Release(u32),
}

/// A [`Share`] in a register: the signed change of the client's entries.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register(pub u32);

impl Register {
    /// [`Share::Ask`]: not a valid number of entries.
    pub const ASK: Self = Self(1 << 31);

    #[inline(always)]
    pub const fn share(self) -> Share {
        match self.0 as i32 {
            i32::MIN => Share::Ask,
            entries if entries >= 0 => Share::Hold(self.0),
            _ => Share::Release(self.0.wrapping_neg()),
        }
    }
}

/// A [`Register`] with the port and protocol of the service port, in 64 bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAndShare(pub u64);

impl PortAndShare {
    #[inline(always)]
    pub const fn new<A: Addr>(service: &FrontendKey<A>, Register(share): Register) -> Self {
        Self((share as u64) << 32 | (service.proto.0 as u64) << 16 | service.port.wire() as u64)
    }

    #[inline(always)]
    pub const fn service<A: Addr>(self, addr: A) -> FrontendKey<A> {
        FrontendKey::new(
            addr,
            Port::from_wire(self.0 as u16),
            Proto((self.0 >> 16) as u8),
        )
    }

    #[inline(always)]
    pub const fn share(self) -> Share {
        Register((self.0 >> 32) as u32).share()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Addr4;

    const ROOM: u32 = 1 << 17;

    /// Lets clients take two entries in turn, for as long as they may.
    fn greedy(clients: usize) -> Vec<u32> {
        let mut held = vec![0; clients];
        loop {
            let before: u32 = held.iter().sum();
            for client in 0..clients {
                if !is_used_up(held[client], held.iter().sum(), ROOM) {
                    held[client] += 2;
                }
            }
            if held.iter().sum::<u32>() == before {
                return held;
            }
        }
    }

    #[test]
    fn greedy_clients_leave_as_much_room_as_each_of_them_holds() {
        for clients in [1, 2, 9] {
            let part = ROOM / (clients as u32 + 1);
            let held = greedy(clients);
            assert!(
                held.iter().all(|held| held.abs_diff(part) <= 2),
                "{held:?}, not {part}"
            );
            assert!(
                !is_used_up(0, held.iter().sum(), ROOM),
                "another client finds room"
            );
        }
    }

    #[test]
    fn rule_is_needed_from_half_of_the_table_on() {
        for lasting in [0, ROOM / 2 - 1] {
            assert!(is_ample(lasting, ROOM) && !is_used_up(lasting, lasting, ROOM));
        }
        assert!(!is_ample(ROOM / 2, ROOM) && is_used_up(ROOM / 2, ROOM / 2, ROOM));
        assert!(
            is_used_up(0, ROOM, ROOM) && is_used_up(0, u32::MAX, ROOM),
            "a full table has no room"
        );
    }

    #[test]
    fn greedy_namespace_leaves_a_fifth() {
        let mut held = 0;
        while !is_used_up_by_namespace(held, held, ROOM) {
            held += 2;
        }
        assert!(held.abs_diff(ROOM / 5 * 4) <= 4, "{held}");
        assert!(
            !is_used_up(0, held, ROOM) && !is_used_up_by_namespace(0, held, ROOM),
            "others find room"
        );
        assert!(
            is_used_up_by_namespace(0, ROOM, ROOM),
            "a full table has no room"
        );
    }

    #[test]
    fn question_passes_through_a_register() {
        let shares = [
            Register::ASK,
            Register(4),
            Register(0),
            Register(4_u32.wrapping_neg()),
        ]
        .map(Register::share);
        assert_eq!(
            shares,
            [
                Share::Ask,
                Share::Hold(4),
                Share::Hold(0),
                Share::Release(4)
            ]
        );
        let service = FrontendKey::new(Addr4::from_wire(7), Port::new(80), Proto::SCTP);
        for register in [Register::ASK, Register(4), Register(4_u32.wrapping_neg())] {
            let both = PortAndShare::new(&service, register);
            assert_eq!(
                (both.service(service.addr), both.share()),
                (service, register.share())
            );
        }
    }
}
