//! Finds properties of the host that kpx cannot honour. The node stays healthy, and `kpx status` shows them.

use std::time::Duration;

use proxy_net::xfrm::{self, Policy};
use tokio::time::Instant;
use tracing::{info, warn};

#[derive(Debug, Default)]
pub(super) struct Notices {
    texts: Vec<String>,
    looked: Option<Instant>,
}

impl Notices {
    /// Looks for notices, at most once in `period`.
    pub(super) async fn look(&mut self, period: Duration) {
        if self.looked.is_some_and(|looked| looked.elapsed() < period) {
            return;
        }
        self.looked = Some(Instant::now());
        let texts = match xfrm::outgoing_policies().await {
            Ok(policies) => Vec::from_iter(past_ipsec(&policies)),
            Err(error) => vec![format!("the IPsec policies are not known: {error:#}")],
        };
        for notice in texts.iter().filter(|notice| !self.texts.contains(notice)) {
            warn!(notice, "part of the host's configuration is not obeyed");
        }
        for notice in self.texts.iter().filter(|notice| !texts.contains(notice)) {
            info!(notice, "that part of the configuration is gone");
        }
        self.texts = texts;
    }

    pub(super) fn texts(&self) -> &[String] {
        &self.texts
    }
}

/// Describes the IPsec policies that the host's packets to Services pass by. Returns None without policies.
pub fn past_ipsec(policies: &[Policy]) -> Option<String> {
    let first = policies.first()?;
    let number = policies.len();
    Some(format!(
        "IPsec policies do not hold for the host's packets to Services; this host has {number}, first {first}"
    ))
}
