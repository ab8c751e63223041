//! The BPF links of this process: those that it has open, and what they are called.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use aya::programs::TcAttachType;

/// The directory in which the kernel shows this process's open files (proc(5)), and for links their
/// hooks.
const FILES: &str = "/proc/self/fdinfo";

/// By name.
pub(super) type Fields = BTreeMap<String, String>;

/// Reads the fields that the kernel shows of this process's open BPF links.
pub(super) fn open_links() -> Result<Vec<Fields>> {
    let files = fs::read_dir(FILES).with_context(|| format!("read {FILES}"))?;
    let mut links = Vec::new();
    for file in files {
        let path = file.with_context(|| format!("read {FILES}"))?.path();
        // It may have been closed since.
        let Ok(text) = fs::read_to_string(path) else {
            continue;
        };
        links.extend(Some(fields(&text)).filter(|fields| fields.contains_key("link_type")));
    }
    Ok(links)
}

pub(super) fn fields(text: &str) -> Fields {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

/// Returns the name of a link among the pins.
pub(super) fn link_name(ifindex: u32, attach_type: TcAttachType) -> String {
    format!(
        "{ifindex}-{}",
        if attach_type == TcAttachType::Ingress {
            "ingress"
        } else {
            "egress"
        }
    )
}
