//! Container images, made from this machine's programs and the genuine parts, without a registry.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::command::output;
use crate::parts::Parts;

/// The programs that containers of the tests call, beside busybox's.
const TOOLS: &[&str] = &[
    "bash",
    "conntrack",
    "curl",
    "dig",
    "getent",
    "ip",
    "ip6tables",
    "ip6tables-restore",
    "ip6tables-save",
    "ipset",
    "iptables",
    "iptables-restore",
    "iptables-save",
    "nc",
    "nft",
    // busybox's shell prefers its own applets, with fewer options, to these programs.
    "sh",
    "ss",
    "wget",
];

/// The image in the manifests of kpx that wait.
const PAUSE_OF_KPX: &str = "registry.k8s.io/pause:3.10";
pub(crate) const KUBE_ROUTER: &str = "localhost/kube-router:kpx-cluster";

/// An image's layer as files: their contents and modes by path.
type Layer = BTreeMap<PathBuf, Entry>;

enum Entry {
    File(PathBuf),
    Link(PathBuf),
    Text(String),
    Folder(u32),
}

/// Makes an archive of all images in Docker's format, unless one of the same parts exists.
pub(crate) fn archive(parts: &Parts, to: &Path) -> Result<()> {
    let changed = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).ok();
    let made = changed(to);
    let mut sources = [
        "agnhost",
        "kube-proxy",
        "coredns",
        "kube-router",
        INVALID_SEGMENT,
    ]
    .map(|name| parts.program(name))
    .to_vec();
    // This program lists the contents.
    sources.push(std::env::current_exe().context("find this program")?);
    if sources.iter().all(|source| changed(source) < made) {
        return Ok(());
    }
    let names = kubeadm_images(parts)?;
    let named = |part: &str| {
        names
            .iter()
            .find(|name| name.contains(part))
            .cloned()
            .with_context(|| format!("kubeadm lists no image {part}"))
    };
    let mut archive = Archive::new(to)?;
    let base = archive.layer(base()?)?;
    let mut agnhost = one("agnhost", parts.program("agnhost"));
    let porter = parts.sources()?.join("test/images/agnhost/porter");
    for file in ["localhost.crt", "localhost.key"] {
        agnhost.insert(file.into(), Entry::File(porter.join(file)));
    }
    let agnhost = archive.layer(agnhost)?;
    let proxy = archive.layer(one("usr/local/bin/kube-proxy", parts.program("kube-proxy")))?;
    let coredns = archive.layer(one("coredns", parts.program("coredns")))?;
    let router = archive.layer(one("kube-router", parts.program("kube-router")))?;
    let invalid_segment = archive.layer(one(INVALID_SEGMENT, parts.program(INVALID_SEGMENT)))?;
    let mut add = |names: &[String], own: &[&String], start: Start<'_>| {
        let layers: Vec<_> = std::iter::once(&base).chain(own.iter().copied()).collect();
        archive.image(names, &layers, start)
    };
    add(
        &[pause(parts)?, PAUSE_OF_KPX.to_owned()],
        &[&agnhost],
        Start(&["/agnhost", "pause"], &[]),
    )?;
    add(&[named("coredns")?], &[&coredns], Start(&["/coredns"], &[]))?;
    add(
        &[named("kube-proxy")?],
        &[&proxy],
        Start(&[], &["/usr/local/bin/kube-proxy"]),
    )?;
    add(
        &[KUBE_ROUTER.to_owned()],
        &[&router],
        Start(&["/kube-router"], &[]),
    )?;
    let TestImages {
        of_agnhost,
        of_tools,
        of_invalid_segment,
    } = test_images(parts)?;
    add(
        &of_invalid_segment,
        &[&invalid_segment],
        Start(&["/regression-issue-74839"], &[]),
    )?;
    add(
        &of_agnhost,
        &[&agnhost, &coredns],
        Start(&["/agnhost"], &["pause"]),
    )?;
    add(&of_tools, &[], Start(&[], &["sh"]))?;
    archive.finish()
}

pub(crate) fn pause(parts: &Parts) -> Result<String> {
    kubeadm_images(parts)?
        .into_iter()
        .find(|name| name.contains("/pause:"))
        .context("kubeadm lists no image of pause")
}

/// Returns the last name of agnhost's image: the tests list the names in any order, and a DaemonSet
/// that is applied with another name replaces its pods.
pub(crate) fn agnhost(parts: &Parts) -> Result<String> {
    let names = test_images(parts)?.of_agnhost;
    names.into_iter().max().context("no image of agnhost")
}

fn kubeadm_images(parts: &Parts) -> Result<Vec<String>> {
    let text = output(
        Command::new(parts.program("kubeadm"))
            .args(["config", "images", "list", "--kubernetes-version"])
            .arg(&parts.kubernetes),
    )?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// The images of Kubernetes' tests, by their contents.
struct TestImages {
    /// agnhost, with CoreDNS beside it.
    of_agnhost: Vec<String>,
    /// This machine's tools.
    of_tools: Vec<String>,
    /// The server that sends a segment outside the window.
    of_invalid_segment: Vec<String>,
}

/// The program of Kubernetes' test of a segment outside the window.
const INVALID_SEGMENT: &str = "regression-issue-74839";

fn test_images(parts: &Parts) -> Result<TestImages> {
    let text = output(Command::new(parts.program("e2e.test")).arg("--list-images"))?;
    let names = |wanted: &[&str]| -> Vec<String> {
        text.lines()
            .filter(|name| wanted.iter().any(|part| name.contains(part)))
            .map(str::to_owned)
            .collect()
    };
    let of_agnhost = names(&["/agnhost:"]);
    ensure!(!of_agnhost.is_empty(), "e2e.test lists no image of agnhost");
    Ok(TestImages {
        of_agnhost,
        of_tools: names(&["/busybox:", "/distroless-iptables:", "/glibc-dns-testing:"]),
        of_invalid_segment: names(&[INVALID_SEGMENT]),
    })
}

fn one(path: &str, file: PathBuf) -> Layer {
    [(path.into(), Entry::File(file))].into()
}

/// Returns the tools with their libraries.
fn base() -> Result<Layer> {
    let mut layer = Layer::new();
    for (folder, mode) in [
        ("tmp", 0o1777),
        ("run", 0o755),
        ("root", 0o700),
        ("var/run", 0o755),
    ] {
        layer.insert(folder.into(), Entry::Folder(mode));
    }
    for (file, text) in [
        (
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
        ),
        ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
        ("etc/nsswitch.conf", "hosts: files dns\n"),
    ] {
        layer.insert(file.into(), Entry::Text(text.to_owned()));
    }
    let busybox = which("busybox").context("images need busybox of this machine")?;
    add(&mut layer, &busybox)?;
    let busybox = fs::canonicalize(busybox)?;
    for applet in output(Command::new(&busybox).arg("--list"))?.lines() {
        layer.insert(Path::new("bin").join(applet), Entry::Link(busybox.clone()));
    }
    let mut missing = Vec::new();
    for tool in TOOLS {
        let Some(path) = which(tool) else {
            missing.push(*tool);
            continue;
        };
        add(&mut layer, &path)?;
        let name = Path::new("bin").join(tool);
        layer.insert(name, Entry::Link(fs::canonicalize(&path)?));
    }
    ensure!(
        missing.is_empty(),
        "images need these programs of this machine: {}",
        missing.join(", ")
    );
    // Loaded by name at run time.
    let libraries = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let libraries = Path::new(&libraries);
    let folder = libraries.join("xtables");
    for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        add(&mut layer, &path)?;
        // A library can serve several names.
        let real = fs::canonicalize(&path)?;
        if real != path {
            let name = path.strip_prefix("/").unwrap_or(&path).to_owned();
            layer.insert(name, Entry::Link(real));
        }
    }
    for library in ["libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2"] {
        let path = libraries.join(library);
        if path.exists() {
            add(&mut layer, &path)?;
        }
    }
    Ok(layer)
}

fn which(tool: &str) -> Option<PathBuf> {
    ["/bin", "/usr/bin", "/sbin", "/usr/sbin"]
        .map(|folder| Path::new(folder).join(tool))
        .into_iter()
        .find(|path| path.exists())
}

/// Adds a file at its canonical path, and the libraries that it is linked with.
fn add(layer: &mut Layer, path: &Path) -> Result<()> {
    let file = fs::canonicalize(path).with_context(|| format!("find {}", path.display()))?;
    let inside = file.strip_prefix("/").unwrap_or(&file).to_owned();
    if layer.contains_key(&inside) {
        return Ok(());
    }
    let libraries = output(Command::new("ldd").arg(&file)).unwrap_or_default();
    layer.insert(inside, Entry::File(file));
    for word in libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        let library = Path::new(word);
        let real = fs::canonicalize(library)?;
        add(layer, &real)?;
        // The loader looks for this name.
        if real != library {
            layer
                .entry(library.strip_prefix("/").unwrap_or(library).to_owned())
                .or_insert(Entry::Link(real));
        }
    }
    Ok(())
}

/// An image's entrypoint and its default arguments.
struct Start<'a>(&'a [&'a str], &'a [&'a str]);

/// An archive under construction.
struct Archive {
    tar: tar::Builder<File>,
    half: PathBuf,
    to: PathBuf,
    manifest: Vec<serde_json::Value>,
    written: BTreeSet<String>,
}

impl Archive {
    fn new(to: &Path) -> Result<Self> {
        let half = to.with_extension("half");
        let file = File::create(&half).with_context(|| format!("make {}", half.display()))?;
        Ok(Self {
            tar: tar::Builder::new(file),
            half,
            to: to.to_owned(),
            manifest: Vec::new(),
            written: BTreeSet::new(),
        })
    }

    /// Adds a layer. Returns its digest.
    fn layer(&mut self, files: Layer) -> Result<String> {
        let mut layer = tar::Builder::new(Vec::new());
        for (path, entry) in files {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o755);
            match entry {
                Entry::File(from) => {
                    let content =
                        fs::read(&from).with_context(|| format!("read {}", from.display()))?;
                    header.set_size(content.len() as u64);
                    layer.append_data(&mut header, &path, content.as_slice())?;
                }
                Entry::Text(text) => {
                    header.set_mode(0o644);
                    header.set_size(text.len() as u64);
                    layer.append_data(&mut header, &path, text.as_bytes())?;
                }
                Entry::Link(to) => {
                    header.set_entry_type(tar::EntryType::Symlink);
                    header.set_size(0);
                    layer.append_link(&mut header, &path, &to)?;
                }
                Entry::Folder(mode) => {
                    header.set_entry_type(tar::EntryType::Directory);
                    header.set_mode(mode);
                    header.set_size(0);
                    layer.append_data(&mut header, &path, std::io::empty())?;
                }
            }
        }
        let content = layer.into_inner()?;
        let digest = hex(&Sha256::digest(&content));
        self.add(&format!("{digest}.tar"), &content)?;
        Ok(digest)
    }

    fn image(&mut self, names: &[String], layers: &[&String], start: Start<'_>) -> Result<()> {
        let diffs: Vec<_> = layers
            .iter()
            .map(|digest| format!("sha256:{digest}"))
            .collect();
        let architecture = match std::env::consts::ARCH {
            "aarch64" => "arm64",
            _ => "amd64",
        };
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": {
                "Entrypoint": start.0,
                "Cmd": start.1,
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/"],
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": diffs },
        })
        .to_string();
        let digest = hex(&Sha256::digest(config.as_bytes()));
        self.add(&format!("{digest}.json"), config.as_bytes())?;
        let files: Vec<_> = layers
            .iter()
            .map(|digest| format!("{digest}.tar"))
            .collect();
        self.manifest.push(json!({
            "Config": format!("{digest}.json"), "RepoTags": names, "Layers": files,
        }));
        Ok(())
    }

    fn add(&mut self, name: &str, content: &[u8]) -> Result<()> {
        if self.written.insert(name.to_owned()) {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            self.tar.append_data(&mut header, name, content)?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        let manifest = serde_json::to_vec(&self.manifest)?;
        self.add("manifest.json", &manifest)?;
        self.tar.into_inner()?.flush()?;
        fs::rename(&self.half, &self.to).with_context(|| format!("rename {}", self.half.display()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
