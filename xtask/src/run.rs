//! Builds kpx, and replaces this process by kpx with root's rights.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use crate::{build, shell};

pub(crate) fn run(options: &build::Options, args: &[OsString]) -> Result<()> {
    let kpx = build::run(options)?;
    let mut command = match shell::root_prefix()? {
        [] => Command::new(&kpx),
        [sudo, flags @ ..] => {
            let mut command = Command::new(sudo);
            command.args(flags).arg(&kpx);
            command
        }
    };
    let error = command.args(args).exec();
    Err(error).with_context(|| format!("run {}", kpx.display()))
}
