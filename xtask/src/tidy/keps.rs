//! Checks that `docs/keps.md` names a test for each enhancement of Kubernetes, and that the tests are there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::Violation;
use super::source::{File, Tree};

const PAGE: &str = "docs/keps.md";
/// The file with the cases of the reachability matrix.
const CASES: &str = "tests/reachability/table.rs";
const WHY: &str = "each enhancement of Kubernetes has a test that shows it";

pub(super) fn check(root: &Path, tree: &Tree) -> Result<Vec<Violation>> {
    let read = |path| fs::read_to_string(root.join(path)).with_context(|| format!("read {path}"));
    let (page, cases) = (read(PAGE)?, read(CASES)?);
    let functions: BTreeSet<_> = tree.files.iter().flat_map(File::functions).collect();
    let is_there = |word: Word| match word {
        Word::Case(id) => cases.contains(&format!("\"{id}\"")),
        Word::Function(name) => functions.contains(name),
        Word::Path(path) => root.join(path).exists(),
    };
    Ok(wrong_rows(&page, is_there))
}

/// The things that a row may name.
#[derive(Clone, Copy, Debug)]
enum Word<'a> {
    /// A case of the reachability matrix, such as C19.
    Case(&'a str),
    Function(&'a str),
    /// A file, a folder or a crate.
    Path(&'a str),
}

fn wrong_rows(page: &str, is_there: impl Fn(Word) -> bool) -> Vec<Violation> {
    let rows = page.lines().zip(1..).filter(|(line, _)| line.starts_with("| [") && line.contains("kep.k8s.io"));
    let wrong = rows.flat_map(|(row, line)| {
        let cell = row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap_or_default();
        let words: Vec<_> = words(cell).collect();
        let is_test = |word: &Word| !matches!(word, Word::Path(_));
        let untested = (!words.iter().any(is_test)).then(|| format!("names no test: {cell}"));
        let missing = words.into_iter().filter(|word| !is_there(*word)).map(|word| format!("{word:?} is not there"));
        let wrong: Vec<_> = untested.into_iter().chain(missing).collect();
        wrong.into_iter().map(move |what| Violation { path: PAGE.to_owned(), line, what, why: WHY })
    });
    wrong.collect()
}

/// Returns the names between backticks, and the cases.
fn words(cell: &str) -> impl Iterator<Item = Word<'_>> {
    cell.split('`').enumerate().flat_map(|(at, part)| {
        let is_quoted = at % 2 == 1;
        let is_function =
            part.contains('_') && part.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
        let quoted = match is_function {
            true => Word::Function(part),
            false => Word::Path(part),
        };
        let cases =
            part.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(move |word| !is_quoted && is_case(word));
        is_quoted.then_some(quoted).into_iter().chain(cases.map(Word::Case))
    })
}

fn is_case(word: &str) -> bool {
    let (letter, digits) = word.split_at(word.len().min(1));
    letter.chars().all(|letter| letter.is_ascii_uppercase()) && digits.len() == 2 && digits.parse::<u8>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn each_enhancement_names_tests_that_are_there() {
        let wrong = check(workspace::root(), &Tree::read(workspace::root()).unwrap()).unwrap();
        assert_eq!(wrong, []);
    }

    #[test]
    fn rows_without_a_test_are_found() {
        let row = |cell: &str| format!("| KEP |\n| [1](https://kep.k8s.io/1) | what | {cell} |\n");
        let is_there = |word: Word| match word {
            Word::Case(id) => id == "C19",
            Word::Function(name) => name == "it_works",
            Word::Path(path) => path == "tests/lab",
        };
        for (cell, want) in [
            ("–", vec!["names no test: –"]),
            ("C19 of [a page](page.md)", vec![]),
            ("`tests/lab`, `it_works`", vec![]),
            ("`tests/lab`", vec!["names no test: `tests/lab`"]),
            ("all tests", vec!["names no test: all tests"]),
            ("C19, C99", vec!["Case(\"C99\") is not there"]),
            ("`tests/lab`, `it_worked`", vec!["Function(\"it_worked\") is not there"]),
            ("`tests/labs`, C19", vec!["Path(\"tests/labs\") is not there"]),
        ] {
            let found: Vec<_> =
                wrong_rows(&row(cell), is_there).into_iter().map(|wrong| (wrong.line, wrong.what)).collect();
            assert_eq!(found, want.into_iter().map(|what| (2, what.to_owned())).collect::<Vec<_>>(), "{cell}");
        }
    }
}
