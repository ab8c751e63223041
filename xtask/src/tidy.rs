//! Checks the house rules that a machine can check. Each violation has its place and the rule's
//! reason.

mod home;
mod rules;
mod source;
mod walls;

use std::fmt;

use anyhow::{Result, ensure};

use crate::home::Home;
use crate::workspace;
use source::Tree;

pub(crate) fn run() -> Result<()> {
    let tree = Tree::read(workspace::root())?;
    let mut violations = rules::check(&tree);
    violations.extend(home::check(workspace::root(), &Home::read()?)?);
    violations.extend(walls::check(workspace::root())?);
    violations.extend(walls::impure_core()?);
    for violation in &violations {
        eprintln!("{violation}");
    }
    ensure!(
        violations.is_empty(),
        "{} house rules broken",
        violations.len()
    );
    println!("{} files are tidy", tree.files.len());
    Ok(())
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Violation {
    path: String,
    line: usize,
    what: String,
    why: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}: {} ({})",
            self.path, self.line, self.what, self.why
        )
    }
}

#[cfg(test)]
#[path = "tidy/tests.rs"]
mod tests;
