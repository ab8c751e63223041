//! The start of most tests: a lab with servers on its hosts, and the objects of its cluster.

use anyhow::Result;

use crate::agent::{Agent, Cluster, Service};
use crate::echo::Servers;
use crate::lab::{Lab, Layout};

/// A lab with servers and a cluster, without kpx.
pub struct ServedLab {
    // Both drop before the lab with their namespaces.
    pub cluster: Cluster,
    pub servers: Servers,
    pub lab: Lab,
}

impl ServedLab {
    /// Builds a lab with a folder of manifests.
    pub fn with_manifests(layout: Layout) -> Result<Self> {
        Self::start(layout, Cluster::with_manifests)
    }

    /// Builds a lab with an API server.
    pub fn with_api_server(layout: Layout) -> Result<Self> {
        Self::start(layout, Cluster::with_api_server)
    }

    fn start(layout: Layout, cluster: fn(&Lab) -> Result<Cluster>) -> Result<Self> {
        let lab = Lab::start(layout)?;
        Ok(Self {
            cluster: cluster(&lab)?,
            servers: Servers::start()?,
            lab,
        })
    }

    /// Starts servers on these hosts at a port, for all protocols.
    pub fn serve(self, hosts: &[&str], port: u16) -> Result<Self> {
        hosts
            .iter()
            .try_for_each(|host| self.servers.serve(self.lab.host(host), port))?;
        Ok(self)
    }

    /// Starts servers at a port on all possible backends.
    pub fn serve_all(self, port: u16) -> Result<Self> {
        self.lab
            .backends()
            .try_for_each(|host| self.servers.serve(host, port))?;
        Ok(self)
    }

    /// Creates or replaces a Service with its slices.
    pub fn put(&self, service: &Service) -> Result<()> {
        service
            .objects(&self.lab)
            .iter()
            .try_for_each(|object| self.cluster.put(object))
    }

    /// Deletes a Service and its slices.
    pub fn delete(&self, service: &Service) -> Result<()> {
        service
            .objects(&self.lab)
            .iter()
            .try_for_each(|object| self.cluster.delete(object))
    }

    /// Starts kpx on n1, and waits until it is healthy.
    pub fn kpx(&self, args: &[&str]) -> Result<Agent<'_>> {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        Agent::start_with(&self.lab, &self.lab.n1, self.cluster.source(), &args)
    }
}
