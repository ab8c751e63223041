//! The kernel programs that this binary carries.

use anyhow::ensure;

/// An ELF object, or nothing if there was none when this was built (see `build.rs`). Aligned, as aya reads its headers
/// in place.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kpx.bpf.o"));

/// The BPF object with kpx's kernel programs.
pub fn embedded() -> anyhow::Result<&'static [u8]> {
    ensure!(!OBJECT.is_empty(), "this kpx was built without its kernel programs: run `cargo xtask build`");
    Ok(OBJECT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aligned_elf_object_or_a_clear_error() {
        assert!(OBJECT.as_ptr().cast::<u64>().is_aligned());
        match embedded() {
            Ok(object) => assert!(object.starts_with(b"\x7fELF")),
            Err(error) => assert!(error.to_string().contains("cargo xtask build")),
        }
    }
}
