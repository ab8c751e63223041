//! The flags that select the Services of a command.

use anyhow::{Result, ensure};
use clap::Args;

use crate::ServiceView;
use crate::object_name::ServiceName;

/// The namespace of what a command shows.
#[derive(Args, Clone, Debug)]
pub struct NamespaceArgs {
    /// Show only what is of this namespace.
    #[arg(long, short, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    pub namespace: Option<String>,
    /// Show all namespaces, as without --namespace.
    #[arg(long, short = 'A')]
    all_namespaces: bool,
}

impl NamespaceArgs {
    pub fn has(&self, namespace: &str) -> bool {
        self.namespace.as_ref().is_none_or(|wanted| namespace == wanted)
    }
}

#[derive(Args, Debug)]
pub struct SelectArgs {
    /// Show only this Service; put its namespace and a slash in front if several Services share the name.
    #[arg(value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<ServiceName>,
    #[command(flatten)]
    within: NamespaceArgs,
}

impl SelectArgs {
    /// Keeps the selected Services. Fails if a Service is named and `must_exist`, and does not exist.
    pub fn select(&self, mut services: Vec<ServiceView>, must_exist: bool) -> Result<Vec<ServiceView>> {
        let Some(name) = &self.service else {
            services.retain(|service| self.within.has(&service.namespace));
            return Ok(services);
        };
        let name = name.clone().within(self.within.namespace.as_deref());
        let unknown = name.unknown(&services);
        services.retain(|service| self.within.has(&service.namespace) && name.is(service));
        ensure!(!(must_exist && services.is_empty()), unknown);
        Ok(services)
    }
}
