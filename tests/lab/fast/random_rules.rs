//! Random rules arrive while a pod has two connections to one backend: a bypass connection through
//! a Service, and a connection to the backend's own address, which netfilter sees. A rule ends both
//! connections or neither.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::cases;
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::Family;
use testbed::netns::NetNs;

use super::exchange;
use super::fixture::{Fixture, Path, said};

/// The number of rules of each outcome.
const RULES: usize = 3;
/// The timeout of one exchange on a busy machine.
const PATIENCE: Duration = Duration::from_secs(1);

/// A rule that drops some or all packets of a family.
#[derive(Debug)]
struct Rule {
    place: Place,
    family: Family,
    /// The rule follows a rule that accepts established connections.
    is_behind_accept: bool,
    /// Arguments of nft or iptables.
    matches: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// A hook of nftables, and the chain's priority.
    Nft(&'static str, i32),
    /// A table of legacy iptables, and a chain.
    Legacy(&'static str, &'static str),
}

const PLACES: [Place; 8] = [
    Place::Nft("prerouting", -300),
    Place::Nft("prerouting", -150),
    Place::Nft("forward", -10),
    Place::Nft("forward", 0),
    Place::Nft("postrouting", 50),
    Place::Legacy("raw", "PREROUTING"),
    Place::Legacy("mangle", "POSTROUTING"),
    Place::Legacy("filter", "FORWARD"),
];

#[test]
fn random_rules_end_bypass_connections_and_those_of_the_stack_alike() -> Result<()> {
    let mut dice = SmallRng::seed_from_u64(cases::seed()?);
    let fixture = Fixture::new()?;
    fixture.watch()?;
    let agent = fixture.start("auto")?;
    let mut ended = 0;
    let mut went_on = 0;
    while ended < RULES || went_on < RULES {
        let rule = Rule::random(&mut dice, &fixture);
        let ends = meets(&fixture, &agent, &rule).with_context(|| format!("{rule:?}"))?;
        *if ends { &mut ended } else { &mut went_on } += 1;
    }
    agent.stop()
}

/// Adds and removes the rule. Returns true if the rule has ended both connections.
fn meets(fixture: &Fixture, agent: &Agent, rule: &Rule) -> Result<bool> {
    let node = &fixture.lab.n1.host.ns;
    let mut whole = whole(fixture, agent, rule.family)?;
    let backend = SocketAddr::new(
        fixture.lab.host("p1b").addrs.ip(rule.family),
        fixture.port(),
    );
    let client = &fixture.lab.host("p1a").ns;
    let mut plain = said(
        Dial::new(Protocol::Tcp, backend)
            .deadline(PATIENCE)
            .connect(client),
    )?;
    exchange(&mut plain, 2, 100)?;
    rule.come(node)?;
    let came = Instant::now();
    let ends = exchange(&mut plain, 1, 100).is_err();
    let mut goes_on = true;
    while goes_on && came.elapsed() < rule.deadline() {
        goes_on = exchange(&mut whole, 1, 100).is_ok();
    }
    println!("{rule:?} ends connections: {ends}");
    ensure!(
        goes_on != ends,
        "netfilter ends a connection: {ends}; the one past the stack goes on: {goes_on}: {}",
        agent.log()
    );
    rule.go(node)?;
    Ok(ends)
}

/// Opens a bypass connection.
fn whole(fixture: &Fixture, agent: &Agent, family: Family) -> Result<Connection> {
    let mut whole = None;
    // The stack resolves link addresses that the node does not have yet.
    wait_until(DEADLINE, "a connection skips the stack", || {
        let before = fixture.passed(agent)?.forwarded;
        let mut one = fixture.dial_within(PATIENCE, Path::Local, Protocol::Tcp, family)?;
        exchange(&mut one, 5, 100)?;
        let is_whole = fixture.passed(agent)?.forwarded == before;
        whole = is_whole.then_some(one);
        Ok(is_whole)
    })?;
    whole.context("no connection")
}

impl Rule {
    fn random(dice: &mut SmallRng, fixture: &Fixture) -> Self {
        let family = *Family::ALL.choose(dice).expect("there are two");
        let place = *PLACES.choose(dice).expect("there are some");
        let pod = *["p1a", "p1a", "p1b", "p1b", "p1c"]
            .choose(dice)
            .expect("pods");
        let addr = fixture.lab.host(pod).addrs.ip(family);
        let port = *[fixture.port(), fixture.port(), 9]
            .choose(dice)
            .expect("ports");
        let state = *["established", "established", "new", "invalid"]
            .choose(dice)
            .expect("states");
        let end = dice.random::<bool>();
        let mut matches = Vec::new();
        match place {
            Place::Nft(..) => {
                let words = if family == Family::V4 { "ip" } else { "ip6" };
                matches.push(format!(
                    "{words} {} {addr}",
                    if end { "saddr" } else { "daddr" }
                ));
                matches.push(format!(
                    "tcp {} {port}",
                    if end { "sport" } else { "dport" }
                ));
                matches.push(format!("ct state {state}"));
            }
            Place::Legacy(..) => {
                matches.push(format!("{} {addr}", if end { "-s" } else { "-d" }));
                matches.push(format!(
                    "-p tcp {} {port}",
                    if end { "--sport" } else { "--dport" }
                ));
                matches.push(format!("-m conntrack --ctstate {}", state.to_uppercase()));
            }
        }
        // Few rules have all matches.
        matches.retain(|_| dice.random_bool(0.3));
        Self {
            place,
            family,
            is_behind_accept: dice.random_bool(0.2),
            matches,
        }
    }

    /// Returns the time until a bypass packet meets the rule, with a margin. The agent polls legacy
    /// tables once a second.
    fn deadline(&self) -> Duration {
        match self.place {
            Place::Nft(..) => Duration::from_millis(1_300),
            Place::Legacy(..) => Duration::from_millis(2_300),
        }
    }

    fn come(&self, node: &NetNs) -> Result<()> {
        let matches = self.matches.join(" ");
        match self.place {
            Place::Nft(hook, priority) => {
                let accept = if self.is_behind_accept {
                    "ct state established,related accept\n"
                } else {
                    ""
                };
                node.nft(&format!(
                    "table inet drawn {{ chain drawn {{
                        type filter hook {hook} priority {priority}; policy accept
                        {accept}{matches} drop
                    }}; }}"
                ))
            }
            Place::Legacy(table, chain) => {
                if self.is_behind_accept {
                    let accept = "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT";
                    self.legacy(node, table, &format!("-A {chain} {accept}"))?;
                }
                self.legacy(node, table, &format!("-A {chain} {matches} -j DROP"))
            }
        }
    }

    fn go(&self, node: &NetNs) -> Result<()> {
        match self.place {
            Place::Nft(..) => node.nft("delete table inet drawn"),
            Place::Legacy(table, chain) => self.legacy(node, table, &format!("-F {chain}")),
        }
    }

    fn legacy(&self, node: &NetNs, table: &str, words: &str) -> Result<()> {
        let tool = match self.family {
            Family::V4 => "iptables-legacy",
            Family::V6 => "ip6tables-legacy",
        };
        let words = format!("-w -t {table} {words}");
        node.exec(Command::new(tool).args(words.split_whitespace()))?;
        Ok(())
    }
}
