//! Reads files of rows, and aligns their columns.

use std::fmt;

use anyhow::{Context, Result, anyhow, bail, ensure};
use proxy_common::counter::{Event, Reason};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS, LO};

use super::step::{Kind, Step};
use super::{Outcome, words};
use crate::test_run::Verdict;

const HOOKS: [(&str, &str); 4] = [
    ("ingress", INGRESS),
    ("egress", EGRESS),
    ("anchor", ANCHOR),
    ("lo", LO),
];
const VERDICTS: [(&str, Verdict); 3] = [
    ("pass", Verdict::Pass),
    ("drop", Verdict::Drop),
    ("redirect", Verdict::Redirect),
];
const COLUMNS: usize = 5;
/// The text for no packet out and for no counters.
const NOTHING: &str = "-";

#[derive(Debug)]
pub struct Section {
    pub name: String,
    pub place: String,
    pub items: Vec<Item>,
}

/// A line of a section.
#[derive(Debug)]
pub enum Item {
    Fixture {
        place: String,
        kind: Kind,
    },
    Row(Row),
    Step {
        place: String,
        step: Step,
    },
    /// Includes the items of another section.
    Rows {
        place: String,
        section: String,
    },
    /// Restricts the lines up to the next `Only` to IPv4 (true), IPv6 (false) or both (`None`).
    Only(Option<bool>),
}

#[derive(Clone, Debug)]
pub struct Row {
    /// The file, line and column of the packet in.
    pub place: String,
    pub(super) file: String,
    pub(super) line: usize,
    hook: String,
    /// The program of the hook.
    pub program: &'static str,
    /// The packet's device, if the row has it.
    pub device: Option<String>,
    pub packet: String,
    verdict: String,
    /// The packet out: text, `same`, or `-` for a dropped packet.
    pub out: String,
    /// The incremented counters, in alphabetical order.
    counted: Vec<String>,
}

impl Row {
    fn parse(file: &str, line: usize, text: &str) -> Result<Self> {
        let cells: Vec<&str> = text.split('|').collect();
        let starts = cells.iter().scan(0, |at, cell| {
            let start = *at + cell.len() - cell.trim_start().len();
            *at += cell.len() + 1;
            Some(start)
        });
        let starts: Vec<usize> = starts.collect();
        let bad =
            |column: usize, what: &str| anyhow!("{}: {what}", place(file, line, column, text));
        ensure!(
            cells.len() == COLUMNS,
            bad(
                text.len(),
                "a row has 5 columns: hook, packet in, verdict, packet out, counters"
            )
        );
        let cells: Vec<&str> = cells.iter().map(|cell| cell.trim()).collect();
        let (hook, device) = cells[0]
            .split_once(' ')
            .map_or((cells[0], None), |(hook, device)| (hook, Some(device)));
        let program = HOOKS.iter().find(|(name, _)| *name == hook);
        let (_, program) =
            program.ok_or_else(|| bad(starts[0], &format!("no hook is called {hook:?}")))?;
        let verdict = cells[2];
        if !VERDICTS.iter().any(|(name, _)| *name == verdict) {
            bail!(bad(starts[2], &format!("no verdict is called {verdict:?}")));
        }
        let counted = if cells[4] == NOTHING {
            Vec::new()
        } else {
            words(cells[4])
        };
        if let Some(unknown) = counted.iter().find(|name| !is_counter(name)) {
            let column = starts[4] + cells[4].find(unknown.as_str()).unwrap_or(0);
            bail!(bad(column, &format!("no counter is called {unknown:?}")));
        }
        Ok(Self {
            place: place(file, line, starts[1], text),
            file: file.to_owned(),
            line,
            hook: hook.to_owned(),
            program,
            device: device.map(|device| device.trim().to_owned()),
            packet: cells[1].to_owned(),
            verdict: verdict.to_owned(),
            out: cells[3].to_owned(),
            counted,
        })
    }

    pub fn verdict(&self) -> Verdict {
        let verdict = VERDICTS.iter().find(|(name, _)| *name == self.verdict);
        verdict.map_or(Verdict::Other(0), |(_, verdict)| *verdict)
    }

    /// Returns the row with another outcome.
    pub fn with(&self, outcome: &Outcome) -> Self {
        let name = VERDICTS
            .iter()
            .find(|(_, verdict)| *verdict == outcome.verdict);
        let verdict = name.map_or_else(
            || format!("{:?}", outcome.verdict),
            |(name, _)| (*name).to_owned(),
        );
        Self {
            verdict,
            out: outcome.out.clone(),
            counted: outcome.counted.clone(),
            ..self.clone()
        }
    }

    fn cells(&self) -> [String; COLUMNS] {
        let hook = self.device.as_ref().map_or_else(
            || self.hook.clone(),
            |device| format!("{} {device}", self.hook),
        );
        let counted = if self.counted.is_empty() {
            NOTHING.to_owned()
        } else {
            self.counted.join(" ")
        };
        [
            hook,
            self.packet.clone(),
            self.verdict.clone(),
            self.out.clone(),
            counted,
        ]
    }
}

impl PartialEq for Row {
    fn eq(&self, other: &Self) -> bool {
        self.cells() == other.cells()
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cells().join(" | "))
    }
}

fn is_counter(name: &str) -> bool {
    Event::ALL.iter().any(|event| event.name() == name)
        || Reason::ALL.iter().any(|reason| reason.name() == name)
}

impl Section {
    /// Splits the section at its fixtures.
    pub fn parts(&self) -> Result<Vec<(Kind, &[Item])>> {
        let starts: Vec<(usize, Kind)> = (0..)
            .zip(&self.items)
            .filter_map(|(at, item)| match item {
                Item::Fixture { kind, .. } => Some((at, *kind)),
                _ => None,
            })
            .collect();
        ensure!(
            starts.first().is_some_and(|(at, _)| *at == 0),
            "{}: the section begins with no fixture",
            self.place
        );
        let ends = starts
            .iter()
            .skip(1)
            .map(|(at, _)| *at)
            .chain([self.items.len()]);
        Ok(starts
            .iter()
            .zip(ends)
            .map(|((at, kind), end)| (*kind, &self.items[at + 1..end]))
            .collect())
    }
}

/// Returns a position as file, line and column. `column` is in bytes from 0, the result in
/// characters from 1.
fn place(file: &str, line: usize, column: usize, text: &str) -> String {
    let column = text
        .get(..column)
        .map_or(column, |before| before.chars().count())
        + 1;
    format!("{file}:{line}:{column}")
}

/// Parses the text of `file`, a path from the top of the workspace. Errors include line and column.
pub fn sections(file: &str, text: &str) -> Result<Vec<Section>> {
    let mut sections: Vec<Section> = Vec::new();
    for (line, text) in (1..)
        .zip(text.lines())
        .filter(|(_, text)| !text.is_empty() && !text.starts_with('#'))
    {
        let at = |column| place(file, line, column, text);
        if let Some(name) = text.strip_prefix("== ") {
            let known = sections.iter().any(|section| section.name == name);
            ensure!(!known, "{}: section {name} is there twice", at(3));
            sections.push(Section {
                name: name.to_owned(),
                place: at(3),
                items: Vec::new(),
            });
            continue;
        }
        let section = sections
            .last_mut()
            .with_context(|| format!("{}: the line belongs to no section", at(0)))?;
        section.items.push(item(file, line, text)?);
    }
    Ok(sections)
}

fn item(file: &str, line: usize, text: &str) -> Result<Item> {
    let at = |column| place(file, line, column, text);
    let bad = |word: &str, what: &str| anyhow!("{}: {what}", at(text.find(word).unwrap_or(0)));
    if let Some(kind) = text.strip_prefix("fixture ") {
        let kind = Kind::parse(kind).map_err(|(word, what)| bad(&word, &what))?;
        return Ok(Item::Fixture { place: at(0), kind });
    }
    let Some(step) = text.strip_prefix("* ") else {
        return Row::parse(file, line, text).map(Item::Row);
    };
    match step {
        "only ipv4" => return Ok(Item::Only(Some(true))),
        "only ipv6" => return Ok(Item::Only(Some(false))),
        "both families" => return Ok(Item::Only(None)),
        _ => {}
    }
    if let Some(section) = step.strip_prefix("rows ") {
        return Ok(Item::Rows {
            place: at(2),
            section: section.to_owned(),
        });
    }
    let step = Step::parse(step).map_err(|(word, what)| bad(&word, &what))?;
    Ok(Item::Step { place: at(2), step })
}

/// Returns the text with the columns of each section aligned.
pub fn aligned(file: &str, text: &str) -> Result<String> {
    let lines: Vec<(usize, &str)> = (1..).zip(text.lines()).collect();
    let is_row = |text: &str| text.contains('|') && !text.starts_with(['#', '*']);
    let mut aligned = String::new();
    for section in lines.chunk_by(|_, (_, next)| !next.starts_with("== ")) {
        let rows = section.iter().filter(|(_, text)| is_row(text));
        let rows = rows
            .map(|(line, text)| Row::parse(file, *line, text))
            .collect::<Result<Vec<_>>>()?;
        let width = |column: usize| {
            rows.iter()
                .map(|row| row.cells()[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..COLUMNS).map(width).collect();
        for (line, text) in section {
            match rows.iter().find(|row| row.line == *line) {
                Some(row) => {
                    let cells = row
                        .cells()
                        .into_iter()
                        .zip(&widths)
                        .map(|(cell, width)| format!("{cell:width$}"));
                    aligned.push_str(cells.collect::<Vec<_>>().join(" | ").trim_end());
                }
                None => aligned.push_str(text.trim_end()),
            }
            aligned.push('\n');
        }
    }
    Ok(aligned)
}
