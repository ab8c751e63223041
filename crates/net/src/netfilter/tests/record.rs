//! Recorded rule sets: the kernel's messages as bytes in `NAME.EXT.bin`, next to the loaded text.
//!
//! `UPDATE_EXPECT=1 cargo test -p proxy-net netfilter` records the rule sets (root; nft,
//! iptables-nft, ipset), on a little-endian machine.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use nix::sched::{CloneFlags, unshare};

use super::super::{Message, listed, raw};

/// The length of `struct nlmsghdr`.
const HEAD_LEN: usize = 16;

/// Returns the recorded kernel messages of a rule set.
pub(super) fn messages(file: &str) -> Vec<Message> {
    let recorded = folder().join(format!("{file}.bin"));
    if env::var_os("UPDATE_EXPECT").is_some() {
        let file = folder().join(file);
        // The network namespace disappears with the thread.
        let messages = thread::spawn(move || record(&file)).join().unwrap();
        fs::write(
            &recorded,
            messages.into_iter().flat_map(bytes).collect::<Vec<_>>(),
        )
        .unwrap();
    }
    let recorded =
        fs::read(&recorded).unwrap_or_else(|error| panic!("{}: {error}", recorded.display()));
    split(&recorded)
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/netfilter/fixtures")
}

/// Loads a rule set into a fresh network namespace and dumps it from the kernel.
fn record(file: &Path) -> Vec<Message> {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    let sets = file.with_extension("ipset");
    if sets.exists() {
        load("ipset", &["restore"], &sets);
    }
    match file.extension().unwrap().to_str().unwrap() {
        "nft" => load("nft", &["-f", "-"], file),
        "ip6tables" => load("ip6tables-nft-restore", &[], file),
        _ => load("iptables-nft-restore", &[], file),
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(listed()).unwrap()
}

fn load(program: &str, arguments: &[&str], file: &Path) {
    let status = Command::new(program)
        .args(arguments)
        .stdin(File::open(file).unwrap())
        .status()
        .unwrap();
    assert!(status.success(), "{program} refuses {}", file.display());
}

fn bytes(message: Message) -> Vec<u8> {
    let message = raw::request(message.kind, 0, message.bytes);
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn split(mut recorded: &[u8]) -> Vec<Message> {
    let mut messages = Vec::new();
    while !recorded.is_empty() {
        let len = u32::from_le_bytes(recorded[..4].try_into().unwrap()) as usize;
        let kind = u16::from_le_bytes(recorded[4..6].try_into().unwrap());
        messages.push(Message {
            kind,
            bytes: recorded[HEAD_LEN..len].to_vec(),
        });
        recorded = &recorded[len.next_multiple_of(4).min(recorded.len())..];
    }
    messages
}
