//! The project's home: where its sources, files, images, charts and pages are published. The table
//! `[workspace.metadata.home]` of Cargo.toml is the only place that decides about it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace;

/// The image of a checkout. The registry `localhost` never answers, so no node pulls somebody
/// else's image.
pub(crate) const LOCAL_IMAGE: &str = "localhost/kpx";
/// The beginning of the links from alerts to their runbooks, in a checkout.
const LOCAL_RUNBOOK: &str = "runbook_url: docs/alerts.md#";

/// The page about the files of a release.
pub(crate) const PAGE: &str = "docs/get.md";

/// A field that is empty is not decided yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Home {
    /// The address of the sources and issues.
    pub(crate) repository: String,
    /// The folder of a release's files; `{version}` stands for the version.
    pub(crate) downloads: String,
    /// The folder above the sites of all versions.
    pub(crate) site: String,
    /// The name of the image, with its registry and without a tag.
    pub(crate) image: String,
    /// The folder of the chart in its registry, without `oci://`.
    pub(crate) chart: String,
    /// The address for private reports of vulnerabilities.
    pub(crate) security: String,
    /// The public key of release signatures: a file of this tree.
    pub(crate) key: String,
}

impl Home {
    pub(crate) fn read() -> Result<Self> {
        let mut cargo = workspace::cargo();
        cargo.args([
            "metadata",
            "--no-deps",
            "--format-version",
            "1",
            "--offline",
        ]);
        let output = cargo.output().context("ask cargo for the home")?;
        ensure!(
            output.status.success(),
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let metadata: Value = serde_json::from_slice(&output.stdout)?;
        Self::parse(&metadata["metadata"]["home"])
    }

    fn parse(table: &Value) -> Result<Self> {
        const TABLE: &str = "[workspace.metadata.home] of Cargo.toml";
        let table = table.as_object().with_context(|| format!("no {TABLE}"))?;
        let mut home = Self::default();
        for (name, field) in home.fields_mut() {
            let value = table
                .get(name)
                .with_context(|| format!("{TABLE} has no {name}"))?;
            let text = value
                .as_str()
                .with_context(|| format!("{name} in {TABLE} is no text"))?;
            ensure!(
                !text.ends_with('/') && !text.contains(char::is_whitespace),
                "{name} in {TABLE} ends with a slash, or has a space"
            );
            text.clone_into(field);
        }
        let known = home.fields_mut().map(|(name, _)| name);
        let strange = table.keys().find(|name| !known.contains(&name.as_str()));
        ensure!(
            strange.is_none(),
            "{TABLE} has an unknown field {strange:?}"
        );
        Ok(home)
    }

    fn fields_mut(&mut self) -> [(&'static str, &mut String); 7] {
        [
            ("repository", &mut self.repository),
            ("downloads", &mut self.downloads),
            ("site", &mut self.site),
            ("image", &mut self.image),
            ("chart", &mut self.chart),
            ("security", &mut self.security),
            ("key", &mut self.key),
        ]
    }

    /// Returns the names of the fields that are not decided yet.
    pub(crate) fn undecided(&self) -> Vec<&'static str> {
        self.clone()
            .fields_mut()
            .into_iter()
            .filter_map(|(name, text)| text.is_empty().then_some(name))
            .collect()
    }

    /// Returns this home for a trial: a registry on a port of this machine receives image and chart
    /// under two names of its host, and `.invalid`, which no resolver answers, stands for each
    /// undecided address.
    pub(crate) fn on_trial(&self, port: u16) -> Self {
        let mut home = self.clone();
        home.image = format!("127.0.0.1:{port}/kpx");
        home.chart = format!("localhost:{port}/charts");
        for (name, text) in home.fields_mut() {
            if text.is_empty() {
                *text = format!("https://{name}-is-undecided.invalid");
            }
        }
        home
    }

    /// Returns the address of a page in the site of this version. `page` is a path in the tree.
    pub(crate) fn page(&self, version: &str, page: &str) -> String {
        let page = page.replace(".md", ".html");
        format!("{}/{version}/{page}", self.site)
    }

    /// Returns the address of a file of this version.
    pub(crate) fn download(&self, version: &str, file: &str) -> String {
        format!("{}/{file}", self.downloads.replace("{version}", version))
    }

    /// Puts the addresses into a copy of [`PAGE`]. Its quotation is for readers of a checkout, and goes.
    /// The page stays as it is while an address is undecided.
    pub(crate) fn complete_page(&self, pages: &Path, version: &str) -> Result<()> {
        let words = [
            ("IMAGE", self.image.clone()),
            ("CHARTS", self.chart.clone()),
            ("DOWNLOADS", self.downloads.replace("{version}", version)),
        ];
        if words.iter().any(|(_, address)| address.is_empty()) {
            return Ok(());
        }
        let path = pages.join(PAGE);
        let page = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let mut text = String::new();
        for line in page.lines().filter(|line| !line.starts_with("> ")) {
            text.push_str(line);
            text.push('\n');
        }
        for (word, address) in &words {
            text = text.replace(word, address);
        }
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }

    /// Turns a copy of the tree's `deploy` into that of a release: the manifests and the chart name
    /// the released image by digest, and links lead to the site.
    pub(crate) fn publish(&self, deploy: &Path, version: &str, digest: &str) -> Result<()> {
        let (image, site) = (&self.image, self.page(version, ""));
        let of_component = format!("    newName: {LOCAL_IMAGE}\n    newTag: {version}\n");
        let replaced = [
            (
                LOCAL_RUNBOOK,
                format!("runbook_url: {site}docs/alerts.html#"),
            ),
            (
                of_component.as_str(),
                format!("    newName: {image}\n    newTag: {version}\n    digest: {digest}\n"),
            ),
            (
                &format!("image: {LOCAL_IMAGE}:{version}"),
                format!("image: {image}:{version}@{digest}"),
            ),
            (
                &format!("  repository: {LOCAL_IMAGE}\n"),
                format!("  repository: {image}\n"),
            ),
            ("  repository: \"\"\n", format!("  repository: {image}\n")),
            ("  digest: \"\"\n", format!("  digest: {digest}\n")),
            // The chart of a registry comes without the files of values.
            (
                "helm install kpx deploy/helm/kpx --namespace kube-system --values deploy/helm/values/kind.yaml",
                format!(
                    "helm install kpx oci://{}/kpx --version {version} --namespace kube-system --set apiServer.host=ADDRESS",
                    self.chart
                ),
            ),
        ];
        each_file(deploy, &mut |path, mut text| {
            for (from, to) in &replaced {
                text = text.replace(from, to);
            }
            if path.ends_with("Chart.yaml") {
                text.push_str(&self.of_chart(version, digest));
            }
            if path.extension().is_some_and(|ending| ending == "md") {
                text = absolute(&text, &site);
            }
            ensure!(
                !text.contains(LOCAL_IMAGE),
                "{} still names {LOCAL_IMAGE}, which only a checkout has",
                path.display()
            );
            Ok(text)
        })
    }

    /// Returns the lines that a released Chart.yaml has after the tree's, whose last field is
    /// `annotations`.
    fn of_chart(&self, version: &str, digest: &str) -> String {
        let Self {
            repository, image, ..
        } = self;
        format!(
            "  artifacthub.io/images: |\n    - name: kpx\n      image: {image}:{version}@{digest}\n\
             \x20 artifacthub.io/links: |\n    - name: sources\n      url: {repository}\n    - name: install\n      url: {install}\n    - name: vulnerabilities\n      url: {security}\n\
             home: {site}\nsources:\n  - {repository}\n",
            install = self.page(version, "docs/install.md"),
            security = self.page(version, "SECURITY.md"),
            site = self.page(version, ""),
        )
    }
}

/// Makes the links of a page in `deploy/helm/kpx` absolute.
fn absolute(text: &str, site: &str) -> String {
    let mut parts = text.split("](../../../");
    let mut page = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (link, rest) = part.split_once(')').unwrap_or((part, ""));
        page += &format!("]({site}{}){rest}", link.replace(".md", ".html"));
    }
    page
}

/// Rewrites each file below a folder.
fn each_file(
    folder: &Path,
    rewrite: &mut impl FnMut(&Path, String) -> Result<String>,
) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            each_file(&path, rewrite)?;
            continue;
        }
        let before =
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let after = rewrite(&path, before.clone())?;
        if after != before {
            fs::write(&path, after).with_context(|| format!("write {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "home_tests.rs"]
mod tests;
