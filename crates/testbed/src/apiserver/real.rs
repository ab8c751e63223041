//! The real kube-apiserver from envtest's folder, with its own etcd, on loopback.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::RngExt;
use rcgen::KeyPair;
use serde_json::json;
use tempfile::TempDir;

/// The time limit for both to start on a slow machine.
const START: Duration = Duration::from_secs(120);
/// The time limit for both to end before they are killed.
const END: Duration = Duration::from_secs(10);
const SERVICE_CIDRS: &str = "10.96.0.0/16,fd00:96::/112";

/// A running kube-apiserver; a drop stops it and its etcd, and deletes their files.
#[derive(Debug)]
pub struct KubeApiserver {
    // In drop order.
    _apiserver: Process,
    _etcd: Process,
    kubeconfig: PathBuf,
    _folder: TempDir,
}

impl KubeApiserver {
    /// Starts `etcd` and `kube-apiserver` of a folder, and waits until the API server is ready.
    pub fn start(assets: &Path) -> Result<Self> {
        let folder = TempDir::new().context("make a folder")?;
        let [client, peer, secure] = free_ports()?;
        let etcd = Process::start(
            assets,
            "etcd",
            folder.path(),
            &etcd_flags(folder.path(), client, peer),
        )?;
        let token = format!("{:032x}", rand::rng().random::<u128>());
        let flags = apiserver_flags(folder.path(), &token, client, secure)?;
        let mut apiserver = Process::start(assets, "kube-apiserver", folder.path(), &flags)?;
        let kubeconfig = folder.path().join("kubeconfig");
        write_kubeconfig(&kubeconfig, secure, &token)?;
        apiserver.wait_ready(&kubeconfig)?;
        Ok(Self {
            _apiserver: apiserver,
            _etcd: etcd,
            kubeconfig,
            _folder: folder,
        })
    }

    /// Returns the kubeconfig of a cluster admin.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }
}

fn etcd_flags(folder: &Path, client: u16, peer: u16) -> Vec<String> {
    let client = format!("http://127.0.0.1:{client}");
    let peer = format!("http://127.0.0.1:{peer}");
    vec![
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
        "--unsafe-no-fsync".to_owned(),
    ]
}

/// Returns the required flags of kube-apiserver, with a token, and without admission plugins that
/// need a controller.
fn apiserver_flags(folder: &Path, token: &str, etcd: u16, secure: u16) -> Result<Vec<String>> {
    let file = |name: &str| folder.join(name).display().to_string();
    // The key signs service account tokens, which no test uses; the server requires it.
    let key = KeyPair::generate().context("make a key")?;
    for (name, text) in [
        (
            "tokens.csv",
            format!("{token},kpx-test,kpx-test,system:masters\n"),
        ),
        ("sa.key", key.serialize_pem()),
        ("sa.pub", key.public_key_pem()),
    ] {
        fs::write(folder.join(name), text).with_context(|| format!("write {name}"))?;
    }
    Ok(vec![
        format!("--etcd-servers=http://127.0.0.1:{etcd}"),
        "--bind-address=127.0.0.1".to_owned(),
        "--advertise-address=127.0.0.1".to_owned(),
        format!("--secure-port={secure}"),
        // The server writes its self-signed certificate for 127.0.0.1 there.
        format!("--cert-dir={}", file("pki")),
        format!("--token-auth-file={}", file("tokens.csv")),
        "--authorization-mode=RBAC".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-signing-key-file={}", file("sa.key")),
        format!("--service-account-key-file={}", file("sa.pub")),
        format!("--service-cluster-ip-range={SERVICE_CIDRS}"),
        "--disable-admission-plugins=ServiceAccount".to_owned(),
        // The endpoint of the Service kubernetes must not be a loopback address.
        "--endpoint-reconciler-type=none".to_owned(),
    ])
}

/// Skips verification: the server creates its certificate at its start.
fn write_kubeconfig(path: &Path, port: u16, token: &str) -> Result<()> {
    let cluster =
        json!({"server": format!("https://127.0.0.1:{port}"), "insecure-skip-tls-verify": true});
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "real",
        "clusters": [{"name": "real", "cluster": cluster}], "users": [{"name": "real", "user": {"token": token}}],
        "contexts": [{"name": "real", "context": {"cluster": "real", "user": "real"}}]});
    fs::write(path, config.to_string()).with_context(|| format!("write {}", path.display()))
}

/// Returns free ports, bound together so that they differ.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    let listeners: Vec<_> = (0..N)
        .map(|_| TcpListener::bind(("127.0.0.1", 0)))
        .collect::<Result<_, _>>()?;
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

#[derive(Debug)]
struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    fn start(assets: &Path, name: &str, folder: &Path, flags: &[String]) -> Result<Self> {
        let program = assets.join(name);
        let log = folder.join(format!("{name}.log"));
        let file = File::create(&log).with_context(|| format!("write {}", log.display()))?;
        let child = Command::new(&program)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("share the log")?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        Ok(Self { child, log })
    }

    /// Waits until the server of this kubeconfig is ready.
    fn wait_ready(&mut self, kubeconfig: &Path) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start a runtime")?;
        let deadline = Instant::now() + START;
        loop {
            if runtime.block_on(is_ready(kubeconfig)).unwrap_or(false) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait().context("look after kube-apiserver")? {
                bail!("kube-apiserver ended with {status}:\n{}", self.last_words());
            }
            if Instant::now() > deadline {
                bail!(
                    "kube-apiserver is not ready after {START:?}:\n{}",
                    self.last_words()
                );
            }
            std::thread::sleep(Duration::from_millis(100)); // Only a retry shows readiness.
        }
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let _ = kill(pid, Signal::SIGTERM); // It may have ended by itself.
        let deadline = Instant::now() + END;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn is_ready(kubeconfig: &Path) -> Result<bool> {
    let client = super::place::client(kubeconfig).await?;
    let request = http::Request::get("/readyz")
        .body(Vec::new())
        .context("make a request")?;
    Ok(client.request_text(request).await? == "ok")
}
