//! The control plane: certificates and kubeconfigs by kubeadm, and the programs.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::output;
use crate::init::Program;
use crate::network::{API_PORT, CONTROL4, CONTROL6, Node, PODS, SERVICES};
use crate::parts::Parts;
use crate::state::dir;

/// Makes certificates and kubeconfigs. `port` is that of the API server on this machine's loopback.
pub(crate) fn prepare(parts: &Parts, nodes: &[Node], port: u16, proxy_mode: &str) -> Result<()> {
    let config = kubeadm_config(parts, proxy_mode);
    fs::write(kubeadm_file(), config).context("write kubeadm's configuration")?;
    let kubernetes = dir().join("kubernetes");
    kubeadm(parts, &["init", "phase", "certs", "all"])?;
    fs::copy(pki("ca.crt"), authorities()).context("copy the authority's certificate")?;
    for user in ["super-admin", "admin", "controller-manager", "scheduler"] {
        let mut command = kubeadm_command(parts, &["init", "phase", "kubeconfig", user]);
        output(command.arg("--kubeconfig-dir").arg(&kubernetes))?;
    }
    for node in nodes {
        let name = format!("system:node:{}", node.name);
        let text = kubeadm(
            parts,
            &[
                "kubeconfig",
                "user",
                "--client-name",
                &name,
                "--org",
                "system:nodes",
            ],
        )?;
        let path = kubeconfig_of(&node.name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    let inside = fs::read_to_string(kubernetes.join("super-admin.conf"))
        .context("read the administrator's kubeconfig")?;
    let outside = inside.replace(
        &format!("https://{CONTROL4}:{API_PORT}"),
        &format!("https://127.0.0.1:{port}"),
    );
    fs::write(dir().join("admin.conf"), outside).context("write the administrator's kubeconfig")
}

/// Makes another authority, which clients trust beside those so far, and a certificate for the API
/// server. Returns the certificate and its key.
pub(crate) fn second_authority(parts: &Parts) -> Result<[PathBuf; 2]> {
    let folder = dir().join("pki-next");
    let _absent = fs::remove_dir_all(&folder);
    let config = fs::read_to_string(kubeadm_file()).context("read kubeadm's configuration")?;
    let [from, to] =
        [&dir().join("pki"), &folder].map(|path| format!("certificatesDir: {}\n", path.display()));
    let file = kubeadm_file().with_file_name("kubeadm-next.yaml");
    fs::write(&file, config.replace(&from, &to)).context("write kubeadm's configuration")?;
    for name in ["ca", "apiserver"] {
        let mut kubeadm = Command::new(parts.program("kubeadm"));
        kubeadm.args(["init", "phase", "certs", name, "--config"]);
        output(kubeadm.arg(&file))?;
    }
    let read = |path: PathBuf| {
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    };
    let trusted = read(authorities())? + &read(folder.join("ca.crt"))?;
    fs::write(authorities(), trusted).context("write the authorities' certificates")?;
    let kubernetes = dir().join("kubernetes");
    let entries = fs::read_dir(&kubernetes)
        .with_context(|| format!("read {}", kubernetes.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    for path in entries.into_iter().chain([dir().join("admin.conf")]) {
        if path.extension().is_some_and(|ending| ending == "conf") {
            let mut kubectl = Command::new(parts.program("kubectl"));
            kubectl.args(["config", "set-cluster", "kubernetes", "--embed-certs"]);
            kubectl.arg(format!("--kubeconfig={}", path.display()));
            kubectl.arg(format!(
                "--certificate-authority={}",
                authorities().display()
            ));
            output(&mut kubectl)?;
        }
    }
    Ok(["apiserver.crt", "apiserver.key"].map(|name| folder.join(name)))
}

/// Returns a file of the control plane's certificates and keys.
pub(crate) fn pki(name: &str) -> PathBuf {
    dir().join("pki").join(name)
}

/// Returns the file with the certificates that pods trust for the API server.
pub(crate) fn authorities() -> PathBuf {
    pki("authorities.crt")
}

pub(crate) fn kubeconfig_of(node: &str) -> PathBuf {
    dir().join(format!("kubernetes/{node}.conf"))
}

fn kubeadm_file() -> PathBuf {
    dir().join("kubernetes/kubeadm.yaml")
}

pub(crate) fn kubeadm(parts: &Parts, args: &[&str]) -> Result<String> {
    output(&mut kubeadm_command(parts, args))
}

pub(crate) fn kubeadm_command(parts: &Parts, args: &[&str]) -> Command {
    let mut kubeadm = Command::new(parts.program("kubeadm"));
    kubeadm.args(args).arg("--config").arg(kubeadm_file());
    kubeadm
}

fn kubeadm_config(parts: &Parts, proxy_mode: &str) -> String {
    let version = &parts.kubernetes;
    let pki = dir().join("pki");
    let pki = pki.display();
    format!(
        r#"apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint:
  advertiseAddress: {CONTROL4}
  bindPort: {API_PORT}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: {version}
controlPlaneEndpoint: {CONTROL4}:{API_PORT}
certificatesDir: {pki}
apiServer:
  certSANs: [127.0.0.1, "{CONTROL6}"]
networking:
  serviceSubnet: {SERVICES}
  podSubnet: {PODS}
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: {proxy_mode}
clusterCIDR: {PODS}
conntrack:
  maxPerCore: 0
"#
    )
}

/// Returns the programs of the control plane.
pub(crate) fn programs(parts: &Parts) -> Vec<Program> {
    let pki = |name: &str| pki(name).display().to_string();
    let conf = |name: &str| dir().join("kubernetes").join(name).display().to_string();
    let etcd_data = dir().join("etcd").display().to_string();
    let etcd = vec![
        format!("--data-dir={etcd_data}"),
        "--unsafe-no-fsync".to_owned(),
        "--log-level=warn".to_owned(),
        "--listen-client-urls=http://127.0.0.1:2379".to_owned(),
        "--advertise-client-urls=http://127.0.0.1:2379".to_owned(),
        "--listen-peer-urls=http://127.0.0.1:2380".to_owned(),
    ];
    let api_server = vec![
        format!("--advertise-address={CONTROL4}"),
        format!("--secure-port={API_PORT}"),
        "--etcd-servers=http://127.0.0.1:2379".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--allow-privileged=true".to_owned(),
        format!("--service-cluster-ip-range={SERVICES}"),
        format!("--client-ca-file={}", pki("ca.crt")),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        format!(
            "--kubelet-client-certificate={}",
            pki("apiserver-kubelet-client.crt")
        ),
        format!(
            "--kubelet-client-key={}",
            pki("apiserver-kubelet-client.key")
        ),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        format!("--service-account-key-file={}", pki("sa.pub")),
        format!("--service-account-signing-key-file={}", pki("sa.key")),
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
        format!(
            "--requestheader-client-ca-file={}",
            pki("front-proxy-ca.crt")
        ),
        "--requestheader-allowed-names=front-proxy-client".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        format!("--proxy-client-cert-file={}", pki("front-proxy-client.crt")),
        format!("--proxy-client-key-file={}", pki("front-proxy-client.key")),
    ];
    let controllers = vec![
        format!("--kubeconfig={}", conf("controller-manager.conf")),
        format!(
            "--authentication-kubeconfig={}",
            conf("controller-manager.conf")
        ),
        format!(
            "--authorization-kubeconfig={}",
            conf("controller-manager.conf")
        ),
        format!("--client-ca-file={}", pki("ca.crt")),
        format!("--root-ca-file={}", authorities().display()),
        format!("--cluster-signing-cert-file={}", pki("ca.crt")),
        format!("--cluster-signing-key-file={}", pki("ca.key")),
        format!("--service-account-private-key-file={}", pki("sa.key")),
        "--use-service-account-credentials=true".to_owned(),
        format!("--cluster-cidr={PODS}"),
        format!("--service-cluster-ip-range={SERVICES}"),
        "--controllers=*,bootstrapsigner,tokencleaner".to_owned(),
        "--leader-elect=false".to_owned(),
    ];
    let scheduler = vec![
        format!("--kubeconfig={}", conf("scheduler.conf")),
        format!("--authentication-kubeconfig={}", conf("scheduler.conf")),
        format!("--authorization-kubeconfig={}", conf("scheduler.conf")),
        "--leader-elect=false".to_owned(),
    ];
    [
        ("etcd", etcd),
        ("kube-apiserver", api_server),
        ("kube-controller-manager", controllers),
        ("kube-scheduler", scheduler),
    ]
    .into_iter()
    .map(|(name, args)| {
        let mut command = vec![parts.program(name).display().to_string()];
        command.extend(args);
        Program {
            name: name.to_owned(),
            command,
            log: dir().join(format!("logs/{name}.log")),
        }
    })
    .collect()
}
