//! Counts what became of each service port's UDP flows, by backend.
//!
//! UDP has no connects, so the programs count only the datagrams that a backend refused. The agent
//! derives the rest from the flow table: a flow is answered once it has a packet of its backend, and
//! unanswered if it expires without one. The counts begin with the agent.
//!
//! The programs close flows too: of a client whose backend has left, and half-open flows that make
//! room. The agent does not see those flows end. So no unanswered flow among them counts, and the
//! number of answered flows pauses until it exceeds its last value.

use std::collections::BTreeMap;

use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::connect::Connects;
use proxy_common::flow::{Flow, Seen};
use proxy_common::frontend::FrontendKey;
use proxy_core::udp::UdpOutcomes;

use super::counts::FlowCount;

/// The idle time in seconds after which only the service port keeps a backend's counts.
const IDLE_SECS: u32 = 3_600;
/// The time in seconds from the end of a flow's idle timeout to the sweep that removes the flow, and
/// from a refusal to the sweep that counts it.
const SWEEP_SECS: u32 = 60;

/// The outcomes of each service port, by backend. The unspecified address has those of idle
/// backends.
pub type ByBackend<A> = BTreeMap<FrontendKey<A>, BTreeMap<SockAddr<A>, UdpOutcomes>>;

type Connected<A> = BTreeMap<FrontendKey<A>, BTreeMap<SockAddr<A>, Connects>>;
type Flows<A> = BTreeMap<FrontendKey<A>, BTreeMap<SockAddr<A>, FlowCount>>;

/// Returns true if an original entry is a UDP flow of a service port with an answer.
pub(super) fn is_answered<A: Addr>(opener: &Flow<A>) -> bool {
    opener.service.proto == Proto::UDP && opener.rx.has(Seen::PACKET)
}

/// The outcomes of ended flows.
#[derive(Debug)]
pub(super) struct DatagramLedger<A: Addr> {
    rows: BTreeMap<FrontendKey<A>, BTreeMap<SockAddr<A>, Row>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Row {
    counts: UdpOutcomes,
    /// The last value of the programs' counter.
    refused: u64,
    /// The refusals whose flows have yet to end: at most the unanswered flows in the table, because a
    /// client that repeats its datagram is refused more often than it has flows.
    pending: u64,
    refused_secs: u32,
    last_secs: u32,
    /// The flows that ended without an answer since the last call of [`DatagramLedger::settle`].
    ended: u64,
    answered: u64,
    /// The answered flows in the table at the last scan.
    in_table: u64,
    /// The number of answered flows at the last scan, and at the last call of
    /// [`DatagramLedger::settle`].
    shown: u64,
    seen: u64,
}

impl<A: Addr> DatagramLedger<A> {
    /// Takes the programs' counters as the beginning.
    pub(super) fn new(connects: &Connected<A>) -> Self {
        let mut ledger = Self {
            rows: BTreeMap::new(),
        };
        for (service, at, refused) in refusals(connects) {
            ledger.row(service, at).refused = refused;
        }
        ledger
    }

    fn row(&mut self, service: FrontendKey<A>, at: SockAddr<A>) -> &mut Row {
        self.rows.entry(service).or_default().entry(at).or_default()
    }

    /// Keeps the outcome of a removed flow.
    pub(super) fn close(&mut self, flow: &Flow<A>) {
        if flow.service.proto != Proto::UDP || flow.service.addr.is_unspecified() {
            return;
        }
        let at = SockAddr::new(flow.backend.addr, flow.backend.port);
        let is_answered = is_answered(flow);
        let row = self.row(flow.service, at);
        if is_answered {
            row.answered += 1;
        } else {
            row.ended += 1;
        }
    }

    /// Counts the flows that ended since the last call, and the programs' refusals. A refused flow
    /// ends without an answer too, within `udp_timeout` seconds, and counts once. Call this after
    /// [`DatagramLedger::note_table`].
    pub(super) fn settle(
        &mut self,
        connects: &Connected<A>,
        flows: &Flows<A>,
        now_secs: u32,
        udp_timeout: u32,
    ) {
        for (service, at, refused) in refusals(connects) {
            let row = self.row(service, at);
            let more = refused.saturating_sub(row.refused);
            row.refused = refused;
            if more > 0 {
                row.counts.refused += more;
                row.pending += more;
                (row.refused_secs, row.last_secs) = (now_secs, now_secs);
            }
        }
        let pending_secs = udp_timeout.saturating_add(SWEEP_SECS);
        for (service, backends) in &mut self.rows {
            let rest = SockAddr::new(A::UNSPECIFIED, Port::ANY);
            let mut idle = UdpOutcomes::default();
            backends.retain(|at, row| {
                let flows = flows.get(service).and_then(|flows| flows.get(at));
                row.settle(now_secs, flows.map_or(0, |flows| flows.all), pending_secs);
                // A row of the programs must be known, or its counter would count again.
                let is_kept = *at == rest
                    || row.in_table > 0
                    || now_secs.saturating_sub(row.last_secs) <= IDLE_SECS
                    || counted(connects, service, at) > 0;
                if !is_kept {
                    idle = idle.plus(UdpOutcomes {
                        answered: row.shown.max(row.counts.answered),
                        ..row.counts
                    });
                }
                is_kept
            });
            if idle != UdpOutcomes::default() {
                let row = backends.entry(rest).or_default();
                row.counts = row.counts.plus(idle);
                row.shown = row.shown.max(row.counts.answered);
            }
        }
    }

    /// Takes the answered flows in the table. The number of answered flows never decreases.
    pub(super) fn note_table(&mut self, in_table: &ByBackend<A>) {
        for row in self.rows.values_mut().flat_map(BTreeMap::values_mut) {
            row.in_table = 0;
        }
        for (service, backends) in in_table {
            for (at, counts) in backends {
                self.row(*service, *at).in_table = counts.answered;
            }
        }
        for row in self.rows.values_mut().flat_map(BTreeMap::values_mut) {
            // `answered` is not settled yet, and no longer in the table.
            row.shown = row
                .shown
                .max(row.counts.answered + row.answered + row.in_table);
        }
    }

    /// Returns the outcomes of all flows, removed or in the table at the last
    /// [`DatagramLedger::note_table`].
    pub(super) fn outcomes(&self) -> ByBackend<A> {
        let of = |row: &Row| UdpOutcomes {
            answered: row.shown,
            ..row.counts
        };
        let services = self.rows.iter().map(|(service, backends)| {
            let backends = backends.iter().map(|(at, row)| (*at, of(row)));
            (*service, backends.collect())
        });
        services.collect()
    }

    pub(super) fn remove(&mut self, service: &FrontendKey<A>) {
        self.rows.remove(service);
    }
}

impl Row {
    fn settle(&mut self, now_secs: u32, flows: u64, pending_secs: u32) {
        if now_secs.saturating_sub(self.refused_secs) > pending_secs {
            self.pending = 0;
        }
        if self.ended + self.answered > 0 || self.seen != self.shown {
            self.last_secs = now_secs;
        }
        self.seen = self.shown;
        let refused = self.ended.min(self.pending);
        self.pending -= refused;
        self.pending = self.pending.min(flows.saturating_sub(self.in_table));
        self.counts.unanswered += self.ended - refused;
        self.counts.answered += self.answered;
        (self.ended, self.answered) = (0, 0);
    }
}

/// Returns the programs' counter of refusals.
fn counted<A: Addr>(connects: &Connected<A>, service: &FrontendKey<A>, at: &SockAddr<A>) -> u64 {
    let row = connects.get(service).and_then(|rows| rows.get(at));
    row.map_or(0, |row| row.refused)
}

fn refusals<A: Addr>(
    connects: &Connected<A>,
) -> impl Iterator<Item = (FrontendKey<A>, SockAddr<A>, u64)> {
    let of_udp = connects
        .iter()
        .filter(|(service, _)| service.proto == Proto::UDP);
    of_udp.flat_map(|(service, backends)| {
        let backends = backends.iter();
        backends
            .filter(|(at, row)| row.refused > 0 && !at.addr.is_unspecified())
            .map(|(at, row)| (*service, *at, row.refused))
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proxy_common::addr::Addr4;

    use super::*;

    fn at(port: u16) -> SockAddr<Addr4> {
        SockAddr::new(Addr4::from(Ipv4Addr::new(10, 0, 0, 1)), Port::new(port))
    }

    fn dns() -> FrontendKey<Addr4> {
        FrontendKey::new(
            Addr4::from(Ipv4Addr::new(10, 96, 0, 10)),
            Port::new(53),
            Proto::UDP,
        )
    }

    fn flow(rx: Seen) -> Flow<Addr4> {
        let mut flow = Flow::new(at(1), at(2), at(53), at(1), 0, 0);
        (flow.service, flow.rx) = (dns(), rx);
        flow
    }

    fn connects(refused: u64) -> BTreeMap<FrontendKey<Addr4>, BTreeMap<SockAddr<Addr4>, Connects>> {
        let mut row = Connects::NOTHING;
        row.refused = refused;
        BTreeMap::from([(dns(), BTreeMap::from([(at(53), row)]))])
    }

    fn counts(ledger: &mut DatagramLedger<Addr4>, at: SockAddr<Addr4>) -> [u64; 3] {
        counts_beside(ledger, at, 0)
    }

    /// Returns the counts with a number of answered flows in the table.
    fn counts_beside(
        ledger: &mut DatagramLedger<Addr4>,
        at: SockAddr<Addr4>,
        in_table: u64,
    ) -> [u64; 3] {
        let answered = UdpOutcomes {
            answered: in_table,
            ..UdpOutcomes::default()
        };
        let mut found = BTreeMap::new();
        if in_table > 0 {
            found.insert(dns(), BTreeMap::from([(at, answered)]));
        }
        ledger.note_table(&found);
        let found = ledger.outcomes();
        let of_dns = found.get(&dns()).and_then(|backends| backends.get(&at));
        let counts = of_dns.copied().unwrap_or_default();
        [counts.answered, counts.unanswered, counts.refused]
    }

    /// Settles with a number of flows in the table.
    fn settle(ledger: &mut DatagramLedger<Addr4>, refused: u64, flows: u64, now_secs: u32) {
        let count = FlowCount {
            all: flows,
            open: flows,
        };
        let flows = BTreeMap::from([(dns(), BTreeMap::from([(at(53), count)]))]);
        ledger.settle(&connects(refused), &flows, now_secs, 30);
    }

    #[test]
    fn flow_counts_once_as_answered_unanswered_or_refused() {
        // Five refusals were there before the agent.
        let mut ledger = DatagramLedger::new(&connects(5));
        ledger.close(&flow(Seen::PACKET));
        assert_eq!(
            counts(&mut ledger, at(53)),
            [1, 0, 0],
            "before it is settled"
        );
        ledger.close(&flow(Seen::NOTHING));
        settle(&mut ledger, 5, 0, 100);
        assert_eq!(counts(&mut ledger, at(53)), [1, 1, 0]);
        // The two refused flows end later, together with a silent one.
        settle(&mut ledger, 7, 3, 110);
        assert_eq!(counts(&mut ledger, at(53)), [1, 1, 2]);
        for _ in 0..3 {
            ledger.close(&flow(Seen::NOTHING));
        }
        settle(&mut ledger, 7, 0, 140);
        assert_eq!(counts(&mut ledger, at(53)), [1, 2, 2]);
    }

    #[test]
    fn flow_that_is_refused_again_and_again_excuses_one_end() {
        let mut ledger = DatagramLedger::new(&connects(0));
        // A client repeats its datagram; a second client's flow is silent. The counters do not say which
        // of the two is refused, so the first end counts for the refusals.
        for (nth, now_secs) in (1..=20).zip((10..).step_by(10)) {
            settle(&mut ledger, nth * 100, 1, now_secs);
        }
        settle(&mut ledger, 2_000, 2, 210);
        ledger.close(&flow(Seen::NOTHING));
        settle(&mut ledger, 2_000, 1, 220);
        assert_eq!(counts(&mut ledger, at(53)), [0, 0, 2_000], "refused");
        ledger.close(&flow(Seen::NOTHING));
        settle(&mut ledger, 2_000, 0, 230);
        assert_eq!(counts(&mut ledger, at(53)), [0, 1, 2_000], "silent");
        // Silent flows stay in the table for long after the last refusal.
        settle(&mut ledger, 2_001, 2, 300);
        ledger.close(&flow(Seen::PACKET));
        settle(&mut ledger, 2_001, 2, 300 + 30 + SWEEP_SECS + 1);
        ledger.close(&flow(Seen::NOTHING));
        settle(&mut ledger, 2_001, 1, 410);
        assert_eq!(counts(&mut ledger, at(53)), [1, 2, 2_001]);
    }

    #[test]
    fn refused_flow_counts_once_with_a_long_timeout() {
        let mut ledger = DatagramLedger::new(&connects(0));
        let count = FlowCount { all: 1, open: 1 };
        let table = BTreeMap::from([(dns(), BTreeMap::from([(at(53), count)]))]);
        for now_secs in (10..600).step_by(10) {
            ledger.settle(&connects(1), &table, now_secs, 600);
        }
        ledger.close(&flow(Seen::NOTHING));
        ledger.settle(&connects(1), &BTreeMap::new(), 610, 600);
        assert_eq!(counts(&mut ledger, at(53)), [0, 0, 1]);
    }

    #[test]
    fn answered_flows_that_a_program_closes_lower_no_count() {
        let mut ledger = DatagramLedger::new(&BTreeMap::new());
        assert_eq!(counts_beside(&mut ledger, at(53), 3), [3, 0, 0]);
        settle(&mut ledger, 0, 3, 10);
        // A program closes two.
        assert_eq!(counts_beside(&mut ledger, at(53), 1), [3, 0, 0]);
        ledger.close(&flow(Seen::PACKET));
        assert_eq!(counts(&mut ledger, at(53)), [3, 0, 0]);
        settle(&mut ledger, 0, 1, 20);
        assert_eq!(counts_beside(&mut ledger, at(53), 4), [5, 0, 0]);
        settle(&mut ledger, 0, 4, 30);
        // The flows are silent for long.
        assert_eq!(counts_beside(&mut ledger, at(53), 4), [5, 0, 0]);
        settle(&mut ledger, 0, 4, 31 + IDLE_SECS);
        assert_eq!(counts_beside(&mut ledger, at(53), 4), [5, 0, 0]);
    }

    #[test]
    fn idle_backends_share_a_row() {
        let mut ledger = DatagramLedger::new(&BTreeMap::new());
        ledger.close(&flow(Seen::PACKET));
        assert_eq!(counts(&mut ledger, at(53)), [1, 0, 0]);
        settle(&mut ledger, 0, 0, 10);
        settle(&mut ledger, 0, 0, 10 + IDLE_SECS);
        assert_eq!(counts(&mut ledger, at(53)), [1, 0, 0]);
        settle(&mut ledger, 0, 0, 11 + IDLE_SECS);
        let rest = SockAddr::new(Addr4::UNSPECIFIED, Port::ANY);
        assert_eq!(counts(&mut ledger, at(53)), [0, 0, 0]);
        assert_eq!(counts(&mut ledger, rest), [1, 0, 0]);
        ledger.remove(&dns());
        assert_eq!(counts(&mut ledger, rest), [0, 0, 0]);
    }
}
