//! Reads configuration files: their documents, and the fields of these.

use std::path::Path;

use anyhow::{Result, anyhow, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::options::DuplicateKeyPolicy;

use super::invalid::Fields;
use super::kpx::KpxConfiguration;
use super::kube_proxy::{KubeProxyConfiguration, UNSET_WHEN_ZERO};
use proxy_source::document::{Document, documents_with};
use proxy_versions::{tree, v1alpha2};

/// The fields from files for each kind of configuration.
#[derive(Debug, Default)]
pub(super) struct FileConfig {
    pub(super) kube_proxy: Option<Value>,
    pub(super) kpx: Option<Value>,
    /// The unknown and the repeated fields: the file may be made for a newer kpx, or have mistakes.
    pub(super) doubtful: Vec<String>,
    /// kube-proxy's document has the newer form.
    pub(super) is_v1alpha2: bool,
    /// The node's own addresses in a document of the newer form.
    pub(super) node_ips: Vec<String>,
}

impl FileConfig {
    /// Reads a file's documents. A document that cannot be understood is an error with its line.
    pub(super) fn read(&mut self, path: &Path, text: &str) -> Result<()> {
        for document in documents_with(text, DuplicateKeyPolicy::LastWins) {
            match document {
                Ok(document) => self.take(path, &document)?,
                Err(unreadable) => {
                    bail!("{}:{}: {}", path.display(), unreadable.line, unreadable.why)
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, path: &Path, document: &Document) -> Result<()> {
        let mut value = document.value();
        if value.is_null() {
            return Ok(());
        }
        let at = |field: &str| format!("{}:{}", path.display(), document.line(field));
        let text = |field| value.get(field).and_then(Value::as_str).unwrap_or_default();
        let version = text("apiVersion");
        let kind = text("kind");
        let is_v1alpha2 = (version, kind) == (v1alpha2::API_VERSION, KubeProxyConfiguration::KIND);
        let is_kube_proxy = is_v1alpha2
            || (version, kind)
                == (
                    KubeProxyConfiguration::API_VERSION,
                    KubeProxyConfiguration::KIND,
                );
        let is_kpx = (version, kind) == (KpxConfiguration::API_VERSION, KpxConfiguration::KIND);
        ensure!(
            is_kube_proxy || is_kpx,
            "{}: no kind {kind:?} of apiVersion {version:?} is known, but {} of {} or {} and {} of {}",
            at("kind"),
            KubeProxyConfiguration::KIND,
            KubeProxyConfiguration::API_VERSION,
            v1alpha2::API_VERSION,
            KpxConfiguration::KIND,
            KpxConfiguration::API_VERSION,
        );
        let kind = kind.to_owned();
        tree::prune_nulls(&mut value);
        let mut gone = Vec::new();
        let mut is_strict = false;
        if is_v1alpha2 {
            let converted = v1alpha2::convert(value);
            let converted = converted
                .map_err(|(field, why)| anyhow!("{}: {kind}.{field}: {why}", at(&field)))?;
            (value, gone, is_strict) = (converted.value, converted.unknown, converted.hard_fail);
            (self.is_v1alpha2, self.node_ips) = (true, converted.node_ips);
        }
        let named = |field: String| {
            if is_v1alpha2 {
                v1alpha2::name(&field)
            } else {
                field
            }
        };
        let unknown = if is_kube_proxy {
            decode::<KubeProxyConfiguration>(&value)
        } else {
            // They are named with all else that is wrong, unless a flag goes before them.
            let mut value = value.clone();
            Fields::of(KpxConfiguration::KIND).take_unknown_choices(&mut value);
            decode::<KpxConfiguration>(&value)
        };
        let unknown = match unknown {
            Ok(unknown) => unknown,
            Err((field, why)) => {
                let field = named(field);
                bail!("{}: {kind}.{field}: {why}", at(&field))
            }
        };
        let gone = gone.iter().map(|(field, instead)| {
            let instead = if instead.is_empty() {
                String::new()
            } else {
                format!(", {instead} stands for it")
            };
            format!("{kind}.{field} ({}): unknown field{instead}", at(field))
        });
        let unknown = unknown
            .iter()
            .map(|field| format!("{kind}.{field} ({}): unknown field", at(field)));
        let duplicates = document.duplicates();
        let duplicates = duplicates.iter().map(|(field, line)| {
            format!(
                "{kind}.{field} ({}:{line}): given more than once, the last one counts",
                path.display()
            )
        });
        let doubtful: Vec<_> = gone.chain(unknown).chain(duplicates).collect();
        ensure!(
            !is_strict || doubtful.is_empty(),
            "configHardFail: {}",
            doubtful.join("; ")
        );
        self.doubtful.extend(doubtful);
        if is_kube_proxy {
            UNSET_WHEN_ZERO
                .iter()
                .for_each(|field| tree::remove_if_zero(&mut value, field));
        }
        let place = if is_kube_proxy {
            &mut self.kube_proxy
        } else {
            &mut self.kpx
        };
        ensure!(place.is_none(), "{}: a second {kind}", at("kind"));
        *place = Some(value);
        Ok(())
    }
}

/// Decodes a document. Returns its unknown fields, or the field that is wrong and the reason.
fn decode<T: DeserializeOwned>(value: &Value) -> Result<Vec<String>, (String, String)> {
    let mut unknown = Vec::new();
    let mut ignored = |path: serde_ignored::Path<'_>| unknown.push(tree::path(&path.to_string()));
    let decoded: Result<T, _> =
        serde_path_to_error::deserialize(serde_ignored::Deserializer::new(value, &mut ignored));
    match decoded {
        Ok(_) => Ok(unknown),
        Err(error) => Err((error.path().to_string(), error.into_inner().to_string())),
    }
}
