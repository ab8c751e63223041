//! Lists the BPF links that this process holds open, and names their pins.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use aya::programs::TcAttachType;

/// The kernel's descriptions of this process's open files (proc(5)), including the hooks of links.
const FILES: &str = "/proc/self/fdinfo";

/// Field values by name.
pub(super) type Fields = BTreeMap<String, String>;

pub(super) fn open_links() -> Result<Vec<Fields>> {
    let files = fs::read_dir(FILES).with_context(|| format!("read {FILES}"))?;
    let mut links = Vec::new();
    for file in files {
        let path = file.with_context(|| format!("read {FILES}"))?.path();
        // The file may have been closed since the listing.
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
