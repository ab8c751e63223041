//! Prints results of commands: as tables in kubectl's style, or as data.

use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::presets::NOTHING;
use comfy_table::{Cell, Color, Table};
use serde::Serialize;

/// The text of an empty cell.
pub const NONE: &str = "<none>";

#[derive(Args, Debug)]
pub struct OutputArgs {
    /// Print a table, a wider table, or data in a stable form.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Output,
    /// Leave out the names of columns.
    #[arg(long)]
    no_headers: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    #[default]
    Text,
    Wide,
    Json,
    Yaml,
}

/// The form of a printed table.
#[derive(Clone, Copy, Debug, Default)]
pub struct Form {
    pub wide: bool,
    pub headers: bool,
    pub colours: bool,
}

impl OutputArgs {
    /// Prints the data, or the text that `text` makes from it.
    pub fn print<T: Serialize>(&self, data: &T, text: impl FnOnce(Form) -> String) -> Result<()> {
        let form = || Form { wide: self.output == Output::Wide, headers: !self.no_headers, colours: has_colours() };
        print(&match self.output {
            Output::Text | Output::Wide => {
                let text = text(form());
                if text.is_empty() {
                    // A failure is ignored, because a closed standard error leaves no place to report it.
                    let _written = writeln!(stderr(), "nothing found");
                }
                text
            }
            Output::Json => serde_json::to_string_pretty(data)? + "\n",
            Output::Yaml => serde_saphyr::to_string(data)?,
        })
    }
}

/// Writes to standard output. A reader that closes the pipe early is no error.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.context("write to standard output"),
    }
}

/// Returns true if colours are wanted. Any value of NO_COLOR but an empty one turns them off: <https://no-color.org>.
fn has_colours() -> bool {
    stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

impl Form {
    /// Formats rows in aligned columns; without any row the text is empty.
    pub fn table(self, header: &[&str], rows: impl IntoIterator<Item = Vec<Cell>>) -> String {
        let mut table = Table::new();
        table.load_preset(NOTHING).add_rows(rows);
        if table.is_empty() {
            return String::new();
        }
        if self.headers {
            table.set_header(header);
        }
        if self.colours {
            table.enforce_styling()
        } else {
            table.force_no_tty()
        };
        table.column_iter_mut().for_each(|column| {
            column.set_padding((0, 3));
        });
        table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }
}

/// Makes a cell in which control characters, except for line ends, are escaped. The `zone` and `targetRef` of an
/// EndpointSlice are free text, and must not reach the terminal as they are.
pub fn cell(text: impl ToString) -> Cell {
    let text = escaped(&text.to_string());
    Cell::new(if text.is_empty() { NONE } else { &text })
}

/// Escapes control characters, except for line ends.
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() && letter != '\n' { shown.extend(letter.escape_default()) } else { shown.push(letter) }
    }
    shown
}

pub fn green(text: impl ToString) -> Cell {
    cell(text).fg(Color::Green)
}

pub fn yellow(text: impl ToString) -> Cell {
    cell(text).fg(Color::Yellow)
}

pub fn red(text: impl ToString) -> Cell {
    cell(text).fg(Color::Red)
}

/// Joins the items with commas.
pub fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_empty_cells_say_so() {
        let rows = || [vec![cell("web"), cell("")], vec![cell("a-longer-name"), red("10.0.0.1")]];
        let form = Form { headers: true, ..Form::default() };
        let text = "NAME            ADDRESS\nweb             <none>\na-longer-name   10.0.0.1\n";
        assert_eq!(form.table(&["NAME", "ADDRESS"], rows()), text);
        assert_eq!(form.table(&["NAME"], []), "");
        assert_eq!(Form::default().table(&["NAME", "ADDRESS"], rows()).lines().count(), 2);
        assert_eq!(form.table(&["ZONE"], [vec![cell("a\u{1b}]52;c;eA==\u{7}b")]]), "ZONE\na\\u{1b}]52;c;eA==\\u{7}b\n");
        let colours = Form { colours: true, ..form };
        assert!(colours.table(&["NAME", "ADDRESS"], rows()).contains("\u{1b}["));
    }
}
