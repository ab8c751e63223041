//! kube-proxy itself, fed by the tests' own API server.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Context, Result};
use serde_json::Value;

use testbed::agent::{Cluster, Object, Source};
use testbed::lab::{CLUSTER_PODS, Family, Lab};

/// A kube-proxy on n1, killed with this value; its rules go with the namespace.
#[derive(Debug)]
pub(super) struct KubeProxy<'a> {
    child: Child,
    _lab: &'a Lab,
    /// Which it watches.
    _cluster: Cluster,
}

impl<'a> KubeProxy<'a> {
    /// `mode` as `--proxy-mode` takes it.
    pub(super) fn start(lab: &'a Lab, program: &Path, mode: &str, objects: &[Value]) -> Result<Self> {
        let cluster = Cluster::with_api_server(lab)?;
        objects.iter().try_for_each(|object| cluster.put(&Object(object.clone())))?;
        let (Source::Kubeconfig(path) | Source::Manifests(path)) = cluster.source();
        let log = lab.dir().join("kube-proxy.log");
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(path);
        command.args(["--hostname-override", lab.n1.host.name, "--proxy-mode", mode]);
        command.args(["--cluster-cidr", &CLUSTER_PODS.cidr(Family::V4)]);
        // Settings of the whole machine are not its to change.
        command.args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"]);
        command.args(["--conntrack-tcp-timeout-close-wait=0"]);
        let child = lab.n1.host.ns.spawn(command.stdout(output.try_clone()?).stderr(output))?;
        Ok(Self { child, _lab: lab, _cluster: cluster })
    }
}

impl Drop for KubeProxy<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have ended by itself.
        let _ = self.child.wait();
    }
}
