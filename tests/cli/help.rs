//! The output of `--help` for each command: the promise of its flags.

use std::process::Command;

use anyhow::{Result, ensure};
use expect_test::expect_file;
use testbed::agent::binary;

/// All that kpx lists, but `run`: its flags are docs/configuration.md's.
fn commands(help: &str) -> Vec<String> {
    let lines = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty());
    let names = lines.filter_map(|line| {
        line.strip_prefix("  ")
            .filter(|line| !line.starts_with(' '))
    });
    let names = names.filter_map(|line| line.split_whitespace().next());
    names
        .filter(|name| !["run", "help"].contains(name))
        .map(str::to_owned)
        .collect()
}

fn help(arguments: &[&str]) -> Result<String> {
    let output = Command::new(binary()?)
        .args(arguments)
        .arg("--help")
        .env("COLUMNS", "120")
        .output()?;
    ensure!(output.status.success(), "{arguments:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn each_command_describes_itself() -> Result<()> {
    let of_kpx = help(&[])?;
    let commands = commands(&of_kpx);
    for expected in [
        "status",
        "services",
        "backends",
        "flows",
        "devices",
        "check",
        "cleanup",
        "completions",
        "man",
    ] {
        assert!(
            commands.iter().any(|command| command == expected),
            "{expected} is listed in {of_kpx}"
        );
    }
    let mut text = format!("$ kpx --help\n{of_kpx}");
    for command in commands {
        let of_command = help(&[&command])?;
        text = format!("{text}\n$ kpx {command} --help\n{of_command}");
        for part in self::commands(&of_command) {
            text = format!(
                "{text}\n$ kpx {command} {part} --help\n{}",
                help(&[&command, &part])?
            );
        }
    }
    expect_file!["help.txt"].assert_eq(&text);
    Ok(())
}
