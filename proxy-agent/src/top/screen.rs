//! What is shown in a terminal.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table};

use super::keys::HELP;
use super::rows::{Rows, Sort, View, number};
use super::table::{COLUMNS, cells};

pub(super) fn draw(frame: &mut Frame<'_>, rows: &Rows, view: &mut View) {
    let [head, problems, reasons, table, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(rows.header.problems.len().min(3) as u16),
        Constraint::Length(2),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(header(rows), head);
    let lines = rows.header.problems.iter().map(|problem| Line::styled(problem.clone(), Color::Red));
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), problems);
    frame.render_widget(unserved(rows), reasons);
    services(frame, table, rows, view);
    let foot_text = if view.typing { format!("filter: {}_", view.filter) } else { HELP.to_owned() };
    frame.render_widget(Line::styled(foot_text, Modifier::DIM), foot);
}

fn header(rows: &Rows) -> Line<'static> {
    let header = &rows.header;
    let (health, color) = if header.healthy { ("healthy", Color::Green) } else { ("unhealthy", Color::Red) };
    Line::from(vec![
        Span::styled(format!("kpx {} on {}: ", header.version, header.node_name), Modifier::BOLD),
        Span::styled(health, color),
        Span::raw(format!("; {} services, {} flows", header.services, rows.total.flows)),
    ])
}

fn unserved(rows: &Rows) -> Line<'static> {
    if rows.reasons.is_empty() {
        return Line::raw("not served: nothing");
    }
    let reasons: Vec<_> = rows.reasons.iter().map(|(name, rate)| format!("{name} {}/s", number(*rate))).collect();
    Line::styled(format!("not served: {}", reasons.join(", ")), Color::Yellow)
}

fn services(frame: &mut Frame<'_>, area: Rect, rows: &Rows, view: &mut View) {
    // Beside the names of columns and the total.
    let room = usize::from(area.height.saturating_sub(2));
    view.scroll = view.scroll.min(rows.services.len().saturating_sub(room));
    let shown = rows.services.iter().skip(view.scroll).take(room);
    let lines = shown.map(|row| line(cells(&row.name, &row.rates, row.backends.clone()), Style::new()));
    let filter = if view.filter.is_empty() { String::new() } else { format!(" of *{}*", view.filter) };
    let total = line(cells(&format!("total{filter}"), &rows.total, String::new()), Style::from(Modifier::BOLD));
    let names = COLUMNS.iter().enumerate().map(|(at, name)| {
        let style = if at == sorted_by(view.sort) { Modifier::BOLD | Modifier::REVERSED } else { Modifier::BOLD };
        Cell::from(aligned(at, (*name).to_owned())).style(style)
    });
    let widths = [
        Constraint::Fill(1),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(8),
        Constraint::Length(8),
    ];
    let table = Table::new(lines.chain([total]), widths).header(TableRow::new(names)).column_spacing(2);
    frame.render_widget(table, area);
}

fn line(cells: [String; 7], style: Style) -> TableRow<'static> {
    let cells = cells.into_iter().enumerate().map(|(at, text)| Cell::from(aligned(at, text)));
    TableRow::new(cells).style(style)
}

/// Numbers to the right.
fn aligned(column: usize, text: String) -> Line<'static> {
    if column == 0 { Line::raw(text) } else { Line::raw(text).right_aligned() }
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
