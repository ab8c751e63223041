//! Handles key presses.

use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};

use super::rows::{Sort, View};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Stay,
    Quit,
}

/// The last line of a screen of 80 columns. A column's initial is the key that sorts by it.
pub(super) const HELP: &str =
    "q quit  / filter  Enter backends  sort: Opened Packets Bytes Unserved Flows Name";
/// The last line while a Service's backends are shown.
pub(super) const HELP_BACKENDS: &str = "q quit  Esc all Services  arrows scroll";

pub(super) fn press(event: &Event, view: &mut View) -> Act {
    let Event::Key(key) = event else {
        return Act::Stay;
    };
    if key.kind == KeyEventKind::Release {
        return Act::Stay;
    }
    if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
        return Act::Quit;
    }
    if view.typing {
        edit(key.code, view);
        return Act::Stay;
    }
    let code = match key.code {
        // Terminals send a line feed as Ctrl-J.
        KeyCode::Char('j') if key.modifiers.contains(KeyModifiers::CONTROL) => KeyCode::Enter,
        KeyCode::Char(letter) => KeyCode::Char(letter.to_ascii_lowercase()),
        code => code,
    };
    match code {
        KeyCode::Char('q') => return Act::Quit,
        KeyCode::Esc | KeyCode::Backspace if view.open.is_some() => {
            (view.open, view.cursor) = (None, view.behind)
        }
        KeyCode::Esc => view.filter.clear(),
        KeyCode::Enter if view.open.is_none() && view.selected.is_some() => {
            view.open = view.selected.take();
            view.behind = std::mem::take(&mut view.cursor);
        }
        KeyCode::Char('o' | 'c') => view.sort = Sort::Opened,
        KeyCode::Char('p') => view.sort = Sort::Packets,
        KeyCode::Char('b') => view.sort = Sort::Bytes,
        KeyCode::Char('u' | 'r') => view.sort = Sort::Unserved,
        KeyCode::Char('f') => view.sort = Sort::Flows,
        KeyCode::Char('n') => view.sort = Sort::Name,
        KeyCode::Char('/') if view.open.is_none() => view.typing = true,
        KeyCode::Up => view.cursor = view.cursor.saturating_sub(1),
        KeyCode::Down => view.cursor = view.cursor.saturating_add(1),
        KeyCode::PageUp => view.cursor = view.cursor.saturating_sub(10),
        KeyCode::PageDown => view.cursor = view.cursor.saturating_add(10),
        KeyCode::Home => view.cursor = 0,
        KeyCode::End => view.cursor = usize::MAX,
        _ => {}
    }
    Act::Stay
}

/// Edits the filter. Escape clears it.
fn edit(code: KeyCode, view: &mut View) {
    match code {
        KeyCode::Enter => view.typing = false,
        KeyCode::Esc => {
            view.typing = false;
            view.filter.clear();
        }
        KeyCode::Backspace => drop(view.filter.pop()),
        KeyCode::Char(letter) => view.filter.push(letter),
        _ => {}
    }
    view.cursor = 0;
}

#[cfg(test)]
mod tests {
    use crossterm::event::KeyEvent;

    use super::*;

    fn type_in(keys: &str, view: &mut View) -> Act {
        let press = |key| {
            press(
                &Event::Key(KeyEvent::new(KeyCode::Char(key), KeyModifiers::NONE)),
                view,
            )
        };
        keys.chars().map(press).last().unwrap_or(Act::Stay)
    }

    #[test]
    fn letters_sort_rows_or_edit_the_filter() {
        let mut view = View::default();
        assert_eq!(
            (type_in("b", &mut view), view.sort),
            (Act::Stay, Sort::Bytes)
        );
        assert_eq!(
            (type_in("/qc", &mut view), view.sort),
            (Act::Stay, Sort::Bytes)
        );
        assert_eq!(view.filter, "qc");
        press(
            &Event::Key(KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE)),
            &mut view,
        );
        assert_eq!(
            press(
                &Event::Key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE)),
                &mut view
            ),
            Act::Stay
        );
        assert_eq!(view.filter, "", "Escape takes back, and does not end");
        assert_eq!(
            (type_in("U", &mut view), view.sort),
            (Act::Stay, Sort::Unserved),
            "the help shows capitals"
        );
        assert_eq!(type_in("q", &mut view), Act::Quit);
        assert!(HELP.len() <= 80, "{HELP}");
    }

    #[test]
    fn line_end_opens_the_first_service() {
        let mut view = View {
            selected: Some("shop/web".to_owned()),
            ..View::default()
        };
        let line_end = KeyEvent::new(KeyCode::Char('j'), KeyModifiers::CONTROL);
        press(&Event::Key(line_end), &mut view);
        assert_eq!(view.open.as_deref(), Some("shop/web"));
    }

    #[test]
    fn enter_opens_the_service_at_the_cursor_and_escape_goes_back() {
        let press = |code, view: &mut View| {
            press(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)), view)
        };
        let mut view = View {
            filter: "web".to_owned(),
            ..View::default()
        };
        press(KeyCode::Enter, &mut view);
        assert_eq!(view.open, None, "nothing is drawn yet");
        (view.cursor, view.selected) = (3, Some("shop/web".to_owned()));
        press(KeyCode::Enter, &mut view);
        press(KeyCode::Down, &mut view);
        press(KeyCode::Char('/'), &mut view);
        assert_eq!(
            (view.open.as_deref(), view.cursor, view.typing),
            (Some("shop/web"), 1, false)
        );
        press(KeyCode::Esc, &mut view);
        assert_eq!(
            (view.open.as_deref(), view.cursor, view.filter.as_str()),
            (None, 3, "web")
        );
        press(KeyCode::Esc, &mut view);
        assert_eq!(view.filter, "");
    }

    #[test]
    fn control_c_quits_while_filter_is_typed() {
        let mut view = View {
            typing: true,
            ..View::default()
        };
        let key = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(press(&Event::Key(key), &mut view), Act::Quit);
    }
}
