//! The packet path's memory of one conversation.
//!
//! A flow is two or four entries of `FLOWS`. Each is keyed by the tuple that its hook sees before
//! it rewrites. All hold the same [`Flow`] but for `kind` and the counters of the direction that
//! passes there. So every hook needs one lookup, and from any entry all its siblings' keys can be
//! built: nothing points to anything.
//!
//! Between the hooks a packet is `(client address, source port) -> backend`. The source port is the
//! client's own unless another flow holds that tuple. For a client outside (ports and addresses
//! shortened):
//!
//! ```text
//!   hook     seen on the wire          kind     becomes
//!   ingress  client:c -> frontend      Dnat     client:s -> backend
//!   egress   client:s -> backend       Snat     source:s -> backend       only if source address != client address
//!   ingress  backend -> source:s       Unsnat   backend -> client:s       only then
//!   egress   backend -> client:s       Undnat   frontend -> client:c
//!
//!   anchor   host:c -> frontend        Dnat     source:s -> backend       a flow of the host's own sockets
//!   ingress  backend -> source:s       Undnat   frontend -> host:c        injected where the host expects it
//!   egress   backend -> host:s         Undnat   frontend -> host:c        instead, if the backend is the host itself
//!
//!   egress   node:c -> backend         Dnat     node:s -> backend         another program's, whose port a flow has
//!   ingress  backend -> node:s         Undnat   backend -> node:c
//! ```

use crate::addr::{Addr, Addr4, Addr6, Proto, SockAddr};
use crate::assert_size;
use crate::closed::closed;
use crate::frontend::FrontendKey;
use crate::service_counts::Passed;

mod end;
mod judged;
mod key;
mod offer;
mod ports;
mod proof;
mod reuse;
mod seen;
mod state;
mod step;

pub use end::{Acked, Ahead, is_recent};
pub use judged::{Judged, Term};
pub use key::FlowKey;
pub use offer::{AnyKey, Offer, is_for_asker};
pub use ports::{CLIENT_PORT_FIRST, CLIENT_PORT_LAST, SOURCE_PORT_FIRST, may_be_drawn};
pub use proof::Proof;
pub use seen::Seen;
pub use state::{State, Timeouts};
pub use step::{Sender, Step, Told, is_settled, is_stream, step};

/// The hook whose packets find an entry of `FLOWS`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hook(u8);

impl Hook {
    pub const INGRESS: Self = Self(0);
    pub const EGRESS: Self = Self(1);
    /// Egress of the anchor, where the host's own packets start.
    pub const ANCHOR: Self = Self(2);
}

closed! {
    /// A [`Hook`], to match on.
    Hook => AtHook { INGRESS => Ingress, EGRESS => Egress, ANCHOR => Anchor }
}

/// The change that an entry makes to its packets: see the table in the module's documentation.
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
    /// A [`Kind`], to match on.
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
    /// The source that the backend sees: the client's address or the node's, and the port in use
    /// between the hooks.
    pub source: SockAddr<A>,
    pub kind: Kind,
    flags: u8,
    /// The bits seen from the client. Only the opener's entry has them, and only that direction
    /// writes them.
    pub tx: Seen,
    /// The bits seen from the backend. The field of the opener's entry counts. The field of the
    /// reply's entry is that entry's own memory. A client's packet only takes a RST from it, which
    /// the client has not accepted.
    pub rx: Seen,
    /// When a packet last passed this entry: seconds since boot.
    pub last_secs: u32,
    /// TCP: what the sender of this entry's packets has [`Acked`]; in the opener's entry the
    /// [`Proof`] before. Others, in the opener's entry: the value of `GENERATION` when the backend
    /// was last known to serve.
    pub generation: u32,
    /// The service port that opened it; [`FrontendKey::address`] of no address if none did.
    pub service: FrontendKey<A>,
    pad: A::Pad,
    /// In the opener's entry what went to the backend, in the one that gives replies their
    /// frontend's address back what came from there. Others do not count.
    pub passed: Passed,
}
assert_size!(Flow<Addr4> = 4 * 8 + 4 + 4 + 4 + 8 + 4 + 16);
assert_size!(Flow<Addr6> = 4 * 20 + 4 + 4 + 4 + 20 + 16);

/// A flow that both sides have closed is heard of for this long: the last acknowledgement, and the
/// last FIN again if that was lost.
pub const LINGER_SECS: u32 = 3;

/// A client that dials again from the port of a flow silent for this long may have forgotten that
/// flow.
const REDIAL_SECS: u32 = 60;

/// A client that has sent as many datagrams is a stream, though no backend answers: of logs, of
/// measurements.
const STREAM: u64 = 16;

/// A backend that has not answered the opener of such a client for this long has forgotten the flow
/// as well, or is gone.
const ANSWER_SECS: u32 = 3;

impl<A: Addr> Flow<A> {
    /// Entries of one flow, at the most.
    pub const ENTRIES_MAX: u32 = 4;

    /// Opened by a socket of the host, on the anchor.
    pub const HOST: u8 = 1 << 0;
    /// The backend is a socket of the host itself.
    pub const HOST_BACKEND: u8 = 1 << 1;
    /// The flow is the host's, and the frontend's address is the host's own, so packets start on
    /// lo, and replies go in there.
    pub const HOST_FRONTEND: u8 = 1 << 2;
    /// The flow was opened past the stack to a pod of another node. HOST_FRONTEND, of flows of the
    /// host alone, has the same bit.
    pub const FAR: u8 = 1 << 2;
    /// The backend's count in `CONNECTIONS` includes this flow until it is over.
    pub const COUNTED: u8 = 1 << 3;
    /// The programs that opened the flow keep TCP's numbers in [`Flow::generation`]. Older ones did
    /// not.
    pub const NUMBERED: u8 = 1 << 5;
    /// The flow has four entries. Those of older programs do not tell.
    pub const WIDE: u8 = 1 << 7;
    /// The client is behind a device that is no pod's, where any host may send under its name.
    pub const REMOTE: u8 = 1 << 6;
    /// Another program's connection, that left with a tuple which a flow has: it got another source
    /// port where it left.
    pub const GUEST: u8 = 1 << 4;

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

    /// Returns 1 if the flow counts for its backend, else 0.
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

    /// Returns true if the flow was opened past the stack to a pod of another node.
    #[inline(always)]
    pub const fn is_whole_far(&self) -> bool {
        self.flags & (Self::HOST | Self::FAR) == Self::FAR
    }

    #[inline(always)]
    pub fn is_snat(&self) -> bool {
        self.source.addr != self.client.addr
    }

    /// Makes an entry of a flow that was opened past the stack one of a flow that takes the stack.
    /// Conntrack is liberal with it from now on.
    pub fn leave_to_stack(&mut self) {
        if self.kind == Kind::UNDNAT {
            self.tx = self.tx.with(Seen::OFFERED);
        }
        if self.is_whole_far() {
            self.flags &= !Self::FAR;
        }
        self.rx = self.rx.without(Seen::WHOLE);
        self.set_judged(Judged::NONE);
    }

    /// The client as the packet shows it between the hooks.
    #[inline(always)]
    pub const fn client_between(&self) -> SockAddr<A> {
        SockAddr::new(self.client.addr, self.source.port)
    }

    /// Returns true if the client is behind an uplink.
    #[inline(always)]
    pub const fn is_far(&self) -> bool {
        self.has(Self::REMOTE)
    }

    /// The client whose share of the table the flow counts for: see [`crate::share`].
    #[inline(always)]
    pub fn holder(&self) -> A {
        self.client.addr.site_if(self.is_far())
    }

    /// Notes whether the flow has four entries, once it knows its source.
    #[inline(always)]
    pub fn note_width(&mut self) {
        if self.is_snat_on_devices() {
            self.flags |= Self::WIDE;
        }
    }

    /// The number of entries that the flow has.
    #[inline(always)]
    pub fn entries(&self) -> u32 {
        2 << ((self.flags & Self::WIDE) / Self::WIDE)
    }

    /// Key of this entry.
    #[inline(always)]
    pub fn key(&self, proto: Proto) -> FlowKey<A> {
        self.key_as(self.kind, proto)
    }

    /// Key of the entry of another kind of the same flow.
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

    /// Key of the entry that every flow has, made last and removed last: as long as it stands the
    /// flow does.
    #[inline(always)]
    pub const fn opener_key(&self, proto: Proto) -> FlowKey<A> {
        let hook = if self.has(Self::HOST) {
            Hook::ANCHOR
        } else if self.has(Self::GUEST) {
            Hook::EGRESS
        } else {
            Hook::INGRESS
        };
        FlowKey::new(hook, proto, self.client, self.frontend)
    }

    /// Key of the entry that gives replies their frontend's address back.
    #[inline(always)]
    pub const fn undnat_key(&self, proto: Proto) -> FlowKey<A> {
        if self.has(Self::HOST) && !self.has(Self::HOST_BACKEND) || self.has(Self::GUEST) {
            FlowKey::new(Hook::INGRESS, proto, self.backend, self.source)
        } else if self.has(Self::HOST) {
            FlowKey::new(Hook::EGRESS, proto, self.backend, self.source)
        } else {
            FlowKey::new(Hook::EGRESS, proto, self.backend, self.client_between())
        }
    }

    /// Returns true if the flow has entries that change the source address at devices. (The anchor
    /// changes it itself.)
    #[inline(always)]
    pub fn is_snat_on_devices(&self) -> bool {
        self.is_snat() && !self.has(Self::HOST)
    }

    /// The kinds of all entries of this flow, in the order in which they are made: the opener's
    /// last.
    pub fn kinds(&self) -> &'static [Kind] {
        if self.is_snat_on_devices() {
            &[Kind::UNDNAT, Kind::UNSNAT, Kind::SNAT, Kind::DNAT]
        } else {
            &[Kind::UNDNAT, Kind::DNAT]
        }
    }

    /// Returns the end of the flow that this entry marks: see [`crate::ways`].
    #[inline(always)]
    pub fn marked_end(&self, key: &FlowKey<A>) -> SockAddr<A> {
        match self.kind.known() {
            Some(EntryKind::Unsnat | EntryKind::Undnat) => key.dst(),
            Some(EntryKind::Dnat | EntryKind::Snat) | None => key.src(),
        }
    }

    /// Returns the state, in the opener's entry.
    #[inline(always)]
    pub const fn state(&self) -> State {
        State::of(self.tx, self.rx)
    }

    /// Returns true, in the opener's entry, if the client has not shown yet that it exists. A
    /// sender under a false name gets no further than this. Such a flow makes room for others.
    ///
    /// A UDP client behind an uplink never shows it: any host can send two datagrams under its
    /// name.
    #[inline(always)]
    pub const fn is_half_open(&self, proto: Proto) -> bool {
        self.shows_no_client(proto) | !self.is_assured()
    }

    /// Returns true if no packet can show that the client exists.
    #[inline(always)]
    pub const fn shows_no_client(&self, proto: Proto) -> bool {
        (proto.0 == Proto::UDP.0) & self.is_far()
    }

    /// Returns the entries that count for the client's share while the flow goes on beyond
    /// half-open: none if its client never shows itself.
    #[inline(always)]
    pub fn countable_entries(&self, proto: Proto) -> u32 {
        if self.shows_no_client(proto) {
            0
        } else {
            self.entries()
        }
    }

    /// Returns the entries that count for the client's share now, in the opener's entry.
    #[inline(always)]
    pub fn counted_entries(&self, proto: Proto) -> u32 {
        self.countable_entries(proto) * Seen::goes_on(self.tx, self.rx)
    }

    /// Returns true, in the opener's entry, if both sides have spoken, each knowing of the other.
    #[inline(always)]
    pub const fn is_assured(&self) -> bool {
        self.tx.with(self.rx).has(Seen::ASSURED)
    }

    /// Returns true, in the opener's entry, if a UDP client has gone on since that second. While
    /// flows get no place for longer than a moment, true if it has sent many datagrams and was just
    /// heard: each costs a flood a packet.
    #[inline(always)]
    pub const fn is_stream_since(&self, since_secs: u32, now_secs: u32) -> bool {
        let is_going_on = self.passed.packets >= STREAM && is_recent(self.idle_secs(now_secs));
        self.last_secs > since_secs || is_going_on
    }

    /// Returns true, in the opener's entry, if the agent has ended the flow: see [`Seen::LOST`].
    #[inline(always)]
    pub const fn is_lost(&self) -> bool {
        self.kind.0 == Kind::DNAT.0 && self.rx.has(Seen::LOST)
    }

    #[inline(always)]
    pub const fn idle_secs(&self, now_secs: u32) -> u32 {
        now_secs.saturating_sub(self.last_secs)
    }

    /// Returns true, in the opener's entry, if the flow has ended, or was silent for longer than
    /// its state allows.
    #[inline(always)]
    pub const fn is_expired(&self, proto: Proto, now_secs: u32, timeouts: Timeouts) -> bool {
        let state = self.state();
        let has_ended = state.is_terminal() && !self.may_survive_reset(proto);
        has_ended || self.idle_secs(now_secs) > state.timeout_secs(proto, timeouts)
    }

    /// Returns true, in the opener's entry, if a RST alone has ended the flow, in the name of a
    /// client outside. Any host may have sent it, with one of many numbers that may be on their
    /// way. A backend that does not believe it goes on, and that takes the RST back.
    #[inline(always)]
    pub const fn may_survive_reset(&self, proto: Proto) -> bool {
        let is_over_without = Seen::is_over(self.tx.without(Seen::RST), self.rx);
        proto.0 == Proto::TCP.0
            && self.tx.has(Seen::RST)
            && self.is_far()
            && self.is_assured()
            && is_over_without == 0
    }

    /// Returns true, in the opener's entry, if the flow is expired and no packet of it is due. It
    /// makes room for others as well: there may be no agent to sweep it.
    #[inline(always)]
    pub fn is_evictable(&self, proto: Proto, now_secs: u32, timeouts: Timeouts) -> bool {
        let has_said_all = self.state() == State::Reset || self.idle_secs(now_secs) > LINGER_SECS;
        has_said_all && self.is_expired(proto, now_secs, timeouts)
    }
}

#[cfg(test)]
mod tests;
