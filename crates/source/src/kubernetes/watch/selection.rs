//! The objects that a watch is for, in the words of the API.

use std::time::Duration;

use kube::Resource as _;
use kube::api::{ListParams, WatchParams};
use kube::core::Request;
use kube::core::request::Error;
use proxy_core::compact::Compact;

const PAGE_SIZE: u32 = 1000;
/// For one page of a list. API servers give themselves 60 seconds.
pub(super) const PAGE: Duration = Duration::from_secs(120);

/// The parameters of requests for one kind of object.
#[derive(Clone)]
pub(super) struct Selection {
    pub(super) list: ListParams,
    pub(super) watch: WatchParams,
    /// Set to ask for the objects' metadata alone.
    is_of_metadata: bool,
}

impl Default for Selection {
    /// Everything of a kind, listed consistently.
    fn default() -> Self {
        Self {
            list: ListParams::default().limit(PAGE_SIZE),
            // The server ends watches at different times, so that not all nodes come back at once.
            watch: WatchParams::default().timeout(rand::random_range(230..=290)),
            is_of_metadata: false,
        }
    }
}

impl Selection {
    pub(super) fn labels(self, selector: &str) -> Self {
        Self {
            list: self.list.labels(selector),
            watch: self.watch.labels(selector),
            ..self
        }
    }

    pub(super) fn fields(self, selector: &str) -> Self {
        Self {
            list: self.list.fields(selector),
            watch: self.watch.fields(selector),
            ..self
        }
    }

    /// Lists as the server's cache has it, in one piece: servers have no index of what is older or
    /// newer than that.
    pub(super) fn cached(self) -> Self {
        let list = ListParams {
            limit: None,
            ..self.list.match_any()
        };
        Self { list, ..self }
    }

    /// The one object of that name.
    pub(super) fn named(self, name: &str) -> Self {
        self.fields(&format!("metadata.name={name}"))
    }

    /// The metadata of the same objects, no older than `version`.
    pub(super) fn metadata_at(&self, version: &str) -> Self {
        let is_cached = self.list.resource_version.is_some();
        let list = if is_cached {
            self.list.clone().at(version)
        } else {
            self.list.clone()
        };
        Self {
            list,
            watch: self.watch.clone(),
            is_of_metadata: true,
        }
    }

    pub(super) fn list_request<K: Compact>(
        &self,
        params: &ListParams,
    ) -> Result<http::Request<Vec<u8>>, Error> {
        let request = request::<K>();
        if self.is_of_metadata {
            request.list_metadata(params)
        } else {
            request.list(params)
        }
    }

    pub(super) fn watch_request<K: Compact>(
        &self,
        params: &WatchParams,
        version: &str,
    ) -> Result<http::Request<Vec<u8>>, Error> {
        let request = request::<K>();
        if self.is_of_metadata {
            request.watch_metadata(params, version)
        } else {
            request.watch(params, version)
        }
    }
}

fn request<K: Compact>() -> Request {
    Request::new(K::Object::url_path(&(), None))
}
