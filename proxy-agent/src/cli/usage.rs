//! Shows how each command is used, after its help and in its manual page.

use std::io;

use clap::{Command, CommandFactory, FromArgMatches};
use clap_complete::CompleteEnv;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::Cli;
use super::complete::{ASKS, with_names};

/// A command line, and what it is for.
type Example = (&'static str, &'static str);

/// The examples of each command.
const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "run",
        &[
            ("kpx run --config /var/lib/kube-proxy/config.conf", "Serve a node by the configuration of its kube-proxy"),
            (
                "kpx run --mode host --kubeconfig /etc/kpx/kubeconfig",
                "Reach ClusterIPs and names from a machine outside",
            ),
            ("kpx run --manifests ./services --node-name n1", "Serve Services from a folder, without an API server"),
        ],
    ),
    (
        "status",
        &[
            ("kpx status", "See whether this node is well, and what is dropped and rejected"),
            ("kpx status -o json", "The same for a program: .healthy, .problems, .reasons"),
            ("watch -n1 kpx status", "The same again each second"),
        ],
    ),
    (
        "services",
        &[
            ("kpx services -A", "List the Services of all namespaces"),
            ("kpx services shop/web -o wide", "See which addresses of a Service are in force"),
            ("kpx services --sort-by unserved -o name", "Name those that refuse most first"),
        ],
    ),
    (
        "backends",
        &[
            ("kpx backends shop/web", "See which pods of a Service take new connections"),
            ("kpx backends shop/web -w", "The same, and each change as it comes"),
            ("kpx backends shop/web -o json", "The same for a program"),
        ],
    ),
    (
        "flows",
        &[
            ("kpx flows --service shop/web", "List the connections to a Service"),
            ("kpx flows --client 10.244.1.7 --state new", "List what a client opens in vain"),
        ],
    ),
    ("devices", &[("kpx devices", "See which devices carry programs, and which are pods'")]),
    (
        "events",
        &[
            ("kpx events", "See what the agent had to say, the newest last"),
            ("kpx events shop/web -w", "The same of a Service, and each new Event as it comes"),
        ],
    ),
    (
        "top",
        &[
            ("kpx top", "Watch the traffic of each Service; q ends it"),
            ("kpx top --once --sort unserved", "Print once which Services refuse most"),
            ("kpx top -n shop -o json", "The traffic of a namespace for a program"),
        ],
    ),
    (
        "trace",
        &[
            (
                "kpx trace --from pod/shop/cart-0 --to svc/shop/web:http",
                "Say what becomes of a pod's connection, and why",
            ),
            (
                "kpx trace --from 203.0.113.9 --to 192.0.2.1:30080 --in-device eth0",
                "The same of a client outside, by a node port",
            ),
        ],
    ),
    (
        "monitor",
        &[
            ("kpx monitor --unserved", "Show what is dropped or rejected, as it happens"),
            (
                "kpx monitor --service shop/web --count 10",
                "Show the next ten packets that open connections to a Service",
            ),
        ],
    ),
    (
        "explain",
        &[
            ("kpx explain no_endpoints", "Say what a reason means, and what to do"),
            ("kpx explain -o json", "List all reasons for a program"),
        ],
    ),
    (
        "sysdump",
        &[
            ("kpx sysdump", "Gather a bug report of this node"),
            ("kpx sysdump -o /tmp/kpx.tar.gz --flows", "The same with the addresses of clients"),
        ],
    ),
    (
        "cluster",
        &[
            ("kubectl kpx status", "See whether all nodes are well"),
            (
                "kpx cluster --context prod trace --from pod/shop/cart-0 --to svc/shop/web",
                "Trace on the node of the pod",
            ),
            ("kubectl kpx connectivity-test", "Try every kind of Service with pods of its own"),
        ],
    ),
    (
        "check",
        &[
            ("kpx check", "See whether this host is fit, before kpx runs"),
            ("kpx check --kubeconfig /etc/kpx/kubeconfig", "Look at a kubeconfig as well"),
        ],
    ),
    (
        "cleanup",
        &[
            ("kpx cleanup", "Take kpx off a host for good"),
            ("kpx cleanup --kube-proxy", "Remove kube-proxy's rules while kpx serves"),
        ],
    ),
    ("version", &[("kpx version", "See whether the running agent is of this program's version")]),
    ("completions", &[("kpx completions bash", "Print what /etc/bash_completion.d/kpx may hold")]),
    ("man", &[("kpx man --dir /usr/local/share/man/man1", "Write a page for each command")]),
];

/// The ways in which a command ends.
const ENDS: [(&str, &str); 3] = [
    ("0", "All is well."),
    ("1", "Something failed, or what was asked about is not well."),
    ("2", "The command was called wrongly."),
];

const FILES: [(&str, &str); 3] = [
    ("/run/kpx", "The run directory: the agent's socket, and the list of its changes on this host."),
    ("/sys/fs/bpf/kpx", "Maps and links that outlive the agent."),
    ("/etc/kpx/config.yaml", "The configuration that the systemd unit names."),
];

const ENVIRONMENT: [(&str, &str); 3] = [
    ("KUBECONFIG", "The kubeconfig, where no flag names one and kpx runs in no pod."),
    ("RUST_LOG", "The level of the log, such as debug."),
    ("NO_COLOR", "No colours."),
];

/// Returns the command line with the examples of each command.
pub(super) fn command() -> Command {
    EXAMPLES.iter().fold(Cli::command(), |command, (name, examples)| {
        command.mut_subcommand(name, |subcommand| subcommand.after_help(after_help(examples)))
    })
}

impl Cli {
    /// Reads a command line. Ends the process if it is wrong, asks for help, or if a shell asks how it may go on.
    pub fn read(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> Self {
        CompleteEnv::with_factory(|| with_names(command())).var(ASKS).complete();
        let matches = command().get_matches_from(arguments);
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command()).exit())
    }
}

fn after_help(examples: &[Example]) -> String {
    let lines = examples.iter().map(|(line, what)| format!("  {line}\n      {what}\n"));
    format!("Examples:\n{}", lines.collect::<String>().trim_end())
}

/// Writes the manual page of a command.
pub(super) fn page(command: &Command, out: &mut dyn io::Write) -> io::Result<()> {
    let man = Man::new(command.clone());
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    if command.get_arguments().any(|argument| !argument.is_hide_set()) {
        man.render_options_section(out)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(out)?;
    }
    let own = EXAMPLES.iter().find(|(name, _)| *name == command.get_name());
    let examples = own.filter(|_| is_of_kpx(command)).map_or(&[][..], |(_, examples)| examples);
    list(out, "EXAMPLES", examples)?;
    list(out, "EXIT STATUS", &ENDS)?;
    list(out, "FILES", &FILES)?;
    list(out, "ENVIRONMENT", &ENVIRONMENT)?;
    list(out, "SEE ALSO", &see_also(command))?;
    if command.get_version().is_some() { man.render_version_section(out) } else { Ok(()) }
}

/// Returns true for kpx's own commands, whose parts may have the same names.
fn is_of_kpx(command: &Command) -> bool {
    command.get_display_name().is_some_and(|name| name == format!("kpx-{}", command.get_name()))
}

fn see_also(command: &Command) -> Vec<Example> {
    const ALL: [Example; 5] = [
        ("kpx(1)", "All commands."),
        ("kpx-check(1)", "Whether a host is fit."),
        ("kpx-status(1)", "The state of the agent."),
        ("kpx-trace(1)", "What becomes of a packet."),
        ("kubectl(1), kube-proxy(8)", "The cluster's side, and the program that kpx replaces."),
    ];
    let own = format!("{}(1)", command.get_display_name().unwrap_or_else(|| command.get_name()));
    ALL.into_iter().filter(|(page, _)| *page != own).collect()
}

/// Writes a section of terms, each with its meaning. An empty list is no section.
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
    use super::*;
    use crate::config::arguments;

    #[test]
    fn each_command_has_examples_that_are_command_lines() {
        let shown = Cli::command();
        let shown = shown.get_subcommands().filter(|one| !one.is_hide_set());
        let names: Vec<_> = shown.map(|one| one.get_name().to_owned()).collect();
        let with_examples: Vec<_> = EXAMPLES.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(names, with_examples);
        for (name, examples) in EXAMPLES {
            for (line, _) in *examples {
                let words = line.replacen("kubectl kpx", "kubectl-kpx", 1).replacen("watch -n1 ", "", 1);
                let words = arguments(words.split(' ').map(Into::into));
                let matches = command().try_get_matches_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
                assert_eq!(matches.subcommand_name(), Some(*name), "{line}");
                assert!(Cli::from_arg_matches(&matches).is_ok(), "{line}");
            }
        }
    }

    #[test]
    fn page_says_how_command_is_used_and_ends() {
        let mut command = command();
        command.build();
        let status = command.find_subcommand("status").expect("a command");
        let mut page = Vec::new();
        super::page(status, &mut page).expect("written to memory");
        let page = String::from_utf8(page).expect("text");
        for part in ["NAME", "EXAMPLES", "EXIT STATUS", "FILES", "ENVIRONMENT", "SEE ALSO"] {
            assert!(page.lines().any(|line| line.starts_with(".SH") && line.contains(part)), "{part} in {page}");
        }
        assert!(page.contains("kpx status") && page.contains("kpx\\-trace(1)") && !page.contains("kpx\\-status(1)"));
    }
}
