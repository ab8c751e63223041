//! Builds the genuine parts from Go modules, once for each pin, into a cache outside the checkout.
//!
//! Each family has its own module in `parts/`, because one module cannot satisfy the requirements
//! of all families together.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::command::output;
use crate::state::State;

/// The minor versions of Kubernetes that have a module.
const KUBERNETES: [&str; 3] = ["1.34", "1.36", "1.37"];
pub(crate) const DEFAULT_KUBERNETES: &str = "1.36";

/// A program's family, package and path in the cache.
struct Program {
    family: &'static str,
    package: &'static str,
    path: &'static str,
    how: How,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Static,
    /// With these build tags.
    Tags(&'static str),
    /// With C code, and with libseccomp.
    Seccomp,
    /// The tests of the package.
    Tests,
}

const fn program(
    family: &'static str,
    path: &'static str,
    package: &'static str,
    how: How,
) -> Program {
    Program {
        family,
        package,
        path,
        how,
    }
}

/// The snapshotters for file systems that no node of this cluster has.
const CONTAINERD: How = How::Tags("no_btrfs,no_devmapper,no_zfs");

#[rustfmt::skip]
const PROGRAMS: &[Program] = &[
    program("kubernetes", "kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", How::Static),
    program("kubernetes", "kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", How::Static),
    program("kubernetes", "kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler", How::Static),
    program("kubernetes", "kubelet", "k8s.io/kubernetes/cmd/kubelet", How::Static),
    program("kubernetes", "kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy", How::Static),
    program("kubernetes", "kubectl", "k8s.io/kubernetes/cmd/kubectl", How::Static),
    program("kubernetes", "kubeadm", "k8s.io/kubernetes/cmd/kubeadm", How::Static),
    program("kubernetes", "agnhost", "k8s.io/kubernetes/test/images/agnhost", How::Static),
    program("kubernetes", "regression-issue-74839", "k8s.io/kubernetes/test/images/regression-issue-74839", How::Static),
    program("kubernetes", "ginkgo", "github.com/onsi/ginkgo/v2/ginkgo", How::Static),
    program("kubernetes", "e2e.test", "k8s.io/kubernetes/test/e2e", How::Tests),
    program("etcd", "etcd", "go.etcd.io/etcd/server/v3", How::Static),
    program("etcd", "etcdctl", "go.etcd.io/etcd/etcdctl/v3", How::Static),
    program("etcd", "etcdutl", "go.etcd.io/etcd/etcdutl/v3", How::Static),
    program("containerd", "containerd", "github.com/containerd/containerd/v2/cmd/containerd", CONTAINERD),
    program("containerd", "containerd-shim-runc-v2", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", CONTAINERD),
    program("containerd", "ctr", "github.com/containerd/containerd/v2/cmd/ctr", CONTAINERD),
    program("runc", "runc", "github.com/opencontainers/runc", How::Seccomp),
    program("plugins", "cni/bridge", "github.com/containernetworking/plugins/plugins/main/bridge", How::Static),
    program("plugins", "cni/ptp", "github.com/containernetworking/plugins/plugins/main/ptp", How::Static),
    program("plugins", "cni/loopback", "github.com/containernetworking/plugins/plugins/main/loopback", How::Static),
    program("plugins", "cni/host-local", "github.com/containernetworking/plugins/plugins/ipam/host-local", How::Static),
    program("plugins", "cni/portmap", "github.com/containernetworking/plugins/plugins/meta/portmap", How::Static),
    program("coredns", "coredns", "github.com/coredns/coredns", How::Static),
    program("kube-router", "kube-router", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router", How::Static),
];

/// The built parts of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    dir: PathBuf,
    /// The full version of Kubernetes, such as `v1.36.3`.
    pub(crate) kubernetes: String,
}

impl Parts {
    pub(crate) fn of(state: &State) -> Self {
        Self {
            dir: state.parts.clone(),
            kubernetes: state.kubernetes.clone(),
        }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the folder of Kubernetes' sources.
    pub(crate) fn sources(&self) -> Result<PathBuf> {
        let minor = self.kubernetes.trim_start_matches('v');
        let minor = minor.rsplit_once('.').map_or(minor, |(minor, _)| minor);
        let module = Module::of("kubernetes", minor);
        let mut go = go();
        go.current_dir(&module.dir)
            .args(["mod", "download", "-json", "k8s.io/kubernetes"]);
        let module: Value = serde_json::from_str(&output(&mut go)?).context("read go's answer")?;
        let dir = module["Dir"]
            .as_str()
            .context("go names no folder of Kubernetes")?;
        Ok(dir.into())
    }

    pub(crate) fn program(&self, path: &str) -> PathBuf {
        self.dir.join(path)
    }
}

/// Builds the programs that the cache lacks.
pub(crate) fn build(kubernetes: &str) -> Result<Parts> {
    ensure!(
        KUBERNETES.contains(&kubernetes),
        "--kubernetes {kubernetes}: there are modules for {}",
        KUBERNETES.join(", ")
    );
    let cache = cache()?;
    let dir = cache.join(format!("with-kubernetes-{kubernetes}"));
    fs::create_dir_all(dir.join("cni")).with_context(|| format!("make {}", dir.display()))?;
    for program in PROGRAMS {
        let module = Module::of(program.family, kubernetes);
        let built = cache
            .join(format!("{}-{}", module.name, module.digest(program)?))
            .join(program.path);
        if !built.exists() {
            module.build(program, &built)?;
        }
        link(&built, &dir.join(program.path))?;
    }
    Ok(Parts {
        kubernetes: Module::of("kubernetes", kubernetes).version("k8s.io/kubernetes")?,
        dir,
    })
}

/// Returns the Go that xtask found: sudo may replace the PATH.
fn go() -> Command {
    Command::new(std::env::var_os("KPX_GO").unwrap_or_else(|| "go".into()))
}

/// Returns `$XDG_CACHE_HOME/kpx/genuine`.
pub(crate) fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is set")?;
    Ok(base.join("kpx/genuine"))
}

/// Makes a hard link, so that a part is in the cache once, however many versions of Kubernetes it
/// serves.
fn link(built: &Path, to: &Path) -> Result<()> {
    let half = to.with_extension("half");
    let _absent = fs::remove_file(&half);
    fs::hard_link(built, &half)
        .and_then(|()| fs::rename(&half, to))
        .with_context(|| format!("link {} to {}", built.display(), to.display()))
}

/// A Go module of `parts/`.
struct Module {
    name: String,
    dir: PathBuf,
}

impl Module {
    fn of(family: &str, kubernetes: &str) -> Self {
        let name = if family == "kubernetes" {
            format!("{family}-{kubernetes}")
        } else {
            family.to_owned()
        };
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("parts")
            .join(&name);
        Self { name, dir }
    }

    /// Returns a digest of what determines the program.
    fn digest(&self, program: &Program) -> Result<String> {
        let mut hash = Sha256::new();
        for file in ["go.mod", "go.sum"] {
            let path = self.dir.join(file);
            hash.update(fs::read(&path).with_context(|| format!("read {}", path.display()))?);
        }
        hash.update(program.how.arguments().concat());
        hash.update(program.package);
        hash.update(std::env::consts::ARCH);
        let digest = hash.finalize();
        Ok(digest
            .iter()
            .take(6)
            .map(|byte| format!("{byte:02x}"))
            .collect())
    }

    /// Returns the required version of a module.
    fn version(&self, module: &str) -> Result<String> {
        let path = self.dir.join("go.mod");
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        version_in(&text, module)
            .map(str::to_owned)
            .with_context(|| format!("{} requires no {module}", path.display()))
    }

    fn build(&self, program: &Program, to: &Path) -> Result<()> {
        eprintln!("==> build {} of {}", program.path, self.name);
        let started = Instant::now();
        // An interrupted build leaves no half of a program.
        let half = to.with_extension("half");
        let mut go = go();
        go.current_dir(&self.dir)
            .env(
                "CGO_ENABLED",
                if program.how == How::Seccomp {
                    "1"
                } else {
                    "0"
                },
            )
            .args(program.how.arguments())
            .args(["-trimpath", "-mod=readonly", "-ldflags"])
            .arg(self.linker_flags()?)
            .arg("-o")
            .arg(&half)
            .arg(program.package);
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        }
        output(&mut go).with_context(|| format!("build {} of {}", program.path, self.name))?;
        fs::rename(&half, to).with_context(|| format!("rename {}", half.display()))?;
        eprintln!("    {}: {} s", program.path, started.elapsed().as_secs());
        Ok(())
    }

    /// Kubernetes' programs compare their versions with each other's.
    fn linker_flags(&self) -> Result<String> {
        let mut flags = String::from("-s -w");
        if self.name.starts_with("kubernetes") {
            let version = self.version("k8s.io/kubernetes")?;
            let minor = version.split('.').nth(1).unwrap_or_default();
            for (name, value) in [
                ("gitVersion", version.as_str()),
                ("gitMajor", "1"),
                ("gitMinor", minor),
                ("gitTreeState", "clean"),
            ] {
                flags += &format!(" -X k8s.io/component-base/version.{name}={value}");
            }
        }
        Ok(flags)
    }
}

impl How {
    fn arguments(self) -> Vec<&'static str> {
        match self {
            Self::Static => vec!["build"],
            Self::Seccomp => vec!["build", "-tags", "seccomp"],
            Self::Tags(tags) => vec!["build", "-tags", tags],
            // Upstream's code is vetted upstream.
            Self::Tests => vec!["test", "-c", "-vet=off"],
        }
    }
}

fn version_in<'a>(go_mod: &'a str, module: &str) -> Option<&'a str> {
    go_mod.lines().find_map(|line| {
        let line = line.trim();
        let line = line.strip_prefix("require ").unwrap_or(line);
        let version = line.strip_prefix(module)?.strip_prefix(' ')?;
        version
            .split_whitespace()
            .next()
            .filter(|version| version.starts_with('v'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_that_of_the_requirement() {
        let text = "module m\n\nrequire k8s.io/kubernetes v1.36.3\n\nrequire (\n\tk8s.io/api v0.0.0 // indirect\n)\n\
                    replace (\n\tk8s.io/api => k8s.io/api v0.36.3\n)\n";
        assert_eq!(version_in(text, "k8s.io/kubernetes"), Some("v1.36.3"));
        assert_eq!(version_in(text, "k8s.io/api"), Some("v0.0.0"));
        assert_eq!(version_in(text, "k8s.io/kube"), None);
    }

    #[test]
    fn each_program_is_a_tool_of_its_module() {
        for kubernetes in KUBERNETES {
            for program in PROGRAMS.iter().filter(|program| program.how != How::Tests) {
                let module = Module::of(program.family, kubernetes);
                let text = fs::read_to_string(module.dir.join("go.mod")).unwrap();
                let tools = text.lines().filter_map(|line| {
                    let line = line.trim();
                    (line.split(' ').count() == 1)
                        .then_some(line)
                        .or(line.strip_prefix("tool "))
                });
                assert!(
                    tools.into_iter().any(|tool| tool == program.package),
                    "{} in {}",
                    program.package,
                    module.name
                );
            }
        }
    }
}
