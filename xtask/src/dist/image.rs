//! Writes a container image without a container engine: an OCI layout of one layer in a tar file. Docker's own list of
//! contents is in it as well, for tools that read only that.

use std::env::consts::ARCH;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use jiff::Timestamp;
use serde_json::{Value, json};
use tar::Archive;

use super::pack::{Entry, Files, gzip};
use super::sums::sha256;
use crate::shell;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Returns an image called `kpx:VERSION` with the content of `root`.
pub(super) fn oci(root: &Files, version: &str, time: u64) -> Result<Vec<u8>> {
    let created = Timestamp::from_second(time.try_into()?)?.to_string();
    let tar = root.tar(time)?;
    let mut blobs = Blobs::default();
    let layer = blobs.add(LAYER, gzip(&tar)?);
    let config = json!({
        "architecture": architecture(),
        "os": "linux",
        "created": created,
        "config": {
            "Entrypoint": ["/usr/local/bin/kpx"],
            "Env": ["PATH=/usr/local/bin"],
            "Labels": { "org.opencontainers.image.title": "kpx", "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": env!("CARGO_PKG_LICENSE") },
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", sha256(&tar))] },
        "history": [{ "created": created, "created_by": "cargo xtask dist" }],
    });
    let config = blobs.add(CONFIG, serde_json::to_vec(&config)?);
    let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer] });
    let mut manifest = blobs.add(MANIFEST, serde_json::to_vec(&manifest)?);
    let name = format!("docker.io/library/kpx:{version}");
    manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": version, "io.containerd.image.name": name });
    let index = json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest] });
    let docker = json!([{ "Config": blob_path(&config), "RepoTags": [format!("kpx:{version}")],
        "Layers": [blob_path(&layer)] }]);
    let Blobs(mut files) = blobs;
    let documents =
        [("oci-layout", json!({ "imageLayoutVersion": "1.0.0" })), ("index.json", index), ("manifest.json", docker)];
    for (name, document) in documents {
        files.add(name, file(serde_json::to_vec(&document)?));
    }
    files.tar(time)
}

/// Unpacks an image as a container engine would, and runs kpx in it by both of its names; this needs root.
pub(super) fn try_out(image: &Path) -> Result<()> {
    let folder = tempfile::tempdir().context("make a folder")?;
    let (layout, root) = (folder.path().join("layout"), folder.path().join("root"));
    Archive::new(File::open(image)?).unpack(&layout).context("unpack the image")?;
    unpack_layers(&layout, &root)?;
    let prefix = shell::root_prefix()?;
    for name in ["kpx", "kube-proxy"] {
        let words = [prefix, &["env", "--ignore-environment", "/usr/sbin/chroot"]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(&root).args([&format!("/usr/local/bin/{name}"), "--version"]);
        let output = command.output().with_context(|| format!("run {name} in the image"))?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success() && !said.is_empty(), "{name} --version in the image: {output:?}");
    }
    Ok(())
}

fn unpack_layers(layout: &Path, root: &Path) -> Result<()> {
    let document = |path: &str| -> Result<Value> {
        let text = fs::read(layout.join(path)).with_context(|| format!("read {path}"))?;
        Ok(serde_json::from_slice(&text)?)
    };
    let index = document("index.json")?;
    let manifest = document(&blob_path(&index["manifests"][0]))?;
    for layer in manifest["layers"].as_array().context("layers")? {
        let bytes = fs::read(layout.join(blob_path(layer)))?;
        ensure!(layer["digest"] == format!("sha256:{}", sha256(&bytes)), "a layer is not what its digest says");
        Archive::new(GzDecoder::new(bytes.as_slice())).unpack(root).context("unpack a layer")?;
    }
    Ok(())
}

#[derive(Default)]
struct Blobs(Files);

impl Blobs {
    /// Adds a blob, and returns its descriptor.
    fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let digest = format!("sha256:{}", sha256(&bytes));
        let descriptor = json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() });
        self.0.add(&blob_path(&descriptor), file(bytes));
        descriptor
    }
}

/// Returns the path of a descriptor's blob.
fn blob_path(descriptor: &Value) -> String {
    let digest = descriptor["digest"].as_str().unwrap_or_default();
    format!("blobs/{}", digest.replace(':', "/"))
}

fn file(content: Vec<u8>) -> Entry {
    Entry::File { content, executable: false }
}

/// Returns the architecture in Go's words, which OCI uses.
fn architecture() -> &'static str {
    match ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
