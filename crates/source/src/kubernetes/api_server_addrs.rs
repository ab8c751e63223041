//! Resolves the addresses of the API server.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::sync::mpsc::Sender;
use tokio::time::{sleep, timeout};
use tracing::debug;

use proxy_core::input::Input;

/// The time between two look-ups: a name may change its addresses without notice.
const INTERVAL: Duration = Duration::from_secs(30);
/// The timeout of a look-up, which delays other requests.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub(super) struct ApiServerAddrs {
    names: Vec<(String, u16)>,
    /// All addresses ever found: connections outlive a name's addresses.
    known: BTreeSet<SocketAddr>,
}

impl ApiServerAddrs {
    pub(super) fn of<'a>(urls: impl Iterator<Item = &'a http::Uri>) -> Self {
        let name = |url: &http::Uri| {
            let usual = if url.scheme_str() == Some("http") {
                80
            } else {
                443
            };
            let host = url
                .host()?
                .trim_start_matches('[')
                .trim_end_matches(']')
                .to_owned();
            Some((host, url.port_u16().unwrap_or(usual)))
        };
        Self {
            names: urls.filter_map(name).collect(),
            known: BTreeSet::new(),
        }
    }

    pub(super) async fn send_new(&mut self, inputs: &Sender<Input>) {
        let before = self.known.len();
        for (host, port) in &self.names {
            match timeout(LOOKUP_TIMEOUT, lookup_host((host.as_str(), *port))).await {
                Ok(Ok(found)) => {
                    self.known
                        .extend(found.map(|at| SocketAddr::new(at.ip().to_canonical(), at.port())));
                }
                // The watches report the unreachable server.
                Ok(Err(error)) => debug!(%error, host, "the API server's name does not resolve"),
                Err(_) => debug!(host, "the API server's name did not resolve in time"),
            }
        }
        if self.known.len() > before {
            // The watches detect a closed channel.
            let _sent = inputs.send(Input::ApiServer(self.known.clone())).await;
        }
    }

    pub(super) async fn watch(&mut self, inputs: &Sender<Input>) -> ! {
        loop {
            sleep(INTERVAL).await;
            self.send_new(inputs).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn all_addresses_of_server_and_proxy_are_sent_once() {
        let urls = [
            "https://127.0.0.1:6443",
            "https://[::1]",
            "http://[::ffff:127.0.0.2]/proxy",
        ];
        let urls: Vec<http::Uri> = urls.iter().map(|url| url.parse().unwrap()).collect();
        let (sender, mut inputs) = mpsc::channel(2);
        let mut api_server_addrs = ApiServerAddrs::of(urls.iter());
        api_server_addrs.send_new(&sender).await;
        let Some(Input::ApiServer(addrs)) = inputs.recv().await else {
            panic!("another input")
        };
        let addrs: Vec<_> = addrs.iter().map(ToString::to_string).collect();
        assert_eq!(addrs, ["127.0.0.1:6443", "127.0.0.2:80", "[::1]:443"]);
        api_server_addrs.send_new(&sender).await;
        assert!(inputs.try_recv().is_err(), "nothing is new");
    }
}
