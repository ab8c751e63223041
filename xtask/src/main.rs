//! `cargo xtask COMMAND`: the tasks that cargo alone cannot do. This file only dispatches.
#![forbid(unsafe_code)]

mod arch;
mod axe;
mod bench;
mod build;
mod cargo_tool;
mod ci;
mod cluster;
mod demo;
mod dist;
mod fuzz;
mod helm;
mod home;
mod machine;
mod release;
mod resolved;
mod run;
mod setup;
mod shell;
mod site;
mod soak;
mod step;
mod test;
mod tidy;
mod verify;
mod vmtest;
mod workspace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "The tasks that cargo alone cannot do for kpx"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find the tools for the build and the tests, and install the missing ones; every other
    /// command does so by itself
    Setup,
    /// Build the kernel programs, then kpx with them inside
    Build(build::Options),
    /// Build, then run kpx as root
    Run {
        #[command(flatten)]
        options: build::Options,
        /// Arguments for kpx
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    /// Build, then run all tests, including those that need root
    Test {
        /// Run only tests whose name contains this
        filter: Option<String>,
    },
    /// Build, then show kpx at work in a small cluster of network namespaces
    Demo(demo::Options),
    /// Build optimised, then measure, and print tables
    Bench {
        /// Arguments for the benchmark: a section (`data`, `control`, `scale`, `icount`) and its
        /// options; by default all sections but `scale`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Build, then kill, upgrade, flood and starve kpx under load, and report the effects on
    /// clients
    Soak {
        /// Arguments for the soak: scenarios and their options; `--release` builds all of it
        /// optimised
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run a Kubernetes cluster of genuine parts on this machine, with kpx as its Service proxy
    Cluster {
        /// Arguments for the cluster: `up`, `down`, `kubectl`, …; see `cluster --help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Boot Debian's kernels in virtual machines and test kpx in each
    Vmtest(vmtest::Options),
    /// Build, then try random packets, and compare the results with a model
    Fuzz(fuzz::Options),
    /// Make the release: archive, container image, Debian package, checksums
    Dist(dist::Options),
    /// Make, sign and push a release: the packages of `dist`, chart, RPM, krew's manifest,
    /// provenance
    Release(release::Options),
    /// Make the documentation site of all pages, and check its links
    Site,
    /// Load the kernel programs of an object, and print what the kernel reports; `build --verbose`
    /// does it
    #[command(hide = true)]
    Verify { object: PathBuf },
    /// Check the house rules that a machine can check
    Tidy,
    /// Run everything that a change must pass: formatting, lints, tidy, all tests, the demo
    Ci,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // anyhow would print a backtrace, which does not help a user of xtask.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Setup => setup::run(),
        Command::Build(options) => build::run(&options).map(drop),
        Command::Run { options, args } => run::run(&options, &args),
        Command::Test { filter } => test::run(filter.as_deref()),
        Command::Demo(options) => demo::run(&options),
        Command::Bench { args } => bench::run(&args),
        Command::Soak { args } => soak::run(&args),
        Command::Cluster { args } => cluster::run(&args),
        Command::Vmtest(options) => vmtest::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Dist(options) => dist::run(&options),
        Command::Release(options) => release::run(&options),
        Command::Site => site::run(),
        Command::Verify { object } => verify::run(&object),
        Command::Tidy => tidy::run(),
        Command::Ci => ci::run(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_programs_are_typed_without_a_separator() {
        for command in ["bench", "cluster", "demo", "soak"] {
            let cli =
                Cli::try_parse_from(["cargo xtask", command, "--keep", "now"]).expect(command);
            let (Command::Bench { args }
            | Command::Cluster { args }
            | Command::Demo(demo::Options { args })
            | Command::Soak { args }) = cli.command
            else {
                panic!("{command} is another command")
            };
            assert_eq!(args, ["--keep", "now"], "{command}");
        }
    }
}
