//! Reads configuration files: their documents and fields.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::options::DuplicateKeyPolicy;

use super::invalid::Fields;
use super::kpx::KpxConfiguration;
use super::kube_proxy::{KubeProxyConfiguration, UNSET_WHEN_ZERO};
use crate::config::tree;
use proxy_source::document::{Document, documents_with};

/// The fields from files, for each kind of document.
#[derive(Debug, Default)]
pub(super) struct FileConfig {
    pub(super) kube_proxy: Option<Value>,
    pub(super) kpx: Option<Value>,
    /// The unknown and repeated fields. They may be mistakes, or belong to a newer version of kpx.
    pub(super) doubtful: Vec<String>,
}

impl FileConfig {
    /// Reads a file's documents. For an unreadable document, the error has its line.
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
        let is_kube_proxy = (version, kind)
            == (
                KubeProxyConfiguration::API_VERSION,
                KubeProxyConfiguration::KIND,
            );
        let is_kpx = (version, kind) == (KpxConfiguration::API_VERSION, KpxConfiguration::KIND);
        ensure!(
            is_kube_proxy || is_kpx,
            "{}: unknown kind {kind:?} of apiVersion {version:?}; expected {} of {} or {} of {}",
            at("kind"),
            KubeProxyConfiguration::KIND,
            KubeProxyConfiguration::API_VERSION,
            KpxConfiguration::KIND,
            KpxConfiguration::API_VERSION,
        );
        let kind = kind.to_owned();
        tree::prune_nulls(&mut value);
        let unknown = if is_kube_proxy {
            decode::<KubeProxyConfiguration>(&value)
        } else {
            // Validation reports them with all other errors, unless a flag replaces them.
            let mut value = value.clone();
            Fields::of(KpxConfiguration::KIND).take_unknown_choices(&mut value);
            decode::<KpxConfiguration>(&value)
        };
        let unknown = match unknown {
            Ok(unknown) => unknown,
            Err((field, why)) => {
                bail!("{}: {kind}.{field}: {why}", at(&field))
            }
        };
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
        self.doubtful.extend(unknown.chain(duplicates));
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

/// Decodes a document. Returns its unknown fields, or the invalid field and the reason.
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
