//! The flags that select the Services of a command.

use std::io::{Write, stderr};

use anyhow::{Result, ensure};
use clap::Args;

use crate::client::Client;
use crate::object_name::ServiceName;
use crate::output::nothing;
use crate::{Selector, ServiceView};

/// The namespace of what a command shows.
#[derive(Args, Clone, Debug)]
pub struct NamespaceArgs {
    /// Show only this namespace.
    #[arg(
        long,
        short,
        value_name = "NAMESPACE",
        conflicts_with = "all_namespaces"
    )]
    pub namespace: Option<String>,
    /// Show all namespaces (the default).
    #[arg(long, short = 'A')]
    all_namespaces: bool,
}

impl NamespaceArgs {
    /// Returns the message for an empty list.
    pub fn nothing(&self, objects: &str) -> String {
        nothing(objects, self.namespace.as_deref())
    }

    pub fn has(&self, namespace: &str) -> bool {
        self.namespace
            .as_ref()
            .is_none_or(|wanted| namespace == wanted)
    }
}

#[derive(Args, Debug)]
pub struct SelectArgs {
    /// Show only this Service; add NAMESPACE/ if several Services share the name.
    #[arg(value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<ServiceName>,
    #[command(flatten)]
    within: NamespaceArgs,
    /// Show only Services with these labels, as in kubectl: app=web,tier!=db,env in (a,b),!old.
    #[arg(long, short = 'l', value_name = "LABELS", conflicts_with = "service")]
    selector: Option<Selector>,
}

impl SelectArgs {
    /// Returns the message for an empty list.
    pub fn nothing(&self, objects: &str) -> String {
        self.within.nothing(objects)
    }

    /// Reads the agent's Services and returns the selected Services. The first call fails if the
    /// named Service is missing, or if the agent still waits for its first lists.
    pub async fn read(&self, client: &Client, is_first: bool) -> Result<Vec<ServiceView>> {
        let services = match &self.service {
            Some(_) if is_first => client.services_to_name().await?,
            _ => client.services().await?,
        };
        self.select(services, is_first)
    }

    /// Returns the selected Services. Fails if `must_exist` and the named Service is missing.
    fn select(&self, mut services: Vec<ServiceView>, must_exist: bool) -> Result<Vec<ServiceView>> {
        services.retain(|service| self.within.has(&service.namespace) || self.service.is_some());
        if let Some(selector) = &self.selector {
            return Ok(labelled(services, selector, must_exist));
        }
        let Some(name) = &self.service else {
            return Ok(services);
        };
        let name = name.clone().within(self.within.namespace.as_deref());
        let unknown = name.unknown(&services);
        services.retain(|service| self.within.has(&service.namespace) && name.is(service));
        ensure!(!(must_exist && services.is_empty()), unknown);
        Ok(services)
    }
}

/// Returns the Services that the selector matches. With `must_tell`, prints to standard error the
/// number of Services with more labels than kpx keeps.
pub fn labelled(
    mut services: Vec<ServiceView>,
    selector: &Selector,
    must_tell: bool,
) -> Vec<ServiceView> {
    let cut = services.iter().filter(|service| service.labels_cut).count();
    if must_tell && cut > 0 {
        // A closed standard error leaves no place to report a failure.
        let _written = writeln!(
            stderr(),
            "{cut} Services have more labels than kpx keeps (4 KiB): --selector may miss them"
        );
    }
    services.retain(|service| selector.selects(&service.labels));
    services
}
