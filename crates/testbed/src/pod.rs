//! Acts as kubelet and container runtime for pods. The spec's files, environment, capabilities and
//! network become a process on a lab's node.

mod exec;
mod kubelet;
mod seccomp;
mod security;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use anyhow::{Context, Result, bail, ensure};
use caps::CapSet;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Container, EnvVar, PodSpec, SecurityContext, Volume};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_no_new_privs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, chdir, chroot};
use serde_json::Value;

pub use self::exec::Inside;
pub use self::kubelet::Kubelets;
use self::seccomp::apply_default_profile;
use self::security::{capabilities, user};
use crate::agent::{self, DEADLINE, binary, wait_until};
use crate::lab::{Host, Lab, Node};

const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The mount point of the BPF file system.
const BPF_FS: &str = "/sys/fs/bpf";
/// The node's files that belong to the kernel, which all nodes of a lab share.
const OF_THE_KERNEL: [&str; 3] = ["/proc", "/sys", "/lib/modules"];

/// kubeadm's manifest of kube-proxy, with the image changed to kpx's.
pub const KUBE_PROXY: &str = include_str!("pod/kube-proxy.yaml");

/// Returns the DaemonSet and the ConfigMap of [`KUBE_PROXY`].
pub fn swapped() -> Result<(DaemonSet, ConfigMap)> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(KUBE_PROXY).context("read YAML")?;
    let of_kind = |kind: &str| {
        objects
            .iter()
            .find(|object| object["kind"] == kind)
            .cloned()
            .context("one of each kind")
    };
    Ok((
        serde_json::from_value(of_kind("DaemonSet")?)?,
        serde_json::from_value(of_kind("ConfigMap")?)?,
    ))
}

/// A cluster's data for its pods.
#[derive(Clone, Debug)]
pub struct Supplies {
    /// File contents by ConfigMap and file name.
    pub config_maps: BTreeMap<String, BTreeMap<String, String>>,
    /// The folder with token, ca.crt and namespace.
    pub service_account: PathBuf,
    /// The content of /etc/hosts, in place of the node's DNS.
    pub hosts: String,
}

/// A running container, killed with this value. [`Running::stop`] ends it regularly.
pub struct Running<'a> {
    node: &'a Node,
    child: Child,
    log: PathBuf,
    env: BTreeMap<String, String>,
    security: SecurityContext,
}

impl<'a> Running<'a> {
    /// Starts the DaemonSet's pod of a node.
    pub fn start(lab: &Lab, node: &'a Node, set: &DaemonSet, supplies: &Supplies) -> Result<Self> {
        let spec = set
            .spec
            .as_ref()
            .and_then(|spec| spec.template.spec.as_ref())
            .context("a pod's spec")?;
        ensure!(
            spec.host_network == Some(true),
            "only hostNetwork is played here"
        );
        Self::run(
            lab,
            node,
            &Pod::new(lab, node, &node.host, node.host.name, spec, supplies)?,
        )
    }

    /// Starts a pod in its host of the lab: one of the node's pods, or the node itself.
    fn run(lab: &Lab, node: &'a Node, pod: &Pod) -> Result<Self> {
        let log = lab.dir().join(format!("{}-pod.log", pod.name));
        let output = File::options().create(true).append(true).open(&log)?;
        let mut command = pod.command()?;
        command.stdout(output.try_clone()?).stderr(output);
        let security = pod.container.security_context.clone().unwrap_or_default();
        let user = user(&security)?;
        if let Some(user) = user {
            command.uid(user);
        }
        // A separate thread discards these changes when it ends: file systems, root, capabilities.
        let child = pod.host.ns.run(|| {
            pod.enter()?;
            command
                .spawn()
                .with_context(|| format!("start {command:?} in a container"))
        })?;
        Ok(Self {
            node,
            child,
            log,
            env: pod.env()?,
            security,
        })
    }

    /// Returns the container, with the operations of its kubelet.
    pub fn inside(&self) -> Result<Inside> {
        Ok(Inside {
            pid: self.pid(),
            env: self.env.clone(),
            capabilities: capabilities(&self.security)?,
            no_new_privileges: self.security.allow_privilege_escalation == Some(false),
            user: user(&self.security)?,
            log: self.log.clone(),
        })
    }

    /// Starts a container like [`Running::start`], and waits until kpx is healthy.
    pub fn ready(lab: &Lab, node: &'a Node, set: &DaemonSet, supplies: &Supplies) -> Result<Self> {
        let mut running = Self::start(lab, node, set, supplies)?;
        let healthy = wait_until(DEADLINE, "kpx is healthy", || {
            ensure!(running.ended()?.is_none(), "it has ended");
            Ok(running
                .status()
                .is_ok_and(|status| status["healthy"] == true))
        });
        healthy.with_context(|| format!("{:?}\n{}", running.status(), running.log()))?;
        Ok(running)
    }

    /// Returns the path on this machine of a path on the node.
    pub fn on_node(lab: &Lab, node: &Node, path: &Path) -> Result<PathBuf> {
        let root = lab.dir().join(format!("{}-root", node.host.name));
        Ok(root.join(path.strip_prefix("/").context("an absolute path")?))
    }

    /// Returns the output of `kpx status` as JSON. The run directory may be the container's own.
    pub fn status(&self) -> Result<Value> {
        agent::status(Path::new(&format!(
            "/proc/{}/root/run/kpx",
            self.child.id()
        )))
    }

    /// Sends a kubelet's probe, and returns the status line.
    pub fn probe(&self, port: i32, path: &str) -> Result<String> {
        let host = self.node.host.addrs.v4;
        let address = (host, u16::try_from(port)?);
        let mut stream = self
            .node
            .host
            .ns
            .run(|| TcpStream::connect(address))
            .context("connect")?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.write_all(
            format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes(),
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.lines().next().unwrap_or_default().to_owned())
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Ends the container like a kubelet. Returns an error unless it exits with success.
    pub fn stop(mut self) -> Result<()> {
        kill(self.pid(), Signal::SIGTERM).context("send SIGTERM")?;
        let status = self.wait()?;
        ensure!(status.success(), "kpx: {status}; its log:\n{}", self.log());
        Ok(())
    }

    /// Waits until the container ends by itself.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        let mut status = None;
        wait_until(DEADLINE, "kpx ends", || {
            status = self.ended()?;
            Ok(status.is_some())
        })?;
        status.context("it has ended")
    }

    /// Returns a field of the kernel's process status: `CapEff`, `Seccomp` and the like.
    pub fn process(&self, key: &str) -> Result<String> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let value = status
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        Ok(value
            .with_context(|| format!("no {key} in the status"))?
            .trim()
            .to_owned())
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_else(|error| error.to_string())
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("ask for the end of kpx")
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have ended already.
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of kpx on {}:\n{}", self.node.host.name, self.log());
        }
    }
}

/// A pod with one container, bound to a node.
struct Pod<'a> {
    node: &'a Node,
    /// The pod's host in the lab.
    host: &'a Host,
    /// A unique name in the lab.
    name: &'a str,
    spec: &'a PodSpec,
    container: &'a Container,
    /// The roots of the container and of the node: each node has its own /run.
    root: PathBuf,
    node_root: PathBuf,
    supplies: &'a Supplies,
}

impl<'a> Pod<'a> {
    fn new(
        lab: &Lab,
        node: &'a Node,
        host: &'a Host,
        name: &'a str,
        spec: &'a PodSpec,
        supplies: &'a Supplies,
    ) -> Result<Self> {
        let [container] = spec.containers.as_slice() else {
            bail!("only pods of one container are played here")
        };
        let root = lab.dir().join(format!("{name}-container"));
        let node_root = lab.dir().join(format!("{}-root", node.host.name));
        fs::create_dir_all(&root).context("make the container's root")?;
        Ok(Self {
            node,
            host,
            name,
            spec,
            container,
            root,
            node_root,
            supplies,
        })
    }

    fn command(&self) -> Result<Command> {
        let env = self.env()?;
        let words = self
            .container
            .command
            .iter()
            .chain(&self.container.args)
            .flatten();
        let mut words = words.map(|word| expand(word, &env));
        let mut command = Command::new(words.next().context("a command")?);
        command
            .args(words)
            .env_clear()
            .envs(&env)
            .env("PATH", "/usr/local/bin");
        Ok(command)
    }

    fn env(&self) -> Result<BTreeMap<String, String>> {
        let env = self
            .container
            .env
            .iter()
            .flatten()
            .map(|env| Ok((env.name.clone(), self.value(env)?)));
        env.collect()
    }

    fn value(&self, env: &EnvVar) -> Result<String> {
        let field = env
            .value_from
            .as_ref()
            .and_then(|from| from.field_ref.as_ref())
            .map(|field| &*field.field_path);
        Ok(match field {
            None => env.value.clone().unwrap_or_default(),
            Some("spec.nodeName") => self.node.host.name.to_owned(),
            Some(other) => bail!("the field {other} is not played here"),
        })
    }

    /// Moves the calling thread into the container.
    fn enter(&self) -> Result<()> {
        unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace")?;
        mount_at(None, Path::new("/"), MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
        self.image()?;
        let security = self.container.security_context.clone().unwrap_or_default();
        let privileged = security.privileged == Some(true);
        for dir in ["/proc", "/sys", "/dev"] {
            bind(
                Path::new(dir),
                &self.inside(dir),
                true,
                dir == "/sys" && !privileged,
            )?;
        }
        // Runtimes mount a separate sysfs for the container, without a BPF file system.
        umount2(&self.inside(BPF_FS), MntFlags::MNT_DETACH)
            .context("unmount the BPF file system")?;
        if !privileged {
            bind(
                &self.inside("/proc/sys"),
                &self.inside("/proc/sys"),
                true,
                true,
            )?;
        }
        self.volumes()?;
        if security.read_only_root_filesystem == Some(true) {
            // A mount of its own: a process that another thread starts may still have a file of this
            // thread open for writing, and such a mount cannot become read-only.
            bind(&self.root, &self.root, true, true)?;
        }
        chroot(&self.root).context("change the root directory")?;
        chdir("/").context("go to the root directory")?;
        let capabilities = capabilities(&security)?;
        for capability in caps::all().difference(&capabilities) {
            caps::drop(None, CapSet::Bounding, *capability)
                .with_context(|| format!("drop {capability}"))?;
        }
        if security.allow_privilege_escalation == Some(false) {
            set_no_new_privs().context("forbid new privileges")?;
        }
        match security
            .seccomp_profile
            .map(|profile| profile.type_)
            .as_deref()
        {
            Some("RuntimeDefault") => apply_default_profile(&capabilities),
            Some("Unconfined") | None => Ok(()),
            Some(other) => bail!("a seccompProfile of type {other} is not played here"),
        }
    }

    /// Provides kpx under both names, and the libraries of a dynamically linked kpx.
    fn image(&self) -> Result<()> {
        mount(
            Some("tmpfs"),
            &self.root,
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )
        .context("mount the root")?;
        for dir in ["/usr/local/bin", "/etc", "/run", "/var", "/tmp"] {
            fs::create_dir_all(self.inside(dir))?;
        }
        // Relative, because it is also followed before the change of root.
        symlink("../run", self.inside("/var/run"))?;
        for dir in ["/usr/lib", "/usr/lib64", "/lib", "/lib64"]
            .map(Path::new)
            .into_iter()
            .filter(|dir| dir.exists())
        {
            match fs::read_link(dir) {
                Ok(target) => symlink(target, self.inside(dir))?,
                Err(_) => bind(dir, &self.inside(dir), false, true)?,
            }
        }
        bind(&binary()?, &self.inside("/usr/local/bin/kpx"), false, true)?;
        symlink("kpx", self.inside("/usr/local/bin/kube-proxy"))?;
        fs::write(self.inside("/etc/hosts"), &self.supplies.hosts).context("write /etc/hosts")
    }

    fn volumes(&self) -> Result<()> {
        if self.spec.automount_service_account_token != Some(false) {
            bind(
                &self.supplies.service_account,
                &self.inside(SERVICE_ACCOUNT),
                false,
                true,
            )?;
        }
        for wanted in self.container.volume_mounts.iter().flatten() {
            let volume = self
                .spec
                .volumes
                .iter()
                .flatten()
                .find(|volume| volume.name == wanted.name);
            let volume = volume.with_context(|| format!("no volume {}", wanted.name))?;
            let source = self
                .source(volume)
                .with_context(|| format!("volume {}", volume.name))?;
            let read_only = wanted.read_only == Some(true) || volume.config_map.is_some();
            bind(&source, &self.inside(&wanted.mount_path), false, read_only)?;
        }
        Ok(())
    }

    /// Returns the path of a volume's content on this machine.
    fn source(&self, volume: &Volume) -> Result<PathBuf> {
        if let Some(config_map) = &volume.config_map {
            let files = self
                .supplies
                .config_maps
                .get(&config_map.name)
                .context("no such ConfigMap")?;
            let folder = self.node_root.join("config-maps").join(&config_map.name);
            fs::create_dir_all(&folder)?;
            for (name, text) in files {
                let path = folder.join(name);
                // Another pod may be reading the file and would see a partial write as a change.
                if fs::read_to_string(&path).ok().as_ref() != Some(text) {
                    fs::write(path, text)?;
                }
            }
            return Ok(folder);
        }
        let host_path = volume
            .host_path
            .as_ref()
            .context("a source that is not played here")?;
        let path = Path::new(&host_path.path);
        if path == Path::new(BPF_FS) {
            // The node's own part of the BPF file system.
            let folder = self.node.host.ns.bpf_dir();
            fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
            return Ok(folder);
        }
        if OF_THE_KERNEL.iter().any(|dir| path.starts_with(dir)) {
            // Some machines have no modules; kubelet then creates the folder.
            fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))?;
            return Ok(path.to_owned());
        }
        let path = self.node_root.join(path.strip_prefix("/")?);
        match host_path.type_.as_deref() {
            Some("DirectoryOrCreate") => fs::create_dir_all(&path)?,
            Some("FileOrCreate") => {
                fs::create_dir_all(path.parent().context("a parent")?)?;
                File::create(&path)?;
            }
            other => bail!("a hostPath of type {other:?} is not played here"),
        }
        Ok(path)
    }

    fn inside(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root
            .join(path.as_ref().strip_prefix("/").unwrap_or(path.as_ref()))
    }
}

/// Replaces `$(NAME)` by the variable's value.
fn expand(word: &str, env: &BTreeMap<String, String>) -> String {
    env.iter().fold(word.to_owned(), |word, (name, value)| {
        word.replace(&format!("$({name})"), value)
    })
}

/// Bind-mounts a file or a directory at another path, which is created.
fn bind(from: &Path, to: &Path, recursive: bool, read_only: bool) -> Result<()> {
    if from != to && from.is_dir() {
        fs::create_dir_all(to).with_context(|| format!("make {}", to.display()))?;
    } else if from != to {
        File::create(to).with_context(|| format!("make {}", to.display()))?;
    }
    let depth = if recursive {
        MsFlags::MS_REC
    } else {
        MsFlags::empty()
    };
    mount_at(Some(from), to, MsFlags::MS_BIND | depth)?;
    if read_only {
        mount_at(
            None,
            to,
            MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY,
        )?;
    }
    Ok(())
}

fn mount_at(from: Option<&Path>, to: &Path, flags: MsFlags) -> Result<()> {
    mount(from, to, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("mount {} ({flags:?})", to.display()))
}
