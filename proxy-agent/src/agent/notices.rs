//! Finds properties of the host that kpx cannot honour. `kpx status` shows them; the node stays
//! healthy.

use std::time::Duration;

use proxy_check::{past_ipsec, unheard_probes};
use proxy_net::netfilter::{Netfilter, has_chain};
use proxy_net::xfrm;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

/// kube-proxy's table, and its chain that refuses packets to a ClusterIP without a Service.
const REFUSING: (&str, &str) = ("kube-proxy", "cluster-ips-check");
const STALE: &str = "kube-proxy's nftables rules are on this node: without a running kube-proxy they refuse packets of the node and of hostNetwork pods to newer Services, unless socket load balancing applies (Sockets): run kpx cleanup --kube-proxy";

#[derive(Debug, Default)]
pub(super) struct Notices {
    texts: Vec<String>,
    /// The time of the next check. The first is due at once.
    due: Option<Instant>,
}

impl Notices {
    /// Waits until a check is due and runs it: at once, then once per `period`. `is_probed` is set
    /// if load balancers probe `healthCheckNodePort`s here. Cancel-safe.
    pub(super) async fn next(&mut self, period: Duration, is_probed: bool) {
        if let Some(due) = self.due {
            sleep_until(due).await;
        }
        let mut texts = match xfrm::outgoing_policies().await {
            Ok(policies) => Vec::from_iter(past_ipsec(&policies)),
            Err(error) => vec![format!("the IPsec policies cannot be read: {error:#}")],
        };
        let (table, chain) = REFUSING;
        match has_chain(table, chain).await {
            Ok(true) => texts.push(STALE.to_owned()),
            Ok(false) => {}
            Err(error) => texts.push(format!("kube-proxy's rules cannot be read: {error:#}")),
        }
        if is_probed {
            let closed = Netfilter::read().await.map(|rules| rules.closed_inputs());
            texts.extend(
                closed
                    .unwrap_or_default()
                    .iter()
                    .map(|chain| unheard_probes(chain)),
            );
        }
        for notice in texts.iter().filter(|notice| !self.texts.contains(notice)) {
            warn!(notice, "part of the host's configuration is not obeyed");
        }
        for notice in self.texts.iter().filter(|notice| !texts.contains(notice)) {
            info!(notice, "that part of the configuration was removed");
        }
        self.texts = texts;
        self.due = Some(Instant::now() + period);
    }

    pub(super) fn texts(&self) -> &[String] {
        &self.texts
    }
}
