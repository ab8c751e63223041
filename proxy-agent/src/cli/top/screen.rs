//! The full screen of `kpx top`: lines of styled text, drawn from the top left corner.

use std::io::{Stdout, Write, stdout};

use anyhow::{Context, Result};
use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::style::{Attribute, Color, ContentStyle, PrintStyledContent};
use crossterm::terminal::{
    BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate, EnterAlternateScreen,
    LeaveAlternateScreen, disable_raw_mode, enable_raw_mode, size,
};
use crossterm::{execute, queue};

use super::backends::{self, Backends};
use super::keys::{HELP, HELP_BACKENDS};
use super::rows::{Row, Rows, Sort, View, cells, unserved};
use proxy_view::output::Form;
use proxy_view::rates;

/// The maximum number of problems above the table.
const PROBLEMS_MAX: usize = 3;
/// The widths of the columns; the first column fills the line.
const WIDTHS: [usize; 11] = [0, 8, 9, 8, 10, 8, 8, 9, 8, 8, 8];
const GAP: usize = 2;
const NAME_WIDTH_MIN: usize = 12;
/// The columns about connections, and the minimum width of a terminal that shows them.
const CONNECT: std::ops::Range<usize> = 5..9;
const CONNECT_WIDTH: usize = 120;

/// The terminal in raw mode, on its alternate screen. Drop restores it.
pub(super) struct Screen {
    output: Stdout,
}

impl Screen {
    pub(super) fn open() -> Result<Self> {
        enable_raw_mode().context("take the terminal over")?;
        let mut screen = Self { output: stdout() };
        execute!(screen.output, EnterAlternateScreen, Hide).context("take the terminal over")?;
        Ok(screen)
    }

    pub(super) fn draw(
        &mut self,
        rows: &Rows,
        opened: Option<&Backends>,
        view: &mut View,
    ) -> Result<()> {
        let (width, height) = size().context("read the terminal's size")?;
        let width = usize::from(width);
        let height = usize::from(height);
        let lines = match opened {
            Some(opened) => lines_of_backends(rows, opened, view, width, height),
            None => lines(rows, view, width, height),
        };
        self.write(&lines).context("draw")
    }

    fn write(&mut self, lines: &[Line]) -> std::io::Result<()> {
        queue!(self.output, BeginSynchronizedUpdate)?;
        for (row, line) in (0_u16..).zip(lines) {
            // The line is cleared first: after a full line the cursor stays on the last character,
            // which clearing would erase.
            queue!(self.output, MoveTo(0, row), Clear(ClearType::CurrentLine))?;
            for (style, text) in &line.0 {
                queue!(self.output, PrintStyledContent(style.apply(text)))?;
            }
        }
        queue!(self.output, EndSynchronizedUpdate)?;
        self.output.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A closed terminal needs no restoring.
        let _left = execute!(self.output, Show, LeaveAlternateScreen);
        let _cooked = disable_raw_mode();
    }
}

/// A line of spans, each in one style.
#[derive(Debug, Default, PartialEq)]
struct Line(Vec<(ContentStyle, String)>);

impl Line {
    fn plain(text: String) -> Self {
        Self::styled(ContentStyle::new(), text)
    }

    fn styled(style: ContentStyle, text: String) -> Self {
        Self(vec![(style, text)])
    }

    /// Removes control characters, and the text beyond the terminal's width.
    fn cut(mut self, width: usize) -> Self {
        let mut room = width;
        for (_, text) in &mut self.0 {
            *text = text
                .chars()
                .filter(|letter| !letter.is_control())
                .take(room)
                .collect();
            room -= text.chars().count();
        }
        self
    }
}

fn colored(color: Color) -> ContentStyle {
    ContentStyle {
        foreground_color: Some(color),
        ..ContentStyle::new()
    }
}

fn with(attribute: Attribute) -> ContentStyle {
    ContentStyle {
        attributes: attribute.into(),
        ..ContentStyle::new()
    }
}

/// Returns the lines above a table: header, problems and reasons.
fn head(rows: &Rows) -> Vec<Line> {
    let mut lines = vec![header(rows)];
    let problems = rows.header.problems.iter().take(PROBLEMS_MAX);
    lines.extend(problems.map(|problem| Line::styled(colored(Color::Red), problem.clone())));
    lines.push(match unserved(rows) {
        Some(unserved) => Line::styled(colored(Color::Yellow), unserved),
        None => Line::plain("not served: nothing".to_owned()),
    });
    lines.push(Line::default());
    lines
}

/// Adds the last line, and cuts all lines to the screen.
fn fitted(mut lines: Vec<Line>, foot: String, width: usize, height: usize) -> Vec<Line> {
    lines.resize_with(height.saturating_sub(1).max(lines.len()), Line::default);
    lines.push(Line::styled(with(Attribute::Dim), foot));
    lines
        .into_iter()
        .map(|line| line.cut(width))
        .take(height)
        .collect()
}

/// Returns at most `height` lines: head, table and keys. Limits the cursor to the rows, and scrolls
/// to it.
fn lines(rows: &Rows, view: &mut View, width: usize, height: usize) -> Vec<Line> {
    let mut lines = head(rows);
    // Three lines hold the column names, the total and the keys.
    let room = height.saturating_sub(lines.len() + 3);
    view.cursor = view.cursor.min(rows.services.len().saturating_sub(1));
    let last = rows.services.len().saturating_sub(room);
    view.scroll = view
        .scroll
        .min(view.cursor)
        .max((view.cursor + 1).saturating_sub(room))
        .min(last);
    view.selected = rows.services.get(view.cursor).map(|row| row.name.clone());
    lines.push(column_names(view.sort, width));
    let shown = rows
        .services
        .iter()
        .enumerate()
        .skip(view.scroll)
        .take(room);
    lines.extend(shown.map(|(place, row)| {
        let cells = aligned(cells(&row.name, &row.rates, row.backends()), width);
        let mut line = Line(
            cells
                .into_iter()
                .map(|(column, cell)| (style(row, column), cell))
                .collect(),
        );
        if place == view.cursor
            && let Some((name, _)) = line.0.first_mut()
        {
            name.attributes.set(Attribute::Reverse);
        }
        line
    }));
    let filter = if view.filter.is_empty() {
        String::new()
    } else {
        format!(" of *{}*", view.filter)
    };
    let total = cells(&format!("total{filter}"), &rows.total, String::new());
    lines.push(Line(
        aligned(total, width)
            .into_iter()
            .map(|(_, cell)| (with(Attribute::Bold), cell))
            .collect(),
    ));
    let foot = if view.typing {
        format!("filter: {}_", view.filter)
    } else {
        HELP.to_owned()
    };
    fitted(lines, foot, width, height)
}

/// Returns at most `height` lines about a Service's backends.
fn lines_of_backends(
    rows: &Rows,
    opened: &Backends,
    view: &mut View,
    width: usize,
    height: usize,
) -> Vec<Line> {
    let mut lines = head(rows);
    lines.push(Line::styled(with(Attribute::Bold), opened.service.clone()));
    let form = Form {
        headers: true,
        width: u16::try_from(width).ok(),
        ..Form::default()
    };
    let text = backends::text(opened, form);
    let mut table = text.lines();
    lines.extend(
        table
            .next()
            .map(|names| Line::styled(with(Attribute::Bold), names.to_owned())),
    );
    let room = height.saturating_sub(lines.len() + 1);
    view.cursor = view.cursor.min(table.clone().count().saturating_sub(room));
    lines.extend(
        table
            .skip(view.cursor)
            .take(room)
            .map(|line| Line::plain(line.to_owned())),
    );
    fitted(lines, HELP_BACKENDS.to_owned(), width, height)
}

fn header(rows: &Rows) -> Line {
    let header = &rows.header;
    let color = match header.health {
        "healthy" => Color::Green,
        "unhealthy" => Color::Red,
        _ => Color::Yellow,
    };
    Line(vec![
        (
            with(Attribute::Bold),
            format!("kpx {} on {}: ", header.version, header.node_name),
        ),
        (colored(color), header.health.to_owned()),
        (
            ContentStyle::new(),
            format!("; {} services, {} flows", header.services, rows.total.flows),
        ),
    ])
}

/// Returns the style of a cell: red for unserved packets and failed connections, yellow for a
/// Service without backends in use.
fn style(row: &Row, column: usize) -> ContentStyle {
    let connect = &row.rates.connect;
    match column {
        4 if row.rates.unserved() > 0.0 => colored(Color::Red),
        7 if connect.refused > 0.0 => colored(Color::Red),
        8 if connect.unanswered > 0.0 => colored(Color::Red),
        10 if row.in_use == 0 => colored(Color::Yellow),
        _ => ContentStyle::new(),
    }
}

fn column_names(sort: Sort, width: usize) -> Line {
    let [
        opened,
        packets,
        bytes,
        unserved,
        p50,
        p99,
        refused,
        silent,
        flows,
    ] = rates::COLUMNS;
    let names = [
        "SERVICE", opened, packets, bytes, unserved, p50, p99, refused, silent, flows, "BACKENDS",
    ];
    let names = aligned(names.map(str::to_owned), width);
    let style = |column| {
        let mut style = with(Attribute::Bold);
        if column == sorted_by(sort) {
            style.attributes.set(Attribute::Reverse);
        }
        style
    };
    Line(
        names
            .into_iter()
            .map(|(column, name)| (style(column), name))
            .collect(),
    )
}

/// Returns the columns that fit, padded: names left-aligned, numbers right-aligned.
fn aligned(cells: [String; 11], width: usize) -> Vec<(usize, String)> {
    let is_shown = |column: &usize| width >= CONNECT_WIDTH || !CONNECT.contains(column);
    let numbers: usize = (1..WIDTHS.len())
        .filter(is_shown)
        .map(|column| WIDTHS[column] + GAP)
        .sum();
    let name_width = width.saturating_sub(numbers).max(NAME_WIDTH_MIN);
    let shown = cells
        .into_iter()
        .enumerate()
        .filter(|(column, _)| is_shown(column));
    let padded = shown.map(|(column, cell)| match column {
        0 => {
            let name: String = cell.chars().take(name_width).collect();
            (column, format!("{name:<name_width$}"))
        }
        column => (
            column,
            format!("{:GAP$}{cell:>width$}", "", width = WIDTHS[column]),
        ),
    });
    padded.collect()
}

fn sorted_by(sort: Sort) -> usize {
    match sort {
        Sort::Name => 0,
        Sort::Opened => 1,
        Sort::Packets => 2,
        Sort::Bytes => 3,
        Sort::Unserved => 4,
        Sort::Flows => 9,
    }
}

#[cfg(test)]
pub(super) fn text(rows: &Rows, view: &mut View, width: usize, height: usize) -> Vec<String> {
    let line = |line: &Line| line.0.iter().map(|(_, text)| text.as_str()).collect();
    lines(rows, view, width, height).iter().map(line).collect()
}

#[cfg(test)]
pub(super) fn text_of_backends(
    rows: &Rows,
    opened: &Backends,
    width: usize,
    height: usize,
) -> Vec<String> {
    let lines = lines_of_backends(rows, opened, &mut View::default(), width, height);
    lines
        .iter()
        .map(|line| line.0.iter().map(|(_, text)| text.as_str()).collect())
        .collect()
}

#[cfg(test)]
pub(super) fn red(rows: &Rows, view: &mut View) -> Vec<String> {
    let spans = lines(rows, view, 110, 20)
        .into_iter()
        .flat_map(|line| line.0);
    let red = spans.filter(|(style, _)| style.foreground_color == Some(Color::Red));
    red.map(|(_, text)| text.trim().to_owned()).collect()
}
