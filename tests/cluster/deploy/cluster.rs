//! A cluster for pods: the lab, an API server at its in-cluster address, and a Service.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::ConfigMap;
use testbed::agent::{DEADLINE, Service, wait_until};
use testbed::echo::{Dial, Fault, Protocol};
use testbed::lab::{Family, Layout};
use testbed::pod::Supplies;
use testbed::watched_lab::WatchedLab;

/// The port of all servers of the lab.
pub(crate) const PORT: u16 = 8080;
/// The control plane's name in the kind overlay.
pub(crate) const CONTROL_PLANE: &str = "kind-control-plane";
/// The timeout of one answer. It is short, because packets before the Service is programmed are
/// dropped.
const ANSWER: Duration = Duration::from_millis(200);

pub(crate) struct Cluster {
    service_account: PathBuf,
    base: WatchedLab,
}

impl Deref for Cluster {
    type Target = WatchedLab;

    fn deref(&self) -> &WatchedLab {
        &self.base
    }
}

impl Cluster {
    pub(crate) fn start() -> Result<Self> {
        Self::start_in(Layout::Routed)
    }

    pub(crate) fn start_in(layout: Layout) -> Result<Self> {
        let base = WatchedLab::start_in(layout, PORT, vec![CONTROL_PLANE.to_owned()])?;
        let service_account = base.lab.dir().join("service-account");
        fs::create_dir(&service_account)?;
        base.api().service_account(&service_account)?;
        Ok(Self {
            service_account,
            base,
        })
    }

    /// Returns the files and names that pods of this cluster find. `API_SERVER` in a ConfigMap
    /// stands for the control plane's address.
    pub(crate) fn supplies(&self, config_maps: &[&ConfigMap]) -> Supplies {
        let address = self.api().address().to_string();
        let files = |config_map: &ConfigMap| -> BTreeMap<String, String> {
            let data = config_map.data.clone().unwrap_or_default();
            data.into_iter()
                .map(|(name, text)| (name, text.replace("API_SERVER", &address)))
                .collect()
        };
        let named = config_maps
            .iter()
            .map(|map| (map.metadata.name.clone().unwrap_or_default(), files(map)));
        Supplies {
            config_maps: named.collect(),
            service_account: self.service_account.clone(),
            hosts: format!("{} {CONTROL_PLANE}\n", self.api().address().ip()),
        }
    }

    /// Returns a Service with the backend p2a.
    pub(crate) fn web(&self) -> Result<Service> {
        self.backed_by("p2a")
    }

    fn backed_by(&self, backend: &'static str) -> Result<Service> {
        let web = Service::new("web", 10, &[backend], PORT);
        self.put_service(&web)?;
        Ok(web)
    }

    /// Checks that a pod and the node itself reach that Service by both protocols and families.
    /// Creates it if it is missing.
    pub(crate) fn serves(&self, node: &str) -> Result<()> {
        let pod = self.lab.host(node).name.replacen('n', "p", 1) + "a";
        self.is_served(&[&pod, node])
    }

    /// Checks the same for these clients.
    pub(crate) fn is_served(&self, clients: &[&str]) -> Result<()> {
        self.is_served_by("p2a", clients)
    }

    /// Checks the same with another backend.
    pub(crate) fn is_served_by(&self, backend: &'static str, clients: &[&str]) -> Result<()> {
        let web = self.backed_by(backend)?;
        self.everywhere(&web, clients, |result| match result {
            Ok(answer) if answer == backend => Ok(true),
            Ok(answer) => bail!("{answer} answered"),
            Err(Fault::Refused | Fault::TimedOut(_)) => Ok(false),
            Err(fault) => Err(fault.into()),
        })
    }

    /// Checks that no proxy serves that Service any more.
    pub(crate) fn serves_no_more(&self, node: &str) -> Result<()> {
        self.everywhere(
            &Service::new("web", 10, &["p2a"], PORT),
            &[node],
            |result| Ok(result.is_err()),
        )
    }

    fn everywhere(
        &self,
        service: &Service,
        clients: &[&str],
        holds: impl Fn(Result<String, Fault>) -> Result<bool>,
    ) -> Result<()> {
        for client in clients {
            for protocol in Protocol::COMMON {
                for family in Family::ALL {
                    let dial = Dial::new(protocol, service.frontend(family)).deadline(ANSWER);
                    let ns = &self.lab.host(client).ns;
                    wait_until(
                        DEADLINE,
                        &format!("{client} by {protocol} {family}"),
                        || holds(dial.exchange(ns, b"hello").map(|answer| answer.backend)),
                    )?;
                }
            }
        }
        Ok(())
    }
}
