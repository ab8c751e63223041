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
            Output::Json => escaped_json(&serde_json::to_string_pretty(data)?) + "\n",
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

/// Makes a cell of one line, without characters that move the cursor or turn the text around. The `zone` and `targetRef` of an
/// EndpointSlice are free text, and must not reach the terminal as they are.
pub fn cell(text: impl ToString) -> Cell {
    let text = escaped(&text.to_string()).replace('\n', "\\n");
    Cell::new(if text.is_empty() { NONE } else { &text })
}

/// Makes a cell with a line for each item.
pub fn lines<T: ToString>(items: impl IntoIterator<Item = T>) -> Cell {
    let lines: Vec<_> = items.into_iter().map(|item| cell(item).content()).collect();
    Cell::new(if lines.is_empty() { NONE.to_owned() } else { lines.join("\n") })
}

/// Returns true for characters that a terminal obeys and does not show.
fn is_hidden(letter: char) -> bool {
    let turns =
        matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    letter.is_control() || turns || matches!(letter, '\u{2028}' | '\u{2029}')
}

/// Escapes hidden characters, except for line ends.
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_hidden(letter) && letter != '\n' { shown.extend(letter.escape_default()) } else { shown.push(letter) }
    }
    shown
}

/// Escapes hidden characters in JSON, which stays the same data. JSON itself has them in strings alone.
pub fn escaped_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for letter in json.chars() {
        if is_hidden(letter) && !"\n\r\t".contains(letter) {
            shown += &format!("\\u{:04x}", u32::from(letter));
        } else {
            shown.push(letter);
        }
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
        assert_eq!(form.table(&["ZONE"], [vec![cell("a\u{202e}b\nc\u{2028}")]]), "ZONE\na\\u{202e}b\\nc\\u{2028}\n");
        assert_eq!(form.table(&["PORT"], [vec![lines(["1", "2\n"])]]), "PORT\n1\n2\\n\n");
        let colours = Form { colours: true, ..form };
        assert!(colours.table(&["NAME", "ADDRESS"], rows()).contains("\u{1b}["));
    }

    #[test]
    fn escaped_json_is_the_same_data() {
        let data = serde_json::json!({ "zone": "a\u{9b}31m\u{7f}\u{202e}b\nc" });
        let shown = escaped_json(&serde_json::to_string_pretty(&data).unwrap());
        assert!(!shown.chars().any(|letter| is_hidden(letter) && letter != '\n'), "{shown:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), data);
    }
}
