//! The objects of a watch, in the API's terms.

use std::time::Duration;

use kube::Resource as _;
use kube::api::{ListParams, WatchParams};
use kube::core::Request;
use kube::core::request::Error;
use proxy_core::compact::Compact;

const PAGE_SIZE: u32 = 1000;
/// The timeout of a page of a list. API servers end a page after 60 s.
pub(super) const PAGE: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub(super) struct Selection {
    pub(super) list: ListParams,
    pub(super) watch: WatchParams,
    /// Set to request only the objects' metadata.
    is_of_metadata: bool,
    /// `None`: all namespaces.
    namespace: Option<&'static str>,
}

impl Default for Selection {
    /// Every object of a kind, listed consistently.
    fn default() -> Self {
        Self {
            list: ListParams::default().limit(PAGE_SIZE),
            // Random, so that nodes do not reconnect together.
            watch: WatchParams::default().timeout(rand::random_range(230..=290)),
            is_of_metadata: false,
            namespace: None,
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

    /// Lists from the server's cache, in one piece: the cache has no index of pages at a version.
    pub(super) fn cached(self) -> Self {
        let list = ListParams {
            limit: None,
            ..self.list.match_any()
        };
        Self { list, ..self }
    }

    pub(super) fn in_namespace(self, name: &'static str) -> Self {
        Self {
            namespace: Some(name),
            ..self
        }
    }

    pub(super) fn named(self, name: &str) -> Self {
        self.fields(&format!("metadata.name={name}"))
    }

    /// Selects the metadata of the same objects, no older than `version`.
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
            namespace: self.namespace,
        }
    }

    fn request<K: Compact>(&self) -> Request {
        Request::new(K::Object::url_path(&(), self.namespace))
    }

    pub(super) fn list_request<K: Compact>(
        &self,
        params: &ListParams,
    ) -> Result<http::Request<Vec<u8>>, Error> {
        let request = self.request::<K>();
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
        let request = self.request::<K>();
        if self.is_of_metadata {
            request.watch_metadata(params, version)
        } else {
            request.watch(params, version)
        }
    }
}
