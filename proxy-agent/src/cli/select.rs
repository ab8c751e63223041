//! Selects the Services that a command shows.

use anyhow::{Result, ensure};
use clap::Args;

use crate::view::ServiceView;

#[derive(Args, Debug)]
pub(super) struct SelectArgs {
    /// Show only this Service; put its namespace and a slash in front if several Services share the name.
    #[arg(value_name = "[NAMESPACE/]NAME")]
    service: Option<String>,
    /// Show only Services of this namespace.
    #[arg(long, short, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Show Services of all namespaces, as without --namespace.
    #[arg(long, short = 'A')]
    all_namespaces: bool,
}

impl SelectArgs {
    /// Keeps the selected Services. Fails if a Service is named and does not exist.
    pub(super) fn select(&self, mut services: Vec<ServiceView>) -> Result<Vec<ServiceView>> {
        let named = self.service.as_deref().map(|name| match name.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, name),
        });
        services.retain(|service| {
            self.namespace.as_ref().is_none_or(|namespace| service.namespace == *namespace)
                && named.is_none_or(|(namespace, name)| {
                    service.name == name && namespace.is_none_or(|namespace| service.namespace == namespace)
                })
        });
        if let Some(name) = &self.service {
            let place =
                self.namespace.as_ref().map(|namespace| format!(" in namespace {namespace}")).unwrap_or_default();
            ensure!(!services.is_empty(), "kpx serves no Service {name}{place}");
        }
        Ok(services)
    }
}
