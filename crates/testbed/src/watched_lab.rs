//! A lab with servers on its hosts, and an API server that a test can stop and start.

use std::cell::{Ref, RefCell, RefMut};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use proxy_core::desired::Desired;
use proxy_core::input::{Input, Update};
use proxy_core::tables::Tables;
use serde::de::DeserializeOwned;

use crate::agent::{Object, Service, Source, api_server};
use crate::apiserver::ApiServer;
use crate::echo::Servers;
use crate::lab::{Lab, Layout};

pub struct WatchedLab {
    // Both drop before the lab with their namespaces.
    api: RefCell<ApiServer>,
    _servers: Servers,
    pub kubeconfig: PathBuf,
    pub lab: Lab,
}

impl WatchedLab {
    /// Starts servers at a port on all possible backends, for all protocols.
    pub fn start(port: u16) -> Result<Self> {
        Self::start_in(Layout::Routed, port, Vec::new())
    }

    /// Starts another layout; the API server's certificate includes `sans`.
    pub fn start_in(layout: Layout, port: u16, sans: Vec<String>) -> Result<Self> {
        let lab = Lab::start(layout)?;
        let servers = Servers::start()?;
        lab.backends()
            .try_for_each(|host| servers.serve(host, port))?;
        let api = api_server(&lab, sans)?;
        let kubeconfig = lab.dir().join("kubeconfig");
        api.kubeconfig(&kubeconfig)?;
        Ok(Self {
            api: RefCell::new(api),
            _servers: servers,
            kubeconfig,
            lab,
        })
    }

    pub fn api(&self) -> Ref<'_, ApiServer> {
        self.api.borrow()
    }

    /// Returns the API server, to stop and start it.
    pub fn api_mut(&self) -> RefMut<'_, ApiServer> {
        self.api.borrow_mut()
    }

    pub fn source(&self) -> Source<'_> {
        Source::Kubeconfig(&self.kubeconfig)
    }

    pub fn put(&self, object: &Object) -> Result<()> {
        self.api().apply(&object.0).map(drop)
    }

    /// Creates or replaces a Service with its slices.
    pub fn put_service(&self, service: &Service) -> Result<()> {
        service
            .objects(&self.lab)
            .iter()
            .try_for_each(|object| self.put(object))
    }

    /// Returns the wanted contents of a node's maps, computed from the objects in the API server.
    pub fn wanted(&self, node: &str) -> Result<Tables> {
        let mut desired = Desired::new(node);
        desired.apply(Update::All(self.stored::<core::Service>("services")).into());
        desired.apply(
            Update::All(self.stored::<EndpointSlice>("endpointslices.discovery.k8s.io")).into(),
        );
        let object = self
            .api()
            .get("Node", "", node)
            .context("the node's object")?;
        desired.apply(Input::Node(Update::All(vec![serde_json::from_value(
            object,
        )?])));
        desired.apply(Input::ServiceCidr(Update::All(Vec::new())));
        desired.sync();
        ensure!(desired.is_complete());
        Ok(desired.tables().clone())
    }

    /// Returns the objects that decode.
    fn stored<K: DeserializeOwned>(&self, resource: &str) -> Vec<K> {
        let objects = self.api().list(resource).into_iter();
        objects
            .filter_map(|object| serde_json::from_value(object).ok())
            .collect()
    }
}
