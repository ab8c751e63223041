//! Runs and prints commands, also as root.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Runs a command to its end. Its output goes to the terminal.
pub(crate) fn run(mut command: Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("run `{}`", show(&command)))?;
    ensure!(status.success(), "`{}` failed ({status})", show(&command));
    Ok(())
}

/// Returns the command with low priority (`nice`).
pub(crate) fn nice(command: &Command) -> Command {
    let mut nice = Command::new("nice");
    nice.args(["-n", "19"])
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => nice.env(name, value),
            None => nice.env_remove(name),
        };
    }
    command.get_current_dir().map(|dir| nice.current_dir(dir));
    nice
}

/// Returns both outputs of a command; `None` if it cannot run or fails.
pub(crate) fn output(program: impl AsRef<OsStr>, args: &[&str]) -> Option<String> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = [output.stdout, output.stderr].concat();
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&text).into_owned())
}

/// Asks git about the tree. In a container another user may own the tree, which git distrusts.
pub(crate) fn git(root: &Path, args: &[&str]) -> Option<String> {
    let root = root.to_string_lossy();
    output(
        "git",
        &[&["-c", "safe.directory=*", "-C", &root], args].concat(),
    )
}

/// Returns the command as a user would type it.
pub(crate) fn show(command: &Command) -> String {
    let envs = command.get_envs().filter_map(|(name, value)| {
        Some(format!(
            "{}={}",
            name.to_string_lossy(),
            value?.to_string_lossy().replace('\u{1f}', " ")
        ))
    });
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    envs.chain(words.map(|word| word.to_string_lossy().into_owned()))
        .map(|word| {
            if word.contains([' ', '"']) {
                format!("'{word}'")
            } else {
                word
            }
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// Finds a program, including in the system's directories outside a plain user's PATH.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|dir| dir.join(program))
        .find(|file| is_executable(file))
}

pub(crate) fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0)
}

pub(crate) fn is_root() -> io::Result<bool> {
    // The owner of a process' directory in /proc is its effective user.
    Ok(fs::metadata("/proc/self")?.uid() == 0)
}

/// Returns true if this user can become root without a password.
pub(crate) fn has_sudo() -> bool {
    output("sudo", &["-n", "true"]).is_some()
}

/// Returns the prefix of a command that must run as root; empty for root.
pub(crate) fn root_prefix() -> Result<&'static [&'static str]> {
    if is_root().context("read /proc/self")? {
        return Ok(&[]);
    }
    if has_sudo() {
        return Ok(&["sudo", "-n", "-E"]);
    }
    bail!("this needs root: run it as root, or let sudo work without a password (`sudo -v` first)")
}

pub(crate) fn as_root(program: &Path) -> Result<Command> {
    let mut words = root_prefix()?
        .iter()
        .map(OsStr::new)
        .chain([program.as_os_str()]);
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_shown_as_typed() {
        let mut command = Command::new("cargo");
        command
            .env("LLVM_PREFIX", "/usr/lib/llvm-22")
            .env_remove("RUSTC")
            .args(["install", "two words"]);
        assert_eq!(
            show(&command),
            "LLVM_PREFIX=/usr/lib/llvm-22 cargo install 'two words'"
        );
    }

    #[test]
    fn failure_names_the_command() {
        assert_eq!(
            run(Command::new("false")).unwrap_err().to_string(),
            "`false` failed (exit status: 1)"
        );
        assert!(output("false", &[]).is_none());
        assert_eq!(output("echo", &["found"]).as_deref(), Some("found\n"));
        assert!(which("sh").is_some());
        assert!(which("no such program").is_none());
    }
}
