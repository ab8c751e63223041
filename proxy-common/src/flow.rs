//! The packet path's record of a connection or UDP exchange between a client and a backend.
//!
//! A flow has two or four entries in `FLOWS`, each keyed by the tuple before its hook rewrites it:
//! the original entry (`Dnat`), the reply entry (`Undnat`), and two more if the source address
//! changes on devices. All hold the same [`Flow`], except for `kind` and the counters of their
//! direction. So a hook needs a single lookup, and any entry yields the keys of the other entries.
//!
//! Between the hooks a packet is `(client address, source port) -> backend`. The source port is the
//! client's own unless another flow has that tuple. For a client outside (addresses and ports
//! shortened):
//!
//! ```text
//!   hook     on the wire           kind     becomes
//!   ingress  client:c -> frontend  Dnat     client:s -> backend
//!   egress   client:s -> backend   Snat     source:s -> backend   if the source address changes
//!   ingress  backend -> source:s   Unsnat   backend -> client:s   only then
//!   egress   backend -> client:s   Undnat   frontend -> client:c
//!
//!   anchor   host:c -> frontend    Dnat     source:s -> backend   the host's own socket
//!   ingress  backend -> source:s   Undnat   frontend -> host:c    injected into the anchor or lo
//!   egress   backend -> host:s     Undnat   frontend -> host:c    if the host is the backend
//!
//!   egress   node:c -> backend     Dnat     node:s -> backend     another program's port collides
//!   ingress  backend -> node:s     Undnat   backend -> node:c
//! ```

use crate::addr::{Addr, Addr4, Addr6, Proto, SockAddr};
use crate::assert_size;
use crate::closed::closed;
use crate::frontend::FrontendKey;
use crate::service_counts::Passed;

mod cached_route;
mod end;
mod key;
mod offer;
mod ports;
mod proof;
mod reuse;
mod seen;
mod state;
mod step;

pub use cached_route::{CachedRoute, Term};
pub use end::{Acked, Ahead, is_recent};
pub use key::FlowKey;
pub use offer::{AnyKey, Offer, is_for_asker};
pub use ports::{CLIENT_PORT_FIRST, CLIENT_PORT_LAST, SOURCE_PORT_FIRST, may_be_drawn};
pub use proof::Proof;
pub use seen::Seen;
pub use state::{State, Timeouts};
pub use step::{Sender, Signals, Step, is_settled, is_stream, step};

/// The hook that looks up an entry of `FLOWS`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hook(pub u8);

impl Hook {
    pub const INGRESS: Self = Self(0);
    pub const EGRESS: Self = Self(1);
    /// Egress of the anchor, which the host's own packets enter first.
    pub const ANCHOR: Self = Self(2);
}

closed! {
    /// A [`Hook`], for `match`.
    Hook => AtHook { INGRESS => Ingress, EGRESS => Egress, ANCHOR => Anchor }
}

/// The rewrite of an entry: see the table in the module's documentation.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind(u8);

impl Kind {
    pub const DNAT: Self = Self(0);
    pub const SNAT: Self = Self(1);
    pub const UNSNAT: Self = Self(2);
    pub const UNDNAT: Self = Self(3);
}

closed! {
    /// A [`Kind`], for `match`.
    Kind => EntryKind { DNAT => Dnat, SNAT => Snat, UNSNAT => Unsnat, UNDNAT => Undnat }
}

/// Value of `FLOWS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow<A: Addr> {
    pub client: SockAddr<A>,
    /// The address and port that the client dialled.
    pub frontend: SockAddr<A>,
    pub backend: SockAddr<A>,
    /// The source that the backend sees: the client's or the node's address, and the port used
    /// between the hooks.
    pub source: SockAddr<A>,
    pub kind: Kind,
    flags: u8,
    /// The bits of the client's packets. Valid in the original entry, and written by that direction
    /// only.
    pub tx: Seen,
    /// The bits of the backend's packets. The original entry holds the valid copy; the reply entry
    /// has its own working copy. A client's packet only clears the RST bit in the reply entry, for
    /// a RST that the client ignored.
    pub rx: Seen,
    /// The time of the last packet at this entry, in seconds since boot.
    pub last_secs: u32,
    /// TCP: the [`Acked`] number of this entry's sender; before that, the [`Proof`] in the original
    /// entry and the [`DialTime`](crate::connect::DialTime) in the reply entry. Other protocols, in
    /// the original entry: the value of `GENERATION` when the backend last served.
    pub generation: u32,
    /// The service port. [`FrontendKey::address`] of the unspecified address for connections of
    /// other programs.
    pub service: FrontendKey<A>,
    pad: A::Pad,
    /// The packets towards the backend (in the original entry) and towards the client (in the reply
    /// entry). Unused in other entries.
    pub passed: Passed,
}
assert_size!(Flow<Addr4> = 4 * 8 + 4 + 4 + 4 + 8 + 4 + 16);
assert_size!(Flow<Addr6> = 4 * 20 + 4 + 4 + 4 + 20 + 16);

/// The time for which a closed flow still receives packets: the last ACK, or a retransmitted FIN.
pub const LINGER_SECS: u32 = 3;

/// The idle time after which a client that reuses its port may have forgotten the flow.
const REDIAL_SECS: u32 = 60;

/// The number of datagrams from which a client counts as a stream even without answers (logs,
/// measurements).
const STREAM: u64 = 16;

/// The seconds in which a backend must answer a SYN on such an idle flow. After that the backend
/// has lost the connection as well.
const ANSWER_SECS: u32 = 3;

impl<A: Addr> Flow<A> {
    pub const ENTRIES_MAX: u32 = 4;

    /// Opened by a socket of the host, at the anchor.
    pub const HOST: u8 = 1 << 0;
    /// The backend is a socket of the host itself.
    pub const HOST_BACKEND: u8 = 1 << 1;
    /// With HOST: the frontend has an address of the host, so packets start on lo and replies are
    /// injected there.
    pub const HOST_FRONTEND: u8 = 1 << 2;
    /// Without HOST: a bypass flow to a pod of another node. Shares its bit with HOST_FRONTEND.
    pub const FAR: u8 = 1 << 2;
    /// The backend's count in `CONNECTIONS` includes this flow until its end.
    pub const COUNTED: u8 = 1 << 3;
    /// The programs that opened the flow keep TCP sequence numbers in [`Flow::generation`]. Older
    /// programs did not.
    pub const NUMBERED: u8 = 1 << 5;
    /// The flow has four entries. Older programs do not set this flag.
    pub const WIDE: u8 = 1 << 7;
    /// The client is behind an uplink, where any host may spoof its address.
    pub const REMOTE: u8 = 1 << 6;
    /// A connection of another program (foreign NAT port). Its tuple collided with a flow, so kpx
    /// gave it another source port at egress.
    pub const FOREIGN_NAT: u8 = 1 << 4;

    #[inline(always)]
    pub const fn new(
        client: SockAddr<A>,
        frontend: SockAddr<A>,
        backend: SockAddr<A>,
        source: SockAddr<A>,
        flags: u8,
        now_secs: u32,
    ) -> Self {
        Self {
            client,
            frontend,
            backend,
            source,
            kind: Kind::DNAT,
            flags,
            tx: Seen::PACKET,
            rx: Seen::NOTHING,
            last_secs: now_secs,
            generation: 0,
            service: FrontendKey::address(A::UNSPECIFIED),
            pad: A::PAD,
            passed: Passed::NOTHING,
        }
    }

    /// Returns 1 if `CONNECTIONS` counts the flow for its backend, else 0.
    #[inline(always)]
    pub const fn counted(&self) -> u32 {
        ((self.flags / Self::COUNTED) & 1) as u32
    }

    #[inline(always)]
    pub const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Returns true if packets of the host's flow start on lo: see [`Flow::HOST_FRONTEND`].
    #[inline(always)]
    pub const fn starts_on_lo(&self) -> bool {
        self.flags & (Self::HOST | Self::HOST_FRONTEND) == Self::HOST | Self::HOST_FRONTEND
    }

    #[inline(always)]
    pub const fn is_bypass_far(&self) -> bool {
        self.flags & (Self::HOST | Self::FAR) == Self::FAR
    }

    #[inline(always)]
    pub fn is_snat(&self) -> bool {
        self.source.addr != self.client.addr
    }

    /// Moves a bypass flow's entry to the stack. From here on conntrack is liberal with the flow.
    pub fn leave_to_stack(&mut self) {
        if self.kind == Kind::UNDNAT {
            self.tx = self.tx.with(Seen::OFFERED);
        }
        if self.is_bypass_far() {
            self.flags &= !Self::FAR;
        }
        self.rx = self.rx.without(Seen::BYPASS);
        self.set_cached_route(CachedRoute::NONE);
    }

    /// Returns the client's address and port between the hooks.
    #[inline(always)]
    pub const fn client_between(&self) -> SockAddr<A> {
        SockAddr::new(self.client.addr, self.source.port)
    }

    /// Returns true if the client is behind an uplink.
    #[inline(always)]
    pub const fn is_far(&self) -> bool {
        self.has(Self::REMOTE)
    }

    /// Returns the client, or its IPv6 site, for the share of the table: see [`crate::share`].
    #[inline(always)]
    pub fn holder(&self) -> A {
        self.client.addr.site_if(self.is_far())
    }

    /// Records whether the flow has four entries, once its source is set.
    #[inline(always)]
    pub fn note_width(&mut self) {
        if self.is_snat_on_devices() {
            self.flags |= Self::WIDE;
        }
    }

    #[inline(always)]
    pub fn entries(&self) -> u32 {
        2 << ((self.flags & Self::WIDE) / Self::WIDE)
    }

    #[inline(always)]
    pub fn key(&self, proto: Proto) -> FlowKey<A> {
        self.key_as(self.kind, proto)
    }

    /// Returns the key of this flow's entry of another kind.
    #[inline(always)]
    pub fn key_as(&self, kind: Kind, proto: Proto) -> FlowKey<A> {
        match kind.known() {
            Some(EntryKind::Snat) => {
                FlowKey::new(Hook::EGRESS, proto, self.client_between(), self.backend)
            }
            Some(EntryKind::Unsnat) => {
                FlowKey::new(Hook::INGRESS, proto, self.backend, self.source)
            }
            Some(EntryKind::Undnat) => self.undnat_key(proto),
            Some(EntryKind::Dnat) | None => self.opener_key(proto),
        }
    }

    /// Returns the key of the original entry. A flow exists exactly while this entry exists, which
    /// is created last and removed last.
    #[inline(always)]
    pub const fn opener_key(&self, proto: Proto) -> FlowKey<A> {
        let hook = if self.has(Self::HOST) {
            Hook::ANCHOR
        } else if self.has(Self::FOREIGN_NAT) {
            Hook::EGRESS
        } else {
            Hook::INGRESS
        };
        FlowKey::new(hook, proto, self.client, self.frontend)
    }

    /// Returns the key of the reply entry, which restores the frontend's address.
    #[inline(always)]
    pub const fn undnat_key(&self, proto: Proto) -> FlowKey<A> {
        if self.has(Self::HOST) && !self.has(Self::HOST_BACKEND) || self.has(Self::FOREIGN_NAT) {
            FlowKey::new(Hook::INGRESS, proto, self.backend, self.source)
        } else if self.has(Self::HOST) {
            FlowKey::new(Hook::EGRESS, proto, self.backend, self.source)
        } else {
            FlowKey::new(Hook::EGRESS, proto, self.backend, self.client_between())
        }
    }

    /// Returns true if device hooks change the flow's source address. (The anchor rewrites both
    /// addresses at once.)
    #[inline(always)]
    pub fn is_snat_on_devices(&self) -> bool {
        self.is_snat() && !self.has(Self::HOST)
    }

    /// Returns the kinds of the flow's entries in order of creation, the original entry last.
    pub fn kinds(&self) -> &'static [Kind] {
        if self.is_snat_on_devices() {
            &[Kind::UNDNAT, Kind::UNSNAT, Kind::SNAT, Kind::DNAT]
        } else {
            &[Kind::UNDNAT, Kind::DNAT]
        }
    }

    /// Returns the end that this entry marks: see [`crate::ways`].
    #[inline(always)]
    pub fn marked_end(&self, key: &FlowKey<A>) -> SockAddr<A> {
        match self.kind.known() {
            Some(EntryKind::Unsnat | EntryKind::Undnat) => key.dst(),
            Some(EntryKind::Dnat | EntryKind::Snat) | None => key.src(),
        }
    }

    /// Returns the state. For the original entry.
    #[inline(always)]
    pub const fn state(&self) -> State {
        State::of(self.tx, self.rx)
    }

    /// Returns true if the client has not yet proven that it exists, which spoofed clients cannot
    /// do. The programs may evict such a flow. For the original entry.
    ///
    /// A UDP client behind an uplink stays half-open: any host can spoof two datagrams.
    #[inline(always)]
    pub const fn is_half_open(&self, proto: Proto) -> bool {
        self.shows_no_client(proto) | !self.is_assured()
    }

    /// Returns true if packets cannot prove that the client exists.
    #[inline(always)]
    pub const fn shows_no_client(&self, proto: Proto) -> bool {
        (proto.0 == Proto::UDP.0) & self.is_far()
    }

    /// Returns the entries that count for the client's share once the flow is no longer half-open:
    /// 0 if its packets cannot prove that the client exists.
    #[inline(always)]
    pub fn countable_entries(&self, proto: Proto) -> u32 {
        if self.shows_no_client(proto) {
            0
        } else {
            self.entries()
        }
    }

    /// Returns the entries that count for the client's share now. For the original entry.
    #[inline(always)]
    pub fn counted_entries(&self, proto: Proto) -> u32 {
        self.countable_entries(proto) * Seen::goes_on(self.tx, self.rx)
    }

    /// Returns true if both sides have responded to each other. For the original entry.
    #[inline(always)]
    pub const fn is_assured(&self) -> bool {
        self.tx.with(self.rx).has(Seen::ASSURED)
    }

    /// Returns true if a UDP client has sent a packet since `since_secs` (since boot), or is a
    /// recently active stream. In a flood, places in the half-open queue last for less than a
    /// second, and a stream costs the flood many packets. For the original entry.
    #[inline(always)]
    pub const fn is_stream_since(&self, since_secs: u32, now_secs: u32) -> bool {
        let is_going_on = self.passed.packets >= STREAM && is_recent(self.idle_secs(now_secs));
        self.last_secs > since_secs || is_going_on
    }

    /// Returns true if the agent has ended the flow: see [`Seen::LOST`]. For the original entry.
    #[inline(always)]
    pub const fn is_lost(&self) -> bool {
        self.kind.0 == Kind::DNAT.0 && self.rx.has(Seen::LOST)
    }

    #[inline(always)]
    pub const fn idle_secs(&self, now_secs: u32) -> u32 {
        now_secs.saturating_sub(self.last_secs)
    }

    /// Returns true if the flow has ended, or was idle for longer than its state allows. For the
    /// original entry.
    #[inline(always)]
    pub const fn is_expired(&self, proto: Proto, now_secs: u32, timeouts: Timeouts) -> bool {
        let state = self.state();
        let has_ended = state.is_terminal() && !self.may_survive_reset(proto);
        has_ended || self.idle_secs(now_secs) > state.timeout_secs(proto, timeouts)
    }

    /// Returns true if only a RST from a client outside has ended the flow. Any host may have
    /// spoofed the RST with one of many in-window numbers. A backend that ignores the RST continues
    /// to send, which revokes the RST. For the original entry.
    #[inline(always)]
    pub const fn may_survive_reset(&self, proto: Proto) -> bool {
        let is_over_without = Seen::is_over(self.tx.without(Seen::RST), self.rx);
        proto.0 == Proto::TCP.0
            && self.tx.has(Seen::RST)
            && self.is_far()
            && self.is_assured()
            && is_over_without == 0
    }

    /// Returns true if the flow is expired and expects no further packet. The programs may evict
    /// such a flow as well, in case no agent sweeps. For the original entry.
    #[inline(always)]
    pub fn is_evictable(&self, proto: Proto, now_secs: u32, timeouts: Timeouts) -> bool {
        let has_said_all = self.state() == State::Reset || self.idle_secs(now_secs) > LINGER_SECS;
        has_said_all && self.is_expired(proto, now_secs, timeouts)
    }
}

#[cfg(test)]
mod tests;
