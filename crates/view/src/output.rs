//! Prints results of commands as tables in kubectl's style, or as data.

use std::fmt;
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::presets::NOTHING;
use comfy_table::{Cell, Color, ColumnConstraint, ContentArrangement, Row, Table, Width};
use serde::Serialize;

/// The text of an empty cell.
pub const NONE: &str = "<none>";

/// The columns between two cells.
const GAP: u16 = 3;

/// The minimum width of a column of sentences.
const SENTENCE_MIN: u16 = 24;

/// The form of what a command prints.
#[derive(Args, Debug)]
pub struct OutputArgs {
    /// Output format: a table, a wider table, or data with stable fields.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Output,
    /// Omit the header line.
    #[arg(long)]
    no_headers: bool,
}

/// The form of a list of objects that have names.
#[derive(Args, Debug)]
pub struct NamedOutputArgs {
    /// Output format: a table, a wider table, data with stable fields, or names for other commands.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: NamedOutput,
    /// Omit the header line.
    #[arg(long)]
    no_headers: bool,
}

/// The form of the answer of a command that explains one thing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Data {
    #[default]
    Text,
    /// Data with stable fields: fields are added, never renamed or removed.
    Json,
    Yaml,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    #[default]
    Text,
    Wide,
    Json,
    Yaml,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum NamedOutput {
    #[default]
    Text,
    Wide,
    Json,
    Yaml,
    Name,
}

/// The format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Table(Form),
    Json,
    Yaml,
    Names,
}

/// The layout of a printed table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    pub wide: bool,
    pub headers: bool,
    pub colours: bool,
    /// The width of the terminal; `None` prints every column.
    pub width: Option<u16>,
    /// True if each row is one line, so that later rows can follow the table.
    pub one_line: bool,
}

/// The columns that shrink or are omitted on a narrow terminal. All other columns keep their width.
#[derive(Clone, Copy, Debug, Default)]
pub struct Narrow<'a> {
    /// The columns that may be omitted, least important first.
    pub optional: &'a [&'a str],
    /// The column of sentences, which wrap.
    pub sentence: Option<&'a str>,
}

impl OutputArgs {
    pub fn kind(&self) -> Kind {
        match self.output {
            Output::Text => Kind::Table(Form::of_stdout(false, self.no_headers)),
            Output::Wide => Kind::Table(Form::of_stdout(true, self.no_headers)),
            Output::Json => Kind::Json,
            Output::Yaml => Kind::Yaml,
        }
    }

    /// Prints the data, or the text that `text` returns.
    pub fn print<T: Serialize>(&self, data: &T, text: impl FnOnce(Form) -> String) -> Result<()> {
        self.print_list(data, "nothing found", text)
    }

    /// Prints the data, or the text that `text` returns. Prints `nothing` to standard error if the
    /// text is empty.
    pub fn print_list<T: Serialize>(
        &self,
        data: &T,
        nothing: &str,
        text: impl FnOnce(Form) -> String,
    ) -> Result<()> {
        print(&match self.kind() {
            Kind::Table(form) => or_nothing(text(form), nothing),
            Kind::Json => json(data)?,
            Kind::Yaml | Kind::Names => yaml(data)?,
        })
    }
}

impl NamedOutputArgs {
    pub fn kind(&self) -> Kind {
        match self.output {
            NamedOutput::Text => Kind::Table(Form::of_stdout(false, self.no_headers)),
            NamedOutput::Wide => Kind::Table(Form::of_stdout(true, self.no_headers)),
            NamedOutput::Json => Kind::Json,
            NamedOutput::Yaml => Kind::Yaml,
            NamedOutput::Name => Kind::Names,
        }
    }
}

/// Returns the text. Prints `nothing` to standard error if the text is empty.
pub fn or_nothing(text: String, nothing: &str) -> String {
    if text.is_empty() {
        say(format_args!("{nothing}"));
    }
    text
}

/// Returns the message for an empty list, such as `No Services in namespace shop`.
pub fn nothing(objects: &str, namespace: Option<&str>) -> String {
    match namespace {
        Some(namespace) => format!("No {objects} in namespace {}", one_line(namespace)),
        None => format!("No {objects} found"),
    }
}

/// Writes a line to standard error. A failure is ignored: a closed standard error leaves no place
/// to report it.
pub fn say(line: fmt::Arguments<'_>) {
    let _written = writeln!(stderr(), "{line}");
}

/// Formats data as indented JSON.
pub fn json<T: Serialize>(data: &T) -> Result<String> {
    Ok(escaped_json(&serde_json::to_string_pretty(data)?) + "\n")
}

pub fn yaml<T: Serialize>(data: &T) -> Result<String> {
    Ok(serde_saphyr::to_string(data)?)
}

/// Writes to standard output. A reader that closes the pipe early is not an error.
pub fn print(text: &str) -> Result<()> {
    print_on(text).map(drop)
}

/// Writes to standard output. Returns false if the reader has closed the pipe.
pub fn print_on(text: &str) -> Result<bool> {
    let mut stdout = stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true).context("write to standard output"),
    }
}

/// Returns true if the output takes colours. `NO_COLOR` turns them off unless it is empty:
/// <https://no-color.org>.
pub fn has_colours(output: &impl IsTerminal) -> bool {
    output.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

impl Form {
    /// Returns the layout for standard output. A wide table has every column.
    pub fn of_stdout(wide: bool, no_headers: bool) -> Self {
        // A new `Table` has the terminal's width, or `None` if standard output is not a terminal.
        let width = if wide { None } else { Table::new().width() };
        Self {
            wide,
            headers: !no_headers,
            colours: has_colours(&stdout()),
            width,
            one_line: false,
        }
    }

    /// Formats rows in aligned columns; empty if there are no rows.
    pub fn table(self, header: &[&str], rows: impl IntoIterator<Item = Vec<Cell>>) -> String {
        self.narrowed(header, Narrow::default(), rows)
    }

    /// Formats rows in aligned columns, without optional columns that exceed the terminal's width.
    /// On a terminal that is still too narrow, the lines wrap.
    pub fn narrowed(
        self,
        header: &[&str],
        narrow: Narrow<'_>,
        rows: impl IntoIterator<Item = Vec<Cell>>,
    ) -> String {
        let place = |name: &str| header.iter().position(|column| *column == name);
        let optional: Vec<_> = narrow
            .optional
            .iter()
            .filter_map(|name| place(name))
            // In a watched list, the last column stays: it shows `gone`.
            .filter(|column| !self.one_line || column + 1 < header.len())
            .collect();
        let sentence = narrow.sentence.and_then(place);
        self.arranged(header, &optional, sentence, rows.into_iter().collect())
    }

    /// Formats rows whose last column holds sentences, which wrap on a narrow terminal.
    pub fn sentences(self, header: &[&str], rows: impl IntoIterator<Item = Vec<Cell>>) -> String {
        let rows: Vec<_> = rows.into_iter().collect();
        let last = rows
            .iter()
            .map(Vec::len)
            .max()
            .and_then(|columns| columns.checked_sub(1));
        self.arranged(header, &[], last, rows)
    }

    fn arranged(
        self,
        header: &[&str],
        optional: &[usize],
        sentence: Option<usize>,
        rows: Vec<Vec<Cell>>,
    ) -> String {
        let is_plain = self.width.is_none() && !self.colours;
        if is_plain && let Some(text) = plain(self.headers.then_some(header), &rows) {
            return text;
        }
        if rows.is_empty() {
            return String::new();
        }
        let is_uniform: Vec<_> = optional
            .iter()
            .map(|column| uniform(&rows, *column))
            .collect();
        let mut table = Table::new();
        table.load_style(NOTHING).add_rows(rows);
        if self.headers {
            table.set_header(Row::from(header.to_vec()).max_height(1).clone());
        }
        if self.colours {
            table.enforce_styling()
        } else {
            table.force_no_tty()
        };
        table.column_iter_mut().for_each(|column| {
            column.set_padding((0, GAP));
        });
        if let Some(room) = self.width {
            let widths = table.column_max_content_widths();
            let shown = shown(&widths, optional, &is_uniform, sentence, room);
            let others: u16 = (0..widths.len())
                .filter(|column| shown[*column] && Some(*column) != sentence)
                .map(|column| widths[column].saturating_add(GAP))
                .fold(0, u16::saturating_add);
            table
                .set_content_arrangement(ContentArrangement::Dynamic)
                .set_width(u16::MAX);
            for (index, column) in table.column_iter_mut().enumerate() {
                let mut width = widths[index];
                if Some(index) == sentence && !self.one_line {
                    width = width.min(room.saturating_sub(others).max(SENTENCE_MIN));
                }
                column.set_constraint(if shown[index] {
                    ColumnConstraint::Absolute(Width::Fixed(width.saturating_add(GAP)))
                } else {
                    ColumnConstraint::Hidden
                });
            }
        }
        table
            .lines()
            .map(|line| line.trim_end().to_owned() + "\n")
            .collect()
    }
}

/// Returns true if all rows have the same cell in this column. A single row counts only if its cell
/// is empty.
fn uniform(rows: &[Vec<Cell>], column: usize) -> bool {
    let mut cells = rows
        .iter()
        .map(|row| row.get(column).map(Cell::content).unwrap_or_default());
    let first = cells.next().unwrap_or_default();
    (rows.len() > 1 || first == NONE) && cells.all(|cell| cell == first)
}

/// Returns the columns that are shown: all mandatory columns, and as many optional columns as fit,
/// important columns first and uniform columns last.
fn shown(
    widths: &[u16],
    optional: &[usize],
    is_uniform: &[bool],
    sentence: Option<usize>,
    room: u16,
) -> Vec<bool> {
    let least = |column: usize| {
        let width = if Some(column) == sentence {
            widths[column].min(SENTENCE_MIN)
        } else {
            widths[column]
        };
        usize::from(width) + usize::from(GAP)
    };
    let mut shown: Vec<_> = (0..widths.len())
        .map(|column| !optional.contains(&column))
        .collect();
    // The last column has no gap.
    let room = usize::from(room) + usize::from(GAP);
    let mut used: usize = (0..widths.len())
        .filter(|column| shown[*column])
        .map(least)
        .sum();
    let ranked = || optional.iter().zip(is_uniform).rev();
    let varied = ranked().filter(|(_, is_uniform)| !**is_uniform);
    for (column, _) in varied.chain(ranked().filter(|(_, is_uniform)| **is_uniform)) {
        if used + least(*column) <= room {
            shown[*column] = true;
            used += least(*column);
        }
    }
    shown
}

/// Aligns cells of one line each. Returns `None` if a character may be wide. comfy-table is many
/// times slower, noticeably from ten thousand rows on.
fn plain(header: Option<&[&str]>, rows: &[Vec<Cell>]) -> Option<String> {
    if rows.is_empty() {
        return Some(String::new());
    }
    let header = header.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
    let rows = rows
        .iter()
        .map(|row| row.iter().map(Cell::content).collect());
    let lines: Vec<Vec<String>> = header.into_iter().chain(rows).collect();
    let mut widths = Vec::new();
    for line in &lines {
        widths.resize(widths.len().max(line.len()), 0);
        for (text, width) in line.iter().zip(&mut widths) {
            if !text.is_ascii() || text.contains('\n') {
                return None;
            }
            *width = text.len().max(*width);
        }
    }
    let mut table = String::new();
    for line in &lines {
        let start = table.len();
        for (text, width) in line.iter().zip(&widths) {
            table += text;
            table.extend(std::iter::repeat_n(
                ' ',
                width - text.len() + usize::from(GAP),
            ));
        }
        table.truncate(start + table[start..].trim_end().len());
        table.push('\n');
    }
    Some(table)
}

/// Makes a cell of one line, with control and bidirectional characters escaped. The `zone` and
/// `targetRef` of an EndpointSlice are free text and could otherwise inject terminal sequences.
pub fn cell(text: impl ToString) -> Cell {
    let text = one_line(&text.to_string());
    Cell::new(if text.is_empty() { NONE } else { &text })
}

pub(crate) fn one_line(text: &str) -> String {
    escaped(text).replace('\n', "\\n")
}

/// Makes a cell with one line per item.
pub fn lines<T: ToString>(items: impl IntoIterator<Item = T>) -> Cell {
    let lines: Vec<_> = items.into_iter().map(|item| cell(item).content()).collect();
    Cell::new(if lines.is_empty() {
        NONE.to_owned()
    } else {
        lines.join("\n")
    })
}

/// Returns true for characters that a terminal interprets instead of printing.
fn is_hidden(letter: char) -> bool {
    let turns = matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    letter.is_control() || turns || matches!(letter, '\u{2028}' | '\u{2029}')
}

/// Escapes hidden characters, except line ends.
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_hidden(letter) && letter != '\n' {
            shown.extend(letter.escape_default())
        } else {
            shown.push(letter)
        }
    }
    shown
}

/// Escapes hidden characters in JSON and keeps its value: JSON has them only inside strings.
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
    items
        .into_iter()
        .map(|item| item.to_string())
        .collect::<Vec<_>>()
        .join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_empty_cells_say_so() {
        let rows = || {
            [
                vec![cell("web"), cell("")],
                vec![cell("a-longer-name"), red("10.0.0.1")],
            ]
        };
        let form = Form {
            headers: true,
            ..Form::default()
        };
        let text = "NAME            ADDRESS\nweb             <none>\na-longer-name   10.0.0.1\n";
        assert_eq!(form.table(&["NAME", "ADDRESS"], rows()), text);
        assert_eq!(form.table(&["NAME"], []), "");
        assert_eq!(
            Form::default()
                .table(&["NAME", "ADDRESS"], rows())
                .lines()
                .count(),
            2
        );
        assert_eq!(
            form.table(&["ZONE"], [vec![cell("a\u{1b}]52;c;eA==\u{7}b")]]),
            "ZONE\na\\u{1b}]52;c;eA==\\u{7}b\n"
        );
        assert_eq!(
            form.table(&["ZONE"], [vec![cell("a\u{202e}b\nc\u{2028}")]]),
            "ZONE\na\\u{202e}b\\nc\\u{2028}\n"
        );
        assert_eq!(
            form.table(&["PORT"], [vec![lines(["1", "2\n"])]]),
            "PORT\n1\n2\\n\n"
        );
        let wide = [
            vec![cell("wäb"), cell("")],
            vec![cell("a"), red("10.0.0.1")],
        ];
        assert_eq!(
            form.table(&["NAME", "ADDRESS"], wide),
            "NAME   ADDRESS\nwäb    <none>\na      10.0.0.1\n"
        );
        let colours = Form {
            colours: true,
            ..form
        };
        assert!(
            colours
                .table(&["NAME", "ADDRESS"], rows())
                .contains("\u{1b}[")
        );
    }

    #[test]
    fn narrow_terminal_leaves_columns_out_and_wraps_sentences() {
        let header = ["NAME", "ZONE", "NODE", "ADDRESS", "NOTE"];
        let row = |name: &str, node: &str, note: &str| {
            vec![
                cell(name),
                cell("zone-a"),
                cell(node),
                cell("10.244.1.10:8080"),
                cell(note),
            ]
        };
        let rows = || {
            [
                row("web-1", "n1", "the backend answers no SYN of this node"),
                row("web-2", "n2", "well"),
            ]
        };
        let narrow = Narrow {
            optional: &["NODE", "ZONE"],
            sentence: Some("NOTE"),
        };
        let at = |width, one_line| {
            let form = Form {
                headers: true,
                width: Some(width),
                one_line,
                ..Form::default()
            };
            form.narrowed(&header, narrow, rows())
        };
        let note = "the backend answers no SYN of this node";
        let all = format!(
            "NAME    ZONE     NODE   ADDRESS            NOTE\n\
             web-1   zone-a   n1     10.244.1.10:8080   {note}\n\
             web-2   zone-a   n2     10.244.1.10:8080   well\n"
        );
        assert_eq!(at(82, false), all);
        assert_eq!(
            at(67, true),
            all,
            "a row that is one line is left to the terminal"
        );
        // The zone is the same in all rows, so it is omitted before the less important node.
        let without_zone = [
            "NAME    NODE   ADDRESS            NOTE",
            "web-1   n1     10.244.1.10:8080   the backend answers no SYN",
            "                                  of this node",
            "web-2   n2     10.244.1.10:8080   well",
        ];
        assert_eq!(at(60, false).lines().collect::<Vec<_>>(), without_zone);
        // No other column is omitted; the terminal wraps the lines.
        let least = at(20, false);
        assert!(
            least.starts_with("NAME    ADDRESS            NOTE\nweb-1   10.244.1.10:8080   the"),
            "{least}"
        );
        assert!(!least.contains('…'), "{least}");
        let one = Form {
            headers: true,
            width: Some(40),
            ..Form::default()
        };
        let sentence = || {
            [vec![
                cell("fail"),
                cell("kube-ipvs0 is there, so every ClusterIP is the host's own"),
            ]]
        };
        let text = one.sentences(&["LEVEL", "FOUND"], sentence());
        let words: Vec<_> = text.split_whitespace().collect();
        assert_eq!(
            words.join(" "),
            "LEVEL FOUND fail kube-ipvs0 is there, so every ClusterIP is the host's own"
        );
        assert!(
            text.lines().count() > 2 && text.lines().all(|line| line.chars().count() <= 40),
            "{text}"
        );
    }

    #[test]
    fn only_row_keeps_its_values() {
        let row = || [vec![cell("web"), cell("TCP"), cell("")]];
        let narrow = Narrow {
            optional: &["PROTOCOL", "ZONE"],
            sentence: None,
        };
        let form = Form {
            width: Some(14),
            ..Form::default()
        };
        let text = form.narrowed(&["NAME", "PROTOCOL", "ZONE"], narrow, row());
        assert_eq!(text, "web   TCP\n");
    }

    #[test]
    fn escaped_json_is_the_same_data() {
        let data = serde_json::json!({ "zone": "a\u{9b}31m\u{7f}\u{202e}b\nc" });
        let shown = escaped_json(&serde_json::to_string_pretty(&data).unwrap());
        assert!(
            !shown
                .chars()
                .any(|letter| is_hidden(letter) && letter != '\n'),
            "{shown:?}"
        );
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&shown).unwrap(),
            data
        );
    }
}
