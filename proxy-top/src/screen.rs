//! The full screen of `kpx top`: lines of styled text, drawn from the top left corner.

use std::io::{Stdout, Write, stdout};

use anyhow::{Context, Result};
use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::style::{Attribute, Color, ContentStyle, PrintStyledContent};
use crossterm::terminal::{
    BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode, size,
};
use crossterm::{execute, queue};

use crate::keys::HELP;
use crate::rows::{Row, Rows, Sort, View, number};
use crate::table::{COLUMNS, cells};

/// The problems that fit above the table.
const PROBLEMS_MAX: usize = 3;
/// The columns' widths; the first one takes the rest of the line.
const WIDTHS: [usize; 7] = [0, 8, 9, 8, 10, 8, 8];
const GAP: usize = 2;
/// The narrowest first column.
const NAME_WIDTH_MIN: usize = 12;

/// The terminal in raw mode, on its alternate screen. Drop gives the shell its terminal back.
pub(crate) struct Screen {
    output: Stdout,
}

impl Screen {
    pub(crate) fn open() -> Result<Self> {
        enable_raw_mode().context("take the terminal over")?;
        let mut screen = Self { output: stdout() };
        execute!(screen.output, EnterAlternateScreen, Hide).context("take the terminal over")?;
        Ok(screen)
    }

    pub(crate) fn draw(&mut self, rows: &Rows, view: &mut View) -> Result<()> {
        let (width, height) = size().context("read the terminal's size")?;
        let lines = lines(rows, view, usize::from(width), usize::from(height));
        self.write(&lines).context("draw")
    }

    fn write(&mut self, lines: &[Line]) -> std::io::Result<()> {
        queue!(self.output, BeginSynchronizedUpdate)?;
        for (row, line) in (0_u16..).zip(lines) {
            // A terminal that waits at the end of a full line would take its last character for the rest of the line.
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
        // A terminal that is gone needs no repair.
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

    /// Removes what a terminal of this width cannot show, and control characters.
    fn cut(mut self, width: usize) -> Self {
        let mut room = width;
        for (_, text) in &mut self.0 {
            *text = text.chars().filter(|letter| !letter.is_control()).take(room).collect();
            room -= text.chars().count();
        }
        self
    }
}

fn colored(color: Color) -> ContentStyle {
    ContentStyle { foreground_color: Some(color), ..ContentStyle::new() }
}

fn with(attribute: Attribute) -> ContentStyle {
    ContentStyle { attributes: attribute.into(), ..ContentStyle::new() }
}

/// Returns at most `height` lines: header, problems, reasons, table and keys. Limits the scroll position to the rows.
fn lines(rows: &Rows, view: &mut View, width: usize, height: usize) -> Vec<Line> {
    let mut lines = vec![header(rows)];
    let problems = rows.header.problems.iter().take(PROBLEMS_MAX);
    lines.extend(problems.map(|problem| Line::styled(colored(Color::Red), problem.clone())));
    lines.extend([unserved(rows), Line::default()]);
    // The names of the columns, the total and the keys stand beside the services.
    let room = height.saturating_sub(lines.len() + 3);
    view.scroll = view.scroll.min(rows.services.len().saturating_sub(room));
    lines.push(column_names(view.sort, width));
    let shown = rows.services.iter().skip(view.scroll).take(room);
    lines.extend(shown.map(|row| {
        let mut column = 0..;
        let cells = aligned(cells(&row.name, &row.rates, row.backends()), width);
        Line(cells.map(|cell| (style(row, column.next()), cell)).into())
    }));
    let filter = if view.filter.is_empty() { String::new() } else { format!(" of *{}*", view.filter) };
    let total = cells(&format!("total{filter}"), &rows.total, String::new());
    lines.push(Line(aligned(total, width).map(|cell| (with(Attribute::Bold), cell)).into()));
    let foot = if view.typing { format!("filter: {}_", view.filter) } else { HELP.to_owned() };
    lines.resize_with(height.saturating_sub(1).max(lines.len()), Line::default);
    lines.push(Line::styled(with(Attribute::Dim), foot));
    lines.into_iter().map(|line| line.cut(width)).take(height).collect()
}

fn header(rows: &Rows) -> Line {
    let header = &rows.header;
    let color = match header.health {
        "healthy" => Color::Green,
        "unhealthy" => Color::Red,
        _ => Color::Yellow,
    };
    Line(vec![
        (with(Attribute::Bold), format!("kpx {} on {}: ", header.version, header.node_name)),
        (colored(color), header.health.to_owned()),
        (ContentStyle::new(), format!("; {} services, {} flows", header.services, rows.total.flows)),
    ])
}

/// Returns the style of a row's cell: red for packets that are not served, yellow for a Service without backends in use.
fn style(row: &Row, column: Option<usize>) -> ContentStyle {
    match column {
        Some(4) if row.rates.unserved > 0.0 => colored(Color::Red),
        Some(6) if row.in_use == 0 => colored(Color::Yellow),
        _ => ContentStyle::new(),
    }
}

fn unserved(rows: &Rows) -> Line {
    if rows.reasons.is_empty() {
        return Line::plain("not served: nothing".to_owned());
    }
    let reasons: Vec<_> = rows.reasons.iter().map(|(name, rate)| format!("{name} {}/s", number(*rate))).collect();
    Line::styled(colored(Color::Yellow), format!("not served: {}", reasons.join(", ")))
}

fn column_names(sort: Sort, width: usize) -> Line {
    let names = aligned(COLUMNS.map(str::to_owned), width);
    let style = |column| {
        let mut style = with(Attribute::Bold);
        if column == sorted_by(sort) {
            style.attributes.set(Attribute::Reverse);
        }
        style
    };
    Line(names.into_iter().enumerate().map(|(column, name)| (style(column), name)).collect())
}

/// Pads the cells to their columns: names to the left, numbers to the right.
fn aligned(cells: [String; 7], width: usize) -> [String; 7] {
    let numbers: usize = WIDTHS[1..].iter().map(|width| width + GAP).sum();
    let name_width = width.saturating_sub(numbers).max(NAME_WIDTH_MIN);
    let mut column = 0..;
    cells.map(|cell| match column.next() {
        Some(0) => {
            let name: String = cell.chars().take(name_width).collect();
            format!("{name:<name_width$}")
        }
        Some(at) => format!("{:GAP$}{cell:>width$}", "", width = WIDTHS[at]),
        None => cell,
    })
}

fn sorted_by(sort: Sort) -> usize {
    match sort {
        Sort::Name => 0,
        Sort::Opened => 1,
        Sort::Packets => 2,
        Sort::Bytes => 3,
        Sort::Unserved => 4,
        Sort::Flows => 5,
    }
}

/// Returns the screen's text without its styles.
#[cfg(test)]
pub(crate) fn text(rows: &Rows, view: &mut View, width: usize, height: usize) -> Vec<String> {
    let line = |line: &Line| line.0.iter().map(|(_, text)| text.as_str()).collect();
    lines(rows, view, width, height).iter().map(line).collect()
}

/// Returns the red words of the table.
#[cfg(test)]
pub(crate) fn red(rows: &Rows, view: &mut View) -> Vec<String> {
    let spans = lines(rows, view, 110, 20).into_iter().flat_map(|line| line.0);
    let red = spans.filter(|(style, _)| style.foreground_color == Some(Color::Red));
    red.map(|(_, text)| text.trim().to_owned()).collect()
}
