//! The walk of the packets between pods through the NAT chains. Where a rule may or may not apply, the walk takes both
//! ways.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::model::{Base, Chain, ChainName, Obstacle, Part, Rule, Ruleset, TableFamily, Verdict};
use super::packet::{Family, Mark, Packets, Share};
use crate::forward::KUBE_PROXY;

/// The most rules that a walk looks at. A rule counts again on each way that leads to it.
const STEPS: u32 = 100_000;
/// The most chains that call one another. The kernel allows 16.
const DEPTH: u32 = 32;

/// The ways out of a chain. Each holds what is known of the mark of the packets that take it, if any do.
#[derive(Clone, Copy, Default)]
struct Ends {
    /// The packets that go back to the calling chain.
    returned: Option<Mark>,
    /// The packets that leave the base chain.
    accepted: Option<Mark>,
}

/// The ways out of a rule.
#[derive(Clone, Copy, Default)]
struct RuleEnds {
    /// The packets that go on with the next rule.
    next: Option<Mark>,
    of_chain: Ends,
}

struct Walk<'a> {
    rules: &'a Ruleset,
    steps: u32,
    found: BTreeSet<Obstacle>,
}

/// Returns the rules and policies that may change a packet from one address of `pods` to another.
pub(super) fn obstacles(rules: &Ruleset, pods: &[IpNet]) -> BTreeSet<Obstacle> {
    let mut walk = Walk { rules, steps: 0, found: BTreeSet::new() };
    for family in [Family::V4, Family::V6] {
        let nets: Vec<_> = pods.iter().filter(|net| Family::of(net) == family).map(IpNet::trunc).collect();
        if !nets.is_empty() {
            walk.base_chains(&Packets { family, source: nets.clone(), destination: nets, mark: Mark::Zero });
        }
    }
    walk.found
}

/// Returns the chain's place if packets of the family pass the chain.
pub(super) fn passed(name: &ChainName, chain: &Chain, family: Family) -> Option<Base> {
    let is_kube_proxy = name.table == KUBE_PROXY && name.family != TableFamily::Inet;
    chain.base.filter(|_| family.passes(name.family) && !is_kube_proxy)
}

impl Walk<'_> {
    fn base_chains(&mut self, packets: &Packets) {
        let rules = self.rules;
        let bases = rules.iter().filter_map(|(name, chain)| Some((passed(name, chain, packets.family)?, name, chain)));
        let mut bases: Vec<_> = bases.collect();
        bases.sort_by_key(|(base, ..)| *base);
        let mut packets = packets.clone();
        for (base, name, chain) in bases {
            let ends = self.chain(name, chain, &packets, 1);
            if base.drops && ends.returned.is_some() {
                self.found.insert(Obstacle::Policy(name.clone()));
            }
            packets.mark = [ends.returned, ends.accepted].into_iter().flatten().fold(packets.mark, Mark::max);
        }
    }

    fn chain(&mut self, name: &ChainName, chain: &Chain, packets: &Packets, depth: u32) -> Ends {
        let mut packets = packets.clone();
        let mut ends = Ends::default();
        for (number, rule) in (1..).zip(&chain.rules) {
            self.steps += 1;
            if depth > DEPTH || self.steps > STEPS {
                self.found.insert(Obstacle::TooMany);
                return Ends { returned: Some(Mark::Unknown), accepted: Some(Mark::Unknown) };
            }
            let RuleEnds { next, of_chain } = self.rule((name, number), rule, &packets, depth);
            ends = ends.or(of_chain);
            match next {
                Some(mark) => packets.mark = mark,
                None => return ends,
            }
        }
        ends.or(Ends { returned: Some(packets.mark), accepted: None })
    }

    fn rule(&mut self, place: (&ChainName, usize), rule: &Rule, packets: &Packets, depth: u32) -> RuleEnds {
        let mut packets = packets.clone();
        let mut next = None;
        for part in rule {
            match part {
                Part::Condition(condition) => match packets.keep(condition) {
                    Share::All => {}
                    Share::Some => next = next.max(Some(packets.mark)),
                    Share::None => return RuleEnds { next: next.max(Some(packets.mark)), of_chain: Ends::default() },
                },
                Part::Maybe => next = next.max(Some(packets.mark)),
                Part::SetMark => {
                    self.report(place, "set the mark");
                    packets.mark = Mark::Unknown;
                }
                Part::Change(what) => self.report(place, what),
                Part::Verdict(verdict) => {
                    let ends = self.verdict(place, verdict, &packets, depth);
                    return RuleEnds { next: next.max(ends.next), ..ends };
                }
            }
        }
        RuleEnds { next: next.max(Some(packets.mark)), of_chain: Ends::default() }
    }

    fn verdict(&mut self, place: (&ChainName, usize), verdict: &Verdict, packets: &Packets, depth: u32) -> RuleEnds {
        let mark = Some(packets.mark);
        let (next, of_chain) = match verdict {
            Verdict::Accept => (None, Ends { accepted: mark, returned: None }),
            Verdict::Return => (None, Ends { returned: mark, accepted: None }),
            Verdict::Break => (mark, Ends::default()),
            Verdict::Jump(chain) => {
                let ends = self.call(place, chain, packets, depth);
                (ends.returned, Ends { returned: None, ..ends })
            }
            Verdict::Goto(chain) => (None, self.call(place, chain, packets, depth)),
        };
        RuleEnds { next, of_chain }
    }

    fn call(&mut self, place: (&ChainName, usize), chain: &str, packets: &Packets, depth: u32) -> Ends {
        let name = ChainName { chain: chain.to_owned(), ..place.0.clone() };
        match self.rules.get(&name) {
            Some(chain) => self.chain(&name, chain, packets, depth + 1),
            None => {
                self.report(place, &format!("call chain {chain}, which is not in the kernel's list"));
                Ends { returned: Some(Mark::Unknown), accepted: Some(Mark::Unknown) }
            }
        }
    }

    fn report(&mut self, (chain, number): (&ChainName, usize), what: &str) {
        self.found.insert(Obstacle::Rule { chain: chain.clone(), number, what: what.to_owned() });
    }
}

impl Ends {
    fn or(self, other: Self) -> Self {
        Self { returned: self.returned.max(other.returned), accepted: self.accepted.max(other.accepted) }
    }
}
