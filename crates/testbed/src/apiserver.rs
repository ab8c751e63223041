//! A small Kubernetes API server inside the test, with faults to switch on.
//!
//! It speaks kube-apiserver's API as far as kube-rs, client-go and kubectl use it. The kinds are
//! Services, EndpointSlices, Nodes, Namespaces, ServiceCIDRs, NetworkPolicies, Events and Pods,
//! with the commands, ports (for kpx and for kubectl) and logs of those that a test runs. The
//! features are TLS, tokens and client certificates, discovery, pages, bookmarks, streaming lists,
//! resource versions, patches, tables. There are no controllers, no server-side apply and no
//! managed fields.

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
    /// Made by the caller, who may have made it inside another network namespace.
    pub listener: TcpListener,
    /// Names and addresses, beside the listener's own, that clients may call the server by.
    pub sans: Vec<String>,
    /// Where cluster IPs come from; the first one's family is that of Services that do not ask.
    pub service_cidrs: Vec<IpNet>,
    /// How often a watch that asked for bookmarks gets one. In a cluster it is once a minute.
    pub bookmark_every: Duration,
}

impl Options {
    /// On a free port of 127.0.0.1, with 10.96.0.0/16 and fd00:96::/112.
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

/// The fate of old resource versions at a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum History {
    Kept,
    /// Watches and lists from before get 410 Gone.
    Lost,
}

/// The state to which [`ApiServer::restore`] goes back.
#[derive(Clone, Debug)]
pub struct Backup(store::Store);

/// A running server; dropping it stops it.
#[derive(Debug)]
pub struct ApiServer {
    server: Server,
    shared: Arc<Shared>,
    pki: Pki,
    /// Holds the address while the server is stopped.
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

    /// The certificate that signed the server's, in PEM.
    pub fn ca(&self) -> &str {
        &self.pki.ca
    }

    /// Writes a kubeconfig for [`Self::url`] and the token.
    pub fn kubeconfig(&self, path: &Path) -> Result<()> {
        self.kubeconfig_for(path, &self.url(), Login::Token)
    }

    /// Writes a kubeconfig for another of the server's names.
    pub fn kubeconfig_for(&self, path: &Path, url: &str, login: Login) -> Result<()> {
        self.pki.write_kubeconfig(path, url, login)
    }

    /// Writes ca.crt, token and namespace, as a pod finds them.
    pub fn service_account(&self, folder: &Path) -> Result<()> {
        self.pki.write_service_account(folder)
    }

    /// Creates or replaces an object, status and all, and its namespace if that is missing. Returns
    /// it as stored: defaults are filled in, but nothing is refused that is of the right shape.
    pub fn apply(&self, object: &Value) -> Result<Value> {
        let kind = Kind::of(object).with_context(|| format!("no such kind: {object}"))?;
        let stored = self.shared.change(|state| state.objects.put(kind, object));
        stored
            .map(|object| Value::clone(&object))
            .map_err(|f| refused(&f))
    }

    /// Does what [`Self::apply`] does if the object's namespace is there, as a controller whose
    /// objects may go meanwhile.
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

    /// The object as stored. The kind may be given as `Service`, `service` or `services`.
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

    /// All objects of a resource with its group: `services`, `events.events.k8s.io`.
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

    /// Stores an object of any shape as it is, if it has a kind and a name.
    pub fn apply_as_is(&self, object: &Value) -> Result<()> {
        let kind = Kind::of(object).with_context(|| format!("no such kind: {object}"))?;
        let [namespace, name] =
            ["/metadata/namespace", "/metadata/name"].map(|at| admit::text(object, at));
        let key = store::Key::new(kind, namespace, name);
        self.shared
            .change(|state| state.objects.store.write(&key, Some(object.clone())));
        Ok(())
    }

    /// Deletes what may be no object of its kind.
    pub fn delete_as_is(&self, kind: &str, namespace: &str, name: &str) -> Result<()> {
        let kind = Kind::named(kind).with_context(|| format!("no such kind: {kind}"))?;
        let key = store::Key::new(kind, namespace, name);
        self.shared
            .change(|state| state.objects.store.write(&key, None));
        Ok(())
    }

    /// Answers for the kubelet of a pod's node: commands in its container, and its log.
    pub fn reach(&self, namespace: &str, pod: &str, container: Arc<dyn Container>) {
        let key = (namespace.to_owned(), pod.to_owned());
        self.shared
            .change(|state| state.containers.insert(key, container));
    }

    /// All data and their versions, as they are now.
    pub fn backup(&self) -> Backup {
        Backup(self.shared.read(|state| state.objects.store.clone()))
    }

    /// Goes back to the data of a backup, and to their versions: they are given out a second time.
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

    /// The version of the last change.
    pub fn version(&self) -> u64 {
        self.shared.read(|state| state.objects.store.version())
    }

    /// Returns the requests of clients so far.
    pub fn traffic(&self) -> Traffic {
        self.shared.read(|state| state.traffic.clone())
    }

    /// Returns the record of what was sent so far.
    pub fn meter(&self) -> &Meter {
        &self.shared.meter
    }

    /// Waits until the condition holds; false if it still does not after `limit`.
    pub fn wait(&self, limit: Duration, condition: impl Fn(&Traffic) -> bool) -> bool {
        self.shared.wait(limit, |state| condition(&state.traffic))
    }
}

/// Faults. Each stays until it is taken back, or until [`ApiServer::heal`].
impl ApiServer {
    /// Cuts all connections and refuses new ones; the data stay.
    pub fn stop(&mut self) -> Result<()> {
        if self.parked.is_none() {
            self.parked = Some(self.server.stop()?);
        }
        Ok(())
    }

    /// Serves again, on the same address.
    pub fn start_again(&mut self, history: History) -> Result<()> {
        if history == History::Lost {
            self.compact();
        }
        match self.parked.take() {
            Some(parked) => self.server.start_again(parked),
            None => Ok(()),
        }
    }

    /// Shows a certificate of the past, or a good one again, to those that connect from now on.
    pub fn expire_certificate(&self, on: bool) -> Result<()> {
        self.server.serve_by(if on {
            self.pki.expired.clone()
        } else {
            self.pki.server.clone()
        })
    }

    /// Answers every request with an HTTP status, as a load balancer does that has no server.
    pub fn fail_all(&self, code: u16, retry_after: Option<u32>) {
        let failure = Failure::new(code, "told to by a test");
        let failure = retry_after.into_iter().fold(failure, Failure::retry_after);
        self.shared
            .change(|state| state.faults.everything = Some(failure));
    }

    /// Sends every list in pieces, over so long.
    pub fn trickle_lists(&self, time: Duration) {
        self.shared
            .change(|state| state.faults.list_trickle = Some(time));
    }

    /// Has watches that start from now on send every event twice, and the one before it after it.
    pub fn disorder(&self) {
        self.shared.change(|state| state.faults.disorder = true);
    }

    /// Breaks off every watch that runs, without a proper end.
    pub fn cut_watches(&self) {
        self.shared.change(|state| state.faults.cuts += 1);
    }

    /// Tells all connections that they end with their answer, as a server does before its own end:
    /// by GOAWAY, and by `Connection: close` before HTTP/2.
    pub fn retire_connections(&self) -> Result<()> {
        self.server.retire()
    }

    /// Has watches of a resource (plural) that start from now on send no events, but this. Lists
    /// are as they were.
    pub fn garble_watches(&self, resource: &str, garbage: Garbage) {
        self.shared
            .change(|state| state.faults.garbled.push((resource.to_owned(), garbage)));
    }

    /// Sends 410 Gone to every watch that runs, and ends it.
    pub fn expire_watches(&self) {
        self.shared.change(|state| state.faults.expiries += 1);
    }

    /// Ends every watch that starts from now on so long after its start; None: when the client
    /// says.
    pub fn end_watches_after(&self, life: Option<Duration>) {
        self.shared.change(|state| state.faults.watch_life = life);
    }

    /// Makes every resource version of before 410 Gone. Watches that run are not disturbed.
    pub fn compact(&self) {
        self.shared.change(|state| state.objects.store.compact());
    }

    /// Tells a watch that its version is gone by the status of the response (as older servers do)
    /// instead of by an event.
    pub fn gone_by_status(&self, on: bool) {
        self.shared.change(|state| state.faults.gone_by_status = on);
    }

    /// Answers a verb (get, list, watch, create, update, patch, delete) of a resource (plural) with
    /// an HTTP status.
    pub fn fail(&self, verb: &str, resource: &str, code: u16) {
        self.answer(verb, resource, Failure::new(code, "told to by a test"));
    }

    /// The same, with the header Retry-After.
    pub fn fail_retry_after(&self, verb: &str, resource: &str, code: u16, seconds: u32) {
        self.answer(
            verb,
            resource,
            Failure::new(code, "told to by a test").retry_after(seconds),
        );
    }

    /// Does what requests of a verb and a resource (plural) ask for, and never answers them.
    pub fn swallow_answers(&self, verb: &str, resource: &str) {
        self.shared.change(|state| {
            state
                .faults
                .unanswered
                .push((verb.to_owned(), resource.to_owned()))
        });
    }

    /// Makes every list wait so long.
    pub fn delay_lists(&self, delay: Duration) {
        self.shared.change(|state| state.faults.list_delay = delay);
    }

    /// Refuses the token that it gave out.
    pub fn refuse_tokens(&self, on: bool) {
        self.shared.change(|state| state.faults.tokens_refused = on);
    }

    /// Off: refuses streaming lists with 422, as older servers do.
    pub fn streaming_lists(&self, on: bool) {
        self.shared
            .change(|state| state.faults.streaming_lists = on);
    }

    /// Takes back all faults but [`Self::stop`] and what is compacted.
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
