//! Text dumps: `NAME.txt` next to `NAME.rs` has a section for each dump.
//!
//! A section begins with `== TEST` or `== TEST/PART`. The lines after `--` are the dump. The lines
//! before it are comments (`#`) and the input objects, one on each line. Without objects, the test
//! builds its input in Rust. `UPDATE_EXPECT=1` rewrites the dumps in place.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{env, fs};

pub(crate) struct Dump {
    pub(super) name: String,
    pub(super) input: Vec<String>,
    path: PathBuf,
    text: String,
}

/// The lock for all files, which tests read and rewrite in parallel.
static FILES: Mutex<()> = Mutex::new(());

impl Dump {
    /// Reads all sections for a source file.
    pub(super) fn read(source: &str) -> Vec<Self> {
        let path = Path::new(source).with_extension("txt");
        let mut here = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .map(|dir| dir.join(&path));
        let path = here
            .find(|path| path.exists())
            .unwrap_or_else(|| panic!("no file {}", path.display()));
        let _lock = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sections: Vec<Self> = Vec::new();
        let mut in_dump = false;
        for line in fs::read_to_string(&path).unwrap().lines() {
            if let Some(name) = line.strip_prefix("== ") {
                let name = name.to_owned();
                let path = path.clone();
                sections.push(Self {
                    name,
                    input: Vec::new(),
                    path,
                    text: String::new(),
                });
                in_dump = false;
            }
            let Some(section) = sections.last_mut() else {
                continue;
            };
            match line {
                "--" => in_dump = true,
                "" => in_dump = false,
                line if in_dump => section.text += &format!("{line}\n"),
                line if line.starts_with("== ") || line.starts_with('#') => {}
                line => section.input.push(line.to_owned()),
            }
        }
        sections
    }

    /// Finds the dump of a test that builds its input in Rust.
    pub(crate) fn of_rust(source: &str, name: &str) -> Self {
        let dump = Self::read(source)
            .into_iter()
            .find(|dump| dump.name == name);
        let dump = dump.unwrap_or_else(|| panic!("{source} has no dump {name}"));
        assert!(dump.input.is_empty(), "the input of {name} is in Rust");
        dump
    }

    /// Compares the dump with `found`, or rewrites it.
    pub(crate) fn assert_eq(&self, found: &str) {
        let Self {
            name, path, text, ..
        } = self;
        if env::var_os("UPDATE_EXPECT").is_some() {
            return self.rewrite(found);
        }
        assert!(
            text == found,
            "{}: {name} (UPDATE_EXPECT=1 rewrites it)\nwritten:\n{text}\nfound:\n{found}",
            path.display()
        );
    }

    fn rewrite(&self, found: &str) {
        let _lock = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        let file = fs::read_to_string(&self.path).unwrap();
        let mut lines: Vec<&str> = file.lines().collect();
        let header = format!("== {}", self.name);
        let header = lines
            .iter()
            .position(|line| *line == header)
            .expect("the section was there before");
        let behind =
            |start: usize, what: &str| lines[start..].iter().position(|line| *line == what);
        let start = header + behind(header, "--").expect("the section has a dump") + 1;
        let end = behind(start, "").map_or(lines.len(), |end| start + end);
        lines.splice(start..end, found.lines());
        fs::write(&self.path, lines.join("\n") + "\n").unwrap();
    }
}

/// Asserts that `code`, the source file's text, runs every section.
pub(crate) fn assert_all_run(source: &str, code: &str) {
    for Dump { name, input, .. } in Dump::read(source) {
        let test = name.split('/').next().unwrap_or_default();
        let run = if input.is_empty() {
            format!("\"{name}\"")
        } else {
            format!("    {test},\n")
        };
        assert!(code.contains(&run), "{source}: no test runs section {name}");
    }
}
