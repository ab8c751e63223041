//! A small Kubernetes API server inside the test, with faults to enable.
//!
//! It speaks kube-apiserver's API as far as kube-rs, client-go and kubectl use it. It serves
//! Services, EndpointSlices, Nodes, Namespaces, ServiceCIDRs, NetworkPolicies, Events and Pods,
//! with exec, port-forward and logs of pods that a test runs. It supports TLS, tokens and client
//! certificates, discovery, pages, bookmarks, streaming lists, resource versions, patches and
//! tables. It has no controllers, server-side apply or managed fields.

mod admit;
mod discovery;
mod event;
mod failure;
mod faults;
mod http;
mod kinds;
mod kubelet;
mod list;
mod listen;
mod meter;
mod objects;
mod options;
mod patch;
mod pki;
pub mod place;
mod plain;
mod portforward;
pub mod real;
mod review;
mod select;
mod service;
mod shared;
mod spdy;
mod store;
mod view;
mod watch;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use ipnet::IpNet;
use serde_json::Value;
use socket2::Socket;

use failure::Failure;
pub use faults::Garbage;
use kinds::Kind;
pub use kubelet::Container;
use listen::Server;
pub use meter::Meter;
use objects::{Objects, Target};
pub use pki::Login;
use pki::Pki;
pub use plain::PlainWatch;
use shared::Shared;
pub use shared::Traffic;

/// The options of a start.
#[derive(Debug)]
pub struct Options {
    /// The caller creates the listener, perhaps inside another network namespace.
    pub listener: TcpListener,
    /// The additional names and addresses in the server's certificate.
    pub sans: Vec<String>,
    /// The ranges of ClusterIPs. The first range sets the default family of Services.
    pub service_cidrs: Vec<IpNet>,
    /// The time between two bookmarks of a watch; kube-apiserver sends one a minute.
    pub bookmark_every: Duration,
}

impl Options {
    /// Returns options for a free port of 127.0.0.1, with 10.96.0.0/16 and fd00:96::/112.
    pub fn loopback() -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).context("listen on 127.0.0.1")?;
        Ok(Self::on(listener))
    }

    pub fn on(listener: TcpListener) -> Self {
        let service_cidrs = ["10.96.0.0/16", "fd00:96::/112"]
            .map(|c| c.parse().expect("a CIDR"))
            .into();
        Self {
            listener,
            sans: Vec::new(),
            service_cidrs,
            bookmark_every: Duration::from_secs(1),
        }
    }
}

/// The treatment of old resource versions at a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum History {
    Kept,
    /// Watches and lists from older versions get 410 Gone.
    Lost,
}

/// A state to restore with [`ApiServer::restore`].
#[derive(Clone, Debug)]
pub struct Backup(store::Store);

/// A running server; a drop stops it.
#[derive(Debug)]
pub struct ApiServer {
    server: Server,
    shared: Arc<Shared>,
    pki: Pki,
    /// Reserves the address while the server is stopped.
    parked: Option<Socket>,
}

impl ApiServer {
    pub fn start(options: Options) -> Result<Self> {
        let address = options
            .listener
            .local_addr()
            .context("read the address of the API server")?;
        let own = ["localhost", "kubernetes.default.svc"].map(str::to_owned);
        let sans = options
            .sans
            .into_iter()
            .chain(own)
            .chain([address.ip().to_string()])
            .collect();
        let pki = Pki::new(sans)?;
        let objects = Objects::new(options.service_cidrs).map_err(|f| refused(&f))?;
        let shared = Arc::new(Shared::new(
            objects,
            pki.token.clone(),
            options.bookmark_every,
        ));
        let server = Server::start(options.listener, pki.server.clone(), shared.clone())?;
        Ok(Self {
            server,
            shared,
            pki,
            parked: None,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    pub fn url(&self) -> String {
        format!("https://{}", self.address())
    }

    pub fn token(&self) -> &str {
        &self.pki.token
    }

    /// Returns the CA certificate of the server, in PEM.
    pub fn ca(&self) -> &str {
        &self.pki.ca
    }

    /// Writes a kubeconfig for [`Self::url`] and the token.
    pub fn kubeconfig(&self, path: &Path) -> Result<()> {
        self.kubeconfig_for(path, &self.url(), Login::Token)
    }

    /// Writes a kubeconfig for another name of the server.
    pub fn kubeconfig_for(&self, path: &Path, url: &str, login: Login) -> Result<()> {
        self.pki.write_kubeconfig(path, url, login)
    }

    /// Writes ca.crt, token and namespace, as a pod gets them.
    pub fn service_account(&self, folder: &Path) -> Result<()> {
        self.pki.write_service_account(folder)
    }

    /// Creates or replaces an object including its status, and creates a missing namespace. Returns
    /// the stored object with defaults. Decodes the object without further validation.
    pub fn apply(&self, object: &Value) -> Result<Value> {
        let kind = Kind::of(object).with_context(|| format!("no such kind: {object}"))?;
        let stored = self.shared.change(|state| state.objects.put(kind, object));
        stored
            .map(|object| Value::clone(&object))
            .map_err(|f| refused(&f))
    }

    /// Applies like [`Self::apply`] if the object's namespace exists, like a controller during a
    /// namespace's deletion.
    pub fn apply_within(&self, object: &Value) -> Result<()> {
        let kind = Kind::of(object).with_context(|| format!("no such kind: {object}"))?;
        let home = store::Key::new(
            kinds::NAMESPACE,
            "",
            admit::text(object, "/metadata/namespace"),
        );
        let stored = self
            .shared
            .change(|state| match state.objects.store.get(&home) {
                Some(_) => state.objects.put(kind, object).map(drop),
                None => Ok(()),
            });
        stored.map_err(|f| refused(&f))
    }

    /// Returns the stored object. The kind may be given as `Service`, `service` or `services`.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        let key = store::Key::new(Kind::named(kind)?, namespace, name);
        self.shared.read(|state| {
            state
                .objects
                .store
                .get(&key)
                .map(|object| Value::clone(object))
        })
    }

    /// Returns all objects of a resource with its group: `services`, `events.events.k8s.io`.
    pub fn list(&self, resource: &str) -> Vec<Value> {
        let Some(kind) = kinds::KINDS.iter().find(|kind| kind.resource() == resource) else {
            return Vec::new();
        };
        self.shared.read(|state| {
            state
                .objects
                .store
                .objects(kind, "")
                .map(|(_, object)| Value::clone(object))
                .collect()
        })
    }

    /// Stores an object of any shape unchanged, if it has a kind and a name.
    pub fn apply_as_is(&self, object: &Value) -> Result<()> {
        let kind = Kind::of(object).with_context(|| format!("no such kind: {object}"))?;
        let [namespace, name] =
            ["/metadata/namespace", "/metadata/name"].map(|at| admit::text(object, at));
        let key = store::Key::new(kind, namespace, name);
        self.shared
            .change(|state| state.objects.store.write(&key, Some(object.clone())));
        Ok(())
    }

    /// Deletes an object that may be malformed.
    pub fn delete_as_is(&self, kind: &str, namespace: &str, name: &str) -> Result<()> {
        let kind = Kind::named(kind).with_context(|| format!("no such kind: {kind}"))?;
        let key = store::Key::new(kind, namespace, name);
        self.shared
            .change(|state| state.objects.store.write(&key, None));
        Ok(())
    }

    /// Serves exec, port-forward and logs of this pod from `container`.
    pub fn reach(&self, namespace: &str, pod: &str, container: Arc<dyn Container>) {
        let key = (namespace.to_owned(), pod.to_owned());
        self.shared
            .change(|state| state.containers.insert(key, container));
    }

    /// Returns a copy of all data with their versions.
    pub fn backup(&self) -> Backup {
        Backup(self.shared.read(|state| state.objects.store.clone()))
    }

    /// Restores a backup with its versions, which are then assigned a second time.
    pub fn restore(&self, backup: Backup) {
        self.shared
            .change(|state| state.objects.store.restore(backup.0));
    }

    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<()> {
        let kind = Kind::named(kind).with_context(|| format!("no such kind: {kind}"))?;
        let namespace = namespace.to_owned();
        let name = name.to_owned();
        let target = Target {
            kind,
            namespace,
            name,
            patch: false,
            status: false,
            dry_run: false,
            strict: false,
        };
        let deleted = self
            .shared
            .change(|state| state.objects.delete(&target, &Value::Null));
        deleted.map(drop).map_err(|f| refused(&f))
    }

    /// Returns the version of the last change.
    pub fn version(&self) -> u64 {
        self.shared.read(|state| state.objects.store.version())
    }

    /// Returns the requests of clients so far.
    pub fn traffic(&self) -> Traffic {
        self.shared.read(|state| state.traffic.clone())
    }

    /// Returns the record of sent data.
    pub fn meter(&self) -> &Meter {
        &self.shared.meter
    }

    /// Waits until the condition holds. Returns false after `limit`.
    pub fn wait(&self, limit: Duration, condition: impl Fn(&Traffic) -> bool) -> bool {
        self.shared.wait(limit, |state| condition(&state.traffic))
    }
}

/// Faults. A fault lasts until it is disabled, or until [`ApiServer::heal`].
impl ApiServer {
    /// Cuts all connections and refuses new ones; the data remain.
    pub fn stop(&mut self) -> Result<()> {
        if self.parked.is_none() {
            self.parked = Some(self.server.stop()?);
        }
        Ok(())
    }

    /// Serves again on the same address.
    pub fn start_again(&mut self, history: History) -> Result<()> {
        if history == History::Lost {
            self.compact();
        }
        match self.parked.take() {
            Some(parked) => self.server.start_again(parked),
            None => Ok(()),
        }
    }

    /// Serves an expired or a valid certificate to new connections.
    pub fn expire_certificate(&self, on: bool) -> Result<()> {
        self.server.serve_by(if on {
            self.pki.expired.clone()
        } else {
            self.pki.server.clone()
        })
    }

    /// Answers every request with an HTTP status, like a load balancer without servers.
    pub fn fail_all(&self, code: u16, retry_after: Option<u32>) {
        let failure = Failure::new(code, "asked for by a test");
        let failure = retry_after.into_iter().fold(failure, Failure::retry_after);
        self.shared
            .change(|state| state.faults.everything = Some(failure));
    }

    /// Sends every list in pieces over this time.
    pub fn trickle_lists(&self, time: Duration) {
        self.shared
            .change(|state| state.faults.list_trickle = Some(time));
    }

    /// Makes new watches send each event twice, followed by the event before it.
    pub fn disorder(&self) {
        self.shared.change(|state| state.faults.disorder = true);
    }

    /// Breaks all running watches without a proper end.
    pub fn cut_watches(&self) {
        self.shared.change(|state| state.faults.cuts += 1);
    }

    /// Ends all connections after their current answer, like a server during shutdown: by GOAWAY,
    /// or `Connection: close` in HTTP/1.
    pub fn retire_connections(&self) -> Result<()> {
        self.server.retire()
    }

    /// Makes new watches of a resource (plural) send garbage instead of events. Lists remain
    /// intact.
    pub fn garble_watches(&self, resource: &str, garbage: Garbage) {
        self.shared
            .change(|state| state.faults.garbled.push((resource.to_owned(), garbage)));
    }

    /// Sends 410 Gone to every running watch and ends it.
    pub fn expire_watches(&self) {
        self.shared.change(|state| state.faults.expiries += 1);
    }

    /// Ends new watches after this time; `None`: after the client's timeout.
    pub fn end_watches_after(&self, life: Option<Duration>) {
        self.shared.change(|state| state.faults.watch_life = life);
    }

    /// Makes all older resource versions 410 Gone. Running watches continue.
    pub fn compact(&self) {
        self.shared.change(|state| state.objects.store.compact());
    }

    /// Reports an expired version to watches by the response status (like older servers) instead of
    /// an event.
    pub fn gone_by_status(&self, on: bool) {
        self.shared.change(|state| state.faults.gone_by_status = on);
    }

    /// Answers a verb (get, list, watch, create, update, patch, delete) of a resource (plural) with
    /// an HTTP status.
    pub fn fail(&self, verb: &str, resource: &str, code: u16) {
        self.answer(verb, resource, Failure::new(code, "asked for by a test"));
    }

    /// Fails like [`Self::fail`], with the header Retry-After.
    pub fn fail_retry_after(&self, verb: &str, resource: &str, code: u16, seconds: u32) {
        self.answer(
            verb,
            resource,
            Failure::new(code, "asked for by a test").retry_after(seconds),
        );
    }

    /// Executes requests with this verb and resource (plural), and never answers.
    pub fn swallow_answers(&self, verb: &str, resource: &str) {
        self.shared.change(|state| {
            state
                .faults
                .unanswered
                .push((verb.to_owned(), resource.to_owned()))
        });
    }

    /// Delays every list.
    pub fn delay_lists(&self, delay: Duration) {
        self.shared.change(|state| state.faults.list_delay = delay);
    }

    /// Refuses the token that it issued.
    pub fn refuse_tokens(&self, on: bool) {
        self.shared.change(|state| state.faults.tokens_refused = on);
    }

    /// Enables streaming lists. Disabled, they fail with 422, as on older servers.
    pub fn streaming_lists(&self, on: bool) {
        self.shared
            .change(|state| state.faults.streaming_lists = on);
    }

    /// Ends all faults except [`Self::stop`] and compaction.
    pub fn heal(&self) {
        self.shared.change(|state| state.faults.heal());
    }

    fn answer(&self, verb: &str, resource: &str, failure: Failure) {
        let answer = (verb.to_owned(), resource.to_owned(), failure);
        self.shared.change(|state| {
            state
                .faults
                .answers
                .retain(|(v, r, _)| *v != answer.0 || *r != answer.1);
            state.faults.answers.push(answer);
        });
    }
}

fn refused(failure: &Failure) -> anyhow::Error {
    anyhow!(
        "refused by the API server: {}",
        admit::text(&failure.status(), "/message")
    )
}
