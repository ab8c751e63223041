//! The genuine `kubectl port-forward`.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use anyhow::{Context, Result};
use serde_json::Value;
use testbed::agent::{DEADLINE, wait_until};

use super::fixture::{Fixture, PORT, TUNNELLED};

/// The line of kubectl's output that says where it listens, up to the port.
const LISTENS: &str = "Forwarding from 127.0.0.1:";
/// The line for each connection.
const HANDLES: &str = "Handling connection for ";

/// Returns the version that the API server is asked with. A kubectl of a distribution may choose
/// among several.
pub(super) fn version(fixture: &Fixture<'_>, program: &Path) -> Result<String> {
    let text = fixture
        .host()
        .ns
        .exec(command(fixture, program).args(["version", "--output", "json"]))?;
    let said: Value = serde_json::from_str(&text).with_context(|| format!("read {text}"))?;
    let version = said["clientVersion"]["gitVersion"].as_str();
    Ok(version
        .with_context(|| format!("no version in {text}"))?
        .to_owned())
}

fn command(fixture: &Fixture<'_>, program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("KUBECONFIG", fixture.kubeconfig())
        .env("HOME", fixture.lab().dir());
    command
}

/// A kubectl that forwards a port of the host to the pod. It is killed with this value.
pub(super) struct Forward {
    pub(super) at: SocketAddr,
    child: Child,
    log: PathBuf,
}

impl Forward {
    pub(super) fn start(fixture: &Fixture<'_>, program: &Path) -> Result<Self> {
        let log = fixture.lab().dir().join("kubectl.log");
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = command(fixture, program);
        command.args([
            "port-forward",
            "--namespace",
            "default",
            &format!("pod/{TUNNELLED}"),
            &format!(":{PORT}"),
        ]);
        command.stderr(output.try_clone()?).stdout(output);
        let child = fixture.host().ns.spawn(&mut command)?;
        let mut forward = Self {
            at: SocketAddr::from(([127, 0, 0, 1], 0)),
            child,
            log,
        };
        wait_until(DEADLINE, "kubectl listens", || {
            let said = forward.said()?;
            let port = said
                .split_once(LISTENS)
                .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
            forward.at.set_port(port.unwrap_or(0));
            Ok(port.is_some())
        })
        .with_context(|| forward.said().unwrap_or_default())?;
        Ok(forward)
    }

    /// Returns how many connections kubectl has forwarded so far.
    pub(super) fn connections(&self) -> Result<u64> {
        Ok(self.said()?.matches(HANDLES).count() as u64)
    }

    fn said(&self) -> Result<String> {
        fs::read_to_string(&self.log).with_context(|| format!("read {}", self.log.display()))
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have ended.
        let _ = self.child.wait();
    }
}
