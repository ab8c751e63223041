//! The servers that run a scenario: this server, and others from the environment.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, DeleteParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use rand::RngExt;
use serde_json::json;
use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;

use super::real::KubeApiserver;
use super::{ApiServer, Options};

/// The kubeconfig of a running server.
pub const KUBECONFIG: &str = "KPX_TEST_KUBECONFIG";
/// A folder with kube-apiserver and etcd, as envtest expects.
pub const ASSETS: &str = "KUBEBUILDER_ASSETS";
/// The time limit of each wait in a scenario.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// A server, with a namespace for the scenario.
#[derive(Debug)]
pub struct Place {
    pub kubeconfig: PathBuf,
    pub namespace: String,
    /// The home directory for kubectl's cache.
    home: TempDir,
}

/// Runs a scenario on this server, on the server of [`KUBECONFIG`], and on the server in
/// [`ASSETS`].
pub fn everywhere(scenario: impl AsyncFn(&Place) -> Result<()>) -> Result<()> {
    let folder = TempDir::new().context("make a folder")?;
    let own = ApiServer::start(Options::loopback()?)?;
    let kubeconfig = folder.path().join("kubeconfig");
    own.kubeconfig(&kubeconfig)?;
    run(&kubeconfig, &scenario).context("on the test's own server")?;
    if let Some(kubeconfig) = std::env::var_os(KUBECONFIG) {
        run(Path::new(&kubeconfig), &scenario)
            .with_context(|| format!("on the server of {KUBECONFIG}"))?;
    }
    if let Some(assets) = std::env::var_os(ASSETS) {
        // Only one at a time: each is an etcd and a kube-apiserver.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let real = KubeApiserver::start(Path::new(&assets))?;
        run(real.kubeconfig(), &scenario)
            .with_context(|| format!("on the kube-apiserver of {ASSETS}"))?;
    }
    Ok(())
}

fn run(kubeconfig: &Path, scenario: &impl AsyncFn(&Place) -> Result<()>) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
    runtime.block_on(async {
        let namespace = format!("kpx-test-{:08x}", rand::rng().random::<u32>());
        let home = TempDir::new().context("make a folder")?;
        let place = Place {
            kubeconfig: kubeconfig.to_owned(),
            namespace,
            home,
        };
        let namespaces: Api<Namespace> = Api::all(place.client().await?);
        let namespace = serde_json::from_value(json!({"metadata": {"name": place.namespace}}))?;
        namespaces
            .create(&PostParams::default(), &namespace)
            .await
            .context("make a namespace")?;
        let result = scenario(&place).await;
        namespaces
            .delete(&place.namespace, &DeleteParams::default())
            .await
            .context("delete the namespace")?;
        result
    })
}

impl Place {
    pub async fn client(&self) -> Result<Client> {
        client(&self.kubeconfig).await
    }

    /// Runs the stock kubectl in the scenario's namespace to its end, with `input` as standard
    /// input.
    pub async fn kubectl(&self, arguments: &[&str], input: &str) -> Result<String> {
        let mut child = self
            .kubectl_command(arguments)
            .spawn()
            .context("start kubectl: is it installed?")?;
        let mut stdin = child.stdin.take().context("standard input of kubectl")?;
        tokio::io::AsyncWriteExt::write_all(&mut stdin, input.as_bytes())
            .await
            .context("write to kubectl")?;
        drop(stdin);
        let output = timeout(TIMEOUT, child.wait_with_output()).await;
        let output = output
            .with_context(|| format!("kubectl {arguments:?} does not end"))?
            .context("run kubectl")?;
        let out = String::from_utf8_lossy(&output.stdout);
        let err = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() || !err.is_empty() {
            bail!("kubectl {arguments:?}: {}\n{out}{err}", output.status);
        }
        Ok(out.into_owned())
    }

    /// Returns a kubectl command for the scenario's namespace.
    pub fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command
            .arg("--namespace")
            .arg(&self.namespace)
            .args(arguments);
        command
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", self.home.path())
            .kill_on_drop(true);
        let piped = std::process::Stdio::piped;
        command.stdin(piped()).stdout(piped()).stderr(piped());
        command
    }
}

/// Returns a client like the agent's.
pub async fn client(kubeconfig: &Path) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).context("read the kubeconfig")?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    Client::try_from(config.context("use the kubeconfig")?).context("make a client")
}
