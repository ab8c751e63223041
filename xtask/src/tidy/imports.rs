//! The import graph: which file names which, where they form circles, and how deep the rest is.

use std::collections::BTreeMap;

use super::source::{File, Tree};

/// The files of a crate, and for each the files it imports from.
pub(super) struct Graph {
    paths: Vec<String>,
    imports: Vec<Vec<usize>>,
}

/// The shape of a graph.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// The files of the largest circle, or of none.
    pub(super) circle: Vec<String>,
    /// The files of the longest chain of imports, with a circle counted as one.
    pub(super) levels: usize,
}

impl Graph {
    /// Reads the graph of the crate whose sources lie in this directory. Code for tests is left out.
    pub(super) fn read(tree: &Tree, sources: &str) -> Self {
        let is_product = |file: &&File| !file.tokens.is_empty() && !file.tokens.iter().all(|token| token.test);
        let inside =
            tree.files.iter().filter(|file| file.path.strip_prefix(sources).is_some_and(|p| p.starts_with('/')));
        let files: Vec<_> = inside.filter(is_product).collect();
        let modules: Vec<_> = files.iter().map(|file| module(&file.path[sources.len() + 1..])).collect();
        let modules = Modules { by_path: modules.iter().cloned().zip(0..).collect(), of_file: modules, files: &files };
        let mut imports = vec![Vec::new(); files.len()];
        for (from, file) in files.iter().enumerate() {
            let mentions = file.imports(false).into_iter().filter(|mention| !mention.test);
            let targets = mentions.filter_map(|mention| modules.source(&mention.text, from, REEXPORTS_MAX));
            imports[from].extend(targets.filter(|&to| to != from));
            imports[from].sort_unstable();
            imports[from].dedup();
        }
        Self { paths: files.iter().map(|file| file.path.clone()).collect(), imports }
    }

    pub(super) fn shape(&self) -> Shape {
        let circles = self.circles();
        let largest = circles.iter().max_by_key(|circle| circle.len()).filter(|circle| circle.len() > 1);
        let mut circle: Vec<_> = largest.into_iter().flatten().map(|&file| self.paths[file].clone()).collect();
        circle.sort();
        Shape { circle, levels: self.levels(&circles) }
    }

    /// Returns the strongly connected components, each after all those that it imports (Tarjan 1972).
    fn circles(&self) -> Vec<Vec<usize>> {
        let mut search = Search {
            graph: self,
            index: vec![None; self.paths.len()],
            low: vec![0; self.paths.len()],
            stack: Vec::new(),
            found: Vec::new(),
            next: 0,
        };
        for file in 0..self.paths.len() {
            if search.index[file].is_none() {
                search.visit(file);
            }
        }
        search.found
    }

    fn levels(&self, circles: &[Vec<usize>]) -> usize {
        let mut level = vec![0; self.paths.len()];
        for circle in circles {
            let imports = circle.iter().flat_map(|&file| &self.imports[file]).filter(|import| !circle.contains(import));
            let deepest = imports.map(|&import| level[import]).max().unwrap_or(0);
            circle.iter().for_each(|&file| level[file] = deepest + 1);
        }
        level.into_iter().max().unwrap_or(0)
    }
}

struct Search<'a> {
    graph: &'a Graph,
    index: Vec<Option<usize>>,
    low: Vec<usize>,
    stack: Vec<usize>,
    found: Vec<Vec<usize>>,
    next: usize,
}

impl Search<'_> {
    fn visit(&mut self, file: usize) {
        self.index[file] = Some(self.next);
        self.low[file] = self.next;
        self.next += 1;
        self.stack.push(file);
        for &import in &self.graph.imports[file] {
            match self.index[import] {
                None => {
                    self.visit(import);
                    self.low[file] = self.low[file].min(self.low[import]);
                }
                Some(index) if self.stack.contains(&import) => self.low[file] = self.low[file].min(index),
                Some(_) => {}
            }
        }
        if Some(self.low[file]) == self.index[file] {
            let start = self.stack.iter().rposition(|&other| other == file).unwrap_or(0);
            self.found.push(self.stack.split_off(start));
        }
    }
}

/// Returns the module path of a file below `src`: `a/b.rs` and `a/b/mod.rs` are `a::b`, `lib.rs` and `main.rs` are empty.
fn module(path: &str) -> String {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if ["lib", "main"].contains(&path) { String::new() } else { path.replace('/', "::") }
}

/// The longest chain of re-exports that is followed.
const REEXPORTS_MAX: usize = 4;

/// The modules of a crate by path and by file.
struct Modules<'a> {
    by_path: BTreeMap<String, usize>,
    of_file: Vec<String>,
    files: &'a [&'a File],
}

impl Modules<'_> {
    /// Returns the file that an import takes its name from. A re-export stands for the file behind it.
    fn source(&self, path: &str, from: usize, reexports: usize) -> Option<usize> {
        let path = self.absolute(path, &self.of_file[from])?;
        let (file, rest) = self.deepest(&path)?;
        let name = rest.split("::").next().filter(|name| !name.is_empty());
        let Some((name, reexports)) = name.zip(reexports.checked_sub(1)) else { return Some(file) };
        let passed_on = self.files[file].imports(true);
        let passed_on = passed_on.iter().find(|mention| mention.text.rsplit("::").next() == Some(name));
        passed_on.and_then(|mention| self.source(&mention.text, file, reexports)).or(Some(file))
    }

    /// Returns a path from the crate's root, if it is one of this crate's.
    fn absolute(&self, path: &str, module: &str) -> Option<String> {
        if let Some(rest) = path.strip_prefix("crate::") {
            return Some(rest.to_owned());
        }
        let mut base = module;
        let mut rest = path;
        let mut is_relative = false;
        while let Some(shorter) = rest.strip_prefix("super::") {
            base = base.rsplit_once("::").map_or("", |(parent, _)| parent);
            rest = shorter;
            is_relative = true;
        }
        if let Some(shorter) = rest.strip_prefix("self::") {
            (rest, is_relative) = (shorter, true);
        }
        let path = if base.is_empty() { rest.to_owned() } else { format!("{base}::{rest}") };
        // A path without a keyword begins with a module below, or with another crate.
        let first = &path[..path.len() - rest.len() + rest.split("::").next().unwrap_or("").len()];
        (is_relative || rest.contains("::") && self.by_path.contains_key(first)).then_some(path)
    }

    /// Returns the file of the longest module path that begins this one, and the rest of the path.
    fn deepest<'p>(&self, path: &'p str) -> Option<(usize, &'p str)> {
        let mut module = path;
        loop {
            if let Some(&file) = self.by_path.get(module) {
                return Some((file, path[module.len()..].trim_start_matches("::")));
            }
            if module.is_empty() {
                return None;
            }
            module = module.rsplit_once("::").map_or("", |(parent, _)| parent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(files: &[(&str, &str)]) -> Shape {
        let texts = files.iter().map(|(path, text)| (format!("a/src/{path}"), (*text).to_owned())).collect();
        Graph::read(&Tree::parse(texts).unwrap(), "a/src").shape()
    }

    #[test]
    fn chain_has_levels_and_no_circle() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "mod c; use c::g;"),
            ("a/c.rs", "use super::super::b::{self, B};"),
            ("b.rs", "use std::net;"),
        ];
        assert_eq!(shape(&files), Shape { circle: vec![], levels: 3 });
    }

    #[test]
    fn reexport_stands_for_the_file_behind_it() {
        let files = [
            ("a.rs", "mod b; pub use b::B;"),
            ("a/b.rs", "use crate::c::C;"),
            ("c.rs", "pub struct C;"),
            ("d.rs", "use crate::a::B;"),
        ];
        assert_eq!(shape(&files).levels, 3);
        assert_eq!(shape(&[files[0], files[1], ("c.rs", "use crate::a::{A, B};")]).circle.len(), 2);
    }

    #[test]
    fn circle_counts_its_files_and_one_level() {
        let files = [
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "mod c; use crate::d; use c::C;"),
            ("b/c.rs", "use crate::a::A;"),
            ("d.rs", "pub const D: u8 = 1;\n#[cfg(test)]\nmod tests { use crate::a::A; }"),
        ];
        let circle = ["a/src/a.rs", "a/src/b.rs", "a/src/b/c.rs"].map(str::to_owned).to_vec();
        assert_eq!(shape(&files), Shape { circle, levels: 2 });
    }
}
