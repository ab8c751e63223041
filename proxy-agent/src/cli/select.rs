//! Selects the Services that a command shows.

use anyhow::{Result, ensure};
use clap::Args;

use proxy_view::ServiceView;
use proxy_view::object_name::ServiceName;

#[derive(Args, Debug)]
pub(super) struct SelectArgs {
    /// Show only this Service; put its namespace and a slash in front if several Services share the name.
    #[arg(value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<ServiceName>,
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
        let is_within =
            |service: &ServiceView| self.namespace.as_ref().is_none_or(|wanted| service.namespace == *wanted);
        let Some(name) = &self.service else {
            services.retain(is_within);
            return Ok(services);
        };
        let name = name.clone().within(self.namespace.as_deref());
        let unknown = name.unknown(&services);
        services.retain(|service| is_within(service) && name.is(service));
        ensure!(!services.is_empty(), unknown);
        Ok(services)
    }
}
