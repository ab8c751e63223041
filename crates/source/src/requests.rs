//! The requests to the API server, counted as client-go does.

use std::sync::LazyLock;

use http::{Method, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// The requests of all clients of this process.
#[derive(Debug, Default)]
pub struct Requests(Family<Request, Counter>);

static OF_PROCESS: LazyLock<Requests> = LazyLock::new(Requests::default);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    code: String,
    method: String,
    host: String,
}

impl Requests {
    pub fn of_process() -> &'static Self {
        &OF_PROCESS
    }

    pub fn register(&self, registry: &mut Registry) {
        let help = "Requests to the API server, by HTTP status code, method, and host";
        registry.register("rest_client_requests", help, self.0.clone());
    }

    /// Counts a request; `code` is `None` if the server did not answer.
    pub fn count(&self, code: Option<StatusCode>, method: &Method, host: &str) {
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.as_str().to_owned());
        let request = Request {
            code,
            method: method.to_string(),
            host: host.to_owned(),
        };
        self.0.get_or_create(&request).inc();
    }
}
