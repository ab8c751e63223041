//! A release in the cluster: its chart and image come from a registry, as the documentation says,
//! in the place of kube-proxy; then the next release, and back, under load.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::addons::has_sys_resource;
use crate::command::output;
use crate::load::Run;
use crate::parts::Parts;
use crate::state::{State, admin_inside, dir};
use crate::up::until;
use crate::web;

/// The lines of docs/get.md.
const INSTALL: &str = "helm install kpx oci://CHARTS/kpx --version VERSION --namespace kube-system --set existingConfigMap=kube-proxy";
const UPGRADE: &str = "helm upgrade kpx oci://CHARTS/kpx --version VERSION --namespace kube-system --reset-then-reuse-values";
const ROLLBACK: &str = "helm rollback kpx --namespace kube-system";

#[derive(Args)]
pub(crate) struct Options {
    /// The folder of a release, as `cargo xtask release --dry-run` makes it
    release: PathBuf,
    /// The folder of the release before, which is installed first
    #[arg(long)]
    from: Option<PathBuf>,
    /// How often to upgrade and go back
    #[arg(long, default_value_t = 1, requires = "from")]
    rounds: u32,
    /// The program of Helm
    #[arg(long, env = "HELM", default_value = "helm")]
    helm: PathBuf,
    #[command(flatten)]
    load: web::LoadOptions,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    ensure!(
        state.proxy.starts_with("kube-proxy"),
        "the cluster runs {}: start one with --proxy kube-proxy-nftables or kube-proxy-iptables",
        state.proxy
    );
    let mut releases = Vec::new();
    for folder in options.from.iter().chain([&options.release]) {
        releases.push(Release::read(folder).with_context(|| folder.display().to_string())?);
    }
    let registry = Registry::start(&state, &releases)?;
    let cluster = Cluster {
        state: &state,
        helm: &options.helm,
    };
    for release in &releases {
        cluster.push(release)?;
    }
    let code = web::under_load(&state, &Parts::of(&state), &options.load, |run| {
        cluster.steps(&releases, options.rounds, run)
    });
    drop(registry);
    code
}

/// A release's files, and the addresses that its chart names.
struct Release {
    version: String,
    /// The image, with its registry on 127.0.0.1, and without a tag.
    repository: String,
    digest: String,
    port: u16,
    chart: PathBuf,
    image: PathBuf,
    /// What an operator unpacks: the folder with `deploy`.
    unpacked: PathBuf,
}

impl Release {
    fn read(folder: &Path) -> Result<Self> {
        let folder = fs::canonicalize(folder)?;
        let mut names = Vec::new();
        for entry in fs::read_dir(&folder)? {
            names.extend(entry?.file_name().into_string().ok());
        }
        let find = |what: &str, is: &dyn Fn(&str) -> bool| {
            let name = names
                .iter()
                .filter(|name| is(name))
                .min_by_key(|name| name.len());
            name.map(|name| folder.join(name))
                .with_context(|| format!("no {what}"))
        };
        let chart = find("chart", &|name| name.ends_with(".tgz"))?;
        let name = chart
            .file_stem()
            .and_then(OsStr::to_str)
            .unwrap_or_default();
        let version = name
            .strip_prefix("kpx-")
            .context("the chart's version")?
            .to_owned();
        // The image of several architectures has the shortest name.
        let image = find("image", &|name| name.ends_with(".oci.tar"))?;
        let archive = find("archive", &|name| {
            name.ends_with(&format!("-linux-{}.tar.gz", std::env::consts::ARCH))
        })?;
        let unpacked = dir().join(format!("release-{version}"));
        let _absent = fs::remove_dir_all(&unpacked);
        fs::create_dir(&unpacked).with_context(|| format!("make {}", unpacked.display()))?;
        unpack(&archive, &unpacked)?;
        unpack(&chart, &unpacked)?;
        let values = fs::read_to_string(unpacked.join("kpx/values.yaml"))
            .context("the values of the chart")?;
        let value = |key: &str| {
            values
                .lines()
                .find_map(|line| line.strip_prefix(&format!("  {key}: ")))
                .map(|value| value.trim_matches('"').to_owned())
                .with_context(|| format!("the chart's values have no {key}"))
        };
        let (repository, digest) = (value("repository")?, value("digest")?);
        let port = repository
            .strip_prefix("127.0.0.1:")
            .and_then(|rest| rest.split('/').next()?.parse().ok())
            .with_context(|| {
                format!("{repository} is no trial: `cargo xtask release --dry-run` makes one")
            })?;
        Ok(Self {
            version,
            repository,
            digest,
            port,
            chart,
            image,
            unpacked,
        })
    }

    /// Returns a path below the archive's only folder.
    fn file(&self, path: &str) -> Result<PathBuf> {
        for entry in fs::read_dir(&self.unpacked)? {
            let path = entry?.path().join(path);
            if path.exists() {
                return Ok(path);
            }
        }
        bail!("the archive of {} has no {path}", self.version)
    }
}

fn unpack(archive: &Path, to: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(archive);
    output(tar.arg("--directory").arg(to)).map(drop)
}

/// Registries at 127.0.0.1 of the control plane and of each node, which serve the same files. They
/// end with this value.
struct Registry(Vec<Child>);

impl Registry {
    fn start(state: &State, releases: &[Release]) -> Result<Self> {
        let folder = dir().join("registry");
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let mut ports: Vec<_> = releases.iter().map(|release| release.port).collect();
        ports.dedup();
        let mut registry = Self(Vec::new());
        for host in std::iter::once("control").chain(state.nodes.iter().map(String::as_str)) {
            for port in &ports {
                registry.serve(state, host, *port, &folder)?;
            }
        }
        Ok(registry)
    }

    fn serve(&mut self, state: &State, host: &str, port: u16, folder: &Path) -> Result<()> {
        let config = folder.join(format!("{host}-{port}.yml"));
        let log = config.with_extension("log");
        let text = format!(
            "version: 0.1\nlog: {{ level: warn }}\nhttp: {{ addr: '127.0.0.1:{port}' }}\n\
             storage: {{ filesystem: {{ rootdirectory: {} }} }}\n",
            folder.join("data").display()
        );
        fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
        let file = File::create(&log).with_context(|| format!("make {}", log.display()))?;
        // Only the network is another one: this machine's programs and files serve.
        let pid = match host {
            "control" => state.first()?,
            node => state.node_pid(node)?,
        };
        let mut server = Command::new("nsenter");
        server
            .arg(format!("--target={pid}"))
            .args(["--net", "--", "docker-registry", "serve"]);
        server.arg(&config).stdin(Stdio::null());
        server.stdout(file.try_clone()?).stderr(file);
        self.0.push(server.spawn().context("run nsenter")?);
        until(&format!("the registry of {host} answers"), || {
            let mut curl = state.enter(host, "curl")?;
            curl.args(["--fail", "--silent", "--show-error"]);
            output(curl.arg(format!("http://127.0.0.1:{port}/v2/"))).map(drop)
        })
        .with_context(|| fs::read_to_string(&log).unwrap_or_default())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        for server in &mut self.0 {
            let _ended = server.kill();
            let _ended = server.wait();
        }
    }
}

struct Cluster<'a> {
    state: &'a State,
    helm: &'a Path,
}

impl Cluster<'_> {
    fn push(&self, release: &Release) -> Result<()> {
        let mut skopeo = self.on_control("skopeo")?;
        skopeo.args([
            "copy",
            "--quiet",
            "--all",
            "--preserve-digests",
            "--dest-tls-verify=false",
        ]);
        skopeo.arg(format!("oci-archive:{}", release.image.display()));
        output(skopeo.arg(format!(
            "docker://{}:{}",
            release.repository, release.version
        )))?;
        let mut helm = self.on_control(self.helm)?;
        helm.args(["push", "--plain-http"]).arg(&release.chart);
        output(helm.arg(format!("oci://localhost:{}/charts", release.port))).map(drop)
    }

    /// Returns a command of this machine in the network of the control plane.
    fn on_control(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.state.first()?));
        command.args(["--net", "--"]).arg(program);
        command.env("KUBECONFIG", admin_inside());
        Ok(command)
    }

    fn steps(&self, releases: &[Release], rounds: u32, run: &mut Run) -> Result<()> {
        let (first, later) = releases.split_first().context("no release")?;
        run.step("kube-proxy serves", || {
            sleep(Duration::from_secs(5));
            Ok(())
        })?;
        run.step(&format!("kpx {} installed", first.version), || {
            self.install(INSTALL, first)
        })?;
        run.step("kube-proxy and its rules removed", || {
            self.kubectl(&["delete", "daemonset", "kube-proxy"])?;
            let cleanup = first.file("deploy/kubernetes/kube-proxy-cleanup")?;
            let cleanup = cleanup.to_string_lossy();
            self.kubectl(&["apply", "-k", &cleanup])?;
            self.rolled_out("kpx-kube-proxy-cleanup")?;
            self.kubectl(&["delete", "-k", &cleanup])
        })?;
        for release in (0..rounds).flat_map(|_| later) {
            run.step(&format!("upgraded to kpx {}", release.version), || {
                self.install(UPGRADE, release)
            })?;
            run.step(&format!("back to kpx {}", first.version), || {
                let mut helm = self.on_control(self.helm)?;
                output(helm.args(ROLLBACK.split_whitespace().skip(1)))?;
                self.runs(first)
            })?;
        }
        run.step("it serves", || {
            sleep(Duration::from_secs(5));
            Ok(())
        })
    }

    /// Runs a line of docs/get.md.
    fn install(&self, line: &str, release: &Release) -> Result<()> {
        let line = line
            .replace("CHARTS", &format!("localhost:{}/charts", release.port))
            .replace("VERSION", &release.version);
        let mut helm = self.on_control(self.helm)?;
        helm.args(line.split_whitespace().skip(1))
            .arg("--plain-http");
        if !has_sys_resource()? {
            helm.args(["--set", "capabilities={BPF,NET_ADMIN,PERFMON}"]);
        }
        output(&mut helm)?;
        self.runs(release)
    }

    /// Waits until each node runs the release's image, which it pulled from the registry.
    fn runs(&self, release: &Release) -> Result<()> {
        self.rolled_out("kpx")?;
        let images = self.answer(&[
            "get",
            "pods",
            "--selector=app.kubernetes.io/name=kpx",
            "--output=jsonpath={range .items[*]}{.spec.containers[0].image} {end}",
        ])?;
        let wanted = format!("{}@{}", release.repository, release.digest);
        ensure!(
            images.split_whitespace().count() == self.state.nodes.len()
                && images.split_whitespace().all(|image| image == wanted),
            "{images} run in the place of {wanted}"
        );
        let version = self.answer(&["exec", "daemonset/kpx", "--", "kpx", "--version"])?;
        ensure!(
            version.contains(&release.version),
            "{version} runs in the place of {}",
            release.version
        );
        Ok(())
    }

    fn rolled_out(&self, set: &str) -> Result<()> {
        let set = format!("daemonset/{set}");
        self.kubectl(&["rollout", "status", &set, "--timeout=180s"])
    }

    fn kubectl(&self, args: &[&str]) -> Result<()> {
        self.answer(args).map(drop)
    }

    fn answer(&self, args: &[&str]) -> Result<String> {
        output(
            self.state
                .kubectl()
                .arg("--namespace=kube-system")
                .args(args),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_documentation() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/get.md");
        let page = fs::read_to_string(page).unwrap();
        for (line, version) in [
            (INSTALL, env!("CARGO_PKG_VERSION")),
            (UPGRADE, "NEXT"),
            (ROLLBACK, ""),
        ] {
            let line = line.replace("VERSION", version);
            assert!(page.contains(&line), "docs/get.md lacks {line}");
        }
    }
}
