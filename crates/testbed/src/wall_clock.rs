//! A movable wall clock for processes of a test. `wall_clock.c` replaces libc's functions.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::netns;

#[derive(Debug)]
pub struct WallClock {
    library: PathBuf,
    path: PathBuf,
    offset: File,
}

impl WallClock {
    /// Compiles the library in a folder of the test. The clock is right until it is set.
    pub fn new(folder: &Path) -> Result<Self> {
        let [library, path] = ["wall_clock.so", "offset"].map(|name| folder.join(name));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/wall_clock.c");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&library)
            .arg(source)
            .output();
        netns::check(compiled, "compile wall_clock.c")?;
        fs::write(&path, 0_i64.to_ne_bytes())
            .with_context(|| format!("write {}", path.display()))?;
        let offset = File::options()
            .write(true)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))?;
        Ok(Self {
            library,
            path,
            offset,
        })
    }

    /// Moves the clock this many seconds from the true time.
    pub fn set(&self, secs: i64) -> Result<()> {
        self.offset
            .write_all_at(&secs.to_ne_bytes(), 0)
            .context("set the clock")
    }

    /// Returns a command that runs its arguments with this clock.
    pub fn env(&self) -> Command {
        let mut env = Command::new("env");
        env.arg(format!("LD_PRELOAD={}", self.library.display()));
        env.arg(format!("CLOCK_OFFSET={}", self.path.display()));
        env
    }
}
