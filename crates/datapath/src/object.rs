//! Embeds the kernel programs in this binary.

use std::borrow::Cow;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

/// The ELF object; empty if the build had none (see `build.rs`). aya reads the headers in place and
/// needs this alignment.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kpx.bpf.o"));

/// Returns the BPF object with kpx's kernel programs.
pub fn embedded() -> anyhow::Result<&'static [u8]> {
    ensure!(
        !OBJECT.is_empty(),
        "this kpx was built without its kernel programs: run `cargo xtask build`"
    );
    Ok(OBJECT)
}

/// Returns the object in `file`, or the embedded object if `file` is `None`.
pub fn chosen(file: Option<&Path>) -> anyhow::Result<Cow<'static, [u8]>> {
    match file {
        Some(file) => Ok(fs::read(file)
            .with_context(|| format!("read {}", file.display()))?
            .into()),
        None => embedded().map(Cow::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_has_an_elf_object_or_a_clear_error() {
        assert!(OBJECT.as_ptr().cast::<u64>().is_aligned());
        match embedded() {
            Ok(object) => assert!(object.starts_with(b"\x7fELF")),
            Err(error) => assert!(error.to_string().contains("cargo xtask build")),
        }
    }
}
