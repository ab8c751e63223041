//! Requests to the API server, counted as client-go does it.

use http::{Method, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Clones count together.
#[derive(Clone, Debug, Default)]
pub struct Requests(Family<Request, Counter>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    code: String,
    method: String,
    host: String,
}

impl Requests {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let requests = Self::default();
        let help = "Requests to the API server, by HTTP status code, method, and host";
        registry.register("rest_client_requests", help, requests.0.clone());
        requests
    }

    /// `code` is none if there was no answer.
    pub fn count(&self, code: Option<StatusCode>, method: &Method, host: &str) {
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.as_str().to_owned());
        let request = Request { code, method: method.to_string(), host: host.to_owned() };
        self.0.get_or_create(&request).inc();
    }
}
