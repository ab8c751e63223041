//! Tells the crate the version of the compiler, which `/statusz` shows.

use std::process::Command;
use std::{env, io};

fn main() -> io::Result<()> {
    let rustc = env::var_os("RUSTC").ok_or_else(|| io::Error::other("cargo has set no RUSTC"))?;
    let output = Command::new(rustc).arg("--version").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text
        .split(' ')
        .nth(1)
        .ok_or_else(|| io::Error::other(format!("no version of rustc: {text:?}")))?;
    println!("cargo::rustc-env=KPX_RUST_VERSION={version}");
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}
