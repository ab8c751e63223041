//! The faults of `testbed::apiserver`, as kube-rs sees them.

use std::io::{ErrorKind, Read};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::pin::Pin;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Service;
use kube::api::{Api, ListParams, PostParams, WatchEvent, WatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::apiserver::place::{TIMEOUT, client};
use testbed::apiserver::{ApiServer, History, Login, Options, Traffic};
use tokio::time::timeout;

/// A server, and a client of it.
struct Pair {
    server: ApiServer,
    services: Api<Service>,
    kubeconfig: PathBuf,
    folder: TempDir,
}

impl Pair {
    async fn start() -> Result<Self> {
        let server = ApiServer::start(Options::loopback()?)?;
        let folder = TempDir::new()?;
        let kubeconfig = folder.path().join("kubeconfig");
        server.kubeconfig(&kubeconfig)?;
        let services = Api::all(client(&kubeconfig).await?);
        server.apply(&service("a"))?;
        Ok(Self {
            server,
            services,
            kubeconfig,
            folder,
        })
    }

    /// Returns a watcher that has seen service a.
    async fn watcher(&self, config: watcher::Config) -> Result<Events> {
        let mut events: Events =
            Box::pin(watcher::watcher(self.services.clone(), config).default_backoff());
        until(&mut events, "InitDone").await?;
        self.drive(&mut events, |traffic| traffic.watches("services") == 1)
            .await?;
        Ok(events)
    }

    /// Runs the watcher until the server has seen the wanted traffic.
    async fn drive(&self, events: &mut Events, wanted: impl Fn(&Traffic) -> bool) -> Result<()> {
        let working = async {
            while !wanted(&self.server.traffic()) {
                // A watcher works only while something polls it, and no event may be pending.
                let _ = timeout(Duration::from_millis(10), events.next()).await;
            }
        };
        timeout(TIMEOUT, working)
            .await
            .with_context(|| format!("only {:?}", self.server.traffic()))
    }
}

type Events = Pin<Box<dyn Stream<Item = watcher::Result<Event<Service>>> + Send>>;

#[tokio::test]
async fn a_compacted_version_is_gone() -> Result<()> {
    let pair = Pair::start().await?;
    let page = pair.services.list(&ListParams::default()).await?;
    let version = page.metadata.resource_version.unwrap_or_default();
    for name in ["b", "c"] {
        pair.server.apply(&service(name))?;
    }
    let page = pair.services.list(&ListParams::default().limit(1)).await?;
    pair.server.compact();
    let token = page.metadata.continue_.context("no second page")?;
    refused(
        pair.services
            .list(&ListParams::default().limit(1).continue_token(&token))
            .await,
        410,
    )?;
    let params = WatchParams::default();
    let events: Vec<_> = pair
        .services
        .watch(&params, &version)
        .await?
        .try_collect()
        .await?;
    ensure!(
        matches!(&events[..], [WatchEvent::Error(status)] if status.code == 410),
        "{events:?}"
    );
    pair.server.gone_by_status(true);
    refused(pair.services.watch(&params, &version).await.map(drop), 410)
}

#[tokio::test]
async fn a_watcher_survives_a_restart() -> Result<()> {
    for (history, config) in [
        (History::Kept, watcher::Config::default()),
        (History::Lost, watcher::Config::default()),
        (History::Lost, watcher::Config::default().streaming_lists()),
    ] {
        let mut pair = Pair::start().await?;
        let mut events = pair.watcher(config).await?;
        let address = pair.server.address();
        pair.server.stop()?;
        let refusal = TcpStream::connect(address)
            .err()
            .context("a stopped server takes connections")?;
        ensure!(refusal.kind() == ErrorKind::ConnectionRefused, "{refusal}");
        pair.server.apply(&service("b"))?;
        pair.server.delete("Service", "default", "a")?;
        pair.server.start_again(history)?;
        match history {
            // The watch continues at its version.
            History::Kept => {
                until(&mut events, "Apply(b)").await?;
                until(&mut events, "Delete(a)").await?;
            }
            History::Lost => {
                let seen = until(&mut events, "InitDone").await?;
                ensure!(
                    seen.contains(&"InitApply(b)".to_owned())
                        && !seen.contains(&"InitApply(a)".to_owned()),
                    "{seen:?}"
                );
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn watches_end_break_and_expire() -> Result<()> {
    let pair = Pair::start().await?;
    let mut events = pair.watcher(watcher::Config::default()).await?;
    pair.server.cut_watches();
    pair.server.apply(&service("b"))?;
    until(&mut events, "Apply(b)").await?;
    ensure!(
        pair.server.traffic().requests("watch", "services") == 2,
        "{:?}",
        pair.server.traffic()
    );
    ensure!(
        pair.server.traffic().requests("list", "services") == 1,
        "{:?}",
        pair.server.traffic()
    );

    pair.server.expire_watches();
    until(&mut events, "InitDone").await?;
    ensure!(
        pair.server.traffic().requests("list", "services") == 2,
        "{:?}",
        pair.server.traffic()
    );
    pair.drive(&mut events, |traffic| traffic.watches("services") == 1)
        .await?;

    pair.server
        .end_watches_after(Some(Duration::from_millis(50)));
    pair.server.cut_watches();
    let before = pair.server.traffic().requests("watch", "services");
    pair.drive(&mut events, |traffic| {
        traffic.requests("watch", "services") >= before + 3
    })
    .await?;
    pair.server.end_watches_after(None);
    pair.server.apply(&service("c"))?;
    until(&mut events, "Apply(c)").await.map(drop)
}

#[tokio::test]
async fn answers_can_be_set() -> Result<()> {
    let pair = Pair::start().await?;
    pair.server.fail("list", "services", 403);
    refused(pair.services.list(&ListParams::default()).await, 403)?;
    pair.services
        .watch(&WatchParams::default(), "")
        .await
        .map(drop)
        .context("another verb")?;
    // kube-rs retries by itself after the seconds in Retry-After.
    pair.server.fail_retry_after("list", "services", 429, 1);
    let params = ListParams::default();
    let before = pair.server.traffic().requests("list", "services");
    let start = Instant::now();
    let healer = async {
        while pair.server.traffic().requests("list", "services") == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        pair.server.heal();
    };
    let (list, ()) = timeout(TIMEOUT, async {
        tokio::join!(pair.services.list(&params), healer)
    })
    .await?;
    list.context("after a retry")?;
    ensure!(
        start.elapsed() >= Duration::from_secs(1),
        "a retry after {:?}",
        start.elapsed()
    );

    pair.server.refuse_tokens(true);
    refused(pair.services.list(&ListParams::default()).await, 401)?;
    pair.server.refuse_tokens(false);

    pair.server.delay_lists(Duration::from_millis(300));
    let start = Instant::now();
    pair.services.list(&ListParams::default()).await?;
    ensure!(
        start.elapsed() >= Duration::from_millis(300),
        "the list was not delayed"
    );

    pair.server.streaming_lists(false);
    let params = WatchParams::default().initial_events();
    refused(pair.services.watch(&params, "").await.map(drop), 422)
}

#[tokio::test]
async fn client_without_credentials_is_refused() -> Result<()> {
    let pair = Pair::start().await?;
    let write = |name: &str, change: &dyn Fn(&mut Value)| -> Result<PathBuf> {
        let text = std::fs::read_to_string(&pair.kubeconfig)?;
        let mut config: Value = serde_saphyr::from_str(&text)?;
        change(&mut config);
        let path = pair.folder.path().join(name);
        std::fs::write(&path, config.to_string())?;
        Ok(path)
    };
    for (name, user) in [("none", json!({})), ("wrong", json!({"token": "wrong"}))] {
        let path = write(name, &|config| config["users"][0]["user"] = user.clone())?;
        let services: Api<Service> = Api::all(client(&path).await?);
        refused(services.list(&ListParams::default()).await, 401).context(name)?;
    }
    let path = pair.folder.path().join("certificate");
    pair.server
        .kubeconfig_for(&path, &pair.server.url(), Login::ClientCertificate)?;
    let services: Api<Service> = Api::all(client(&path).await?);
    services
        .list(&ListParams::default())
        .await
        .context("with a client certificate")?;

    let other = ApiServer::start(Options::loopback()?)?;
    let path = pair.folder.path().join("stranger");
    other.kubeconfig_for(&path, &pair.server.url(), Login::Token)?;
    let services: Api<Service> = Api::all(client(&path).await?);
    let error = services
        .list(&ListParams::default())
        .await
        .err()
        .context("a stranger's authority is trusted")?;
    ensure!(!matches!(error, kube::Error::Api(_)), "{error:?}");

    let account = pair.folder.path().join("account");
    pair.server.service_account(&account)?;
    ensure!(
        std::fs::read_to_string(account.join("token"))? == pair.server.token(),
        "token file"
    );
    ensure!(
        std::fs::read_to_string(account.join("ca.crt"))? == pair.server.ca(),
        "ca.crt file"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn bookmarks_follow_the_changes_of_others() -> Result<()> {
    let server = ApiServer::start(Options {
        bookmark_every: Duration::from_millis(20),
        ..Options::loopback()?
    })?;
    let folder = TempDir::new()?;
    server.kubeconfig(&folder.path().join("kubeconfig"))?;
    let services: Api<Service> = Api::all(client(&folder.path().join("kubeconfig")).await?);
    let mut events = Box::pin(
        services
            .watch(&WatchParams::default(), &server.version().to_string())
            .await?,
    );
    server.apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}))?;
    let want = server.version().to_string();
    let bookmarked = async {
        loop {
            match events.next().await.context("the watch ended")?? {
                WatchEvent::Bookmark(bookmark) if bookmark.metadata.resource_version == want => {
                    return Ok::<_, anyhow::Error>(());
                }
                WatchEvent::Bookmark(_) => {}
                other => bail!("{other:?}"),
            }
        }
    };
    timeout(TIMEOUT, bookmarked)
        .await
        .context("no bookmark of the last version")??;
    ensure!(
        server.traffic().watches("services") == 1,
        "{:?}",
        server.traffic()
    );
    drop(events);
    ensure!(
        server.wait(TIMEOUT, |traffic| traffic.watches("services") == 0),
        "the watch outlives its client"
    );
    Ok(())
}

#[tokio::test]
async fn finalizers_hold_an_object() -> Result<()> {
    let pair = Pair::start().await?;
    let mut held = service("held");
    held["metadata"]["finalizers"] = json!(["example.com/hold"]);
    pair.server.apply(&held)?;
    let mut events = pair.watcher(watcher::Config::default()).await?;
    pair.server.delete("Service", "default", "held")?;
    until(&mut events, "Apply(held)").await?;
    let services: Api<Service> = Api::namespaced(pair.services.clone().into_client(), "default");
    let mut service = services.get("held").await?;
    ensure!(
        service.metadata.deletion_timestamp.is_some(),
        "{:?}",
        service.metadata
    );
    service.metadata.finalizers = None;
    services
        .replace("held", &PostParams::default(), &service)
        .await?;
    until(&mut events, "Delete(held)").await.map(drop)
}

#[test]
fn a_server_restarts_in_the_namespace_of_its_socket() -> Result<()> {
    // The namespace belongs to this thread, and ends with it and with the server's socket.
    let there = std::thread::spawn(|| -> Result<()> {
        unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace: are we root?")?;
        let up = Command::new("ip")
            .args(["link", "set", "lo", "up"])
            .status()
            .context("run ip")?;
        ensure!(up.success(), "set lo up: {up}");
        let mut server = ApiServer::start(Options::on(TcpListener::bind(("127.0.0.1", 6443))?))?;
        for _ in 0..2 {
            let mut before = TcpStream::connect(server.address()).context("connect")?;
            before.set_read_timeout(Some(TIMEOUT))?;
            // Another thread is in another namespace.
            std::thread::scope(|scope| {
                scope
                    .spawn(|| server.stop())
                    .join()
                    .expect("stop does not panic")
            })?;
            let cut = before.read(&mut [0]);
            ensure!(
                matches!(&cut, Ok(0)) || cut.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset),
                "still open"
            );
            let refusal = TcpStream::connect(server.address())
                .err()
                .context("a stopped server takes connections")?;
            ensure!(refusal.kind() == ErrorKind::ConnectionRefused, "{refusal}");
            server.start_again(History::Kept)?;
        }
        TcpStream::connect(server.address())
            .map(drop)
            .context("connect to the restarted server")
    });
    there.join().expect("the thread does not panic")
}

fn service(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
        "spec": {"ports": [{"port": 80}]}})
}

/// Returns the watcher's events up to the wanted one. The watcher retries after errors.
async fn until(events: &mut Events, want: &str) -> Result<Vec<String>> {
    let mut seen = Vec::new();
    let wanted = async {
        while let Some(event) = events.next().await {
            seen.push(event.map_or_else(|error| error.to_string(), |event| event.to_string()));
            if seen.last().is_some_and(|last| last == want) {
                return true;
            }
        }
        false
    };
    let found = timeout(TIMEOUT, wanted).await;
    ensure!(found == Ok(true), "no {want} among {seen:?}");
    Ok(seen)
}

fn refused<T: std::fmt::Debug>(result: kube::Result<T>, want: u16) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == want => Ok(()),
        other => bail!("{other:?} instead of {want}"),
    }
}
