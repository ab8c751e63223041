//! Creates the objects in the test's namespace, and waits until they are ready.

use std::collections::BTreeMap;
use std::io::{Write, stderr};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::sleep;

use super::ConnectivityArgs;
use super::namespace::{Made, random};
use super::objects::{self, TestPod};
use crate::connect::ConnectArgs;
use crate::pods::NodePod;

/// Time limit in seconds for the pods to run, and for each response of the API server.
pub(super) const TIMEOUT: u64 = 120;
/// Time limit in seconds for the dials, once the pods are running.
pub(super) const DIALS: u64 = 120;
/// Time between two reads of an object.
pub(super) const AGAIN: Duration = Duration::from_millis(250);

pub(super) struct Stage<'a> {
    pub(super) client: Client,
    pub(super) connect: &'a ConnectArgs,
    pub(super) namespace: String,
    /// The random word in the annotation of this run's namespace.
    pub(super) run: String,
    pub(super) made: Made,
    /// The pods of kpx on the test's nodes.
    pub(super) kpx: Vec<NodePod>,
    pub(super) pods: Vec<TestPod>,
    pub(super) nodes: BTreeMap<String, Vec<IpAddr>>,
    pub(super) services: BTreeMap<String, Service>,
    /// The error if the NetworkPolicy could not be created.
    pub(super) no_policy: Option<String>,
    /// True if the cluster has a Service for DNS.
    pub(super) has_dns: bool,
}

impl<'a> Stage<'a> {
    pub(super) fn new(
        client: Client,
        connect: &'a ConnectArgs,
        kpx: Vec<NodePod>,
        namespace: String,
    ) -> Result<Self> {
        let names: Vec<_> = kpx.iter().map(|at| at.node.clone()).collect();
        Ok(Self {
            client,
            connect,
            namespace,
            run: random()?,
            made: Made::No,
            pods: objects::pods_for(&names),
            kpx,
            nodes: BTreeMap::new(),
            services: BTreeMap::new(),
            no_policy: None,
            has_dns: false,
        })
    }

    /// Creates the objects, and waits until the pods run and the Services have endpoints.
    pub(super) async fn build(&mut self, args: &ConnectivityArgs) -> Result<()> {
        self.learn().await?;
        let lives = self.connect.timeout(TIMEOUT) + Duration::from_secs(DIALS + 60);
        // The next run may remove a kept namespace at once.
        let ends_by = Timestamp::now() + if args.keep { Duration::ZERO } else { lives };
        self.make_namespace(&ends_by.to_string()).await?;
        self.make_services(args).await?;
        let policies: Api<NetworkPolicy> = self.api();
        let made = self
            .make(&policies, "a NetworkPolicy", &objects::policy()?)
            .await;
        self.no_policy = made.err().map(|error| format!("{error:#}"));
        let image = args
            .image
            .clone()
            .or_else(|| self.kpx.iter().find_map(|at| at.image.clone()));
        let image = image.context("kpx's pod has no image: set --image")?;
        for pod in &self.pods {
            let forwards = args.external_forwarding;
            self.make_pod(&objects::pod(pod, &image, lives.as_secs(), forwards)?)
                .await?;
        }
        self.await_pods().await
    }

    /// Reads the nodes' addresses, and whether the cluster has a Service for DNS.
    async fn learn(&mut self) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let listed = self
            .call("list the nodes", nodes.list(&ListParams::default()))
            .await?;
        for node in listed.items {
            let name = node.metadata.name.unwrap_or_default();
            if !self.kpx.iter().any(|at| at.node == name) {
                continue;
            }
            let addresses = node
                .status
                .and_then(|status| status.addresses)
                .unwrap_or_default();
            let own = addresses
                .iter()
                .filter(|address| address.type_ == "InternalIP");
            self.nodes.insert(
                name,
                own.filter_map(|address| address.address.parse().ok())
                    .collect(),
            );
        }
        let system: Api<Service> = Api::namespaced(self.client.clone(), "kube-system");
        let dns = ListParams::default().labels("k8s-app=kube-dns");
        self.has_dns = !self
            .call("look for the Service of DNS", system.list(&dns))
            .await?
            .items
            .is_empty();
        Ok(())
    }

    async fn make_services(&mut self, args: &ConnectivityArgs) -> Result<()> {
        let services: Api<Service> = self.api();
        let mut wanted = objects::services()?;
        if !args.external_ip.is_empty() {
            wanted.push(objects::external_ip(&args.external_ip)?);
        }
        if !args.load_balancer_ip.is_empty() {
            wanted.push(objects::load_balancer()?);
        }
        for service in wanted {
            let name = service.metadata.name.clone().unwrap_or_default();
            let made = self
                .make(
                    &services,
                    format!("Service {}/{name}", self.namespace),
                    &service,
                )
                .await?;
            self.services.insert(name, made);
        }
        if !args.load_balancer_ip.is_empty() {
            let status = Patch::Merge(objects::load_balancer_status(&args.load_balancer_ip));
            let params = PatchParams::default();
            let patched = services.patch_status("load-balancer", &params, &status);
            let patched = self
                .call("give the load balancer its address", patched)
                .await?;
            self.services.insert("load-balancer".to_owned(), patched);
        }
        Ok(())
    }

    /// Creates a pod. Retries until the namespace's ServiceAccount exists: until then, the API
    /// server refuses pods.
    async fn make_pod(&self, pod: &Pod) -> Result<()> {
        let pods: Api<Pod> = self.api();
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let until = Instant::now() + self.connect.timeout(TIMEOUT);
        loop {
            match self
                .make(&pods, format!("pod {}/{name}", self.namespace), pod)
                .await
            {
                Err(error)
                    if Instant::now() < until
                        && format!("{error:#}").contains("serviceaccount") =>
                {
                    sleep(AGAIN).await;
                }
                made => return made.map(drop),
            }
        }
    }

    async fn await_pods(&mut self) -> Result<()> {
        let pods: Api<Pod> = self.api();
        let limit = self.connect.timeout(TIMEOUT);
        let until = Instant::now() + limit;
        loop {
            let listed = self
                .call("list the test's pods", pods.list(&ListParams::default()))
                .await?
                .items;
            let mut waits = Vec::new();
            for wanted in &mut self.pods {
                let pod = listed
                    .iter()
                    .find(|pod| pod.metadata.name.as_deref() == Some(&wanted.name));
                match pod.map_or_else(|| Err("is gone".to_owned()), addresses) {
                    Ok(ips) => wanted.ips = ips,
                    Err(why) => waits.push(format!("{} on {} {why}", wanted.name, wanted.node)),
                }
            }
            if waits.is_empty() {
                return Ok(());
            }
            if Instant::now() >= until {
                bail!(
                    "pods did not start within {} s: {}",
                    limit.as_secs(),
                    waits.join("; ")
                );
            }
            sleep(AGAIN).await;
        }
    }

    pub(super) async fn make<K>(
        &self,
        api: &Api<K>,
        what: impl std::fmt::Display,
        object: &K,
    ) -> Result<K>
    where
        K: Clone + std::fmt::Debug + Serialize + DeserializeOwned,
    {
        self.call(
            format!("make {what}"),
            api.create(&PostParams::default(), object),
        )
        .await
    }

    pub(super) async fn call<T>(
        &self,
        what: impl std::fmt::Display,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T> {
        self.connect.call(TIMEOUT, what, call).await
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

/// Returns the addresses of a running pod; the error is the reason why it does not run.
fn addresses(pod: &Pod) -> Result<Vec<IpAddr>, String> {
    let status = pod.status.clone().unwrap_or_default();
    let ips: Vec<_> = status
        .pod_ips
        .iter()
        .flatten()
        .filter_map(|ip| ip.ip.parse().ok())
        .collect();
    let is_ready = status
        .conditions
        .iter()
        .flatten()
        .any(|one| one.type_ == "Ready" && one.status == "True");
    if is_ready && !ips.is_empty() {
        return Ok(ips);
    }
    let containers = status
        .container_statuses
        .iter()
        .flatten()
        .filter_map(|container| container.state.as_ref());
    let waiting = containers.filter_map(|state| {
        let waiting = state.waiting.as_ref()?;
        Some(
            [waiting.reason.as_deref(), waiting.message.as_deref()]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(": "),
        )
    });
    let phase = status.phase.as_deref().unwrap_or("Pending");
    let why = waiting
        .chain(status.reason.clone())
        .chain(status.message.clone())
        .next();
    Err(format!(
        "is {phase}{}",
        why.map(|why| format!(" ({why})")).unwrap_or_default()
    ))
}

pub(super) fn report(text: &str) {
    let text = proxy_view::output::escaped(text).replace('\n', " ");
    // A closed standard error leaves no place to report a failure.
    let _written = writeln!(stderr(), "{text}");
}
