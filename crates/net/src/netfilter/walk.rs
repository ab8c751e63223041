//! Traces packets between pods through the chains. At a rule that may or may not match, the walk
//! follows both outcomes.

use std::collections::BTreeSet;
use std::rc::Rc;

use ipnet::IpNet;

use super::model::{
    Base, Chain, ChainName, Found, Hook, MarkChange, Obstacle, Part, Rule, Ruleset, TableFamily,
    Verdict,
};
use super::packet::{Asked, Devices, Family, Mark, NEW, Packets, Share};

/// kube-proxy's table in mode nftables. Its rules match nothing if kube-proxy serves no Service.
const KUBE_PROXY: &str = "kube-proxy";
/// The priority of conntrack at the first hook. In chains before it packets have no conntrack state
/// yet.
const NF_IP_PRI_CONNTRACK: i32 = -200;

/// The maximum number of rules that the walk visits for one kind of packet. A rule counts once for
/// each path to it.
const STEPS: u32 = 100_000;
/// The maximum nesting of chains. The kernel allows 16.
const DEPTH: u32 = 32;

/// The exits of a chain, with the known mark of the packets that use each exit.
#[derive(Clone, Copy, Default)]
struct Ends {
    /// The packets that return to the calling chain.
    returned: Option<Mark>,
    /// The packets that leave the base chain.
    accepted: Option<Mark>,
}

#[derive(Default)]
struct RuleEnds<'a> {
    /// The packets that continue with the next rule.
    next: Option<Rest<'a>>,
    of_chain: Ends,
}

/// The known properties of the packets that continue with the next rule.
#[derive(Clone)]
struct Rest<'a> {
    mark: Mark,
    devices: Devices<'a>,
}

struct Walk<'a> {
    rules: &'a Ruleset,
    asked: &'a Asked<'a>,
    steps: u32,
    found: Found,
    /// True if the current base chain has an effect on packets.
    is_blamed: bool,
}

/// Returns the rules and policies that may affect the packets, and the chains without effect.
pub(super) fn walk<'a>(rules: &'a Ruleset, asked: &'a Asked<'a>) -> Found {
    let mut walk = Walk {
        rules,
        asked,
        steps: 0,
        found: Found::default(),
        is_blamed: false,
    };
    let mut blamed = BTreeSet::new();
    for family in [Family::V4, Family::V6] {
        let of_family = |nets: &[IpNet]| -> Rc<[IpNet]> {
            nets.iter()
                .filter(|net| Family::of(net) == family)
                .map(IpNet::trunc)
                .collect()
        };
        let [sources, destinations] = [asked.sources, asked.destinations].map(of_family);
        let reporters = of_family(asked.reporters);
        let are_there = !sources.is_empty() && !destinations.is_empty();
        // The walk handles each kind of packet (state, protocol) by itself, so rules that
        // distinguish the kinds are evaluated exactly.
        let kinds = asked
            .states
            .iter()
            .flat_map(|state| asked.protocols.iter().map(|protocol| (*state, *protocol)));
        let kinds = kinds.map(|(state, protocol)| (Rc::clone(&sources), state, protocol));
        let errors = (!reporters.is_empty()).then(|| (reporters, asked.reports, family.icmp()));
        for (source, state, protocol) in kinds.chain(errors).filter(|_| are_there) {
            walk.steps = 0;
            let destination = Rc::clone(&destinations);
            let mark = asked.mark;
            let devices = asked.devices.clone();
            let packets = Packets {
                family,
                source,
                destination,
                mark,
                state: Some(state),
                protocol,
                devices,
            };
            walk.base_chains(&packets, &mut blamed);
        }
    }
    walk.found.harmless.retain(|chain| !blamed.contains(chain));
    walk.found
}

/// Returns the chain's base; `None` if packets of the family do not traverse the chain.
pub(super) fn passed(name: &ChainName, chain: &Chain, family: Family) -> Option<Base> {
    let is_kube_proxy = name.table == KUBE_PROXY && name.family != TableFamily::Inet;
    chain.base.filter(|base| {
        ![Hook::Input, Hook::Host].contains(&base.hook)
            && family.passes(name.family)
            && !is_kube_proxy
    })
}

/// The position of a rule: its chain, and its number from 1.
#[derive(Clone, Copy)]
struct RulePlace<'a> {
    chain: &'a ChainName,
    number: usize,
}

impl<'a> Walk<'a> {
    fn base_chains(&mut self, packets: &Packets<'a>, blamed: &mut BTreeSet<ChainName>) {
        let rules = self.rules;
        let is_new = packets.state == Some(NEW);
        let bases = rules
            .iter()
            .filter_map(|(name, chain)| Some((passed(name, chain, packets.family)?, name, chain)));
        let mut bases: Vec<_> = bases.filter(|(base, ..)| is_new || !base.is_nat).collect();
        bases.sort_by_key(|(base, ..)| *base);
        let mut packets = packets.clone();
        for (base, name, chain) in bases {
            self.is_blamed = false;
            if base.hook == Hook::Device {
                self.device(name, chain, &packets);
            } else {
                packets.mark = self.base_chain(base, name, chain, &packets);
            }
            if self.is_blamed {
                blamed.insert(name.clone());
            } else if chain.uses > 0 {
                self.found.harmless.insert(name.clone());
            }
        }
    }

    /// Evaluates a chain at a device hook: it is for other devices only, or its rules may have any
    /// effect.
    fn device(&mut self, name: &ChainName, chain: &Chain, packets: &Packets) {
        let is_elsewhere = !chain.devices.is_empty()
            && !chain
                .devices
                .iter()
                .any(|name| packets.devices.incoming.has(name));
        if (chain.uses > 0 || chain.base.is_some_and(|base| base.drops)) && !is_elsewhere {
            self.blame(Obstacle::Device(name.clone(), chain.uses));
        }
    }

    /// Returns the mark of packets that leave the chain. Accepted packets continue with the next
    /// base chain.
    fn base_chain(
        &mut self,
        base: Base,
        name: &ChainName,
        chain: &Chain,
        packets: &Packets<'a>,
    ) -> Mark {
        let is_followed = base.hook != Hook::Prerouting || base.priority > NF_IP_PRI_CONNTRACK;
        let before = Packets {
            state: packets.state.filter(|_| is_followed),
            ..packets.clone()
        };
        let ends = self.chain(name, chain, &before, 1);
        if base.drops && ends.returned.is_some() {
            self.blame(Obstacle::Policy(name.clone()));
        }
        [ends.returned, ends.accepted]
            .into_iter()
            .flatten()
            .reduce(Mark::or)
            .unwrap_or(packets.mark)
    }

    fn chain(
        &mut self,
        name: &ChainName,
        chain: &Chain,
        packets: &Packets<'a>,
        depth: u32,
    ) -> Ends {
        let mut packets = packets.clone();
        let mut ends = Ends::default();
        for (number, rule) in (1..).zip(&chain.rules) {
            self.steps += 1;
            if depth > DEPTH || self.steps > STEPS {
                self.blame(Obstacle::TooMany);
                return Ends {
                    returned: Some(Mark::UNKNOWN),
                    accepted: Some(Mark::UNKNOWN),
                };
            }
            let RuleEnds { next, of_chain } = self.rule(
                RulePlace {
                    chain: name,
                    number,
                },
                rule,
                &packets,
                depth,
            );
            ends = ends.or(of_chain);
            match next {
                Some(rest) => (packets.mark, packets.devices) = (rest.mark, rest.devices),
                None => return ends,
            }
        }
        ends.or(Ends {
            returned: Some(packets.mark),
            accepted: None,
        })
    }

    fn rule(
        &mut self,
        place: RulePlace<'_>,
        rule: &Rule,
        packets: &Packets<'a>,
        depth: u32,
    ) -> RuleEnds<'a> {
        let mut packets = packets.clone();
        let mut next = None;
        for part in rule {
            match part {
                Part::Condition(condition) => {
                    let rest = Rest {
                        mark: packets.mark,
                        devices: packets.devices.without(condition),
                    };
                    match packets.keep(condition) {
                        Share::All => {}
                        Share::Some => next = Rest::either(next, Some(rest)),
                        Share::None => {
                            return RuleEnds {
                                next: Rest::either(next, Some(rest)),
                                ..RuleEnds::default()
                            };
                        }
                    }
                }
                Part::Sender { spoofed: true } if self.asked.knows_senders => {
                    return RuleEnds {
                        next: Rest::either(next, Some(Rest::of(&packets))),
                        ..RuleEnds::default()
                    };
                }
                Part::Sender { spoofed: false } if self.asked.knows_senders => {}
                Part::Sender { .. } | Part::Maybe => {
                    next = Rest::either(next, Some(Rest::of(&packets)))
                }
                Part::SetMark(change) => packets.mark = self.set_mark(place, packets.mark, *change),
                Part::Change(what) => self.report(place, what),
                Part::Refuse(what) => {
                    self.report(place, what);
                    return RuleEnds {
                        next,
                        ..RuleEnds::default()
                    };
                }
                Part::Verdict(verdict) => {
                    let ends = self.verdict(place, verdict, &packets, depth);
                    return RuleEnds {
                        next: Rest::either(next, ends.next),
                        ..ends
                    };
                }
            }
        }
        RuleEnds {
            next: Rest::either(next, Some(Rest::of(&packets))),
            ..RuleEnds::default()
        }
    }

    /// Returns the known bits of the mark after a rule sets it.
    fn set_mark(&mut self, place: RulePlace<'_>, mark: Mark, change: Option<MarkChange>) -> Mark {
        let known = change
            .filter(|_| self.asked.knows_marks)
            .map_or(Mark::UNKNOWN, |change| mark.changed(change));
        if self.asked.heeds_marks && (!self.asked.knows_marks || known != mark) {
            self.report(place, "set the mark");
        }
        known
    }

    fn verdict(
        &mut self,
        place: RulePlace<'_>,
        verdict: &Verdict,
        packets: &Packets<'a>,
        depth: u32,
    ) -> RuleEnds<'a> {
        let mark = Some(packets.mark);
        let (next, of_chain) = match verdict {
            Verdict::Accept => (
                None,
                Ends {
                    accepted: mark,
                    returned: None,
                },
            ),
            Verdict::Return => (
                None,
                Ends {
                    returned: mark,
                    accepted: None,
                },
            ),
            Verdict::Break => (mark, Ends::default()),
            Verdict::Jump(chain) => {
                let ends = self.call(place, chain, packets, depth);
                (
                    ends.returned,
                    Ends {
                        returned: None,
                        ..ends
                    },
                )
            }
            Verdict::Goto(chain) => (None, self.call(place, chain, packets, depth)),
        };
        RuleEnds {
            next: next.map(|mark| Rest {
                mark,
                devices: packets.devices.clone(),
            }),
            of_chain,
        }
    }

    fn call(
        &mut self,
        place: RulePlace<'_>,
        chain: &str,
        packets: &Packets<'a>,
        depth: u32,
    ) -> Ends {
        let name = ChainName {
            chain: chain.to_owned(),
            ..place.chain.clone()
        };
        match self.rules.get(&name) {
            Some(chain) => self.chain(&name, chain, packets, depth + 1),
            None => {
                self.report(
                    place,
                    &format!("call chain {chain}, which is not in the kernel's list"),
                );
                Ends {
                    returned: Some(Mark::UNKNOWN),
                    accepted: Some(Mark::UNKNOWN),
                }
            }
        }
    }

    fn report(&mut self, place: RulePlace<'_>, what: &str) {
        self.blame(Obstacle::Rule {
            chain: place.chain.clone(),
            number: place.number,
            what: what.to_owned(),
        });
    }

    fn blame(&mut self, obstacle: Obstacle) {
        self.found.obstacles.insert(obstacle);
        self.is_blamed = true;
    }
}

impl<'a> Rest<'a> {
    fn of(packets: &Packets<'a>) -> Self {
        Self {
            mark: packets.mark,
            devices: packets.devices.clone(),
        }
    }

    fn either(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        let or = |one: Self, other: Self| Self {
            mark: one.mark.or(other.mark),
            devices: one.devices.or(other.devices),
        };
        one.into_iter().chain(other).reduce(or)
    }
}

impl Ends {
    fn or(self, other: Self) -> Self {
        let either = |one: Option<Mark>, other| one.into_iter().chain(other).reduce(Mark::or);
        Self {
            returned: either(self.returned, other.returned),
            accepted: either(self.accepted, other.accepted),
        }
    }
}
