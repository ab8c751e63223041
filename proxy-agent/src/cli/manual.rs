//! `kpx completions` and `kpx man`: describe the command line to shells and to man.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::Shell;

use super::Cli;
use proxy_view::output::print;

/// Print a script that completes kpx's command line in a shell.
///
/// For bash: kpx completions bash > /etc/bash_completion.d/kpx
#[derive(Args, Debug)]
pub(super) struct CompletionsArgs {
    #[arg(value_enum)]
    shell: ShellName,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShellName {
    Bash,
    Zsh,
    Fish,
}

/// Print the manual page, or write one for each command.
#[derive(Args, Debug)]
pub(super) struct ManArgs {
    /// The folder for the pages kpx.1, kpx-status.1, …; without it kpx's own page goes to standard output.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn completions(args: &CompletionsArgs) -> Result<()> {
    let shell = match args.shell {
        ShellName::Bash => Shell::Bash,
        ShellName::Zsh => Shell::Zsh,
        ShellName::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "kpx", &mut script);
    print(&String::from_utf8(script).context("a completion script is text")?)
}

pub(super) fn man(args: &ManArgs) -> Result<()> {
    if let Some(dir) = &args.dir {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        return clap_mangen::generate_to(Cli::command(), dir).with_context(|| format!("write to {}", dir.display()));
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page).context("render the manual page")?;
    print(&String::from_utf8(page).context("a manual page is text")?)
}
