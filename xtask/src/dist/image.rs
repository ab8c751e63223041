//! Writes a container image without a container engine: an OCI layout with one layer, in a tar
//! file. Includes Docker's manifest list, for tools that read only that list.

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
use crate::arch::Arch;
use crate::shell;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

pub(super) struct Image {
    pub(super) archive: Vec<u8>,
    /// The digest by which a registry knows the image, or the index of several.
    pub(super) digest: String,
}

/// Returns an image `NAME:VERSION` for the architectures. `roots` are the contents, `time` is in
/// seconds since 1970.
pub(super) fn oci(roots: &[(Arch, Files)], name: &str, version: &str, time: u64) -> Result<Image> {
    let mut blobs = Blobs::default();
    let images = roots
        .iter()
        .map(|(arch, root)| manifest(&mut blobs, *arch, root, version, time));
    let images = images.collect::<Result<Vec<_>>>()?;
    let of_one = <[(Value, Value); 1]>::try_from(images.clone()).ok();
    // For several architectures an index gets the name, and a node selects the image of its
    // architecture.
    let mut named = match &of_one {
        Some([(manifest, _)]) => manifest.clone(),
        None => {
            let manifests: Vec<_> = images.into_iter().map(|(manifest, _)| manifest).collect();
            blobs.add(
                INDEX,
                serde_json::to_vec(
                    &json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests }),
                )?,
            )
        }
    };
    let digest = named["digest"].as_str().unwrap_or_default().to_owned();
    let name = format!("{name}:{version}");
    named["annotations"] =
        json!({ "org.opencontainers.image.ref.name": version, "io.containerd.image.name": name });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [named] });
    let mut documents = vec![
        ("oci-layout", json!({ "imageLayoutVersion": "1.0.0" })),
        ("index.json", index),
    ];
    if let Some([(_, docker)]) = of_one {
        let mut docker = docker;
        docker["RepoTags"] = json!([name]);
        documents.push(("manifest.json", json!([docker])));
    }
    let Blobs(mut files) = blobs;
    for (name, document) in documents {
        files.add(name, file(serde_json::to_vec(&document)?));
    }
    Ok(Image {
        archive: files.tar(time)?,
        digest,
    })
}

/// Adds the image of an architecture. Returns its descriptor, and its entry for Docker's manifest
/// list.
fn manifest(
    blobs: &mut Blobs,
    arch: Arch,
    root: &Files,
    version: &str,
    time: u64,
) -> Result<(Value, Value)> {
    let created = Timestamp::from_second(time.try_into()?)?.to_string();
    let tar = root.tar(time)?;
    let layer = blobs.add(LAYER, gzip(&tar)?);
    let config = json!({
        "architecture": arch.go_name(),
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
    let manifest =
        json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer] });
    let mut manifest = blobs.add(MANIFEST, serde_json::to_vec(&manifest)?);
    manifest["platform"] = json!({ "architecture": arch.go_name(), "os": "linux" });
    Ok((
        manifest,
        json!({ "Config": blob_path(&config), "Layers": [blob_path(&layer)] }),
    ))
}

/// Unpacks an image like a container engine, and runs kpx in it by both names. Needs root.
pub(super) fn try_out(image: &Path, arch: Arch) -> Result<()> {
    let folder = tempfile::tempdir().context("make a folder")?;
    let layout = folder.path().join("layout");
    let root = folder.path().join("root");
    Archive::new(File::open(image)?)
        .unpack(&layout)
        .context("unpack the image")?;
    unpack_layers(&layout, &root, arch)?;
    let prefix = shell::root_prefix()?;
    // An emulator is static, so it runs inside the image.
    let emulator = arch.emulator();
    if let Some(emulator) = &emulator {
        let path = shell::which(emulator).with_context(|| format!("find {emulator}"))?;
        fs::copy(&path, root.join("emulator"))
            .with_context(|| format!("copy {}", path.display()))?;
    }
    for name in ["kpx", "kube-proxy"] {
        let words = [prefix, &["env", "--ignore-environment", "/usr/sbin/chroot"]].concat();
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .arg(&root)
            .args(emulator.iter().map(|_| "/emulator"));
        command.args([&format!("/usr/local/bin/{name}"), "--version"]);
        let output = command
            .output()
            .with_context(|| format!("run {name} in the image"))?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success() && !said.is_empty(),
            "{name} --version in the image: {output:?}"
        );
    }
    Ok(())
}

fn unpack_layers(layout: &Path, root: &Path, arch: Arch) -> Result<()> {
    let document = |path: &str| -> Result<Value> {
        let text = fs::read(layout.join(path)).with_context(|| format!("read {path}"))?;
        Ok(serde_json::from_slice(&text)?)
    };
    let mut index = document("index.json")?;
    if index["manifests"][0]["mediaType"] == INDEX {
        index = document(&blob_path(&index["manifests"][0]))?;
    }
    let images = index["manifests"].as_array().context("manifests")?;
    let image = images
        .iter()
        .find(|image| image["platform"]["architecture"] == arch.go_name());
    let manifest = document(&blob_path(
        image.with_context(|| format!("no image for {}", arch.go_name()))?,
    ))?;
    for layer in manifest["layers"].as_array().context("layers")? {
        let bytes = fs::read(layout.join(blob_path(layer)))?;
        ensure!(
            layer["digest"] == format!("sha256:{}", sha256(&bytes)),
            "a layer is not what its digest says"
        );
        Archive::new(GzDecoder::new(bytes.as_slice()))
            .unpack(root)
            .context("unpack a layer")?;
    }
    Ok(())
}

#[derive(Default)]
struct Blobs(Files);

impl Blobs {
    fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let digest = format!("sha256:{}", sha256(&bytes));
        let descriptor = json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() });
        self.0.add(&blob_path(&descriptor), file(bytes));
        descriptor
    }
}

fn blob_path(descriptor: &Value) -> String {
    let digest = descriptor["digest"].as_str().unwrap_or_default();
    format!("blobs/{}", digest.replace(':', "/"))
}

fn file(content: Vec<u8>) -> Entry {
    Entry::File {
        content,
        executable: false,
    }
}
