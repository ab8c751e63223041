//! The objects that a watch is for, in the words of the API.

use std::time::Duration;

use kube::Resource as _;
use kube::api::{ListParams, WatchParams};
use kube::core::Request;
use proxy_core::compact::Compact;

const PAGE_SIZE: u32 = 1000;
/// For one page of a list. API servers give themselves 60 seconds.
pub(super) const PAGE: Duration = Duration::from_secs(120);

/// The parameters of requests for one kind of object.
pub(super) struct Selection {
    pub(super) list: ListParams,
    pub(super) watch: WatchParams,
    /// For as little as tells the server's version. Of selectors only a name: for others servers go through all objects.
    pub(super) probe: ListParams,
}

impl Default for Selection {
    /// Everything of a kind, listed consistently.
    fn default() -> Self {
        Self {
            list: ListParams::default().limit(PAGE_SIZE),
            // The server ends watches at different times, so that not all nodes come back at once.
            watch: WatchParams::default().timeout(rand::random_range(230..=290)),
            probe: ListParams::default().limit(1),
        }
    }
}

impl Selection {
    pub(super) fn labels(self, selector: &str) -> Self {
        Self { list: self.list.labels(selector), watch: self.watch.labels(selector), ..self }
    }

    pub(super) fn fields(self, selector: &str) -> Self {
        Self { list: self.list.fields(selector), watch: self.watch.fields(selector), ..self }
    }

    /// Lists as the server's cache has it, in one piece: servers have no index of what is older or newer than that.
    pub(super) fn cached(self) -> Self {
        let list = ListParams { limit: None, ..self.list.match_any() };
        Self { list, ..self }
    }

    /// The one object of that name.
    pub(super) fn named(self, name: &str) -> Self {
        let selector = format!("metadata.name={name}");
        let probe = self.probe.clone().fields(&selector);
        Self { probe, ..self.fields(&selector) }
    }
}

/// A request for objects of a kind.
pub(super) fn request<K: Compact>() -> Request {
    Request::new(K::Object::url_path(&(), None))
}
