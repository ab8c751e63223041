//! Parses Rust files to flat lists of tokens. Comments are dropped and a string is one token, so
//! rules see only code.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The directories that contain only test code.
pub(super) const TESTS: [&str; 3] = ["crates/tools", "crates/testbed", "tests"];

pub(super) struct Tree {
    /// The files, sorted by path.
    pub(super) files: Vec<File>,
    /// The lines of packet rows, with the path of their file.
    pub(super) packet_rows: Vec<(String, String)>,
}

pub(super) struct File {
    /// The path from the workspace's root, with `/`.
    pub(super) path: String,
    pub(super) tokens: Vec<Token>,
}

pub(super) struct Token {
    /// An identifier, a literal, a delimiter or one character of punctuation.
    pub(super) text: String,
    pub(super) line: usize,
    /// The index of the matching delimiter, for a delimiter.
    pub(super) partner: usize,
    /// True if the token is compiled only into tests.
    pub(super) test: bool,
}

/// A path in the code, with the prefixes of its `use`: `use a::{b, c::d};` has `a::b` and
/// `a::c::d`.
pub(super) struct Mention {
    pub(super) text: String,
    pub(super) line: usize,
    pub(super) test: bool,
}

impl Tree {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut paths = Vec::new();
        find(root, &mut paths)?;
        let texts = paths.iter().map(|path| {
            let text =
                fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
            Ok((
                path.strip_prefix(root)?.to_string_lossy().into_owned(),
                text,
            ))
        });
        Self::parse(texts.collect::<Result<_>>()?)
    }

    /// Parses the texts, given with their paths.
    pub(super) fn parse(mut texts: Vec<(String, String)>) -> Result<Self> {
        texts.sort();
        let (texts, tables): (Vec<_>, Vec<_>) = texts
            .into_iter()
            .partition(|(path, _)| path.ends_with(".rs"));
        let rows = tables.iter().flat_map(|(path, text)| {
            let rows = text
                .lines()
                .filter(|line| line.contains('|') && !line.starts_with('#'));
            rows.map(|row| (path.clone(), row.to_owned()))
        });
        let packet_rows = rows.collect();
        let mut files = texts
            .iter()
            .map(|(path, text)| File::parse(path, text))
            .collect::<Result<Vec<_>>>()?;
        let mut modules: Vec<_> = files.iter().flat_map(File::test_modules).collect();
        modules.extend(TESTS.map(str::to_owned));
        for file in &mut files {
            if modules.iter().any(|module| file.is_in(module)) {
                file.tokens.iter_mut().for_each(|token| token.test = true);
            }
        }
        Ok(Self { files, packet_rows })
    }

    pub(super) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Returns the files of a module and of its submodules.
    pub(super) fn module(&self, module: &str) -> impl Iterator<Item = &File> {
        self.files.iter().filter(move |file| file.is_in(module))
    }
}

/// Finds all Rust files and files of packet rows in a directory, except build products and hidden
/// directories.
fn find(dir: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        let hidden = name.to_string_lossy().starts_with('.');
        if entry.file_type()?.is_dir() {
            if !hidden && name != "target" {
                find(&entry.path(), paths)?;
            }
        } else if [".rs", ".packets"]
            .iter()
            .any(|end| name.to_string_lossy().ends_with(end))
        {
            paths.push(entry.path());
        }
    }
    Ok(())
}

impl File {
    fn parse(path: &str, text: &str) -> Result<Self> {
        let stream: TokenStream = text
            .parse()
            .map_err(|error| anyhow!("read {path}: {error}"))?;
        let mut tokens = Vec::new();
        flatten(stream, &mut tokens);
        let mut file = Self {
            path: path.to_owned(),
            tokens,
        };
        for start in 0..file.tokens.len() {
            if file.has(start, &["#", "[", "cfg", "(", "test", ")", "]"]) {
                let end = file.item_end(start);
                file.tokens[start..=end]
                    .iter_mut()
                    .for_each(|token| token.test = true);
            }
        }
        Ok(file)
    }

    /// Returns true if this is the module's file, or below it. A module is its path without `.rs`.
    pub(super) fn is_in(&self, module: &str) -> bool {
        self.path
            .strip_prefix(module)
            .is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    }

    pub(super) fn has(&self, at: usize, texts: &[&str]) -> bool {
        self.tokens
            .get(at..at + texts.len())
            .is_some_and(|there| there.iter().map(|t| &t.text).eq(texts))
    }

    pub(super) fn paths(&self) -> Vec<Mention> {
        let mut paths = Vec::new();
        // The prefix for each open brace as in `a::b::{`; `None` for a brace outside of `use`.
        let mut prefixes: Vec<Option<String>> = Vec::new();
        let mut at = 0;
        while let Some(token) = self.tokens.get(at) {
            match token.text.as_str() {
                "{" => prefixes.push(None),
                "}" => drop(prefixes.pop()),
                text if is_ident(text) => {
                    let mut path = match prefixes.last() {
                        Some(Some(prefix)) if text == "self" => prefix.clone(),
                        Some(Some(prefix)) => format!("{prefix}::{text}"),
                        _ => text.to_owned(),
                    };
                    while self.has(at + 1, &[":", ":"])
                        && self
                            .tokens
                            .get(at + 3)
                            .is_some_and(|next| is_ident(&next.text) || next.text == "*")
                    {
                        at += 3;
                        path = format!("{path}::{}", self.tokens[at].text);
                    }
                    if self.has(at + 1, &[":", ":", "{"]) {
                        at += 3;
                        prefixes.push(Some(path));
                    } else {
                        paths.push(Mention {
                            text: path,
                            line: token.line,
                            test: token.test,
                        });
                    }
                }
                _ => {}
            }
            at += 1;
        }
        paths
    }

    /// Returns the last token of the item that begins at `start`: its closing brace or its
    /// semicolon.
    fn item_end(&self, start: usize) -> usize {
        let mut at = start;
        while let Some(token) = self.tokens.get(at) {
            match token.text.as_str() {
                ";" => return at,
                "{" => return token.partner,
                "(" | "[" => at = token.partner,
                "}" | ")" | "]" => return at, // A field or an argument ends with its container.
                _ => {}
            }
            at += 1;
        }
        self.tokens.len() - 1
    }

    /// Returns the modules that this file declares only for tests and that have files of their own,
    /// as paths without `.rs`.
    fn test_modules(&self) -> Vec<String> {
        let (dir, name) = self.path.rsplit_once('/').unwrap_or(("", &self.path));
        let stem = name.trim_end_matches(".rs");
        let below = if ["lib", "main", "mod"].contains(&stem) {
            dir.to_owned()
        } else {
            format!("{dir}/{stem}")
        };
        let declared = (0..self.tokens.len()).filter(|&at| {
            self.tokens[at].test
                && self.has(at, &["mod"])
                && self.tokens.get(at + 2).is_some_and(|t| t.text == ";")
        });
        let module = |at: usize| {
            let attribute = at
                .checked_sub(6)
                .filter(|&start| self.has(start, &["#", "[", "path", "="]));
            match attribute.and_then(|start| self.tokens.get(start + 4)) {
                Some(path) => format!(
                    "{dir}/{}",
                    path.text.trim_matches('"').trim_end_matches(".rs")
                ),
                None => format!("{below}/{}", self.tokens[at + 1].text),
            }
        };
        declared.map(module).collect()
    }
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    for tree in stream {
        let line = tree.span().start().line;
        let TokenTree::Group(group) = tree else {
            tokens.push(Token {
                text: tree.to_string(),
                line,
                partner: tokens.len(),
                test: false,
            });
            continue;
        };
        let (open, close) = match group.delimiter() {
            Delimiter::Parenthesis => ("(", ")"),
            Delimiter::Brace => ("{", "}"),
            Delimiter::Bracket => ("[", "]"),
            Delimiter::None => ("", ""),
        };
        let start = tokens.len();
        tokens.push(Token {
            text: open.to_owned(),
            line,
            partner: start,
            test: false,
        });
        flatten(group.stream(), tokens);
        let line = group.span_close().start().line;
        tokens[start].partner = tokens.len();
        tokens.push(Token {
            text: close.to_owned(),
            line,
            partner: start,
            test: false,
        });
    }
}

fn is_ident(text: &str) -> bool {
    text.starts_with(|first: char| first.is_alphabetic() || first == '_')
}
