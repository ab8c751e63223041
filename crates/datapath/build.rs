//! Copies the kernel programs to the place where `object.rs` embeds them, or an empty file if there
//! are none.

include!("build/embed.rs");

fn main() -> io::Result<()> {
    embed("KPX_BPF_OBJECT", "kpx.bpf.o")
}
