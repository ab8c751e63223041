//! Which Services a command is about.

use anyhow::{Result, ensure};
use clap::Args;

use crate::view::ServiceView;

#[derive(Args, Debug)]
pub(super) struct SelectArgs {
    /// Only of this Service; with its namespace in front of a slash if others have one of that name.
    #[arg(value_name = "[NAMESPACE/]NAME")]
    service: Option<String>,
    /// Only of this namespace.
    #[arg(long, short, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Of all namespaces, as without --namespace.
    #[arg(long, short = 'A')]
    all_namespaces: bool,
}

impl SelectArgs {
    /// An error if a Service is named and there is none of that name.
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
