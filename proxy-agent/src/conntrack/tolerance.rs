//! Answers flows that could skip the stack beside conntrack: makes conntrack tolerate, for each of
//! them, that it misses packets.
//!
//! Conntrack sees one packet in sixteen seconds of such a flow, and its end. What it saw last may
//! look to it like bytes that no side has acknowledged, and it forgets a silent connection soon
//! then. So the agent tells it again, once a flow has fallen silent, and once a minute while a flow
//! goes on.

use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::Proto;
use proxy_common::flow::{AnyKey, Offer, is_for_asker};
use proxy_datapath::{OpenFlow, ToleratedFlows};
use proxy_net::conntrack::Tuple;
use proxy_net::conntrack::tolerate::{self, Followed, Tolerance};
use proxy_net::sysctl;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

/// The time between two looks for questions while some come, and the most questions of each.
const PERIOD: Duration = Duration::from_millis(150);
const QUESTIONS: usize = 256;
/// The time between two looks for questions while none come. A flow asks in each of its seconds.
const REST: Duration = Duration::from_secs(1);
/// The time between two looks at known flows, and the most of them that one looks at.
const LOOK: Duration = Duration::from_secs(1);
const LOOKS: usize = 7_168;
/// The flows that have a yes at one time. The programs' map has room for more.
const FLOWS_MAX: usize = 60_000;
/// Those of them that clients outside may have: any host can borrow addresses for more.
const FAR_MAX: usize = FLOWS_MAX / 2;

/// The seconds after which a flow skips the stack that was told so.
const BEGIN_SECS: u32 = 3;
/// The seconds of silence after which nothing of a flow is on its way.
const SILENCE_SECS: u32 = 5;
/// The seconds between two words about a flow that goes on.
const AGAIN_SECS: u32 = 60;
/// The longest time in seconds for which conntrack is to keep a silent connection: longer than the
/// programs keep the flow.
const KEPT_SECS: u32 = 8_200;
const ESTABLISHED: &str = "netfilter/nf_conntrack_tcp_timeout_established";

/// A flow that has a yes.
struct Known {
    flow: OpenFlow,
    /// When conntrack was told last, and whether that was before the flow skipped the stack.
    told_secs: u32,
    is_new: bool,
}

/// The questions that wait, the latest of each flow. A flow asks every second, and only an answer
/// to a question of this second or the last one is for it.
#[derive(Default)]
struct Waiting {
    offers: HashMap<AnyKey, Offer>,
    order: VecDeque<AnyKey>,
}

/// The answers of the agent.
struct Answers {
    flows: ToleratedFlows,
    conntrack: Tolerance,
    waiting: Waiting,
    known: HashMap<AnyKey, Known>,
    /// The number of those whose client is outside.
    far: usize,
    /// The known flows in the order in which they are looked at.
    order: VecDeque<AnyKey>,
}

/// Answers until the maps fail. Without a socket for conntrack no flow gets an answer, and all of
/// them stay on the stack.
pub async fn answer(flows: ToleratedFlows) -> Result<()> {
    let (connection, conntrack) = match tolerate::connect() {
        Ok(socket) => socket,
        Err(error) => {
            warn!(
                error = format!("{error:#}"),
                "open connections take the stack: no netlink socket for conntrack"
            );
            return pending().await;
        }
    };
    let waiting = Waiting::default();
    let known = HashMap::new();
    let order = VecDeque::new();
    let mut answers = Answers {
        flows,
        conntrack,
        waiting,
        known,
        far: 0,
        order,
    };
    let answer = async {
        let mut look_at = Instant::now();
        loop {
            let are_asked = answers.answer_questions().await?;
            if look_at <= Instant::now() {
                answers.look_at_known().await?;
                look_at = Instant::now() + LOOK;
            }
            sleep(if are_asked { PERIOD } else { REST }).await;
        }
    };
    tokio::select! {
        result = answer => result,
        () = connection => bail!("the netlink socket for conntrack has failed"),
    }
}

impl Answers {
    /// Answers the questions that have come. Returns true if more may come soon.
    async fn answer_questions(&mut self) -> Result<bool> {
        while self.waiting.has_room()
            && let Some(offer) = self.flows.offered()?
        {
            self.waiting.put(offer);
        }
        let are_asked = !self.waiting.order.is_empty();
        let now_secs = now_secs()?;
        for _ in 0..QUESTIONS {
            let Some(offer) = self.waiting.next(now_secs) else {
                break;
            };
            let Some(flow) = self.flows.open_flow(&offer.key)? else {
                continue;
            };
            let Some(followed) =
                followed(&flow).filter(|_| has_room(self.known.len(), self.far, flow.is_far))
            else {
                continue;
            };
            match self.conntrack.ask(&followed).await {
                Ok(true) => self.agree(&offer, flow),
                Ok(false) => {}
                Err(error) => {
                    debug!(%error, ?followed, "conntrack does not tolerate that it misses packets")
                }
            }
        }
        Ok(are_asked)
    }

    fn agree(&mut self, offer: &Offer, flow: OpenFlow) {
        // Without a row the flow asks again.
        if let Err(error) = self.flows.tolerate(offer) {
            debug!(error = format!("{error:#}"), "a flow gets no answer");
            return;
        }
        let known = Known {
            flow,
            told_secs: offer.secs,
            is_new: true,
        };
        self.far += usize::from(flow.is_far);
        match self.known.insert(offer.key, known) {
            Some(before) => self.far -= usize::from(before.flow.is_far),
            None => self.order.push_back(offer.key),
        }
    }

    /// Looks at a part of the known flows: at each of them every other second, if there are not too
    /// many.
    async fn look_at_known(&mut self) -> Result<()> {
        let now_secs = now_secs()?;
        for _ in 0..LOOKS.min(self.order.len().div_ceil(2)) {
            let Some(key) = self.order.pop_front() else {
                break;
            };
            if self.is_kept(&key, now_secs).await? {
                self.order.push_back(key);
            } else {
                let gone = self.known.remove(&key);
                self.far -= usize::from(gone.is_some_and(|gone| gone.flow.is_far));
                self.flows.forget(&key)?;
            }
        }
        Ok(())
    }

    async fn is_kept(&mut self, key: &AnyKey, now_secs: u32) -> Result<bool> {
        let Some(known) = self.known.get_mut(key) else {
            return Ok(false);
        };
        let Some(flow) = self.flows.open_flow(key)? else {
            return Ok(false);
        };
        let identity = |flow: &OpenFlow| (flow.client, flow.backend, flow.is_far);
        if identity(&flow) != identity(&known.flow) {
            return Ok(false);
        }
        known.flow = flow;
        if !known.is_due(now_secs) {
            return Ok(true);
        }
        (known.told_secs, known.is_new) = (now_secs, false);
        let Some(followed) = followed(&flow) else {
            return Ok(false);
        };
        let established = sysctl::read(ESTABLISHED)?
            .and_then(|secs| secs.parse().ok())
            .unwrap_or(KEPT_SECS);
        let renewed = self
            .conntrack
            .renew(&followed, KEPT_SECS.min(established))
            .await;
        Ok(renewed
            .inspect_err(
                |error| debug!(%error, ?followed, "conntrack entries are not changed again"),
            )
            .unwrap_or(false))
    }
}

impl Waiting {
    fn has_room(&self) -> bool {
        self.order.len() < FLOWS_MAX
    }

    fn put(&mut self, offer: Offer) {
        if self.offers.insert(offer.key, offer).is_none() {
            self.order.push_back(offer.key);
        }
    }

    /// Returns the question of the flow that has waited longest, of those that still ask.
    fn next(&mut self, now_secs: u32) -> Option<Offer> {
        loop {
            let offer = self.offers.remove(&self.order.pop_front()?)?;
            if is_for_asker(offer.secs, now_secs) {
                return Some(offer);
            }
        }
    }
}

impl Known {
    /// Returns true if conntrack has seen packets of the flow since it was told, and the flow is
    /// silent, or goes on for long.
    fn is_due(&self, now_secs: u32) -> bool {
        let told_ago = now_secs.saturating_sub(self.told_secs);
        let is_silent = now_secs.saturating_sub(self.flow.last_secs) >= SILENCE_SECS;
        let goes_on = self.flow.last_secs >= self.told_secs;
        self.is_new && told_ago >= BEGIN_SECS || goes_on && (is_silent || told_ago >= AGAIN_SECS)
    }
}

/// Returns true if one flow more may get a yes beside so many, `far` of them from outside.
const fn has_room(known: usize, far: usize, is_far: bool) -> bool {
    known < FLOWS_MAX && (!is_far || far < FAR_MAX)
}

/// Returns the connection as conntrack knows it.
fn followed(flow: &OpenFlow) -> Option<Followed> {
    let original = Tuple {
        src: flow.client,
        dst: flow.backend,
    };
    match flow.proto {
        Proto::TCP => Some(Followed {
            original,
            is_tcp: true,
        }),
        Proto::UDP => Some(Followed {
            original,
            is_tcp: false,
        }),
        _ => None,
    }
}

/// Returns the time of the programs' clock.
fn now_secs() -> Result<u32> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).context("read the time since boot")?;
    u32::try_from(now.tv_sec()).context("the time since boot")
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proxy_common::addr::{Addr4, Port, SockAddr};
    use proxy_common::flow::{FlowKey, Hook};

    use super::*;

    // More flows than get their answers in two seconds: each asks in every second until it has one.
    #[test]
    fn flows_that_ask_all_at_once_get_answers_that_are_for_them() {
        const LOOKS_A_SECOND: usize = 6;
        let at =
            |nth: u16| SockAddr::new(Addr4::from(Ipv4Addr::new(10, 244, 1, 2)), Port::new(nth));
        let key = |nth| AnyKey::of_v4(&FlowKey::new(Hook::INGRESS, Proto::UDP, at(nth), at(53)));
        let mut asking: Vec<_> = (0..6_000).map(key).collect();
        let mut waiting = Waiting::default();
        let mut rows = HashMap::new();
        for now_secs in 100..106 {
            asking.retain(|key| {
                !rows
                    .get(key)
                    .is_some_and(|secs| is_for_asker(*secs, now_secs))
            });
            asking
                .iter()
                .for_each(|key| waiting.put(Offer::new(*key, now_secs)));
            let answers = (0..LOOKS_A_SECOND * QUESTIONS).map_while(|_| waiting.next(now_secs));
            rows.extend(answers.map(|offer| (offer.key, offer.secs)));
        }
        assert_eq!(asking.len(), 0, "flows still ask");
        waiting.put(Offer::new(key(1), 100));
        assert_eq!(waiting.next(106), None, "the flow asks no more");
    }

    #[test]
    fn clients_outside_leave_room_to_those_of_pods() {
        assert!(has_room(FAR_MAX, FAR_MAX - 1, true) && !has_room(FAR_MAX, FAR_MAX, true));
        assert!(has_room(FLOWS_MAX - 1, FAR_MAX, false) && !has_room(FLOWS_MAX, 0, false));
    }

    #[test]
    fn conntrack_is_told_again_when_a_flow_begins_to_skip_falls_silent_or_goes_on() {
        let at = "10.244.1.2:1".parse().unwrap();
        let due = |last_secs, told_secs, is_new, now_secs| {
            let flow = OpenFlow {
                client: at,
                backend: at,
                proto: Proto::TCP,
                is_far: false,
                last_secs,
            };
            Known {
                flow,
                told_secs,
                is_new,
            }
            .is_due(now_secs)
        };
        assert!(!due(102, 100, true, 102), "it may take the stack yet");
        assert!(due(103, 100, true, 103), "it has begun to skip the stack");
        assert!(!due(120, 100, false, 121), "it goes on");
        assert!(due(120, 100, false, 125), "it is silent");
        assert!(
            !due(120, 125, false, 500),
            "it is silent, and conntrack knows"
        );
        assert!(due(159, 100, false, 160), "it goes on for long");
    }
}
