//! `kpx trace`: its output for a node of manifests and on a node that kpx serves.
//!
//! Names stand for addresses, so both families share an expected text.

mod choice;
mod cluster;
mod form;
mod live;
mod manifests;
mod objects;

use std::net::IpAddr;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use proxy_common::flow::SOURCE_PORT_FIRST;
use testbed::agent::binary;
use testbed::lab::Family;

/// The names of addresses in commands and expected texts.
#[derive(Clone, Debug)]
struct Names(Vec<(&'static str, IpAddr)>);

impl Names {
    fn new(names: impl IntoIterator<Item = (&'static str, IpAddr)>) -> Self {
        let mut names: Vec<_> = names.into_iter().collect();
        // 10.0.0.1 is a prefix of 10.0.0.10.
        names.sort_by_key(|(_, addr)| std::cmp::Reverse(addr.to_string().len()));
        Self(names)
    }

    /// Returns `web:80/udp` with the address of `web`. The port is optional.
    fn resolve(&self, text: &str) -> Result<String> {
        let (name, port) = text
            .split_once(':')
            .map_or((text, None), |(name, port)| (name, Some(port)));
        let known = self.0.iter().find(|(known, _)| *known == name);
        let (_, addr) = *known.with_context(|| format!("no address is called {name}"))?;
        Ok(match (port, addr) {
            (None, _) => addr.to_string(),
            (Some(port), IpAddr::V4(_)) => format!("{addr}:{port}"),
            (Some(port), IpAddr::V6(_)) => format!("[{addr}]:{port}"),
        })
    }

    /// Returns the text with names instead of addresses, and with `$port` for the random source
    /// ports of kpx.
    fn replace(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, addr) in &self.0 {
            text = text
                .replace(&format!("[{addr}]"), name)
                .replace(&addr.to_string(), name);
        }
        for family in Family::ALL {
            text = text.replace(&format!("{family} *"), "*");
        }
        for port in SOURCE_PORT_FIRST..=u16::MAX {
            text = text.replace(&format!(":{port}"), ":$port");
        }
        // kpx draws a masqueraded client's port from a range that contains fixed ports of the text
        // too.
        text.split_inclusive('\n')
            .map(|line| {
                if is_source(line) {
                    without_port(line)
                } else {
                    line.to_owned()
                }
            })
            .collect()
    }
}

/// Returns true for the line of text or JSON with the flow's source.
fn is_source(line: &str) -> bool {
    line.contains("masqueraded as ") || line.trim_start().starts_with("outcome.source.at")
}

fn without_port(line: &str) -> String {
    let Some((before, port)) = line.rsplit_once(':') else {
        return line.to_owned();
    };
    let rest = port.trim_start_matches(|c: char| c.is_ascii_digit());
    format!(
        "{before}:{}{rest}",
        if rest.len() < port.len() { "$port" } else { "" }
    )
}

/// Runs kpx. Returns its standard output if it succeeds, else an error with its standard error.
fn kpx(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?)
}

fn trace_command() -> Result<Command> {
    let mut command = Command::new(binary()?);
    command.arg("trace");
    Ok(command)
}
