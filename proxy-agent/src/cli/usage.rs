//! Adds examples and exit statuses to each command's help and manual page.

mod examples;

use std::ffi::OsString;
use std::io;
use std::path::Path;

use clap::error::ContextKind;
use clap::{Command, CommandFactory, FromArgMatches};
use clap_complete::CompleteEnv;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::Cli;
use super::complete::{ASKS, with_names};
use examples::{EXAMPLES, Example};

const ENDS: [(&str, &str); 3] = [
    ("0", "Success, healthy."),
    ("1", "Failure, or unhealthy."),
    ("2", "Usage error."),
];

const FILES: [(&str, &str); 3] = [
    (
        "/run/kpx",
        "Run directory: the agent's socket, and the record of its changes on this host.",
    ),
    ("/sys/fs/bpf/kpx", "Maps and links that outlive the agent."),
    ("/etc/kpx/config.yaml", "Configuration of the systemd unit."),
];

const ENVIRONMENT: [(&str, &str); 3] = [
    (
        "KUBECONFIG",
        "Kubeconfig file outside a pod, unless a flag overrides it.",
    ),
    ("RUST_LOG", "Log level, such as debug."),
    ("NO_COLOR", "Disable colours."),
];

/// The address of the project's sources and issues; empty while it has none.
const REPOSITORY: &str = env!("CARGO_PKG_REPOSITORY");

/// Returns the command line with the examples of each command.
pub(super) fn command() -> Command {
    all_examples().fold(Cli::command(), |command, (name, examples)| {
        with_examples(command, &name.split(' ').collect::<Vec<_>>(), examples)
    })
}

/// Returns the examples by command; a subcommand of `cluster` has two words.
fn all_examples() -> impl Iterator<Item = (String, &'static [Example])> {
    let of_cluster = proxy_cluster::EXAMPLES
        .iter()
        .map(|(part, examples)| (format!("cluster {part}"), *examples));
    EXAMPLES
        .iter()
        .map(|(name, examples)| ((*name).to_owned(), *examples))
        .chain(of_cluster)
}

fn with_examples(command: Command, path: &[&str], examples: &[Example]) -> Command {
    match path {
        [name, rest @ ..] => {
            command.mut_subcommand(name, |part| with_examples(part, rest, examples))
        }
        [] => command.after_help(after_help(examples)),
    }
}

impl Cli {
    /// Parses a command line. Ends the process after a usage error, a request for help, or a
    /// shell's completion request.
    pub fn read(arguments: impl IntoIterator<Item = OsString>) -> Self {
        CompleteEnv::with_factory(|| with_names(command()))
            .var(ASKS)
            .complete();
        let arguments: Vec<_> = arguments.into_iter().collect();
        let command = || called_as(command(), arguments.first());
        let matches = command()
            .try_get_matches_from(&arguments)
            .unwrap_or_else(|error| end(error));
        Self::from_arg_matches(&matches).unwrap_or_else(|error| end(error.format(&mut command())))
    }
}

/// Prints a usage error or the help, and ends the process.
fn end(mut error: clap::Error) -> ! {
    // A similar value is the fix; the list of all values would hide it.
    if error.get(ContextKind::SuggestedValue).is_some() {
        error.remove(ContextKind::ValidValue);
    }
    error.exit()
}

/// Adapts usages to the program's name: as kube-proxy or as kubectl's plugin, the subcommand is
/// implicit.
fn called_as(command: Command, program: Option<&OsString>) -> Command {
    let program = program
        .and_then(|path| Path::new(path).file_name())
        .unwrap_or_default();
    let (own, called) = match program.to_str() {
        Some("kube-proxy") => ("run", "kube-proxy"),
        Some(proxy_cluster::PLUGIN) => ("cluster", "kubectl kpx"),
        _ => return command,
    };
    let mut command = command.bin_name("kpx").disable_help_subcommand(true);
    command.build();
    command.mut_subcommand(own, |own_command| {
        renamed(own_command, &format!("kpx {own}"), called)
    })
}

fn renamed(mut command: Command, own: &str, called: &str) -> Command {
    let usage = command.render_usage().to_string().replacen(own, called, 1);
    let parts: Vec<_> = command
        .get_subcommands()
        .map(|part| part.get_name().to_owned())
        .collect();
    let command = command.override_usage(usage.trim_start_matches("Usage: ").to_owned());
    parts.into_iter().fold(command, |command, part| {
        command.mut_subcommand(part, |part| renamed(part, own, called))
    })
}

fn after_help(examples: &[Example]) -> String {
    let lines = examples
        .iter()
        .map(|(line, what)| format!("  {line}\n      {what}\n"));
    format!("Examples:\n{}", lines.collect::<String>().trim_end())
}

pub(super) fn page(command: &Command, out: &mut dyn io::Write) -> io::Result<()> {
    let man = Man::new(command.clone());
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    if command
        .get_arguments()
        .any(|argument| !argument.is_hide_set())
    {
        man.render_options_section(out)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(out)?;
    }
    let name = command.get_display_name().unwrap_or_default();
    let own = all_examples().find(|(path, _)| name == format!("kpx-{}", path.replace(' ', "-")));
    list(
        out,
        "EXAMPLES",
        own.map_or(&[][..], |(_, examples)| examples),
    )?;
    list(out, "EXIT STATUS", &ENDS)?;
    list(out, "FILES", &FILES)?;
    list(out, "ENVIRONMENT", &ENVIRONMENT)?;
    let bugs = [(REPOSITORY, "Report faults there.")];
    list(out, "BUGS", if REPOSITORY.is_empty() { &[] } else { &bugs })?;
    list(out, "SEE ALSO", &see_also(command))?;
    if command.get_version().is_some() {
        man.render_version_section(out)
    } else {
        Ok(())
    }
}

fn see_also(command: &Command) -> Vec<Example> {
    const ALL: [Example; 6] = [
        ("kpx(1)", "All commands."),
        ("kpx-check(1)", "Whether a host is fit."),
        (
            "kpx-cluster(1)",
            "All nodes from one place, by kubectl kpx.",
        ),
        ("kpx-status(1)", "The state of the agent."),
        ("kpx-trace(1)", "What becomes of a packet."),
        (
            "kubectl(1), kube-proxy(8)",
            "The cluster's side, and the program that kpx replaces.",
        ),
    ];
    let own = format!(
        "{}(1)",
        command
            .get_display_name()
            .unwrap_or_else(|| command.get_name())
    );
    ALL.into_iter().filter(|(page, _)| *page != own).collect()
}

/// Writes a section of terms and meanings, unless the list is empty.
fn list(out: &mut dyn io::Write, heading: &str, items: &[Example]) -> io::Result<()> {
    if items.is_empty() {
        return Ok(());
    }
    let mut roff = Roff::default();
    roff.control("SH", [heading]);
    for (term, meaning) in items {
        roff.control("TP", []);
        roff.text([bold(*term)]);
        roff.text([roman(*meaning)]);
    }
    roff.to_writer(out)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::ArgMatches;

    use super::*;
    use crate::config::arguments;

    fn shown(command: &Command, of: &str) -> Vec<String> {
        let parts = command
            .get_subcommands()
            .filter(|part| !part.is_hide_set() && part.get_name() != "help");
        parts
            .flat_map(|part| {
                let name = format!("{of}{}", part.get_name());
                let below = shown(part, &format!("{name} "));
                [name].into_iter().chain(below)
            })
            .collect()
    }

    #[test]
    fn each_command_has_examples_that_are_command_lines() {
        let (mut shown, mut with_examples): (Vec<_>, Vec<_>) = (
            shown(&Cli::command(), ""),
            all_examples().map(|(name, _)| name).collect(),
        );
        shown.sort();
        with_examples.sort();
        assert_eq!(shown, with_examples);
        for (name, examples) in all_examples() {
            for (line, _) in examples {
                let words =
                    line.replacen("kubectl kpx", "kubectl-kpx", 1)
                        .replacen("watch -n1 ", "", 1);
                let words = arguments(words.split(' ').map(Into::into));
                let matches = command()
                    .try_get_matches_from(words)
                    .unwrap_or_else(|error| panic!("{line}: {error}"));
                let mut found = Some(&matches);
                for part in name.split(' ') {
                    let next = found.and_then(ArgMatches::subcommand);
                    assert_eq!(next.map(|(name, _)| name), Some(part), "{line}");
                    found = next.map(|(_, matches)| matches);
                }
                assert!(Cli::from_arg_matches(&matches).is_ok(), "{line}");
            }
        }
    }

    fn all(command: &Command) -> Vec<&Command> {
        let parts = command.get_subcommands().filter(|part| !part.is_hide_set());
        [command].into_iter().chain(parts.flat_map(all)).collect()
    }

    #[test]
    fn every_command_and_every_flag_has_a_help() {
        for command in all(&command()) {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "{name}");
            let arguments = command.get_arguments().filter(|one| !one.is_hide_set());
            for argument in arguments {
                assert!(
                    argument.get_help().is_some(),
                    "{name}: {}",
                    argument.get_id()
                );
            }
        }
    }

    #[test]
    fn every_flag_stands_in_the_docs() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let pages = std::fs::read_dir(folder).expect("a folder").map(|entry| {
            let path = entry.expect("an entry").path();
            let is_page = path.extension().is_some_and(|extension| extension == "md");
            is_page.then(|| std::fs::read_to_string(path).expect("text"))
        });
        let text: String = pages.flatten().collect();
        let is_part_of_a_flag = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let words: HashSet<_> = text.split(|c| !is_part_of_a_flag(c)).collect();
        for command in all(&command()) {
            let arguments = command.get_arguments().filter(|one| !one.is_hide_set());
            for flag in arguments.filter_map(|argument| argument.get_long()) {
                let name = command.get_name();
                assert!(words.contains(&*format!("--{flag}")), "{name} --{flag}");
            }
        }
    }

    #[test]
    fn usage_names_the_program_as_its_reader_called_it() {
        let usage = |words: &[&str]| {
            let words = arguments(words.iter().map(Into::into));
            let shown = called_as(command(), words.first())
                .try_get_matches_from(&words)
                .unwrap_err()
                .to_string();
            shown
                .lines()
                .find(|line| line.starts_with("Usage:"))
                .unwrap_or_default()
                .to_owned()
        };
        assert_eq!(
            usage(&["/usr/bin/kube-proxy", "--no-such-flag"]),
            "Usage: kube-proxy [OPTIONS]"
        );
        assert_eq!(
            usage(&["kubectl-kpx", "status", "--help"]),
            "Usage: kubectl kpx status [OPTIONS]"
        );
        assert_eq!(
            usage(&["kubectl-kpx", "--help"]),
            "Usage: kubectl kpx [OPTIONS] <COMMAND>"
        );
        assert_eq!(
            usage(&["kpx", "cluster", "status", "--help"]),
            "Usage: kpx cluster status [OPTIONS]"
        );
    }

    #[test]
    fn each_page_says_how_its_command_is_used_and_ends() {
        let mut command = command().disable_help_subcommand(true);
        command.build();
        for name in shown(&command, "") {
            let of = name.split(' ').fold(&command, |command, part| {
                command.find_subcommand(part).expect("a command")
            });
            let mut page = Vec::new();
            super::page(of, &mut page).expect("written to memory");
            let page = String::from_utf8(page).expect("text");
            for part in [
                "NAME",
                "SYNOPSIS",
                "EXAMPLES",
                "EXIT STATUS",
                "FILES",
                "ENVIRONMENT",
                "SEE ALSO",
            ] {
                assert!(
                    page.lines()
                        .any(|line| line.starts_with(".SH") && line.contains(part)),
                    "{part} in {page}"
                );
            }
            let title = format!("kpx {name}").replace(' ', "-");
            assert!(
                !page.contains(&format!("{}(1)", title.replace('-', "\\-"))),
                "{title} refers to itself: {page}"
            );
            let help = of.clone().render_help().to_string();
            assert!(help.contains("\nExamples:\n  "), "{name}: {help}");
        }
    }
}
