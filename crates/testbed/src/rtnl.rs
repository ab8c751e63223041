//! The kernel's RTNL lock, held by another program (`rtnl.c`). The lock is global to the machine.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::netns;

/// The program that holds the lock until it is released or dropped.
#[derive(Debug)]
pub struct HeldRtnl(Child);

impl HeldRtnl {
    /// Compiles the program in a folder of the test, and waits until it holds the lock.
    pub fn hold(folder: &Path) -> Result<Self> {
        let program = folder.join("rtnl");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/rtnl.c");
        let compiled = Command::new("cc")
            .args(["-O1", "-pthread", "-o"])
            .arg(&program)
            .arg(source)
            .output();
        netns::check(compiled, "compile rtnl.c")?;
        let mut command = Command::new(&program);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("hold RTNL")?;
        let output = child.stdout.take().context("its output")?;
        let held = Self(child);
        let mut line = String::new();
        BufReader::new(output)
            .read_line(&mut line)
            .context("wait for RTNL")?;
        ensure!(line == "held\n", "RTNL is not held: {line}");
        Ok(held)
    }

    /// Releases the lock.
    pub fn release(mut self) -> Result<()> {
        drop(self.0.stdin.take());
        let status = self
            .0
            .wait()
            .context("wait for the program that held RTNL")?;
        ensure!(
            status.success(),
            "the program that held RTNL ended with {status}"
        );
        Ok(())
    }
}

impl Drop for HeldRtnl {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ended = self.0.wait();
    }
}
