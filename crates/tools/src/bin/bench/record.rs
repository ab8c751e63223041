//! The files of results: JSON lines, a file per section.

use std::fmt;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tools::bench::{Sample, Skipped};
use tools::scale::Figure;

use crate::machine::Machine;
use crate::table;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Record {
    /// The machine: the first record of each file, and of each run in the section `scale`.
    Machine(Machine),
    Run(Run),
    Sample(Sample),
    Skipped(Skipped),
    /// A note for readers of the section's figures.
    Note(String),
    Table(Table),
    /// A figure of the section `scale`.
    Figure(Figure),
}

/// The settings of the section `data`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// Only the cells of the first table were measured.
    pub(crate) is_quick: bool,
    pub(crate) rounds: usize,
    pub(crate) slice_ms: u64,
    pub(crate) seed: u64,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            is_quick,
            rounds,
            slice_ms,
            seed,
        } = self;
        let kind = if *is_quick {
            "A quick run"
        } else {
            "A whole run"
        };
        write!(
            f,
            "{kind}: {rounds} rounds, slices of {slice_ms} ms, seed {seed}"
        )
    }
}

/// A preformatted table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// Prints the tables of the last run in a file of results.
#[expect(
    clippy::print_stdout,
    reason = "the result of a benchmark is what it prints"
)]
pub(crate) fn show(results: &Path, name: &str) -> Result<()> {
    println!("{}", table::text(name, &read(results, name)?));
    Ok(())
}

/// Replaces a section's file once the run is complete.
pub(crate) struct Writer {
    file: BufWriter<File>,
    path: PathBuf,
}

impl Writer {
    pub(crate) fn create(results: &Path, section: &str) -> Result<Self> {
        let mut writer = Self::after(&[], results, section)?;
        writer.write(&Record::Machine(Machine::read()?))?;
        Ok(writer)
    }

    /// Appends a run to the file. Discards records of older benchmarks.
    pub(crate) fn add(results: &Path, section: &str) -> Result<Self> {
        let earlier = read(results, section).unwrap_or_else(|error| {
            eprintln!("the figures of earlier runs are given up: {error:#}");
            Vec::new()
        });
        let mut writer = Self::after(&earlier, results, section)?;
        writer.write(&Record::Machine(Machine::read()?))?;
        Ok(writer)
    }

    fn after(earlier: &[Record], results: &Path, section: &str) -> Result<Self> {
        fs::create_dir_all(results).with_context(|| format!("create {}", results.display()))?;
        let path = path(results, section);
        let new = path.with_extension("new");
        let file = File::create(&new).with_context(|| format!("create {}", new.display()))?;
        let mut writer = Self {
            file: BufWriter::new(file),
            path,
        };
        earlier.iter().try_for_each(|record| writer.write(record))?;
        Ok(writer)
    }

    pub(crate) fn write(&mut self, record: &Record) -> Result<()> {
        let line = serde_json::to_string(record)?;
        writeln!(self.file, "{line}").with_context(|| format!("write {}", self.path.display()))
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        self.file
            .flush()
            .with_context(|| format!("write {}", self.path.display()))?;
        let new = self.path.with_extension("new");
        fs::rename(&new, &self.path).with_context(|| format!("rename to {}", self.path.display()))
    }
}

/// Returns an empty list if the section was never run.
pub(crate) fn read(results: &Path, section: &str) -> Result<Vec<Record>> {
    let path = path(results, section);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
    };
    text.lines()
        .map(|line| {
            serde_json::from_str(line).with_context(|| format!("{}: {line}", path.display()))
        })
        .collect()
}

fn path(results: &Path, section: &str) -> PathBuf {
    results.join(format!("{section}.jsonl"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_run_keeps_the_records_of_earlier_ones() {
        let folder = tempfile::tempdir().unwrap();
        let note = |text: &str| Record::Note(text.to_owned());
        let write = |earlier: &[Record], text| {
            let mut writer = Writer::after(earlier, folder.path(), "scale").unwrap();
            writer.write(&note(text)).unwrap();
            writer.finish().unwrap();
            read(folder.path(), "scale").unwrap()
        };
        let first = write(&[], "first");
        assert_eq!(write(&first, "second"), [note("first"), note("second")]);
        assert_eq!(write(&[], "third"), [note("third")]);
    }
}
