//! The texts that depend on the project's home name what is decided, and admit what is not.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::Violation;
use crate::home::Home;

const WHY: &str = "[workspace.metadata.home] of Cargo.toml decides where kpx is published";

pub(super) fn check(root: &Path, home: &Home) -> Result<Vec<Violation>> {
    let repository = if home.repository.is_empty() {
        String::new()
    } else {
        format!("repository = \"{}\"", home.repository)
    };
    // A file, what it has once that is decided, and what it has until then.
    let places = [
        ("README.md", &home.image, "No registry has kpx yet"),
        (
            "SECURITY.md",
            &home.security,
            "kpx has no address for reports yet",
        ),
        ("SECURITY.md", &home.key, "so there is no public key"),
        // The packages, the bill of crates and the manual pages take it from there.
        ("proxy-agent/Cargo.toml", &repository, ""),
    ];
    let mut violations = Vec::new();
    for (path, decided, undecided) in places {
        let text = fs::read_to_string(root.join(path)).with_context(|| format!("read {path}"))?;
        violations.extend(wrong(&text, decided, undecided).map(|what| Violation {
            path: path.to_owned(),
            line: 1,
            what,
            why: WHY,
        }));
    }
    Ok(violations)
}

/// Returns what a text lacks, or has no longer to have.
fn wrong(text: &str, decided: &str, undecided: &str) -> Option<String> {
    // Pages break their lines anywhere.
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (wanted, stale) = if decided.is_empty() {
        (undecided, "")
    } else {
        (decided, undecided)
    };
    if !text.contains(wanted) {
        Some(format!("lacks `{wanted}`"))
    } else if !stale.is_empty() && text.contains(stale) {
        Some(format!("still has `{stale}`"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_admits_what_is_undecided_and_names_what_is_decided() {
        let admits = "kpx has no\naddress yet.";
        let names = "Write to\nmailto:kpx@lists.invalid.";
        let both = format!("{admits} {names}");
        let undecided = |text| wrong(text, "", "no address yet");
        let decided = |text| wrong(text, "mailto:kpx@lists.invalid", "no address yet");
        assert_eq!(undecided(admits), None);
        assert_eq!(undecided(names).unwrap(), "lacks `no address yet`");
        assert_eq!(decided(names), None);
        assert_eq!(decided(admits).unwrap(), "lacks `mailto:kpx@lists.invalid`");
        assert_eq!(decided(&both).unwrap(), "still has `no address yet`");
    }

    #[test]
    fn decided_repository_belongs_into_the_manifest_of_the_packages() {
        let mut home = Home::read().unwrap();
        home.repository = "https://forge.invalid/kpx".to_owned();
        let violations = check(crate::workspace::root(), &home).unwrap();
        let texts: Vec<_> = violations.iter().map(Violation::to_string).collect();
        assert!(
            texts.iter().any(|text| text.starts_with(
                "proxy-agent/Cargo.toml:1: lacks `repository = \"https://forge.invalid/kpx\"`"
            )),
            "{texts:?}"
        );
    }
}
