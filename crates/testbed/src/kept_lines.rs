//! The source lines of loaded programs that the kernel has kept.
//!
//! The verifier removes unreachable code. Old kernels also remove reachable code: see "The
//! verifier" in proxy-ebpf's README.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use anyhow::{Context, Result, ensure};
use aya::programs::Program;
use aya_obj::Object;
use nix::libc::{SYS_bpf, syscall};
use proxy_common::names;
use proxy_datapath::{object, verifier};

/// The count of each program's lines: `kpx_lo icmp.rs:109:28`.
pub type Lines = BTreeMap<String, usize>;

/// `BPF_OBJ_GET_INFO_BY_FD` of linux/bpf.h.
const GET_INFO: i64 = 15;
/// `struct bpf_prog_info` of linux/bpf.h: its length, and field offsets.
const INFO_LEN: usize = 232;
const LINES: usize = 148;
const LINE_ADDR: usize = 152;
const LINE_LEN: usize = 172;
/// More lines than any program has.
const MOST: usize = 65_536;

/// `struct bpf_line_info` of linux/bpf.h.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Line {
    insn: u32,
    file: u32,
    text: u32,
    line_and_column: u32,
}

/// Loads all programs, with and without the fast path. Returns the lines that this kernel kept.
pub fn kept_lines() -> Result<Lines> {
    let bytes = object::embedded()?;
    let parsed = Object::parse(bytes).context("parse the BPF object")?;
    let btf = parsed.btf.context("the BPF object has no BTF")?.to_bytes();
    let strings = strings(&btf).context("the BTF of the BPF object is cut off")?;
    let mut kept = Lines::new();
    for fast_path in [0_u32, 1] {
        let mut loader = verifier::loader();
        let mut ebpf = loader
            .override_global(names::FAST_PATH, &fast_path, true)
            .load(bytes)
            .context("make the maps")?;
        for (name, program) in ebpf.programs_mut() {
            let lines = load(program).with_context(|| format!("load {name}"))?;
            let path = match fast_path {
                0 => name.to_owned(),
                _ => format!("{name} with the fast path"),
            };
            for line in &lines {
                *kept
                    .entry(format!("{path} {}", describe(strings, line)))
                    .or_default() += 1;
            }
        }
    }
    Ok(kept)
}

fn load(program: &mut Program) -> Result<Vec<Line>> {
    verifier::load_any(program)?;
    lines_of(program.fd()?.as_fd())
}

fn lines_of(program: BorrowedFd<'_>) -> Result<Vec<Line>> {
    let mut lines = vec![Line::default(); MOST];
    let mut info = [0_u8; INFO_LEN];
    info[LINES..][..4].copy_from_slice(&u32::try_from(MOST)?.to_ne_bytes());
    info[LINE_LEN..][..4].copy_from_slice(&u32::try_from(size_of::<Line>())?.to_ne_bytes());
    info[LINE_ADDR..][..8].copy_from_slice(&(lines.as_mut_ptr().addr() as u64).to_ne_bytes());
    let mut attr = [0_u8; 16];
    attr[..4].copy_from_slice(&program.as_raw_fd().to_ne_bytes());
    attr[4..8].copy_from_slice(&u32::try_from(INFO_LEN)?.to_ne_bytes());
    attr[8..].copy_from_slice(&(info.as_mut_ptr().addr() as u64).to_ne_bytes());
    lines.as_mut_ptr().expose_provenance();
    info.as_mut_ptr().expose_provenance();
    // SAFETY: the kernel reads `attr` and writes at most `INFO_LEN` bytes to `info`, and `MOST`
    // lines to `lines`; all outlive the call.
    let result = unsafe { syscall(SYS_bpf, GET_INFO, attr.as_mut_ptr(), attr.len()) };
    ensure!(
        result == 0,
        "ask for a program's lines: {}",
        io::Error::last_os_error()
    );
    let count =
        u32::from_ne_bytes(*info[LINES..].first_chunk().context("the number of lines")?) as usize;
    ensure!((1..MOST).contains(&count), "the program has {count} lines");
    lines.truncate(count);
    Ok(lines)
}

/// Returns the strings of BTF data, after its header and types (`struct btf_header` of
/// linux/btf.h).
fn strings(btf: &[u8]) -> Option<&[u8]> {
    let number = |at: usize| Some(u32::from_le_bytes(*btf.get(at..)?.first_chunk()?) as usize);
    btf.get(number(4)? + number(16)?..)
}

/// Returns a line as `icmp.rs:109:28`.
fn describe(strings: &[u8], line: &Line) -> String {
    let file = strings.get(line.file as usize..).unwrap_or_default();
    let file = file.split(|&byte| byte == 0).next().unwrap_or_default();
    let file =
        String::from_utf8_lossy(file.rsplit(|&byte| byte == b'/').next().unwrap_or_default());
    format!(
        "{file}:{}:{}",
        line.line_and_column >> 10,
        line.line_and_column & 0x3ff
    )
}
