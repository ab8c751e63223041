//! `kpx completions` and `kpx man`: completion scripts for shells, and manual pages.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Command, ValueEnum};
use clap_complete::env::{Bash, EnvCompleter, Fish, Powershell, Zsh};

use super::complete::ASKS;
use super::usage;
use proxy_view::output::print;

/// Print a shell completion script, with dynamic names from the running agent.
///
/// For bash: kpx completions bash > /etc/bash_completion.d/kpx
#[derive(Args, Debug)]
pub(super) struct CompletionsArgs {
    /// Shell.
    #[arg(value_enum)]
    shell: ShellName,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShellName {
    Bash,
    Zsh,
    Fish,
    Powershell,
}

/// Print or write the manual pages.
#[derive(Args, Debug)]
pub(super) struct ManArgs {
    /// Folder for kpx.1, kpx-status.1, …. Default: print kpx.1 to standard output.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn completions(args: &CompletionsArgs) -> Result<()> {
    let shell: &dyn EnvCompleter = match args.shell {
        ShellName::Bash => &Bash,
        ShellName::Zsh => &Zsh,
        ShellName::Fish => &Fish,
        ShellName::Powershell => &Powershell,
    };
    let mut script = Vec::new();
    // The script finds kpx in the PATH, so that it works wherever kpx is installed.
    shell
        .write_registration(ASKS, "kpx", "kpx", "kpx", &mut script)
        .context("write the script")?;
    print(&String::from_utf8(script).context("a completion script is text")?)
}

pub(super) fn man(args: &ManArgs) -> Result<()> {
    let mut command = usage::command().disable_help_subcommand(true);
    command.build();
    if let Some(dir) = &args.dir {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        return write_pages(&command, dir);
    }
    let mut page = Vec::new();
    usage::page(&command, &mut page).context("render the manual page")?;
    print(&String::from_utf8(page).context("a manual page is text")?)
}

/// Writes the pages of a command and its subcommands: kpx.1, kpx-cluster.1, kpx-cluster-status.1.
fn write_pages(command: &Command, dir: &Path) -> Result<()> {
    let path = dir.join(format!(
        "{}.1",
        command
            .get_display_name()
            .unwrap_or_else(|| command.get_name())
    ));
    let mut page = Vec::new();
    usage::page(command, &mut page).context("render a manual page")?;
    fs::write(&path, page).with_context(|| format!("write {}", path.display()))?;
    command
        .get_subcommands()
        .filter(|part| !part.is_hide_set())
        .try_for_each(|part| write_pages(part, dir))
}
