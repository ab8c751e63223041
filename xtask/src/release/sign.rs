//! Signs with cosign.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::answer;
use super::registry::Login;
use crate::home::Home;
use crate::step::quiet;
use crate::{cluster, workspace};

const COSIGN: &str = "github.com/sigstore/cosign/v2/cmd/cosign@v2.6.5";

pub(super) struct Signer<'a> {
    cosign: &'a Path,
    /// A key, in cosign's notation.
    key: String,
    public: PathBuf,
    /// A trial: signatures stay off the public log, and the registry has no TLS.
    trial: bool,
    /// The folder of a trial's key.
    _folder: Option<TempDir>,
}

impl<'a> Signer<'a> {
    /// Signs with a key that fits the home's public key or, without one, with a new key that ends
    /// with this value.
    pub(super) fn new(cosign: &'a Path, key: Option<&str>, home: &Home) -> Result<Self> {
        let Some(key) = key else {
            let folder = tempfile::tempdir()?;
            let mut generate = Command::new(cosign);
            generate
                .args(["generate-key-pair", "--output-key-prefix", "trial"])
                .env("COSIGN_PASSWORD", "")
                .current_dir(&folder);
            answer(generate)?;
            let file = |name| folder.path().join(name);
            return Ok(Self {
                cosign,
                key: file("trial.key").to_string_lossy().into_owned(),
                public: file("trial.pub"),
                trial: true,
                _folder: Some(folder),
            });
        };
        let public = workspace::root().join(&home.key);
        let mut ask = Command::new(cosign);
        ask.args(["public-key", "--key", key]);
        let own = answer(ask)?;
        let published = fs::read_to_string(&public)
            .with_context(|| format!("read {}, the public key", public.display()))?;
        ensure!(
            own.trim() == published.trim(),
            "{} is not the public key of --key",
            home.key
        );
        Ok(Self {
            cosign,
            key: key.to_owned(),
            public,
            trial: false,
            _folder: None,
        })
    }

    /// Writes the public key beside the signed files.
    pub(super) fn write_key(&self, folder: &Path) -> Result<()> {
        let key = folder.join("release.pub");
        fs::copy(&self.public, &key).with_context(|| format!("write {}", key.display()))?;
        Ok(())
    }

    /// Signs a file, and returns the file of the signature beside it.
    pub(super) fn sign_file(&self, file: &Path) -> Result<PathBuf> {
        let signature = file.with_added_extension("sig");
        let mut sign = self.sign("sign-blob");
        // openssl verifies it too.
        sign.arg("--output-signature").arg(&signature);
        sign.arg(file);
        answer(sign)?;
        Ok(signature)
    }

    pub(super) fn verify_file(&self, file: &Path, signature: &Path) -> Result<()> {
        let mut verify = self.verify("verify-blob");
        verify.arg("--signature").arg(signature).arg(file);
        answer(verify).map(drop)
    }

    /// Signs what a registry has under a name with a digest.
    pub(super) fn sign_image(&self, reference: &str, login: &Login) -> Result<()> {
        let mut sign = self.sign("sign");
        sign.args(self.trial.then_some("--allow-http-registry"));
        sign.arg("--recursive").arg(reference);
        login.apply(&mut sign);
        answer(sign).map(drop)
    }

    pub(super) fn verify_image(&self, reference: &str, login: &Login) -> Result<()> {
        let mut verify = self.verify("verify");
        verify.args(self.trial.then_some("--allow-http-registry"));
        verify.arg(reference);
        login.apply(&mut verify);
        answer(verify).map(drop)
    }

    fn sign(&self, verb: &str) -> Command {
        let mut sign = Command::new(self.cosign);
        sign.args([verb, "--yes", "--key", &self.key]);
        if self.trial {
            sign.arg("--tlog-upload=false").env("COSIGN_PASSWORD", "");
        }
        sign
    }

    fn verify(&self, verb: &str) -> Command {
        let mut verify = Command::new(self.cosign);
        verify.args([verb, "--key"]).arg(&self.public);
        verify.args(self.trial.then_some("--insecure-ignore-tlog=true"));
        verify
    }
}

/// Installs cosign below the target directory.
pub(super) fn cosign() -> Result<PathBuf> {
    let folder = workspace::target_dir()?.join("tools/bin");
    let (_, version) = COSIGN.split_once('@').unwrap_or_default();
    let program = folder.join(format!("cosign-{version}"));
    if !program.is_file() {
        let mut install = Command::new(cluster::go()?);
        install.args(["install", COSIGN]).env("GOBIN", &folder);
        quiet(&format!("install cosign {version}"), [install])?;
        fs::rename(folder.join("cosign"), &program).context("name cosign by its version")?;
    }
    Ok(program)
}
