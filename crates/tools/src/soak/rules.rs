//! Rules and filters of others come and go, and with them the way past the stack, while connections
//! are open and opened.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, Service, wait_until};
use testbed::echo::{Connection, Dial, Protocol, Servers};
use testbed::lab::{Dual, Family, Host};

use super::Scale;
use super::fixture::{BACKENDS, CLIENT, Fixture};
use super::kpx::AnyAgent;
use super::report::{Report, milliseconds};

/// The port that bans forbid to the client. Nothing else is dialled there.
const BANNED_PORT: u16 = 8082;
/// The backend at that port, beside the client.
const SERVER: &str = "p1b";
/// For one dial, so that a ban shows soon.
const ANSWER: Duration = Duration::from_millis(150);
/// The time within which new connections meet a ban: with an agent, and without one. A dial may
/// have begun just before.
const PROMPT: Duration = Duration::from_secs(1);
const PROMPT_ALONE: Duration = Duration::from_millis(3_000 + 150);

/// The longest time for which a kept connection may stand still, and how often each is used beside
/// a ban.
const STALL: Duration = Duration::from_secs(1);
const EXCHANGES: u32 = 20;

/// A way in which another program forbids the client its connections to [`BANNED_PORT`], and may
/// look at all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ban {
    /// By a rule that sees addresses and ports alone.
    Rule,
    /// By rules of which others drop what conntrack has not seen from its start.
    Stateful,
    /// By a tc filter, where packets to the backend leave ...
    FilterThere,
    /// ... and where its packets come in.
    FilterBack,
    /// By a rule that comes when no agent runs.
    Alone,
}

const BANS: [Ban; 5] = [
    Ban::Rule,
    Ban::FilterThere,
    Ban::Stateful,
    Ban::FilterBack,
    Ban::Alone,
];

/// The longest time until each ban was in force, and until it was no more.
#[derive(Clone, Copy, Default)]
struct Times {
    forbidden: Duration,
    allowed: Duration,
}

/// Bans come and go, as often as the scale says. Each of them acts on new connections soon, and on
/// no others.
pub fn rules(scale: Scale) -> Result<Report> {
    let fixture = Fixture::build(scale.place)?;
    let servers = Servers::start()?;
    servers.serve(fixture.lab.host(SERVER), BANNED_PORT)?;
    let banned = Service::new("banned", 24, &[SERVER], BANNED_PORT);
    banned
        .objects(&fixture.lab)
        .iter()
        .try_for_each(|object| fixture.cluster.put(object))?;
    let mut agent = fixture.kpx(&[])?;
    let site = Site {
        fixture: &fixture,
        banned,
    };
    site.until_bypass(&agent)?;
    let load = fixture.load(scale.rate, |exchange| BACKENDS.contains(&exchange.backend))?;
    let started = Instant::now();
    let mut rounds = 0;
    let mut times = [Times::default(); BANS.len()];
    while rounds < scale.rounds || started.elapsed() < scale.at_least {
        let nth = rounds as usize % BANS.len();
        let ban = BANS[nth];
        let mut kept = site.dial_kept()?;
        let until = if ban == Ban::Alone {
            agent.stop()?;
            let until = site.come_and_go(ban, &mut kept)?;
            agent = fixture.kpx(&[])?;
            until
        } else {
            site.come_and_go(ban, &mut kept)?
        };
        site.until_bypass(&agent)?;
        times[nth] = times[nth].max(until);
        rounds += 1;
    }
    let lasted = started.elapsed();
    let seen = load.finish()?;
    agent.stop()?;
    let what = format!("rules and filters came and went {rounds} times in {lasted:.1?}");
    let mut report = Report::new("rules", what, &seen);
    for (ban, times) in BANS.iter().zip(times).take(rounds as usize) {
        let prompt = if *ban == Ban::Alone {
            PROMPT_ALONE
        } else {
            PROMPT
        };
        let [forbidden, allowed] = [times.forbidden, times.allowed].map(milliseconds);
        report.note(format!("{ban:?}: new connections met it after {forbidden} at worst, and its end after {allowed}"));
        report.in_time(
            times.forbidden <= prompt,
            format!("{ban:?} was not met for {forbidden}"),
        );
    }
    Ok(report)
}

/// The place where bans come and go.
struct Site<'a> {
    fixture: &'a Fixture,
    banned: Service,
}

impl Site<'_> {
    /// Opens connections past the stack, one of each family. Conntrack meets them under the first
    /// rule if the programs let it.
    fn dial_kept(&self) -> Result<Vec<Connection>> {
        let dial = |family| {
            let dial =
                Dial::new(Protocol::Tcp, self.fixture.streams[0].frontend(family)).deadline(STALL);
            dial.connect(&self.client().ns)
                .with_context(|| format!("keep a connection over {family}"))
        };
        Family::ALL.into_iter().map(dial).collect()
    }

    fn come_and_go(&self, ban: Ban, kept: &mut [Connection]) -> Result<Times> {
        let come = Instant::now();
        self.set(ban, true)?;
        let forbidden = self.until(&format!("{ban:?} is met"), ban, false)? - come;
        // A connection that only waits for the ban to go would not.
        for connection in kept {
            for _ in 0..EXCHANGES {
                connection
                    .exchange(b"still there?")
                    .with_context(|| format!("a kept connection beside {ban:?}"))?;
            }
        }
        let gone = Instant::now();
        self.set(ban, false)?;
        Ok(Times {
            forbidden,
            allowed: self.until(&format!("{ban:?} is met no more"), ban, true)? - gone,
        })
    }

    /// Waits until new connections to the banned port are answered in each family that a ban is
    /// for, or in none. Returns the time of the dial that shows it.
    fn until(&self, what: &str, ban: Ban, answers: bool) -> Result<Instant> {
        let families = if matches!(ban, Ban::FilterThere | Ban::FilterBack) {
            &Family::ALL[..1]
        } else {
            &Family::ALL
        };
        let mut began = Instant::now();
        for family in families {
            wait_until(DEADLINE, what, || {
                began = Instant::now();
                Ok(self.dials(*family) == answers)
            })?;
        }
        Ok(began)
    }

    fn dials(&self, family: Family) -> bool {
        let dial = Dial::new(Protocol::Tcp, self.banned.frontend(family)).deadline(ANSWER);
        dial.exchange(&self.client().ns, b"?").is_ok()
    }

    fn client(&self) -> &Host {
        self.fixture.lab.host(CLIENT)
    }

    /// Waits until connections skip the stack again, with the link addresses of both pods known.
    fn until_bypass(&self, agent: &AnyAgent) -> Result<()> {
        let fast = || -> Result<u64> {
            agent.status()?["events"]["fast_local"]
                .as_u64()
                .context("no event fast_local")
        };
        wait_until(DEADLINE, "whole connections skip the stack", || {
            let before = fast()?;
            ensure!(
                Family::ALL.into_iter().all(|family| self.dials(family)),
                "a connection that nothing forbids"
            );
            Ok(agent.status()?["options"]["fastPath"]
                .as_str()
                .is_some_and(|text| text.contains("; whole connections"))
                && fast()? > before)
        })
    }

    fn set(&self, ban: Ban, is_there: bool) -> Result<()> {
        let node = &self.fixture.lab.n1.host.ns;
        let (hook, at) = match ban {
            Ban::Rule | Ban::Stateful | Ban::Alone if is_there => {
                return node.nft(&table(ban, self.client().addrs));
            }
            Ban::Rule | Ban::Stateful | Ban::Alone => return node.nft("delete table inet bans"),
            Ban::FilterThere => ("egress", 36),
            Ban::FilterBack => ("ingress", 34),
        };
        let tc = |words: &str, more: &[&str]| {
            node.exec(Command::new("tc").args(words.split(' ')).args(more))
        };
        let filter = format!("dev {SERVER} {hook} prio 5");
        if !is_there {
            return tc(&format!("filter del {filter}"), &[]).map(drop);
        }
        // Where kpx attaches by TCX, the device has no such qdisc.
        let _there = tc(&format!("qdisc add dev {SERVER} clsact"), &[]);
        // In the words of classic BPF: drops TCP over IPv4 with this port there, and lets all else
        // go on.
        let program = format!(
            "6,48 0 0 23,21 0 3 6,40 0 0 {at},21 0 1 {BANNED_PORT},6 0 0 2,6 0 0 {}",
            u32::MAX
        );
        tc(
            &format!("filter add {filter}"),
            &["bpf", "da", "bytecode", &program],
        )
        .map(drop)
    }
}

/// Rules at FORWARD that forbid a client the banned port.
fn table(ban: Ban, client: Dual) -> String {
    let others = match ban {
        Ban::Stateful => "ct state invalid drop\ntcp flags & (syn | ack) == ack ct state new drop",
        _ => "counter",
    };
    format!(
        "table inet bans {{ chain forward {{ type filter hook forward priority filter; policy accept;
           {others}
           ip saddr {} tcp dport {BANNED_PORT} drop
           ip6 saddr {} tcp dport {BANNED_PORT} drop
         }}
         }}",
        client.v4, client.v6
    )
}

impl Times {
    fn max(self, other: Self) -> Self {
        Self {
            forbidden: self.forbidden.max(other.forbidden),
            allowed: self.allowed.max(other.allowed),
        }
    }
}
