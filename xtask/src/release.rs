//! Makes the files of a release, signs them, and pushes image and chart to their registry. A dry run
//! does the same with a registry of its own and a key that nobody has afterwards.

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
use crate::{helm, shell, workspace};
use registry::{Access, Local, Login};
use sign::Signer;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Push to a registry on this machine that ends with the command, and sign with a key of its
    /// own; undecided addresses get stand-ins
    #[arg(long)]
    dry_run: bool,
    /// Do not optimise: a quick way to try the release rather than kpx; only with --dry-run
    #[arg(long, requires = "dry_run")]
    debug: bool,
    /// Release for this architecture, this machine's by default; several times for several, which
    /// also share an image
    #[arg(long, value_enum)]
    arch: Vec<Arch>,
    /// Sign with this key of cosign: a file, `env://VARIABLE`, or an address of a key store.
    /// COSIGN_PASSWORD has its password; KPX_REGISTRY_USER and KPX_REGISTRY_PASSWORD those of the
    /// registry, unless the tools have a login
    #[arg(long, conflicts_with = "dry_run")]
    key: Option<String>,
}

/// The program and the package of each tool that Debian has.
const TOOLS: [(&str, &str); 2] = [("skopeo", "skopeo"), ("docker-registry", "docker-registry")];

pub(crate) fn run(options: &Options) -> Result<()> {
    let home = Home::read()?;
    let version = env!("CARGO_PKG_VERSION");
    let undecided = home.undecided();
    if !options.dry_run {
        ensure!(
            undecided.is_empty(),
            "[workspace.metadata.home] of Cargo.toml does not say where kpx is published: {}",
            undecided.join(", ")
        );
        ensure!(
            options.key.is_some(),
            "name the --key that signs, or try with --dry-run"
        );
        ensure!(
            changes()?.is_empty(),
            "the tree has changes that no commit has:\n{}",
            changes()?
        );
        let tags = shell::git(workspace::root(), &["tag", "--points-at", "HEAD"])
            .context("ask git for tags")?;
        ensure!(
            tags.lines().any(|tag| tag == format!("v{version}")),
            "the commit has no tag v{version}"
        );
    }
    setup::install("a release", missing)?;
    let helm = helm::ensure().context("a release has a chart")?;
    let own = folder("registry")?;
    let local = options.dry_run.then(|| Local::start(&own)).transpose()?;
    let home = match &local {
        Some(local) => home.on_trial(&local.address),
        None => home,
    };
    let signer = Signer::new(options.key.as_deref(), &home, &folder("keys")?)?;
    let login = Login::new(&home.image, local.is_some(), folder("login")?)?;
    let access = Access::new(local.is_some(), helm, &login);

    let packages = dist::Options {
        debug: options.debug,
        arch: options.arch.clone(),
        no_deb: false,
    };
    let release = Release::new(&format!("release-{version}"), Some(home.clone()))?;
    let (mut made, digest) = release.make(&packages)?;
    let publisher = Publisher {
        home: &home,
        signer: &signer,
        access: &access,
        login: &login,
    };
    let references = publisher.publish(&release, &mut made, &digest)?;
    release.list()?;
    for reference in references {
        println!("{reference}");
    }
    if options.dry_run && !undecided.is_empty() {
        println!(
            "undecided in [workspace.metadata.home] of Cargo.toml, so this is no release: {}",
            undecided.join(", ")
        );
    }
    Ok(())
}

/// What turns packages into a release that others can have and check.
struct Publisher<'a> {
    home: &'a Home,
    signer: &'a Signer,
    access: &'a Access<'a>,
    login: &'a Login,
}

impl Publisher<'_> {
    /// Adds chart and documents to the packages, signs and pushes all, and checks the result.
    /// Returns the names of image and chart, with their digests.
    fn publish(
        &self,
        release: &Release,
        made: &mut Vec<String>,
        digest: &str,
    ) -> Result<[String; 2]> {
        let (home, version) = (self.home, release.version);
        let image = made
            .iter()
            .rfind(|name| name.ends_with(".oci.tar"))
            .context("an image")?
            .clone();
        let chart = step("pack the chart", || chart(release))?;
        made.push(chart.clone());
        made.push(documents::krew(release, home, made)?);
        made.push(documents::provenance(release, home, made)?);
        sums::write(&release.folder, made)?;

        let sums = release.folder.join(sums::NAME);
        let signature = step("sign the sums", || self.signer.sign_file(&sums))?;
        let references = step("push image and chart", || {
            let tag = format!("{}:{version}", home.image);
            let pushed = self.access.push_image(&release.folder.join(&image), &tag)?;
            ensure!(
                pushed == digest,
                "the registry has the image as {pushed}, the manifests name {digest}"
            );
            let pushed = self
                .access
                .push_chart(&release.folder.join(&chart), &home.chart)?;
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
        step("check as a user does", || {
            self.signer.verify_file(&sums, &signature)?;
            references
                .iter()
                .try_for_each(|reference| self.signer.verify_image(reference, self.login))?;
            let pulled = self
                .access
                .pull_chart(&home.chart, version, &folder("pulled")?)?;
            ensure!(
                fs::read(&pulled)? == fs::read(release.folder.join(&chart))?,
                "the registry has another chart"
            );
            Ok(())
        })?;

        Ok(references)
    }
}

fn missing() -> Vec<Install> {
    let packages: Vec<_> = TOOLS
        .iter()
        .filter(|(program, _)| shell::which(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if packages.is_empty() {
        Vec::new()
    } else {
        vec![Install::Packages(packages)]
    }
}

/// Returns what git lists as changed.
fn changes() -> Result<String> {
    shell::git(workspace::root(), &["status", "--porcelain"]).context("ask git for changes")
}

/// Returns an empty folder for the work of this command.
fn folder(name: &str) -> Result<PathBuf> {
    let folder = workspace::target_dir()?.join("tmp/release").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Packs the staged chart, with the license. Helm's own command would add the time of day.
fn chart(release: &Release) -> Result<String> {
    let mut files = Files::default();
    files.add_folder(&release.stage.join("deploy/helm/kpx"), "kpx")?;
    files.add_file(&release.stage.join("LICENSE"), "kpx/LICENSE")?;
    let name = format!("kpx-{}.tgz", release.version);
    let path = release.folder.join(&name);
    fs::write(&path, files.tar_gz(release.time)?)?;
    // Helm dates the chart in the registry by its file.
    date(&path, release.time)?;
    Ok(name)
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
