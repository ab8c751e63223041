//! Puts the kernel programs where `object.rs` embeds them from, or an empty file if there are none.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-env-changed=KPX_BPF_OBJECT");
    let out_dir = PathBuf::from(variable("OUT_DIR")?);
    let object = match env::var_os("KPX_BPF_OBJECT") {
        Some(object) => PathBuf::from(object),
        None => built(&out_dir)?,
    };
    println!("cargo::rerun-if-changed={}", object.display());
    let bytes = fs::read(&object).map_err(|error| io::Error::other(format!("read {}: {error}", object.display())))?;
    fs::write(out_dir.join("kpx.bpf.o"), bytes)
}

/// What `cargo xtask build` leaves in the target directory. An empty, very old file stands in for it until then: cargo
/// takes a file that it should watch and that does not exist for changed, and would rebuild this package every time.
fn built(out_dir: &Path) -> io::Result<PathBuf> {
    let object = target_dir(out_dir)?.join("kpx.bpf.o");
    match File::create_new(&object) {
        Ok(file) => file.set_modified(UNIX_EPOCH)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    Ok(object)
}

/// `OUT_DIR` is `<target directory>[/<triple>]/<profile>/build/…`.
fn target_dir(out_dir: &Path) -> io::Result<PathBuf> {
    let triple = variable("TARGET")?;
    let mut above = out_dir.ancestors().skip_while(|dir| dir.file_name() != Some(OsStr::new("build"))).skip(2);
    let dir = above.find(|dir| dir.file_name() != Some(triple.as_ref()));
    let dir = dir.ok_or_else(|| io::Error::other(format!("no target directory above {}", out_dir.display())))?;
    Ok(dir.to_owned())
}

fn variable(name: &str) -> io::Result<std::ffi::OsString> {
    env::var_os(name).ok_or_else(|| io::Error::other(format!("{name} is not set: this is a build script of cargo")))
}
