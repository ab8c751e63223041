//! The share of the flow table that one client may hold.
//!
//! A client may hold no more entries than are free. So a single client gets half of the table at
//! the most, two get a third each, and there always is as much room for the others as the greediest
//! client holds. While half of the table is free, the rule refuses no client. The same rule shares
//! the memory of network switches among their ports, as "dynamic thresholds".
//!
//! Only flows beyond half-open count. The others make room, and any host can open them in another's
//! name.
//!
//! Flows of the Services of one namespace hold no more than [`NAMESPACE`] times what is free. A pod
//! that is a backend decides how many clients it has, because it completes handshakes with made-up
//! senders as well. One such namespace leaves a fifth of the table to others.

use crate::addr::{Addr, Port, Proto};
use crate::frontend::FrontendKey;

/// The entries of a namespace's flows for each that is free.
pub const NAMESPACE: u32 = 4;

/// Returns true if a client that holds so many entries may not have more, in a table of `room`
/// entries with `lasting` flows' entries.
#[inline(always)]
pub const fn is_used_up(held: u32, lasting: u32, room: u32) -> bool {
    held >= room.saturating_sub(lasting)
}

/// Returns true if the Services of a namespace that hold so many entries may not have more.
#[inline(always)]
pub const fn is_used_up_by_namespace(held: u32, lasting: u32, room: u32) -> bool {
    held >= room.saturating_sub(lasting).saturating_mul(NAMESPACE)
}

/// Returns true while no client can have used up its share.
#[inline(always)]
pub const fn is_ample(lasting: u32, room: u32) -> bool {
    lasting < room / 2
}

/// A question about a client's share of the table, or a change of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// May the client hold more?
    Ask,
    /// Takes so many entries, if the client may hold more. None always succeed.
    Hold(u32),
    /// Gives so many entries back.
    Release(u32),
}

/// A [`Share`] in a register: a change of the client's entries, by which they grow or, as a
/// negative number, shrink.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register(pub u32);

impl Register {
    /// No number of entries: [`Share::Ask`].
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

/// A [`Register`] with the port and protocol of a flow's service port, in a register of 64 bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAndShare(pub u64);

impl PortAndShare {
    #[inline(always)]
    pub const fn new<A: Addr>(service: &FrontendKey<A>, Register(share): Register) -> Self {
        Self((share as u64) << 32 | (service.proto.0 as u64) << 16 | service.port.wire() as u64)
    }

    /// Returns the service port at this address.
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

    /// Lets each of some clients take two entries in turn for as long as it may.
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
