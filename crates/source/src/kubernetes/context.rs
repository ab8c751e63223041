//! Selects the context of a kubeconfig. The error for a missing context names the existing
//! contexts.

use std::path::Path;

use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};

use super::errors::{Fault, SourceError};

/// The maximum number of contexts that an error names.
const NAMED: usize = 12;
/// The minimum similarity of a suggested name, between 0 and 1.
const SIMILAR: f64 = 0.6;

/// Creates the configuration of this context, or of the kubeconfig's current context.
pub async fn configured(
    kubeconfig: Kubeconfig,
    context: Option<&str>,
) -> Result<Config, SourceError> {
    let names: Vec<_> = kubeconfig
        .contexts
        .iter()
        .map(|context| context.name.clone())
        .collect();
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    Config::from_custom_kubeconfig(kubeconfig, &options)
        .await
        .map_err(|error| match error {
            KubeconfigError::LoadContext(wanted) if !names.contains(&wanted) => {
                let which = if context.is_some() {
                    "context"
                } else {
                    "current context"
                };
                SourceError::new(
                    Fault::Context,
                    format!("it has no {which} {wanted:?}{}", instead(&wanted, &names)),
                )
            }
            KubeconfigError::CurrentContextNotSet => SourceError::new(
                Fault::Context,
                format!("it has no current context{}", instead("", &names)),
            ),
            error => SourceError::new(Fault::Kubeconfig, error.to_string()),
        })
}

/// Reads the kubeconfig at `path`; `None`: `kubectl`'s files.
pub fn kubeconfig(path: Option<&Path>) -> Result<Kubeconfig, SourceError> {
    let fault = if path.is_some() {
        Fault::Kubeconfig
    } else {
        Fault::NoKubeconfig
    };
    let read = path.map_or_else(Kubeconfig::read, Kubeconfig::read_from);
    read.map_err(|error| match error {
        KubeconfigError::ReadConfig(error, path) => {
            SourceError::new(fault, format!("read {}: {error}", path.display()))
        }
        KubeconfigError::FindPath => {
            SourceError::new(Fault::NoKubeconfig, "this user has no home directory")
        }
        error => {
            let of_file = path
                .map(|path| format!("read {}: ", path.display()))
                .unwrap_or_default();
            SourceError::new(Fault::Kubeconfig, format!("{of_file}{error}"))
        }
    })
}

/// Lists the existing contexts, with the context most similar to `wanted`.
fn instead(wanted: &str, names: &[String]) -> String {
    if names.is_empty() {
        return ", the only context".to_owned();
    }
    let more = names.len().saturating_sub(NAMED);
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    let nearest = nearest(wanted, names)
        .map(|name| format!("; did you mean {name}?"))
        .unwrap_or_default();
    format!(
        "; its contexts: {}{more}{nearest}",
        names[..names.len().min(NAMED)].join(", ")
    )
}

/// Returns the name most similar to `wanted`, which is often only a part of a name.
fn nearest<'a>(wanted: &str, names: &'a [String]) -> Option<&'a String> {
    let similarity = |name: &str| {
        let is_part = !wanted.is_empty() && (name.contains(wanted) || wanted.contains(name));
        strsim::normalized_damerau_levenshtein(wanted, name).max(if is_part {
            SIMILAR
        } else {
            0.0
        })
    };
    let rated = names
        .iter()
        .map(|name| (similarity(name), name))
        .filter(|(rate, _)| *rate >= SIMILAR);
    rated
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_contexts(current: &str, contexts: &[&str]) -> Kubeconfig {
        let contexts: Vec<_> = contexts
            .iter()
            .map(|name| format!("{{name: {name}, context: {{cluster: c}}}}"))
            .collect();
        let text = format!(
            "{{current-context: {current}, contexts: [{}], clusters: [{{name: c, cluster: {{server: 'https://one:6443'}}}}]}}",
            contexts.join(", ")
        );
        Kubeconfig::from_yaml(&text).unwrap()
    }

    #[test]
    fn missing_file_is_named_once() {
        let error = kubeconfig(Some(Path::new("/nowhere/config"))).unwrap_err();
        assert_eq!(error.fault, Fault::Kubeconfig);
        assert_eq!(
            error.to_string(),
            "read /nowhere/config: No such file or directory (os error 2)"
        );
    }

    #[tokio::test]
    async fn unknown_context_is_answered_with_the_known_ones() {
        let many: Vec<_> = (0..15).map(|n| format!("n{n}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        for (current, contexts, wanted, says) in [
            (
                "dev",
                &["dev", "prod-eu"][..],
                Some("dve"),
                r#"it has no context "dve"; its contexts: dev, prod-eu; did you mean dev?"#,
            ),
            (
                "dev",
                &["dev", "prod-eu"],
                Some("prod"),
                r#"it has no context "prod"; its contexts: dev, prod-eu; did you mean prod-eu?"#,
            ),
            (
                "dev",
                &["dev", "prod-eu"],
                Some("zz"),
                r#"it has no context "zz"; its contexts: dev, prod-eu"#,
            ),
            (
                "old",
                &["dev"],
                None,
                r#"it has no current context "old"; its contexts: dev"#,
            ),
            (
                "null",
                &["dev"],
                None,
                "it has no current context; its contexts: dev",
            ),
            (
                "dev",
                &[],
                None,
                r#"it has no current context "dev", the only context"#,
            ),
            (
                "n0",
                &many,
                Some("zz"),
                r#"it has no context "zz"; its contexts: n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11 and 3 more"#,
            ),
        ] {
            let error = configured(with_contexts(current, contexts), wanted)
                .await
                .unwrap_err();
            assert_eq!(
                (error.fault, error.to_string().as_str()),
                (Fault::Context, says)
            );
        }
        let known = configured(with_contexts("old", &["dev"]), Some("dev")).await;
        assert_eq!(known.unwrap().cluster_url, "https://one:6443/");
    }
}
