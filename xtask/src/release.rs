//! Makes the files of a release; signs them, and pushes image and chart to their registries. A dry
//! run does the same with a registry of its own and a key that nobody has afterwards.

mod documents;
mod registry;
mod sign;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::arch::Arch;
use crate::dist::pack::Files;
use crate::dist::{self, Release, sums};
use crate::home::Home;
use crate::setup::{self, Install};
use crate::step::step;
use crate::{helm, shell, site, workspace};
use registry::{Access, Local, Login};
use sign::Signer;

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    part: Part,
    /// Do not optimise: a quick way to try the release rather than kpx; only with --dry-run
    #[arg(long, conflicts_with_all = ["make", "tools", "publish"])]
    debug: bool,
    /// Release for this architecture, this machine's by default; several times for several, which
    /// also share an image
    #[arg(long, value_enum, conflicts_with_all = ["tools", "publish"])]
    arch: Vec<Arch>,
    /// Sign with this key of cosign: a file, `env://VARIABLE`, or an address of a key store.
    /// COSIGN_PASSWORD has its password; KPX_REGISTRY_USER and KPX_REGISTRY_PASSWORD those of the
    /// registries, unless the tools have a login
    #[arg(long, conflicts_with_all = ["make", "tools", "dry_run"], required_if_eq("publish", "true"))]
    key: Option<String>,
}

/// The parts of a release. Making the files runs the build scripts of all crates, so the key and
/// the login belong to `publish` alone.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Part {
    /// Make the files, without a key or a login
    #[arg(long)]
    make: bool,
    /// Install the tools of --publish, before the key and the login are there
    #[arg(long)]
    tools: bool,
    /// Sign and push what --make left in target/release-VERSION
    #[arg(long)]
    publish: bool,
    /// Make and publish: push to a registry on this machine that ends with the command, and sign
    /// with a key of its own; undecided addresses get stand-ins
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let part = &options.part;
    if part.tools {
        return Tools::ensure(false).map(drop);
    }
    let home = Home::read()?;
    let undecided = home.undecided().join(", ");
    if !part.dry_run {
        ensure!(
            undecided.is_empty(),
            "[workspace.metadata.home] of Cargo.toml does not say where kpx is published: {undecided}"
        );
        ensure_tagged()?;
    }
    let tools = (!part.make)
        .then(|| Tools::ensure(part.dry_run))
        .transpose()?;
    let local = part.dry_run.then(Local::start).transpose()?;
    let home = match &local {
        Some(local) => home.on_trial(local.port),
        None => home,
    };
    let folder = folder()?;
    if !part.publish {
        make(options, &home)?;
    }
    let mut references = Vec::new();
    if let Some(tools) = &tools {
        let publisher = Publisher {
            home: &home,
            folder: &folder,
            tools,
            local: local.as_ref(),
            signer: &Signer::new(&tools.cosign, options.key.as_deref(), &home)?,
            login: &Login::new(&home, local.is_some())?,
        };
        references.extend(publisher.publish()?);
    }
    dist::list(&folder)?;
    for reference in references {
        println!("{reference}");
    }
    if !undecided.is_empty() {
        println!(
            "undecided in [workspace.metadata.home] of Cargo.toml, so this is no release: {undecided}"
        );
    }
    Ok(())
}

/// Returns the folder of the files.
fn folder() -> Result<PathBuf> {
    let name = format!("release-{VERSION}");
    Ok(workspace::root().join("target").join(name))
}

/// Fails unless the tree is that of this version's tag.
fn ensure_tagged() -> Result<()> {
    let ask = |words: &[&str], what| {
        shell::git(workspace::root(), words).with_context(|| format!("ask git for {what}"))
    };
    let changes = ask(&["status", "--porcelain"], "changes")?;
    ensure!(
        changes.is_empty(),
        "the tree has changes that no commit has:\n{changes}"
    );
    let tags = ask(&["tag", "--points-at", "HEAD"], "tags")?;
    ensure!(
        tags.lines().any(|tag| tag == format!("v{VERSION}")),
        "the commit has no tag v{VERSION}"
    );
    Ok(())
}

/// Makes all files, and their sums.
fn make(options: &Options, home: &Home) -> Result<()> {
    let packages = dist::Options {
        debug: options.debug,
        arch: options.arch.clone(),
        no_deb: false,
    };
    let release = Release::new(&format!("release-{VERSION}"), Some(home.clone()))?;
    let site = site(&release, home)?;
    let mut made = release.make(&packages)?;
    made.push(site);
    made.push(step("pack the chart", || chart(&release))?);
    made.push(documents::krew(&release, home, &made)?);
    made.push(documents::provenance(&release, home, &made)?);
    sums::write(&release.folder, &made)
}

/// The tools to sign and push.
struct Tools {
    helm: PathBuf,
    cosign: PathBuf,
}

impl Tools {
    fn ensure(dry_run: bool) -> Result<Self> {
        setup::install("a release", || missing(dry_run))?;
        Ok(Self {
            helm: helm::ensure().context("a release has a chart")?,
            cosign: sign::cosign()?,
        })
    }
}

/// What signs and pushes the files that were made.
struct Publisher<'a> {
    home: &'a Home,
    folder: &'a Path,
    tools: &'a Tools,
    /// The registry of a trial.
    local: Option<&'a Local>,
    signer: &'a Signer<'a>,
    login: &'a Login,
}

impl Publisher<'_> {
    /// Signs and pushes the files, and checks the result. Returns the names of image and chart, with
    /// their digests.
    fn publish(&self) -> Result<[String; 2]> {
        let home = self.home;
        let files = sums::verify(self.folder).context("look for the files that --make makes")?;
        let image = files
            .iter()
            .map(|(name, _)| name)
            .filter(|name| name.ends_with(".oci.tar"))
            // The image of several architectures has the shortest name.
            .min_by_key(|name| name.len())
            .context("no image was made")?;
        let (image, chart) = (self.folder.join(image), self.folder.join(chart_name()));
        let access = Access::new(self.local.is_some(), &self.tools.helm, self.login);
        let digest = access.digest_of_file(&image)?;
        ensure!(
            access.values_of(&chart)?.contains(&digest),
            "{} names another image than {digest}",
            chart.display()
        );
        // Helm dates the chart in the registry by its file.
        date(&chart, dist::time()?)?;
        step("look for this version in the registries", || {
            self.ensure_unpublished(&access, &digest, &chart)
        })?;

        let sums = self.folder.join(sums::NAME);
        self.signer.write_key(self.folder)?;
        let signature = step("sign the sums", || self.signer.sign_file(&sums))?;
        let references = step("push image and chart", || {
            let tag = format!("{}:{VERSION}", home.image);
            let pushed = access.push_image(&image, &tag)?;
            ensure!(
                pushed == digest,
                "the registry has the image as {pushed}, the manifests name {digest}"
            );
            let pushed = access.push_chart(&chart, &home.chart)?;
            Ok([
                format!("{}@{digest}", home.image),
                format!("{}/kpx@{pushed}", home.chart),
            ])
        })?;
        step("sign image and chart", || {
            references
                .iter()
                .try_for_each(|reference| self.signer.sign_image(reference, self.login))
        })?;
        step("check as a user without a login does", || {
            self.signer.verify_file(&sums, &signature)?;
            self.check_as_nobody(&references, &chart)
        })?;
        if self.local.is_some() {
            step("try to replace the published version", || {
                self.ensure_unpublished(&access, &digest, &chart)
                    .context("the same files again")?;
                let another = self.ensure_unpublished(&access, "sha256:other", &chart);
                ensure!(another.is_err(), "another image would be pushed");
                Ok(())
            })?;
        }

        Ok(references)
    }

    /// Fails if a registry has this version with another content. A publication that stopped
    /// half-way can be repeated.
    fn ensure_unpublished(&self, access: &Access, digest: &str, chart: &Path) -> Result<()> {
        const NEXT: &str = "a published version stays as it is: raise the version";
        let image = format!("{}:{VERSION}", self.home.image);
        if let Some(found) = access.digest(&image)? {
            ensure!(
                found == digest,
                "{image} is published as {found}, and {digest} was made; {NEXT}"
            );
        }
        let name = format!("{}/kpx:{VERSION}", self.home.chart);
        if access.digest(&name)?.is_some() {
            ensure!(
                self.has_chart(access, chart)?,
                "the chart {name} is published, and another one was made; {NEXT}"
            );
        }
        Ok(())
    }

    /// Pulls image and chart without a login, and checks their signatures.
    fn check_as_nobody(&self, [image, chart]: &[String; 2], file: &Path) -> Result<()> {
        let nobody = Login::nobody()?;
        let access = Access::new(self.local.is_some(), &self.tools.helm, &nobody);
        let public = |name: &str| match self.local {
            Some(local) => local.public(name),
            None => name.to_owned(),
        };
        let to = tempfile::tempdir()?;
        access
            .pull_image(&public(image), to.path())
            .with_context(|| format!("{image} is not public"))?;
        let pulled = access
            .pull_chart(&public(&self.home.chart), VERSION)
            .with_context(|| format!("{chart} is not public"))?;
        ensure!(pulled == fs::read(file)?, "the registry has another chart");
        [image, chart]
            .iter()
            .try_for_each(|name| self.signer.verify_image(&public(name), &nobody))
    }

    /// Returns true if the registry has this chart as the chart of this version.
    fn has_chart(&self, access: &Access, chart: &Path) -> Result<bool> {
        Ok(access.pull_chart(&self.home.chart, VERSION)? == fs::read(chart)?)
    }
}

/// Returns the missing packages: the registry serves trials only.
pub(crate) fn missing(dry_run: bool) -> Vec<Install> {
    missing_of(dry_run, |program| shell::which(program).is_some())
}

fn missing_of(dry_run: bool, has: impl Fn(&str) -> bool) -> Vec<Install> {
    let needed = ["skopeo"]
        .into_iter()
        .chain(dry_run.then_some("docker-registry"));
    // A program and its package have one name.
    let packages: Vec<_> = needed.filter(|program| !has(program)).collect();
    if packages.is_empty() {
        Vec::new()
    } else {
        vec![Install::Packages(packages)]
    }
}

/// Packs the staged chart, with the license. Helm's own command would add the time of day.
fn chart(release: &Release) -> Result<String> {
    let mut files = Files::default();
    files.add_folder(&release.stage.join("deploy/helm/kpx"), "kpx")?;
    files.add_file(&release.stage.join("LICENSE"), "kpx/LICENSE")?;
    let name = chart_name();
    fs::write(release.folder.join(&name), files.tar_gz(release.time)?)?;
    Ok(name)
}

/// Packs the site, which the links of chart and alerts name. Its folder in the archive is its
/// address below the home's; the page beside the folder leads to it.
fn site(release: &Release, home: &Home) -> Result<String> {
    let mut files = Files::default();
    let pages = site::make(home)?;
    files.add_folder(&pages, VERSION)?;
    files.add_file(&pages.with_file_name(site::ROOT), site::ROOT)?;
    let name = format!("kpx-{VERSION}-site.tar.gz");
    fs::write(release.folder.join(&name), files.tar_gz(release.time)?)?;
    Ok(name)
}

fn chart_name() -> String {
    format!("kpx-{VERSION}.tgz")
}

fn date(path: &Path, time: u64) -> Result<()> {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(time);
    let file = fs::File::options().write(true).open(path)?;
    file.set_modified(time)
        .with_context(|| format!("date {}", path.display()))
}

/// Runs a command with hidden output, and returns its standard output.
fn answer(mut command: std::process::Command) -> Result<String> {
    let shown = shell::show(&command);
    let output = command.output().with_context(|| format!("run `{shown}`"))?;
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    if !output.status.success() {
        bail!("`{shown}` failed ({}):\n{out}{err}", output.status);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    /// Returns clap's message if the words are refused.
    fn refused(words: &str) -> Option<String> {
        let words = std::iter::once("release").chain(words.split_whitespace());
        Cli::try_parse_from(words)
            .err()
            .map(|error| error.to_string())
    }

    #[test]
    fn key_belongs_to_the_part_that_runs_no_build_script() {
        for accepted in [
            "--make --arch amd64 --arch arm64",
            "--tools",
            "--publish --key env://COSIGN_PRIVATE_KEY",
            "--dry-run --debug --arch arm64",
        ] {
            assert_eq!(refused(accepted), None, "{accepted}");
        }
        for words in [
            "",
            "--make --key k",
            "--dry-run --key k",
            "--publish",
            "--publish --make --key k",
            "--publish --key k --arch arm64",
            "--make --debug",
        ] {
            assert!(refused(words).is_some(), "{words:?} is accepted");
        }
    }

    #[test]
    fn trial_alone_takes_a_registry_of_its_own() {
        let has_none = |_: &str| false;
        assert_eq!(
            missing_of(true, has_none),
            [Install::Packages(vec!["skopeo", "docker-registry"])]
        );
        assert_eq!(
            missing_of(false, has_none),
            [Install::Packages(vec!["skopeo"])]
        );
        assert_eq!(missing_of(true, |_| true), []);
    }
}
