//! Makes conntrack entries liberal for flows that bypass the network stack, one flow at a time.
//!
//! Conntrack sees one packet in sixteen seconds of such a flow, and the flow's end. The last packet
//! may look unacknowledged, and conntrack then soon drops the entry of a silent flow. The agent
//! therefore renews the entry when a flow falls silent, and once a minute while the flow continues.

use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::Proto;
use proxy_common::flow::{AnyKey, Offer, is_for_asker};
use proxy_datapath::{LiberalFlows, OpenFlow};
use proxy_net::conntrack::Tuple;
use proxy_net::conntrack::liberal::{self, Conntrack, Followed};
use proxy_net::sysctl;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

/// The time between two reads of requests while requests come, and the maximum number of answers
/// per read.
const PERIOD: Duration = Duration::from_millis(150);
const QUESTIONS: usize = 256;
/// The time between two reads while no requests come. A flow repeats its request every second.
const REST: Duration = Duration::from_secs(1);
/// The time between two checks of liberal flows, and the maximum number of flows in one check.
const LOOK: Duration = Duration::from_secs(1);
const LOOKS: usize = 7_168;
/// The maximum number of liberal flows. The programs' map has space for more.
const FLOWS_MAX: usize = 60_000;
/// The maximum number of liberal flows with clients outside, of which one host can spoof any
/// number.
const FAR_MAX: usize = FLOWS_MAX / 2;

/// The seconds from the answer until a flow bypasses the stack.
const BEGIN_SECS: u32 = 3;
/// The seconds of silence after which no packet of a flow is in transit.
const SILENCE_SECS: u32 = 5;
/// The seconds between two renewals of a flow that continues.
const AGAIN_SECS: u32 = 60;
/// The maximum timeout in seconds of a silent conntrack entry: longer than the programs keep the
/// flow.
const KEPT_SECS: u32 = 8_200;
const ESTABLISHED: &str = "netfilter/nf_conntrack_tcp_timeout_established";

struct Known {
    flow: OpenFlow,
    /// The time of the last change of the conntrack entry in seconds since boot, and whether it was
    /// the first.
    told_secs: u32,
    is_new: bool,
}

/// The pending requests, the latest of each flow. A flow repeats its request every second, and
/// accepts an answer only to a request of this second or the last.
#[derive(Default)]
struct Waiting {
    offers: HashMap<AnyKey, Offer>,
    order: VecDeque<AnyKey>,
}

struct Answers {
    flows: LiberalFlows,
    conntrack: Conntrack,
    waiting: Waiting,
    known: HashMap<AnyKey, Known>,
    /// The number of liberal flows with a client outside.
    far: usize,
    /// The liberal flows in the order of their checks.
    order: VecDeque<AnyKey>,
}

/// Answers until the maps fail. Without a conntrack socket all flows stay on the stack.
pub async fn answer(flows: LiberalFlows) -> Result<()> {
    let (connection, conntrack) = match liberal::connect() {
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
    /// Answers pending requests. Returns true if there were any.
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
        // A flow whose row cannot be written repeats its request.
        if let Err(error) = self.flows.make_liberal(offer) {
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

    /// Checks half of the liberal flows, at most [`LOOKS`].
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

    /// Returns the oldest request that its flow still waits for.
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
    /// Returns true if the entry needs a renewal: once when the flow begins to bypass the stack;
    /// and, if packets came since the last renewal, when the flow is silent or the last renewal is
    /// old.
    fn is_due(&self, now_secs: u32) -> bool {
        let told_ago = now_secs.saturating_sub(self.told_secs);
        let is_silent = now_secs.saturating_sub(self.flow.last_secs) >= SILENCE_SECS;
        let goes_on = self.flow.last_secs >= self.told_secs;
        self.is_new && told_ago >= BEGIN_SECS || goes_on && (is_silent || told_ago >= AGAIN_SECS)
    }
}

/// Returns true if one more flow may become liberal. `known` flows are liberal, and `far` of these
/// have clients outside.
const fn has_room(known: usize, far: usize, is_far: bool) -> bool {
    known < FLOWS_MAX && (!is_far || far < FAR_MAX)
}

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

/// Returns the time in seconds of the programs' clock (`CLOCK_BOOTTIME`).
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

    // There are more flows than two seconds of answers. Each flow repeats its request every second
    // until an answer comes.
    #[test]
    fn flows_that_ask_all_at_once_get_answers_that_are_for_them() {
        const LOOKS_A_SECOND: usize = 6;
        let at =
            |nth: u16| SockAddr::new(Addr4::from(Ipv4Addr::new(10, 244, 1, 2)), Port::new(nth));
        let key = |nth| AnyKey::of(&FlowKey::new(Hook::INGRESS, Proto::UDP, at(nth), at(53)));
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
