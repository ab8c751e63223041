mod checked_run;
mod docs;
mod files;
mod flags;
mod invalid;
mod kubeadm;
mod properties;
mod versions;

use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use tempfile::TempDir;

use super::{Configuration, NodeArgs, RunArgs};
use crate::settings::Settings;

#[derive(Parser)]
struct Run {
    #[command(flatten)]
    args: RunArgs,
}

#[derive(Parser)]
struct Trace {
    #[command(flatten)]
    args: NodeArgs,
}

fn run_args(line: &str) -> Result<RunArgs> {
    Ok(Run::try_parse_from(["kpx"].into_iter().chain(line.split_whitespace()))?.args)
}

/// Loads a configuration from flags alone.
fn load(line: &str) -> Result<Configuration> {
    Configuration::load(&run_args(line)?)
}

fn settings(line: &str) -> Settings {
    let line = format!("--node-name n1 {line}");
    load(&line)
        .and_then(|configuration| configuration.settings())
        .unwrap_or_else(|error| panic!("{line}: {error:#}"))
}

struct ConfigFile {
    folder: TempDir,
    path: PathBuf,
}

impl ConfigFile {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.conf");
        fs::write(&path, text).unwrap();
        Self { folder, path }
    }

    fn kube_proxy(fields: &str) -> Self {
        Self::new(&format!(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{fields}"
        ))
    }

    fn load(&self, line: &str) -> Result<Configuration> {
        load(&format!("--config={} {line}", self.path.display()))
    }

    fn settings(&self, line: &str) -> Settings {
        let configuration = self
            .load(&format!("--node-name n1 {line}"))
            .unwrap_or_else(|error| panic!("{error:#}"));
        configuration.settings().unwrap()
    }

    /// Returns the error of loading the file, without the file's directory.
    fn error(&self, line: &str) -> String {
        let error = self
            .load(line)
            .map(|_| ())
            .expect_err("an invalid configuration");
        format!("{error:#}").replace(&format!("{}/", self.folder.path().display()), "")
    }
}
