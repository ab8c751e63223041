//! Probes whether the API server answers, on behalf of all waiting watches.
//!
//! client-go only backs off, for up to 30 seconds, so kube-proxy's nodes may detect the end of an
//! outage half a minute late. kpx also sends a cheap request: `GET /readyz`. API Priority and
//! Fairness exempts it, and a starting server refuses it. A node sends up to four probes a second.
//! While no server answers, each probe is a SYN (5,000 nodes: 13,000 packets a second). A server
//! that answers with errors gets at most two probes a second, or as many as Retry-After allows.
//!
//! When the server is back, each watch sends one request, spread over [`SPREAD`]. A server that has
//! the watch's version grants the watch, which is cheap, and about a second later a comparison. An
//! overloaded server refuses (429). From then on the back-off grows as client-go's does, and no
//! probe shortens it.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use http::{Response, StatusCode, header};
use kube::Client;
use kube::client::Body;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::info;

/// The range of the random time between probes, in seconds.
const EVERY: [f32; 2] = [0.25, 0.5];
/// The range while a server answers with errors, in seconds.
const UNWELL: [f32; 2] = [0.5, 0.7];
/// The timeout of a probe. Later probes start before it, because they may succeed earlier.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// The time over which the waiting watches are spread.
const SPREAD: Duration = Duration::from_millis(150);
/// The maximum Retry-After that is obeyed, in seconds.
const RETRY_AFTER: u64 = 30;

/// The state of an outage, shared by the clones of one server.
#[derive(Clone, Debug)]
pub(super) struct Outage {
    suspected: Arc<Notify>,
    end: watch::Sender<()>,
    /// The time until which Retry-After forbids requests.
    quiet: watch::Sender<Instant>,
}

enum Answer {
    Well,
    Unwell,
    None,
}

impl Outage {
    pub(super) fn new() -> Self {
        Self {
            suspected: Arc::default(),
            end: watch::Sender::new(()),
            quiet: watch::Sender::new(Instant::now()),
        }
    }

    /// Waits for `pause`. If the failure `may_be` an outage, the wait ends with the outage, and the
    /// result is true. Retry-After is always obeyed.
    pub(super) async fn wait(&self, pause: Duration, may_be: bool) -> bool {
        let mut end = self.end.subscribe();
        if may_be {
            self.suspected.notify_one();
        }
        let is_over = tokio::select! {
            () = sleep(pause) => false,
            Ok(()) = end.changed(), if may_be => {
                sleep(SPREAD.mul_f32(rand::random())).await;
                true
            }
        };
        self.quiet().await;
        is_over
    }

    /// Probes during each suspected outage.
    pub(super) async fn probe(&self, client: &Client) -> ! {
        loop {
            self.suspected.notified().await;
            let since = Instant::now();
            if self.is_over(client).await {
                info!(
                    seconds = since.elapsed().as_secs_f32(),
                    "the API server answers again"
                );
                self.end.send_replace(());
            }
        }
    }

    /// Waits until the server answers. Returns false if no probe failed: then the request itself is
    /// the cause, and no waiter returns early.
    async fn is_over(&self, client: &Client) -> bool {
        let mut probes = FuturesUnordered::new();
        let mut failed = false;
        let mut next = Instant::now();
        loop {
            tokio::select! {
                Some(answer) = probes.next() => match answer {
                    Ok(Answer::Well) => return failed,
                    Ok(Answer::Unwell) => (failed, next) = (true, next.max(Instant::now() + random(UNWELL))),
                    Ok(Answer::None) | Err(_) => failed = true,
                },
                () = sleep_until(next) => {
                    self.quiet().await;
                    probes.push(timeout(PROBE_TIMEOUT, answer(client)));
                    next = Instant::now() + random(EVERY);
                }
            }
        }
    }

    pub(super) fn heed<B>(&self, response: &Response<B>) {
        let seconds = response
            .headers()
            .get(header::RETRY_AFTER)
            .and_then(|value| value.to_str().ok()?.parse().ok());
        if let Some(seconds) = seconds.filter(|_| response.status().as_u16() >= 400) {
            let wait = Duration::from_secs(RETRY_AFTER.min(seconds))
                .mul_f32(rand::random_range(1.0..1.25));
            self.quiet.send_replace(Instant::now() + wait);
        }
    }

    async fn quiet(&self) {
        let until = *self.quiet.borrow();
        sleep_until(until).await;
    }
}

async fn answer(client: &Client) -> Answer {
    let request = http::Request::get("/readyz")
        .body(Body::empty())
        .expect("a path is a URI");
    match client.send(request).await {
        Ok(response) if response.status() == StatusCode::TOO_MANY_REQUESTS => Answer::Unwell,
        Ok(response) if response.status().is_server_error() => Answer::Unwell,
        // Even a denial shows that the server is back.
        Ok(_) => Answer::Well,
        Err(_) => Answer::None,
    }
}

fn random([least, most]: [f32; 2]) -> Duration {
    Duration::from_secs_f32(rand::random_range(least..=most))
}
