//! Copies the kernel programs to the place where `object.rs` embeds them; without programs, writes
//! an empty file.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

const VARIABLE: &str = "KPX_BPF_OBJECT";
const NAME: &str = "kpx.bpf.o";

/// Copies the object that `VARIABLE` names, or else the object in the target directory.
fn main() -> io::Result<()> {
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let out_dir = PathBuf::from(set("OUT_DIR")?);
    let object = match env::var_os(VARIABLE) {
        Some(object) => PathBuf::from(object),
        None => built(&out_dir)?,
    };
    println!("cargo::rerun-if-changed={}", object.display());
    let bytes = fs::read(&object)
        .map_err(|error| io::Error::other(format!("read {}: {error}", object.display())))?;
    fs::write(out_dir.join(NAME), bytes)
}

/// Returns the path of the object that `cargo xtask build` leaves in the target directory.
///
/// Waits for the lock that `cargo xtask` holds while it builds the object. An empty, very old file
/// replaces a missing object: cargo treats a watched file that does not exist as changed and would
/// rebuild this package every time.
fn built(out_dir: &Path) -> io::Result<PathBuf> {
    let object = target_dir(out_dir)?.join(NAME);
    File::create(object.with_added_extension("lock"))?.lock_shared()?;
    match File::create_new(&object) {
        Ok(file) => file.set_modified(UNIX_EPOCH)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    Ok(object)
}

/// Returns the target directory; `OUT_DIR` is `<target directory>[/<triple>]/<profile>/build/…`.
fn target_dir(out_dir: &Path) -> io::Result<PathBuf> {
    let triple = set("TARGET")?;
    let mut above = out_dir
        .ancestors()
        .skip_while(|dir| dir.file_name() != Some(OsStr::new("build")))
        .skip(2);
    let dir = above.find(|dir| dir.file_name() != Some(triple.as_ref()));
    let dir = dir.ok_or_else(|| {
        io::Error::other(format!("no target directory above {}", out_dir.display()))
    })?;
    Ok(dir.to_owned())
}

fn set(name: &str) -> io::Result<std::ffi::OsString> {
    env::var_os(name).ok_or_else(|| {
        io::Error::other(format!(
            "{name} is not set: this is a build script of cargo"
        ))
    })
}
