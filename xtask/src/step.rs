//! Runs long steps: prints the name of each first and its duration last.
//!
//! The output goes to standard error, so that the commands' outputs can be piped.

use std::io::{BufRead, BufReader, pipe};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::shell;

/// Runs a step whose commands show their own progress.
pub(crate) fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("==> {name}");
    let started = Instant::now();
    let result = work();
    finish(name, started, result.is_ok());
    result
}

/// Runs a step with hidden output, which is printed after a failure; a terminal shows a spinner
/// with the latest line.
pub(crate) fn quiet(name: &str, commands: impl IntoIterator<Item = Command>) -> Result<()> {
    let spinner = ProgressBar::new_spinner();
    if spinner.is_hidden() {
        eprintln!("==> {name}");
    }
    spinner.set_style(ProgressStyle::with_template(
        "{spinner} {prefix} {elapsed:.dim} {wide_msg:.dim}",
    )?);
    spinner.set_prefix(name.to_owned());
    spinner.enable_steady_tick(Duration::from_millis(100));
    let started = Instant::now();
    let result = commands
        .into_iter()
        .try_for_each(|command| watch(command, &spinner));
    spinner.finish_and_clear();
    finish(name, started, result.is_ok());
    result
}

pub(crate) fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

fn finish(name: &str, started: Instant, good: bool) {
    let outcome = if good { "" } else { "failed after " };
    eprintln!("    {name}: {outcome}{}", seconds(started.elapsed()));
}

fn watch(mut command: Command, spinner: &ProgressBar) -> Result<()> {
    let name = shell::show(&command);
    let (reader, writer) = pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = command.spawn().with_context(|| format!("run `{name}`"))?;
    drop(command); // It holds our ends of the pipe, which would never end.
    let mut lines = Vec::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        spinner.set_message(line.clone());
        lines.push(line);
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("`{name}` failed ({status}):\n{}", lines.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quiet_step_shows_its_output_when_it_fails() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo first; echo second >&2; exit 3"]);
        let error = quiet("a test", [shell]).unwrap_err().to_string();
        assert!(
            error.ends_with("failed (exit status: 3):\nfirst\nsecond"),
            "{error}"
        );
    }

    #[test]
    fn spinner_has_colours_unless_no_color_is_set() {
        let test = "step::tests::quiet_step_shows_its_output_when_it_fails";
        let this = std::env::current_exe().unwrap();
        let line = format!(
            "{} --exact {test} --nocapture --color never",
            this.display()
        );
        for (no_color, has_colours) in [(None, true), (Some("1"), false)] {
            let mut script = Command::new("script");
            script
                .args(["-qec", &line, "/dev/null"])
                .env("TERM", "xterm");
            script
                .env_remove("NO_COLOR")
                .env_remove("CLICOLOR")
                .env_remove("CLICOLOR_FORCE")
                .envs(no_color.map(|value| ("NO_COLOR", value)));
            let reported = String::from_utf8(script.output().unwrap().stdout).unwrap();
            assert!(
                reported.contains("first") && reported.contains("\u{1b}[2m") == has_colours,
                "{reported:?}"
            );
        }
    }

    #[test]
    fn quiet_step_stops_at_the_first_failure() {
        let file = std::env::temp_dir().join(format!("kpx-step-{}", std::process::id()));
        let mut touch = Command::new("touch");
        touch.arg(&file);
        quiet("a test", [Command::new("false"), touch]).unwrap_err();
        assert!(!file.exists());
    }
}
