//! The values, folders and images that the pages of docs/ name exist in this version.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use proxy_agent::config::{Configuration, KpxConfiguration};
use serde_json::Value;

use crate::deploy::render::{Objects, deploy_dir, helm_output};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the pages by path, including those beside docs/.
fn pages() -> Result<BTreeMap<String, String>> {
    fn read(folder: &Path, name: &str, pages: &mut BTreeMap<String, String>) -> Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = format!(
                "{name}/{}",
                path.file_name().unwrap_or_default().to_string_lossy()
            );
            if path.is_dir() {
                read(&path, &name, pages)?;
            } else if name.ends_with(".md") {
                pages.insert(name, fs::read_to_string(&path)?);
            }
        }
        Ok(())
    }
    let root = deploy_dir().join("..");
    let mut pages = BTreeMap::new();
    read(&root.join("docs"), "docs", &mut pages)?;
    for name in ["README.md", "SECURITY.md"] {
        pages.insert(name.to_owned(), fs::read_to_string(root.join(name))?);
    }
    Ok(pages)
}

/// Calls `check` with each word of each page. A word has the letters of a path, an image or a
/// field.
fn each_word(check: impl Fn(&str) -> Result<bool>) -> Result<usize> {
    let mut checked = 0;
    for (page, text) in pages()? {
        for (number, line) in text.lines().enumerate() {
            for word in
                line.split(|letter: char| !letter.is_alphanumeric() && !"./:_-".contains(letter))
            {
                let word = word.trim_end_matches(['.', ':']);
                checked += usize::from(
                    check(word).with_context(|| format!("{page}:{}: {word}", number + 1))?,
                );
            }
        }
    }
    Ok(checked)
}

#[test]
fn pages_name_folders_and_files_that_exist() -> Result<()> {
    let root = deploy_dir().join("..");
    let checked = each_word(|word| {
        let Some((_, path)) = word
            .split_once("deploy/")
            .filter(|(before, _)| before.chars().all(|one| "./".contains(one)))
        else {
            return Ok(false);
        };
        // `deploy/NAMESPACE/NAME:PORT` is a Deployment.
        if path.contains(':') {
            return Ok(false);
        }
        ensure!(
            root.join("deploy").join(path).exists(),
            "there is no such file"
        );
        Ok(true)
    })?;
    ensure!(checked > 30, "{checked} paths");
    Ok(())
}

#[test]
fn pages_name_images_with_registry_and_version() -> Result<()> {
    let checked = each_word(|word| {
        let of_image = word
            .split_once("kpx:")
            .filter(|(_, tag)| tag.starts_with(|first: char| first.is_ascii_digit()));
        let of_file = word
            .strip_prefix("kpx-")
            .and_then(|rest| rest.split_once("-linux"));
        if let Some((registry, tag)) = of_image {
            ensure!(registry.contains('/'), "no registry");
            ensure!(tag == VERSION, "this is version {VERSION}");
        }
        if let Some((version, _)) = of_file {
            ensure!(
                [VERSION, "VERSION"].contains(&version),
                "this is version {VERSION}"
            );
        }
        Ok(of_image.is_some() || of_file.is_some())
    })?;
    ensure!(checked > 10, "{checked} images and files");
    Ok(())
}

#[test]
fn pages_name_values_that_the_chart_has() -> Result<()> {
    let schema: Value = serde_json::from_str(&fs::read_to_string(
        deploy_dir().join("helm/kpx/values.schema.json"),
    )?)?;
    let kube_proxy = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    let kube_proxy = serde_json::to_value(Configuration::parse(kube_proxy)?.kube_proxy)?;
    let kpx = serde_json::to_value(KpxConfiguration::default())?;
    let is_file = |word: &str| {
        [".conf", ".yaml", ".toml", ".json", ".rs"]
            .iter()
            .any(|end| word.ends_with(end))
    };
    let checked = each_word(|word| {
        let mut names = word.split('.');
        let (Some(first), Some(second)) = (names.next(), names.next()) else {
            return Ok(false);
        };
        let value = &schema["properties"][first];
        let is_other = is_file(word) || word.ends_with(".k8s.io") || word.contains(['/', ':']);
        if value["type"] != "object" || first == "global" || is_other {
            return Ok(false);
        }
        let is_known = match first {
            "config" => kube_proxy.get(second).is_some(),
            "kpxConfig" => kpx.get(second).is_some(),
            _ => value["properties"].get(second).is_some(),
        };
        ensure!(is_known, "the chart has no such value");
        Ok(true)
    })?;
    ensure!(checked > 10, "{checked} values");
    Ok(())
}

/// Returns the `helm install` commands of a page, each with its continuation lines.
fn installs(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let of_line = |line: &str| {
        line.split_once("helm install ")
            .map(|(_, args)| args.to_owned())
    };
    joined
        .lines()
        .filter(|line| !line.starts_with('|'))
        .filter_map(of_line)
        .collect()
}

/// The chart accepts the values and values files of these commands unchanged.
#[test]
fn commands_of_pages_install_the_chart() -> Result<()> {
    let mut seen = 0;
    for (page, text) in pages()? {
        for command in installs(&text) {
            let (command, _) = command.split_once(" #").unwrap_or((&command, ""));
            let mut words = command
                .split_whitespace()
                .map(|word| word.trim_matches('"'));
            ensure!(words.next() == Some("kpx"), "{page}: {command}");
            let mut args = Vec::new();
            match words.next() {
                Some("deploy/helm/kpx") => {}
                // A released chart names its image.
                Some("oci://CHARTS/kpx") => args
                    .extend(["--set", "image.repository=registry.example/kpx"].map(OsString::from)),
                _ => bail!("{page}: {command}"),
            }
            while let Some(option) = words.next() {
                let value = words
                    .next()
                    .with_context(|| format!("{page}: {option} without a value in {command}"))?;
                let value = value
                    .trim_matches('"')
                    .replace("\"$host\"", "control-plane.example")
                    .replace("$host", "c.example");
                let value = match value.strip_prefix("deploy/") {
                    Some(path) => deploy_dir().join(path).into_os_string(),
                    None => OsString::from(value),
                };
                if !["--namespace", "--version"].contains(&option) {
                    args.extend([OsString::from(option), value]);
                }
            }
            let objects = helm_output(&args).and_then(|text| Objects::read(&text));
            let objects = objects.with_context(|| format!("{page}: helm install {command}"))?;
            ensure!(objects.daemon_set.is_some(), "{page}: {command}");
            seen += 1;
        }
    }
    ensure!(seen > 8, "{seen} commands");
    Ok(())
}

#[test]
fn commands_of_pages_apply_kustomizations() -> Result<()> {
    let mut seen = 0;
    for (page, text) in pages()? {
        for (_, rest) in text
            .lines()
            .filter_map(|line| line.split_once("-k deploy/"))
        {
            let path: PathBuf = deploy_dir().join(
                rest.split([' ', '`', ',', ';', ')'])
                    .next()
                    .unwrap_or_default(),
            );
            ensure!(
                path.join("kustomization.yaml").is_file(),
                "{page}: nothing to apply in {}",
                path.display()
            );
            seen += 1;
        }
    }
    ensure!(seen > 10, "{seen} commands");
    Ok(())
}
