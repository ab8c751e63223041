//! The BPF object: embedded in this binary, with one of two programs for each hook.

use std::borrow::Cow;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use object::LittleEndian;
use object::elf::{FileHeader64, SHT_SYMTAB, Sym64};
use object::read::elf::{FileHeader as _, SectionHeader as _, Sym as _};
use proxy_common::hook::PacketHook;

/// The ELF object; empty if the build had none (see `build.rs`). aya reads the headers in place and
/// needs this alignment.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kpx.bpf.o"));

/// Returns the BPF object with kpx's kernel programs.
pub fn embedded() -> Result<&'static [u8]> {
    ensure!(
        !OBJECT.is_empty(),
        "this kpx was built without its kernel programs: run `cargo xtask build`"
    );
    Ok(OBJECT)
}

/// Returns the object in `file`, or the embedded object if `file` is `None`.
pub fn chosen(file: Option<&Path>) -> Result<Cow<'static, [u8]>> {
    match file {
        Some(file) => Ok(fs::read(file)
            .with_context(|| format!("read {}", file.display()))?
            .into()),
        None => embedded().map(Cow::from),
    }
}

/// Returns the object with the names of the hooks' programs exchanged: those that contain the slow
/// path get the names of those that call it. A kernel and its tools see one name for both.
pub fn with_contained_slow_path(object: &[u8]) -> Result<Vec<u8>> {
    let header = FileHeader64::<LittleEndian>::parse(object).context("read the ELF header")?;
    let sections = header
        .sections(LittleEndian, object)
        .context("read the sections")?;
    let symbols = sections
        .symbols(LittleEndian, object, SHT_SYMTAB)
        .context("read the symbols")?;
    let table = sections.section(symbols.section())?.sh_offset(LittleEndian);
    // A symbol starts with the place of its name.
    let name_of = |name: &str| {
        let (index, _) = symbols
            .enumerate()
            .find(|(_, symbol)| symbol.name(LittleEndian, symbols.strings()) == Ok(name.as_bytes()))
            .with_context(|| format!("no program {name} in the BPF object"))?;
        let start = usize::try_from(table)? + index.0 * size_of::<Sym64<LittleEndian>>();
        anyhow::Ok(start..start + size_of::<u32>())
    };
    let mut exchanged = object.to_vec();
    for (calls, contains) in PacketHook::ALL
        .into_iter()
        .filter_map(|hook| Some((hook.program(), hook.program_with_slow_path()?)))
    {
        let (calls, contains) = (name_of(calls)?, name_of(contains)?);
        exchanged[calls.clone()].copy_from_slice(&object[contains.clone()]);
        exchanged[contains].copy_from_slice(&object[calls]);
    }
    Ok(exchanged)
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
