//! Copies the programs that only benchmarks and tests attach to the place where `test_run.rs`
//! embeds them.

include!("../datapath/build/embed.rs");

fn main() -> io::Result<()> {
    embed("KPX_BENCH_OBJECT", "kpx-bench.bpf.o")
}
